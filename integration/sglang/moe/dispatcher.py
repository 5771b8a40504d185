"""Where SGLang asks for the dispatcher of a layer: `create`."""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin.integration.sglang import effect, worker

from . import forms
from .base import MoeNvlinkDispatcher


def create(moe_runner_config: Any, quant_method: Any) -> MoeNvlinkDispatcher:
    """Return the dispatcher of one MoE layer, for SGLang's create_moe_dispatcher. Collective.

    SGLang calls it while it builds a model, in the namespace (target or draft) of that model, whose
    pool the dispatcher keeps.

    Args:
        moe_runner_config: as SGLang passes it.
        quant_method: as SGLang passes it.

    Raises:
        UnsupportedError: a hook took no effect; or as `forms.of_pool`.
    """
    effect.assert_hooks()
    return forms.of_pool(moe_runner_config, quant_method, worker.pool(), worker.capacity())
