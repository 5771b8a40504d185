"""Formats in which tests send tokens, experts that read them, and what all ranks must get back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig, recipes, reference
from moe_nvlink_plugin.config import local_expert_range

HIDDEN, TOP_K, MAX_TOKENS = 128, 3, 6
#: Where tokens, ids, and what is expected of them live; tests/gpu sets it in its processes.
DEVICE = torch.device("cpu")
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclasses.dataclass(frozen=True)
class Wire:
    """A format of rows.

    Attributes:
        name: for messages.
        format: name of FlashInfer's QuantFormat; "": unquantised rows of `dtype`.
        dtype: of the experts' output, and of unquantised rows.
        make: makes of activations fp32 what the caller dispatches: rows, and scales or None.
        read: makes fp32 of them.
    """

    name: str
    format: str
    dtype: torch.dtype
    make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
    read: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def _plain(dtype: torch.dtype) -> Wire:
    name = str(dtype).removeprefix("torch.")
    return Wire(name, "", dtype, lambda x: (x.to(dtype), None), lambda rows, _scales: rows.float())


def _of_recipe(name: str, format_name: str, recipe: Any, scale: float | None = None) -> Wire:
    def given() -> torch.Tensor | None:
        return None if scale is None else torch.tensor([scale], device=DEVICE)

    def make(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = recipe.quantise(x, given())
        return rows.rows, rows.scales

    def read(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = recipe.dequantise(rows, scales, torch.float32, given())
        return result

    return Wire(name, format_name, torch.bfloat16, make, read)


def _make_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Some e2m1 codes and power-of-two scales, a function of the activations; not a quantiser."""
    bits = (x * 16).to(torch.int64)
    codes = (bits % 16).to(torch.uint8)
    scales = 120 + (bits.view(x.shape[0], HIDDEN // 32, 32)[:, :, 0] % 8).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def _read_mxfp4(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is not None
    codes = torch.stack((rows & 15, rows >> 4), dim=2).flatten(1).long()
    values = _E2M1.to(codes.device)[codes & 7] * (1 - 2 * (codes >> 3))
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)


BF16, FP32 = _plain(torch.bfloat16), _plain(torch.float32)
WIRES = (
    BF16,
    FP32,
    _plain(torch.float16),
    _of_recipe("mxfp8", "MXFP8", recipes.MXFP8),
    _of_recipe("nvfp4", "NVFP4", recipes.NVFP4, 4.0),
    _of_recipe("deepseek fp8", "DeepSeekFp8", recipes.FP8_BLOCK),
    _of_recipe("fp8 per tensor", "FP8PerTensor", recipes.FP8_TENSOR, 0.5),
    Wire("mxfp4", "MXFP4", torch.bfloat16, _make_mxfp4, _read_mxfp4),
)


@dataclasses.dataclass(frozen=True)
class Work:
    """The tokens of one rank: activations fp32, ids int32 and weights fp32."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def works(ep_size: int, num_experts: int, counts: Sequence[int], seed: int = 0) -> list[Work]:
    """The same on every rank. Some ids are no expert's, and some tokens have none at all."""
    found = []
    for rank in range(ep_size):
        random = torch.Generator().manual_seed(100 * seed + rank)
        shape = (counts[rank], TOP_K)
        scores = torch.rand((counts[rank], num_experts), generator=random)
        ids = scores.topk(TOP_K, dim=1).indices.to(torch.int32)
        no_expert = torch.rand(shape, generator=random) < 0.15
        ids = torch.where(no_expert, torch.tensor([-1, num_experts, 2**30])[ids % 3], ids)
        hidden = torch.randn((counts[rank], HIDDEN), generator=random)
        weights = torch.rand(shape, generator=random)
        found.append(Work(hidden.to(DEVICE), ids.to(DEVICE, torch.int32), weights.to(DEVICE)))
    return found


def local_sums(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int, end: int
) -> torch.Tensor:
    """The weighted sums over the experts first..end-1: expert e returns (e + 1) * x + e."""
    total = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        expert = ids[:, k : k + 1].float()
        is_local = (ids[:, k : k + 1] >= first) & (ids[:, k : k + 1] < end)
        partial = weights[:, k : k + 1] * ((expert + 1) * x + expert)
        total = torch.where(is_local, total + partial, total)
    return total


def expected(wire: Wire, work: Work, ep_size: int, num_experts: int) -> torch.Tensor:
    """What combine returns to the rank with this work, bit by bit."""
    config = AllToAllConfig(
        ep_size=ep_size,
        ep_rank=0,
        num_experts=num_experts,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=MAX_TOKENS,
        dtype=wire.dtype,
    )
    x = wire.read(*wire.make(work.hidden))
    partial_rows = [
        local_sums(x, work.ids, work.weights, *local_expert_range(num_experts, ep_size, rank)).to(
            "cpu", wire.dtype
        )
        for rank in range(ep_size)
    ]
    return reference.combine(config, work.ids.cpu(), partial_rows).to(DEVICE)


def rows_as_bytes(*tensors: torch.Tensor) -> list[bytes]:
    """Each row of several tensors `[num_rows, ...]`, as bytes, sorted."""
    count = tensors[0].shape[0]
    flat = [t.cpu().contiguous().view(torch.uint8).reshape(count, -1) for t in tensors if t.numel()]
    return sorted(bytes(row) for row in torch.cat(flat, dim=1).numpy()) if flat else []
