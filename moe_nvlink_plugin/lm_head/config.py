"""HeadConfig: geometry and options of an LM head that ranks share, validated once."""

from __future__ import annotations

import dataclasses

import torch

from moe_nvlink_plugin import env
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

#: The vocabulary rows of a rank are a multiple of this number. Rows of logits then start at
#: multiples of 32 bytes in every element type, and the views of the weights start at a row.
SHARD_MULTIPLE = 16

#: Token ids have 31 bits, and a shard that is rounded up must stay within them.
MAX_VOCAB_SIZE = 2**31 - MAX_RANKS * SHARD_MULTIPLE


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Geometry and options of an LM head that the ranks of a group share.

    All ranks must have equal values, except `tp_rank`, `num_threads` and `max_sms`.
    `HeadGroup.create` checks this.

    Attributes:
        tp_size: number of ranks that share the product, 1..128.
        tp_rank: number of this rank, 0..tp_size-1.
        vocab_size: number of token ids. Rows of the head from vocab_size on are padding and never
            win.
        hidden_size: number of elements in a row, and in a row of the head.
        max_rows_per_rank: capacity: the most rows of one rank in one call.
        dtype: type of rows, head and logits: bfloat16, float16 or float32.
        full_logits: reserve memory for sharded_logits: max_rows_per_rank * tp_size * shard_size
            elements of symmetric memory on every rank.
        timeout_s: seconds to wait for the other ranks; as in AllToAllConfig.
        first_timeout_s: the same until the first complete call; as in AllToAllConfig.
        num_threads: host threads per rank. None takes MOE_NVLINK_HOST_THREADS. May differ by rank.
        max_sms: number of SMs. A launch has at most as many CTAs as this number of SMs holds. None
            takes MOE_NVLINK_MAX_SMS; if that is unset, all SMs. May differ by rank. Several ranks
            on one GPU lower the limit to their share.
        transport: name of the transport. None chooses by device: "host" for cpu, "nvlink" for cuda.

    Raises:
        ConfigError: a field is out of range; names the field, its value and the limit.
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
        # The kernels number rows in int32, over all ranks and all CTAs that share a row.
        check_int("max_rows_per_rank", self.max_rows_per_rank, 1, 2**24 // self.tp_size)
        check_int("num_threads", self.num_threads, 1, env.MAX_HOST_THREADS)
        if self.max_sms is not None:
            check_int("max_sms", self.max_sms, 1, env.MAX_SMS)
        if self.dtype not in ACTIVATION_DTYPES:
            names = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
            raise ConfigError(f"dtype={self.dtype} is no type of a shared head; use one of {names}")
        if self.full_logits:
            # The kernel counts the bytes of a row in int32, and steps a little past its end.
            check_int("vocab_size with full_logits", self.vocab_size, 1, 2**28)
        check_timeouts(self.timeout_s, self.first_timeout_s)

    @property
    def shard_size(self) -> int:
        """Number of vocabulary rows of a rank; the last ranks may have fewer, or none."""
        rows = -(-self.vocab_size // self.tp_size)
        return -(-rows // SHARD_MULTIPLE) * SHARD_MULTIPLE

    def shard(self, rank: int) -> tuple[int, int]:
        """Return the vocabulary rows `[first, end)` by which `rank` multiplies. Local."""
        first = min(rank * self.shard_size, self.vocab_size)
        return first, min(first + self.shard_size, self.vocab_size)
