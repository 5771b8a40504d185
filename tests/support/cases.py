"""One list of cases for every device, and how a case is run; compare.py holds it to the oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll, rank_mask, reference
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.exchange.sizes import small_combine_tokens
from moe_nvlink_plugin.exchange.small_batches import with_small_tokens
from moe_nvlink_plugin.plugins import find_recipe
from moe_nvlink_plugin.recipes import QuantisedRows, QuantisingRecipe
from moe_nvlink_plugin.testing import ThreadGroup, generators, random_inputs, run_ranks

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
            timeout_s=self.timeout_s,
            num_channels=self.num_channels,
            num_threads=self.num_threads,
            small_tokens=self.capacity if self.small else 0,
            extra_payload_bytes=tuple(row_bytes(extra) for extra in self.extras),
            received_ids=self.received_ids,
            scales_layout=self.scales_layout,
            num_expert_counts=self.num_expert_counts,
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


def row_bytes(extra: Extra) -> int:
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
    return torch.tensor([_GLOBAL_SCALES[recipe]], device=device)


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


def dispatch(
    exchange: MoeAllToAll,
    inputs: Inputs,
    *,
    channel: int = 0,
    post_quant: bool = False,
    active_ranks: torch.Tensor | None = None,
) -> Dispatched:
    """Dispatches activations, or what the caller has made of them by the layer's recipe."""
    hidden, ids, weights, extras = inputs
    config = exchange.config
    options: dict[str, Any] = {"channel": channel, "active_ranks": active_ranks}
    if post_quant:
        rows, scales = quantised(config, hidden)
        return exchange.dispatch(rows, ids, weights, extras, scales=scales, **options)
    scale = global_scale(config, hidden.device)
    return exchange.dispatch(hidden, ids, weights, extras, global_scale=scale, **options)


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
    factor = torch.full((hidden.shape[0],), 0.5, device=hidden.device)
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


def run_round(
    exchange: MoeAllToAll,
    inputs: Inputs,
    *,
    channel: int = 0,
    zero_copy: bool = True,
    post_quant: bool = False,
    add: str = "",
    scale: float = 1.0,
    active_ranks: torch.Tensor | None = None,
) -> Seen:
    """One dispatch and combine on this rank."""
    received = dispatch(
        exchange, inputs, channel=channel, post_quant=post_quant, active_ranks=active_ranks
    )
    config = exchange.config
    hidden = activations(config, received.hidden_states, received.scales)
    ids = global_ids(config, received.topk_ids)
    rows = expert_rows(config, config.ep_rank, hidden, ids, received.topk_weights)
    payloads = received_payloads(received)
    seen = (_copied(received.recv_counts), _copied(received.topk_ids))
    copies = tuple(_copied(payload) for payload in payloads)
    if zero_copy:
        rows = exchange.combine_input(channel=channel).copy_(rows)
    added = added_rows(inputs.hidden_states, add)
    output = added if add == "in place" else None
    combined = exchange.combine(rows, received.metadata, output=output, add=added, scale=scale)
    return Seen(*seen, copies, _copied(received.metadata.send_slots), _copied(combined))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def run_case(
    case: Case, rounds: int = 2, device: str = "host", transport: str | None = None
) -> list[list[Seen]]:
    """`result[round][rank]`: the same inputs in every round, quantised by turns by the dispatch and
    by the caller.
    """
    torch_device = {"host": "cpu", "cuda": "cuda"}[device]
    inputs = make_inputs(case)

    def rank_main(group: ThreadGroup) -> list[Seen]:
        config = dataclasses.replace(case.config(group.rank), transport=transport)
        with MoeAllToAll.create(config, group, torch_device) as exchange:
            return [
                run_round(
                    exchange,
                    inputs[group.rank],
                    channel=number % case.num_channels,
                    zero_copy=number % 2 == 0,
                    post_quant=number % 2 == 1,
                    add=case.add,
                    scale=case.scale,
                    active_ranks=case.mask(group.rank, torch_device),
                )
                for number in range(rounds)
            ]

    by_rank = run_ranks(case.ep_size, rank_main)
    return [[seen[number] for seen in by_rank] for number in range(rounds)]


_SEVEN_EXTRAS: tuple[Extra, ...] = (
    (torch.uint8, (1,)),
    (torch.uint8, (3, 5)),
    (torch.int64, (2,)),
    (torch.bfloat16, (7,)),
    (torch.float64, (1,)),
    (torch.bool, (11,)),
    (torch.uint8, (259,)),
)

