"""Make the tokens of every rank: activations, expert ids and weights, the same for the same seed.

Every rank can make every other rank's tokens, so that it can check row by row what arrives. A token
has no expert twice. (The reference benchmark's random router draws with replacement.)

| router  | a token's experts |
|---------|---|
| uniform | random, all alike |
| perfect | every rank gets as many rows as any other, each token's on as many ranks as can be: the reference's --perfect_router |
| spread  | random, on ranks in turn from a random one on: as many ranks a token as can be, not evenly |
| local   | this rank's own first, then those of the ranks after it: the least that leaves the rank |
| hotspot | random, those of rank 0 four times as likely |
| zipf    | random, the n-th most popular 1/n as likely; which those are is the seed's, for all ranks |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_nvlink_plugin.config import local_expert_range

from .options import Options

HOTSPOT_FACTOR = 4.0


class RankTokens(NamedTuple):
    """What one rank dispatches.

    hidden: `[tokens, hidden_size]` of options.dtype; topk_ids: `[tokens, top_k] int32`;
    topk_weights: `[tokens, top_k] float32`.
    """

    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device | str) -> RankTokens:
        return RankTokens(*(tensor.to(device) for tensor in self))


def tokens_of(options: Options, tokens: int, rank: int) -> RankTokens:
    """Make the tokens of one rank, on the CPU."""
    generator = _generator(options, rank, stream=1)
    shape = (tokens, options.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(options.torch_dtype)
    weights = torch.rand((tokens, options.top_k), generator=generator)
    return RankTokens(hidden, ids_of(options, tokens, rank), weights)


def ids_of(options: Options, tokens: int, rank: int) -> torch.Tensor:
    """Make the topk_ids of tokens_of alone, `[tokens, top_k] int32`, which is cheap."""
    generator = _generator(options, rank, stream=0)
    return _ROUTERS[options.router](options, tokens, rank, generator).to(torch.int32)


def target_table(ids: torch.Tensor, num_experts: int, ep_size: int) -> torch.Tensor:
    """Say which ranks own an expert of the token, `[tokens, ep_size] bool`."""
    table = torch.zeros((len(ids), ep_size), dtype=torch.bool, device=ids.device)
    return table.scatter_(1, owners(num_experts, ep_size).to(ids.device)[ids.long()], True)


def owners(num_experts: int, ep_size: int) -> torch.Tensor:
    """Return the rank of each expert, `[num_experts] int64`."""
    found = torch.empty(num_experts, dtype=torch.int64)
    for rank in range(ep_size):
        first, end = local_expert_range(num_experts, ep_size, rank)
        found[first:end] = rank
    return found


def _generator(options: Options, rank: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed((options.seed * 1009 + rank) * 2 + stream)


def _uniform(options: Options, tokens: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    return _drawn(torch.ones(options.num_experts), tokens, options.top_k, generator)


def _drawn(
    likely: torch.Tensor, tokens: int, top_k: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw `[tokens, top_k]`, no expert twice: each next one as likely as its share of the rest.

    The least of exponential waiting times at these rates come in that order.
    """
    waits = torch.empty((tokens, len(likely))).exponential_(generator=generator) / likely
    return waits.topk(top_k, dim=1, largest=False).indices


def _perfect(options: Options, tokens: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    # One round after the other over the ranks, each round with the ranks' next expert. Ranks begin
    # at themselves, so that over all sources no target has more than another.
    turn = torch.arange(tokens * options.top_k).reshape(tokens, options.top_k) + rank
    experts = options.num_experts // options.ep_size
    target = turn % options.ep_size
    return target * experts + turn // options.ep_size % experts


def _spread(options: Options, tokens: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    # Experts in rounds over the ranks; a rank's own order and where the rounds begin are random.
    drawn = torch.rand((tokens, options.num_experts), generator=generator)
    owner = owners(options.num_experts, options.ep_size)
    num_owners = int(owner.max()) + 1
    first = torch.randint(0, num_owners, (tokens, 1), generator=generator)
    in_round = (owner - first) % num_owners
    which_round = torch.empty_like(in_round)
    for target in range(num_owners):
        own = owner == target
        which_round[:, own] = drawn[:, own].argsort(dim=1).argsort(dim=1)
    turn = which_round * num_owners + in_round
    return turn.topk(options.top_k, dim=1, largest=False).indices


def _local(options: Options, tokens: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    # All experts of a rank are nearer than any of the rank after it; within a rank: random.
    owner = owners(options.num_experts, options.ep_size)
    distance = (owner - rank) % options.ep_size
    drawn = torch.rand((tokens, options.num_experts), generator=generator)
    return (distance + drawn).topk(options.top_k, dim=1, largest=False).indices


def _hotspot(options: Options, tokens: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    likely = torch.ones(options.num_experts)
    likely[slice(*local_expert_range(options.num_experts, options.ep_size, 0))] = HOTSPOT_FACTOR
    return _drawn(likely, tokens, options.top_k, generator)


def _zipf(options: Options, tokens: int, rank: int, generator: torch.Generator) -> torch.Tensor:
    of_all_ranks = torch.Generator().manual_seed(options.seed)
    likely = torch.empty(options.num_experts)
    popular = torch.randperm(options.num_experts, generator=of_all_ranks)
    likely[popular] = 1.0 / torch.arange(1, options.num_experts + 1)
    return _drawn(likely, tokens, options.top_k, generator)


_Router = Callable[[Options, int, int, torch.Generator], torch.Tensor]
_ROUTERS: dict[str, _Router] = {
    "uniform": _uniform,
    "perfect": _perfect,
    "spread": _spread,
    "local": _local,
    "hotspot": _hotspot,
    "zipf": _zipf,
}
