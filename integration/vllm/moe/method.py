"""Our fused MoE method: dispatch, the experts that vLLM chose, and combine.

vLLM replaces the quant method of a loaded layer by ``RoutedExperts._replace_quant_method``, for
LoRA and for elastic expert parallelism. Our method enters a layer in the same way, when the layer
has processed its weights for the first time. The replaced method stays vLLM's own object: it knows
how the weights are loaded and processed, and our method forwards both to it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod
from vllm.platforms import current_platform

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.agreement import Geometry, Proposal
from moe_nvlink_plugin.integration.common.formats import DispatchFormat
from moe_nvlink_plugin.integration.common.options import AUTO
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm.all2all_manager import manager_of_ep_group
from moe_nvlink_plugin.integration.vllm.backend import BACKEND

from .cpu_prepare_finalize import CpuPrepareAndFinalize
from .cuda_prepare_finalize import CudaPrepareAndFinalize
from .experts_input import VllmExpertsInput, say_if_fp8_could_travel
from .features import Feature
from .prepare_finalize import MoeNvlinkPrepareAndFinalize

logger = logging.getLogger(__name__)

#: Parameters of vLLM's quant methods that hold static scales of the experts' input -> how to find
#: the scale that serves every expert: the largest if activations are divided by it, the smallest if
#: they are multiplied.
INPUT_SCALES = {
    "w13_input_scale": torch.distributed.ReduceOp.MAX,
    "w13_input_global_scale": torch.distributed.ReduceOp.MIN,
}
#: Parameters that vLLM's FusedMoEModularMethod passes to the experts.
WEIGHTS = ("w13_weight", "w2_weight")


class MoeNvlinkFusedMoEMethod(FusedMoEModularMethod):
    """vLLM's modular method, with our prepare/finalize before and after the layer's experts.

    Args:
        replaced: quant method that has processed the layer's weights.
        prepare_finalize: our prepare/finalize for the layer.
        experts: the layer's experts; None: those of `replaced`.

    Raises:
        UnsupportedError: our exchange cannot serve the experts.
    """

    moe_kernel: Any

    def __init__(
        self,
        replaced: Any,
        prepare_finalize: MoeNvlinkPrepareAndFinalize,
        experts: Any = None,
    ) -> None:
        experts = experts or replaced.moe_kernel.fused_experts
        super().__init__(replaced, mk.FusedMoEKernel(prepare_finalize, experts))

    def __getattr__(self, name: str) -> Any:
        """Return a field of the replaced method, which models and weight loaders may ask for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "old_quant_method":
                raise
            return getattr(self.old_quant_method, name)

    @property
    def has_static_scale(self) -> bool:
        """Whether rows are quantised by a scale of the checkpoint."""
        return bool(self.moe_kernel.prepare_finalize.dispatch_format.has_static_scale)

    def static_scale(self) -> float | None:
        """Return that scale; None without one. Local; waits for the device.

        Raises:
            UnsupportedError: the value is unusable, or the experts have different scales.
        """
        kernel = self.moe_kernel
        taken = VllmExpertsInput.of(kernel.fused_experts)
        scale: float | None = kernel.prepare_finalize.dispatch_format.static_scale(taken)
        return scale

    @overrides
    def process_weights_after_loading(self, layer: Any) -> None:
        """Process reloaded weights as the replaced method does, and compute with them.

        Collective if the layer has static input scales. Ranks that update weights in place do not
        wait for each other.

        Args:
            layer: vLLM's RoutedExperts, with weights as its checkpoint has them.
        """
        _share_scales(layer)
        before = self.old_quant_method.moe_kernel
        _process(self.old_quant_method, layer)
        made = self.old_quant_method.moe_kernel
        if made is not before:
            ours = self.moe_kernel.prepare_finalize
            self.moe_kernel = mk.FusedMoEKernel(ours, made.fused_experts)
            self.moe_quant_config = self.old_quant_method.moe_quant_config


def install_after_loading(quant_method: Any, features: Sequence[Feature] = ()) -> None:
    """Replace a layer's quant method by ours as soon as the layer's weights are processed. Local.

    Args:
        quant_method: vLLM's method of one layer. Its next process_weights_after_loading is
            collective over the EP group, and raises as `install`.
        features: as `install` takes them.
    """
    original = quant_method.process_weights_after_loading
    is_wrapped = "process_weights_after_loading" in vars(quant_method)  # by somebody before us

    @functools.wraps(original)
    def process_weights_after_loading(layer: Any) -> None:
        del quant_method.process_weights_after_loading  # from now on our method forwards to it
        if is_wrapped:
            quant_method.process_weights_after_loading = original
        install(quant_method, layer, features)

    quant_method.process_weights_after_loading = process_weights_after_loading


