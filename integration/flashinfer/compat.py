"""Every name of FlashInfer that these modules touch, and the releases whose source was read.

A test compares the lists with FlashInfer's source, and the patches with README.md in this folder.
"""

from __future__ import annotations

from moe_nvlink_plugin.integration.common.names import Fields, Touched, methods

#: Releases whose source a test reads for every name below, and with which tests ran CPU ranks.
READ = ("0.7.2.post1",)
#: The oldest release that pyproject allows, because SGLang 0.5.23 pins it. No test fetches it: its
#: source was held against the names below once, by hand.
OLDEST = "0.7.2"

_COMM = "flashinfer.moe_ep.core.comm.communication"
_A2A = "flashinfer.comm.trtllm_moe_alltoall"
_SIZED = ("eplb_stats_num_experts", "backend")

TOUCHED = (
    Touched(_COMM, "register_communication", "use", ("name",)),
    Touched(_COMM, "MoEEpCommParams", "use"),
    Touched(_COMM, "MoEEpDispatchResult", "use"),
    *methods(
        _COMM,
        "MoEEpCommunication",
        "subclass",
        "",
        __init__=("bootstrap", "params"),
        is_platform_supported=(),
        dispatch=(
            *("hidden_states", "topk_ids", "topk_weights", "hidden_states_scale"),
            *("max_tokens_per_rank", "eplb_local_stats"),
        ),
        combine=("expert_output", "output"),
        get_combine_input_buffer=("dtype",),
        destroy=(),
    ),
    *methods(
        _A2A,
        "MoeAlltoAll",
        "subclass",
        "",
        __init__=(
            *("mapping", "max_num_tokens", "top_k", "num_experts", "workspace_size_per_rank"),
            *("hidden_size", "mnnvl_config", "eplb_stats_num_experts", "enable_rank_mask"),
            "backend",
        ),
        get_workspace=(
            *("workspace_size_per_rank", "ep_rank", "ep_size", "max_num_tokens", "mapping"),
            *_SIZED,
        ),
        get_moe_workspace_size_per_rank=(
            *("ep_size", "top_k", "max_num_tokens", "hidden_size"),
            *("extra_payload_bytes_per_token", *_SIZED),
        ),
        eplb_gathered_stats=(),
        checkpoint_prepare=(),
        checkpoint_restore=("comm_backend",),
        dispatch=(
            *("token_selected_experts", "input_payloads", "runtime_max_tokens_per_rank"),
            *("invalid_token_expert_id", "expert_id_payload_index", "eplb_local_stats"),
            "active_rank_mask",
        ),
        combine=(
            *("payload", "runtime_max_tokens_per_rank", "payload_in_workspace", "output_dtype"),
            *("output_scales", "output_scalar_scale", "sf_layout", "output", "use_low_precision"),
            "active_rank_mask",
        ),
        get_combine_payload_tensor_in_workspace=(
            *("runtime_max_tokens_per_rank", "hidden_size", "dtype"),
        ),
    ),
    Touched(
        _A2A,
        "moe_a2a_get_workspace_size_per_rank",
        "patch",
        (
            *("ep_size", "max_num_tokens", "total_dispatch_payload_size_per_token"),
            *("combine_payload_size_per_token", *_SIZED),
        ),
    ),
    Touched("flashinfer.comm", "MoeAlltoAll", "patch"),
    *(
        Touched("flashinfer.comm", f"moe_a2a_{name}", "patch")
        for name in (
            *("initialize", "dispatch", "combine", "sanitize_expert_ids"),
            *("wrap_payload_tensor_in_workspace", "get_workspace_size_per_rank"),
        )
    ),
    *(
        Touched("flashinfer.fused_moe", name, "use")
        for name in (
            "cutlass_fused_moe",
            "trtllm_fp4_block_scale_routed_moe",
            "trtllm_fp8_block_scale_routed_moe",
        )
    ),
    *(
        Touched("flashinfer.tllm_enums", name, "use")
        for name in (
            *("SfLayout.layout_linear", "ActivationType", "RoutingMethodType.Renormalize"),
            *("Fp8QuantizationType.DeepSeekFp8", "Fp8QuantizationType.MxFp8"),
        )
    ),
)

FIELDS = (
    Fields(
        _COMM,
        "MoEEpCommParams",
        (
            *("dispatch_bytes_per_token", "dispatch_format", "dtype", "hidden_size"),
            *("invalid_expert_id", "max_tokens_per_rank", "num_experts", "token_dtype", "top_k"),
        ),
    ),
    Fields(
        _COMM,
        "MoEEpDispatchResult",
        (
            *("eplb_gathered_stats", "hidden_states", "hidden_states_scale"),
            *("tokens_per_rank", "topk_ids", "topk_weights"),
        ),
    ),
    Fields(
        "flashinfer.moe_ep.config",
        "BootstrapConfig",
        ("device", "process_group", "rank", "world_size"),
    ),
    Fields(
        "flashinfer.comm.mapping",
        "Mapping",
        ("moe_ep_group", "moe_ep_rank", "moe_ep_size"),
    ),
    Fields("flashinfer.comm.mnnvl", "MnnvlConfig", ("comm_backend",)),
)


def supported_versions() -> str:
    """The cells of FlashInfer's row in the README's table of versions: supported, and how tried."""
    read = " and ".join(READ)
    return (
        f"{read}, and {OLDEST}, which SGLang 0.5.23 pins; on GPUs: not run yet | CPU ranks ran "
        f"`flashinfer.moe_ep` of {read} and the drop-in for `MoeAlltoAll`; in its source every "
        f"name we touch was found. {OLDEST} did not run: its source was read once, by hand, with "
        "the same result"
    )
