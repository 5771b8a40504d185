"""Name the backends that move the rows."""

from __future__ import annotations

from . import peers
from .audited import Audited, AuditWords
from .expected import Context, Side, WrongResult
from .no_sync import OursWithoutSync
from .options import Options
from .ours import Ours

#: Every name of options.BACKENDS; and what bench_sync.py alone takes, whose results are wrong.
BACKENDS: dict[str, type[Side]] = {
    side.name: side
    for side in (
        *(Ours, peers.GlooGather, peers.AllToAll, peers.GlooGatherFull, peers.AllToAllFull),
        *(peers.NcclGather, peers.FlashInfer, OursWithoutSync, Audited, AuditWords),
    )
}


def unavailable(name: str, options: Options) -> str | None:
    """Say why a backend cannot run with these options on this machine; None: it can. Local."""
    return BACKENDS[name].unavailable(options)


__all__ = ["BACKENDS", "Context", "Side", "WrongResult", "unavailable"]
