"""Whether the ranks of a group can use our exchange at all, decided alike on every rank."""

from __future__ import annotations

import torch

from moe_nvlink_plugin import check_connected
from moe_nvlink_plugin.errors import MoeNvlinkError, PeerError
from moe_nvlink_plugin.integration.common.agreement import Ranks

_PEER = "PeerError: "


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
