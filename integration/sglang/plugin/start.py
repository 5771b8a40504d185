"""Before SGLang makes its groups: the ranks check our exchange, or go on with SGLang's own."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.runtime_context import get_exec, get_server_args

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.integration.common import start
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import AUTO, UNQUANTISED, Options
from moe_nvlink_plugin.integration.sglang import backend, budget, own_exchange, sizes, worker
from moe_nvlink_plugin.integration.sglang.choices import FALL_BACK, WORDING, options_of


def choose() -> None:
    """Decide which exchange this server uses, for a process that names ours. Collective.

    The ranks of SGLang's world are those of expert parallelism: we refuse other shapes.

    Raises:
        UnsupportedError: on every rank: no transport connects the ranks or their self-check fails,
            and a rank has no `fallback`.
        MoeNvlinkError: as `self_check`.
    """
    server_args = get_server_args()
    if not backend.serves_target(server_args) or get_exec().moe.moe_a2a_backend != backend.CARRIER:
        return
    world, options, device = get_world_group(), options_of(server_args), worker.device()
    ranks = Ranks(world.cpu_group, world.rank_in_group, world.world_size, WORDING)
    apart = start.why_apart(ranks, device)
    wrong = "" if apart else why_wrong(ranks, device, options, server_args)
    if not start.can_exchange(ranks, options, apart=apart, wrong=wrong, advice=FALL_BACK):
        own_exchange.put_in_place(server_args)


def why_wrong(ranks: Ranks, device: torch.device, options: Options, server_args: Any) -> str:
    """Return what is wrong in rounds of the model's geometry; "" if nothing is. Collective."""
    config = AllToAllConfig(
        ep_rank=ranks.rank,
        recipe=None if options.dispatch in (AUTO, UNQUANTISED) else options.dispatch,
        combine=options.combine,
        tuning=options.tuning,
        **sizes.of(server_args, budget.of(server_args)),
    )
    return start.why_wrong(ranks, device, options, config)
