"""A MoE layer on one process, without a framework and without any exchange, and how far off one is.

Experts are one weight matrix each; any function that tells them apart would do.
"""

from __future__ import annotations

import math

import torch


def experts_of(num_experts: int, hidden_size: int) -> torch.Tensor:
    """Weights, `[experts, hidden_size, hidden_size]`."""
    random = torch.Generator().manual_seed(11)
    drawn = torch.randn(num_experts, hidden_size, hidden_size, generator=random)
    scaled: torch.Tensor = hidden_size**-0.5 * drawn
    return scaled


def dense_of(
    experts: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer's output in float32; ids of -1 add nothing."""
    every = torch.tanh(torch.einsum("nh,ehj->nej", hidden.float(), experts))
    index = ids.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, hidden.shape[1])
    return (every.gather(1, index) * torch.where(ids < 0, 0.0, weights).unsqueeze(-1)).sum(1)


def worst_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error. Told, not asserted: a rank that stops would leave the others waiting."""
    if got.shape != expected.shape:
        return math.inf
    errors: list[float] = (got - expected).abs().nan_to_num(nan=math.inf).flatten().tolist()
    return max([0.0, *errors])
