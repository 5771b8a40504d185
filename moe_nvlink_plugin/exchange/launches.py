"""Dispatch and combine of one layer, loaded for one channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.launch import shape
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.base import Budget, Executor, Launch, Launcher
from moe_nvlink_plugin.launch.kernel import ELEMENT, Variant
from moe_nvlink_plugin.launch.shape import VECTOR_BYTES

from .arguments import all_ids_travel, combine_code
from .kernels import COMBINE, DISPATCH, LAYER, QUANTISER, SMALL_COMBINE, SMALL_DISPATCH, TMA
from .shapes import CombineSizes, DispatchSizes, quantising_lanes
from .sizes import (
    combine_dtypes,
    gets_by_tma,
    loads_tma,
    row_data_bytes,
    small_combine_tokens,
    sms_beside,
)
from .small_batches import small_combine_sizes, small_dispatch_sizes


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
        expert_counts=1 if config.num_expert_counts else 0,
        ordered_slots=int(config.ordered_slots),
        units=row_data_bytes(config),
        tma=int(loads_tma(config)),
        async_release=int(config.choices.async_release),
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
        threads, ranks, choices = config.num_threads, config.ep_size, config.choices
        budget = Budget(
            threads, config.max_sms, ranks, config.num_channels, ranks_on_device, choices.pdl
        )
        launched = variant(config, quantiser)
        launcher = executor.launcher(launched, budget)
        slots = ranks * config.max_tokens_per_rank
        # Ids, and weights beside them if dispatch writes their zeros too.
        tail_bytes = slots * row_bytes["recv_topk_ids"] * (1 if all_ids_travel(config) else 2)
        if config.scales_layout != "linear":
            tail_bytes += choices.laid_out_weight * slots * row_bytes["recv_scales"]
        loaded_bytes = {0: max(row_bytes.values())}
        if quantiser:
            lanes = quantising_lanes(config.hidden_size)
            loaded_bytes[quantiser] = lanes * shape.VECTOR_BYTES
        few = launcher
        if executor.asynchronous and (sms := sms_beside(config)):
            few = executor.launcher(launched, budget._replace(max_sms=sms))

        def dispatches(launcher: Launcher) -> dict[int, Launch]:
            return {
                code: launcher.load(
                    DISPATCH,
                    DispatchSizes(widest, tail_bytes, choices),
                    **{QUANTISER.name: code},
                )
                for code, widest in loaded_bytes.items()
            }

        self._dispatches = dispatches(launcher)
        self._dispatches_beside = self._dispatches if few is launcher else dispatches(few)
        self._element_bytes = {
            element_code(dtype): dtype.itemsize for dtype in combine_dtypes(config)
        }
        slots_to_quantise = slots if combine_code(config) else 0

        def combines(launcher: Launcher, *, tma: bool) -> dict[int, Launch]:
            staged = config.top_k if tma else 0
            return {
                code: launcher.load(
                    COMBINE,
                    CombineSizes(config.hidden_size, size, slots_to_quantise, choices, staged),
                    **{ELEMENT.name: code, TMA.name: int(tma)},
                )
                for code, size in self._element_bytes.items()
            }

        self._combines = combines(launcher, tma=False)
        # The same kernels, if rows do not come by TMA.
        self._whole_vectors = self._whole_vectors_beside = self._combines
        if gets_by_tma(config):
            self._whole_vectors = self._whole_vectors_beside = combines(launcher, tma=True)
        elif few is not launcher and loads_tma(config):
            self._whole_vectors_beside = combines(few, tma=True)
        self._most_small = self._most_small_to_combine = 0
        if config.small_tokens:
            self._most_small = config.small_tokens
            self._small_dispatches = {
                code: launcher.load(
                    SMALL_DISPATCH,
                    small_dispatch_sizes(config, row_bytes, code),
                    **{QUANTISER.name: code},
                )
                for code in self._dispatches
            }
        if most := small_combine_tokens(config):
            self._most_small_to_combine = most
            self._small_combines = {
                code: launcher.load(
                    SMALL_COMBINE,
                    small_combine_sizes(config, element_bytes),
                    **{ELEMENT.name: code},
                )
                for code, element_bytes in self._element_bytes.items()
            }

    def dispatch(self, args: Any, *, beside: bool = False) -> None:
        """Launch dispatch with DispatchArgs, which the launch copies. Collective; capturable.

        All ranks of a round have the same bound and rows of the same bytes, so all of them launch
        the same kernel.

        Args:
            args: the struct.
            beside: whether it runs beside the caller.
        """
        # Without small batches nothing is asked: ctypes makes an object of a geometry. Rows that
        # are no whole words have no packed row.
        if (
            self._most_small
            and args.geometry.max_tokens_per_rank <= self._most_small
            and args.packed_bytes
        ):
            self._small_dispatches[args.quantiser](args)
        else:
            launches = self._dispatches_beside if beside else self._dispatches
            launches[args.quantiser](args)

    def combine(self, args: Any, *, beside: bool = False) -> None:
        """Launch combine with CombineArgs; set how CTAs share it. Collective; capturable.

        All ranks of a round have the same bound and the same rows, so all of them launch the kernel
        for small batches or none. The launch shape is that for rows of the configuration's width.

        Args:
            args: the struct.
            beside: whether it runs beside the caller.
        """
        geometry = args.geometry
        element = geometry.element
        row_bytes = geometry.hidden_size * self._element_bytes[element]
        is_small = geometry.max_tokens_per_rank <= self._most_small_to_combine
        # Units carry whole words: other rows are pulled.
        if is_small and row_bytes % 4 == 0:
            self._small_combines[element](args)
        else:
            whole = self._whole_vectors_beside if beside else self._whole_vectors
            launches = self._combines if row_bytes % VECTOR_BYTES else whole
            launches[element](args)
