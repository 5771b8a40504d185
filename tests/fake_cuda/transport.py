"""Transports for processes with the fake driver: CPU tensors over "device" memory, or over that of
the host transport. `install` makes both known by their names.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moe_nvlink_plugin import driver, plugins
from moe_nvlink_plugin.groups import Group
from moe_nvlink_plugin.hookspecs import hookimpl
from moe_nvlink_plugin.transport import Transport
from moe_nvlink_plugin.transport.host import HostTransport
from moe_nvlink_plugin.transport.nvlink import NvlinkTransport, View


class FakeNvlinkTransport(NvlinkTransport):
    """Rank r uses GPU r, or the GPU of its device's index. For processes with the fake driver."""

    def serves(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def _device_index(self, device: torch.device, group: Group) -> int:
        driver.api()
        return group.rank if device.index is None else device.index

    def _view(self, device: torch.device) -> View:
        return _cpu_view


def _cpu_view(owner: object, address: int, size_bytes: int) -> torch.Tensor:
    array: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    array._owner = owner
    return torch.frombuffer(array, dtype=torch.uint8) if size_bytes else torch.empty(0).byte()


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


def install() -> None:
    """Registers OnFakeDriver and LaunchedByDriver in this process; once."""
    plugins.manager().register(_Plugin())
