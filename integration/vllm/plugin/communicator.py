"""Puts our all-to-all manager into the communicator of vLLM's expert-parallel group.

A worker builds its communicators after it has set its configuration and before it creates model
layers. Therefore this module also registers our layer classes: only in workers, and only if the
flag asks for us.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from moe_nvlink_plugin.integration.vllm.backend import selected_here
from moe_nvlink_plugin.integration.vllm.choices import options_of
from moe_nvlink_plugin.integration.vllm.draft import drafts

from . import graphs, worker

logger = logging.getLogger(__name__)


def attach(communicator: Any, device: torch.device) -> None:
    """Replace the all-to-all manager of an EP communicator by ours, if the flag asks for it.

    Collective over the communicator's group if it replaces the manager.

    Args:
        communicator: the communicator.
        device: where this rank's layers work.

    Raises:
        UnsupportedError: this vLLM lacks a name that we need, or CPU ranks are on several hosts.
        ConfigError: an option is unknown or has a value that is not allowed.
        DisagreementError: ranks compile or capture different sizes.
    """
    if not communicator.use_all2all or not selected_here():
        return
    from vllm.config import get_current_vllm_config_or_none

    from moe_nvlink_plugin.integration.vllm import compat

    vllm_config = get_current_vllm_config_or_none()
    options = options_of(vllm_config)
    shares_head = drafts.shares_head(vllm_config, options)
    # Checked before our modules import these names.
    compat.check_names(device.type, drafts=shares_head)
    from moe_nvlink_plugin.integration.vllm.all2all_manager import MoeNvlinkAll2AllManager
    from moe_nvlink_plugin.integration.vllm.moe import layers

    layers.put_in_place()
    if shares_head:
        from moe_nvlink_plugin.integration.vllm.draft import logits_processor, mtp

        logits_processor.put_in_place()
        mtp.put_in_place(vllm_config, device.type)
    elif options.shares_lm_head:
        logger.info("MOE_NVLINK_MTP_LM_HEAD_TP is set, and there is no MTP draft to use it for")
    manager = MoeNvlinkAll2AllManager(
        communicator.cpu_group,
        device=device,
        options=options,
        holds_startup=worker.is_in_place(vllm_config),
    )
    graphs.agree(vllm_config, manager.ranks)
    communicator.all2all_manager = manager