def install(quant_method: Any, layer: Any, features: Sequence[Feature] = ()) -> None:
    """Process a layer's weights; then replace its quant method. Collective over the EP group.

    Args:
        quant_method: vLLM's method of the layer.
        layer: vLLM's RoutedExperts, with weights as its checkpoint has them.
        features: what the layer has beside the exchange.

    Raises:
        UnsupportedError: the experts are outside of the modular kernel, or are not placed in
            contiguous ranges, or a feature refuses them, or no recipe has the format that they
            take.
        ConfigError: the format does not support the hidden size.
        PeerError: another rank raised one of these.
    """
    _share_scales(layer)
    pool = _pool()
    with pool.ranks.telling_all(layer.layer_name):
        _process(quant_method, layer)
        _check_modular(quant_method, layer)
        check_summed_once(layer.layer_name, layer.moe_config)
        experts = quant_method.moe_kernel.fused_experts
        taken = _experts_input(experts, layer, features)
    exchange, chosen = _exchange(pool, layer.layer_name, layer.moe_config, experts, taken, features)
    with pool.ranks.telling_all(layer.layer_name):
        prepare_finalize = _prepare_finalize(pool, exchange, layer.expert_map, chosen)
        layer._replace_quant_method(MoeNvlinkFusedMoEMethod(quant_method, prepare_finalize))
    pool.ranks.agree(Proposal(layer.layer_name))
    logger.debug("moe_nvlink serves %s: %s, %s", layer.layer_name, exchange.config, chosen)


def install_for(
    pool: ExchangePool, layer: Any, moe: Any, replaced: Any, experts: Any
) -> MoeNvlinkFusedMoEMethod:
    """Return our method for a layer in a group that is to come. Collective over that group.

    The ranks of the group that load the model meanwhile call `install` (elastic expert
    parallelism): both make the same collective calls, in the order of the layers. The layer stays
    as it is.

    Args:
        pool: this worker's pool in that group.
        layer: vLLM's RoutedExperts, which serves in the present group.
        moe: vLLM's FusedMoEConfig of the layer in that group.
        replaced: quant method that has processed the layer's weights.
        experts: the layer's experts in that group.

    Raises:
        UnsupportedError: our exchange cannot serve the experts.
        PeerError: another rank raised.
    """
    prepare_finalize = prepare_finalize_for(pool, layer.layer_name, moe, experts)
    with pool.ranks.telling_all(layer.layer_name):
        method = MoeNvlinkFusedMoEMethod(replaced, prepare_finalize, experts)
    pool.ranks.agree(Proposal(layer.layer_name))
    return method


def prepare_finalize_for(
    pool: ExchangePool, layer_name: str, moe: Any, experts: Any
) -> MoeNvlinkPrepareAndFinalize:
    """Return our prepare/finalize for experts without features. Collective over the pool's ranks.

    After it all ranks call `Ranks.agree`. Arguments and errors are those of `install_for`.
    """
    with pool.ranks.telling_all(layer_name):
        taken = VllmExpertsInput.of(experts)
    exchange, chosen = _exchange(pool, layer_name, moe, experts, taken)
    with pool.ranks.telling_all(layer_name):
        config = exchange.config
        first, end = local_expert_range(config.num_experts, config.ep_size, config.ep_rank)
        # As vLLM places experts when ranks come or go, and without routing tables.
        expert_map = torch.full((config.num_experts,), -1, dtype=torch.int32, device=pool.device)
        expert_map[first:end] = torch.arange(end - first, dtype=torch.int32)
        return _prepare_finalize(pool, exchange, expert_map, chosen)


