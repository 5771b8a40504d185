"""Every name of vLLM that this adapter touches, and the versions it was tried with.

The table in ``integration/README.md`` is this tuple with one more column; a test compares them.
"""

from __future__ import annotations

import importlib
import logging
from typing import NamedTuple

from moe_nvlink_plugin.errors import UnsupportedError

logger = logging.getLogger("vllm.plugins.moe_nvlink")

TRIED = ("0.32",)


class Touched(NamedTuple):
    """One name of vLLM: where it lives and what we do with it."""

    module: str
    name: str
    kind: str  # "hook": made for plugins; "subclass"; "use": called or read; "patch": replaced


_MOE = "vllm.model_executor.layers.fused_moe"
_COMMUNICATORS = "vllm.distributed.device_communicators"

TOUCHED = (
    Touched("vllm.platforms.interface", "Platform.pre_register_and_update", "hook"),
    Touched("vllm.platforms.interface", "Platform.check_and_update_config", "hook"),
    Touched("vllm.platforms.interface", "Platform.get_device_communicator_cls", "hook"),
    Touched("vllm.platforms", "builtin_platform_plugins", "use"),
    Touched("vllm.platforms", "current_platform", "use"),
    Touched("vllm.utils.import_utils", "resolve_obj_by_qualname", "use"),
    Touched("vllm", "envs.VLLM_PLUGINS", "use"),
    Touched("vllm", "version", "use"),
    Touched("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "patch"),
    Touched("vllm.config", "get_current_vllm_config_or_none", "use"),
    Touched("vllm.distributed", "get_ep_group", "use"),
    Touched(f"{_COMMUNICATORS}.cpu_communicator", "CpuCommunicator", "subclass"),
    Touched(f"{_COMMUNICATORS}.base_device_communicator", "All2AllManagerBase", "subclass"),
    Touched("vllm.model_executor.custom_op", "op_registry_oot", "use"),
    Touched(f"{_MOE}.routed_experts", "RoutedExperts.register_oot", "hook"),
    Touched(f"{_MOE}.routed_experts", "RoutedExperts._get_quant_method", "subclass"),
    Touched(f"{_MOE}.runner.moe_runner", "MoERunner.register_oot", "hook"),
    Touched(f"{_MOE}.runner.moe_runner", "MoERunner._select_forward", "subclass"),
    Touched(
        f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.process_weights_after_loading", "use"
    ),
    Touched(f"{_MOE}.modular_kernel", "FusedMoEPrepareAndFinalizeModular", "subclass"),
    Touched(f"{_MOE}.modular_kernel", "FusedMoEKernel", "use"),
    Touched(f"{_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceNoOP", "use"),
)


def vllm_version() -> str:
    """The version vLLM states, "unknown" when it states none. Local."""
    from vllm import version

    return str(getattr(version, "__version__", "unknown"))


def warn_if_untried() -> None:
    """Logs a warning when this vLLM is not one that our tests have run. Local."""
    version = vllm_version()
    if ".".join(version.split(".")[:2]) not in TRIED:
        logger.warning(
            "moe_nvlink was tried with vLLM %s, this is %s: check outputs before you rely on it.",
            ", ".join(f"{tried}.x" for tried in TRIED),
            version,
        )


def check_names() -> None:
    """Raises UnsupportedError naming what this vLLM lacks of `TOUCHED`. Local, worker start-up.

    What we patch may be missing: `flag.patch_engine_args` has said so, and the flag works without.
    """
    missing = [f"{t.module}.{t.name}" for t in TOUCHED if t.kind != "patch" and not _exists(t)]
    if missing:
        raise UnsupportedError(
            f"vLLM {vllm_version()} lacks what the moe_nvlink adapter stands on: "
            f"{', '.join(missing)}. Install vLLM {TRIED[-1]}.x, or a newer moe-nvlink-plugin."
        )


def _exists(touched: Touched) -> bool:
    try:
        found: object = importlib.import_module(touched.module)
    except ImportError:
        return False
    for part in touched.name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
