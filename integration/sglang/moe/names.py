"""Names of SGLang that the dispatchers touch; `compat` lists them with all others."""

from __future__ import annotations

from moe_nvlink_plugin.integration.common.names import Fields, Touched, methods

_MOE = "sglang.srt.layers.moe"
_DISPATCHER = f"{_MOE}.token_dispatcher"
_TOPK = f"{_MOE}.topk"
_RUNNERS = f"{_MOE}.moe_runner"
_QUANTISERS = "sglang.kernels.ops.quantization"
_FUSED = ("dispatch_output", "quant_info", "runner_config")

TOUCHED: tuple[Touched, ...] = (
    Touched(f"{_DISPATCHER}.base", "BaseDispatcher", "subclass"),
    *methods(
        f"{_DISPATCHER}.base",
        "BaseDispatcher",
        "subclass",
        __init__=(),
        dispatch=("hidden_states", "topk_output"),
        combine=("combine_input",),
        set_quant_config=("quant_config",),
    ),
    Touched(f"{_DISPATCHER}.base", "CombineInputFormat.STANDARD", "use"),
    Touched(f"{_DISPATCHER}.base", "CombineInputFormat.FLASHINFER", "use"),
    Touched(f"{_DISPATCHER}.standard", "StandardDispatchOutput", "use"),
    Touched(_DISPATCHER, "FlashinferDispatchOutput", "use"),
    Touched(_TOPK, "StandardTopKOutput", "use"),
    Touched(_TOPK, "TritonKernelTopKOutput", "use"),
    *methods(
        _TOPK,
        "TopKOutputChecker",
        "use",
        format_is_standard=("topk_output",),
        format_is_triton_kernels=("topk_output",),
        format_is_bypassed=("topk_output",),
    ),
    Touched(_TOPK, "BypassedTopKOutput.to_standard", "use", ()),
    Touched("sglang.srt.layers.dp_attention", "get_dp_global_num_tokens", "use", ()),
    Touched("sglang.srt.runtime_context", "get_forward", "use", ()),
    Touched(
        f"{_RUNNERS}.base",
        "FusedOpPool.get_fused_func",
        "use",
        ("dispatch_name", "runner_name"),
    ),
    Touched(
        f"{_RUNNERS}.base",
        "register_fused_func",
        "hook",
        ("a2a_backend_name", "runner_backend_name"),
    ),
    *(
        Touched(f"{_RUNNERS}.{module}", f"fused_experts_{name}", "use", _FUSED, "cuda")
        for module, name in (
            ("triton", "none_to_triton"),
            ("flashinfer_cutlass", "flashinfer_to_flashinfer_cutlass"),
            ("flashinfer_cutedsl", "flashinfer_to_flashinfer_cutedsl_fp4"),
            ("flashinfer_trtllm", "flashinfer_to_flashinfer_trtllm"),
        )
    ),
    Touched("sglang.srt.layers.quantization.fp4_utils", "fp4_quantize", "use", device="cuda"),
    Touched(
        f"{_QUANTISERS}.fp8_kernel",
        "sglang_per_token_group_quant_fp8",
        "use",
        ("x", "group_size"),
        "cuda",
    ),
)

FIELDS: tuple[Fields, ...] = (
    Fields(
        f"{_RUNNERS}.base",
        "MoeRunnerConfig",
        (
            *("layer_id", "num_experts", "num_local_experts", "hidden_size", "top_k"),
            *("params_dtype", "runner_backend", "num_fused_shared_experts", "no_combine"),
            "apply_router_weight_on_input",
        ),
    ),
    Fields(
        f"{_DISPATCHER}.standard",
        "StandardDispatchOutput",
        ("hidden_states", "hidden_states_scale", "topk_output", "hidden_states_pre_quant"),
    ),
    Fields(
        f"{_DISPATCHER}.flashinfer",
        "FlashinferDispatchOutput",
        ("hidden_states", "hidden_states_scale", "topk_output", "moe_output", "output_dtype"),
    ),
    Fields(_TOPK, "StandardTopKOutput", ("topk_weights", "topk_ids", "router_logits")),
    Fields(
        _TOPK,
        "TritonKernelTopKOutput",
        ("a_ragged_metadata", "gather_indx", "scatter_indx", "gate_scal", "n_expts_act"),
    ),
)
