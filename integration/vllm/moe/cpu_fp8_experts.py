"""FP8 experts for CPUs for which vLLM has none: rows travel as FP8, the arithmetic is float.

vLLM's CPU experts for block FP8 need AMX tiles. On a CPU without them, vLLM's oracle chooses no
experts class (until plugins can register theirs, its comment says), and loading fails. Our experts
dequantise the weights after loading, and vLLM's unquantised CPU experts compute with them. Unlike
these, our experts take quantised rows, so dispatch carries the format of the model's scheme.

vLLM's own CPU experts (W8A16) get unquantised activations. vLLM's GPU experts also quantise between
the two products. Our experts quantise only the input.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.utils import replace_parameter

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.vllm.backend import BACKEND

logger = logging.getLogger(__name__)


def serve_without_amx(quant_method: Any) -> None:
    """Give an FP8 quant method our experts if vLLM has found none for this CPU. Local.

    It changes no other quant method. Our fused MoE method calls the experts'
    process_weights_after_loading, which vLLM's FP8 method does not.

    Raises:
        UnsupportedError: the FP8 weights have no block scales.
    """
    if not isinstance(quant_method, Fp8MoEMethod) or quant_method.experts_cls is not None:
        return
    if not quant_method.block_quant:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: vLLM has no experts for this CPU and FP8 weights with "
            "one scale per tensor. Use a checkpoint with block scales (weight_block_size), or "
            "weights in bfloat16, float16 or float32."
        )
    _, unquantised = select_unquantized_moe_backend(moe_config=quant_method.moe)
    quant_method.experts_cls = _taking_fp8_rows(unquantised)
    # With this backend, vLLM passes the weights to the experts as it has loaded them.
    quant_method.fp8_backend = Fp8MoeBackend.EMULATION
    logger.info(
        "vLLM has no FP8 experts for this CPU: moe_nvlink dequantises the weights to %s after "
        "loading; rows travel in the model's format.",
        quant_method.moe.in_dtype,
    )


class Fp8RowsMixin:
    """Mixin for experts that compute floats: it makes floats of e4m3 rows and block scales."""

    moe_config: Any
    quant_config: Any

    @property
    @overrides
    def expects_unquantized_inputs(self) -> bool:
        """False, because quantised rows travel."""
        return False

    @overrides
    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantise the weights; then process them as the float experts do. Local."""
        for name in ("w13", "w2"):
            weight = getattr(layer, f"{name}_weight")
            scales = getattr(layer, f"{name}_weight_scale_inv")
            restored = dequantised_blocks(weight, scales, self.quant_config.block_shape)
            replace_parameter(layer, f"{name}_weight", restored.to(self.moe_config.in_dtype))
        super().process_weights_after_loading(layer)  # type: ignore[misc]

    @overrides
    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Run vLLM's apply; a1q_scale is `[num_rows, blocks per row]` float32 for e4m3 rows."""
        scales = kwargs["a1q_scale"]
        if scales is not None:
            width = self.quant_config.block_shape[1]
            rows = hidden_states.float() * scales.repeat_interleave(width, dim=1)
            hidden_states = rows.to(self.moe_config.in_dtype)
            kwargs["a1q_scale"] = None
        super().apply(output, hidden_states, *args, **kwargs)  # type: ignore[misc]


@functools.cache
def _taking_fp8_rows(base: type[mk.FusedMoEExperts]) -> type[mk.FusedMoEExperts]:
    return type(f"Fp8Rows{base.__name__}", (Fp8RowsMixin, base), {"__module__": __name__})


def dequantised_blocks(
    weight: torch.Tensor, scales: torch.Tensor, block: list[int]
) -> torch.Tensor:
    """Return e4m3 weights `[experts, rows, columns]` times their block's scale, float32. Local."""
    rows, columns = block
    of_elements = scales.repeat_interleave(rows, dim=1).repeat_interleave(columns, dim=2)
    return weight.float() * of_elements[:, : weight.shape[1], : weight.shape[2]]
