"""Words that a GPU and the host share: faults that kernels write, words of peers that are read."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from typing import Any

import torch

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import MoeNvlinkError
from moe_nvlink_plugin.jit.header import structs

logger = logging.getLogger(__name__)


class MappedFaultWords:
    """Words in the host's memory, to which the GPU writes directly."""

    def __init__(self, index: int, count: int) -> None:
        flags = driver.api().CU_MEMHOSTALLOC_PORTABLE | driver.api().CU_MEMHOSTALLOC_DEVICEMAP
        with driver.on_device(index):
            address = int(driver.call("cuMemHostAlloc", 8 * count, flags))
            self._device_address = int(driver.call("cuMemHostGetDevicePointer", address, 0))
        self.words = (ctypes.c_uint64 * count).from_address(address)
        for channel in range(count):
            self.words[channel] = 0
        self._free = weakref.finalize(self, _free_host_memory, index, address)
        self._free.atexit = False

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        field: Any = structs()["LocalControl"].host_fault
        address = self._device_address + 8 * channel
        # The caller may have set another default device.
        word = torch.tensor([address], dtype=torch.int64, device="cpu")
        local_control[field.offset : field.offset + 8].copy_(word.view(torch.uint8))

    def clear(self, channel: int) -> None:
        self.words[channel] = 0

    def leak(self) -> None:
        self._free.detach()


class SideStreamReader:
    """Copies words to pinned memory on a stream of its own, which waits for no other stream.

    The thread that copies is in the relaxed mode meanwhile, so the copy is no mistake of a capture
    in another thread.
    """

    def __init__(self, index: int, most: int) -> None:
        self._index, self._lock = index, threading.Lock()
        # Allocated now: an allocation may wait for the device, and later kernels may be running.
        with driver.on_device(index):
            self._address = int(driver.call("cuMemHostAlloc", 8 * most, 0))
            self._free = weakref.finalize(self, _free_host_memory, index, self._address)
            self._free.atexit = False
            flag = driver.api().CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = driver.call("cuStreamCreate", flag)
            weakref.finalize(self, _destroy_stream, index, self._stream).atexit = False
        self._words = (ctypes.c_uint64 * most).from_address(self._address)

    def read(self, address: int, count: int) -> list[int]:
        with self._lock, driver.on_device(self._index), driver.relaxed_capture():
            driver.call("cuMemcpyDtoHAsync", self._address, address, 8 * count, self._stream)
            driver.call("cuStreamSynchronize", self._stream)
            return self._words[:count]


def _destroy_stream(index: int, stream: Any) -> None:
    """Give up a reader's stream after its last user has gone."""
    try:
        with driver.on_device(index), driver.relaxed_capture():
            driver.call("cuStreamDestroy", stream)
    except MoeNvlinkError as error:  # a finalizer cannot raise
        logger.warning("moe_nvlink: a stream of GPU %d stays open: %s", index, error)


def _free_host_memory(index: int, address: int) -> None:
    """Free pinned words after their last user has gone.

    The garbage collector may call this while a thread captures a CUDA graph that does not use the
    words.
    """
    try:
        with driver.on_device(index), driver.relaxed_capture():
            driver.call("cuMemFreeHost", address)
    except MoeNvlinkError as error:  # a finalizer cannot raise; few words are lost
        logger.warning("moe_nvlink: pinned words of GPU %d stay allocated: %s", index, error)
