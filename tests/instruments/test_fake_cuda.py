"""The fake driver refuses what the real one refuses and the product could ask for: else a test on
it would prove nothing. What it answers about GPUs, and failures on demand, show in those tests.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import DriverError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host, nvrtc
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.lm_head.kernels import HEAD
from tests.support.fake_cuda import control
from tests.support.fake_cuda.processes import Driven, driven
from tests.support.sass import cuobjdump

pytestmark = pytest.mark.long
__all__ = ["driven"]

MIB = 2**20
INVALID = "CUDA_ERROR_INVALID_VALUE"


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


# Memory.


def test_memory(driven: Driven) -> None:
    driven(memory_body, kernels="", devices=3, memory=8 * MIB)


def memory_body() -> None:
    """A map from creation to release; every misuse on the way is an error and changes nothing."""
    size = 2 * MIB
    base = int(driver.call("cuMemAddressReserve", 4 * size, 0, 0, 0))
    refused(INVALID, "cuMemAddressReserve", size + 4096, 0, 0, 0)
    refused(INVALID, "cuMemCreate", 4096, prop(), 0)
    handle = driver.call("cuMemCreate", size, prop(), 0)
    for at, size_bytes in ((base + 4096, size), (base, 2 * size), (base + 4 * size, size)):
        refused(INVALID, "cuMemMap", at, size_bytes, 0, handle, 0)
    driver.call("cuMemMap", base, size, 0, handle, 0)
    refused(INVALID, "cuMemMap", base, size, 0, handle, 0)
    refused(INVALID, "cuMemSetAccess", base, 2 * size, access(), 1)
    refused("CUDA_ERROR_INVALID_CONTEXT", "cuMemsetD8", base, 0, size)
    with driver.on_device(0):
        refused(INVALID, "cuMemsetD8", base, 0, size)
        driver.call("cuMemSetAccess", base, size, access(), 1)
        assert read(base, 2) == b"\xcc\xcc", "fresh memory must not pass for zeroed"
        driver.call("cuMemsetD8", base, 7, size)
        refused(INVALID, "cuMemsetD8", base + size - 1, 0, 2)
    with driver.on_device(1):  # nobody gave this one access
        refused(INVALID, "cuMemsetD8", base, 0, size)
        os.environ["FAKE_CUDA_P2P"] = "0"
        refused("CUDA_ERROR_INVALID_DEVICE", "cuMemSetAccess", base, size, access(1), 1)
        del os.environ["FAKE_CUDA_P2P"]
        driver.call("cuMemSetAccess", base, size, access(1), 1)
        driver.call("cuMemsetD8", base, 7, 1)
    share_body(base, handle)
    # The mapping keeps the memory when the handle is gone.
    driver.call("cuMemRelease", handle)
    refused(INVALID, "cuMemRelease", handle)
    with driver.on_device(0):
        assert read(base + size - 1) == b"\7"
        assert driver.call("cuMemGetInfo") == (6 * MIB, 8 * MIB)
    refused(INVALID, "cuMemAddressFree", base, 4 * size)
    refused(INVALID, "cuMemUnmap", base, 2 * size)
    driver.call("cuMemUnmap", base, size)
    refused(INVALID, "cuMemAddressFree", base, size)
    driver.call("cuMemAddressFree", base, 4 * size)
    assert not any(control().live().values())


def share_body(base: int, handle: Any) -> None:
    """Through a descriptor, and through a fabric handle where there is fabric."""
    api, size = driver.api(), 2 * MIB
    posix = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fabric = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    refused(INVALID, "cuMemExportToShareableHandle", handle, fabric, 0)
    fd = driver.call("cuMemExportToShareableHandle", handle, posix, 0)
    imported = driver.call("cuMemImportFromShareableHandle", fd, posix)
    os.close(fd)
    driver.call("cuMemMap", base + size, size, 0, imported, 0)
    driver.call("cuMemRelease", imported)
    driver.call("cuMemSetAccess", base + size, size, access(), 1)
    with driver.on_device(0):
        assert read(base + size) == b"\7"
    driver.call("cuMemUnmap", base + size, size)
    refused(INVALID, "cuMemImportFromShareableHandle", fd, posix)
    with open(os.devnull) as other_file:
        refused(INVALID, "cuMemImportFromShareableHandle", other_file.fileno(), posix)
    os.environ["FAKE_CUDA_FABRIC"] = "1"
    other = driver.call("cuMemCreate", size, prop(8), 0)
    blob = bytes(driver.call("cuMemExportToShareableHandle", other, fabric, 0).data)
    driver.call("cuMemRelease", driver.call("cuMemImportFromShareableHandle", blob, fabric))
    driver.call("cuMemRelease", other)
    refused(INVALID, "cuMemImportFromShareableHandle", blob, fabric)


# Launches and captures.

# Stands in for the host build of the kernels: `dispatch` adds num_ctas to a word, `factor` times.
# What NVRTC compiles has the same arguments, or another struct.
_KERNEL = """
#include <cstdint>
struct Args { uint64_t* word; uint64_t factor; };
extern "C" {
int moe_nvlink_sizeof_dispatch_args() { return sizeof(Args); }
int moe_nvlink_sizeof_drifted_args() { return sizeof(Args); }
void* moe_nvlink_grid_create(int ctas) { return new int(ctas); }
void moe_nvlink_grid_destroy(int* grid) { delete grid; }
void moe_nvlink_dispatch(const Args* args, int* grid) { *args->word += *grid * args->factor; }
}
"""

_ON_GPU = """
struct Args { unsigned long long* word; unsigned long long factor; };
struct Drifted { unsigned long long* word; unsigned long long factor; int more; };
extern "C" __global__ void moe_nvlink_dispatch(Args args) { *args.word += args.factor; }
extern "C" __global__ void moe_nvlink_drifted(Drifted args) { *args.word += args.more; }
"""


@pytest.fixture
def with_kernels(driven: Driven, tmp_path: Path) -> Driven:
    """As `driven`, with the host build of the kernels above."""
    library = tmp_path / "kernels.so"
    host.compile_text(_KERNEL, library)
    return functools.partial(driven, kernels=library, most_ctas=3, sms=2)


class _Args(ctypes.Structure):
    _fields_ = (("word", ctypes.c_void_p), ("factor", ctypes.c_uint64))


def function(name: str) -> Any:
    module = driver.call("cuModuleLoadData", nvrtc.load_or_compile(_ON_GPU, "sm_90a"))
    return driver.call("cuModuleGetFunction", module, f"moe_nvlink_{name}".encode())


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
    shared_bytes: int = 0,
    **attributes: int,
) -> Any:
    """CUlaunchConfig. attributes: programmaticStreamSerializationAllowed=1, cooperative=1, ..."""
    api = driver.api()
    numbers = {"programmaticStreamSerializationAllowed": 6, "cooperative": 2, "priority": 8}
    made = api.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = grid
    made.blockDimX, made.blockDimY, made.blockDimZ = block
    made.hStream, made.sharedMemBytes, made.attrs = api.CUstream(int(stream)), shared_bytes, []
    for name, value in attributes.items():
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID(numbers[name])
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

#: What a launch may just ask for, what is too much, and how it is refused. Two SMs hold 32 CTAs of
#: 64 threads each.
BOUNDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"block": (1024, 1, 1)}, {"block": (1025, 1, 1)}, INVALID),
    ({"block": (8, 8, 16)}, {"block": (8, 8, 17)}, INVALID),
    ({"block": (1, 1, 1)}, {"block": (1, 0, 1)}, INVALID),
    ({"grid": (2**31 - 1, 1, 1)}, {"grid": (2**31, 1, 1)}, INVALID),
    ({"grid": (1, 65535, 1)}, {"grid": (1, 65536, 1)}, INVALID),
    ({"grid": (1, 1, 1)}, {"grid": (0, 1, 1)}, INVALID),
    ({"shared_bytes": 48 << 10}, {"shared_bytes": (48 << 10) + 1}, INVALID),
    (
        {"grid": (32, 2, 1), "cooperative": 1},
        {"grid": (65, 1, 1), "cooperative": 1},
        "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
    ),
    (
        {"programmaticStreamSerializationAllowed": 1},
        {"programmaticStreamSerializationAllowed": 1, "cooperative": 1},
        INVALID,
    ),
    ({}, {"priority": 0}, INVALID),
    ({}, {"stream": 0x77}, "CUDA_ERROR_INVALID_HANDLE"),
]


def test_launches(with_kernels: Driven) -> None:
    with_kernels(launch_body)


def launch_body() -> None:
    cubin = nvrtc.load_or_compile(_ON_GPU, "sm_90a")
    refused("CUDA_ERROR_INVALID_CONTEXT", "cuModuleLoadData", cubin)
    with driver.on_device(0):
        refused("CUDA_ERROR_INVALID_IMAGE", "cuModuleLoadData", b"text" * 20)
        other = nvrtc.load_or_compile(_ON_GPU, "sm_100a")
        refused("CUDA_ERROR_NO_BINARY_FOR_GPU", "cuModuleLoadData", other)
        kernel = function("dispatch")
        address, word = words()
        args = _Args(address, 10)
        driver.call(*launch_of(configured((2, 1, 1)), kernel, args))
        assert word.value == 20
        assert control().last_launch().args == bytes(args)
        launch = launch_of(configured((1000, 1, 1)), kernel, args)
        driver.call(*launch)  # FAKE_CUDA_MOST_CTAS of them run
        assert word.value == 50
        for good, bad, status in BOUNDS:
            driver.call(*launch_of(configured(**good), kernel, args))
            refused(status, *launch_of(configured(**bad), kernel, args))
        refused(INVALID, *launch_of(configured(), function("drifted"), args))
    refused("CUDA_ERROR_INVALID_CONTEXT", *launch)


def stream_of() -> Any:
    """As torch's streams are."""
    return driver.call("cuStreamCreate", driver.api().CUstream_flags.CU_STREAM_NON_BLOCKING)


