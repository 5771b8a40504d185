"""What a GPU gets, StaticConfig, on the host: its unrolled loops give the oracle's bits too."""

from __future__ import annotations

import pytest
import torch

from moe_nvlink_plugin.jit import host, source
from moe_nvlink_plugin.jit.header import constants
from tests.kernels import compare
from tests.kernels.cases import Case

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


def test_a_specialised_build_ignores_run_time_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build under test is the one that runs: with another top_k it must go wrong."""
    text = source.specialised_source(1, constants()["kElementFp32"], host=True)
    library = host.HostLibrary(host.build(text))
    monkeypatch.setattr(host, "load", lambda: library)
    with pytest.raises(AssertionError, match="wrong library"):
        compare.check_case(Case(name="wrong library", tokens=(3, 3), top_k=4))
