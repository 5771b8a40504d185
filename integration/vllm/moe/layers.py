"""Our classes instead of vLLM's ``RoutedExperts`` and ``MoERunner``, and what they change.

Both use ``register_oot``, vLLM's hook to replace a layer class when a layer is created. The hook
knows a class by its name and not its subclasses. Some models bring a subclass of ``RoutedExperts``
(GPT-OSS, the Transformers backend), mostly for its weight loader: `_create` extends it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import (
    MoERunner,
    _moe_forward,
    _moe_forward_fake,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.vllm import compat
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER, selected_here

from . import idle_steps
from .features import features_of
from .method import MoeNvlinkFusedMoEMethod, install_after_loading
from .prepare_finalize import Epilogue, with_epilogue

logger = logging.getLogger(__name__)

#: ``torch.ops.vllm.moe_nvlink_forward``: a MoE layer that combine ends, as one op. vLLM has two ops
#: for its layers. ``moe_forward_shared`` returns the routed output and that of the shared experts.
#: ``moe_forward`` returns one output, but by its schema it writes its input: for that,
#: torch.compile copies the rows that the same call gives to the router and to the shared experts.
#: Our op returns one output and writes nothing else. Its function and its fake are vLLM's.
OP_NAME = "moe_nvlink_forward"

direct_register_custom_op(
    op_name=OP_NAME,
    op_func=_moe_forward,
    fake_impl=_moe_forward_fake,
    tags=tuple(torch.ops.vllm.moe_forward.default.tags),
)


def put_in_place() -> None:
    """Register both classes with vLLM, and extend models' own experts. Local; idempotent.

    Raises:
        UnsupportedError: another plugin has replaced one of vLLM's classes.
    """
    compat.put_in_place(RoutedExperts, MoeNvlinkRoutedExperts)
    compat.put_in_place(MoERunner, MoeNvlinkMoERunner)
    RoutedExperts.__new__ = _create


def _create(cls: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Create a layer of RoutedExperts or of a subclass: ``RoutedExperts.__new__``. Local."""
    is_extended = issubclass(cls, MoeNvlinkRoutedExperts)
    # The registry answers for RoutedExperts itself, and for what another plugin has replaced.
    if not is_extended and cls.__name__ not in op_registry_oot:
        cls = _extended(cls)
    return PluggableLayer.__new__(cls)


@functools.cache
def _extended(theirs: type) -> type:
    """Return a model's own experts class, which does everything else, with our method. Local."""
    name = f"MoeNvlink{theirs.__name__}"
    return type(name, (MoeNvlinkRoutedExperts, theirs), {"__module__": __name__})


class MoeNvlinkRoutedExperts(RoutedExperts):
    """vLLM's routed experts, which get our fused MoE method when their weights are loaded."""

    #: Called when another quant method has replaced the layer's.
    on_replaced: Callable[[], None] | None = None
    #: Whether the load balancer has placed the experts otherwise than vLLM's loader does.
    have_moved = False

    @overrides
    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        parallel = moe_config.moe_parallel_config
        ours = selected_here() and parallel.use_all2all_kernels
        if ours and parallel.all2all_backend == BACKEND:
            # Else vLLM's registry (`factory`) would serve this layer too.
            parallel.all2all_backend = CARRIER
        if ours and hasattr(moe_config, "require_decomposed_backend"):
            # vLLM 0.33 and newer then chooses no experts that route inside their kernel.
            moe_config.require_decomposed_backend = True
        features = features_of(get_current_vllm_config_or_none(), moe_config) if ours else ()
        if ours and current_platform.is_cpu():
            # vLLM would choose Triton's experts, also for layers that get no adapters.
            moe_config.is_lora_enabled = False
        quant_method = super()._get_quant_method(prefix, quant_config, moe_config)
        if ours:
            if current_platform.is_cpu():
                from .cpu_fp8_experts import serve_without_amx

                serve_without_amx(quant_method)
            for feature in features:
                feature.choose_experts(quant_method)
            install_after_loading(quant_method, features)
        return quant_method

    @overrides
    def _replace_quant_method(self, quant_method: Any) -> None:
        super()._replace_quant_method(quant_method)
        if self.on_replaced is not None:
            self.on_replaced()

    @overrides
    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> Any:
        """Load a weight as vLLM does for the quant method that ours has replaced. Local.

        vLLM's loader, and that of a model's own experts class, decide by the class name and by
        fields of the layer's quant method. Weights that are loaded again need the same decisions as
        before. DBRX's loader takes no expert_id: it loads all experts at once.
        """
        load = functools.partial(
            super().weight_loader,
            *(param, loaded_weight, weight_name, shard_id, expert_id, return_success),
        )
        if not isinstance(self.quant_method, MoeNvlinkFusedMoEMethod):
            return load()
        if self.have_moved:
            raise UnsupportedError(
                f"weights of {self.layer_name} cannot be loaded again: the load balancer has moved "
                "its experts, and vLLM's loader would put them where they were at the start. "
                "Restart the server, or serve without --enable-eplb."
            )
        # A module's __dict__ precedes its submodules, of which our method is one.
        self.__dict__["quant_method"] = self.quant_method.old_quant_method
        try:
            return load()
        finally:
            del self.__dict__["quant_method"]


# Models ask the loader for attributes that vLLM has set on its own, such as supports_moe_loading.
vars(MoeNvlinkRoutedExperts.weight_loader).update(vars(RoutedExperts.weight_loader))


