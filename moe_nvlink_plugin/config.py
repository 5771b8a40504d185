"""AllToAllConfig: what one MoE layer's exchange looks like, validated once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from . import env
from .errors import ConfigError

#: Limits; the kernels' own constants are compared with these in tests/unit/test_header.py.
MAX_RANKS = 128
MAX_TOP_K = 32
MAX_CALLER_PAYLOADS = 8
MAX_CHANNELS = 64

#: Formats in which partial rows travel back; bf16 stands for rows of config.dtype as they are.
COMBINE_FORMATS = ("bf16", "fp8_block", "nvfp4")

#: Activation types combine can reduce and write.
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Fields that every configuration has and takes from the environment where they are None.
#: fill_timeouts sees to first_timeout_s.
HOST_DEFAULTS: dict[str, Callable[[], object]] = {
    "timeout_s": env.timeout_s,
    "num_threads": env.host_threads,
    "max_sms": env.max_sms,
}


def fill_defaults(config: object, **defaults: Callable[[], object]) -> None:
    """Writes a frozen configuration's fields that are None once, to be read as plain values."""
    for name, default in defaults.items():
        if getattr(config, name) is None:
            object.__setattr__(config, name, default())


def fill_timeouts(config: Any) -> None:
    """Writes first_timeout_s of a frozen configuration that has no timeout; before fill_defaults.

    A caller who gives timeout_s alone means every wait: first_timeout_s then stays None, so that
    dataclasses.replace(config, timeout_s=...) means every wait as well.
    """
    if config.first_timeout_s is None and config.timeout_s is None:
        object.__setattr__(config, "first_timeout_s", env.first_timeout_s())


def local_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """Experts `[first, end)` that `ep_rank` owns.

    Ranks own contiguous ranges; where ep_size does not divide num_experts, the first
    `num_experts % ep_size` ranks own one expert more than the rest. Local.
    """
    # Not divmod: torch.compile cannot trace that, and experts ask this inside their layer.
    fewest, num_larger = num_experts // ep_size, num_experts % ep_size
    first = ep_rank * fewest + min(ep_rank, num_larger)
    return first, first + fewest + (1 if ep_rank < num_larger else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllToAllConfig:
    """Geometry and options of one layer's dispatch and combine.

    All ranks must be given equal values, `ep_rank` apart; `MoeAllToAll.create` checks it.

    Attributes:
        ep_size: ranks of the expert-parallel group, 1..128.
        ep_rank: this rank, 0..ep_size-1.
        num_experts: routed experts of the layer, over all ranks.
        top_k: expert ids per token, 1..32.
        hidden_size: elements of an activation row.
        max_tokens_per_rank: capacity; the most tokens one rank dispatches in one call.
        dtype: activation type that combine reduces (in fp32) and writes.
        recipe: name of the format that travels; None takes the unquantised one of `dtype`.
        combine: format in which the experts' rows travel back. "bf16": as they are, in `dtype`
            whichever it is. "fp8_block", "nvfp4": quantised in blocks by the rank that computed
            them and added in fp32 by the one that gets them; combine_formats.py bounds the error.
            None takes MOE_NVLINK_COMBINE.
        timeout_s: seconds to wait for the other ranks; None takes MOE_NVLINK_TIMEOUT_S.
        first_timeout_s: seconds to wait for them until the first complete round, in which a rank
            may still compile, load or tune its experts. None takes timeout_s if that is given,
            else MOE_NVLINK_FIRST_TIMEOUT_S.
        num_channels: independent control and buffer sets, one for each micro-batch in flight. On a
            GPU each channel's kernels take a share of the SMs, one CTA on each, and do without
            programmatic dependent launch, so that those of several streams can wait side by side.
            Layers that share a workspace and run side by side need the same number. Start the ranks
            with CUDA_MODULE_LOADING=EAGER: by default the driver loads a kernel, anybody's, at its
            first launch, and may wait for that until the GPU is idle. If a kernel of one channel
            waits there for a rank whose host does the same in another channel, neither goes on.
        num_threads: host threads per rank; None takes MOE_NVLINK_HOST_THREADS. May differ by rank.
        max_sms: a launch has no more CTAs than so many SMs of a GPU hold, wherever it puts them;
            None takes MOE_NVLINK_MAX_SMS, and all SMs where that is unset. May differ by rank. The
            share of each channel, and of each rank on one GPU, bounds it further.
        extra_payload_bytes: bytes per token of each extra payload, in the order dispatch gets them.
        transport: how peers reach memory; None chooses by device ("host" for cpu, "nvlink" for
            cuda).

    Raises:
        ConfigError: naming the field, its value and the limit.
    """

    ep_size: int
    ep_rank: int
    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: torch.dtype = torch.bfloat16
    recipe: str | None = None
    combine: str | None = None
    timeout_s: float | None = None
    first_timeout_s: float | None = None
    num_channels: int = 1
    num_threads: int | None = None
    max_sms: int | None = None
    extra_payload_bytes: tuple[int, ...] = ()
    transport: str | None = None

    def __post_init__(self) -> None:
        fill_timeouts(self)
        fill_defaults(self, **HOST_DEFAULTS, combine=env.combine)
        object.__setattr__(self, "extra_payload_bytes", tuple(self.extra_payload_bytes))
        self._check_ints()
        self._check_rest()

    def _check_ints(self) -> None:
        check_int("ep_size", self.ep_size, 1, MAX_RANKS)
        check_int("ep_rank", self.ep_rank, 0, self.ep_size - 1)
        check_int("num_experts", self.num_experts, 1, 2**24)
        check_int("top_k", self.top_k, 1, MAX_TOP_K)
        check_int("hidden_size", self.hidden_size, 1, 2**20)
        # Slots are numbered in int32 over all sources; 2^24 tokens of one row are 16 MiB times its
        # bytes, beyond any batch.
        most_tokens = min(2**24, (2**31 - 1) // self.ep_size)
        check_int("max_tokens_per_rank", self.max_tokens_per_rank, 1, most_tokens)
        check_int("num_channels", self.num_channels, 1, MAX_CHANNELS)
        check_int("num_threads", self.num_threads, 1, 1024)
        if self.max_sms is not None:
            check_int("max_sms", self.max_sms, 1, 1024)
        for row_bytes in self.extra_payload_bytes:
            check_int("extra_payload_bytes", row_bytes, 1, 2**24)

    def _check_rest(self) -> None:
        if self.dtype not in ACTIVATION_DTYPES:
            raise ConfigError(
                f"dtype={self.dtype} cannot be combined; use one of "
                + ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
            )
        if self.combine not in COMBINE_FORMATS:
            raise ConfigError(
                f"combine={self.combine!r} (MOE_NVLINK_COMBINE) is no format of combine; use one "
                f"of {', '.join(COMBINE_FORMATS)}"
            )
        check_timeouts(self.timeout_s, self.first_timeout_s)


def check_timeouts(timeout_s: object, first_timeout_s: object) -> None:
    """Both are seconds that a wait can have.

    Raises:
        ConfigError: naming the field, its value and the limit.
    """
    given = {"timeout_s": timeout_s, "first_timeout_s": first_timeout_s}
    if first_timeout_s is None:  # as timeout_s
        del given["first_timeout_s"]
    for name, seconds in given.items():
        if not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise ConfigError(f"{name}={seconds!r} must be between 0 and 1e6 seconds")


def check_int(name: str, value: object, lowest: int, highest: int) -> None:
    """A whole number within limits.

    Raises:
        ConfigError: naming the field, its value and the limits.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ConfigError(f"{name}={value!r} must be an integer from {lowest} to {highest}")
