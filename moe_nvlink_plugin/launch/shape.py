"""Launch geometry of the kernels on a GPU: CTAs, threads, and how many CTAs share a token's row.

The rules are plain arithmetic on counts, so tests need no GPU. They follow from how the kernels
hide latency (kernels/README.md). What they choose freely is the table of choices.py.

A grid never exceeds what a GPU without other work holds at once, because a CTA that starts late
only makes the round longer. The rule of each kernel stands beside its `Kernel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from moe_nvlink_plugin.errors import ConfigError

#: Bytes that one thread moves at a time (kVectorBytes of platform_gpu.h).
VECTOR_BYTES = 16
WARP = 32
MOST_THREADS = 1024


def share(num_sms: int, num_channels: int, num_ranks: int = 1) -> int:
    """Return how many SMs a kernel may fill if a kernel of each channel and rank may run at once.

    Without this limit two ranks could wait for each other forever. Two streams may start the
    channels on two ranks in different order. Then rank 0's combine of channel A could fill its GPU
    while rank 1's combine of channel B fills the other GPU. Each would wait for a kernel of the
    other rank that finds no SM. Ranks that share a GPU could block each other in the same way.

    Args:
        num_sms: SMs of the GPU.
        num_channels: channels of the exchange.
        num_ranks: ranks of the group on the GPU.

    Raises:
        ConfigError: there are more such kernels than SMs.
    """
    if num_channels * num_ranks > num_sms:
        raise ConfigError(
            f"{num_ranks} rank(s) of the group on one GPU, {num_channels} channel(s) each: their "
            "kernels wait there at the same time and need an SM each, "
            f"{num_channels * num_ranks} together, and the GPU has {num_sms}; lower num_channels, "
            "or put fewer ranks on a GPU"
        )
    return num_sms // (num_channels * num_ranks)


class Shape(NamedTuple):
    """Shape of one launch.

    Attributes:
        blocks: CTAs.
        threads: threads of each CTA.
        splits: CTAs that share an item; in kernels for small batches the CTAs that send; 1 if the
            kernel does not split.
        shared_bytes: shared memory of a CTA beside what the kernel declares.
    """

    blocks: int
    threads: int
    splits: int = 1
    shared_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a kernel may use of a GPU.

    Attributes:
        num_sms: SMs that the kernel may fill: all, or fewer by configuration.
        max_threads: most threads of a CTA that the kernel's registers allow.
        blocks_per_sm: returns how many CTAs of so many threads one SM holds at once; 0: none fits.
        shared_bytes: most shared memory of a CTA beside what the kernel declares.
    """

    num_sms: int
    max_threads: int
    blocks_per_sm: Callable[[int], int]
    shared_bytes: int = 0

    def resident(self, threads: int) -> int:
        """Return how many CTAs of so many threads run at the same time."""
        return self.num_sms * self.blocks_per_sm(threads)

    def beside_others(self, num_sms: int) -> Limits:
        """Return these limits for a kernel beside which other kernels with such limits may wait.

        They allow one CTA per SM, because more CTAs could leave another kernel without a place. If
        each of two kernels took half of what all SMs hold, 2 CTAs of 224 threads could wait on
        every SM, and a CTA of 896 threads of the other kernel would fit on none. But if all kernels
        together have no more CTAs than there are SMs, a CTA without a place always finds an SM
        that holds no other of them.

        Args:
            num_sms: the result of `share`.
        """
        return dataclasses.replace(
            self,
            num_sms=min(self.num_sms, num_sms),
            blocks_per_sm=lambda threads: min(self.blocks_per_sm(threads), 1),
        )


def whole_warps(threads: int, most: int) -> int:
    """Round threads up to whole warps; at most `most` threads and 1024, and at least one warp."""
    return max(min(ceil_div(threads, WARP) * WARP, most // WARP * WARP, MOST_THREADS), WARP)


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of at most `size` make up `count`."""
    return -(-count // size)
