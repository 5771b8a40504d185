"""Our part of the resolution of SGLang's arguments, as wrappers of three of its steps.

SGLang runs the steps once, in the process that starts the server; the others get what they decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_platform

from moe_nvlink_plugin.integration.common.options import AUTO, Options
from moe_nvlink_plugin.integration.sglang import backend, budget
from moe_nvlink_plugin.integration.sglang.moe import runners

from . import validation

logger = logging.getLogger(__name__)

_SOURCE = "moe_nvlink"


def handle_moe_kernel_config(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check runners as SGLang's step does, which knows one backend of our kind by name. Local."""
    if backend.serves_target(server_args):
        declare_resolution(server_args, _SOURCE, moe_a2a_backend="flashinfer")
    previous(server_args)


def handle_a2a_moe(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what we cannot serve, and declare what our backend needs. Local.

    It wraps SGLang's step for all-to-all backends. Refusals come before SGLang's own step, which
    would move a server with waterfill to another backend.

    Raises:
        UnsupportedError: we cannot serve the arguments; the message lists every reason.
    """
    options = validation.check(server_args)
    view = resolved_view(server_args)
    if view.ep_size != view.tp_size:
        logger.info("ep_size %d becomes tp_size %d.", view.ep_size, view.tp_size)
    declare_resolution(
        server_args,
        _SOURCE,
        moe_a2a_backend=backend.CARRIER,
        ep_size=view.tp_size,
        disable_shared_experts_fusion=True,
    )
    if backend.names_draft(server_args):
        declare_resolution(server_args, _SOURCE, speculative_moe_a2a_backend=backend.CARRIER)
    if view.moe_runner_backend == "auto" and _has_block_fp8_on_hopper_or_newer(server_args):
        declare_resolution(server_args, _SOURCE, moe_runner_backend="deep_gemm")
        logger.info("--moe-runner-backend auto becomes deep_gemm for block FP8 weights.")
    previous(server_args)
    if travels_as_nvfp4(resolved_view(server_args), model_config_of(server_args), options):
        # SGLang refuses the flag for every backend but its own; its layers read the field.
        declare_resolution(server_args, _SOURCE, flashinfer_a2a_dispatch_type="nvfp4")
        logger.info("Rows travel as nvfp4, as this model's experts take them.")


def validate_token_budget(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Check our budget where SGLang checks its own backend's. Local; raises as `check_budget`.

    Speculative decoding is resolved then.
    """
    previous(server_args)
    validation.check_budget(server_args, budget.of(server_args))


def travels_as_nvfp4(view: Any, model: Any, options: Options) -> bool:
    """Return whether SGLang's layers shall report the scale by which dispatch makes NVFP4 rows.

    Local. SGLang's own backend decides alike, and also leaves the choice to the variable
    SGLANG_MOE_NVFP4_DISPATCH if it is set.

    Args:
        view: resolved arguments.
        model: SGLang's ModelConfig.
        options: what the user chose.
    """
    if options.dispatch not in (AUTO, "nvfp4") or envs.SGLANG_MOE_NVFP4_DISPATCH.is_set():
        return False
    if view.quantization != "modelopt_fp4" and model.nvfp4_moe_meta is None:
        return False
    return view.moe_runner_backend in runners.taking("nvfp4")


def _has_block_fp8_on_hopper_or_newer(server_args: Any) -> bool:
    """Return whether DeepGEMM takes the weights. Local.

    SGLang itself decides so for DeepEP only.
    """
    platform = get_platform()
    if resolved_view(server_args).device != "cuda" or not (platform.is_sm90 or platform.is_sm100):
        return False
    stored = getattr(model_config_of(server_args).hf_config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") != "fp8":
        return False
    return bool(stored.get("weight_block_size"))
