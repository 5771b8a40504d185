"""Dispatch and combine in plain torch, all ranks in one process: what the kernels are held to.

Written from the contract, not from the kernels: loops over tokens and ids where the kernels have
slots and cells. Slow on purpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .config import AllToAllConfig, local_expert_range


@dataclasses.dataclass
class ReceivedRows:
    """What one rank receives from one source, in the source's token order.

    tokens: indices of the source's tokens; payloads: one `[rows, ...]` tensor per payload, in the
    order given to dispatch; topk_ids: `[rows, top_k]`, ids that are no experts replaced by -1.
    """

    tokens: list[int]
    payloads: list[torch.Tensor]
    topk_ids: torch.Tensor


def owner_of(expert: int, num_experts: int, ep_size: int) -> int | None:
    """The rank that owns an expert, or None where the id is no expert."""
    for rank in range(ep_size):
        first, end = local_expert_range(num_experts, ep_size, rank)
        if first <= expert < end:
            return rank
    return None


def target_ranks(topk_ids: torch.Tensor, num_experts: int, ep_size: int) -> list[list[int | None]]:
    """Per token and k: the rank that gets a row because of this k; None for all others.

    A rank that owns more than one of them gets its row for the first k.
    """
    table: list[list[int | None]] = []
    for ids in topk_ids.tolist():
        seen: set[int] = set()
        row: list[int | None] = []
        for expert in ids:
            owner = owner_of(expert, num_experts, ep_size)
            row.append(owner if owner is not None and owner not in seen else None)
            if owner is not None:
                seen.add(owner)
        table.append(row)
    return table


def dispatch(
    config: AllToAllConfig,
    topk_ids: Sequence[torch.Tensor],
    payloads: Sequence[Sequence[torch.Tensor]],
) -> list[list[ReceivedRows]]:
    """`result[target][source]` of ranks that hold `topk_ids[rank]` and `payloads[rank][i]`."""
    received: list[list[ReceivedRows]] = []
    tables = [target_ranks(ids, config.num_experts, config.ep_size) for ids in topk_ids]
    for target in range(config.ep_size):
        from_sources = []
        for source, table in enumerate(tables):
            tokens = [token for token, row in enumerate(table) if target in row]
            ids = topk_ids[source][tokens]
            is_expert = (ids >= 0) & (ids < config.num_experts)
            rows = [payload[tokens] for payload in payloads[source]]
            from_sources.append(ReceivedRows(tokens, rows, torch.where(is_expert, ids, -1)))
        received.append(from_sources)
    return received


def pairwise_tree(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Sum over k in fp32 as ((0+1)+(2+3))+...; a missing row leaves its partner as it is."""
    level: list[torch.Tensor | None] = [None if row is None else row.float() for row in rows]
    while len(level) > 1:
        paired: list[torch.Tensor | None] = []
        for left, right in zip(level[::2], [*level[1::2], None], strict=False):
            if left is None or right is None:
                paired.append(right if left is None else left)
            else:
                paired.append(left + right)
        level = paired
    return level[0]


def combine(
    config: AllToAllConfig,
    topk_ids: torch.Tensor,
    partial_rows: Sequence[torch.Tensor],
) -> torch.Tensor:
    """One rank's result; `partial_rows[target][token]` is what `target` computed for the token.

    Args:
        topk_ids: `[num_tokens, top_k]` of this rank.
        partial_rows: per target rank `[num_tokens, hidden_size]`; rows of tokens that did not go
            there are ignored.
    """
    table = target_ranks(topk_ids, config.num_experts, config.ep_size)
    result = torch.zeros((len(table), config.hidden_size), dtype=config.dtype)
    for token, targets in enumerate(table):
        rows = [None if t is None else partial_rows[t][token] for t in targets]
        total = pairwise_tree(rows) if rows else None
        if total is not None:
            result[token] = total.to(config.dtype)
    return result
