"""The fake driver refuses what the real one refuses: else a test on it would prove nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import DriverError, UnsupportedError
from moe_nvlink_plugin.jit import host, nvrtc
from tests.fake_cuda import build, control, environment
from tests.kernels.processes import run_processes

pytestmark = pytest.mark.timeout(100)

MIB = 2**20

# Stands in for the host build of the kernels: `dispatch` adds num_ctas to a word, ten times over.
_KERNEL = """
#include <cstdint>
struct Args { uint64_t* word; uint64_t factor; };
extern "C" {
int moe_nvlink_sizeof_dispatch_args() { return sizeof(Args); }
void* moe_nvlink_grid_create(int ctas) { return new int(ctas); }
void moe_nvlink_grid_destroy(int* grid) { delete grid; }
void moe_nvlink_dispatch(const Args* args, int* grid) { *args->word += *grid * args->factor; }
}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a function of this module in a process that has the fake driver."""

    def run(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for name, value in environment(build(tmp_path), **options).items():
            monkeypatch.setenv(name, value)
        (result,) = run_processes(1, body, tmp_path, *args)
        return result

    return run


def refused(status: str, name: str, *arguments: Any) -> None:
    with pytest.raises(DriverError) as caught:
        driver.call(name, *arguments)
    assert caught.value.status == status, f"{name}: {caught.value}"


def prop(handle_type: int = 1, index: int = 0) -> Any:
    api = driver.api()
    made = api.CUmemAllocationProp()
    made.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = index
    made.requestedHandleTypes = api.CUmemAllocationHandleType(handle_type)
    return made


def access(index: int = 0) -> list[Any]:
    api = driver.api()
    made = api.CUmemAccessDesc()
    made.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = index
    made.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return [made]


def test_what_needs_no_launch(fake: Callable[..., Any]) -> None:
    """Facts, failures on demand, memory: one process after another would take its time."""
    fail = "cuDeviceTotalMem:1:CUDA_ERROR_UNKNOWN"
    fake(all_bodies, devices=3, capability="10.3", driver=13010, sms=7, fail=fail)


def all_bodies(rank: int, size: int) -> None:
    failures_body(rank, size)
    os.environ.update(FAKE_CUDA_MEMORY=str(5 * MIB), FAKE_CUDA_MIG="1")
    facts_body(rank, size)
    os.environ.update(FAKE_CUDA_MEMORY=str(8 * MIB))
    memory_body(rank, size)


def facts_body(_rank: int, _size: int) -> None:
    assert driver.unavailable() is None
    assert driver.num_devices() == 3
    assert driver.driver_version() == (13, 1)
    devices = [driver.device(index) for index in range(3)]
    assert len({device.uuid for device in devices}) == 3
    assert devices[2].architecture == "sm_103a"
    assert devices[0].num_sms == 7
    assert devices[0].total_bytes == 5 * MIB
    assert devices[0].is_mig
    os.environ["FAKE_CUDA_MIG"] = "0"
    assert not driver.device(0).is_mig
    refused("CUDA_ERROR_INVALID_DEVICE", "cuDeviceGet", 3)
    with pytest.raises(UnsupportedError, match="no cuMulticastCreate"):
        driver.call("cuMulticastCreate", driver.api().CUmulticastObjectProp())


def test_no_device(fake: Callable[..., Any]) -> None:
    reason = fake(reason_body, devices=0)
    assert "CUDA_ERROR_NO_DEVICE" in reason


def reason_body(_rank: int, _size: int) -> str | None:
    return driver.unavailable()


def memory_body(_rank: int, _size: int) -> None:
    """A map from creation to release; every misuse on the way is an error and changes nothing."""
    size = 2 * MIB
    base = int(driver.call("cuMemAddressReserve", 4 * size, 0, 0, 0))
    assert base % size == 0
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemAddressReserve", size + 4096, 0, 0, 0)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemCreate", 4096, prop(), 0)
    refused("CUDA_ERROR_OUT_OF_MEMORY", "cuMemCreate", 10 * MIB, prop(), 0)
    refused("CUDA_ERROR_NOT_SUPPORTED", "cuMemCreate", size, prop(8), 0)
    handle = driver.call("cuMemCreate", size, prop(), 0)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemMap", base + 4096, size, 0, handle, 0)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemMap", base, 2 * size, 0, handle, 0)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemMap", base, size, size, handle, 0)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemMap", base + 4 * size, size, 0, handle, 0)
    driver.call("cuMemMap", base, size, 0, handle, 0)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemMap", base, size, 0, handle, 0)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemSetAccess", base, 2 * size, access(), 1)
    refused("CUDA_ERROR_INVALID_CONTEXT", "cuMemsetD8", base, 0, size)
    with driver.on_device(0):
        refused("CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemsetD8", base, 0, size)
        driver.call("cuMemSetAccess", base, size, access(), 1)
        assert ctypes.string_at(base, 2) == b"\xcc\xcc", "fresh memory must not pass for zeroed"
        driver.call("cuMemsetD8", base, 7, size)
        refused("CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemsetD8", base + size - 1, 0, 2)
        assert driver.call("cuMemGetInfo") == (6 * MIB, 8 * MIB)
    with driver.on_device(1):  # nobody gave this one access
        refused("CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemsetD8", base, 0, size)
    share_body(base, handle)
    # The mapping keeps the memory when the handle is gone.
    driver.call("cuMemRelease", handle)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemRelease", handle)
    assert ctypes.string_at(base + size - 1, 1) == b"\7"
    with driver.on_device(0):
        assert driver.call("cuMemGetInfo") == (6 * MIB, 8 * MIB)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemAddressFree", base, 4 * size)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemUnmap", base, 2 * size)
    driver.call("cuMemUnmap", base, size)
    with driver.on_device(0):
        assert driver.call("cuMemGetInfo") == (8 * MIB, 8 * MIB)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemAddressFree", base, size)
    driver.call("cuMemAddressFree", base, 4 * size)
    assert not any(control().live().values())


def share_body(base: int, handle: Any) -> None:
    """Through a descriptor, and through a fabric handle where there is fabric."""
    api, size = driver.api(), 2 * MIB
    posix = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fabric = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemExportToShareableHandle", handle, fabric, 0)
    fd = driver.call("cuMemExportToShareableHandle", handle, posix, 0)
    imported = driver.call("cuMemImportFromShareableHandle", fd, posix)
    os.close(fd)
    driver.call("cuMemMap", base + size, size, 0, imported, 0)
    driver.call("cuMemRelease", imported)
    driver.call("cuMemSetAccess", base + size, size, access(), 1)
    assert ctypes.string_at(base + size, 1) == b"\7"
    driver.call("cuMemUnmap", base + size, size)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemImportFromShareableHandle", fd, posix)
    os.environ["FAKE_CUDA_FABRIC"] = "1"
    other = driver.call("cuMemCreate", size, prop(8), 0)
    blob = bytes(driver.call("cuMemExportToShareableHandle", other, fabric, 0).data)
    assert len(blob) == 64
    imported = driver.call("cuMemImportFromShareableHandle", blob, fabric)
    driver.call("cuMemRelease", imported)
    os.environ["FAKE_CUDA_DOMAIN"] = "1"
    refused("CUDA_ERROR_NOT_PERMITTED", "cuMemImportFromShareableHandle", blob, fabric)
    os.environ["FAKE_CUDA_DOMAIN"] = "0"
    driver.call("cuMemRelease", other)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemImportFromShareableHandle", blob, fabric)
    os.environ["FAKE_CUDA_FABRIC"] = "broken"
    refused("CUDA_ERROR_NOT_PERMITTED", "cuMemCreate", size, prop(8), 0)


_TOUCH = """
import ctypes
from moe_nvlink_plugin import driver
from tests.unit.test_fake_cuda import MIB, access, prop
base = int(driver.call("cuMemAddressReserve", 2 * MIB, 0, 0, 0))
driver.call("cuMemMap", base, 2 * MIB, 0, driver.call("cuMemCreate", 2 * MIB, prop(), 0), 0)
if {allowed}:
    driver.call("cuMemSetAccess", base, 2 * MIB, access(), 1)
