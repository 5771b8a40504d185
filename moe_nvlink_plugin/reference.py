"""Dispatch and combine in plain torch, with all ranks in one process.

The tests compare the kernels with these functions. They follow the contract, not the kernels: they
loop over tokens and ids, where the kernels use slots and cells. They are slow on purpose. Every
function is local.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .config import AllToAllConfig, local_expert_range


@dataclasses.dataclass
class ReceivedRows:
    """Rows that one rank receives from one source rank, in the source's token order.

    Attributes:
        tokens: indices of the source's tokens.
        payloads: one `[rows, ...]` tensor per payload, in the order that dispatch got them.
        topk_ids: `[rows, top_k]`, the type of the source's ids, as AllToAllConfig.received_ids
            says.
        is_absent: `[rows, top_k]` bool: ids that are absent; their weights are 0. Nowhere with
            "global".
    """

    tokens: list[int]
    payloads: list[torch.Tensor]
    topk_ids: torch.Tensor
    is_absent: torch.Tensor


def owner_of(expert: int, num_experts: int, ep_size: int) -> int | None:
    """Return the rank that owns `expert`, or None if the id is no expert."""
    for rank in range(ep_size):
        first, end = local_expert_range(num_experts, ep_size, rank)
        if first <= expert < end:
            return rank
    return None


def target_ranks(topk_ids: torch.Tensor, num_experts: int, ep_size: int) -> list[list[int | None]]:
    """Return `table[token][k]`: the rank that gets the token's row because of this k, or None.

    If a rank owns several of a token's experts, it gets the row because of the first k.

    Args:
        topk_ids: `[num_tokens, top_k]` integers, global expert ids.
        num_experts: number of experts over all ranks.
        ep_size: number of ranks.
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


def absent_id(config: AllToAllConfig, rank: int) -> int:
    """Return what stands for absent ids at a rank, and for all ids of its empty slots."""
    if isinstance(config.received_ids, int):
        return config.received_ids
    if config.received_ids != "elsewhere":
        return -1
    _first, end = local_expert_range(config.num_experts, config.ep_size, rank)
    return end if end < config.num_experts else 0


