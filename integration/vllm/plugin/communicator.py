"""Puts our all-to-all manager into the communicator of vLLM's expert-parallel group.

A worker builds its communicators after it has set its configuration and before it creates model
layers. Therefore this module also registers our layer classes: only in workers, and only if the
flag asks for us.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.integration.common import start
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import AUTO, UNQUANTISED, Options
from moe_nvlink_plugin.integration.common.start import why_apart
from moe_nvlink_plugin.integration.vllm import metrics
from moe_nvlink_plugin.integration.vllm.backend import CARRIER, selected_here
from moe_nvlink_plugin.integration.vllm.balancing import eplb
from moe_nvlink_plugin.integration.vllm.choices import KEY, WORDING, options_of
from moe_nvlink_plugin.integration.vllm.draft import drafts
from moe_nvlink_plugin.integration.vllm.lora import adapters

from . import graphs, worker

#: What lets ranks go on that no transport connects.
_FALL_BACK = f'--additional-config \'{{"{KEY}": {{"fallback": "{CARRIER}"}}}}\''

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


def _can_exchange(group: Any, device: torch.device, options: Options, vllm_config: Any) -> bool:
    """Return whether the ranks use our exchange; False: all of them fall back. Collective.

    Raises:
        UnsupportedError: no transport connects the ranks or their self-check fails, and a rank has
            no `fallback`; raised on every rank.
    """
    ranks = Ranks(group, group.rank(), group.size(), WORDING)
    apart = why_apart(ranks, device)
    wrong = "" if apart else why_wrong(ranks, device, options, vllm_config)
    advice = "" if device.type == "cpu" else _FALL_BACK
    return start.can_exchange(ranks, options, apart=apart, wrong=wrong, advice=advice)


def why_wrong(ranks: Ranks, device: torch.device, options: Options, vllm_config: Any) -> str:
    """Return what is wrong in rounds of the model's geometry; "" if nothing is. Collective."""
    config = _checked(ranks, options, vllm_config)
    return start.why_wrong(ranks, device, options, config)


def _checked(ranks: Ranks, options: Options, vllm_config: Any) -> AllToAllConfig | None:
    """Return the geometry that the ranks check. Local."""
    from vllm.config import ModelConfig

    model = vllm_config.model_config
    if not isinstance(model, ModelConfig):  # tests of vLLM bring none, or one without sizes
        return None
    return AllToAllConfig(
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
        leave_sms=options.overlap_shared_experts,
    )
