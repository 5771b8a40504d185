"""Which dispatcher serves a layer: by device and runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_nvlink_plugin.integration.common.pool import ExchangePool

from .base import MoeNvlinkDispatcher
from .cpu import CpuDispatcher
from .flashinfer import FlashinferFormDispatcher
from .runners import CPU, Runner, runner_of
from .standard import StandardFormDispatcher


def of_pool(
    moe_runner_config: Any, quant_method: Any, pool: ExchangePool, capacity: int
) -> MoeNvlinkDispatcher:
    """The dispatcher of one MoE layer, whose exchanges are the pool's. Collective.

    moe_runner_config, quant_method: as SGLang hands them to create_moe_dispatcher. Raises
    UnsupportedError for a runner that is not served and for a layer that the exchange would
    misplace; and what `ExchangePool.agree_on_format` raises.
    """
    with pool.ranks.telling_all(f"MoE layer {moe_runner_config.layer_id}"):
        runner = _runner(moe_runner_config, pool)
    block_shape = _block_shape(quant_method)
    return class_for(runner)(moe_runner_config, pool, capacity, runner, block_shape)


def _runner(config: Any, pool: ExchangePool) -> Runner:
    if pool.device.type == "cpu":
        return CPU
    backend = config.runner_backend
    dtype = config.params_dtype or torch.get_default_dtype()
    return runner_of(None if backend is None else backend.value, dtype, pool.ranks.wording.flag)


def class_for(runner: Runner) -> type[MoeNvlinkDispatcher]:
    """The class that hands out what a runner takes. Local."""
    if runner is CPU:
        return CpuDispatcher
    return FlashinferFormDispatcher if runner.global_ids else StandardFormDispatcher


def _block_shape(quant_method: Any) -> Sequence[int] | None:
    """Rows and columns of a block of the layer's weights; None where they have no blocks."""
    found = getattr(getattr(quant_method, "quant_config", None), "weight_block_size", None)
    return None if found is None else list(found)
