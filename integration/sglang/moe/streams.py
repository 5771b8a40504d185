"""Keeps rounds on one workspace apart if SGLang starts them on several CUDA streams.

Dispatch and combine of two rounds must not run side by side on one workspace: its cells tell rounds
apart by their order alone. A layer may run on another stream than the layer before it, and an eager
prefill beside other work.
"""

from __future__ import annotations

import weakref

import torch

from moe_nvlink_plugin.integration.common.pool import ExchangePool


class StreamOrder:
    """Lets each eager round begin after the round before it, on whichever streams they are.

    A chain of one event: `ended` records it, `begins` waits for it. In the capture of a CUDA graph
    both do nothing. There each layer depends on the layer before it by the rows it reads, and a
    dependency on work outside of the capture is an error. A replay is ordered by its stream alone:
    an eager round that may run beside a replay needs a workspace of its own.
    """

    def __init__(self) -> None:
        self._ended: torch.cuda.Event | None = None

    def begins(self) -> None:
        """Make the current stream wait for the last round; the host does not wait. Local."""
        if self._ended is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_event(self._ended)

    def ended(self) -> None:
        """Mark the end of a round on the current stream. Local."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self._ended is None:
            self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ended.record()


class NoOrder(StreamOrder):
    """Order of CPU ranks, whose rounds have ended when their calls return."""

    def begins(self) -> None:
        """Return: there is nothing to wait for. Local."""

    def ended(self) -> None:
        """Return: there is nothing to mark. Local."""


_ORDERS: weakref.WeakKeyDictionary[ExchangePool, StreamOrder] = weakref.WeakKeyDictionary()


def order_of(pool: ExchangePool) -> StreamOrder:
    """Return the order of a pool's rounds: one for all layers on its workspace. Local."""
    if pool not in _ORDERS:
        _ORDERS[pool] = StreamOrder() if pool.device.type == "cuda" else NoOrder()
    return _ORDERS[pool]
