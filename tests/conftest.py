"""Order, skips and processes of the whole suite: GPU tests only where there is a GPU, and at last
what needs the machine for itself, or nearly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.long_tests import LongTests
from tests.support.process_state import ProcessState
from tests.support.turns import Turn

if TYPE_CHECKING:
    from moe_nvlink_plugin import MoeAllToAll

#: Compilers, and models of the protocol: no clock of theirs minds that they get little of the
#: processors. They give way to the servers, and so does what their process runs after them. Ranks
#: that give each other less than a minute and a half are not here. The longest come first, but a
#: file of two or three tests before a short one: a process takes its next file two tests early.
PATIENT = (
    "tests/kernels/test_sass.py",
    "tests/ptx/test_mutants.py",
    "tests/kernels/test_assembly.py",
    "tests/kernels/test_sanitizers.py",
    "tests/kernels/test_every_nvrtc.py",
    "tests/architecture/",
    "tests/litmus/",
)
#: What runs alone, in this order: tests that see the shared memory of every process of this user or
#: measure a wait of a second; ranks that spin on a GPU and want all of it.
ALONE = (
    "tests/core/transport/test_host_transport.py",
    "tests/core/transport/test_other_ranks.py",
    "tests/gpu/",
)
#: The longest of all, one at a time, so they start first. In a single process they come last: their
#: minutes are wasted when a unit test would have told the same.
SERVERS = ("tests/integration/servers/",)
#: Set for what tests start: the cache of this run.
RUN_CACHE = "MOE_NVLINK_TESTS_CACHE_DIR"

if "PYTEST_XDIST_WORKER" in os.environ:
    # The processes of a run share the cores. A second OpenMP thread of each would spin while it
    # waits for a core that another process has. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("long tests")
    group.addoption("--shard", metavar="K/N", help="also every N-th long test, from the K-th on")
    group.addoption(
        "--record", action="store_true", help="write which long tests passed to tests/evidence.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LongTests(config))


def _is_one_of_many(config: pytest.Config) -> bool:
    """Whether this is one of the processes of `pytest -n 3`. A pytest that a test starts is not,
    though it inherits their variables.
    """
    return hasattr(config, "workerinput")


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """Compiled libraries of all the tests, those that tests themselves start among them.

    Some are of changed kernel texts and stay out of the user's cache; and what one process of the
    run has compiled no other need compile.
    """
    run = tmp_path_factory.getbasetemp()
    if _is_one_of_many(pytestconfig):
        run = run.parent
    folder = Path(os.environ.get(RUN_CACHE, run / "kernels-cache"))
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MOE_NVLINK_CACHE_DIR", RUN_CACHE):
            patch.setenv(name, str(folder))
        patch.setenv("VLLM_RPC_BASE_PATH", str(run))  # its sockets stay where they are made
        yield


@pytest.fixture(autouse=True)
def our_messages_reach_pytest() -> Iterator[None]:
    """A vLLM in this process has taken our messages to its own handlers (`vllm.logs`)."""
    ours = logging.getLogger("moe_nvlink_plugin")
    before = ours.handlers, ours.level, ours.propagate
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield
    ours.handlers, level, ours.propagate = before
    ours.setLevel(level)


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM's CPU platform edits os.environ, LD_PRELOAD included; other tests must not see it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def gpu_compiler() -> Any:
    """cuda.bindings.nvrtc, where it can compile kernels: beside a torch for CUDA 12 it cannot."""
    from moe_nvlink_plugin.errors import UnsupportedError
    from moe_nvlink_plugin.jit import nvrtc

    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        nvrtc.version()
    except UnsupportedError as error:
        pytest.skip(str(error))
    return bindings


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-MoE-like model."""
    from moe_nvlink_plugin.integration.demo.tiny_checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture
def layer() -> Iterator[MoeAllToAll]:
    """One rank's exchange with an extra payload and two channels."""
    from moe_nvlink_plugin import MoeAllToAll
    from moe_nvlink_plugin.testing import ThreadGroup
    from tests.core.exchange.small_exchange import config

    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(config(extra_payload_bytes=(6,), num_channels=2), group) as exchange:
        yield exchange


@pytest.fixture(autouse=True)
def process_stays_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Undoes what a test leaves changed in its process, and warns.

    The test does not fail: a library may change variables for good when it is first imported or
    first compiles, and which test comes first depends on timing. A fixture of a wider scope may
    change the process for as long as the fixture lives.
    """
    before = ProcessState.now()
    yield
    if changed := before.restore():
        node, told = request.node.nodeid, "; ".join(changed)
        warnings.warn(f"{node} left its process changed: {told}", stacklevel=1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Test modules import torch and vLLM, which stay: the collector need not look at a million
    objects during their import, nor at every `gc.collect` of a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    shared, own = [SERVERS, (), PATIENT, ALONE], [(), PATIENT, ALONE, SERVERS]
    kinds = shared if _is_one_of_many(config) else own
    items.sort(key=lambda item: _places(item, kinds))


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _places(item: pytest.Item, kinds: list[tuple[str, ...]]) -> tuple[int, int]:
    """Which kind a test is of, and its place among the kind's files."""
    for number, files in enumerate(kinds):
        for place, file in enumerate(files):
            if item.nodeid.startswith(file):
                return number, place
    return kinds.index(()), 0


def _group(nodeid: str) -> str:
    """What one process runs: a file's tests, with its fixtures and what it has compiled; all that
    start servers; all that run alone.
    """
    for files in (SERVERS, ALONE):
        if nodeid.startswith(files):
            return files[0]
    return nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups go to processes in their order.

    Not by --dist loadgroup: pytest 9.2 does not read the `_nodeid` that pytest-xdist 3.8 writes the
    group into, and every test is then a group.
    """
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@functools.cache
def _turn(folder: Path) -> Turn:
    return Turn(folder / "lock")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """What runs alone waits until no other process is inside a group, and holds the others up."""
    if not _is_one_of_many(item.config):
        return (yield)
    turn, group = _turn(item.config.cache.mkdir("turns")), _group(item.nodeid)
    if not turn.is_held:
        turn.take(alone=group == ALONE[0])
    try:
        return (yield)
    finally:
        if nextitem is None or _group(nextitem.nodeid) != group:
            turn.give_back()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_one_of_many(item.config) and item.nodeid.startswith(PATIENT):
        _step_back()


@functools.cache
def _step_back() -> None:
    """Servers beside this process, and what it starts, go first from now on.

    Linux may weigh sessions, not processes: then this one needs a session of its own.
    """
    with contextlib.suppress(OSError):
        os.setsid()
    os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")
