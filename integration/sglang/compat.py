"""Every name of SGLang that this adapter touches, and the versions it was tried and read with.

The tables in ``integration/README.md`` are these tuples in words; a test compares them. Another
test reads SGLang's own source, of the releases in `READ`, and holds it against the signatures and
fields listed here.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.names import Fields, Touched

from .moe import names as moe_names

#: Releases that our tests have served models with, by device. SGLang moves names in patch releases.
TRIED: dict[str, tuple[str, ...]] = {"cpu": ("0.5.23",), "cuda": ()}
#: Releases whose source a test reads for every name below.
READ = ("0.5.23",)

_GROUPS = "sglang.srt.arg_groups"
_CONTEXT = "sglang.srt.runtime_context"
_REGISTRY = "sglang.srt.plugins.hook_registry"
_MOE_UTILS = "sglang.srt.layers.moe.utils"
_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer"
_STEPS = f"{_GROUPS}.moe_hook"

TOUCHED = (
    Touched(_REGISTRY, "HookRegistry.register", "hook", ("target", "hook", "hook_type", "source")),
    Touched(_REGISTRY, "HookRegistry.apply_hooks", "use", ()),
    Touched(_REGISTRY, "HookType", "use"),
    Touched(f"{_GROUPS}.resolution_hooks", "register_resolution_hook", "use", ("name",)),
    Touched(_STEPS, "handle_moe_kernel_config", "hook", ("server_args",)),
    Touched(_STEPS, "handle_a2a_moe", "hook", ("server_args",)),
    Touched(_STEPS, "validate_flashinfer_a2a_token_budget", "hook", ("server_args",)),
    Touched("sglang.srt.server_args", "ServerArgs.add_cli_args", "patch", ("parser",)),
    Touched(_CONTEXT, "publish", "patch", ("server_args", "role", "hf_config", "ranks")),
    Touched(_LAYER, "create_moe_dispatcher", "patch", ("moe_runner_config", "quant_method")),
    Touched(_MOE_UTILS, "MoeA2ABackend.is_flashinfer", "patch", ()),
    Touched(_MOE_UTILS, "MoeA2ABackend.is_customized", "use", ()),
    Touched(_MOE_UTILS, "MoeA2ABackend", "use"),
    Touched(_MOE_UTILS, "get_moe_a2a_backend", "use", ()),
    Touched(f"{_GROUPS}.model_override_base", "resolved_view", "use", ("server_args",)),
    Touched(f"{_GROUPS}.model_override_base", "model_config_of", "use", ("server_args",)),
    Touched(f"{_GROUPS}.overrides", "declare_resolution", "use", ("server_args", "source")),
    Touched(f"{_GROUPS}.overrides", "max_prefill_buffer_tokens", "use", ("server_args",)),
    Touched(f"{_GROUPS}.overrides", "max_speculative_num_draft_tokens", "use", ("server_args",)),
    Touched("sglang.srt.model_executor.cuda_graph_config", "Backend", "use"),
    Touched(_CONTEXT, "attn_tp_size_of", "use", ("cfg",)),
    Touched(_CONTEXT, "get_platform", "use", ()),
    Touched(_CONTEXT, "get_server_args", "use", ()),
    Touched(_CONTEXT, "get_device", "use", ()),
    Touched(_CONTEXT, "get_exec", "use", ()),
    Touched(_CONTEXT, "get_flags", "use", ()),
    Touched(_CONTEXT, "get_parallel", "use", ()),
    *moe_names.TOUCHED,
)

FIELDS = (
    Fields(
        f"{_GROUPS}.fields.exec_",
        "ExecMoe",
        (
            *("moe_a2a_backend", "moe_runner_backend", "elastic_ep_backend", "enable_waterfill"),
            *("disable_shared_experts_fusion", "enforce_shared_experts_fusion"),
            "ep_num_redundant_experts",
        ),
    ),
    *moe_names.FIELDS,
)


def sglang_version() -> str:
    """The version of the installed distribution, "unknown" without one. Local."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def warn_if_untried(device_type: str) -> None:
    """Logs a warning if no test has served a model with this SGLang on such a device. Local."""
    tried = TRIED.get(device_type, ())
    names.warn_if_untried("SGLang", sglang_version(), device_type, tried, READ)


def check_names() -> None:
    """Raises UnsupportedError naming what this SGLang lacks of `TOUCHED`. Local, in workers."""
    needed = (one for one in TOUCHED if not one.since and not one.device)
    names.require(needed, "SGLang", sglang_version(), READ[-1])