def _exchange(
    pool: ExchangePool,
    layer_name: str,
    moe: Any,
    experts: Any,
    taken: VllmExpertsInput,
    features: Sequence[Feature] = (),
) -> tuple[MoeAllToAll, DispatchFormat]:
    """Return the exchange of a layer, and how its rows travel. Collective; raises as `install`."""
    geometry = Geometry(
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        # A sequence-parallel slice is at most the batch divided by the slices, rounded up.
        max_tokens_per_rank=-(-moe.max_num_tokens // moe.sp_size),
        dtype=moe.in_dtype,
    )
    chosen = pool.agree_on_format(layer_name, taken, geometry)
    if pool.device.type == "cuda" and chosen.recipe is None and pool.options.dispatch == AUTO:
        say_if_fp8_could_travel(experts)
    if chosen.recipe is not None:
        geometry = geometry._replace(recipe=chosen.recipe.name, scales_layout=chosen.scales_layout)
    if pool.device.type == "cuda":  # the experts then read ids and weights where they arrive
        geometry = geometry._replace(received_ids="elsewhere")
    if payload_bytes := tuple(size for one in features for size in one.payload_bytes):
        geometry = geometry._replace(extra_payload_bytes=payload_bytes)
    return pool.exchange(geometry), chosen


def share_scales(layer: Any, cpu_group: Callable[[], Any]) -> None:
    """Make a layer's static input scales equal on the group's ranks. Collective if it has any.

    A checkpoint has one scale for each expert's input, and vLLM quantises a layer's activations by
    the largest scale of a rank's experts. With dispatch, the rank of a token quantises it once for
    experts of any rank, so the scale must be equal on all ranks. vLLM computes the same on one rank
    that has all experts.

    Args:
        layer: a layer whose weights vLLM has not processed yet.
        cpu_group: returns the gloo group of the expert-parallel ranks; called only if the layer has
            such a scale.
    """
    for name, operation in INPUT_SCALES.items():
        scale = getattr(layer, name, None)
        if not isinstance(scale, torch.Tensor) or scale.numel() == 0:
            continue
        largest = operation is torch.distributed.ReduceOp.MAX
        mine = scale.detach().float().max() if largest else scale.detach().float().min()
        value = mine.reshape(1).cpu()
        torch.distributed.all_reduce(value, op=operation, group=cpu_group())
        with torch.no_grad():
            scale.fill_(value.item())


def _share_scales(layer: Any) -> None:
    share_scales(layer, lambda: get_ep_group().cpu_group)


def _process(quant_method: Any, layer: Any) -> None:
    """Let vLLM's method process weights, loaded for the first time or again. Local."""
    if not current_platform.is_cpu():
        quant_method.process_weights_after_loading(layer)
        return
    from .cpu_fp8_experts import Fp8RowsMixin

    # vLLM packs weights for its CPU experts only when it makes a kernel. A method that has one
    # would compute with reloaded weights as if they were packed.
    before, quant_method.moe_kernel = quant_method.moe_kernel, None
    quant_method.process_weights_after_loading(layer)
    if quant_method.moe_kernel is None:  # online quantisation has processed them while they loaded
        quant_method.moe_kernel = before
        return
    experts = getattr(quant_method.moe_kernel, "fused_experts", None)
    if isinstance(experts, Fp8RowsMixin):  # vLLM's FP8 method leaves the weights to its kernels
        experts.process_weights_after_loading(layer)


def _check_modular(quant_method: Any, layer: Any) -> None:
    kernel, name = quant_method.moe_kernel, type(quant_method).__name__
    if kernel is None or kernel.is_monolithic:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: {layer.layer_name} is served by {name} without vLLM's "
            "modular kernel. If vLLM has chosen experts that route inside their kernel, choose "
            "others with --moe-backend (triton is one); or use weights in another format, or "
            "another backend."
        )
    missing = [weight for weight in WEIGHTS if not hasattr(layer, weight)]
    if missing:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: vLLM's {FusedMoEModularMethod.__name__} reads "
            f"{' and '.join(missing)}, and {name} keeps the weights of {layer.layer_name} under "
            "other names. Use weights in another format, or another backend."
        )


def check_summed_once(layer_name: str, moe: Any) -> None:
    """Check that the model does not sum what combine has summed. Local.

    Models say so in the layer's configuration (FusedMoEConfig) after they have made the layer.

    Raises:
        UnsupportedError: it does.
    """
    if getattr(moe, "skip_final_all_reduce", False):
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: the model (Inkling is one) sums the output of "
            f"{layer_name} over the tensor-parallel ranks itself, and combine has summed it "
            "over all ranks. Use another backend for this model."
        )


def _experts_input(experts: Any, layer: Any, features: Sequence[Feature]) -> VllmExpertsInput:
    """Return what experts take with the layer's features. Local; raises as `Feature.check`."""
    for feature in features:
        feature.check(experts, layer)
    with contextlib.ExitStack() as stack:
        for feature in features:
            stack.enter_context(feature.in_use(experts))
        return VllmExpertsInput.of(experts)


def _pool() -> ExchangePool:
    """Return this worker's pool. Local."""
    return manager_of_ep_group(f"--all2all-backend {BACKEND}").pool


def _prepare_finalize(
    pool: ExchangePool,
    exchange: MoeAllToAll,
    expert_map: torch.Tensor | None,
    chosen: DispatchFormat,
) -> MoeNvlinkPrepareAndFinalize:
    """Make the prepare/finalize for this rank's device. Local."""
    made: MoeNvlinkPrepareAndFinalize
    if pool.device.type == "cuda":
        made = CudaPrepareAndFinalize(exchange, expert_map, chosen)
    else:
        made = CpuPrepareAndFinalize(exchange, expert_map, chosen, lambda: pool.is_idle)
    made.overlaps_shared_experts = pool.options.overlap_shared_experts
    made.audit = pool.audit_of(exchange)
    return made
