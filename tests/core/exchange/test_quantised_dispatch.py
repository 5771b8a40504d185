"""Layers with a quantising recipe or a format of combine: what is taken, refused and counted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_nvlink_plugin import MoeAllToAll, QuantisingRecipe
from moe_nvlink_plugin.errors import ConfigError, DisagreementError, InputError
from moe_nvlink_plugin.exchange import ops
from moe_nvlink_plugin.exchange.arguments import quantiser_code
from moe_nvlink_plugin.recipes import FP8_BLOCK, MXFP8, PayloadRow
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.core.exchange import small_exchange
from tests.core.exchange.small_exchange import opcheck_dispatch

HIDDEN, TOP_K, CAPACITY = 256, small_exchange.TOP_K, 8

#: Bytes of a token's row and scales at hidden size 7168.
BYTES_PER_TOKEN = {
    "bf16": 14336,
    "fp8_block": 7168 + 224,
    "fp8_block_pow2": 7168 + 224,
    "fp8_token": 7172,
    "fp8_tensor": 7168,
    "mxfp8": 7392,
    "nvfp4": 4032,
}
RECIPES = [name for name in BYTES_PER_TOKEN if name != "bf16"]


SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "max_tokens_per_rank": CAPACITY}
config = small_exchange.sized(**SIZES, dtype=torch.bfloat16)


def alone(**values: Any) -> MoeAllToAll:
    return small_exchange.alone(**{**SIZES, "dtype": torch.bfloat16, **values})


def inputs(
    num_tokens: int = 3, hidden_size: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16()
    ids = torch.tensor([[0, 2]], dtype=torch.int32).repeat(num_tokens, 1)
    return hidden, ids, torch.ones(num_tokens, TOP_K)


def scale_for(layer: MoeAllToAll) -> torch.Tensor | None:
    recipe = layer.recipe
    assert isinstance(recipe, QuantisingRecipe)
    return torch.tensor(3.0) if recipe.needs_global_scale else None


# What is taken.


def test_layers_of_different_recipes_take_turns_on_one_workspace() -> None:
    """Their regions lie over each other; a round of one must not look like a round of another."""
    hidden, ids, weights = inputs(5)
    (group,) = ThreadGroup.ranks(1)
    with (
        alone() as plain,
        MoeAllToAll.create(config(group, recipe="nvfp4"), group, share_with=plain) as fp4,
        MoeAllToAll.create(config(group, recipe="mxfp8"), group, share_with=plain) as mx,
    ):
        for _round in range(3):
            for layer in (plain, fp4, mx):
                recipe = layer.recipe
                scale, expected = None, hidden.view(torch.uint8)
                if isinstance(recipe, QuantisingRecipe):
                    scale = scale_for(layer)
                    expected = recipe.quantise(hidden, scale).rows.view(torch.uint8)
                received = layer.dispatch(hidden, ids, weights, global_scale=scale)
                assert torch.equal(received.hidden_states[:5].view(torch.uint8), expected)
                layer.combine(layer.combine_input(), received.metadata)


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_that_travel(name: str) -> None:
    """From the kernels' counters, beside the ids and weights of each row."""
    with alone(recipe=name, hidden_size=7168) as layer:
        hidden, ids, weights = inputs(4, 7168)
        scale = torch.tensor(1.0) if name in ("fp8_tensor", "nvfp4") else None
        layer.dispatch(hidden, ids, weights, global_scale=scale)
        per_row = layer.stats().bytes_dispatched / layer.stats().destinations
        assert per_row == BYTES_PER_TOKEN[name] + 8 * TOP_K


@pytest.mark.parametrize(
    ("name", "bytes_per_row"),
    [("bf16", 14336), ("fp8_block", 7168 + 224), ("nvfp4", 3584 + 448 + 4), ("fp8_tensor", 7168)],
)
def test_bytes_that_travel_back(name: str, bytes_per_row: int) -> None:
    with alone(combine=name, hidden_size=7168) as layer:
        received = layer.dispatch(*inputs(4, 7168))
        layer.combine(layer.combine_input(), received.metadata)
        assert layer.stats().bytes_combined == 4 * bytes_per_row
        # What a reduce-scatter would have moved is not less for it: its rows are not quantised.
        assert layer.stats().bytes_reducescatter == 0


