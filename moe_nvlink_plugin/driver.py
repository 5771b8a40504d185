"""The CUDA driver through cuda-python: found first, every status checked. No call of torch.

Who needs the driver asks `unavailable()` before anything else: without libcuda, cuda.bindings
answers a call with an exception of its own kind, and some of its neighbours with a deadlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from .errors import DriverError, UnsupportedError

#: Compute capability -> architecture the kernels are compiled for. The `a` forms: FP4 conversions
#: need them from sm_100a on. griddepcontrol, which every kernel has, needs 9.0.
ARCHITECTURES = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What this package asks of a GPU.

    Attributes:
        index: the driver's ordinal in this process, as in torch.device("cuda", index).
        uuid: 32 hexadecimal digits, the same in every process.
        capability: (major, minor).
        total_bytes: memory of the device.
        is_mig: a MIG slice; NVLink does not reach it.
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
        """As NVRTC takes it.

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
    """Why no driver can be called here, or None when one can. Local; never raises."""
    try:
        api()
    except UnsupportedError as error:
        return str(error)
    return None


@functools.cache
def api() -> Any:
    """The module cuda.bindings.driver, initialised.

    Raises:
        UnsupportedError: cuda-bindings or the driver is missing, or the driver sees no GPU.
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
    except ImportError as error:
        raise UnsupportedError(
            "GPU ranks need cuda-bindings: pip install 'moe-nvlink-plugin[cuda]'"
        ) from error
    (status,) = driver.cuInit(0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(
            f"the CUDA driver does not start ({status.name}); nvidia-smi shows what it sees, and "
            "CUDA_VISIBLE_DEVICES may hide every GPU"
        )
    return driver


def call(name: str, *arguments: Any) -> Any:
    """`cuda.bindings.driver.<name>(*arguments)`: its result, a tuple of them, or None.

    Raises:
        DriverError: naming the call and the driver's status; `.status` holds the latter's name.
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
    """The newest CUDA version this driver serves, as (major, minor)."""
    version = int(call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def loads_lazily() -> bool:
    """Whether a kernel is loaded at its first launch: CUDA_MODULE_LOADING, as the driver took it
    when it was initialised.
    """
    lazy = api().CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING
    return bool(call("cuModuleGetLoadingMode") == lazy)


def num_devices() -> int:
    """GPUs this process sees."""
    return int(call("cuDeviceGetCount"))


def device(index: int) -> Device:
    """Facts about one GPU.

    Raises:
        UnsupportedError: no driver.
        DriverError: no such device.
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


@functools.cache
def _primary_context(index: int) -> Any:
    # Never released: torch uses the same one for as long as the process lives.
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


class on_device:  # noqa: N801 - used as a statement: `with driver.on_device(0):`
    """The device's primary context, which is also torch's, current in this thread for a while.

    A class of its own rather than a generator: every launch passes here, mostly with nothing to do.
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
    """Calls in it that allocate or free do not spoil a capture that has nothing to do with them.

    Without it the driver takes them for a mistake of whoever captures a CUDA graph meanwhile, in
    this thread or another, and ends the capture.
    """
    relaxed = api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
