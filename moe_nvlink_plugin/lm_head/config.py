"""HeadConfig: the vocabulary product that a group of ranks shares, validated once."""

from __future__ import annotations

import dataclasses

import torch

from moe_nvlink_plugin.config import (
    ACTIVATION_DTYPES,
    HOST_DEFAULTS,
    MAX_RANKS,
    check_int,
    check_timeouts,
    fill_defaults,
    fill_timeouts,
)
from moe_nvlink_plugin.errors import ConfigError

#: Vocabulary rows of a rank are a multiple of this: rows of logits then start on boundaries of 32
#: bytes in every element type, and the weights' views on boundaries of their rows.
SHARD_MULTIPLE = 16

#: Token ids are kept in 31 bits, and rounding a shard up must not leave them.
MAX_VOCAB_SIZE = 2**31 - MAX_RANKS * SHARD_MULTIPLE


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Geometry and options of an LM head shared by the ranks of a group.

    All ranks must be given equal values, `tp_rank` apart; `HeadGroup.create` checks it.

    Attributes:
        tp_size: ranks that share the product, 1..128.
        tp_rank: this rank, 0..tp_size-1.
        vocab_size: token ids; rows of the head behind them, padding, never win.
        hidden_size: elements of a row and of a row of the head.
        max_rows_per_rank: capacity; the most rows one rank brings in one call.
        dtype: of rows, head and logits: bfloat16, float16 or float32.
        full_logits: make room for sharded_logits: max_rows_per_rank * tp_size * shard_size elements
            of symmetric memory on every rank.
        timeout_s, first_timeout_s: seconds to wait for the other ranks, and until the first
            complete call; as in AllToAllConfig.
        num_threads: host threads per rank; None takes MOE_NVLINK_HOST_THREADS. May differ by rank.
        max_sms: a launch has no more CTAs than so many SMs of a GPU hold; None takes
            MOE_NVLINK_MAX_SMS, and all SMs where that is unset. May differ by rank. The share of
            each rank on one GPU bounds it further.
        transport: how peers reach memory; None chooses by device ("host" for cpu, "nvlink" for
            cuda).

    Raises:
        ConfigError: naming the field, its value and the limit.
    """

    tp_size: int
    tp_rank: int
    vocab_size: int
    hidden_size: int
    max_rows_per_rank: int
    dtype: torch.dtype = torch.bfloat16
    full_logits: bool = False
    timeout_s: float | None = None
    first_timeout_s: float | None = None
    num_threads: int | None = None
    max_sms: int | None = None
    transport: str | None = None

    def __post_init__(self) -> None:
        fill_timeouts(self)
        fill_defaults(self, **HOST_DEFAULTS)
        check_int("tp_size", self.tp_size, 1, MAX_RANKS)
        check_int("tp_rank", self.tp_rank, 0, self.tp_size - 1)
        check_int("vocab_size", self.vocab_size, 1, MAX_VOCAB_SIZE)
        check_int("hidden_size", self.hidden_size, 1, 2**20)
        # Rows are numbered in int32 over all ranks and CTAs that share one.
        check_int("max_rows_per_rank", self.max_rows_per_rank, 1, 2**24 // self.tp_size)
        check_int("num_threads", self.num_threads, 1, 1024)
        if self.max_sms is not None:
            check_int("max_sms", self.max_sms, 1, 1024)
        if self.dtype not in ACTIVATION_DTYPES:
            names = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
            raise ConfigError(f"dtype={self.dtype} is no type of a shared head; use one of {names}")
        if self.full_logits:
            # The kernel counts the bytes of a row in int32, and steps a little behind its end.
            check_int("vocab_size with full_logits", self.vocab_size, 1, 2**28)
        check_timeouts(self.timeout_s, self.first_timeout_s)

    @property
    def shard_size(self) -> int:
        """Vocabulary rows of a rank; the last ranks may have fewer, or none."""
        rows = -(-self.vocab_size // self.tp_size)
        return -(-rows // SHARD_MULTIPLE) * SHARD_MULTIPLE

    def shard(self, rank: int) -> tuple[int, int]:
        """Vocabulary rows `[first, end)` that a rank multiplies with. Local."""
        first = min(rank * self.shard_size, self.vocab_size)
        return first, min(first + self.shard_size, self.vocab_size)