# Compiled.


def opcheck(layer: MoeAllToAll, *mask: torch.Tensor) -> None:
    hidden, ids, weights = inputs()
    pending, handle = torch.zeros_like(layer._layer.workspace.pending), layer._layer.handle
    given: tuple[Any, ...] = (hidden, None, ids, weights, [], scale_for(layer), handle, 0, *mask)
    opcheck_dispatch(layer, (pending, *given))
    counts = ops.dispatch(torch.zeros_like(pending), *given)[3]
    if layer.recipe.scales_row(HIDDEN) is not None:
        torch.library.opcheck(torch.ops.moe_nvlink.received_scales.default, (counts, handle, 0))


@pytest.mark.parametrize("name", RECIPES)
def test_opcheck(name: str) -> None:
    with alone(recipe=name) as layer:
        opcheck(layer)


@pytest.mark.parametrize(
    ("name", "layout"), [("fp8_block", "column_major"), ("nvfp4", "interleaved")]
)
def test_opcheck_of_what_experts_read(name: str, layout: str) -> None:
    with alone(recipe=name, scales_layout=layout, received_ids="elsewhere") as layer:
        opcheck(layer, torch.tensor([False, True, False]))


def test_compiled_as_eager() -> None:
    with alone(recipe="mxfp8", combine="fp8_block") as layer:
        recipe = layer.recipe
        assert isinstance(recipe, QuantisingRecipe)

        def moe(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            received = layer.dispatch(torch.relu(hidden), ids, weights)
            rows = recipe.dequantise(received.hidden_states, received.scales, torch.bfloat16)
            return layer.combine(rows * 0.5, received.metadata) + 1.0

        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(moe, backend=counter, fullgraph=True, dynamic=True)
        for num_tokens in (3, 5, 8):
            given = inputs(num_tokens)
            assert torch.equal(compiled(*given), moe(*given))
        assert counter.frame_count == 1


# What is refused.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "fp8_block", "hidden_size": 192}, "hidden_size=192 is not a multiple of 128"),
        ({"recipe": "mxfp8", "hidden_size": 48}, "hidden_size=48 is not a multiple of 32"),
        ({"recipe": "nvfp4", "hidden_size": 24}, "hidden_size=24 is not a multiple of 16"),
        ({"combine": "fp8_block", "hidden_size": 192}, "multiple of 128, got 192"),
        ({"combine": "nvfp4", "hidden_size": 24}, "multiple of 16, got 24"),
        ({"combine": "fp8_tensor", "hidden_size": 24}, "multiple of 16, got 24"),
        ({"combine": "fp8"}, "combine='fp8'.*bf16, fp8_block, nvfp4, fp8_tensor"),
        ({"combine": "bf16", "combine_scale": 2.0}, "combine_scale=2.0 with combine='bf16'"),
        *(
            ({"combine": "fp8_tensor", "combine_scale": bad}, "combine_scale=.* from 2.-100 to")
            for bad in (0.0, -1.0, 2.0**-101, 2.0**101, math.nan, math.inf, True, "1", None)
        ),
        ({"recipe": "fp4"}, "recipe='fp4' is unknown.*nvfp4"),
    ],
)
def test_configurations_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        alone(**values)


def test_a_quantiser_that_the_kernels_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MXFP8), "quantiser", "Mxfp9")
    with pytest.raises(ConfigError, match="recipe mxfp8 names quantiser 'Mxfp9'.*\"None\""):
        alone(recipe="mxfp8")