def begin(stream: Any, mode: str = "GLOBAL") -> None:
    modes = driver.api().CUstreamCaptureMode
    driver.call("cuStreamBeginCapture", stream, getattr(modes, f"CU_STREAM_CAPTURE_MODE_{mode}"))


def test_captures(with_kernels: Driven) -> None:
    """What is unsafe breaks a capture, but in relaxed mode; to wait for its stream always does."""
    with_kernels(captures_body)


def captures_body() -> None:
    invalidated = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    with driver.on_device(0):
        address, word = words()
        kernel, other = function("dispatch"), stream_of()
        for mode, relaxed, call, may in capture_cases():
            stream = stream_of()
            launch = launch_of(configured(stream=stream), kernel, _Args(address, 1))
            begin(stream, mode)
            driver.call(*launch)
            driver.call(*launch_of(configured(stream=other), kernel, _Args(address, 1)))
            arguments = call(stream)
            with driver.relaxed_capture() if relaxed else driver.on_device(0):
                if may:
                    driver.call(*arguments)
                else:
                    refused("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", *arguments)
            assert int(driver.call("cuStreamIsCapturing", stream)) == (1 if may else 2)
            if may:
                driver.call("cuStreamEndCapture", stream)
            else:
                refused(invalidated, *launch)
                refused(invalidated, "cuStreamEndCapture", stream)
            assert int(driver.call("cuStreamIsCapturing", stream)) == 0
        ran = len(list(capture_cases()))
        assert (word.value, control().captured()) == (ran, 3), "those of other streams run at once"
        control().replay()
        assert word.value == ran + 3


