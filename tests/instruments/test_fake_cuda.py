"""The fake driver refuses what the real one refuses: else a test on it would prove nothing."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import DriverError, UnsupportedError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host, nvrtc
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.lm_head.kernels import HEAD
from tests.support.fake_cuda import build, control, environment, ptx
from tests.support.ranks import run_processes
from tests.support.sass import cuobjdump

pytestmark = pytest.mark.long

MIB = 2**20


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


def read(address: int, size: int = 1) -> bytes:
    """Device memory, in the current context."""
    buffer = ctypes.create_string_buffer(size)
    driver.call("cuMemcpyDtoH", ctypes.addressof(buffer), address, size)
    return buffer.raw


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
        refused("CUDA_ERROR_INVALID_VALUE", "cuMemsetD8", base, 0, size)
        driver.call("cuMemSetAccess", base, size, access(), 1)
        assert read(base, 2) == b"\xcc\xcc", "fresh memory must not pass for zeroed"
        driver.call("cuMemsetD8", base, 7, size)
        refused("CUDA_ERROR_INVALID_VALUE", "cuMemsetD8", base + size - 1, 0, 2)
        assert driver.call("cuMemGetInfo") == (6 * MIB, 8 * MIB)
    with driver.on_device(1):  # nobody gave this one access
        refused("CUDA_ERROR_INVALID_VALUE", "cuMemsetD8", base, 0, size)
    peers_body(base)
    share_body(base, handle)
    # The mapping keeps the memory when the handle is gone.
    driver.call("cuMemRelease", handle)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemRelease", handle)
    with driver.on_device(0):
        assert read(base + size - 1) == b"\7"
        assert driver.call("cuMemGetInfo") == (6 * MIB, 8 * MIB)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemAddressFree", base, 4 * size)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemUnmap", base, 2 * size)
    driver.call("cuMemUnmap", base, size)
    with driver.on_device(0):
        assert driver.call("cuMemGetInfo") == (8 * MIB, 8 * MIB)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemAddressFree", base, size)
    driver.call("cuMemAddressFree", base, 4 * size)
    assert not any(control().live().values())


def peers_body(base: int) -> None:
    """GPU 0's memory: other GPUs of the host need peer-to-peer access, and the CPU gets none."""
    os.environ["FAKE_CUDA_P2P"] = "0"
    refused("CUDA_ERROR_INVALID_DEVICE", "cuMemSetAccess", base, 2 * MIB, access(1), 1)
    both = access(0) + access(1)
    refused("CUDA_ERROR_INVALID_DEVICE", "cuMemSetAccess", base, 2 * MIB, both, 2)
    driver.call("cuMemSetAccess", base, 2 * MIB, access(0), 1)
    del os.environ["FAKE_CUDA_P2P"]
    with driver.on_device(1):
        refused("CUDA_ERROR_INVALID_VALUE", "cuMemsetD8", base, 7, 1)
        driver.call("cuMemSetAccess", base, 2 * MIB, access(1), 1)
        driver.call("cuMemsetD8", base, 7, 1)
    host = access(0)
    host[0].location.type = driver.api().CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemSetAccess", base, 2 * MIB, host, 1)


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
    with driver.on_device(0):
        assert read(base + size) == b"\7"
    driver.call("cuMemUnmap", base + size, size)
    refused("CUDA_ERROR_INVALID_VALUE", "cuMemImportFromShareableHandle", fd, posix)
    with open(os.devnull) as other_file:
        number = other_file.fileno()
        refused("CUDA_ERROR_INVALID_VALUE", "cuMemImportFromShareableHandle", number, posix)
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
from tests.support.fake_cuda import control
from tests.instruments.test_fake_cuda import MIB, access, prop
base = int(driver.call("cuMemAddressReserve", 2 * MIB, 0, 0, 0))
driver.call("cuMemMap", base, 2 * MIB, 0, driver.call("cuMemCreate", 2 * MIB, prop(), 0), 0)
driver.call("cuMemSetAccess", base, 2 * MIB, access(), 1)
with driver.on_device(0):
    other = int(driver.call("cuMemAlloc", 4096))
    driver.call("cuMemsetD8", base, 0, 2 * MIB)  # opens it meanwhile
{line}
"""

_BYTE = "ctypes.c_uint8.from_address({}).value = 1"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (_BYTE.format("base"), -signal.SIGSEGV),
        (_BYTE.format("other"), -signal.SIGSEGV),
        (f"control().expose(base, 1); {_BYTE.format('base')}", 0),
    ],
    ids=["mapped", "allocated", "exposed"],
)
def test_the_host_cannot_touch_device_memory(line: str, status: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TOUCH.format(line=line)],
        env={**os.environ, **environment(build(tmp_path))},
        cwd=Path(__file__).parents[2],
        timeout=600,
        check=False,
    )
    assert done.returncode == status


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


# Stands in for the host build of the kernels: `dispatch` adds num_ctas to a word, ten times over.
# What NVRTC compiles has the same arguments and many registers, or another struct.
_KERNEL = """
#include <cstdint>
struct Args { uint64_t* word; uint64_t factor; };
extern "C" {
int moe_nvlink_sizeof_dispatch_args() { return sizeof(Args); }
int moe_nvlink_sizeof_drifted_args() { return sizeof(Args); }
int moe_nvlink_sizeof_large_args() { return 32000; }
void* moe_nvlink_grid_create(int ctas) { return new int(ctas); }
void moe_nvlink_grid_destroy(int* grid) { delete grid; }
void moe_nvlink_dispatch(const Args* args, int* grid) { *args->word += *grid * args->factor; }
void moe_nvlink_drifted(const Args*, int*) {}
void moe_nvlink_large(const char* args, int*) { **(char**)args = args[31999]; }
}
"""

_ON_GPU = """
struct Args { unsigned long long* word; unsigned long long factor; };
struct Drifted { unsigned long long* word; unsigned long long factor; int more; };
struct Large { char* word; char bytes[31992]; };
extern "C" __global__ void moe_nvlink_dispatch(Args args) {
  if (threadIdx.x == 0) atomicAdd(args.word, args.factor);
}
extern "C" __global__ void moe_nvlink_drifted(Drifted args) { *args.word += args.more; }
extern "C" __global__ void moe_nvlink_large(Large args) { *args.word = args.bytes[31991]; }
"""


@pytest.fixture
def with_kernels(
    request: pytest.FixtureRequest, fake: Callable[..., Any], tmp_path: Path
) -> Callable[..., Any]:
    """As `fake`, with the host build of the kernels above; with the parameter "ptx", their PTX."""
    if getattr(request, "param", "host") == "ptx":
        folder = ptx.prepare(tmp_path / "ptx", [ptx.Unit(_ON_GPU)])
        return functools.partial(fake, ptx=folder, sms=2)
    library = tmp_path / "kernels.so"
    host.compile_text(_KERNEL, library)
    return functools.partial(fake, kernels=library, most_ctas=3, sms=2)


class _Args(ctypes.Structure):
    _fields_ = (("word", ctypes.c_void_p), ("factor", ctypes.c_uint64))


@functools.cache
def module() -> Any:
    return driver.call("cuModuleLoadData", nvrtc.load_or_compile(_ON_GPU, "sm_90a"))


def function(name: str) -> Any:
    return driver.call("cuModuleGetFunction", module(), f"moe_nvlink_{name}".encode())


def words() -> tuple[int, ctypes.c_uint64]:
    """Eight bytes that host and device may touch."""
    address = int(driver.call("cuMemHostAlloc", 8, 0))
    word = ctypes.c_uint64.from_address(address)
    word.value = 0
    return address, word


def configured(
    grid: tuple[int, ...] = (1, 1, 1),
    block: tuple[int, ...] = (64, 1, 1),
    stream: Any = 0,
    **attributes: int,
) -> Any:
    """CUlaunchConfig. attributes: programmaticStreamSerializationAllowed=1, cooperative=1, ..."""
    api = driver.api()
    ids = api.CUlaunchAttributeID
    numbers = {
        "programmaticStreamSerializationAllowed": ids(6),
        "cooperative": ids(2),
        "priority": ids(8),
    }
    made = api.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = grid
    made.blockDimX, made.blockDimY, made.blockDimZ = block
    made.hStream = api.CUstream(int(stream))
    made.attrs = []
    for name, value in attributes.items():
        attribute = api.CUlaunchAttribute()
        attribute.id = numbers[name]
        setattr(attribute.value, name, value)
        made.attrs = [*made.attrs, attribute]
    made.numAttrs = len(attributes)
    return made


def launch_of(config: Any, kernel: Any, args: Any) -> tuple[Any, ...]:
    """Arguments of driver.call; `keep` what they point to."""
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    keep.append((pointers, args))
    return "cuLaunchKernelEx", config, kernel, ctypes.addressof(pointers), 0


keep: list[Any] = []


def test_launches(with_kernels: Callable[..., Any]) -> None:
    with_kernels(launch_body)


def launch_body(_rank: int, _size: int) -> None:
    cubin = nvrtc.compile_cubin(_ON_GPU, "sm_90a", strict=False)
    refused("CUDA_ERROR_INVALID_CONTEXT", "cuModuleLoadData", cubin)
    with driver.on_device(0):
        loading_body()
        kernel = function("dispatch")
        driver.call("cuFuncLoad", kernel)
        address, word = words()
        args = _Args(address, 10)
        pdl: dict[str, Any] = {"programmaticStreamSerializationAllowed": 1}
        driver.call(*launch_of(configured((2, 1, 1), **pdl), kernel, args))
        assert word.value == 20
        record = control().last_launch()
        assert (record.name, record.count) == (b"moe_nvlink_dispatch", 1)
        assert (list(record.grid), list(record.block)) == ([2, 1, 1], [64, 1, 1])
        assert (record.stream, record.num_attributes, record.pdl) == (0, 1, 1)
        assert bytes(record.args[: record.args_bytes]) == bytes(args)
        # FAKE_CUDA_MOST_CTAS of them run
        launch = launch_of(configured((1000, 1, 1)), kernel, args)
        driver.call(*launch)
        assert word.value == 50
        shapes_body(kernel, args)
        arguments_body(address, word)
        assert word.value == 7
        driver.call("cuMemFreeHost", address)
        driver.call("cuModuleUnload", module())
        refused("CUDA_ERROR_INVALID_HANDLE", *launch)
    refused("CUDA_ERROR_INVALID_CONTEXT", *launch)
    assert not any(control().live().values())
    assert control().modules() == 0


def loading_body() -> None:
    """What a GPU of 9.0, then of 10.3, can load."""
    refused("CUDA_ERROR_INVALID_IMAGE", "cuModuleLoadData", b"text" * 20)
    refused("CUDA_ERROR_NOT_FOUND", "cuModuleGetFunction", module(), b"moe_nvlink_disp")
    text = 'extern "C" __global__ void some(int*) {}'
    cubins = {name: nvrtc.compile_cubin(text, name) for name in ("sm_90", "sm_100", "sm_100a")}
    for capability, fits in (
        ("9.0", {"sm_90"}),
        ("10.0", {"sm_100", "sm_100a"}),
        ("10.3", {"sm_100"}),
    ):
        os.environ["FAKE_CUDA_CAPABILITY"] = capability
        for name, cubin in cubins.items():
            if name in fits:
                driver.call("cuModuleUnload", driver.call("cuModuleLoadData", cubin))
            else:
                refused("CUDA_ERROR_NO_BINARY_FOR_GPU", "cuModuleLoadData", cubin)
    del os.environ["FAKE_CUDA_CAPABILITY"]


def shapes_body(kernel: Any, args: _Args) -> None:
    """Each bound, just kept and just broken."""
    invalid = "CUDA_ERROR_INVALID_VALUE"
    bounds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"block": (1024, 1, 1)}, {"block": (1025, 1, 1)}),
        ({"block": (1, 1024, 1)}, {"block": (1, 1025, 1)}),
        ({"block": (1, 1, 64)}, {"block": (1, 1, 65)}),
        ({"block": (8, 8, 16)}, {"block": (8, 8, 17)}),
        ({"block": (1, 1, 1)}, {"block": (1, 0, 1)}),
        ({"grid": (2**31 - 1, 1, 1)}, {"grid": (2**31, 1, 1)}),
        ({"grid": (1, 65535, 1)}, {"grid": (1, 65536, 1)}),
        ({"grid": (1, 1, 65535)}, {"grid": (1, 1, 65536)}),
        ({"grid": (1, 1, 1)}, {"grid": (0, 1, 1)}),
    ]
    for good, bad in bounds:
        driver.call(*launch_of(configured(**good), kernel, args))
        refused(invalid, *launch_of(configured(**bad), kernel, args))
    # Two SMs hold 32 CTAs of 64 threads each, when registers do not matter.
    driver.call(*launch_of(configured((32, 2, 1), cooperative=1), kernel, args))
    too_large = launch_of(configured((65, 1, 1), cooperative=1), kernel, args)
    refused("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", *too_large)
    driver.call(*launch_of(configured((65, 1, 1), cooperative=0), kernel, args))
    refused(invalid, *launch_of(configured(priority=0), kernel, args))
    both: dict[str, Any] = {"cooperative": 1, "programmaticStreamSerializationAllowed": 1}
    refused(invalid, *launch_of(configured(**both), kernel, args))
    dynamic = configured()
    dynamic.sharedMemBytes = 49153
    refused(invalid, *launch_of(dynamic, kernel, args))
    refused("CUDA_ERROR_INVALID_HANDLE", *launch_of(configured(stream=0x77), kernel, args))


def arguments_body(address: int, word: ctypes.c_uint64) -> None:
    """As many bytes as NVRTC's struct has; it must be the host build's. More than 4096 may be."""
    drifted = launch_of(configured(), function("drifted"), (ctypes.c_uint64 * 3)(address, 1, 1))
    refused("CUDA_ERROR_INVALID_VALUE", *drifted)
    word.value, large = 0, (ctypes.c_uint8 * 32000)()
    ctypes.c_uint64.from_buffer(large).value = address
    large[31999] = 7
    driver.call(*launch_of(configured(), function("large"), large))
    assert control().last_launch().args_bytes == 32000


# What an SM holds.


#: (threads, registers, static shared bytes) -> CTAs on 9.0, 10.3 and 12.0; what NVIDIA's
#: cuda_occupancy.h of CUDA 13.0 computes.
RESIDENT = {
    (32, 8, 0): (32, 32, 24),
    (64, 16, 0): (32, 32, 24),
    (96, 32, 0): (21, 21, 16),
    (128, 40, 0): (12, 12, 12),
    (96, 33, 0): (16, 16, 16),
    (128, 41, 0): (10, 10, 10),
    (160, 54, 400): (7, 7, 7),
    (224, 64, 528): (4, 4, 4),
    (256, 54, 2440): (4, 4, 4),
    (256, 32, 10000): (8, 8, 6),
    (512, 64, 40000): (2, 2, 2),
    (736, 80, 0): (1, 1, 1),
    (928, 64, 0): (1, 1, 1),
    (928, 72, 0): (0, 0, 0),
    (1024, 54, 20000): (1, 1, 1),
    (32, 255, 0): (8, 8, 8),
    (64, 8, 48000): (4, 4, 2),
}


def test_occupancy_of_kernels_with_few_and_many_registers(fake: Callable[..., Any]) -> None:
    assert fake(resident_body) == RESIDENT


def resident_body(_rank: int, _size: int) -> dict[Any, Any]:
    return {
        given: tuple(control().resident(major, *given) for major in (9, 10, 12))
        for given in RESIDENT
    }


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_what_the_products_cubins_say(
    architecture: str, fake: Callable[..., Any], tmp_path: Path
) -> None:
    """Registers and shared memory as cuobjdump reads them; arguments as Python packs them."""
    variants = (LAYER.variant(top_k=8, dtype="bf16"), HEAD.variant(dtype="bf16"))
    cubins = {
        build.kernel.entry: machine_code.cubin_for(build, architecture, variant)
        for variant in variants
        for build in variant.builds(pdl=True)
    }
    number = architecture.removeprefix("sm_").removesuffix("a")
    seen = fake(cubins_body, cubins, capability=f"{number[:-1]}.{number[-1]}")
    expected = {}
    for cubin in cubins.values():
        lines = re.findall(
            r"Function (\w+):\n *REG:(\d+) .*?SHARED:(\d+)", cuobjdump(cubin, "-res-usage")
        )
        for name, registers, shared in lines:
            kind = "Head" if "head" in name else name.rpartition("_")[2].capitalize()
            args_bytes = ctypes.sizeof(structs()[f"{kind}Args"])
            # Of a kernel without shared memory, the cubin does not count what the driver reserves.
            expected[name] = (int(registers), max(int(shared) - 1024, 0), (0, args_bytes))
    assert expected.keys() == cubins.keys()
    assert seen == expected


def cubins_body(_rank: int, _size: int, cubins: dict[str, bytes]) -> dict[str, tuple[Any, ...]]:
    attribute = driver.api().CUfunction_attribute
    found = {}
    for name, cubin in cubins.items():
        with driver.on_device(0):
            loaded = driver.call("cuModuleLoadData", cubin)
            kernel = driver.call("cuModuleGetFunction", loaded, name.encode())
            found[name] = (
                driver.call("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, kernel),
                driver.call(
                    "cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel
                ),
                driver.call("cuFuncGetParamInfo", kernel, 0),
            )
    return found


# Captures.


@pytest.mark.parametrize("with_kernels", ["host", ptx.LONG], indirect=True)
def test_captures(with_kernels: Callable[..., Any]) -> None:
    with_kernels(captures_body)


def captures_body(_rank: int, _size: int) -> None:
    with driver.on_device(0):
        address, word = words()
        replays_body(address, word)
        modes_body(function("dispatch"), _Args(address, 1))
        waits_body()
        legacy_body(function("dispatch"), _Args(address, 1))
        driver.call("cuMemFreeHost", address)


def status_of(stream: Any) -> int:
    return int(driver.call("cuStreamIsCapturing", stream))


def stream_of(flags: int = 1) -> Any:
    """1: not blocking, as torch's streams are; 0: waits for the default stream."""
    return driver.call("cuStreamCreate", flags)


