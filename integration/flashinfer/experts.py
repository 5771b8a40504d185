"""FlashInfer's fused experts between our dispatch and our combine: nothing is copied.

A fused function reads the rows, scales, ids and weights where dispatch left them, and writes its
sums into the combine region. `settings_for` says how dispatch must lay them out:

| function | recipe | scales of the rows | absent id |
|---|---|---|---|
| cutlass_fused_moe | None (bf16, fp16), fp8_tensor | none | num_experts |
| cutlass_fused_moe | nvfp4, mxfp8 | linear (swizzled_input_sf=False) | num_experts |
| trtllm_fp4_block_scale_routed_moe | None (bf16; MXFP4 weights) | none | -1 |
| trtllm_fp4_block_scale_routed_moe | nvfp4, mxfp8 (MXFP4 weights) | linear, viewed as e4m3 | -1 |
| trtllm_fp8_block_scale_routed_moe | fp8_block, fp8_block_pow2 | float32 `[H/128, slots]` | -1 |
| trtllm_fp8_block_scale_routed_moe | mxfp8 | uint8 `[slots, H/32]` | -1 |

The functions, their names and their limits were read in flashinfer-python 0.7.2.post1, its Python
and its CUDA sources. No kernel of them has run after our dispatch.

    function = "trtllm_fp8_block_scale_routed_moe"
    settings = settings_for(function, "fp8_block", num_experts=256)
    config = AllToAllConfig(..., num_experts=256, **settings)
    exchange = MoeAllToAll.create(config, group, "cuda")
    experts = FusedExperts(exchange, function, gemm1_weights=..., gemm1_weights_scale=..., ...)
    ...
    received = exchange.dispatch(hidden_states, topk_ids, topk_weights)
    hidden_states = exchange.combine(experts(received), received.metadata)

With vLLM nobody needs this module: its `--moe-backend` selects experts that call these functions
(integration/vllm/README.md has a table).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import ConfigError, InputError, UnsupportedError

CUTLASS = "cutlass_fused_moe"
TRTLLM_FP4 = "trtllm_fp4_block_scale_routed_moe"
TRTLLM_FP8 = "trtllm_fp8_block_scale_routed_moe"

#: FlashInfer's ActivationType by number, as far as a function below takes one.
ACTIVATIONS: Mapping[int, str] = {
    0: "Gelu",
    1: "Relu",
    2: "Silu",
    3: "Swiglu",
    4: "Geglu",
    5: "SwigluBias",
    6: "Relu2",
    7: "SwigluStep",
    8: "GegluTanh",
    9: "Identity",
    10: "Situ",
    12: "ClampedRelu2",
}
SWIGLU = 3
#: Arguments that are what dispatch received.
_ROWS: Mapping[str, tuple[str, ...]] = {
    CUTLASS: ("input", "token_selected_experts", "token_final_scales", "input_sf"),
    TRTLLM_FP4: ("hidden_states", "topk_ids", "hidden_states_scale"),
    TRTLLM_FP8: ("hidden_states", "topk_ids", "hidden_states_scale"),
}
#: What FlashInfer's routing kernels are compiled for (RoutingCustomPolicy.cuh).
MOST_TRTLLM_EXPERTS = 2048


class _Takes(NamedTuple):
    """What one function takes of rows in one format.

    Attributes:
        activations: numbers of ACTIVATIONS.
        multiple: number of elements of which hidden_size is a multiple.
        scales_layout: as in AllToAllConfig.
    """

    activations: frozenset[int]
    multiple: int
    scales_layout: str = "linear"


_CUTLASS_ALL = frozenset(ACTIVATIONS)
_CUTLASS_USUAL = _CUTLASS_ALL - {12}
_TRTLLM = frozenset({3, 4, 6, 9})
_TAKES: Mapping[str, Mapping[str | None, _Takes]] = {
    CUTLASS: {  # 128 bits of a row (its binding)
        None: _Takes(_CUTLASS_ALL, 8),
        "fp8_tensor": _Takes(_CUTLASS_USUAL, 16),
        "nvfp4": _Takes(_CUTLASS_USUAL, 16),
        "mxfp8": _Takes(_CUTLASS_ALL, 32),
    },
    TRTLLM_FP4: {  # 128 rows of gemm2_weights_scale (its packing helper)
        None: _Takes(_TRTLLM | {10}, 128),
        "nvfp4": _Takes(_TRTLLM | {7, 10}, 128),
        "mxfp8": _Takes(_TRTLLM | {10}, 128),
    },
    TRTLLM_FP8: {
        "fp8_block": _Takes(frozenset({SWIGLU}), 128, "column_major"),
        "fp8_block_pow2": _Takes(frozenset({SWIGLU}), 128, "column_major"),
        "mxfp8": _Takes(_TRTLLM | {7}, 128),
    },
}


def settings_for(function: str, recipe: str | None, *, num_experts: int) -> dict[str, Any]:
    """Return the fields of AllToAllConfig with which dispatch makes a function's input. Local.

    Args:
        function: name of a function in the table above.
        recipe: format in which rows travel and in which the function takes them; None: activations.
        num_experts: number of routed experts over all ranks.

    Returns:
        The fields recipe, received_ids and scales_layout.

    Raises:
        UnsupportedError: the function is none of the table, or takes no rows of the recipe.
    """
    takes = _takes(function, recipe)
    return {
        "recipe": recipe,
        "received_ids": num_experts if function == CUTLASS else -1,
        "scales_layout": takes.scales_layout,
    }


def check(function: str, config: AllToAllConfig, activation_type: int = SWIGLU) -> None:
    """Check that a function can compute the experts of an exchange. Local; needs no FlashInfer.

    Args:
        function: name of a function in the table above.
        config: configuration of the exchange.
        activation_type: number of FlashInfer's ActivationType.

    Raises:
        UnsupportedError: the function does not take the geometry, the type or the activation.
        ConfigError: a field of the configuration is not as `settings_for` says.
    """
    takes = _takes(function, config.recipe)
    for name, wanted in settings_for(
        function, config.recipe, num_experts=config.num_experts
    ).items():
        if (found := getattr(config, name)) != wanted:
            raise ConfigError(
                f"{name}={found!r}, but {function} reads rows that were received with "
                f"{name}={wanted!r}; create the exchange with what settings_for returns"
            )
    if activation_type not in takes.activations:
        known = ", ".join(f"{n} ({ACTIVATIONS[n]})" for n in sorted(takes.activations))
        raise UnsupportedError(
            f"{function} with rows of {_name_of(config.recipe)} does not take activation_type "
            f"{activation_type!r}; it takes {known}"
        )
    if config.hidden_size % takes.multiple:
        raise UnsupportedError(
            f"{function} takes rows of {_name_of(config.recipe)} whose hidden_size is a multiple "
            f"of {takes.multiple}, not {config.hidden_size}; pad the rows, or use other experts"
        )
    (_check_cutlass if function == CUTLASS else _check_trtllm)(function, config)


class FusedExperts:
    """One rank's experts of one layer, computed by a fused function of FlashInfer.

    Args:
        exchange: the layer's exchange, with the settings of `settings_for`.
        function: name of a function in the table above.
        activation_type: number of FlashInfer's ActivationType.
        tune_max_num_tokens: the most rows for which FlashInfer's autotuner measures; None: all
            slots of the exchange.
        weights: every other argument of the function, under its own name: this rank's weights and
            their scales in the layouts that FlashInfer's packing helpers make, biases, limits and
            flags that describe the weights, such as use_shuffled_weight.

    Raises:
        ConfigError, UnsupportedError: as `check`; or FlashInfer is missing, or lacks the function.
        InputError: an argument is unknown to the function, missing, or filled by this class.
    """

    def __init__(
        self,
        exchange: MoeAllToAll,
        function: str,
        *,
        activation_type: int = SWIGLU,
        tune_max_num_tokens: int | None = None,
        **weights: Any,
    ) -> None:
        config = exchange.config
        check(function, config, activation_type)
        self._exchange = exchange
        self._name = function
        self._function = _find(function)
        slots = config.ep_size * config.max_tokens_per_rank
        self._constant = {
            "tune_max_num_tokens": tune_max_num_tokens or slots,
            **_constants(function, config, activation_type),
        }
        self._weights = weights
        filled = {*_ROWS[function], *self._constant, "output"}
        _check_arguments(function, inspect.signature(self._function), weights, filled)

    def __call__(self, received: Dispatched) -> torch.Tensor:
        """Compute the experts of the received rows into the combine region. Local; capturable.

        Args:
            received: what the exchange's last dispatch returned.

        Returns:
            `[slots, hidden_size]`, the memory of combine_input: weighted sums over this rank's
            experts. What an empty slot holds is of no use; combine does not read it.
        """
        region = self._exchange.combine_input(metadata=received.metadata)
        self._function(
            **_of_rows(self._name, received),
            **self._constant,
            **self._weights,
            output=region,
        )
        return region


def _of_rows(function: str, received: Dispatched) -> dict[str, Any]:
    """Return the arguments that hold rows, scales, ids and weights: views, no copy."""
    rows, scales, ids = received.hidden_states, received.scales, received.topk_ids
    weights = received.topk_weights
    if function == CUTLASS:
        return dict(zip(_ROWS[function], (rows, ids, weights, scales), strict=True))
    if scales is not None and function == TRTLLM_FP4:
        scales = scales.view(torch.float8_e4m3fn)  # it takes this type for exponents too
    elif scales is not None and scales.dtype == torch.float32:
        scales = scales.t()
    return dict(zip(_ROWS[function], (rows, (ids, weights), scales), strict=True))


def _constants(function: str, config: AllToAllConfig, activation_type: int) -> dict[str, Any]:
    """Return the arguments that every call has. Local; imports FlashInfer."""
    enums = importlib.import_module("flashinfer.tllm_enums")
    if function == CUTLASS:
        return {
            "output_dtype": config.dtype,
            "ep_size": config.ep_size,
            "ep_rank": config.ep_rank,
            "enable_alltoall": True,  # it need not fill empty slots
            "swizzled_input_sf": False,
            "use_mxfp8_act_scaling": config.recipe == "mxfp8",
            "activation_type": enums.ActivationType(activation_type),
        }
    first, end = local_expert_range(config.num_experts, config.ep_size, config.ep_rank)
    common = {
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "local_expert_offset": first,
        "local_num_experts": end - first,
        "activation_type": activation_type,
        # Nothing is left to route.
        "routing_bias": None,
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": None,
        "routing_method_type": enums.RoutingMethodType.Renormalize,
    }
    if function == TRTLLM_FP4:
        layout = None if config.recipe is None else enums.SfLayout.layout_linear
        return {**common, "hidden_states_scale_layout": layout}
    kinds = enums.Fp8QuantizationType
    kind = kinds.MxFp8 if config.recipe == "mxfp8" else kinds.DeepSeekFp8
    return {**common, "fp8_quantization_type": kind}


def _takes(function: str, recipe: str | None) -> _Takes:
    if function not in _TAKES:
        raise UnsupportedError(
            f"{function!r} is none of the fused functions that take received rows in place: "
            + ", ".join(_TAKES)
        )
    taken = _TAKES[function]
    if recipe not in taken:
        known = ", ".join(_name_of(name) for name in taken)
        raise UnsupportedError(f"{function} takes no rows of {_name_of(recipe)}; it takes {known}")
    return taken[recipe]


def _name_of(recipe: str | None) -> str:
    return "unquantised activations" if recipe is None else f"recipe {recipe}"


def _check_cutlass(function: str, config: AllToAllConfig) -> None:
    if config.num_experts % config.ep_size:
        raise UnsupportedError(
            f"{function} computes a rank's first expert from ep_rank, so all ranks need equally "
            f"many experts, but there are {config.num_experts} experts on {config.ep_size} ranks; "
            f"use {TRTLLM_FP4} or {TRTLLM_FP8}"
        )
    if config.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"{function} sums into bfloat16 or float16, and the exchange combines {config.dtype}; "
            "create the exchange with one of those"
        )


def _check_trtllm(function: str, config: AllToAllConfig) -> None:
    if config.dtype != torch.bfloat16:
        raise UnsupportedError(
            f"{function} sums into bfloat16, and the exchange combines {config.dtype}; create the "
            "exchange with bfloat16"
        )
    if config.num_experts > MOST_TRTLLM_EXPERTS:
        raise UnsupportedError(
            f"{function} routes among at most {MOST_TRTLLM_EXPERTS} experts, not "
            f"{config.num_experts}; use {CUTLASS}"
        )
    if function == TRTLLM_FP4:
        if config.top_k > config.num_experts:
            raise UnsupportedError(
                f"{function} wants top_k of at most num_experts, not {config.top_k} of "
                f"{config.num_experts}"
            )
        return
    if config.num_experts % 4 or config.top_k >= config.num_experts:
        raise UnsupportedError(
            f"{function} wants num_experts to be a multiple of 4 and above top_k, not "
            f"{config.num_experts} with top_k {config.top_k}; use {CUTLASS}, or add experts that "
            "no token chooses"
        )


def _find(function: str) -> Callable[..., Any]:
    """Return FlashInfer's function. Local; imports FlashInfer."""
    try:
        found: Callable[..., Any] = getattr(
            importlib.import_module("flashinfer.fused_moe"), function
        )
    except ImportError as error:
        raise UnsupportedError(
            f"{function} needs FlashInfer, whose import failed: {error}; pip install "
            "'moe-nvlink-plugin[flashinfer]'"
        ) from error
    except AttributeError as error:
        raise UnsupportedError(
            f"the installed FlashInfer has no {function}; pip install "
            "'moe-nvlink-plugin[flashinfer]' installs a release that has it"
        ) from error
    return found


def _check_arguments(
    function: str, signature: inspect.Signature, weights: Mapping[str, Any], filled: set[str]
) -> None:
    """Check the names of a caller's arguments against the function's own."""
    parameters = signature.parameters
    if lacking := filled - set(parameters):
        raise UnsupportedError(
            f"the installed FlashInfer's {function} has no parameter {', '.join(sorted(lacking))}; "
            "pip install 'moe-nvlink-plugin[flashinfer]' installs a release that has it"
        )
    if ours := filled & set(weights):
        raise InputError(
            f"{', '.join(sorted(ours))} of {function} comes from the exchange; leave it out"
        )
    if unknown := set(weights) - set(parameters):
        raise InputError(
            f"{function} has no parameter {', '.join(sorted(unknown))}; it has "
            + ", ".join(sorted(set(parameters) - filled))
        )
    needed = {name for name, each in parameters.items() if each.default is each.empty}
    if missing := needed - filled - set(weights):
        raise InputError(f"{function} also needs {', '.join(sorted(missing))}; pass them by name")