def test_combine_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = ThreadGroup.ranks(1)
    monkeypatch.setenv("MOE_NVLINK_COMBINE", "nvfp4")
    assert config(group).combine == "nvfp4"
    assert config(group, combine="bf16").combine == "bf16"
    monkeypatch.setenv("MOE_NVLINK_COMBINE", "int8")
    with pytest.raises(ConfigError, match="combine='int8' \\(MOE_NVLINK_COMBINE\\)"):
        config(group)


class Borrower:
    """A stranger's recipe that names our quantiser for other rows than that makes."""

    name = "fp8_half"
    activation_dtypes = (torch.bfloat16,)
    needs_global_scale = False
    quantiser = "Fp8Block"

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        return PayloadRow(torch.uint8, hidden_size // 2)

    def scales_row(self, hidden_size: int) -> PayloadRow:
        return PayloadRow(torch.float32, hidden_size // 128)

    quantise = dequantise = FP8_BLOCK.quantise


def test_a_quantiser_that_makes_other_rows() -> None:
    """The kernel would write past the end of those that the recipe has room for."""
    with pytest.raises(ConfigError, match="recipe fp8_half names quantiser 'Fp8Block' for rows"):
        quantiser_code(Borrower(), HIDDEN)


@pytest.mark.parametrize("small_tokens", [0, CAPACITY], ids=["bulk", "small"])
@pytest.mark.parametrize(
    "values",
    [{"recipe": "fp8_block"}, {"received_ids": "elsewhere"}, {"num_expert_counts": 4}],
    ids=str,
)
def test_ranks_in_layers_of_different_formats(values: dict[str, Any], small_tokens: int) -> None:
    """Same geometry, but rows of other bytes: they must not be taken for each other's."""

    def rank_main(group: ThreadGroup) -> None:
        mine = config(group, small_tokens=small_tokens)
        other_config = dataclasses.replace(mine, **values)
        with (
            MoeAllToAll.create(mine, group) as plain,
            MoeAllToAll.create(other_config, group, share_with=plain) as other,
        ):
            try:
                (plain, other)[group.rank].dispatch(*inputs())
            finally:
                group.all_gather_object(None)

    for rank, outcome in enumerate(try_ranks(2, rank_main)):
        assert isinstance(outcome, DisagreementError), repr(outcome)
        assert "another geometry" in str(outcome)
        assert "received_ids=" in str(outcome)
        counts = rank and values.get("num_expert_counts", 0)
        assert f"num_expert_counts={counts}" in str(outcome)


ROWS = torch.zeros(3, HIDDEN, dtype=torch.float8_e4m3fn)
SCALES = torch.ones(3, HIDDEN // 128)

BAD_FP8_BLOCK: dict[str, tuple[dict[str, Any], str]] = {
    "rows without scales": ({"hidden_states": ROWS}, "recipe fp8_block needs scales"),
    "activations with scales": ({"scales": SCALES}, "takes activations of torch.bfloat16 without"),
    "activations of another type": (
        {"hidden_states": torch.zeros(3, HIDDEN)},
        "has dtype torch.float32; recipe fp8_block takes activations of torch.bfloat16",
    ),
    "too many activations": (
        {"hidden_states": torch.zeros(9, HIDDEN).bfloat16()},
        "9 tokens exceed max_tokens_per_rank=8",
    ),
    "more activations than the bound": ({"max_tokens": 2}, "3 tokens exceed max_tokens=2 of this"),
    "scales of another shape": (
        {"hidden_states": ROWS, "scales": torch.ones(3, 3)},
        r"scales has shape \[3, 3\], expected \[3, 2\]",
    ),
    "scales of another type": (
        {"hidden_states": ROWS, "scales": SCALES.double()},
        "scales has dtype torch.float64, expected torch.float32",
    ),
    "scales in columns": (
        {"hidden_states": ROWS, "scales": torch.ones(2, 3).T},
        r"scales is not contiguous \(strides \[1, 3\]\)",
    ),
    "scales on meta": (
        {"hidden_states": ROWS, "scales": SCALES.to("meta")},
        "scales is on meta, this exchange works on cpu",
    ),
    "a global scale": (
        {"global_scale": torch.tensor(1.0)},
        "recipe fp8_block takes no global_scale here",
    ),
}


@pytest.mark.parametrize("name", BAD_FP8_BLOCK)
def test_calls_refused(name: str) -> None:
    changes, message = BAD_FP8_BLOCK[name]
    hidden, ids, weights = inputs()
    with alone(recipe="fp8_block") as layer:
        given: dict[str, Any] = {"hidden_states": hidden, "topk_ids": ids, "topk_weights": weights}
        with pytest.raises(InputError, match=message):
            layer.dispatch(**{**given, **changes})
        received = layer.dispatch(**given)  # nothing was sent, nothing is pending
        layer.combine(layer.combine_input(), received.metadata)


@pytest.mark.parametrize("recipe", ["fp8_tensor", "nvfp4"])
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "needs global_scale, one fp32 number for the whole tensor"),
        (torch.tensor(0.0), "global_scale=0.0"),
        (torch.tensor(-1.0), "global_scale=-1.0"),
        (torch.tensor(float("nan")), "global_scale=nan"),
        (torch.tensor(float("inf")), "global_scale=inf"),
        (torch.tensor(1.0, dtype=torch.float64), "dtype torch.float64"),
        (torch.ones(2), r"shape \[2\]"),
        (torch.empty((), device="meta"), "is on meta"),
    ],
)
def test_global_scales_refused(recipe: str, scale: torch.Tensor | None, message: str) -> None:
    hidden, ids, weights = inputs()
    with alone(recipe=recipe) as layer, pytest.raises(InputError, match=message):
        layer.dispatch(hidden, ids, weights, global_scale=scale)