def capture_cases() -> Iterator[tuple[str, bool, Callable[[Any], tuple[Any, ...]], bool]]:
    """Mode of the capture, whether the thread is relaxed, a call, and whether it may be made."""
    for mode, relaxed in (("GLOBAL", False), ("GLOBAL", True), ("RELAXED", False)):
        may = mode == "RELAXED" or relaxed
        yield mode, relaxed, lambda _: ("cuMemHostAlloc", 8, 0), may
        yield mode, relaxed, lambda stream: ("cuStreamSynchronize", stream), False
        yield mode, relaxed, lambda _: ("cuCtxSynchronize",), False
    yield "GLOBAL", False, lambda stream: ("cuStreamIsCapturing", stream), True


def test_sticky_errors(with_kernels: Driven) -> None:
    with_kernels(sticky_body)


def sticky_body() -> None:
    """A kernel's failure is every later call's in that context; a refused argument is not."""
    with driver.on_device(0):
        address, _ = words()
        refused(INVALID, "cuMemHostAlloc", 0, 0)
        driver.call("cuCtxSynchronize")
        launch = launch_of(configured(), function("dispatch"), _Args(address, 1))
        control().fail("cuLaunchKernelEx:1:CUDA_ERROR_LAUNCH_FAILED")
        for call in (launch, launch, ("cuCtxSynchronize",), ("cuMemFreeHost", address)):
            refused("CUDA_ERROR_LAUNCH_FAILED", *call)
        assert driver.call("cuDeviceGetCount") == 4
    with driver.on_device(1):
        driver.call("cuCtxSynchronize")


