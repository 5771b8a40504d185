"""What a GPU gets, StaticConfig, on the host: its unrolled loops give the oracle's bits too."""

from __future__ import annotations

import pytest
import torch

from moe_nvlink_plugin.jit import host, source
from moe_nvlink_plugin.jit.header import constants
from tests.kernels import compare
from tests.kernels.cases import Case
from tests.kernels.delays import replace_once

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("top_k", "element", "dtype", "hidden_size"),
    [
        (1, "kElementFp32", torch.float32, 40),
        (7, "kElementBf16", torch.bfloat16, 131),
        (22, "kElementFp16", torch.float16, 64),
    ],
)
def test_specialised_build(
    top_k: int,
    element: str,
    dtype: torch.dtype,
    hidden_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = source.specialised_source(top_k, constants()[element], host=True)
    library = host.HostLibrary(host.build(text))
    monkeypatch.setattr(host, "load", lambda: library)
    case = Case(
        name=f"StaticConfig<{top_k}, {element}>",
        tokens=(8, 3, 0, 7),
        num_experts=25,
        top_k=top_k,
        hidden_size=hidden_size,
        dtype=dtype,
        routing="invalid",
        num_threads=2,
    )
    compare.check_case(case)


#: platform.h's constants of the host, and what stands there for the GPU.
AS_ON_THE_GPU = {
    "constexpr int kVectorBytes = 128;": "constexpr int kVectorBytes = 16;",
    "constexpr bool kAlignedVectorsOnly = false;": "constexpr bool kAlignedVectorsOnly = true;",
    "constexpr int kVectorsInFlight = 1;": "constexpr int kVectorsInFlight = 2;",
    "constexpr bool kSkipAbsentRows = true;": "constexpr bool kSkipAbsentRows = false;",
}


def gpu_like_text(top_k: int, element: int, *, pdl: bool = True) -> str:
    """The specialised host text with the GPU's widths, batches and fewer finishers than CTAs."""
    text = source.specialised_source(top_k, element, pdl=pdl, host=True)
    for host_line, gpu_line in AS_ON_THE_GPU.items():
        assert gpu_line in text, "the GPU's constant has changed"
        text = replace_once(text, host_line, gpu_line)
    return replace_once(text, "kMaxFinishers = 32", "kMaxFinishers = 2")


@pytest.mark.parametrize("cta_threads", [1, 4])
@pytest.mark.parametrize(
    ("top_k", "element", "dtype", "hidden_size"),
    [
        (3, "kElementFp32", torch.float32, 41),  # rows of 164 bytes: words of 4
        (8, "kElementBf16", torch.bfloat16, 1048),  # 131 vectors of 16 bytes
    ],
)
def test_constants_of_the_gpu(
    top_k: int,
    element: str,
    dtype: torch.dtype,
    hidden_size: int,
    cta_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The branches that the host's own constants leave out, with one and with many threads."""
    flags = (*host.FLAGS, f"-DMOE_NVLINK_CTA_THREADS={cta_threads}")
    library = host.HostLibrary(host.build(gpu_like_text(top_k, constants()[element]), flags))
    monkeypatch.setattr(host, "load", lambda: library)
    case = Case(
        name=f"{cta_threads} threads, {element}",
        tokens=(8, 4),
        num_experts=25,
        top_k=top_k,
        hidden_size=hidden_size,
        dtype=dtype,
        routing="invalid",
        num_threads=3,
    )
    compare.check_case(case)


def test_a_specialised_build_ignores_run_time_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build under test is the one that runs: with another top_k it must go wrong."""
    text = source.specialised_source(1, constants()["kElementFp32"], host=True)
    library = host.HostLibrary(host.build(text))
    monkeypatch.setattr(host, "load", lambda: library)
    with pytest.raises(AssertionError, match="wrong library"):
        compare.check_case(Case(name="wrong library", tokens=(3, 3), top_k=4))
