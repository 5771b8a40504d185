"""The driver's virtual memory calls, one step each: create, share, map. All of them local."""

from __future__ import annotations

import enum
import logging
from typing import Any

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import DriverError

logger = logging.getLogger(__name__)

#: The least a GPU maps at a time, on every GPU the kernels are built for; checked when used.
GRANULARITY = 2 * 2**20


class Sharing(enum.Enum):
    """How a handle gets to another process. Values are names of CUmemAllocationHandleType."""

    POSIX = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
    FABRIC = "CU_MEM_HANDLE_TYPE_FABRIC"

    @property
    def handle_type(self) -> Any:
        """As the driver takes it."""
        return getattr(driver.api().CUmemAllocationHandleType, self.value)


def attribute(index: int, name: str) -> bool:
    """CU_DEVICE_ATTRIBUTE_<name> of a GPU, as a yes or no."""
    number = getattr(driver.api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return bool(driver.call("cuDeviceGetAttribute", number, driver.call("cuDeviceGet", index)))


def properties(index: int, sharing: Sharing) -> Any:
    """Memory of GPU `index` that can be shared that way."""
    api = driver.api()
    made = api.CUmemAllocationProp()
    made.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = index
    made.requestedHandleTypes = sharing.handle_type
    return made


def granularity(index: int, sharing: Sharing) -> int:
    """Bytes that sizes and addresses of such memory must be multiples of."""
    least = driver.api().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(driver.call("cuMemGetAllocationGranularity", properties(index, sharing), least))


def export_handle(sharing: Sharing, handle: Any) -> Any:
    """What the other process needs: a file descriptor, which the caller closes, or 64 bytes."""
    shared = driver.call("cuMemExportToShareableHandle", handle, sharing.handle_type, 0)
    return int(shared) if sharing is Sharing.POSIX else bytes(shared.data)


def import_handle(sharing: Sharing, shared: Any) -> Any:
    """A handle of another process's memory; the descriptor stays the caller's."""
    return driver.call("cuMemImportFromShareableHandle", shared, sharing.handle_type)


def allow(index: int, address: int, size_bytes: int) -> None:
    """Lets GPU `index` read and write what is mapped there."""
    api = driver.api()
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = index
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    driver.call("cuMemSetAccess", address, size_bytes, [access], 1)


def clear(address: int, size_bytes: int) -> None:
    """Zeros; the current context's device has finished when this returns."""
    driver.call("cuMemsetD8", address, 0, size_bytes)
    driver.call("cuCtxSynchronize")


def quietly(name: str, *arguments: Any) -> None:
    """A call on the way back: what it cannot undo is logged, for another error is on its way."""
    try:
        driver.call(name, *arguments)
    except DriverError as error:
        logger.warning("moe_nvlink: %s while giving memory back", error)


class FabricTrial:
    """Whether this GPU can share memory through FABRIC handles.

    It is tried: without an IMEX channel the attribute says yes, and the allocation fails.

    Attributes:
        blob: a handle for the others to try while this object is open; None where it failed.
        error: why, else "".
    """

    def __init__(self, index: int) -> None:
        self.blob: bytes | None = None
        self.error = ""
        self._handle: Any = None
        if not attribute(index, "HANDLE_TYPE_FABRIC_SUPPORTED"):
            self.error = "the driver offers no FABRIC handles for this GPU"
            return
        try:
            prop = properties(index, Sharing.FABRIC)
            self._handle = driver.call("cuMemCreate", GRANULARITY, prop, 0)
            self.blob = export_handle(Sharing.FABRIC, self._handle)
        except DriverError as error:
            self.error = str(error)

    def close(self) -> None:
        """Gives the memory back."""
        if self._handle is not None:
            quietly("cuMemRelease", self._handle)
            self._handle = None
