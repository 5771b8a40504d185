"""Every name of SGLang that this adapter touches, and the versions it was tried and read with.

README.md in this folder says what the patches are for; a test compares them.
Another test reads the source of the releases in `READ` and compares it with the signatures and
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
    Touched(_REGISTRY, "HookSource", "use"),
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
    Touched("sglang.srt.environ", "envs", "use"),
    Touched(_CONTEXT, "attn_tp_size_of", "use", ("cfg",)),
    Touched(_CONTEXT, "get_platform", "use", ()),
    Touched(_CONTEXT, "get_server_args", "use", ()),
    Touched(_CONTEXT, "get_device", "use", ()),
    Touched(_CONTEXT, "get_exec", "use", ()),
    Touched(_CONTEXT, "get_flags", "use", ()),
    Touched(_CONTEXT, "get_parallel", "use", ()),
    *moe_names.TOUCHED,
)

_FIELDS = f"{_GROUPS}.fields"
_GRAPHS = "sglang.srt.model_executor.cuda_graph_config"

#: The fields of ServerArgs stand in one class per namespace.
FIELDS = (
    Fields(f"{_FIELDS}.device", "Device", ("device",)),
    Fields(f"{_FIELDS}.disagg", "Disagg", ("disaggregation_mode", "enable_pdmux")),
    Fields(f"{_FIELDS}.exec_", "ExecFeatures", ("enable_return_routed_experts",)),
    Fields(f"{_FIELDS}.exec_", "ExecGraph", ("cuda_graph_config",)),
    Fields(
        f"{_FIELDS}.exec_",
        "ExecMoe",
        (
            *("disable_shared_experts_fusion", "elastic_ep_backend", "enable_waterfill"),
            *("enforce_shared_experts_fusion", "ep_num_redundant_experts", "moe_a2a_backend"),
            *("flashinfer_a2a_dispatch_type", "kt_weight_path", "moe_runner_backend"),
        ),
    ),
    Fields(
        f"{_FIELDS}.exec_",
        "ExecOverlap",
        ("enable_single_batch_overlap", "enable_two_batch_overlap"),
    ),
    Fields(f"{_FIELDS}.lora", "Lora", ("enable_lora", "lora_paths")),
    Fields(f"{_FIELDS}.model", "Model", ("json_model_override_args", "model_path", "quantization")),
    Fields(
        f"{_FIELDS}.parallel",
        "Parallel",
        (
            *("attn_cp_size", "attn_dp_size", "dcp_size", "disable_attn_tp_gather", "dwdp_size"),
            "ep_size",
            *("moe_dp_size", "moe_ep_group", "nnodes", "pp_size", "tp_size"),
        ),
    ),
    Fields(f"{_FIELDS}.schedule", "Schedule", ("chunked_prefill_size", "max_running_requests")),
    Fields(
        f"{_FIELDS}.spec",
        "Spec",
        (
            *("speculative_algorithm", "speculative_eagle_topk", "speculative_moe_a2a_backend"),
            "speculative_moe_runner_backend",
        ),
    ),
    Fields(_GRAPHS, "CudaGraphConfig", ("decode", "prefill")),
    Fields(_GRAPHS, "PhaseConfig", ("backend", "max_bs")),
    Fields(_GRAPHS, "Backend", ("DISABLED",)),
    Fields(_CONTEXT, "MoeFlags", ("in_speculative_scope", "speculative_context")),
    Fields(
        "sglang.srt.configs.model_config",
        "ModelConfig",
        ("dtype", "hf_config", "hf_text_config", "nvfp4_moe_meta"),
    ),
    Fields(
        "sglang.srt.distributed.parallel_state",
        "GroupCoordinator",
        ("cpu_group", "rank_in_group", "world_size"),
    ),
    Fields("sglang.srt.environ", "Envs", ("SGLANG_MOE_NVFP4_DISPATCH",)),
    Fields(_MOE_UTILS, "MoeA2ABackend", ("CUSTOMIZED",)),
    *moe_names.FIELDS,
)


def sglang_version() -> str:
    """Return the version of the installed distribution; "unknown" without one. Local."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def supported_versions() -> str:
    """Return the cells of SGLang's row in README's table of versions: supported, how tried."""
    served, read = ", ".join(TRIED["cpu"]), " and ".join(READ)
    return (
        f"{served}; on GPUs: not run yet | {served} served models on CPU ranks; in the source of "
        f"{read} every name we touch was found"
    )


def warn_if_untried(device_type: str) -> None:
    """Log a warning if no test has served a model with this SGLang on such a device. Local."""
    tried = TRIED.get(device_type, ())
    names.warn_if_untried("SGLang", sglang_version(), device_type, tried, READ)


def check_names() -> None:
    """Check that this SGLang has the names in `TOUCHED`. Local; a worker calls it at start-up.

    Raises:
        UnsupportedError: names are missing; the message lists them.
    """
    needed = (one for one in TOUCHED if not one.since and not one.device)
    names.require(needed, "SGLang", sglang_version(), READ[-1])
