"""The driver's virtual memory calls, one step each: create, share, map. All functions are local."""

from __future__ import annotations

import enum
import logging
from typing import Any

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import DriverError

logger = logging.getLogger(__name__)

#: Smallest unit in bytes that a GPU maps, on every GPU the kernels are built for. NvlinkMemory
#: checks it.
GRANULARITY = 2 * 2**20


class Sharing(enum.Enum):
    """Way of passing a handle to another process. Values are names in CUmemAllocationHandleType."""

    POSIX = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
    FABRIC = "CU_MEM_HANDLE_TYPE_FABRIC"

    @property
    def handle_type(self) -> Any:
        """Value that the driver takes."""
        return getattr(driver.api().CUmemAllocationHandleType, self.value)


def attribute(index: int, name: str) -> bool:
    """Return CU_DEVICE_ATTRIBUTE_<name> of GPU `index` as a bool."""
    number = getattr(driver.api().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return bool(driver.call("cuDeviceGetAttribute", number, driver.call("cuDeviceGet", index)))


def properties(index: int, sharing: Sharing) -> Any:
    """Return the properties of memory on GPU `index` that ranks share in this way."""
    api = driver.api()
    made = api.CUmemAllocationProp()
    made.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = index
    made.requestedHandleTypes = sharing.handle_type
    return made


def granularity(index: int, sharing: Sharing) -> int:
    """Return the bytes of which sizes and addresses of such memory must be multiples."""
    least = driver.api().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(driver.call("cuMemGetAllocationGranularity", properties(index, sharing), least))


def export_handle(sharing: Sharing, handle: Any) -> Any:
    """Return what another process imports: a descriptor, which the caller closes, or 64 bytes."""
    shared = driver.call("cuMemExportToShareableHandle", handle, sharing.handle_type, 0)
    return int(shared) if sharing is Sharing.POSIX else bytes(shared.data)


def import_handle(sharing: Sharing, shared: Any) -> Any:
    """Return a handle of another process's memory. The descriptor stays the caller's."""
    return driver.call("cuMemImportFromShareableHandle", shared, sharing.handle_type)


def allow(index: int, address: int, size_bytes: int) -> None:
    """Let GPU `index` read and write `size_bytes` bytes of mapped memory at `address`."""
    api = driver.api()
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = index
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    driver.call("cuMemSetAccess", address, size_bytes, [access], 1)


def clear(address: int, size_bytes: int) -> None:
    """Write zeros, and wait until the current context's device has finished."""
    driver.call("cuMemsetD8", address, 0, size_bytes)
    driver.call("cuCtxSynchronize")


def quietly(name: str, *arguments: Any) -> None:
    """Call the driver to undo a step; log a failure, because another error is being raised."""
    try:
        driver.call(name, *arguments)
    except DriverError as error:
        logger.warning("moe_nvlink: %s while giving memory back", error)


class FabricTrial:
    """Trial whether this GPU can share memory through FABRIC handles.

    The device attribute is not enough: without an IMEX channel it says yes, and the allocation
    fails.

    Attributes:
        blob: a handle that other ranks can try to import while this object is open; None if the
            trial failed.
        error: why the trial failed, else "".
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
        """Free the memory of the trial. Local; may be called twice."""
        if self._handle is not None:
            quietly("cuMemRelease", self._handle)
            self._handle = None
