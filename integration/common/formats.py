"""The format in which a layer's rows travel, and what happens to them before and after that.

`choose` decides once per layer, when the weights are loaded, by what the experts take:

| experts take | "dispatch" | before dispatch | travels | on arrival |
|---|---|---|---|---|
| floats | auto, bf16 | | activations | |
| rows of a recipe | auto | quantised, by our kernel or by the framework | the recipe | |
| quantised rows | bf16 | | activations | quantised by the framework |
| FP8 or int8 rows of no recipe | auto | | activations | quantised by the framework; a warning |
| floats | a recipe | quantised by our kernel | the recipe | dequantised |
| quantised rows | another recipe | quantised by our kernel | that one | both, in this order |

Experts that quantise their input themselves take floats.

Scales travel row by row. If the experts read scales in a layout that mixes rows (interleaved or
column-major), dispatch makes it of the scales that arrived. If the scales are made on arrival, the
framework makes it. Everything here is plain torch and the framework's own ops, on shapes that
depend on no value.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import QuantisingRecipe
from moe_nvlink_plugin.config import SCALES_LAYOUTS
from moe_nvlink_plugin.errors import UnsupportedError

from .experts_input import ExpertsInput
from .options import AUTO, FRAMEWORK, UNQUANTISED, Options, Wording

logger = logging.getLogger(__name__)

#: Global scales for a user who named a recipe and no scale. With 1.0, nvfp4 keeps the largest
#: magnitude of blocks up to 2688, and makes zeros of blocks below 0.006.
DEFAULT_GLOBAL_SCALES = {"nvfp4": 1.0}


class Sent(NamedTuple):
    """Arguments of `MoeAllToAll.dispatch` that hold the rows."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class DispatchFormat:
    """One layer's way through the table above.

    Attributes:
        quant_dtype: ExpertsInput.quant_dtype of the rows that the experts take; None: floats.
        recipe: format that travels; None: the activations as they are.
        by_framework: whether the framework's quantiser makes the recipe's rows, and not our kernel.
        restored_to: type to which this rank dequantises rows on arrival; None: it does not.
        on_arrival: whether the framework quantises the float rows on arrival for the experts.
        global_scale: `[1]` float32 for a recipe that a user named; None: the model's own scale.
        stand_in: recipe that replaces the framework's quantiser, with equal bits, if that has no
            kernel for the device (on CPU it has one for MXFP8 only); None: nothing replaces it.
        scales_layout: layout into which dispatch brings the scales that travel.
    """

    quant_dtype: Any = None
    recipe: QuantisingRecipe | None = None
    by_framework: bool = False
    restored_to: torch.dtype | None = None
    on_arrival: bool = False
    global_scale: torch.Tensor | None = None
    stand_in: QuantisingRecipe | None = None
    scales_layout: str = "linear"

    @property
    def has_static_scale(self) -> bool:
        """Whether one rank quantises rows by its static scale and another reads them by its own."""
        return (
            self.recipe is not None and self.recipe.needs_global_scale and self.restored_to is None
        )

    def send(self, a1: torch.Tensor, experts: ExpertsInput) -> Sent:
        """Return activations `[num_tokens, hidden_size]` as dispatch takes them.

        Local; capturable.
        """
        if self.recipe is None:
            return Sent(a1)
        scale = self._global_scale(experts)
        if not self.by_framework:
            return Sent(a1, None, scale)
        if a1.shape[0] == 0:  # some quantisers fail for no rows
            return Sent(*self.recipe.quantise(a1, scale))
        rows, scales = self._by_framework(a1, experts)
        travels = self.recipe.scales_row(a1.shape[1]) is not None
        return Sent(rows.contiguous(), _contiguous(scales) if travels else None)

    def receive(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor,
        experts: ExpertsInput,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return received rows and scales as the experts take them. Local; capturable.

        Args:
            rows: `[num_rows, elements]`, as dispatch returned them.
            scales: as dispatch returned them.
            weights: `[num_rows, top_k]` router weights; 0 for choices of other ranks.
            experts: what the experts take.
        """
        recipe = self.recipe
        if recipe is not None and self.restored_to is not None:
            rows = recipe.dequantise(rows, scales, self.restored_to, self.global_scale)
            scales = None
        if self.on_arrival:
            if rows.shape[0]:
                rows = _without_old_bytes(rows, weights, experts)
                rows, scales = self._by_framework(rows, experts)
        elif self.quant_dtype is not None and scales is None:
            scales = experts.static_scale  # one scale for all rows, equal on all ranks
        is_laid_out = self.scales_layout != "linear"
        if scales is not None and scales.ndim == 2 and scales.numel() and not is_laid_out:
            scales = experts.laid_out(rows, scales)
        return rows, scales

    def static_scale(self, experts: ExpertsInput) -> float | None:
        """Return the model's own scale, which must be equal on all ranks; None without one. Local.

        It waits for the device.

        Raises:
            UnsupportedError: the value is not finite or not above 0, or the experts have different
                scales.
        """
        if not self.has_static_scale:
            return None
        values = _given_scale(experts).flatten().tolist()
        wrong = [value for value in values if not (math.isfinite(value) and value > 0)]
        if wrong or not values:
            raise UnsupportedError(
                f"the static activation scale of the checkpoint is {_some(wrong)}; it must be "
                "finite and above 0. Check the checkpoint's input scales."
            )
        if len(set(values)) > 1:
            raise UnsupportedError(
                f"each expert has a static activation scale of its own ({_some(values)}), but a "
                "token is quantised once for all its experts. "
                f"{experts.wording.quantise_on_arrival}"
            )
        return float(values[0])

    def _global_scale(self, experts: ExpertsInput) -> torch.Tensor | None:
        if self.recipe is None or not self.recipe.needs_global_scale:
            return None
        if self.global_scale is not None:
            return self.global_scale
        return _first(_given_scale(experts))  # all are equal: `static_scale` has checked that

    def _by_framework(
        self, rows: torch.Tensor, experts: ExpertsInput
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.stand_in is None:
            return experts.quantised(rows)
        scale = _first(_given_scale(experts)) if self.stand_in.needs_global_scale else None
        quantised = self.stand_in.quantise(rows, scale)
        if quantised.scales is None:
            return quantised.rows, experts.static_scale
        return quantised


def choose(
    experts: ExpertsInput,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    options: Options,
    find_recipe: Callable[[str], Any],
) -> DispatchFormat:
    """Decide how rows of a layer travel. Local; equal on all ranks for equal arguments.

    Args:
        experts: what the experts take.
        hidden_size: elements of an activation row.
        dtype: type of the activations.
        device: where this rank works.
        options: what the user chose.
        find_recipe: returns the recipe with a name; raises ConfigError if the layer cannot use it.

    Raises:
        ConfigError: as find_recipe.
        UnsupportedError: no recipe has the experts' format, and it is neither FP8 nor int8. The
            message says what to do.
    """
    takes_floats = experts.quant_dtype is None
    if takes_floats and options.dispatch in (AUTO, UNQUANTISED):
        return DispatchFormat()
    name, why_not = (None, "") if takes_floats else _recipe_name(experts, hidden_size)
    if not takes_floats and _is_natural(options.dispatch, name):
        if name is not None:
            chosen = _of_the_model(experts, _quantising(find_recipe(name), experts), options)
        elif isinstance(experts.quant_dtype, torch.dtype):
            _warn_of_activations(why_not, dtype, experts.wording)
            chosen = DispatchFormat(experts.quant_dtype, on_arrival=True)
        else:
            raise UnsupportedError(f"{why_not} {experts.wording.quantise_on_arrival}")
    elif options.dispatch == UNQUANTISED:
        chosen = DispatchFormat(experts.quant_dtype, on_arrival=True)
    else:
        named = _quantising(find_recipe(options.dispatch), experts)
        if device.type == "cuda":
            _warn_of_restoring(named.name, dtype)
        chosen = DispatchFormat(
            experts.quant_dtype,
            named,
            restored_to=dtype,
            on_arrival=not takes_floats,
            global_scale=_named_global_scale(named, device, options, experts.wording),
        )
    if device.type == "cuda":  # CPU ranks hand out copies of the filled rows
        chosen = laid_out_by_dispatch(chosen, experts, hidden_size)
    if device.type == "cpu" and name not in (None, "mxfp8"):
        chosen = dataclasses.replace(chosen, stand_in=_quantising(find_recipe(name), experts))
    return chosen


def laid_out_by_dispatch(
    chosen: DispatchFormat, experts: ExpertsInput, hidden_size: int
) -> DispatchFormat:
    """Return the format in which dispatch makes the layout of the scales, if it can. Local."""
    if chosen.recipe is None or chosen.restored_to is not None:
        return chosen
    scales = chosen.recipe.scales_row(hidden_size)
    if scales is None or scales.dtype.itemsize != SCALES_LAYOUTS[experts.scales_layout]:
        return chosen
    return dataclasses.replace(chosen, scales_layout=experts.scales_layout)


# The recipe whose rows the experts take.


def _is_natural(named: str, natural: str | None) -> bool:
    """Return whether the user asks for the rows that the experts take."""
    if natural == "fp8_block_pow2" and named == "fp8_block":
        return True  # to users both are blocks of FP8; the experts decide about the scales
    return named in (AUTO, natural)


def _of_the_model(
    experts: ExpertsInput, recipe: QuantisingRecipe, options: Options
) -> DispatchFormat:
    by_framework = options.quantise == FRAMEWORK
    return DispatchFormat(experts.quant_dtype, recipe, by_framework=by_framework)


def _recipe_name(experts: ExpertsInput, hidden_size: int) -> tuple[str | None, str]:
    """Return the name of the recipe whose rows and scales these experts take, or None and why."""
    quant_dtype, block = experts.quant_dtype, experts.block_shape
    if quant_dtype == torch.float8_e4m3fn:
        return _fp8_recipe_name(experts)
    if quant_dtype == "mxfp8" and block in (None, [1, 32]):
        if experts.padded_to and hidden_size % experts.padded_to:
            return None, (
                f"these experts want MXFP8 rows of {hidden_size} elements padded to a multiple of "
                f"{experts.padded_to}, which no recipe does."
            )
        return "mxfp8", ""
    if quant_dtype == "nvfp4":
        if experts.static_scale is None:
            return None, "NVFP4 activations without a static global scale have no recipe."
        return "nvfp4", ""
    return None, f"activations quantised to {quant_dtype} (block_shape {block}) have no recipe."


def _fp8_recipe_name(experts: ExpertsInput) -> tuple[str | None, str]:
    block = experts.block_shape
    if block is not None:
        if block[1] == 128:  # blocks of activations have one row, whatever block[0] is
            return "fp8_block_pow2" if experts.wants_powers_of_two else "fp8_block", ""
        return None, f"FP8 activations in blocks of {block[1]} have no recipe, those of 128 have."
    if experts.static_scale is not None:  # a given scale comes first in frameworks' quantisers too
        return "fp8_tensor", ""
    if experts.per_token:
        return "fp8_token", ""
    return None, (
        "FP8 activations with one dynamic scale per tensor: each rank would have its own, and the "
        "experts take one for all rows."
    )


def _given_scale(experts: ExpertsInput) -> torch.Tensor:
    """Return the static scale of a format that has one."""
    scale = experts.static_scale
    assert scale is not None, experts.quant_dtype
    return scale


def _quantising(recipe: Any, experts: ExpertsInput) -> QuantisingRecipe:
    if not isinstance(recipe, QuantisingRecipe):
        raise UnsupportedError(
            f"recipe {recipe.name} does not say how to quantise and dequantise, which a dispatch "
            f"of {experts.wording.framework}'s activations needs. For unquantised rows of any "
            f"type say {UNQUANTISED}."
        )
    return recipe


def _named_global_scale(
    recipe: QuantisingRecipe, device: torch.device, options: Options, wording: Wording
) -> torch.Tensor | None:
    scale = options.dispatch_global_scale
    if not recipe.needs_global_scale:
        if scale is not None:
            raise UnsupportedError(
                f"dispatch in {recipe.name} takes no scale of yours, its rows bring their own: "
                f'remove "dispatch_global_scale" from {wording.options}.'
            )
        return None
    if scale is None:
        scale = DEFAULT_GLOBAL_SCALES.get(recipe.name)
    if scale is None:
        raise UnsupportedError(
            f"dispatch in {recipe.name} needs a scale that this model does not bring: add "
            f'"dispatch_global_scale" to {wording.options}, the scale that a value is '
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


@functools.cache
def _warn_of_activations(why_not: str, dtype: torch.dtype, wording: Wording) -> None:
    """Say once per process why rows travel unquantised to experts that take quantised ones."""
    logger.warning(
        "%s So rows travel in %s, in twice the bytes of FP8 or more, and %s quantises those that "
        "arrived. %s=%s chooses the same without this warning; a recipe's name makes rows smaller, "
        "which are then quantised twice.",
        *(why_not, dtype, wording.framework, "MOE_NVLINK_DISPATCH", UNQUANTISED),
    )


# Rows that arrived.


def _without_old_bytes(
    rows: torch.Tensor, weights: torch.Tensor, experts: ExpertsInput
) -> torch.Tensor:
    """Return rows for the framework's quantiser.

    If the quantiser takes one maximum of all rows, empty slots become zeros, because they hold old
    bytes.
    """
    one_scale_for_all = (
        isinstance(experts.quant_dtype, torch.dtype)
        and experts.block_shape is None
        and not experts.per_token
        and experts.static_scale is None
    )
    if not one_scale_for_all:
        return rows
    return rows.masked_fill((weights == 0).all(1, keepdim=True), 0.0)


def _first(scale: torch.Tensor) -> torch.Tensor:
    # By views: an expanded scale has no flat view, and a copy would be a launch at each dispatch.
    while scale.dim():
        scale = scale[0]
    return scale.view(1).to(torch.float32)


def _contiguous(scales: torch.Tensor | None) -> torch.Tensor | None:
    return None if scales is None else scales.contiguous()


def _some(values: list[float]) -> str:
    return (", ".join(f"{v:g}" for v in values[:4]) or "empty") + (", ..." if values[4:] else "")
