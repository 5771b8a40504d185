"""FP8 experts on a CPU for which vLLM has none: rows travel as FP8, the arithmetic is float.

vLLM's CPU experts for block FP8 need AMX tiles. Without them its oracle chooses no experts class
(for now, its comment says, until plugins can register theirs) and loading fails. Here the weights
are dequantised once they are loaded and computed by the unquantised CPU experts. Unlike those, the
experts take quantised rows, so that dispatch carries what the model's scheme asks for.

vLLM's own CPU experts (W8A16) see unquantised activations, its GPU ones quantise also between the
two products. These quantise the input alone.
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
from moe_nvlink_plugin.integration.vllm.backend import BACKEND

logger = logging.getLogger(__name__)


def serve_without_amx(quant_method: Any) -> None:
    """Gives an FP8 quant method our experts where vLLM found none for this CPU. Local.

    Call it before anything else wraps the method's process_weights_after_loading. Leaves every
    other quant method alone. Raises UnsupportedError for FP8 weights that are not in blocks.
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
    # The backend whose weights vLLM hands to the experts as they were loaded.
    quant_method.fp8_backend = Fp8MoeBackend.EMULATION
    original = quant_method.process_weights_after_loading

    @functools.wraps(original)
    def process_weights_after_loading(layer: Any) -> None:
        original(layer)
        quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    quant_method.process_weights_after_loading = process_weights_after_loading
    logger.info(
        "No FP8 experts of vLLM run on this CPU: weights are dequantised to %s at load, rows "
        "travel as the model asks.",
        quant_method.moe.in_dtype,
    )


class Fp8RowsMixin:
    """In front of experts that compute floats: e4m3 rows and block scales become floats first."""

    moe_config: Any
    quant_config: Any

    @property
    def expects_unquantized_inputs(self) -> bool:
        """False: it is quantised rows that travel."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantises the weights, then what the float experts do with theirs. Local."""
        for name in ("w13", "w2"):
            weight = getattr(layer, f"{name}_weight")
            scales = getattr(layer, f"{name}_weight_scale_inv")
            restored = dequantised_blocks(weight, scales, self.quant_config.block_shape)
            replace_parameter(layer, f"{name}_weight", restored.to(self.moe_config.in_dtype))
        super().process_weights_after_loading(layer)  # type: ignore[misc]

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """vLLM's apply, with a1q_scale fp32 [num_rows, blocks per row] beside e4m3 rows."""
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
    """e4m3 `[experts, rows, columns]` times the scale of its block, in fp32. Local."""
    rows, columns = block
    of_elements = scales.repeat_interleave(rows, dim=1).repeat_interleave(columns, dim=2)
    return weight.float() * of_elements[:, : weight.shape[1], : weight.shape[2]]
