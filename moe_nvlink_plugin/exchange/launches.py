"""Dispatch and combine of one layer, loaded for one channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.launch import shape
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.base import Budget, Executor
from moe_nvlink_plugin.launch.kernel import Variant

from .arguments import all_ids_travel, combine_code
from .kernels import COMBINE, DISPATCH, LAYER, QUANTISER
from .shapes import LAID_OUT_WEIGHT, CombineSizes, DispatchSizes, quantising_lanes


def variant(config: AllToAllConfig, quantiser: int) -> Variant:
    """Return what a layer needs compiled.

    Args:
        config: the layer's configuration.
        quantiser: kQuantiser* of config.h by which dispatch quantises; 0: it does not. Every layer
            can also launch dispatch without a quantiser.
    """
    return LAYER.variant(
        top_k=config.top_k,
        dtype=element_code(config.dtype),
        recipe=quantiser,
        combine=combine_code(config),
    )


class LayerLaunches:
    """Both verbs of one layer on one channel. One thread at a time may use it.

    Args:
        executor: launches the kernels.
        config: the layer's configuration.
        row_bytes: name of the payload's region -> bytes of one token's row.
        quantiser: as for `variant`.
        ranks_on_device: ranks of the group on this device, as SymmetricMemory counts them.

    Raises:
        CompileError: the kernels cannot be compiled, or threads cannot be started.
        UnsupportedError: the kernels are not in the cache, and there is no compiler.
        ConfigError: the device has no room for all kernels that may wait there at the same time.
    """

    def __init__(
        self,
        executor: Executor,
        config: AllToAllConfig,
        row_bytes: Mapping[str, int],
        quantiser: int,
        ranks_on_device: int = 1,
    ) -> None:
        assert config.num_threads is not None
        threads, ranks = config.num_threads, config.ep_size
        budget = Budget(threads, config.max_sms, ranks, config.num_channels, ranks_on_device)
        launcher = executor.launcher(variant(config, quantiser), budget)
        slots = ranks * config.max_tokens_per_rank
        # Ids, and weights beside them if dispatch writes their zeros too.
        tail_bytes = slots * row_bytes["recv_topk_ids"] * (1 if all_ids_travel(config) else 2)
        if config.scales_layout != "linear":
            tail_bytes += LAID_OUT_WEIGHT * slots * row_bytes["recv_scales"]
        loaded_bytes = {0: max(row_bytes.values())}
        if quantiser:
            lanes = quantising_lanes(config.hidden_size)
            loaded_bytes[quantiser] = lanes * shape.VECTOR_BYTES
        self._dispatches = {
            code: launcher.load(
                DISPATCH,
                DispatchSizes(widest, tail_bytes),
                **{QUANTISER.name: code},
            )
            for code, widest in loaded_bytes.items()
        }
        sizes = CombineSizes(
            config.hidden_size, config.dtype.itemsize, slots if combine_code(config) else 0
        )
        self._combine = launcher.load(COMBINE, sizes)

    def dispatch(self, args: Any) -> None:
        """Launch dispatch with DispatchArgs, which the launch copies. Collective; capturable."""
        self._dispatches[args.quantiser](args)

    def combine(self, args: Any) -> None:
        """Launch combine with CombineArgs; set their hidden_splits. Collective; capturable."""
        self._combine(args)
