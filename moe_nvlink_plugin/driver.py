"""The CUDA driver through cuda-python, with every status checked. No function here calls torch.

Call `unavailable()` before anything else. If libcuda is missing, cuda.bindings raises an exception
of its own kind, and some other modules of cuda-python block forever. Every function is local.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from .errors import DriverError, UnsupportedError

#: Compute capability -> architecture that the kernels are compiled for. FP4 conversions need the
#: `a` forms from sm_100a on. Every kernel has griddepcontrol, which needs compute capability 9.0.
ARCHITECTURES = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """Facts about one GPU.

    Attributes:
        index: the driver's ordinal in this process, as in torch.device("cuda", index).
        handle: the driver's CUdevice.
        name: name that the driver gives the GPU, such as "NVIDIA H200".
        uuid: 32 hexadecimal digits, equal in every process.
        capability: compute capability, (major, minor).
        num_sms: number of SMs; a context may use fewer (`usable_sms`).
        total_bytes: bytes of device memory.
        is_mig: whether the device is a MIG slice, which NVLink does not reach.
    """

    index: int
    handle: Any
    name: str
    uuid: str
    capability: tuple[int, int]
    num_sms: int
    total_bytes: int
    is_mig: bool

    @property
    def architecture(self) -> str:
        """Architecture as NVRTC takes it, such as "sm_90a".

        Raises:
            UnsupportedError: the kernels are not built for this GPU.
        """
        found = ARCHITECTURES.get(self.capability)
        if found is None:
            known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
            raise UnsupportedError(
                f"GPU {self.index} ({self.name}) has compute capability "
                f"{self.capability[0]}.{self.capability[1]}, the kernels are built for {known}; "
                "use another all-to-all backend on this machine"
            )
        return found


def unavailable() -> str | None:
    """Return why this process cannot call the driver, or None if it can. Never raises."""
    try:
        api()
    except UnsupportedError as error:
        return str(error)
    return None


@functools.cache
def api() -> Any:
    """Return the module cuda.bindings.driver, after cuInit.

    Raises:
        UnsupportedError: cuda-bindings or the driver is missing, or the driver finds no GPU.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(
            f"no CUDA driver ({error}); install the NVIDIA driver, and in a container start it "
            "with GPU access (docker: --gpus all)"
        ) from error
    try:
        from cuda.bindings import driver
    except Exception as error:  # a broken installation may raise anything
        raise UnsupportedError(
            f"GPU ranks need cuda-bindings ({error}): pip install 'moe-nvlink-plugin[cuda]'"
        ) from error
    (status,) = driver.cuInit(0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(
            f"the CUDA driver does not start ({status.name}); nvidia-smi shows what it sees, and "
            "CUDA_VISIBLE_DEVICES may hide every GPU"
        )
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call `cuda.bindings.driver.<name>(*arguments)` and check its status.

    Returns:
        The call's result; a tuple if it has several, None if it has none.

    Raises:
        DriverError: the driver reports a failure; names the call and the status.
        UnsupportedError: there is no driver, or it is too old to have this call.
    """
    driver = api()
    try:
        status, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # cuda.bindings: 'Function "cuX" not found'
        raise UnsupportedError(
            f"this CUDA driver has no {name} ({error}); install driver 580 (CUDA 13) or newer"
        ) from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name}: {status.name}", call=name, status=status.name)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that this driver supports, as (major, minor)."""
    version = int(call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def loads_lazily() -> bool:
    """Return whether the driver loads a kernel at its first launch.

    The driver read CUDA_MODULE_LOADING when it was initialised; a later change has no effect.
    """
    lazy = api().CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING
    return bool(call("cuModuleGetLoadingMode") == lazy)


def num_devices() -> int:
    """Return how many GPUs this process sees."""
    return int(call("cuDeviceGetCount"))


def device(index: int) -> Device:
    """Ask the driver for the facts about GPU `index`.

    Raises:
        UnsupportedError: there is no driver.
        DriverError: there is no such device.
    """
    handle = call("cuDeviceGet", index)
    attribute = api().CUdevice_attribute
    major, minor, num_sms = (
        int(call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle))
        for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT")
    )
    name = call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode()
    return Device(
        index=index,
        handle=handle,
        name=name,
        uuid=bytes(call("cuDeviceGetUuid", handle).bytes).hex(),
        capability=(major, minor),
        num_sms=num_sms,
        total_bytes=int(call("cuDeviceTotalMem", handle)),
        is_mig=" MIG " in f"{name} ",
    )


def has_async_release(index: int) -> bool:
    """Return whether GPU `index` has a store that does not hold its thread (st.async.release).

    Local. False if this process has no driver. GPUs of compute capability 12 take the PTX, but for
    them it becomes the code of st.release.

    Raises:
        DriverError: there is no such device.
    """
    return unavailable() is None and device(index).capability[0] == 10


def nvml_uuid(uuid: str) -> str:
    """Return a Device.uuid as NVML writes it."""
    parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
    return "GPU-" + "-".join(parts)


@functools.cache
def _primary_context(index: int) -> Any:
    # Never released: torch uses the same context for as long as the process lives.
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


def primary_context(index: int) -> int:
    """Return the handle of a device's primary context, which on_device makes current. Makes it."""
    return int(_primary_context(index))


def usable_sms(facts: Device) -> int:
    """Return how many SMs kernels of this thread may use on a device. Makes its primary context.

    Fewer than the device has, if the primary context or a green context that is current in this
    thread is limited. A stream of a green context that is made current later is not seen. An older
    driver that cannot tell gives the device's number.
    """
    contexts = [_primary_context(facts.index)]
    current = call("cuCtxGetCurrent")
    if int(current) and int(call("cuCtxGetDevice")) == int(facts.handle):
        contexts.append(current)
    return min(facts.num_sms, *(_sms_of(context, facts.num_sms) for context in contexts))


def _sms_of(context: Any, otherwise: int) -> int:
    try:
        kind = api().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        found = int(call("cuCtxGetDevResource", context, kind).sm.smCount)
    except (AttributeError, UnsupportedError, DriverError):  # bindings or driver of before 12.4
        return otherwise
    return found or otherwise


class on_device:  # noqa: N801 - used as a statement: `with driver.on_device(0):`
    """Context manager: make the device's primary context, which torch also uses, current here.

    It applies to this thread. It is a class and not a generator, because every launch enters it and
    mostly has nothing to do.
    """

    __slots__ = ("_context", "_pushed")

    def __init__(self, index: int) -> None:
        self._context = _primary_context(index)
        self._pushed = False

    def __enter__(self) -> None:
        status, current = api().cuCtxGetCurrent()
        if status != 0 or int(current) != int(self._context):
            call("cuCtxPushCurrent", self._context)
            self._pushed = True

    def __exit__(self, *_exception: object) -> None:
        if self._pushed:
            call("cuCtxPopCurrent")


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Context manager: let calls that allocate or free run while a CUDA graph is captured.

    Without it, if any thread captures a graph meanwhile, the driver treats such a call as a mistake
    of that capture and ends the capture.
    """
    relaxed = api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
