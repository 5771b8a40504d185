"""Who moves the rows, by name."""

from __future__ import annotations

from typing import Any

from . import peers
from .expected import Context, Side, WrongResult
from .options import Options
from .ours import Ours

#: Every name of options.BACKENDS.
BACKENDS: dict[str, Any] = {
    side.name: side
    for side in (
        *(Ours, peers.GlooGather, peers.AllToAll, peers.GlooGatherFull, peers.AllToAllFull),
        *(peers.NcclGather, peers.FlashInfer),
    )
}


def unavailable(name: str, options: Options) -> str | None:
    """Why a backend cannot run with these options on this machine, or None. Local."""
    reason: str | None = BACKENDS[name].unavailable(options)
    return reason


__all__ = ["BACKENDS", "Context", "Side", "WrongResult", "unavailable"]