def received_ids(
    config: AllToAllConfig, ids: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[rows, top_k]` ids as the rank receives them, and bool: which of them are absent."""
    first, end = local_expert_range(config.num_experts, config.ep_size, rank)
    is_expert = (ids >= 0) & (ids < config.num_experts)
    if config.received_ids == "global":
        return torch.where(is_expert, ids, -1), torch.zeros_like(is_expert)
    is_local = (ids >= first) & (ids < end)
    kept = ids - first if config.received_ids == "local" else ids
    return torch.where(is_local, kept, absent_id(config, rank)), ~is_local


def dispatch(
    config: AllToAllConfig,
    topk_ids: Sequence[torch.Tensor],
    payloads: Sequence[Sequence[torch.Tensor]],
    is_padding: Sequence[torch.Tensor] | None = None,
    active_ranks: Sequence[int] | None = None,
) -> list[list[ReceivedRows]]:
    """Return `received[target][source]`: the rows that each rank receives from each rank.

    Args:
        config: geometry; its ep_rank is not used.
        topk_ids: per rank `[num_tokens, top_k]` integers.
        payloads: per rank a list of `[num_tokens, ...]` tensors.
        is_padding: per rank `[num_tokens]` bool; None: no token is padding.
        active_ranks: ranks that take part; None: all. The others send and receive no rows.
    """
    if active_ranks is not None:
        topk_ids = among_ranks(config, topk_ids, active_ranks)
    if is_padding is not None:
        topk_ids = without_padding(topk_ids, is_padding)
    received: list[list[ReceivedRows]] = []
    tables = [target_ranks(ids, config.num_experts, config.ep_size) for ids in topk_ids]
    for target in range(config.ep_size):
        from_sources = []
        for source, table in enumerate(tables):
            tokens = [token for token, row in enumerate(table) if target in row]
            ids, is_absent = received_ids(config, topk_ids[source][tokens], target)
            rows = [chosen_rows(payload, tokens) for payload in payloads[source]]
            from_sources.append(ReceivedRows(tokens, rows, ids, is_absent))
        received.append(from_sources)
    return received


def chosen_rows(payload: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Return these rows of a payload of any type."""
    # Older versions of torch cannot index tensors of 8-bit floats.
    if payload.is_floating_point() and payload.itemsize == 1:
        return payload.view(torch.uint8)[tokens].view(payload.dtype)
    return payload[tokens]


def expert_counts(
    config: AllToAllConfig,
    topk_ids: Sequence[torch.Tensor],
    is_padding: Sequence[torch.Tensor] | None = None,
    active_ranks: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return `[ep_size, num_experts]` int32: how often each rank's ids name each expert.

    Arguments as for `dispatch`. Only ids with a destination count.
    """
    if active_ranks is not None:
        topk_ids = among_ranks(config, topk_ids, active_ranks)
    if is_padding is not None:
        topk_ids = without_padding(topk_ids, is_padding)
    counts = torch.zeros((config.ep_size, config.num_experts), dtype=torch.int32)
    for rank, ids in enumerate(topk_ids):
        for expert in ids.flatten().tolist():
            if 0 <= expert < config.num_experts:
                counts[rank, expert] += 1
    return counts


def among_ranks(
    config: AllToAllConfig, topk_ids: Sequence[torch.Tensor], active_ranks: Sequence[int]
) -> list[torch.Tensor]:
    """Return the ids by which tokens travel if only these ranks take part.

    Experts of other ranks are no experts, and tokens of other ranks have no destination.
    """
    has_owner = torch.zeros(config.num_experts + 1, dtype=torch.bool)  # the last one: no expert
    for rank in active_ranks:
        first, end = local_expert_range(config.num_experts, config.ep_size, rank)
        has_owner[first:end] = True
    result = []
    for rank, ids in enumerate(topk_ids):
        is_expert = (ids >= 0) & (ids < config.num_experts) & (rank in active_ranks)
        travels = has_owner[torch.where(is_expert, ids, config.num_experts).long()]
        result.append(torch.where(travels, ids, -1))
    return result


def without_padding(
    topk_ids: Sequence[torch.Tensor], is_padding: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the ids by which tokens travel: those of padding have no destination."""
    return [
        torch.where(mask[:, None], -1, ids) for ids, mask in zip(topk_ids, is_padding, strict=True)
    ]


def pairwise_tree(rows: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Add rows in fp32 as ((0+1)+(2+3))+...; a missing row leaves its partner unchanged.

    Returns None if every row is missing.
    """
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
    add: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Add up the partial rows of one rank's tokens; return scale * sum + add, rounded once.

    Args:
        config: geometry; its ep_rank is not used.
        topk_ids: `[num_tokens, top_k]` of this rank.
        partial_rows: `partial_rows[target]` is `[num_tokens, hidden_size]`: what the rank `target`
            computed. Rows of tokens that did not travel to `target` are ignored.
        add: `[num_tokens, hidden_size]`, or None.
        scale: factor of the sums, as float32.

    Returns:
        `[num_tokens, hidden_size]` config.dtype. A token without a valid expert gets its row of
        `add` (its sum is -0.0), or zeros.
    """
    table = target_ranks(topk_ids, config.num_experts, config.ep_size)
    result = torch.zeros((len(table), config.hidden_size), dtype=config.dtype)
    factor = torch.tensor(scale, dtype=torch.float32)
    for token, targets in enumerate(table):
        rows = [None if t is None else partial_rows[t][token] for t in targets]
        total = pairwise_tree(rows) if rows else None
        if total is None and add is not None:
            total = torch.full((config.hidden_size,), -0.0, dtype=torch.float32)
        if total is not None:
            total = total * factor
            if add is not None:
                total = total + add[token].float()
            result[token] = total.to(config.dtype)
    return result
