"""Whether ranks use our exchange when a server starts, or go on with the framework's own.

All of it comes before weights are loaded: later, experts are divided among the ranks as our
exchange wants them.
"""

from __future__ import annotations

import logging

import torch

from moe_nvlink_plugin import AllToAllConfig, check_connected, self_check
from moe_nvlink_plugin.errors import MoeNvlinkError, PeerError, SelfCheckError, UnsupportedError

from .agreement import Ranks
from .options import Options

_PEER = "PeerError: "

logger = logging.getLogger(__name__)


def why_apart(ranks: Ranks, device: torch.device) -> str:
    """Return why no transport connects the ranks; "" if one does. Collective.

    Every rank gets the same text, so ranks that decide by it decide alike.
    """
    mine = ""
    try:
        check_connected(ranks.group, device)
    except PeerError as error:
        mine = _PEER + str(error)
    except MoeNvlinkError as error:
        mine = str(error)
    problems = list(filter(None, ranks.gather(mine)))
    # The rank whose own step failed says more than the ranks that heard of it.
    problems.sort(key=lambda problem: problem.startswith(_PEER))
    return problems[0].removeprefix(_PEER) if problems else ""


def why_wrong(
    ranks: Ranks, device: torch.device, options: Options, config: AllToAllConfig | None
) -> str:
    """Return what is wrong in rounds of a geometry; "" if nothing is. Collective.

    Every rank gets the same text.

    Args:
        ranks: the expert-parallel ranks.
        device: where this rank's layers work.
        options: what the user chose; `self_check` says which rounds.
        config: the geometry; None, on every rank, if it is not known: no round is run.
    """
    levels = ranks.gather(options.self_check)
    if len(set(levels)) > 1:
        where = ranks.wording.options
        return f"{where}: the ranks have different values of self_check: {levels}"
    if config is None:
        return ""
    try:
        self_check(config, ranks.group, device, level=options.self_check)
    except SelfCheckError as error:
        return str(error)
    return ""


def can_exchange(ranks: Ranks, options: Options, *, apart: str, wrong: str, advice: str) -> bool:
    """Return whether the ranks use our exchange; False: all of them fall back. Collective.

    It says once why they fall back.

    Args:
        ranks: the expert-parallel ranks.
        options: what the user chose.
        apart: as `why_apart` returns it.
        wrong: as `why_wrong` returns it.
        advice: what lets these ranks fall back, for a user's message; "" if nothing does.

    Raises:
        UnsupportedError: on every rank: something is wrong, and a rank has no `fallback`.
    """
    if not apart and not wrong:
        return True
    wording = ranks.wording
    problem = f"no transport connects the ranks: {apart}" if apart else wrong
    chosen = ranks.gather(options.fallback)
    without = [rank for rank, fallback in enumerate(chosen) if fallback is None]
    if without:
        is_part = len(without) < ranks.size
        some = f" Ranks {without} are without `fallback`." if is_part else ""
        raise UnsupportedError(
            f"{wording.flag}: {problem}. Drop the flag"
            + (f", or add {advice} on all ranks." if advice else ".")
            + ("" if apart else " `moe-nvlink verify` shows more; please report what it writes.")
            + some
        )
    if ranks.rank == 0:
        logger.warning(
            "All ranks go on with %s's own exchange (%s), as %s allows, because %s",
            *(wording.framework, options.fallback, wording.options, problem),
        )
    return False
