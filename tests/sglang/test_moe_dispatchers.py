"""SGLang's dispatchers with SGLang's own types and its native CPU experts.

The cases of tests/integration/sglang run again on the real types. Their experts stand for SGLang's;
here the experts are SGLang's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.moe_runner.base import FusedOpPool, MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import base, flashinfer, standard

from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.sglang import sglang_stand_in
from tests.integration.sglang.sglang_layer import (
    HIDDEN_SIZE,
    NUM_EXPERTS,
    TOP_K,
    MoeNvlinkDispatcher,
    dispatcher_of,
    pool_of,
    work_of,
)
from tests.integration.sglang.test_sglang_dispatchers import (
    short_waits,
    test_flashinfers_form,
    test_target_and_draft_may_be_in_flight_together,
    test_the_layer_is_the_dense_one,
)
from tests.integration.sglang.test_sglang_moe_parts import *  # noqa: F403
from tests.integration.sglang.test_sglang_wires import (
    interleave,
    test_fp8_blocks_reach_triton_beside_rows_of_the_output,
    test_mxfp8_rows_reach_trtllm_as_they_travelled,
    test_nvfp4_rows_reach_the_runner_as_they_travelled,
)

__all__ = [
    "interleave",
    "short_waits",
    "test_flashinfers_form",
    "test_fp8_blocks_reach_triton_beside_rows_of_the_output",
    "test_mxfp8_rows_reach_trtllm_as_they_travelled",
    "test_nvfp4_rows_reach_the_runner_as_they_travelled",
    "test_target_and_draft_may_be_in_flight_together",
    "test_the_layer_is_the_dense_one",
]

INTERMEDIATE = 32


def test_the_real_types_are_tested() -> None:
    assert sglang_stand_in.IS_REAL
    assert issubclass(MoeNvlinkDispatcher, base.BaseDispatcher)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (standard, "StandardDispatchOutput"),
        (standard, "StandardCombineInput"),
        (flashinfer, "FlashinferDispatchOutput"),
        (flashinfer, "FlashinferCombineInput"),
        (topk, "StandardTopKOutput"),
        (topk, "TritonKernelTopKOutput"),
        (topk, "PackedTopKOutput"),
    ],
)
def test_stand_ins_have_the_fields_of_sglangs_types(module: Any, name: str) -> None:
    stand_in, real = getattr(sglang_stand_in, name), getattr(module, name)
    assert stand_in._fields == real._fields
    assert stand_in._field_defaults == real._field_defaults


def test_our_dispatchers_leave_no_method_of_sglangs_abstract() -> None:
    subject, pool = _dispatcher()
    assert not type(subject).__abstractmethods__
    seen: list[Any] = []
    subject.register_pre_dispatch_hook(lambda one, *given: seen.append(one))
    hidden, ids, weights = work_of(2, 1)
    subject.dispatch(hidden_states=hidden, topk_output=topk.StandardTopKOutput(weights, ids, None))
    assert seen == [subject]
    pool.close()


# SGLang's experts.


class _Experts:
    """As much of SGLang's FusedMoE as its native experts read: the weights of some experts."""

    def __init__(self, first: int, end: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(3)
        w13 = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN_SIZE, generator=random)
        w2 = torch.randn(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE, generator=random)
        self.num_experts = NUM_EXPERTS
        self.w13_weight = (HIDDEN_SIZE**-0.5 * w13[first:end]).to(dtype)
        self.w2_weight = (INTERMEDIATE**-0.5 * w2[first:end]).to(dtype)

    def __call__(self, hidden: torch.Tensor, topk_output: Any) -> torch.Tensor:
        config = MoeRunnerConfig(activation="silu")
        with torch.inference_mode():  # as SGLang's forwards are
            result: torch.Tensor = moe_forward_native(self, hidden, topk_output, config)
        return result


def _dispatcher() -> Any:
    """Of one rank, and its pool."""
    (group,) = ThreadGroup.ranks(1)
    pool = pool_of(group)
    return dispatcher_of(pool), pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(5, 0, 6, 1), (0, 0, 1, 0), (0, 0, 0, 0)], ids=str)
def test_sglangs_native_experts(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """The result of all experts on one rank, with the choices of no expert left out."""

    def body(group: Any) -> float:
        pool = pool_of(group)
        subject = dispatcher_of(pool, params_dtype=dtype)
        own = _Experts(subject._first, subject._end, dtype)
        worst = 0.0
        for number in range(2):
            hidden, ids, weights = work_of(counts[group.rank], 10 * number + group.rank)
            hidden = hidden.to(dtype)
            given = topk.StandardTopKOutput(weights, ids, None)
            dispatched = subject.dispatch(hidden_states=hidden, topk_output=given)
            rows = own(dispatched.hidden_states, dispatched.topk_output)
            got = subject.combine(combine_input=standard.StandardCombineInput(rows))
            assert got.shape == hidden.shape
            assert got.dtype == dtype
            worst = max([worst, *(got - _whole(hidden, ids, weights)).abs().flatten().tolist()])
        pool.close()
        return worst

    # Two roundings of BF16 where one rank with all experts has one.
    assert max(run_ranks(4, body)) < (1e-5 if dtype == torch.float32 else 0.05)


def _whole(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """SGLang's experts, all on one rank; it serves neither -1 nor a batch without rows."""
    if not len(hidden):
        return hidden
    experts = _Experts(0, NUM_EXPERTS, hidden.dtype)
    # A choice of no expert becomes one of an expert that the token has not chosen, with weight 0.
    spare = torch.stack([_others(row) for row in ids.tolist()])
    known = torch.where(ids < 0, spare.to(ids.dtype), ids)
    given = topk.StandardTopKOutput(weights.masked_fill(ids < 0, 0.0), known, None)
    return experts(hidden, given)


def _others(chosen: list[int]) -> torch.Tensor:
    return torch.tensor([e for e in range(NUM_EXPERTS) if e not in chosen][:TOP_K])


def test_sglang_has_the_functions_whose_names_we_take() -> None:
    """Triton's alone can be imported without a GPU's packages."""
    assert FusedOpPool.get_fused_func("none", "triton") is not None
    assert FusedOpPool.get_fused_func("customized", "triton") is None  # an import registers nothing
