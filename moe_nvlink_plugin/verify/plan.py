"""Which checks `moe-nvlink verify` runs for a geometry."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from moe_nvlink_plugin import HeadConfig, driver, env
from moe_nvlink_plugin.choices import TODAY, Choices
from moe_nvlink_plugin.config import ACTIVATION_DTYPES
from moe_nvlink_plugin.exchange.sizes import gets_by_tma

from .cases import ADDS, COMBINE_FORMATS, RECIPES, Case, is_small, with_formats
from .checks import Check, Head, Rounds

#: The scale of combine's format fp8_tensor.
_COMBINE_SCALE = 0.375

CPU = torch.device("cpu")

#: The layout of scales that experts of a recipe read, beside the linear one.
_LAYOUTS = {
    "fp8_block": "column_major",
    "fp8_token": "column_major",
    "mxfp8": "interleaved",
    "nvfp4": "interleaved",
}

#: The most tokens of a rank in small batches.
_SMALL_TOKENS = 16
#: With which combine gets rows by TMA.
_FEW_SMS = 16

#: Ids of a slice: more than three pieces of mark_empty_slots, whose CTAs have at most 1024 threads.
_MANY_IDS = 3 * 16 * 1024

_MIXED = "large and small in turn"
#: By whether they hold no thread.
_SIGNALS = {False: "ordinary signals", True: "asynchronous signals"}

#: Rows of the vocabulary for each rank of the head's check. The kernels know no other size of it.
_VOCABULARY = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What the checks and the table take from the user's model.

    Attributes:
        ep_size: ranks.
        num_experts: routed experts over all ranks.
        top_k: expert ids of a token.
        hidden_size: elements of a row.
        max_tokens: most tokens of a rank in the checks with the kernels for large batches.
        dtype: of activations.
        timeout_s: seconds that a rank waits for another one.
        choices: of the launches, in every check.
    """

    ep_size: int
    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    timeout_s: float = 20.0
    choices: Choices = TODAY

    def case(self, name: str, capacity: int, device: torch.device) -> Case:
        """Return a case of this geometry."""
        return Case(
            name=name,
            tokens=(capacity,) * self.ep_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            capacity=capacity,
            dtype=self.dtype,
            routing="invalid",
            timeout_s=self.timeout_s,
            choices=self.choices,
            # Large batches keep a source's order with one CTA only, and a GPU takes many.
            num_threads=1 if device.type == "cpu" else 2,
        )


def plan(geometry: Geometry, device: torch.device, *, quick: bool) -> list[Check]:
    """Return the checks, the quickest sign of trouble first. Local; equal on every rank."""
    large = geometry.case("large batches", geometry.max_tokens, device)
    tokens = min(_SMALL_TOKENS, geometry.max_tokens)
    small = dataclasses.replace(geometry.case("small batches", tokens, device), small=True)
    checks = [
        Rounds(name="large batches", case=large, rounds=6),
        Rounds(name="small batches", case=small, rounds=12),
        _mixed(large),
    ]
    if device.type == "cuda":
        checks += _on_gpus(large, small, device)
    if not quick:
        checks += [*_formats(large, small), *_arguments(large, small), _many_slots(large)]
        checks += _ways(large, small)
    return [*checks, *_heads(geometry)]


