"""A CUDA driver for machines without a GPU: tests only, never in the wheel. See libcuda.cpp.

    directory = build(tmp_path)                       # holds libcuda.so.1
    env = environment(directory, kernels, devices=2)  # for a process that is yet to start

A process with that environment imports cuda.bindings as it is and finds the fake. In it,
`control()` counts what is still allocated, makes calls fail and shows the last launch. FAKE_CUDA_*
(the keywords of `environment`) are read at every call, so os.environ changes them late:

    devices (4), sms (4 each), context_sms (all; what a context may use of them),
    memory (bytes of each, 8 GiB), capability ("9.0"), driver (13000),
    mig (0), p2p (1), atomics (1: NVLink), vmm (1),
    fabric ("0", "1" or "broken": promised, but no IMEX channel),
    host (0; makes the uuids differ), shared_uuid (0),
    kernels (path of the host library), most_ctas (4; of a launch there),
    ptx (a folder of ptx.py's; instead of kernels), patience_s (150; of kernels there that wait),
    pageable (1: kernels reach all memory of the process, where tests have CPU tensors for a GPU's),
    fail ("cuMemMap:2:CUDA_ERROR_OUT_OF_MEMORY", several with commas; KILL as error: kill -9)

After a failure that a kernel would leave, such as CUDA_ERROR_ILLEGAL_ADDRESS, every later call in
that context returns it, as on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_nvlink_plugin.jit import cache, host

SOURCE = Path(__file__).with_name("libcuda.cpp")
_INCLUDE = re.compile(r'^#include "(\w+\.h)".*\n', re.MULTILINE)
_FLAGS = (
    *("-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    "-Wl,-soname,libcuda.so.1",  # so that whoever opens libcuda.so.1 later gets this one
)


@functools.cache
def _known() -> dict[str, int]:
    """Every enumerator of the driver's interface."""
    from cuda.bindings import driver

    known = {}
    for kind in (getattr(driver, name) for name in dir(driver) if name.startswith("CU")):
        # Aliases too: which of the two lists has them depends on the release of cuda-bindings.
        for member in {*dir(kind), *getattr(kind, "__members__", ())}:
            if member.startswith("CU") and hasattr(kind, "__members__"):
                known[member] = int(getattr(kind, member))
    return known


def _constants() -> Iterator[str]:
    """Those that the sources name, and all results by name."""
    text = "".join(path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]*")))
    for name in sorted(set(re.findall(r"\bCU[A-Z]*_[A-Z0-9_]+\b", text)) & _known().keys()):
        yield f"constexpr int {name} = {_known()[name]};"
    yield "const std::map<std::string, int> kResults = {"
    for name, value in sorted(_known().items()):
        if name.startswith("CUDA_"):
            yield f'  {{"{name}", {value}}},'
    yield "};"


def _included(match: re.Match[str]) -> str:
    """What stands in the place of an #include of ours: the cache knows a build by its text."""
    if match[1] == "driver_constants.h":
        return "\n".join(_constants()) + "\n"
    return SOURCE.with_name(match[1]).read_text()


def build(folder: Path) -> Path:
    """A directory with libcuda.so.1 in it; compiled on first use, then from the cache."""
    text = _INCLUDE.sub(_included, SOURCE.read_text())
    made = cache.get_or_build(
        "\0".join((text, *_FLAGS)), ".so", lambda target: host.compile_text(text, target, _FLAGS)
    )
    link = folder / "libcuda.so.1"
    link.unlink(missing_ok=True)
    link.symlink_to(made)
    return folder


def environment(library_dir: Path, kernels: Path | None = None, **options: Any) -> dict[str, str]:
    """Variables that make a new process use the fake; the options are listed above."""
    paths = [str(library_dir), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = {"LD_LIBRARY_PATH": ":".join(path for path in paths if path)}
    if kernels is not None:
        options["kernels"] = kernels
    for name, value in options.items():
        text = str(int(value)) if isinstance(value, bool) else str(value)
        variables[f"FAKE_CUDA_{name.upper()}"] = text
    return variables


@dataclasses.dataclass(frozen=True)
class LastLaunch:
    """What the driver was asked; all launches are counted."""

    name: bytes
    grid: list[int]
    block: list[int]
    shared_bytes: int
    num_attributes: int
    pdl: int
    stream: int
    count: int
    args: bytes


class Control:
    """What a test asks of the fake driver in its own process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.fake_cuda_state.restype = ctypes.c_char_p

    def _state(self) -> Any:
        return json.loads(self._library.fake_cuda_state())

    def live(self) -> dict[str, int]:
        """What has not been given back, by kind."""
        return dict(self._state()["live"])

    def modules(self) -> int:
        """Loaded and not unloaded."""
        return int(self._state()["modules"])

    def captured(self) -> int:
        """Launches kept for replay."""
        return int(self._state()["captured"])

    def calls(self) -> dict[str, int]:
        """How often each function was called since the last `fail`."""
        return dict(self._state()["calls"])

    def last_launch(self) -> LastLaunch:
        """The last one, captured or not."""
        launch = self._state()["launch"]
        name, args = launch["name"].encode(), bytes.fromhex(launch["args"])
        return LastLaunch(**launch | {"name": name, "args": args})

    def fail(self, spec: str = "") -> None:
        """Makes calls fail from now on, counted from now; "" ends it."""
        self._library.fake_cuda_fail(spec.encode())

    def replay(self) -> None:
        """Runs what was launched in captures that have ended."""
        status = self._library.fake_cuda_replay()
        assert status == 0, status

    def check_exposed(self, address: int, size_bytes: int) -> None:
        """Fails if no device may touch it: the host is about to have a tensor there."""
        size = ctypes.c_size_t(size_bytes)
        status = self._library.fake_cuda_check_exposed(ctypes.c_uint64(address), size)
        assert status == 0, f"{size_bytes} bytes at {address:#x}: {status}"

    def forget_capture(self) -> None:
        """No launches are kept any more."""
        self._library.fake_cuda_forget_capture()


@functools.cache
def control() -> Control:
    """The process's fake driver.

    Raises:
        OSError, AttributeError: this process has none, or the real one.
    """
    return Control()
