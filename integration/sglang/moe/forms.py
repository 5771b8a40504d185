"""Which dispatcher SGLang gets for a layer: by device and runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_nvlink_plugin.integration.common.pool import ExchangePool

from .base import MoeNvlinkDispatcher
from .cpu import CpuDispatcher
from .cuda import FlashinferFormDispatcher, StandardFormDispatcher
from .runners import CPU, Runner, runner_of


def create(moe_runner_config: Any, quant_method: Any) -> MoeNvlinkDispatcher:
    """Return the dispatcher of one MoE layer, for SGLang's create_moe_dispatcher. Collective.

    SGLang calls it while it builds a model, in the namespace (target or draft) of that model, whose
    pool the dispatcher keeps.

    Args:
        moe_runner_config: as SGLang passes it.
        quant_method: as SGLang passes it.

    Raises:
        UnsupportedError: a hook took no effect; or as `of_pool`.
    """
    from moe_nvlink_plugin.integration.sglang import effect, worker

    effect.assert_hooks()
    return of_pool(moe_runner_config, quant_method, worker.pool(), worker.capacity())


def of_pool(
    moe_runner_config: Any, quant_method: Any, pool: ExchangePool, capacity: int
) -> MoeNvlinkDispatcher:
    """Return the dispatcher of one MoE layer, whose exchanges are the pool's. Collective.

    Args:
        moe_runner_config: as SGLang passes it to create_moe_dispatcher.
        quant_method: as SGLang passes it to create_moe_dispatcher.
        pool: the worker's exchanges.
        capacity: most tokens that a rank dispatches.

    Raises:
        UnsupportedError: the runner is not served, or the exchange would misplace the layer; or as
            `ExchangePool.agree_on_format`.
    """
    with pool.ranks.telling_all(f"MoE layer {moe_runner_config.layer_id}"):
        flag = pool.ranks.wording.flag
        runner = runner_for(moe_runner_config, quant_method, pool.device, flag)
    block_shape = _block_shape(quant_method)
    return class_for(runner)(moe_runner_config, pool, capacity, runner, block_shape)


def runner_for(config: Any, quant_method: Any, device: torch.device, flag: str) -> Runner:
    """Return what the runner of a layer takes. Local; raises as `runner_of`."""
    if device.type == "cpu":
        return CPU
    name = None if config.runner_backend is None else config.runner_backend.value
    runner = runner_of(name, config.params_dtype or torch.get_default_dtype(), flag)
    if runner.name == "triton" and _may_take_one_maximum(quant_method):
        runner = runner._replace(clears_empty=True)
    fused = getattr(getattr(quant_method, "runner", None), "fused_func", None)
    if not runner.global_ids and fused is None:
        # Triton's other path, as LoRA takes it, does not read the quantised rows.
        return runner._replace(wires=())
    return runner


def class_for(runner: Runner) -> type[MoeNvlinkDispatcher]:
    """Return the class that hands out what a runner takes. Local."""
    if runner is CPU:
        return CpuDispatcher
    return FlashinferFormDispatcher if runner.global_ids else StandardFormDispatcher


def _block_shape(quant_method: Any) -> Sequence[int] | None:
    """Return rows and columns of a block of the layer's weights; None without blocks. Local."""
    found = getattr(getattr(quant_method, "quant_config", None), "weight_block_size", None)
    return None if found is None else list(found)


def _may_take_one_maximum(quant_method: Any) -> bool:
    """Return whether Triton may quantise all rows by one dynamic scale. Local.

    It may if weights are quantised without blocks. Whether the scale is static is known only when
    weights are loaded.
    """
    quantised = getattr(quant_method, "quant_config", None) is not None
    return quantised and _block_shape(quant_method) is None
