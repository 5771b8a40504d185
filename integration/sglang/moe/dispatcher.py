"""Where SGLang asks for the dispatcher of a layer: `create`."""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin.integration.sglang import effect, worker

from . import forms
from .base import MoeNvlinkDispatcher


def create(moe_runner_config: Any, quant_method: Any) -> MoeNvlinkDispatcher:
    """The dispatcher of one MoE layer, instead of SGLang's create_moe_dispatcher. Collective.

    Called while the model is built, in the namespace (target or draft) of that model, whose pool
    the dispatcher keeps. Raises UnsupportedError for a hook that took no effect; and what
    `forms.of_pool` raises.
    """
    effect.assert_hooks()
    return forms.of_pool(moe_runner_config, quant_method, worker.pool(), worker.capacity())
