"""What SGLang's experts take, in the words of `common.experts_input`.

Every runner that we serve takes floats and quantises them itself. Some take rows that travelled
quantised as well, and a layer says so by ``set_quant_config``:

| recipe | if the quantisation config has | and the runner is |
|---|---|---|
| nvfp4 | input_global_scale | flashinfer_cutlass, _cutedsl, _trtllm, _trtllm_routed |
| mxfp8 | use_mxfp8 | flashinfer_trtllm, flashinfer_trtllm_routed |
| fp8_block | weight_dtype e4m3, with blocks of 128 columns | triton |

SGLang sets input_global_scale if SGLANG_MOE_NVFP4_DISPATCH is 1, or if the resolution of arguments
(`plugin.resolution`) has declared it for a model that is stored in NVFP4. Every other layer gets
floats, for example the unquantised layers of a draft or of a mixed model.
A user has to ask for fp8_block: SGLang's own backends send these rows as BF16, and nobody has
compared the two on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_nvlink_plugin.integration.common.experts_input import ExpertsInput
from moe_nvlink_plugin.integration.common.options import AUTO, Options, Wording

from .runners import Runner

E4M3 = torch.float8_e4m3fn
#: `ExpertsInput.quant_dtype` of the rows of each recipe.
_DTYPES: dict[str, Any] = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8_block": E4M3}


def natural_recipe(
    quant_config: Mapping[str, Any], runner: Runner, block_shape: Sequence[int] | None
) -> str | None:
    """Return the recipe whose rows a layer takes as they travel; None: floats only. Local."""
    if quant_config.get("input_global_scale") is not None:
        found = "nvfp4"
    elif quant_config.get("use_mxfp8"):
        found = "mxfp8"
    elif quant_config.get("weight_dtype") == E4M3 and block_shape and block_shape[1] == 128:
        found = "fp8_block"
    else:
        return None
    return found if found in runner.wires else None


def wanted_recipe(natural: str | None, options: Options) -> str | None:
    """Return the recipe of arriving rows, from `natural` and what the user chose. Local."""
    chosen_by_default = options.dispatch == AUTO and natural != "fp8_block"
    return natural if chosen_by_default or options.dispatch == natural else None


class SglangExpertsInput(ExpertsInput):
    """What the experts of one layer take.

    Args:
        wording: words of SGLang's messages.
        runner: what the layer's runner takes.
        recipe: recipe of the rows that the experts take; None: floats.
        scale: the layer's input_global_scale, by which activations are multiplied.
    """

    def __init__(
        self,
        wording: Wording,
        runner: Runner,
        recipe: str | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        self._wording, self._runner, self.recipe, self._scale = wording, runner, recipe, scale

    @property
    def wording(self) -> Wording:
        """Words of SGLang's messages."""
        return self._wording

    @property
    def quant_dtype(self) -> Any:
        """What the experts quantise to; None for floats."""
        return None if self.recipe is None else _DTYPES[self.recipe]

    @property
    def block_shape(self) -> Sequence[int] | None:
        """Rows and columns of a block of fp8_block; the other two recipes have their own."""
        return [128, 128] if self.recipe == "fp8_block" else None

    @property
    def per_token(self) -> bool:
        """False: no runner takes rows with one dynamic scale each."""
        return False

    @property
    def padded_to(self) -> int | None:
        """None: SGLang pads no rows before dispatch."""
        return None

    @property
    def static_scale(self) -> torch.Tensor | None:
        """Scale of nvfp4. SGLang computes it from all experts' scales, so ranks have one."""
        return self._scale if self.recipe == "nvfp4" else None

    @property
    def wants_powers_of_two(self) -> bool:
        """False: Triton's kernel takes any scale."""
        return False

    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return float rows, quantised as SGLang's own dispatchers do it. Local; GPU only."""
        if self.recipe == "nvfp4":
            from sglang.srt.layers.quantization.fp4_utils import fp4_quantize

            packed, scales = fp4_quantize(rows, self._scale, is_sf_swizzled_layout=False)
            return packed, scales.view(E4M3).reshape(rows.shape[0], -1)
        if self.recipe == "mxfp8":
            from flashinfer import mxfp8_quantize

            quantised, scales = mxfp8_quantize(rows, False)
            return quantised, scales.view(torch.uint8).reshape(rows.shape[0], -1)
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

        return tuple(sglang_per_token_group_quant_fp8(rows, 128))

    def laid_out(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return scales as bytes, for cutlass interleaved. Local; capturable."""
        if self.recipe != "nvfp4":
            return scales
        scales = scales.view(torch.uint8)
        if not self._runner.interleaves_nvfp4:
            return scales
        from flashinfer import nvfp4_block_scale_interleave

        interleaved: torch.Tensor = nvfp4_block_scale_interleave(scales)
        return interleaved