# Cubins.


#: (threads of a CTA, registers of a thread, bytes of shared memory): CTAs that an SM of 9.0, 10.0
#: and 12.0 holds, as cuda_occupancy.h of CUDA 13.0 computes it.
RESIDENT = {
    (32, 8, 0): (32, 32, 24),
    (96, 33, 0): (16, 16, 16),
    (128, 41, 0): (10, 10, 10),
    (256, 32, 10000): (8, 8, 6),
    (928, 64, 0): (1, 1, 1),
    (928, 72, 0): (0, 0, 0),
    (64, 8, 48000): (4, 4, 2),
}


def test_occupancy(driven: Driven) -> None:
    assert driven(resident_body, kernels="") == RESIDENT


def resident_body() -> dict[tuple[int, int, int], tuple[int, ...]]:
    return {given: tuple(ctas_of_sm(major, *given) for major in (9, 10, 12)) for given in RESIDENT}


def ctas_of_sm(major: int, threads: int, registers: int, shared_bytes: int) -> int:
    os.environ["FAKE_CUDA_CAPABILITY"] = f"{major}.0"
    cubin = nvrtc.load_or_compile(_ON_GPU, f"sm_{major}0a")
    # A record's kind and size, the kernel's symbol, and how many registers it has.
    record = re.compile(rb"(\x04\x2f\x08\0....)....", re.DOTALL)
    patched = record.sub(lambda found: found[1] + registers.to_bytes(4, "little"), cubin)
    with driver.on_device(0):
        module = driver.call("cuModuleLoadData", patched)
        kernel = driver.call("cuModuleGetFunction", module, b"moe_nvlink_dispatch")
        registers_of = driver.api().CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        assert driver.call("cuFuncGetAttribute", registers_of, kernel) == registers
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(driver.call(query, kernel, threads, shared_bytes))


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_what_the_products_cubins_say(architecture: str, driven: Driven) -> None:
    """Registers and shared memory as cuobjdump reads them. A launch compares the arguments."""
    variants = (LAYER.variant(top_k=8, dtype="bf16"), HEAD.variant(dtype="bf16"))
    cubins = {
        build.kernel.entry: machine_code.cubin_for(build, architecture, variant)
        for variant in variants
        for build in variant.builds(pdl=True)
    }
    number = architecture.removeprefix("sm_").removesuffix("a")
    seen = driven(cubins_body, cubins, kernels="", capability=f"{number[:-1]}.{number[-1]}")
    expected = {}
    for cubin in cubins.values():
        lines = re.findall(
            r"Function (\w+):\n *REG:(\d+) .*?SHARED:(\d+)", cuobjdump(cubin, "-res-usage")
        )
        for name, registers, shared in lines:
            # Of a kernel without shared memory, the cubin does not count what the driver reserves.
            expected[name] = (int(registers), max(int(shared) - 1024, 0))
    assert seen == expected


def cubins_body(cubins: dict[str, bytes]) -> dict[str, tuple[int, ...]]:
    kinds = driver.api().CUfunction_attribute
    asked = (kinds.CU_FUNC_ATTRIBUTE_NUM_REGS, kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    found = {}
    for name, cubin in cubins.items():
        with driver.on_device(0):
            loaded = driver.call("cuModuleLoadData", cubin)
            kernel = driver.call("cuModuleGetFunction", loaded, name.encode())
            found[name] = tuple(driver.call("cuFuncGetAttribute", one, kernel) for one in asked)
    return found