ctypes.c_uint8.from_address(base).value = 1
"""


@pytest.mark.parametrize("allowed", [True, False])
def test_memory_without_access_cannot_be_touched(allowed: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TOUCH.format(allowed=allowed)],
        env={**os.environ, **environment(build(tmp_path))},
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=False,
    )
    assert done.returncode == (0 if allowed else -signal.SIGSEGV)


def failures_body(_rank: int, _size: int) -> None:
    refused("CUDA_ERROR_UNKNOWN", "cuDeviceTotalMem", driver.call("cuDeviceGet", 0))
    control().fail("cuDeviceGetCount:2:CUDA_ERROR_NOT_READY,cuDeviceGet:1:CUDA_ERROR_UNKNOWN")
    assert driver.call("cuDeviceGetCount") == 3
    refused("CUDA_ERROR_NOT_READY", "cuDeviceGetCount")
    assert driver.call("cuDeviceGetCount") == 3
    assert control().calls() == {"cuDeviceGetCount": 3}
    os.environ.pop("FAKE_CUDA_FAIL")
    control().fail()
    driver.call("cuDeviceGet", 0)


def test_launches(fake: Callable[..., Any], tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    host.compile_text(_KERNEL, library)
    fake(launch_body, kernels=library, most_ctas=3)


class _Args(ctypes.Structure):
    _fields_ = (("word", ctypes.c_void_p), ("factor", ctypes.c_uint64))


def launch_body(_rank: int, _size: int) -> None:
    api = driver.api()
    text = 'extern "C" __global__ void moe_nvlink_dispatch(int*) {}'
    cubin = nvrtc.compile_cubin(text, "sm_90a")
    refused("CUDA_ERROR_INVALID_CONTEXT", "cuModuleLoadData", cubin)
    with driver.on_device(0):
        refused("CUDA_ERROR_INVALID_IMAGE", "cuModuleLoadData", b"text" * 20)
        other = nvrtc.compile_cubin(text, "sm_100a")
        refused("CUDA_ERROR_NO_BINARY_FOR_GPU", "cuModuleLoadData", other)
        module = driver.call("cuModuleLoadData", cubin)
        refused("CUDA_ERROR_NOT_FOUND", "cuModuleGetFunction", module, b"moe_nvlink_disp")
        function = driver.call("cuModuleGetFunction", module, b"moe_nvlink_dispatch")
        driver.call("cuFuncLoad", function)
        address = int(driver.call("cuMemHostAlloc", 8, 0))
        word = ctypes.c_uint64.from_address(address)
        word.value = 0
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 2048, 1, 1
        config.hStream = api.CUstream(0x77)
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        args = _Args(address, 10)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        launch = ("cuLaunchKernelEx", config, function, ctypes.addressof(pointers), 0)
        refused("CUDA_ERROR_INVALID_VALUE", *launch)  # too many threads
        config.blockDimX = 64
        driver.call(*launch)
        assert word.value == 20
        record = control().last_launch()
        assert (record.name, record.count) == (b"moe_nvlink_dispatch", 1)
        assert (list(record.grid), list(record.block)) == ([2, 1, 1], [64, 1, 1])
        assert (record.stream, record.num_attributes, record.pdl) == (0x77, 1, 1)
        assert bytes(record.args[: record.args_bytes]) == bytes(args)
        config.gridDimX = 1000  # FAKE_CUDA_MOST_CTAS of them run
        driver.call(*launch)
        assert word.value == 50
        capture_body(word, args, launch)
        driver.call("cuMemFreeHost", address)
        driver.call("cuModuleUnload", module)
        refused("CUDA_ERROR_INVALID_HANDLE", *launch)
    refused("CUDA_ERROR_INVALID_CONTEXT", *launch)
    assert not any(control().live().values())
    assert control().modules() == 0


def capture_body(word: ctypes.c_uint64, args: _Args, launch: Any) -> None:
    """What is launched in a capture runs at the replay, with the arguments of the capture."""
    api, before = driver.api(), word.value
    os.environ["FAKE_CUDA_CAPTURING"] = "1"
    active = api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert driver.call("cuStreamIsCapturing", api.CUstream(0)) == active
    driver.call(*launch)
    args.factor = 10**6
    refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "cuStreamSynchronize", api.CUstream(0))
    refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "cuCtxSynchronize")
    os.environ["FAKE_CUDA_CAPTURING"] = "0"
    assert (word.value, control().captured()) == (before, 1)
    control().replay()
    control().replay()
    assert word.value == before + 60
    control().forget_capture()
    control().replay()
    assert word.value == before + 60