def begin(stream: Any, mode: str = "GLOBAL") -> None:
    modes = driver.api().CUstreamCaptureMode
    driver.call("cuStreamBeginCapture", stream, getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}"))


def replays_body(address: int, word: ctypes.c_uint64) -> None:
    """A stream of its own captures, with the arguments of the launch; others run."""
    captures, other, kernel = stream_of(), stream_of(), function("dispatch")
    refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", *begin_of(driver.api().CUstream(0)))
    begin(captures)
    refused("CUDA_ERROR_ILLEGAL_STATE", *begin_of(captures))
    args = _Args(address, 10)
    driver.call(*launch_of(configured((2, 1, 1), stream=captures), kernel, args))
    assert (word.value, status_of(captures), status_of(other)) == (0, 1, 0)
    driver.call(*launch_of(configured(stream=other), kernel, args))
    assert word.value == 10
    args.factor = 10**6
    assert control().captured() == 0
    driver.call("cuStreamEndCapture", captures)
    assert (control().captured(), status_of(captures)) == (1, 0)
    control().replay()
    control().replay()
    assert word.value == 50
    control().forget_capture()
    control().replay()
    assert word.value == 50
    refused("CUDA_ERROR_ILLEGAL_STATE", "cuStreamEndCapture", captures)


def begin_of(stream: Any) -> tuple[Any, ...]:
    mode = driver.api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    return "cuStreamBeginCapture", stream, mode


