"""Puts our all-to-all manager into the communicator of vLLM's expert-parallel group.

A worker builds its communicators after it has set its configuration and before it creates model
layers. Therefore this module also registers our layer classes: only in workers, and only if the
flag asks for us.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig, check_connected, self_check
from moe_nvlink_plugin.errors import MoeNvlinkError, PeerError, SelfCheckError, UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import AUTO, UNQUANTISED, Options
from moe_nvlink_plugin.integration.vllm import metrics
from moe_nvlink_plugin.integration.vllm.backend import CARRIER, selected_here
from moe_nvlink_plugin.integration.vllm.balancing import eplb
from moe_nvlink_plugin.integration.vllm.choices import KEY, WORDING, options_of
from moe_nvlink_plugin.integration.vllm.draft import drafts
from moe_nvlink_plugin.integration.vllm.lora import adapters

from . import graphs, worker

#: What lets ranks go on that no transport connects.
_FALL_BACK = f'--additional-config \'{{"{KEY}": {{"fallback": "{CARRIER}"}}}}\''
_PEER = "PeerError: "

logger = logging.getLogger(__name__)


def attach(communicator: Any, device: torch.device, store_group: Any = None) -> None:
    """Replace the all-to-all manager of an EP communicator by ours, if the flag asks for it.

    Collective over the communicator's group if the flag asks for it. If no transport connects the
    ranks, or their self-check fails, and the option `fallback` is set, vLLM's manager stays on all
    ranks, and vLLM serves as without us.

    Args:
        communicator: the communicator.
        device: where this rank's layers work.
        store_group: the same ranks over a store, if torch's world does not know the group.

    Raises:
        UnsupportedError: this vLLM lacks a name that we need, no transport connects the ranks, or
            their self-check has failed.
        ConfigError: an option is unknown or has a value that is not allowed.
        DisagreementError: ranks compile or capture different sizes.
    """
    if not communicator.use_all2all or not selected_here():
        return
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import get_pp_group

    from moe_nvlink_plugin.integration.vllm import compat

    vllm_config = get_current_vllm_config_or_none()
    options = options_of(vllm_config)
    if not _can_exchange(communicator.cpu_group, device, options, vllm_config):
        return
    shares_head = drafts.shares_head(vllm_config, options)
    # Checked before our modules import these names.
    balances = vllm_config.parallel_config.enable_eplb
    adapts = vllm_config.lora_config is not None
    tolerates = getattr(vllm_config.parallel_config, "enable_fault_tolerance", False)
    compat.check_names(
        device.type,
        drafts=shares_head,
        balances=balances,
        adapts=adapts,
        tolerates=tolerates,
        scales=getattr(vllm_config.parallel_config, "enable_elastic_ep", False),
    )
    from moe_nvlink_plugin.integration.vllm.all2all_manager import MoeNvlinkAll2AllManager
    from moe_nvlink_plugin.integration.vllm.moe import factory, layers

    # Each stage of a pipeline has an expert-parallel group of its own, with ranks from 0.
    stage = get_pp_group().rank_in_group
    layers.put_in_place()
    factory.put_in_place()
    if balances:
        eplb.put_in_place(device.type)
    if adapts:
        adapters.put_in_place()
    if shares_head:
        from moe_nvlink_plugin.integration.vllm.draft import logits_processor, mtp

        logits_processor.put_in_place()
        mtp.put_in_place(vllm_config, device.type)
    elif options.shares_lm_head:
        logger.info("MOE_NVLINK_MTP_LM_HEAD_TP is set, and there is no MTP draft to use it for")
    manager = MoeNvlinkAll2AllManager(
        communicator.cpu_group,
        tcp_store_group=store_group,
        device=device,
        options=options,
        holds_startup=worker.is_in_place(vllm_config),
        publication=None if stage else metrics.publication(vllm_config),
        name=f"stage{stage}" if stage else "",
        tolerates_faults=tolerates,
    )
    graphs.agree(vllm_config, manager.ranks)
    communicator.all2all_manager = manager


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


def _can_exchange(group: Any, device: torch.device, options: Options, vllm_config: Any) -> bool:
    """Return whether the ranks use our exchange; False: all of them fall back. Collective.

    Raises:
        UnsupportedError: no transport connects the ranks or their self-check fails, and a rank has
            no `fallback`; raised on every rank.
    """
    ranks = Ranks(group, group.rank(), group.size(), WORDING)
    apart = why_apart(ranks, device)
    wrong = "" if apart else why_wrong(ranks, device, options, vllm_config)
    if not apart and not wrong:
        return True
    problem = f"no transport connects the ranks: {apart}" if apart else wrong
    chosen = ranks.gather(options.fallback)
    without = [rank for rank, fallback in enumerate(chosen) if fallback is None]
    if without:
        is_part = len(without) < ranks.size
        some = f" Ranks {without} are without `fallback`." if is_part else ""
        raise UnsupportedError(
            f"{WORDING.flag}: {problem}. Drop the flag"
            + ("." if device.type == "cpu" else f", or add {_FALL_BACK} on all ranks.")
            + ("" if apart else " `moe-nvlink verify` shows more; please report what it writes.")
            + some
        )
    if ranks.rank == 0:
        logger.warning(
            "All ranks go on with vLLM's own %s, as %s allows, because %s",
            *(options.fallback, WORDING.options, problem),
        )
    return False


def why_wrong(ranks: Ranks, device: torch.device, options: Options, vllm_config: Any) -> str:
    """Return what is wrong in rounds of the model's geometry; "" if nothing is. Collective."""
    from vllm.config import ModelConfig

    model = vllm_config.model_config
    levels = ranks.gather(options.self_check)
    if len(set(levels)) > 1:
        return f"{WORDING.options}: the ranks have different values of self_check: {levels}"
    if not isinstance(model, ModelConfig):  # tests of vLLM bring none, or one without sizes
        return ""
    config = AllToAllConfig(
        ep_size=ranks.size,
        ep_rank=ranks.rank,
        num_experts=max(model.get_num_experts(), ranks.size),
        top_k=model.get_num_experts_per_tok(),
        hidden_size=model.get_hidden_size(),
        max_tokens_per_rank=vllm_config.scheduler_config.max_num_batched_tokens,
        dtype=model.dtype,
        recipe=None if options.dispatch in (AUTO, UNQUANTISED) else options.dispatch,
        combine=options.combine,
        tuning=options.tuning,
    )
    try:
        self_check(config, ranks.group, device, level=options.self_check)
    except SelfCheckError as error:
        return str(error)
    return ""
