"""What vLLM's experts take: their FusedMoEQuantConfig in the terms of `common.experts_input`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
from vllm.utils.flashinfer import nvfp4_block_scale_interleave

from moe_nvlink_plugin.integration.common.experts_input import ExpertsInput
from moe_nvlink_plugin.integration.common.options import Wording
from moe_nvlink_plugin.integration.vllm.choices import WORDING

logger = logging.getLogger(__name__)


class VllmExpertsInput(ExpertsInput):
    """View of one FusedMoEQuantConfig. Each call makes a new one.

    Args:
        quant_config: vLLM's FusedMoEQuantConfig.
        takes_floats: whether the experts quantise their input themselves, whatever quant_config
            says.
    """

    def __init__(self, quant_config: Any, *, takes_floats: bool = False) -> None:
        self._quant_config = quant_config
        self._takes_floats = takes_floats

    @classmethod
    def of(cls, experts: Any) -> VllmExpertsInput:
        """Return what an experts object of vLLM takes. Local."""
        floats = experts.quant_config.quant_dtype is None or experts.expects_unquantized_inputs
        return cls(experts.quant_config, takes_floats=floats)

    @property
    def wording(self) -> Wording:
        """Words of vLLM's messages."""
        return WORDING

    @property
    def quant_dtype(self) -> Any:
        """vLLM's value; None for experts that quantise their input themselves."""
        return None if self._takes_floats else self._quant_config.quant_dtype

    @property
    def block_shape(self) -> Any:
        """vLLM's value: `[rows, columns]`."""
        return self._quant_config.block_shape

    @property
    def per_token(self) -> bool:
        """Whether each row has one dynamic scale."""
        return bool(self._quant_config.per_act_token_quant)

    @property
    def padded_to(self) -> int | None:
        """vLLM's alignment of MXFP8 rows."""
        alignment: int | None = self._quant_config.mx_alignment
        return alignment

    @property
    def static_scale(self) -> torch.Tensor | None:
        """The scale that vLLM passes to its quantiser."""
        config = self._quant_config
        scale: torch.Tensor | None = (
            config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale
        )
        return scale

    @property
    def wants_powers_of_two(self) -> bool:
        """Whether DeepGEMM wants such scales on this GPU."""
        return bool(is_deep_gemm_e8m0_used())

    @property
    def scales_layout(self) -> str:
        """The layout that `laid_out` makes."""
        config = self._quant_config
        if config.is_scale_swizzled and config.quant_dtype in ("nvfp4", "mxfp8"):
            return "interleaved"
        if getattr(config, "is_scale_transposed", False):  # vLLM 0.33 and newer
            return "column_major"
        return "linear"

    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ExpertsInput."""
        config = self._quant_config
        quantised: tuple[torch.Tensor, torch.Tensor | None] = moe_kernel_quantize_input(
            A=rows,
            A_scale=self.static_scale,
            quant_dtype=config.quant_dtype,
            per_act_token_quant=config.per_act_token_quant,
            block_shape=config.block_shape,
            is_scale_swizzled=False,
            mx_alignment=config.mx_alignment,
        )
        return quantised

    def laid_out(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See ExpertsInput."""
        layout = self.scales_layout
        if layout == "interleaved" and self._quant_config.quant_dtype == "nvfp4":
            interleaved: torch.Tensor = nvfp4_block_scale_interleave(scales.view(torch.uint8))
            return interleaved
        if layout == "interleaved":
            swizzled: torch.Tensor = swizzle_mxfp8_scale(scales, *rows.shape)
            return swizzled
        return scales.t().contiguous().t() if layout == "column_major" else scales


def say_if_fp8_could_travel(experts: Any) -> None:
    """Say once per class that experts for FP8 get rows of twice the bytes. Local.

    vLLM prefers such experts on some GPUs: with FlashInfer installed, on Hopper for FP8 blocks.

    Args:
        experts: vLLM's experts, whose rows travel unquantised though nobody has asked for that.
    """
    config = experts.quant_config
    if config.quant_dtype == torch.float8_e4m3fn and experts.expects_unquantized_inputs:
        _say_that_fp8_could_travel(type(experts).__name__, is_block=config.block_shape is not None)


@functools.cache
def _say_that_fp8_could_travel(experts: str, *, is_block: bool) -> None:
    others = "--moe-backend deep_gemm" if is_block else "other experts with --moe-backend"
    logger.info(
        "%s quantises its input itself, so rows travel unquantised, in twice the bytes of FP8. "
        "%s takes rows that dispatch has quantised. Which of them is faster has not been measured.",
        experts,
        others,
    )