#: (capture's mode, mode of the thread that allocates) -> whether it may: in the same thread as the
#: capture, and in another; as cuThreadExchangeStreamCaptureMode says.
MAY_ALLOCATE = {
    ("GLOBAL", "GLOBAL"): (False, False),
    ("GLOBAL", "THREAD_LOCAL"): (False, True),
    ("GLOBAL", "RELAXED"): (True, True),
    ("THREAD_LOCAL", "GLOBAL"): (False, True),
    ("THREAD_LOCAL", "THREAD_LOCAL"): (False, True),
    ("THREAD_LOCAL", "RELAXED"): (True, True),
    ("RELAXED", "GLOBAL"): (True, True),
    ("RELAXED", "THREAD_LOCAL"): (True, True),
    ("RELAXED", "RELAXED"): (True, True),
}


def modes_body(kernel: Any, args: _Args) -> None:
    """A call that may not be made is refused, and ends the capture."""
    for (capture, thread), may in MAY_ALLOCATE.items():
        for same, allowed in zip((True, False), may, strict=True):
            stream = stream_of()
            begin(stream, capture)
            if same:
                status = allocate(thread)
            else:
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    status = pool.submit(allocate, thread).result()
            expected = "" if allowed else "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
            assert status == expected, (capture, thread, same)
            assert status_of(stream) == (1 if allowed else 2)
            if allowed:
                driver.call("cuStreamEndCapture", stream)
                continue
            launch = launch_of(configured(stream=stream), kernel, args)
            invalidated = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
            refused(invalidated, *launch)
            refused(invalidated, "cuStreamEndCapture", stream)
            driver.call(*launch)  # the stream is as any other again


