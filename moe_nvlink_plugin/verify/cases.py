"""What a round is, whatever the device: geometry, inputs, experts. compare.py has the oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll, rank_mask, reference
from moe_nvlink_plugin.choices import TODAY, Choices
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.exchange.scales_layout import TILE_ROWS, TILE_SCALES
from moe_nvlink_plugin.exchange.sizes import small_combine_tokens
from moe_nvlink_plugin.exchange.small_batches import with_small_tokens
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.recipes import QuantisedRows, QuantisingRecipe
from moe_nvlink_plugin.testing import generators, random_inputs

#: An extra payload: its dtype and the shape of one token's row.
Extra = tuple[torch.dtype, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A geometry with the tokens of each rank. `routing` names an entry of ROUTINGS, `add` one of
    ADDS.
    """

    name: str = "drawn"
    tokens: tuple[int, ...]
    num_experts: int = 16
    top_k: int = 4
    hidden_size: int = 24
    capacity: int = 8
    dtype: torch.dtype = torch.float32
    recipe: str | None = None
    combine: str = "bf16"
    combine_scale: float = 1.0  # of combine's format fp8_tensor
    routing: str = "distinct"
    ids_dtype: torch.dtype = torch.int32
    extras: tuple[Extra, ...] = ()
    received_ids: str | int = "global"
    scales_layout: str = "linear"
    num_channels: int = 1
    num_threads: int = 1
    seed: int = 1
    timeout_s: float = 60.0
    small: bool = False  # the kernels for small batches
    add: str = ""  # what combine adds to the sums
    scale: float = 1.0  # what it multiplies them by
    num_expert_counts: int = 0
    ordered_slots: bool = False
    unit_data_bytes: int | None = None  # on GPUs; None: as the environment says
    max_sms: int | None = None
    leave_sms: bool = False
    choices: Choices = TODAY
    left_out: tuple[int, ...] = ()  # by the masks of the others; these make up a round of their own

    @property
    def ep_size(self) -> int:
        return len(self.tokens)

    @property
    def has_scales(self) -> bool:
        return self.recipe in _WITH_SCALES

    def active_ranks(self, rank: int) -> list[int]:
        """The ranks of this rank's rounds."""
        is_out = rank in self.left_out
        return [other for other in range(self.ep_size) if (other in self.left_out) == is_out]

    def mask(self, rank: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        if not self.left_out:
            return None
        return rank_mask(self.active_ranks(rank), self.ep_size, device)

    def config(self, ep_rank: int) -> AllToAllConfig:
        return AllToAllConfig(
            ep_size=self.ep_size,
            ep_rank=ep_rank,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            max_tokens_per_rank=self.capacity,
            dtype=self.dtype,
            recipe=self.recipe,
            combine=self.combine,
            combine_scale=self.combine_scale,
            timeout_s=self.timeout_s,
            num_channels=self.num_channels,
            num_threads=self.num_threads,
            small_tokens=self.capacity if self.small else 0,
            extra_payload_bytes=tuple(row_bytes(extra) for extra in self.extras),
            received_ids=self.received_ids,
            scales_layout=self.scales_layout,
            num_expert_counts=self.num_expert_counts,
            ordered_slots=self.ordered_slots,
            unit_data_bytes=self.unit_data_bytes,
            max_sms=self.max_sms,
            leave_sms=self.leave_sms,
            tuning=self.choices,
        )


def is_small(config: AllToAllConfig, verb: str = "dispatch") -> bool:
    """Whether a verb of the whole capacity goes through the kernel for small batches."""
    fitting = with_small_tokens(config, find_recipe(config), 0)
    most = small_combine_tokens(fitting) if verb == "combine" else fitting.small_tokens or 0
    return config.max_tokens_per_rank <= most


class Inputs(NamedTuple):
    """What one rank dispatches; hidden states are activations, whatever the recipe."""

    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    extras: tuple[torch.Tensor, ...]

    def to(self, device: torch.device | str) -> Inputs:
        hidden, ids, weights, extras = self
        extras = tuple(extra.to(device) for extra in extras)
        return Inputs(hidden.to(device), ids.to(device), weights.to(device), extras)


#: Where the rows that combine adds lie: there are none, in memory of their own, where the output is
#: written, one element after a vector's boundary.
ADDS = ("", "apart", "in place", "unaligned")


def added_rows(hidden_states: torch.Tensor, add: str) -> torch.Tensor | None:
    """Rows that combine adds, or None: the activations backwards, so any device has the same."""
    if not add:
        return None
    rows = hidden_states.flip(1)
    if add != "unaligned":
        return rows
    memory = rows.new_empty(rows.numel() + 1)
    return memory[1:].view(rows.shape).copy_(rows)


class Seen(NamedTuple):
    """What one rank got from one round, copied out of the workspace to the CPU."""

    recv_counts: torch.Tensor
    topk_ids: torch.Tensor
    payloads: tuple[torch.Tensor, ...]  # weights, hidden states, scales if any, extras
    send_slots: torch.Tensor
    combined: torch.Tensor
    expert_counts: torch.Tensor | None = None


def row_bytes(extra: Extra) -> int:
    """Return the bytes of one token's row."""
    dtype, shape = extra
    return int(torch.empty(shape, dtype=dtype).nbytes)


# Recipes.

#: What kernels can make of activations on their way. The elements a row must be a multiple of.
RECIPES = {
    "fp8_block": 128,
    "fp8_block_pow2": 128,
    "fp8_token": 1,
    "fp8_tensor": 1,
    "mxfp8": 32,
    "nvfp4": 16,
}

#: In what format rows may travel back, and the same of those.
COMBINE_FORMATS = {"bf16": 1, "fp8_block": 128, "nvfp4": 16, "fp8_tensor": 16}

_WITH_SCALES = ("fp8_block", "fp8_block_pow2", "fp8_token", "mxfp8", "nvfp4")

#: fp8_tensor: the largest activations saturate. nvfp4: so do the block scales of the largest.
_GLOBAL_SCALES = {"fp8_tensor": 0.75, "nvfp4": 11.0}


@functools.cache
def quantising(config: AllToAllConfig) -> QuantisingRecipe | None:
    """The recipe that quantises a configuration's activations, or None: they travel as they are."""
    recipe = find_recipe(config)
    return recipe if isinstance(recipe, QuantisingRecipe) else None


def global_scale(config: AllToAllConfig, device: torch.device | str) -> torch.Tensor | None:
    """One fp32, the same on every rank, for the recipes that take one."""
    recipe = quantising(config)
    if recipe is None or not recipe.needs_global_scale:
        return None
    return _scale_on(recipe.name, str(device))


@functools.cache  # made before a CUDA graph is captured, which could not hold the copy to the GPU
def _scale_on(recipe: str, device: str) -> torch.Tensor:
    return torch.tensor([_GLOBAL_SCALES[recipe]], dtype=torch.float32, device=device)


def quantised(config: AllToAllConfig, hidden_states: torch.Tensor) -> QuantisedRows:
    """Rows and scales that travel for activations."""
    recipe = quantising(config)
    if recipe is None:
        return QuantisedRows(hidden_states, None)
    return recipe.quantise(hidden_states, global_scale(config, hidden_states.device))


def activations(
    config: AllToAllConfig, rows: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """What a receiver makes of rows and scales: `[n, hidden_size]` of the activation type."""
    recipe = quantising(config)
    if recipe is None:
        return rows
    return recipe.dequantise(rows, scales, config.dtype, global_scale(config, rows.device))


def linear_scales(config: AllToAllConfig, scales: torch.Tensor) -> torch.Tensor:
    """Received scales as `[slots, scales per row]`; if interleaved, padding is behind both."""
    recipe = quantising(config)
    row = None if recipe is None else recipe.scales_row(config.hidden_size)
    if row is None or config.scales_layout != "interleaved":
        return scales  # a view of this shape, whatever its strides
    words = -(-row.elements // TILE_SCALES)
    tiles = scales.view(-1, words, 32, TILE_ROWS // 32, TILE_SCALES).transpose(1, 3)
    return tiles.reshape(-1, words * TILE_SCALES).view(row.dtype)


def received_activations(
    config: AllToAllConfig, rows: torch.Tensor, scales: torch.Tensor | None
) -> torch.Tensor:
    """What a receiver makes of all slots' rows and their scales in the layer's layout."""
    if scales is not None and config.scales_layout == "interleaved":
        padded, recipe = linear_scales(config, scales), quantising(config)
        row = None if recipe is None else recipe.scales_row(config.hidden_size)
        assert row is not None
        scales = padded[: len(rows), : row.elements]
    return activations(config, rows, scales)


def dispatch(
    exchange: MoeAllToAll,
    inputs: Inputs,
    *,
    post_quant: bool = False,
    beside: bool = False,
    **options: Any,
) -> Dispatched:
    """Dispatch activations, or what the caller has made of them by the layer's recipe.

    Args:
        exchange: the layer.
        inputs: of this rank, on the layer's device.
        post_quant: the caller has quantised the rows.
        beside: by dispatch_async.
        options: further arguments of dispatch.
    """
    hidden, ids, weights, extras = inputs
    config = exchange.config
    if post_quant:
        hidden, options["scales"] = quantised(config, hidden)
    else:
        options["global_scale"] = global_scale(config, hidden.device)
    if beside:
        return exchange.dispatch_async(hidden, ids, weights, extras, **options).wait()
    return exchange.dispatch(hidden, ids, weights, extras, **options)


def with_formats(case: Case, recipe: str | None, combine: str = "bf16") -> Case:
    """The case with rows that travel in other formats; sizes are raised to what those take."""
    block = math.lcm(RECIPES.get(recipe or "", 1), COMBINE_FORMATS[combine])
    parts = [case.name, recipe or "", "" if combine == "bf16" else f"{combine} back"]
    most_extras = 6 if recipe in _WITH_SCALES else 7  # eight payloads are the most
    return dataclasses.replace(
        case,
        name=", ".join(part for part in parts if part),
        recipe=recipe,
        combine=combine,
        hidden_size=-(-case.hidden_size // block) * block,
        extras=case.extras[:most_extras],
    )


# Routings: from distinct random experts to what a case is about.

Routing = Callable[[Case, torch.Tensor, torch.Generator], torch.Tensor]


def _pick(case: Case, like: torch.Tensor, allowed: list[int], g: torch.Generator) -> torch.Tensor:
    picks = torch.randint(0, len(allowed), like.shape, generator=g)
    return torch.tensor(allowed, dtype=like.dtype)[picks]


def _to_one_rank(case: Case, ids: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    # The last rank that owns an expert at all.
    target = min(case.ep_size, case.num_experts) - 1
    return _pick(
        case, ids, list(range(*local_expert_range(case.num_experts, case.ep_size, target))), g
    )


def _none_to_a_rank(case: Case, ids: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    first, end = local_expert_range(case.num_experts, case.ep_size, 1)
    others = [expert for expert in range(case.num_experts) if not first <= expert < end]
    return _pick(case, ids, others, g)


def _duplicates(case: Case, ids: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(ids.shape, generator=g) < 0.5, ids[:, :1], ids)


def _invalid(case: Case, ids: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    bad = [-1, case.num_experts, case.num_experts + 7, 2**31 - 1, -(2**31)]
    wrong = _pick(case, ids, bad, g)
    return torch.where(torch.rand(ids.shape, generator=g) < 0.4, wrong, ids)


def _wrapping(case: Case, ids: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    # As int32 every one of these would be a good expert id.
    wrong = ids.long() + _pick(case, ids.long(), [2**32, -(2**32), 2**40], g)
    return torch.where(torch.rand(ids.shape, generator=g) < 0.4, wrong, ids.long())


ROUTINGS: dict[str, Routing] = {
    "distinct": lambda case, ids, g: ids,
    "to one rank": _to_one_rank,
    "none to rank 1": _none_to_a_rank,
    "duplicates": _duplicates,
    "invalid": _invalid,
    "all invalid": lambda case, ids, g: torch.full_like(ids, -1),
    "wrapping": _wrapping,
}


def _random_bytes(extra: Extra, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    dtype, shape = extra
    size = (num_tokens, row_bytes(extra))
    words = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        words = words % 2
    return (
        words.view(dtype).reshape(num_tokens, *shape)
        if num_tokens
        else torch.empty((0, *shape), dtype=dtype)
    )


def _for_quantisers(hidden: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Blocks and rows of very different size, whose scales therefore differ, and what is special.

    An infinity or a NaN spoils all that shares its scale, so only some rows have one.
    """
    tokens, size = hidden.shape
    blocks = torch.randint(-6, 7, (tokens, -(-size // 16)), generator=generator)
    hidden = hidden * torch.exp2(blocks.float()).repeat_interleave(16, 1)[:, :size].to(hidden.dtype)
    small = torch.tensor([0.0, -0.0, 1e-41, -6e-8, 3e3], dtype=hidden.dtype)
    picks = torch.randint(0, len(small), hidden.shape, generator=generator)
    rare = torch.rand(hidden.shape, generator=generator) < 0.02
    hidden = torch.where(rare, small[picks], hidden)
    places = torch.randint(0, size, (tokens,), generator=generator).tolist()
    for token, kind in enumerate(torch.randint(0, 10, (tokens,), generator=generator).tolist()):
        if kind == 0:
            hidden[token] = 0.0
        elif kind <= 3:
            hidden[token, places[token]] = (math.inf, -math.inf, math.nan)[kind - 1]
    return hidden


def make_inputs(case: Case, tokens: tuple[int, ...] | None = None, seed: int = 0) -> list[Inputs]:
    """Inputs of every rank. Rows hold ordinary values, both zeros, infinities and subnormals."""
    inputs = []
    counts = case.tokens if tokens is None else tokens
    for rank, generator in enumerate(generators(case.ep_size, case.seed + 7919 * seed)):
        count = counts[rank]
        hidden, ids, weights = random_inputs(case.config(rank), count, generator)
        odd = torch.tensor([0.0, -0.0, float("inf"), 1e-41, -6e-8, 3e4], dtype=case.dtype)
        picks = torch.randint(0, len(odd), hidden.shape, generator=generator)
        rare = torch.rand(hidden.shape, generator=generator) < 0.02
        if case.recipe is None:
            hidden = torch.where(rare, odd[picks], hidden)
        else:
            hidden = _for_quantisers(hidden, generator)
        ids = ROUTINGS[case.routing](case, ids, generator).to(case.ids_dtype)
        extras = tuple(_random_bytes(extra, count, generator) for extra in case.extras)
        inputs.append(Inputs(hidden, ids, weights, extras))
    return inputs


def among_active(case: Case, inputs: list[Inputs]) -> list[Inputs]:
    """Inputs with the ids by which tokens travel: experts of ranks that are left out are none."""
    if not case.left_out:
        return inputs
    everyones = [mine.topk_ids for mine in inputs]
    config = case.config(0)
    return [
        mine._replace(
            topk_ids=reference.among_ranks(config, everyones, case.active_ranks(rank))[rank]
        )
        for rank, mine in enumerate(inputs)
    ]


def expert_rows(
    config: AllToAllConfig,
    target: int,
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> torch.Tensor:
    """What `target`'s experts make of activations. The same bits, however the rows lie."""
    first, end = local_expert_range(config.num_experts, config.ep_size, target)
    factor = torch.full((hidden.shape[0],), 0.5, dtype=torch.float32, device=hidden.device)
    for k in range(config.top_k):
        ids = topk_ids[:, k]
        term = topk_weights[:, k] * (1.0 + ids.float() * 0.125)
        factor = torch.where((ids >= first) & (ids < end), factor + term, factor)
    shifted = hidden.float() + 0.0625 * (target + 1)
    return (shifted * factor[:, None]).to(config.dtype)


def global_ids(config: AllToAllConfig, received: torch.Tensor) -> torch.Tensor:
    """The ids that a rank has received as the router numbers experts; absent ids stay as they are.

    An absent id may be one of this rank's, but its weight is 0.
    """
    if config.received_ids != "local":
        return received
    first, _end = local_expert_range(config.num_experts, config.ep_size, config.ep_rank)
    return torch.where(received < 0, received, received + first)


def received_payloads(received: Dispatched) -> tuple[torch.Tensor, ...]:
    """In the order of Seen.payloads."""
    scales = () if received.scales is None else (received.scales,)
    return (received.topk_weights, received.hidden_states, *scales, *received.extra_payloads)


def launch_round(
    exchange: MoeAllToAll,
    inputs: Inputs,
    *,
    zero_copy: bool = True,
    add: str = "",
    scale: float = 1.0,
    beside: bool = False,
    before: Callable[[], None] = lambda: None,
    between: Callable[[], None] = lambda: None,
    **options: Any,
) -> Seen:
    """Dispatch, experts and combine on this rank; what it got, on its device. Capturable.

    Args:
        exchange: the layer.
        inputs: of this rank, on the layer's device.
        zero_copy: the experts write where combine reads.
        add: name of ADDS.
        scale: of combine.
        beside: by dispatch_async and combine_async.
        before: called before each verb.
        between: called after dispatch, before what arrived is read.
        options: further arguments of dispatch().
    """
    before()
    received = dispatch(exchange, inputs, beside=beside, **options)
    between()
    config = exchange.config
    hidden = received_activations(config, received.hidden_states, received.scales)
    ids = global_ids(config, received.topk_ids)
    rows = expert_rows(config, config.ep_rank, hidden, ids, received.topk_weights)
    payloads = tuple(payload.clone() for payload in received_payloads(received))
    seen = (received.recv_counts.clone(), received.topk_ids.clone(), payloads)
    expert_counts = None if received.expert_counts is None else received.expert_counts.clone()
    metadata = received.metadata
    if zero_copy:
        rows = exchange.combine_input(metadata=metadata).copy_(rows)
    added = added_rows(inputs.hidden_states, add)
    last: dict[str, Any] = {
        "output": added if add == "in place" else None,
        "add": added,
        "scale": scale,
    }
    before()
    if beside:
        combined = exchange.combine_async(rows, metadata, **last).wait()
    else:
        combined = exchange.combine(rows, metadata, **last)
    return Seen(*seen, metadata.send_slots.clone(), combined, expert_counts)


def run_round(exchange: MoeAllToAll, inputs: Inputs, **options: Any) -> Seen:
    """Do what launch_round does, and copy what the rank got to the CPU."""
    return on_cpu(launch_round(exchange, inputs, **options))


def on_cpu(seen: Seen) -> Seen:
    """Copy what a rank got to the CPU."""
    counts, ids, payloads, slots, combined, expert_counts = seen
    return Seen(
        _copied(counts),
        _copied(ids),
        tuple(_copied(payload) for payload in payloads),
        _copied(slots),
        _copied(combined),
        None if expert_counts is None else _copied(expert_counts),
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)
