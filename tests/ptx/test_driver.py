"""Kernels' PTX through the stand-in driver: what a launch asks for is what runs; a kernel's
mistake, and memory that it may not reach, become the error that a GPU's driver gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.jit import nvrtc
from tests.instruments.test_fake_cuda import (
    access,
    begin,
    configured,
    prop,
    read,
    refused,
    stream_of,
)
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.processes import Driven

KERNELS = r"""
using u32 = unsigned;
using u64 = unsigned long long;

// Each CTA turns its own part of the words around, in shared memory.
extern "C" __global__ void turn(u32* words) {
  __shared__ u32 part[96];
  const u32 first = blockIdx.x * blockDim.x;
  part[threadIdx.x] = words[first + threadIdx.x];
  __syncthreads();
  words[first + threadIdx.x] = part[blockDim.x - 1 - threadIdx.x];
}

// Which CTA of how many, and which thread of how many, in three dimensions.
extern "C" __global__ void where(u32* words) {
  const u32 cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const u32 thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  words[cta * blockDim.x * blockDim.y * blockDim.z + thread] = cta << 16 | thread;
}

struct Odd { unsigned char bytes[3]; };
extern "C" __global__ void parameters(unsigned char one, u64* words, Odd odd, u64 two, float half) {
  words[0] = one;
  words[1] = odd.bytes[2];
  words[2] = two;
  words[3] = static_cast<u64>(half * 2);
}

// Lets its successor start, waits a while for it, and only then writes what it is for.
extern "C" __global__ void first(u32* started, u32* result, u32* saw) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  u32 found = 0;
  for (u32 i = 0; i < 20000 && found == 0; ++i) {
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(found) : "l"(started) : "memory");
  }
  *saw += found;
  *result += 5;
}
extern "C" __global__ void second(u32* started, u32* result, u32* copy) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(started), "r"(1) : "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  *copy = *result;
  *started = 0;
}

// CTAs wait for each other: all of them have to be there at once.
extern "C" __global__ void together(u32* words) {
  if (threadIdx.x != 0) return;
  atomicAdd(words, 1);
  u32 found = 0;
  while (found < gridDim.x) {
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(found) : "l"(words) : "memory");
  }
}

// Half of a warp leaves, the other half waits for it.
extern "C" __global__ void leaves(u32* words) {
  if (threadIdx.x % 32 >= 16) return;
  words[threadIdx.x] = __shfl_xor_sync(0xffffffff, threadIdx.x, 1);
}