def allocate(mode: str) -> str:
    """The status of cuMemAlloc in a thread of that mode; then the mode is as it was."""
    modes = driver.api().CUstreamCaptureMode
    wanted = getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}")
    with driver.on_device(0):
        before = driver.call("cuThreadExchangeStreamCaptureMode", wanted)
        try:
            driver.call("cuMemAlloc", 8)
        except DriverError as error:
            return error.status
        finally:
            assert driver.call("cuThreadExchangeStreamCaptureMode", before) == wanted
    return ""


def waits_body() -> None:
    """What waits for a capturing stream conflicts with it, also where all is relaxed."""
    unsupported = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    for wait in (lambda _: ("cuCtxSynchronize",), lambda one: ("cuStreamSynchronize", one)):
        stream = stream_of()
        begin(stream, "RELAXED")
        with driver.relaxed_capture():
            refused(unsupported, *wait(stream))
        refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "cuStreamEndCapture", stream)
    begin(stream)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(end_elsewhere, stream).result()
    driver.call("cuStreamEndCapture", stream)


def end_elsewhere(stream: Any) -> None:
    with driver.on_device(0):
        refused("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "cuStreamEndCapture", stream)


def legacy_body(kernel: Any, args: _Args) -> None:
    """The default stream waits for blocking streams: it may not be used while one captures."""
    implicit, base = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", int(driver.call("cuMemAlloc", 8))
    blocking, default = stream_of(0), driver.api().CUstream(0)
    other = stream_of()
    begin(other)
    driver.call(*launch_of(configured(), kernel, args))  # as torch's streams: nobody's concern
    assert status_of(default) == 0
    driver.call("cuStreamEndCapture", other)
    begin(blocking, "RELAXED")
    refused(implicit, "cuStreamIsCapturing", default)
    assert status_of(blocking) == 1, "asking breaks nothing"
    driver.call("cuStreamEndCapture", blocking)
    for call in (
        launch_of(configured(), kernel, args),
        ("cuMemsetD8", base, 0, 8),
        ("cuStreamSynchronize", default),
    ):
        begin(blocking, "RELAXED")
        refused(implicit, *call)
        refused("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "cuStreamEndCapture", blocking)
        driver.call(*call)
    driver.call("cuMemFree", base)


# What stays.


def test_sticky_errors(with_kernels: Callable[..., Any]) -> None:
    with_kernels(sticky_body)


def sticky_body(_rank: int, _size: int) -> None:
    """A kernel's failure is every later call's in that context; a refused argument is not."""
    with driver.on_device(0):
        address, _ = words()
        refused("CUDA_ERROR_INVALID_VALUE", "cuMemHostAlloc", 0, 0)
        control().fail("cuStreamSynchronize:1:CUDA_ERROR_NOT_READY")
        refused("CUDA_ERROR_NOT_READY", "cuStreamSynchronize", driver.api().CUstream(0))
        driver.call("cuCtxSynchronize")
        control().fail("cuLaunchKernelEx:1:CUDA_ERROR_LAUNCH_FAILED")
        launch = launch_of(configured(), function("dispatch"), _Args(address, 1))
        for call in (launch, launch, ("cuCtxSynchronize",), ("cuMemFreeHost", address)):
            refused("CUDA_ERROR_LAUNCH_FAILED", *call)
        control().fail()
        refused("CUDA_ERROR_LAUNCH_FAILED", *launch)
        assert driver.call("cuDeviceGetCount") == 4
    with driver.on_device(1):
        driver.call("cuCtxSynchronize")
