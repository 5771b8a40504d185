"""In which format a layer's rows travel, and what is done to them before and behind that.

`choose` decides it once per layer, when the weights are loaded, from what the experts take:

| experts take | "dispatch" | before dispatch | travels | on arrival |
|---|---|---|---|---|
| floats | auto, bf16 | | activations | |
| rows of a recipe | auto | quantised, by our kernel or by vLLM | the recipe | |
| quantised rows | bf16 | | activations | quantised by vLLM |
| floats | a recipe | quantised by our kernel | the recipe | dequantised |
| quantised rows | another recipe | quantised by our kernel | that one | both, in this order |

Experts that quantise for themselves take floats.

Scales travel row by row. What mixes rows, an interleaved or column-major layout, is made here of
those that arrived. All of it is plain torch and vLLM's own ops on shapes that depend on no value.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used
from vllm.utils.flashinfer import nvfp4_block_scale_interleave

from moe_nvlink_plugin import QuantisingRecipe
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm.plugin.options import (
    AUTO,
    FRAMEWORK,
    KEY,
    QUANTISE_ON_ARRIVAL,
    UNQUANTISED,
    Options,
)

logger = logging.getLogger("vllm.plugins.moe_nvlink")

#: Global scales of recipes named by a user who gave none: blocks of nvfp4 up to 2688 keep their
#: amax, those below 0.006 become zeros.
DEFAULT_GLOBAL_SCALES = {"nvfp4": 1.0}


class Sent(NamedTuple):
    """What `MoeAllToAll.dispatch` is given of the rows."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class DispatchFormat:
    """One layer's way through the table above.

    Attributes:
        quant_dtype: FusedMoEQuantConfig.quant_dtype of rows the experts take; None: floats.
        recipe: what travels; None: the activations as they are.
        by_framework: vLLM's quantiser makes the recipe's rows, not ours.
        restored_to: rows that arrived are dequantised to this type; None: they are not.
        on_arrival: vLLM's quantiser makes what the experts take of float rows that arrived.
        global_scale: `[1]` fp32 for a recipe that a user named; None: the model's own.
        stand_in: takes the place of vLLM's quantiser, with its bits, where that has no kernel (on
            CPU, but for MXFP8); None: nothing does.
    """

    quant_dtype: Any = None
    recipe: QuantisingRecipe | None = None
    by_framework: bool = False
    restored_to: torch.dtype | None = None
    on_arrival: bool = False
    global_scale: torch.Tensor | None = None
    stand_in: QuantisingRecipe | None = None

    @property
    def has_static_scale(self) -> bool:
        """Whether rows are quantised by one rank's static scale and read by another's."""
        return (
            self.recipe is not None and self.recipe.needs_global_scale and self.restored_to is None
        )

    def send(self, a1: torch.Tensor, quant_config: Any) -> Sent:
        """`[num_tokens, hidden_size]` activations as they go into dispatch. Local; capturable."""
        if self.recipe is None:
            return Sent(a1)
        scale = self._global_scale(quant_config)
        if not self.by_framework:
            return Sent(a1, None, scale)
        if a1.shape[0] == 0:  # a launch for no rows is an error of some quantisers
            return Sent(*self.recipe.quantise(a1, scale))
        rows, scales = self._by_vllm(a1, quant_config)
        travels = self.recipe.scales_row(a1.shape[1]) is not None
        return Sent(rows.contiguous(), _contiguous(scales) if travels else None)

    def receive(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor,
        quant_config: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What arrived, as the experts take it. Local; capturable.

        rows `[num_rows, elements]` and scales as dispatch gave them, weights `[num_rows, top_k]`
        with zeros for choices of other ranks. Returns the experts' hidden_states and a1q_scale.
        """
        recipe = self.recipe
        if recipe is not None and self.restored_to is not None:
            rows = recipe.dequantise(rows, scales, self.restored_to, self.global_scale)
            scales = None
        if self.on_arrival:
            if rows.shape[0]:
                rows = _without_old_bytes(rows, weights, quant_config)
                rows, scales = self._by_vllm(rows, quant_config)
        elif self.quant_dtype is not None and scales is None:
            scales = quant_config.a1_scale  # one for all rows, equal on all ranks
        return rows, _laid_out(rows, scales, quant_config)

    def static_scale(self, quant_config: Any) -> float | None:
        """The model's own scale that all ranks must share, None where there is none. Local.

        Waits for the device. Raises UnsupportedError for a value that is no scale, and where every
        expert has a scale of its own.
        """
        if not self.has_static_scale:
            return None
        values = _given_scale(quant_config).flatten().tolist()
        wrong = [value for value in values if not (math.isfinite(value) and value > 0)]
        if wrong or not values:
            raise UnsupportedError(
                f"the static activation scale of the checkpoint is {_some(wrong)}; it must be "
                "finite and above 0. Check the checkpoint's input scales."
            )
        if len(set(values)) > 1:
            raise UnsupportedError(
                f"each expert has a static activation scale of its own ({_some(values)}), but a "
                f"token is quantised once for all its experts. {QUANTISE_ON_ARRIVAL}"
            )
        return float(values[0])

    def _global_scale(self, quant_config: Any) -> torch.Tensor | None:
        if self.recipe is None or not self.recipe.needs_global_scale:
            return None
        if self.global_scale is not None:
            return self.global_scale
        return _first(_given_scale(quant_config))  # all are equal: `static_scale` has looked

    def _by_vllm(
        self, rows: torch.Tensor, quant_config: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.stand_in is None:
            return by_vllm(rows, quant_config)
        scale = _first(_given_scale(quant_config)) if self.stand_in.needs_global_scale else None
        quantised = self.stand_in.quantise(rows, scale)
        if quantised.scales is None:
            return quantised.rows, quant_config.a1_scale
        return quantised


def choose(
    experts: Any,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    options: Options,
    find_recipe: Callable[[str], Any],
) -> DispatchFormat:
    """How rows of a layer with these experts travel. Local; equal on all ranks for equal arguments.

    experts: vLLM's; hidden_size and dtype of the activations; find_recipe: name to recipe, raises
    ConfigError for what this layer cannot use. Raises that, and UnsupportedError for a format that
    no recipe is, naming what to do instead.
    """
    quant_config = experts.quant_config
    takes_floats = quant_config.quant_dtype is None or experts.expects_unquantized_inputs
    if takes_floats and options.dispatch in (AUTO, UNQUANTISED):
        return DispatchFormat()
    name, why_not = (None, "") if takes_floats else _recipe_name(quant_config, hidden_size)
    if not takes_floats and options.dispatch in (AUTO, name):
        if name is None:
            raise UnsupportedError(f"{why_not} {QUANTISE_ON_ARRIVAL}")
        chosen = _of_the_model(quant_config, _quantising(find_recipe(name)), options)
    elif options.dispatch == UNQUANTISED:
        chosen = DispatchFormat(quant_config.quant_dtype, on_arrival=True)
    else:
        named = _quantising(find_recipe(options.dispatch))
        if device.type == "cuda":
            _warn_of_restoring(named.name, dtype)
        chosen = DispatchFormat(
            None if takes_floats else quant_config.quant_dtype,
            named,
            restored_to=dtype,
            on_arrival=not takes_floats,
            global_scale=_named_global_scale(named, device, options),
        )
    if device.type == "cpu" and name not in (None, "mxfp8"):
        chosen = dataclasses.replace(chosen, stand_in=_quantising(find_recipe(name)))
    return chosen


def by_vllm(rows: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float rows `[n, hidden_size]`, quantised by vLLM as the experts want them; linear scales."""
    quantised: tuple[torch.Tensor, torch.Tensor | None] = moe_kernel_quantize_input(
        A=rows,
        A_scale=_given_scale(quant_config),
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
        is_scale_swizzled=False,
        mx_alignment=quant_config.mx_alignment,
    )
    return quantised


# Which recipe the experts take.


def _of_the_model(quant_config: Any, recipe: QuantisingRecipe, options: Options) -> DispatchFormat:
    # DeepGEMM's block scales are powers of two, which ours are not; their rows are alike.
    powers_of_two = recipe.name == "fp8_block" and is_deep_gemm_e8m0_used()
    return DispatchFormat(
        quant_config.quant_dtype,
        recipe,
        by_framework=options.quantise == FRAMEWORK or powers_of_two,
    )


def _recipe_name(quant_config: Any, hidden_size: int) -> tuple[str | None, str]:
    """The recipe whose rows and scales these experts take, or None and the reason."""
    quant_dtype = quant_config.quant_dtype
    if quant_dtype == torch.float8_e4m3fn:
        return _fp8_recipe_name(quant_config)
    if quant_dtype == "mxfp8" and quant_config.block_shape in (None, [1, 32]):
        alignment = quant_config.mx_alignment
        if alignment and hidden_size % alignment:
            return None, (
                f"these experts want MXFP8 rows of {hidden_size} elements padded to a multiple of "
                f"{alignment}, which no recipe does."
            )
        return "mxfp8", ""
    if quant_dtype == "nvfp4":
        if quant_config.a1_gscale is None:
            return None, "NVFP4 activations without a static global scale have no recipe."
        return "nvfp4", ""
    return None, (
        f"activations quantised to {quant_dtype} (block_shape {quant_config.block_shape}) have no "
        "recipe."
    )


def _fp8_recipe_name(quant_config: Any) -> tuple[str | None, str]:
    block = quant_config.block_shape
    if block is not None:
        if block[1] == 128:  # activations have blocks of one row, whatever block[0] says
            return "fp8_block", ""
        return None, f"FP8 activations in blocks of {block[1]} have no recipe, those of 128 have."
    if quant_config.a1_scale is not None:  # vLLM's quantiser too takes a given scale first
        return "fp8_tensor", ""
    if quant_config.per_act_token_quant:
        return "fp8_token", ""
    return None, (
        "FP8 activations with one dynamic scale per tensor: each rank would have its own, and the "
        "experts take one for all rows."
    )


def _given_scale(quant_config: Any) -> Any:
    """The static scale of the experts' input, as vLLM hands it to its quantiser."""
    is_nvfp4 = quant_config.quant_dtype == "nvfp4"
    return quant_config.a1_gscale if is_nvfp4 else quant_config.a1_scale


def _quantising(recipe: Any) -> QuantisingRecipe:
    if not isinstance(recipe, QuantisingRecipe):
        raise UnsupportedError(
            f"recipe {recipe.name} does not say how to quantise and dequantise, which a dispatch "
            f"of vLLM's activations needs. For unquantised rows of any type say {UNQUANTISED}."
        )
    return recipe


def _named_global_scale(
    recipe: QuantisingRecipe, device: torch.device, options: Options
) -> torch.Tensor | None:
    scale = options.dispatch_global_scale
    if not recipe.needs_global_scale:
        if scale is not None:
            raise UnsupportedError(
                f"dispatch in {recipe.name} takes no scale of yours, its rows bring their own: "
                f'remove "dispatch_global_scale" from additional_config["{KEY}"].'
            )
        return None
    if scale is None:
        scale = DEFAULT_GLOBAL_SCALES.get(recipe.name)
    if scale is None:
        raise UnsupportedError(
            f"dispatch in {recipe.name} needs a scale that this model does not bring: add "
            f'"dispatch_global_scale" to additional_config["{KEY}"], the scale that a value is '
            "divided by, or name a recipe that finds its own (fp8_token)."
        )
    return torch.full((1,), scale, dtype=torch.float32, device=device)


@functools.cache
def _warn_of_restoring(name: str, dtype: torch.dtype) -> None:
    logger.warning(
        "Rows that travel in %s are dequantised to %s on arrival, in all slots of the receive "
        "buffer, filled or not: fewer bytes between GPUs, another buffer and another pass on each. "
        "Not measured on a GPU yet.",
        name,
        dtype,
    )


# What arrived.


def _without_old_bytes(
    rows: torch.Tensor, weights: torch.Tensor, quant_config: Any
) -> torch.Tensor:
    """Rows for vLLM's quantiser; zeros in empty slots where it takes one maximum of them all."""
    one_scale_for_all = (
        isinstance(quant_config.quant_dtype, torch.dtype)
        and quant_config.block_shape is None
        and not quant_config.per_act_token_quant
        and _given_scale(quant_config) is None
    )
    if not one_scale_for_all:
        return rows
    return rows.masked_fill((weights == 0).all(1, keepdim=True), 0.0)


def _laid_out(
    rows: torch.Tensor, scales: torch.Tensor | None, quant_config: Any
) -> torch.Tensor | None:
    """Scales `[num_rows, ...]` of these rows in the layout that the experts' kernel reads."""
    if scales is None or scales.ndim != 2 or scales.numel() == 0:
        return scales
    if quant_config.is_scale_swizzled and quant_config.quant_dtype == "nvfp4":
        interleaved: torch.Tensor = nvfp4_block_scale_interleave(scales.view(torch.uint8))
        return interleaved
    if quant_config.is_scale_swizzled and quant_config.quant_dtype == "mxfp8":
        swizzled: torch.Tensor = swizzle_mxfp8_scale(scales, *rows.shape)
        return swizzled
    if getattr(quant_config, "is_scale_transposed", False):  # vLLM 0.33 and newer
        return scales.t().contiguous().t()
    return scales


def _first(scale: torch.Tensor) -> torch.Tensor:
    return scale.flatten()[:1].to(torch.float32)


def _contiguous(scales: torch.Tensor | None) -> torch.Tensor | None:
    return None if scales is None else scales.contiguous()


def _some(values: list[float]) -> str:
    return (", ".join(f"{v:g}" for v in values[:4]) or "empty") + (", ..." if values[4:] else "")