class MoeNvlinkMoERunner(MoERunner):
    """vLLM's runner, with the MoE layer as one opaque op on every platform.

    If combine can end the layer (`why_not`), it applies the routed scaling factor and adds the
    shared experts' output; the op then returns the layer's result, and vLLM's steps after the op do
    nothing. The runner decides when our method enters the layer, and again if another method
    replaces ours.
    """

    #: Whether combine ends the layer.
    _ends_in_combine = False

    @overrides
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.routed_experts, MoeNvlinkRoutedExperts):
            self.routed_experts.on_replaced = self._decide
        elif selected_here():
            raise UnsupportedError(
                f"--all2all-backend {BACKEND}: layer {self.layer_name} brings its own experts "
                f"class {type(self.routed_experts).__name__}, which our exchange cannot enter. "
                "Use another backend for this model."
            )

    def _decide(self) -> None:
        """Decide whether combine ends the layer, and take the op for it. Local."""
        reason = why_not(self)
        self._ends_in_combine = not reason
        self._forward_entry = self._select_forward()
        if reason:
            logger.debug("combine of %s only sums: %s", self.layer_name, reason)
        else:
            added = "nothing" if self._shared_experts is None else "the shared experts' output"
            kernel = self.routed_experts.quant_method.moe_kernel
            if self._shared_experts is not None and kernel.can_overlap_shared_experts:
                added = "nothing, because the shared experts run beside it"
            logger.debug(
                "combine of %s multiplies by %s and adds %s",
                *(self.layer_name, self.routed_scaling_factor, added),
            )
            _tell(self.routed_scaling_factor, added)

    @overrides
    def _select_forward(self) -> Any:
        """Return the custom op, also on CPU, where vLLM would let Dynamo trace the exchange."""
        if self._ends_in_combine:
            return getattr(torch.ops.vllm, OP_NAME)
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared

    @overrides
    def _forward_impl(self, *given: Any) -> Any:
        """Run the layer as vLLM does; idle steps of CPU ranks may repeat the call."""
        idle_steps.note(super()._forward_impl, *given)
        return super()._forward_impl(*given)

    @overrides
    def _apply_quant_method(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None = None,
        shared_experts_overlapping: bool = False,
    ) -> tuple[torch.Tensor | None, Any]:
        """Route, dispatch, compute and combine. Collective; capturable on CUDA ranks.

        If combine ends the layer, the stream waits for the shared experts directly before combine
        and not afterwards, as in vLLM.

        Args:
            hidden_states: `[num_tokens, hidden_size]`.
            router_logits: what the router reads.
            shared_experts_input: `[num_tokens, hidden_size]`, or None.
            input_ids: `[num_tokens]`, or None.
            shared_experts_overlapping: whether the shared experts run on another stream.

        Returns:
            Output of the shared experts or None, and that of the layer or of the routed experts.
        """
        apply: Callable[..., tuple[torch.Tensor | None, Any]] = functools.partial(
            super()._apply_quant_method,
            hidden_states=hidden_states,
            router_logits=router_logits,
            shared_experts_input=shared_experts_input,
            input_ids=input_ids,
        )
        if not self._ends_in_combine:
            return apply(shared_experts_overlapping=shared_experts_overlapping)
        shared = self._shared_experts

        def take_added() -> torch.Tensor | None:
            if shared is None:
                return None
            if shared_experts_overlapping:
                shared.wait()
            output: torch.Tensor = shared._output[shared._output_idx]
            return output

        try:
            with with_epilogue(Epilogue(self.routed_scaling_factor, take_added)):
                return apply(shared_experts_overlapping=False)  # take_added has waited
        except BaseException:
            if shared is not None:  # vLLM's next forward asserts that no output is left
                shared._output[shared._output_idx] = None
            raise

    @overrides
    def _maybe_combine(self, shared_output: torch.Tensor | None, hidden_states: Any) -> Any:
        """Return what the op returns: one tensor if combine ended the layer. Local."""
        if self._ends_in_combine:
            return hidden_states
        return super()._maybe_combine(shared_output, hidden_states)

    @overrides
    def _maybe_apply_routed_scale_to_output(
        self, shared_output: torch.Tensor | None, fused_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Scale the routed output as vLLM does, unless combine has done it. Local."""
        if self._ends_in_combine:
            return shared_output, fused_output
        scaled: tuple[torch.Tensor | None, torch.Tensor]
        scaled = super()._maybe_apply_routed_scale_to_output(shared_output, fused_output)
        return scaled


@functools.cache
def _tell(scale: float, added: str) -> None:
    """Log once per process and kind of layer that combine ends layers. Local."""
    logger.info("combine ends layers: it multiplies by %s and adds %s", scale, added)


def why_not(runner: Any) -> str:
    """Return why combine cannot end the layer; "" if it can. Local.

    Args:
        runner: vLLM's MoERunner of the layer, with its weights loaded.
    """
    moe = runner.moe_config
    adds, scales = runner.shared_experts is not None, runner.routed_scaling_factor != 1.0
    installed = runner.routed_experts.quant_method
    if not adds and not scales:
        return "there are no shared experts and no routed scaling factor"
    if not isinstance(installed, MoeNvlinkFusedMoEMethod):
        return f"its method is {type(installed).__name__}"
    if runner.routed_output_transform is not None:
        return "a transform of the routed output comes before the sum"
    if runner.routed_input_transform is not None:
        return "the shared experts get other rows than the routed experts"
    if moe.hidden_dim != moe.hidden_dim_unpadded:
        return f"rows of {moe.hidden_dim_unpadded} elements are padded to {moe.hidden_dim}"
    if adds and not moe.is_sequence_parallel and get_tensor_model_parallel_world_size() > 1:
        return "tensor-parallel ranks must sum the shared experts' output first"
    if adds and scales and moe.in_dtype == torch.float16:
        return "in float16, vLLM divides the shared experts' output by the scaling factor"
    return ""