extern "C" __global__ void forever(u32* word) {
  u32 found = 0;
  while (found == 0) {
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
  }
}
"""


@functools.cache
def cubin() -> bytes:
    return nvrtc.load_or_compile(KERNELS, "sm_90a")


@pytest.fixture
def in_driver(driven: Driven) -> Driven:
    """Runs a function of this module where the driver runs PTX. Kernels there reach the driver's
    memory only.
    """
    return functools.partial(driven, _on_device_0, units=[ptx.Unit(KERNELS)], pageable=0, sms=20)


def _on_device_0(body: Callable[..., Any], *args: Any) -> Any:
    with driver.on_device(0):
        return body(*args)


@functools.cache
def kernel(name: str) -> Any:
    module = driver.call("cuModuleLoadData", cubin())
    return driver.call("cuModuleGetFunction", module, name.encode())


def launch(name: str, config: Any, *values: Any) -> tuple[Any, ...]:
    """Arguments of driver.call. An int among the values is an address."""
    each = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in values]
    pointers = (ctypes.c_void_p * len(each))(*map(ctypes.addressof, each))
    kept.append((pointers, each))
    return "cuLaunchKernelEx", config, kernel(name), ctypes.addressof(pointers), 0


kept: list[Any] = []


def words(values: Iterable[int]) -> int:
    """Device memory with these 32-bit words."""
    data = b"".join(value.to_bytes(4, "little") for value in values)
    address = int(driver.call("cuMemAlloc", len(data)))
    driver.call("cuMemcpyHtoD", address, data, len(data))
    return address


def read_words(address: int, count: int) -> list[int]:
    return list(memoryview(read(address, 4 * count)).cast("I"))


# The launch.


def dimensions() -> list[int]:
    address = words([0] * (2 * 3 * 2 * 4 * 3 * 5))
    driver.call(*launch("where", configured((2, 3, 2), (4, 3, 5)), address))
    return read_words(address, 12 * 60)


def test_three_dimensions(in_driver: Driven) -> None:
    assert in_driver(dimensions) == [
        cta << 16 | thread for cta in range(12) for thread in range(60)
    ]


def parameters() -> list[int]:
    address = words([0] * 8)
    odd = (ctypes.c_uint8 * 3)(1, 2, 77)
    one, two, half = ctypes.c_uint8(200), ctypes.c_uint64(2**40), ctypes.c_float(1.5)
    config = configured(block=(1, 1, 1))
    driver.call(*launch("parameters", config, one, address, odd, two, half))
    return list(memoryview(read(address, 32)).cast("Q"))


def test_parameters_lie_where_the_cubin_has_them(in_driver: Driven) -> None:
    assert in_driver(parameters) == [200, 77, 2**40, 3]


def waits_for_all(num_ctas: int) -> int:
    address = words([0])
    call = launch("together", configured((num_ctas, 1, 1), (1024, 1, 1)), address)
    if num_ctas > 2 * 3:
        refused("CUDA_ERROR_LAUNCH_TIMEOUT", *call)
        return 0
    driver.call(*call)
    return read_words(address, 1)[0]


@pytest.mark.parametrize(("num_ctas", "seen"), [(6, 6), (7, 0)])
def test_no_more_ctas_run_at_once_than_the_gpu_holds(
    num_ctas: int, seen: int, in_driver: Driven
) -> None:
    """Three SMs with 2048 threads each."""
    assert in_driver(waits_for_all, num_ctas, sms=3, patience_s=1) == seen


# Programmatic dependent launch.


def pair(pdl: int, captured: bool) -> tuple[int, list[int]]:
    """How often the first kernel saw that the second one had started, and what that one read."""
    started, result, saw, copy = (words([0]) for _ in range(4))
    stream = stream_of()
    attributes: dict[str, Any] = {"programmaticStreamSerializationAllowed": pdl}
    one = configured(block=(1, 1, 1), stream=stream)
    other = configured(block=(1, 1, 1), stream=stream, **attributes)
    copies = []
    for name in ("first", "second"):
        kernel(name)  # a capture loads no module
    if captured:
        begin(stream)
    for _ in range(2):
        driver.call(*launch("first", one, started, result, saw))
        driver.call(*launch("second", other, started, result, copy))
        if not captured:
            copies += read_words(copy, 1)
    if captured:
        driver.call("cuStreamEndCapture", stream)
        for _ in range(2):
            fake_cuda.control().replay()
            copies += read_words(copy, 1)
    return read_words(saw, 1)[0], copies


@pytest.mark.parametrize(
    ("pdl", "captured", "expected"),
    [(1, True, (4, [10, 20])), (0, True, (0, [10, 20])), (1, False, (0, [5, 10]))],
    ids=["programmatic", "not programmatic", "one at a time"],
)
def test_the_order_of_launches(
    pdl: int, captured: bool, expected: tuple[int, list[int]], in_driver: Driven
) -> None:
    """In a graph, a launch with the attribute starts early and waits in griddepcontrol.wait."""
    assert in_driver(pair, pdl, captured) == expected


# Mistakes.


@contextlib.contextmanager
def said(to: list[str]) -> Iterator[None]:
    """Appends what this process writes to stderr meanwhile; the driver writes there, not Python."""
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        to.append(file.read().decode())


def mistake(name: str, offset: int, status: str) -> str:
    """The kernel's mistake is every later call's error, in its context; what the driver says."""
    address, text = words(range(96)), list[str]()
    call = launch(name, configured(block=(96, 1, 1)), address + offset)
    with said(text):
        refused(status, *call)
    with said(text):
        refused(status, "cuCtxSynchronize")
    with driver.on_device(1):
        driver.call("cuCtxSynchronize")
    assert text[1] == ""
    return text[0]


@pytest.mark.parametrize(
    ("name", "offset", "status", "words_of_it"),
    [
        ("turn", 4, "CUDA_ERROR_ILLEGAL_ADDRESS", ("OutOfBounds", "ld.global", "cuMemAlloc")),
        ("turn", -4, "CUDA_ERROR_ILLEGAL_ADDRESS", ("OutOfBounds", "ld.global")),
        ("turn", 2**40, "CUDA_ERROR_ILLEGAL_ADDRESS", ("OutOfBounds", "ld.global")),
        ("turn", 2, "CUDA_ERROR_MISALIGNED_ADDRESS", ("Misaligned", "ld.global")),
        ("leaves", 0, "CUDA_ERROR_LAUNCH_FAILED", ("Divergence", "shfl.sync")),
    ],
    ids=["after", "before", "far off", "misaligned", "diverged"],
)
def test_mistakes_of_a_kernel(
    name: str,
    offset: int,
    status: str,
    words_of_it: tuple[str, ...],
    in_driver: Driven,
) -> None:
    text = in_driver(mistake, name, offset, status)
    assert f"({name}) CTA 0" in text
    for word in words_of_it:
        assert word in text


def test_a_kernel_that_waits_for_ever(in_driver: Driven) -> None:
    """The driver names every thread; each is at some instruction of its loop."""
    status = "CUDA_ERROR_LAUNCH_TIMEOUT"
    text = in_driver(mistake, "forever", 0, status, patience_s=1)
    assert "(forever) CTA 0" in text
    assert "Deadlock" in text
    groups = re.findall(r"thread \d+(?: and (\d+) more)? is at PTX line", text)
    assert sum(1 + int(more or 0) for more in groups) == 96


def peers(may_reach: bool) -> list[int]:
    """Memory of device 1, which device 0 reaches once it has been granted access."""
    size = 2 * 2**20
    base = int(driver.call("cuMemAddressReserve", size, 0, 0, 0))
    driver.call("cuMemMap", base, size, 0, driver.call("cuMemCreate", size, prop(index=1), 0), 0)
    driver.call("cuMemSetAccess", base, size, access(1), 1)
    with driver.on_device(1):
        driver.call("cuMemsetD8", base, 7, size)
    # What one device may touch, the host may, too; device 0 may not.
    ctypes.memset(base, 7, 1)
    if may_reach:
        driver.call("cuMemSetAccess", base, size, access(0), 1)
    call = launch("turn", configured(block=(96, 1, 1)), base)
    if not may_reach:
        refused("CUDA_ERROR_ILLEGAL_ADDRESS", *call)
        return []
    driver.call(*call)
    return read_words(base, 96)


@pytest.mark.parametrize("pageable", [0, 1])
@pytest.mark.parametrize("may_reach", [False, True])
def test_a_peers_memory(may_reach: bool, pageable: int, in_driver: Driven) -> None:
    """Memory of the driver is reached by whom it was granted to, also where tensors of the CPU are
    the kernels', too.
    """
    seen = in_driver(peers, may_reach, pageable=pageable)
    assert seen == ([0x07070707] * 96 if may_reach else [])


def of_the_host(pageable: int) -> list[int]:
    mine = (ctypes.c_uint32 * 96)(*range(96))
    call = launch("turn", configured(block=(96, 1, 1)), ctypes.addressof(mine))
    if pageable:
        driver.call(*call)
    else:
        refused("CUDA_ERROR_ILLEGAL_ADDRESS", *call)
    return list(mine)


@pytest.mark.parametrize("pageable", [0, 1])
def test_the_processs_own_memory(pageable: int, in_driver: Driven) -> None:
    seen = in_driver(of_the_host, pageable, pageable=pageable)
    assert seen == (list(range(96))[::-1] if pageable else list(range(96)))


# What is not there.


def unprepared() -> str:
    text = 'extern "C" __global__ void other(int* word) { *word = 1; }'
    cubin, message = nvrtc.compile_cubin(text, "sm_90a"), list[str]()
    with said(message):
        refused("CUDA_ERROR_FILE_NOT_FOUND", "cuModuleLoadData", cubin)
    return message[0]


def test_a_cubin_whose_ptx_nobody_prepared(in_driver: Driven) -> None:
    message = in_driver(unprepared)
    assert "no PTX of the cubin with other;" in message
    assert "tests.support.fake_cuda.ptx.prepare" in message
