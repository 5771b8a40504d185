"""A kernel's mistake, and memory that it may not reach, through the stand-in driver that runs PTX:
they become the error that a GPU's driver gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.jit import nvrtc
from tests.instruments.test_fake_cuda import access, configured, prop, refused
from tests.ptx.test_driver import in_driver, launch, read_words, words
from tests.support import fake_cuda

__all__ = ["in_driver"]  # a fixture, which pytest looks for among this module's names


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
    in_driver: Callable[..., Any],
) -> None:
    text = in_driver(mistake, name, offset, status)
    assert f"({name}) CTA 0" in text
    for word in words_of_it:
        assert word in text


def test_a_kernel_that_waits_for_ever(in_driver: Callable[..., Any]) -> None:
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
    fake_cuda.control().expose(base, size)  # the host may touch it; device 0 may not
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
def test_a_peers_memory(may_reach: bool, pageable: int, in_driver: Callable[..., Any]) -> None:
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
def test_the_processs_own_memory(pageable: int, in_driver: Callable[..., Any]) -> None:
    seen = in_driver(of_the_host, pageable, pageable=pageable)
    assert seen == (list(range(96))[::-1] if pageable else list(range(96)))


# What is not there.


def unprepared() -> str:
    text = 'extern "C" __global__ void other(int* word) { *word = 1; }'
    cubin, message = nvrtc.compile_cubin(text, "sm_90a"), list[str]()
    with said(message):
        refused("CUDA_ERROR_FILE_NOT_FOUND", "cuModuleLoadData", cubin)
    return message[0]


def test_a_cubin_whose_ptx_nobody_prepared(in_driver: Callable[..., Any]) -> None:
    message = in_driver(unprepared)
    assert "no PTX of the cubin with other;" in message
    assert "tests.support.fake_cuda.ptx.prepare" in message
