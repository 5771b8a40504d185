"""Experts of ranks that have died: tokens go to their replicas, and nothing moves any more."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from moe_nvlink_plugin.errors import UnsupportedError

logger = logging.getLogger(__name__)


def leave_out(state: Any, ranks: Collection[int], ep_size: int) -> set[int]:
    """Route no token to ranks that have died, if its expert is also elsewhere. Local.

    The maps change in place, because CUDA graphs have captured their addresses. From now on the
    balancer stands still: its collectives would wait for the dead.

    Args:
        state: vLLM's EplbState of a worker.
        ranks: expert-parallel ranks that have died.
        ep_size: all expert-parallel ranks.

    Returns:
        The logical experts that a layer has on these ranks only.

    Raises:
        UnsupportedError: a rank has died while weights moved.
    """
    if getattr(state, "is_moving", False):
        raise UnsupportedError(
            "the load balancer has not ended its last move of weights, of which some are half-way; "
            "start all servers anew"
        )
    lost: set[int] = set()
    for model in state.model_states.values():
        per_rank = model.physical_to_logical_map.shape[1] // ep_size
        lost |= _drop(model.logical_to_physical_map, model.logical_replica_count, ranks, per_rank)
    if ranks:
        state.step = _stand_still
    return lost


def _drop(
    places: torch.Tensor, counts: torch.Tensor, ranks: Collection[int], per_rank: int
) -> set[int]:
    """Take the dead ranks' places out of `[layers, logical, replicas]`, where -1 is none."""
    there = places >= 0
    dead = torch.tensor(sorted(ranks), dtype=places.dtype, device=places.device)
    alive = there & ~torch.isin(places.div(per_rank, rounding_mode="floor"), dead)
    lost = ~alive.any(-1)
    # A lost expert keeps its places: the exchange sends no token there.
    kept = torch.where(lost[..., None], there, alive)
    order = torch.argsort((~kept).to(torch.int8), dim=-1, stable=True)
    places.copy_(torch.where(kept, places, -1).gather(-1, order))
    counts.copy_(kept.sum(-1))
    return set(lost.any(0).nonzero().flatten().tolist())


def _stand_still(*_args: Any, **_named: Any) -> None:
    """Do nothing, in the place of EplbState.step. Local."""


def watch_moves(state: Any) -> None:
    """Let the state say in `is_moving` whether a move has begun and not ended. Local."""
    rearrange = state.rearrange
    state.is_moving = False

    def rearrange_and_say(*args: Any, **named: Any) -> Any:
        state.is_moving = True
        result = rearrange(*args, **named)
        state.is_moving = False
        return result

    state.rearrange = rearrange_and_say
