"""Transports for processes with the fake driver: CPU tensors over "device" memory, or over that of
the host transport. `install` makes both known by their names. `capturing` is torch.cuda.graph().
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from moe_nvlink_plugin import driver, plugins
from moe_nvlink_plugin.groups import Group
from moe_nvlink_plugin.launch import cuda
from moe_nvlink_plugin.launch.cuda import CudaExecutor
from moe_nvlink_plugin.plugins import hookimpl
from moe_nvlink_plugin.transport import Transport
from moe_nvlink_plugin.transport.host import HostTransport
from moe_nvlink_plugin.transport.nvlink import NvlinkTransport, View

from . import control


class FakeNvlinkTransport(NvlinkTransport):
    """Rank r uses GPU r, or the GPU of its device's index. For processes with the fake driver.

    The host may touch what it has views of: torch's CPU kernels are the GPU's here.
    """

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def _device_index(self, device: torch.device, group: Group) -> int:
        driver.api()
        return group.rank if device.index is None else device.index

    def _view(self, device: torch.device) -> View:
        return _cpu_view


def _cpu_view(owner: object, address: int, size_bytes: int) -> torch.Tensor:
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    control().check_exposed(address, size_bytes)
    array: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    array._owner = owner
    return torch.frombuffer(array, dtype=torch.uint8)


class OnFakeDriver(FakeNvlinkTransport):
    """The same beside the real one, which has the name "nvlink"."""

    name = "on_fake_driver"


class LaunchedByDriver(HostTransport):
    """Shared memory of CPU ranks, kernels through the CUDA executor."""

    name = "launched_by_driver"
    executor = "cuda"


class _Plugin:
    @hookimpl
    def moe_nvlink_transports(self) -> list[Transport]:
        return [OnFakeDriver(), LaunchedByDriver()]


class _Current(threading.local):
    stream = 0


_current = _Current()


def _gpu_of_process() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class OnRanksGpu(CudaExecutor):
    """CPU tensors are the GPU's of their process's rank; their stream is what `capturing` says."""

    def __init__(self, device: torch.device) -> None:
        if device == torch.device("cpu"):
            device = torch.device("cpu", _gpu_of_process())
        super().__init__(device)

    def stream(self) -> int:
        return super().stream() or _current.stream


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """This thread's launches go to a stream of their own and are captured, for
    `control().replay()`. As torch.cuda.graph(), but that torch's kernels run at once.

    Raises:
        DriverError: at the end, if a call meanwhile broke the capture.
    """
    api, gpu = driver.api(), _gpu_of_process()
    with driver.on_device(gpu):
        stream = driver.call("cuStreamCreate", api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        driver.call("cuStreamBeginCapture", stream, mode)
    _current.stream = int(stream)
    try:
        yield
    finally:
        _current.stream = 0
        with driver.on_device(gpu):
            try:
                driver.call("cuStreamEndCapture", stream)
            finally:
                driver.call("cuStreamDestroy", stream)


def install() -> None:
    """Registers OnFakeDriver and LaunchedByDriver in this process, and OnRanksGpu; once."""
    plugins.manager().register(_Plugin())
    setattr(cuda, "CudaExecutor", OnRanksGpu)  # noqa: B010 - to the type checker it is no variable