def test_a_scale_that_turns_bad_is_seen() -> None:
    scale = torch.ones(1)
    with alone(recipe="nvfp4") as layer:
        received = layer.dispatch(*inputs(), global_scale=scale)
        layer.combine(layer.combine_input(), received.metadata)
        scale.zero_()
        with pytest.raises(InputError, match="global_scale=0.0"):
            layer.dispatch(*inputs(), global_scale=scale)


def test_scales_are_seen_once_each() -> None:
    """What spares a GPU the wait; also of tensors that have no version, as in inference mode."""
    with alone(recipe="nvfp4") as made:
        layer, scale = made._layer, torch.ones(1)
        with torch.inference_mode():
            other = torch.ones(1)
        seen = [layer.first_sight(one) for one in (scale, scale, other, other)]
        assert seen == [True, False] * 2
        scale.fill_(2.0)
        assert layer.first_sight(scale)


def test_a_factor_that_combine_scale_makes_too_large() -> None:
    """combine_scale multiplies the sums together with scale."""
    with alone(combine="fp8_tensor", combine_scale=2.0**10) as layer:
        hidden, ids, weights = inputs(4)
        received = layer.dispatch(hidden, ids, weights)
        rows = received.hidden_states.clone()
        with pytest.raises(InputError, match="scale=1e\\+36 is no finite number of float32"):
            layer.combine(rows, received.metadata, scale=1e36)
        sums = layer.combine(rows, received.metadata, scale=1e35)
        assert bool(sums.isfinite().all())


@pytest.mark.parametrize("combine", ["bf16", "fp8_block"])
def test_counts_that_the_caller_overwrites(combine: str) -> None:
    """Dispatched.recv_counts is the caller's; the experts' rows elsewhere are still all copied."""
    hidden, ids, weights = inputs(6)

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        with MoeAllToAll.create(config(group, combine=combine), group) as layer:
            received = layer.dispatch(hidden, ids, weights)
            received.recv_counts.zero_()
            layer.combine_input().fill_(99.0)
            return layer.combine(torch.ones(2 * CAPACITY, HIDDEN).bfloat16(), received.metadata)

    for result in run_ranks(2, rank_main):
        assert torch.equal(result, torch.full_like(result, 2.0))
