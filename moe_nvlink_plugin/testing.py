"""Helpers for tests and benchmarks only: ranks as threads, and generators of routed tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .config import AllToAllConfig

T = TypeVar("T")


class ThreadGroup:
    """Group whose ranks are threads of this process; `ranks(n)` makes one object per rank."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    @classmethod
    def ranks(cls, size: int) -> list[ThreadGroup]:
        """Make one group object per rank."""
        slots: list[Any] = [None] * size
        barrier = threading.Barrier(size, timeout=120)
        return [cls(rank, slots, barrier) for rank in range(size)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collective; waits for at most 120 s."""
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values


def run_ranks(size: int, body: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `body(group)` as every rank at once, each in a thread; return the results in rank order.

    Raises:
        BaseException: the error of the lowest rank that failed, after all ranks have ended.
    """
    outcomes = try_ranks(size, body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


def try_ranks(size: int, body: Callable[[ThreadGroup], T]) -> list[T | BaseException]:
    """Run ranks as run_ranks does; the result of a rank that failed is its exception."""
    outcomes: list[T | BaseException] = [RuntimeError("did not run")] * size

    def rank_main(group: ThreadGroup) -> None:
        try:
            outcomes[group.rank] = body(group)
        except BaseException as error:
            outcomes[group.rank] = error

    groups = ThreadGroup.ranks(size)
    threads = [threading.Thread(target=rank_main, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def random_inputs(
    config: AllToAllConfig,
    num_tokens: int,
    generator: torch.Generator,
    *,
    invalid_fraction: float = 0.0,
    duplicate_fraction: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make one rank's random inputs of dispatch; the experts of a token are distinct.

    Args:
        config: geometry.
        num_tokens: number of tokens.
        generator: of torch, on the CPU.
        invalid_fraction: fraction of the ids that become ids of no expert.
        duplicate_fraction: fraction of the ids that become the token's first id.

    Returns:
        hidden_states `[num_tokens, hidden_size]` config.dtype, topk_ids `[num_tokens, top_k]`
        int32, and topk_weights `[num_tokens, top_k]` float32.
    """
    shape = (num_tokens, config.top_k)
    # Whatever default type and device the program has set.
    made: dict[str, Any] = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    hidden = torch.randn((num_tokens, config.hidden_size), **made).to(config.dtype)
    weights = torch.rand(shape, **made)
    scores = torch.rand((num_tokens, max(config.num_experts, config.top_k)), **made)
    ids = scores.topk(config.top_k, dim=1).indices.to(torch.int32) % config.num_experts
    duplicate = torch.rand(shape, **made) < duplicate_fraction
    ids = torch.where(duplicate, ids[:, :1], ids)
    invalid = torch.rand(shape, **made) < invalid_fraction
    ids_of_no_expert = [-1, config.num_experts, 2**31 - 1, -(2**31)]
    bad = torch.tensor(ids_of_no_expert, dtype=torch.int32, device="cpu")
    picks = torch.randint(0, len(bad), shape, generator=generator, device="cpu")
    return hidden, torch.where(invalid, bad[picks], ids).contiguous(), weights


def generators(size: int, seed: int) -> Sequence[torch.Generator]:
    """Make one independent CPU generator per rank."""
    return [torch.Generator().manual_seed(seed * 1000 + rank) for rank in range(size)]
