"""Launch geometry of the kernels on a GPU: CTAs, threads, and how many CTAs share a token's row.

Plain arithmetic on counts, so that it can be tested without a GPU. The rules come from how the
kernels hide latency (kernels/README.md); their constants are estimates until they have
been measured on a GPU.

A grid never exceeds what a GPU without other work holds at once: a CTA that starts late only makes
the round longer. Each kernel has a rule of its own, beside the kernel's `Kernel`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from moe_nvlink_plugin.errors import ConfigError

#: Bytes one thread moves at a time (kVectorBytes of platform.h on the GPU).
VECTOR_BYTES = 16
WARP = 32
#: Threads of a CTA when there are tokens enough to fill the GPU: several CTAs then share an SM, and
#: one's barriers hide behind another's copies.
FEW_THREADS = 256
MOST_THREADS = 1024


def share(num_sms: int, num_channels: int, num_ranks: int = 1) -> int:
    """SMs that a kernel may take if each channel of each rank may have one on a GPU at once.

    Two streams may bring the channels to two ranks in different order. If one channel's combine
    filled a GPU, the other channel's would wait for a place there, while the peer's combine of that
    channel fills the peer's GPU and waits for this rank's, and the other way round. Ranks that
    share a GPU keep each other out in the same way, in any order.

    Args:
        num_sms: of the GPU.
        num_channels: of the exchange.
        num_ranks: ranks of the group on the GPU.

    Raises:
        ConfigError: not every kernel gets an SM.
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
    """One launch: CTAs, threads each, and CTAs that share an item, for kernels that split items."""

    blocks: int
    threads: int
    splits: int = 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a kernel may use of a GPU.

    Attributes:
        num_sms: SMs it may fill: the GPU's, or fewer by configuration.
        max_threads: threads of a CTA that its registers allow.
        blocks_per_sm: CTAs of so many threads that one SM holds at once; 0 where none fits.
    """

    num_sms: int
    max_threads: int
    blocks_per_sm: Callable[[int], int]

    def resident(self, threads: int) -> int:
        """CTAs of so many threads that run at the same time."""
        return self.num_sms * self.blocks_per_sm(threads)

    def beside_others(self, num_sms: int) -> Limits:
        """These limits if every kernel that waits beside this one has such limits too.

        One CTA an SM, because more would promise a place that may not exist. If each of two kernels
        took half of what all SMs hold, 2 CTAs of 224 threads could wait on every SM, and the
        other's CTA of 896 threads would fit on none. But if all CTAs together are no more than
        there are SMs, a CTA that has no place yet always finds an SM without any of them.

        Args:
            num_sms: of `share`.
        """
        return dataclasses.replace(
            self,
            num_sms=min(self.num_sms, num_sms),
            blocks_per_sm=lambda threads: min(self.blocks_per_sm(threads), 1),
        )


def whole_warps(threads: int, most: int) -> int:
    """At least so many threads, in whole warps, but no more than `most` and no fewer than one."""
    return max(min(ceil_div(threads, WARP) * WARP, most // WARP * WARP, MOST_THREADS), WARP)


def ceil_div(count: int, size: int) -> int:
    """Parts of at most `size` that `count` falls into."""
    return -(-count // size)
