"""Order, skips and processes of the whole suite: GPU tests only where there is a GPU, and at last
what needs the machine for itself, or nearly.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

#: Compilers, and models of the protocol: no clock of theirs minds that they get little of the
#: processors. They run beside servers, which wait for each other much of the time. Not here: ranks
#: that give each other less than a minute and a half.
PATIENT = (
    "tests/architecture/",
    "tests/litmus/",
    "tests/kernels/test_assembly.py",
    "tests/kernels/test_combine_nvrtc.py",
    "tests/kernels/test_every_nvrtc.py",
    "tests/kernels/test_head_nvrtc.py",
    "tests/kernels/test_nvrtc.py",
    "tests/kernels/test_sanitizers.py",
)
#: What runs alone, in this order: tests that see the shared memory of every process of this user or
#: measure a wait of a second; ranks that spin on a GPU and want all of it.
ALONE = (
    "tests/unit/test_host_transport.py",
    "tests/unit/test_other_ranks.py",
    "tests/gpu/",
)
#: Servers fill two cores by themselves, and their minutes are wasted when a unit test would have
#: told the same.
SERVERS = ("tests/integration/",)
#: Set for what tests start: the cache of this run.
RUN_CACHE = "MOE_NVLINK_TESTS_CACHE_DIR"


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled libraries of all the tests, those that tests themselves start among them.

    Some are of changed kernel texts and stay out of the user's cache; and what one process of the
    run has compiled no other need compile.
    """
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    folder = Path(os.environ.get(RUN_CACHE, run / "kernels-cache"))
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MOE_NVLINK_CACHE_DIR", RUN_CACHE):
            patch.setenv(name, str(folder))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    last: list[str | tuple[str, ...]] = [SERVERS, *reversed(ALONE), PATIENT]
    items.sort(key=lambda item: [item.nodeid.startswith(place) for place in last])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and item.nodeid.startswith(PATIENT):
        _step_back()


@functools.cache
def _step_back() -> None:
    """Servers beside this process, and what it starts, go first from now on.

    Linux may weigh sessions, not processes: then this one needs a session of its own.
    """
    with contextlib.suppress(OSError):
        os.setsid()
    os.nice(10)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `pytest -n 2`: files go to processes in the order above."""
    from tests.scheduler import FilesThenAlone, Kinds

    config.option.loadscopereorder = False
    return FilesThenAlone(Kinds(PATIENT, SERVERS, ALONE), config, log)