CASES: tuple[Case, ...] = (
    Case(name="one rank", tokens=(5,)),
    Case(name="two ranks, full", tokens=(8, 8)),
    Case(name="three ranks, all counts different", tokens=(0, 3, 8), num_experts=10, top_k=3),
    Case(name="five ranks, top_k 1", tokens=(1, 2, 3, 4, 5), top_k=1),
    Case(name="eight ranks, top_k 22", tokens=(0, 1, 2, 3, 5, 6, 7, 8), num_experts=64, top_k=22),
    Case(name="top_k 32 of 33 experts", tokens=(4, 2, 7), num_experts=33, top_k=32),
    Case(name="nobody has a token", tokens=(0, 0, 0, 0)),
    Case(name="one token in all", tokens=(0, 1, 0, 0)),
    Case(name="experts not divisible", tokens=(8, 4, 2, 6), num_experts=11, top_k=5),
    Case(name="fewer experts than ranks", tokens=(3, 1, 4, 1, 5), num_experts=3, top_k=3),
    Case(name="one expert", tokens=(2, 4, 8), num_experts=1, top_k=1),
    Case(name="all to one rank", tokens=(8, 8, 8, 8), routing="to one rank"),
    Case(name="none to a rank", tokens=(8, 7, 6, 5), routing="none to rank 1"),
    Case(name="duplicate experts", tokens=(6, 8, 3), top_k=6, routing="duplicates"),
    Case(name="invalid ids", tokens=(8, 5, 8), top_k=6, routing="invalid"),
    Case(name="no id is an expert", tokens=(8, 5), routing="all invalid"),
    Case(name="int64 ids", tokens=(8, 5, 2), ids_dtype=torch.int64),
    Case(name="int64 invalid", tokens=(8, 5), routing="invalid", ids_dtype=torch.int64),
    Case(name="ids that would wrap", tokens=(8, 8), routing="wrapping", ids_dtype=torch.int64),
    Case(name="rows of one element", tokens=(3, 8), hidden_size=1),
    Case(name="rows of odd bytes", tokens=(7, 8, 1), hidden_size=101, dtype=torch.bfloat16),
    Case(name="rows beyond one vector", tokens=(4, 4), hidden_size=1031),
    Case(name="eight payloads", tokens=(4, 8, 0), extras=_SEVEN_EXTRAS),
    Case(name="large extra payload", tokens=(8, 2), extras=((torch.uint8, (4099,)),)),
    Case(name="three channels", tokens=(5, 8), num_channels=3),
    Case(name="capacity 1", tokens=(1, 0, 1), capacity=1),
    Case(name="capacity 37", tokens=(37, 36, 1), capacity=37, num_experts=7, top_k=2),
    Case(name="three threads", tokens=(37, 20, 0), capacity=37, num_threads=3),
    Case(
        name="three threads, eight payloads",
        tokens=(8, 5, 7),
        num_threads=3,
        extras=_SEVEN_EXTRAS,
        routing="invalid",
        top_k=7,
    ),
    *(
        Case(
            name=f"{dtype} {hidden_size}",
            tokens=(8, 3, 5, 0),
            dtype=dtype,
            hidden_size=hidden_size,
            top_k=8,
            num_threads=num_threads,
        )
        for dtype in (torch.bfloat16, torch.float16)
        for hidden_size, num_threads in ((64, 1), (77, 3))
    ),
)

#: Every case with every recipe; the formats of combine take turns.
RECIPE_CASES: tuple[Case, ...] = tuple(
    with_formats(case, recipe, list(COMBINE_FORMATS)[(number + turn) % len(COMBINE_FORMATS)])
    for number, case in enumerate(CASES)
    for turn, recipe in enumerate(RECIPES)
)

#: Few of them, of one element type and top_k, so that a GPU's compiler has little to do: each
#: recipe with one format of combine.
CORE_RECIPE_CASES: tuple[Case, ...] = tuple(
    with_formats(
        dataclasses.replace(case, dtype=torch.bfloat16, top_k=8, num_channels=1),
        recipe,
        list(COMBINE_FORMATS)[turn % len(COMBINE_FORMATS)],
    )
    for case in CASES
    if case.name
    in {
        "one rank",
        "three ranks, all counts different",
        "experts not divisible",
        "duplicate experts",
        "invalid ids",
        "rows beyond one vector",
        "eight payloads",
        "capacity 37",
    }
    for turn, recipe in enumerate(RECIPES)
)