def _mixed(large: Case) -> Rounds:
    """Return rounds of both kinds of kernels, if max_tokens is above 1."""
    most = min(_SMALL_TOKENS, max(large.capacity // 2, 1))
    bounds = (large.capacity, most, max(most // 2, 1))
    return Rounds(name=_MIXED, case=large, rounds=12, small_tokens=most, bounds=bounds)


def has_async_release(device: torch.device) -> bool:
    """Return whether the plan has rounds with such signals. Local; ranks must not differ."""
    return device.type == "cuda" and driver.has_async_release(device.index or 0)


def _on_gpus(large: Case, small: Case, device: torch.device) -> Iterator[Rounds]:
    for case in (large, small):
        yield Rounds(name=f"{case.name}, CUDA graph", case=case, rounds=12, captured=True)
        yield Rounds(name=f"{case.name}, without PDL", case=case, rounds=6, pdl=False)
    by_tma = dataclasses.replace(large, max_sms=_FEW_SMS)
    if gets_by_tma(by_tma.config(0)):
        yield Rounds(name=f"{large.name}, combine by TMA", case=by_tma, rounds=12)
    leaving = dataclasses.replace(large, leave_sms=True)
    yield Rounds(name=f"{large.name}, leaving SMs", case=leaving, rounds=6, beside=True)
    for case in (large, small) if has_async_release(device) else ():
        is_async = not case.choices.async_release
        other = dataclasses.replace(case, choices=case.choices.but("async_release", is_async))
        yield Rounds(name=f"{case.name}, {_SIGNALS[is_async]}", case=other, rounds=12)
    for data_bytes in env.UNIT_DATA_BYTES:
        if data_bytes != small.config(0).unit_data_bytes:
            other = dataclasses.replace(small, unit_data_bytes=data_bytes)
            yield Rounds(name=f"{small.name}, units of {data_bytes} bytes", case=other, rounds=12)


def unsuited(geometry: Geometry) -> list[str]:
    """Return what no check has, because rows of the geometry do not suit it.

    That are formats whose blocks do not divide a row, and kernels for small batches, which take
    whole words: their rounds run the kernels for large ones.
    """
    blocks = {f"recipe {name}": block for name, block in RECIPES.items()}
    blocks |= {f"combine {name}": block for name, block in COMBINE_FORMATS.items()}
    left_out = [name for name, block in blocks.items() if geometry.hidden_size % block]
    tokens = min(_SMALL_TOKENS, geometry.max_tokens)
    small = dataclasses.replace(geometry.case("small batches", tokens, CPU), small=True)
    if not is_small(small.config(0), "combine"):
        left_out.append("small combine")
    for recipe in (None, *RECIPES):
        if recipe is not None and geometry.hidden_size % RECIPES[recipe]:
            continue
        if not is_small(with_formats(small, recipe).config(0)):
            left_out.append(f"small dispatch of {recipe or 'unquantised rows'}")
    return left_out


def _formats(large: Case, small: Case) -> Iterator[Rounds]:
    """Yield each recipe with each kind of kernel; the formats of combine take turns."""
    hidden_size = large.hidden_size
    backs = [name for name, block in COMBINE_FORMATS.items() if hidden_size % block == 0]
    recipes = [name for name, block in RECIPES.items() if hidden_size % block == 0]
    pairs = [(recipe, backs[turn % len(backs)]) for turn, recipe in enumerate(recipes)]
    for recipe, back in [*pairs, *((None, back) for back in backs[1:])]:
        for case in (large, small):
            formatted = with_formats(case, recipe, back)
            if back == "fp8_tensor":
                formatted = dataclasses.replace(formatted, combine_scale=_COMBINE_SCALE)
            is_quantised = recipe is not None
            yield Rounds(name=formatted.name, case=formatted, rounds=3, quantised=is_quantised)
    for recipe, layout in _LAYOUTS.items():
        for case in (large, small) if recipe in recipes else ():
            formatted = with_formats(case, recipe)
            yield Rounds(
                name=f"{formatted.name}, {layout} scales",
                case=dataclasses.replace(formatted, scales_layout=layout),
                rounds=3,
                quantised=True,
            )
    for dtype in ACTIVATION_DTYPES:
        for case in (large, small) if dtype is not large.dtype else ():
            name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            yield Rounds(name=name, case=dataclasses.replace(case, dtype=dtype), rounds=3)


def _arguments(large: Case, small: Case) -> Iterator[Rounds]:
    """Yield what frameworks ask for beside rows."""
    for case in (large, small):
        yield Rounds(
            name=f"{case.name}, ids elsewhere, padding, sums added to",
            case=dataclasses.replace(case, received_ids="elsewhere", scale=2.5),
            rounds=6,
            padded=True,
            adds=ADDS[1:],
        )
        yield Rounds(
            name=f"{case.name}, local ids of 64 bits, extra payloads",
            case=dataclasses.replace(
                case,
                received_ids="local",
                routing="wrapping",
                ids_dtype=torch.int64,
                extras=((torch.uint8, (12,)), (torch.bfloat16, (6,)), (torch.int64, (1,))),
            ),
            rounds=4,
        )
        yield Rounds(
            name=f"{case.name}, counts per expert",
            case=dataclasses.replace(case, num_expert_counts=case.num_experts),
            rounds=4,
            padded=True,
        )
        if case.ep_size == 1:
            continue  # it cannot leave out itself
        left_out = dataclasses.replace(case, left_out=(case.ep_size - 1,))
        yield Rounds(name=f"{case.name}, one rank left out", case=left_out, rounds=4)
        yield Rounds(name=f"{case.name}, one rank leaves", case=left_out, rounds=6, leaves_at=3)


def _many_slots(large: Case) -> Rounds:
    """Return rounds whose empty slots the kernels mark in several pieces, on a GPU too."""
    case = dataclasses.replace(
        large,
        capacity=max(large.capacity, -(-_MANY_IDS // large.top_k)),
        hidden_size=min(large.hidden_size, 32),
        tokens=tuple(min(tokens, _SMALL_TOKENS) for tokens in large.tokens),
        received_ids="local",
    )
    return Rounds(name="few tokens, many empty slots", case=case, rounds=3)


def _ways(large: Case, small: Case) -> Iterator[Rounds]:
    """Yield other ways to call, and ranks that are late or busy."""
    for case in (large, small):
        yield Rounds(
            name=f"{case.name}, 3 channels",
            case=dataclasses.replace(case, num_channels=3),
            rounds=9,
        )
        yield Rounds(name=f"{case.name}, beside the caller", case=case, rounds=6, beside=True)
        if case.num_threads == 1:  # on a CPU
            threads = dataclasses.replace(case, num_threads=3)
            yield Rounds(name=f"{case.name}, 3 threads a rank", case=threads, rounds=6)
        counted = dataclasses.replace(case, num_expert_counts=case.num_experts)
        yield Rounds(name=f"{case.name}, late ranks", case=counted, rounds=20, late=True)
        yield Rounds(name=f"{case.name}, busy device", case=case, rounds=10, loaded=True)
    ordered = dataclasses.replace(large, ordered_slots=True, num_threads=3)
    yield Rounds(name=f"{large.name}, rows in the order of their tokens", case=ordered, rounds=4)
    yield dataclasses.replace(_mixed(large), name=_MIXED + ", late ranks", rounds=36, late=True)


def _heads(geometry: Geometry) -> Iterator[Head]:
    for rows in (3, 70):
        yield Head(
            name=f"shared LM head, up to {rows} rows",
            config=HeadConfig(
                tp_size=geometry.ep_size,
                tp_rank=0,
                vocab_size=_VOCABULARY * geometry.ep_size - 5,
                hidden_size=geometry.hidden_size,
                max_rows_per_rank=rows,
                dtype=geometry.dtype,
                full_logits=True,
                timeout_s=geometry.timeout_s,
            ),
            rounds=4,
        )
