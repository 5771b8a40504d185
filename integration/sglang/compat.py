"""Names of SGLang that no reader finds in this adapter's source, and the versions that were tried.

`own_source` reads the others: what we import, call by its name, or mark with `overrides`. A test
compares all of them with the source of the releases in `READ`, and a process looks for them when it
starts. ``python -m moe_nvlink_plugin.integration.sglang.compat`` prints all.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.names import Touched, fields, hook, patch, use
from moe_nvlink_plugin.integration.common.own_source import Reader, Rules

#: Releases that our tests have served models with, by device. SGLang moves names in patch releases.
TRIED: dict[str, tuple[str, ...]] = {"cpu": ("0.5.23",), "cuda": ()}
#: Releases whose source a test reads for every name below.
READ = ("0.5.23",)

_SRT = "sglang.srt"
_FIELDS = f"{_SRT}.arg_groups.fields"
_MOE = f"{_SRT}.layers.moe"
_FUSED = "(dispatch_output, quant_info, runner_config)"

#: Our module -> names of SGLang that it reaches through objects or by text, and what it patches.
BY_HAND: dict[str, tuple[Touched, ...]] = {
    "moe.fused": tuple(
        one._replace(device="cuda")
        for module, function in (
            ("triton", "none_to_triton"),
            ("flashinfer_cutlass", "flashinfer_to_flashinfer_cutlass"),
            ("flashinfer_cutedsl", "flashinfer_to_flashinfer_cutedsl_fp4"),
            ("flashinfer_trtllm", "flashinfer_to_flashinfer_trtllm"),
        )
        for one in use(f"{_MOE}.moe_runner.{module}", f"fused_experts_{function}{_FUSED}")
    ),
    "moe.routing": use(f"{_MOE}.topk", "BypassedTopKOutput.to_standard()"),
    "plugin.hooks": (
        *hook(
            f"{_SRT}.arg_groups.moe_hook",
            "handle_moe_kernel_config(server_args)",
            "handle_a2a_moe(server_args)",
            "validate_flashinfer_a2a_token_budget(server_args)",
        ),
        *patch(
            f"{_SRT}.server_args",
            "ServerArgs.add_cli_args(parser)",
            "adds the choice to two flags",
        ),
        *patch(
            f"{_SRT}.runtime_context",
            "publish(server_args, role, hf_config, ranks)",
            "puts the two hooks of the layers in place, with the flag only",
        ),
        *patch(
            f"{_MOE}.fused_moe_triton.layer",
            "create_moe_dispatcher(moe_runner_config, quant_method)",
            "our dispatchers, with the flag only",
        ),
        *patch(
            f"{_SRT}.distributed.parallel_state",
            "initialize_model_parallel()",
            "the ranks check our exchange before, with the flag only",
        ),
        *patch(
            f"{_MOE}.utils",
            "MoeA2ABackend.is_flashinfer()",
            "true for ours: combine returns reduced rows; with the flag only",
        ),
        *patch(
            f"{_SRT}.model_executor.model_runner",
            "ModelRunner._forward_raw(forward_batch, pp_proxy_tensors, reinit_attn_backend, "
            "split_forward_count)",
            "writes SGLang's record of the ranks that live; with --elastic-ep-backend only",
        ),
        *use(f"{_MOE}.utils", "MoeA2ABackend.is_customized()"),
    ),
}
RULES = Rules(
    package=__package__ or "",
    framework="sglang",
    by_hand=BY_HAND,
    devices={"moe.experts_input": "cuda"},
)

#: Attributes of objects that we read. The fields of ServerArgs stand in one class per namespace.
FIELDS = (
    *fields(
        {
            f"{_FIELDS}.device:Device": "device",
            f"{_FIELDS}.disagg:Disagg": "disaggregation_mode enable_pdmux",
            f"{_FIELDS}.exec_:ExecFeatures": "enable_return_routed_experts",
            f"{_FIELDS}.exec_:ExecGraph": "cuda_graph_config",
            f"{_FIELDS}.exec_:ExecMoe": (
                "disable_shared_experts_fusion elastic_ep_backend enable_eplb enable_waterfill "
                "enforce_shared_experts_fusion ep_num_redundant_experts "
                "ep_join_mode flashinfer_a2a_dispatch_type kt_weight_path moe_a2a_backend "
                "moe_runner_backend"
            ),
            f"{_FIELDS}.exec_:ExecOverlap": "enable_single_batch_overlap enable_two_batch_overlap",
            f"{_FIELDS}.lora:Lora": "enable_lora lora_paths",
            f"{_FIELDS}.model:Model": "json_model_override_args model_path quantization",
            f"{_FIELDS}.parallel:Parallel": (
                "attn_cp_size attn_dp_size dcp_size disable_attn_tp_gather dwdp_size ep_size "
                "max_ep_size moe_dp_size moe_ep_group nnodes pp_size tp_size"
            ),
            f"{_FIELDS}.schedule:Schedule": "chunked_prefill_size max_running_requests",
            f"{_FIELDS}.spec:Spec": (
                "speculative_algorithm speculative_eagle_topk speculative_moe_a2a_backend "
                "speculative_moe_runner_backend"
            ),
            f"{_SRT}.configs.model_config:ModelConfig": (
                "dtype hf_config hf_text_config nvfp4_moe_meta"
            ),
            f"{_SRT}.distributed.parallel_state:GroupCoordinator": (
                "cpu_group rank_in_group world_size"
            ),
            f"{_SRT}.elastic_ep.elastic_ep:ElasticEPState": "active_ranks active_ranks_cpu",
            f"{_SRT}.environ:Envs": "SGLANG_MOE_NVFP4_DISPATCH",
            f"{_MOE}.moe_runner.base:MoeRunnerConfig": (
                "apply_router_weight_on_input hidden_size layer layer_id no_combine num_experts "
                "num_fused_shared_experts num_local_experts params_dtype runner_backend top_k"
            ),
            f"{_MOE}.fused_moe_triton.layer:FusedMoE": "reduce_results",
            f"{_MOE}.token_dispatcher.flashinfer:FlashinferDispatchOutput": (
                "hidden_states hidden_states_scale moe_output output_dtype topk_output"
            ),
            f"{_MOE}.token_dispatcher.standard:StandardDispatchOutput": (
                "hidden_states hidden_states_pre_quant hidden_states_scale topk_output"
            ),
            f"{_MOE}.topk:StandardTopKOutput": "router_logits topk_ids topk_weights",
            f"{_MOE}.topk:TritonKernelTopKOutput": (
                "a_ragged_metadata gate_scal gather_indx n_expts_act scatter_indx"
            ),
            f"{_MOE}.utils:MoeA2ABackend": "CUSTOMIZED",
            f"{_SRT}.model_executor.cuda_graph_config:Backend": "DISABLED",
            f"{_SRT}.model_executor.cuda_graph_config:CudaGraphConfig": "decode prefill",
            f"{_SRT}.model_executor.cuda_graph_config:PhaseConfig": "backend max_bs",
            f"{_SRT}.runtime_context:MoeFlags": "in_speculative_scope speculative_context",
        }
    ),
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


def touched() -> list[Touched]:
    """Return every name of SGLang that we touch. Local."""
    return Reader(RULES).touched()


def check_names() -> None:
    """Check that this SGLang has the names that every device needs. Local; called at start-up.

    Raises:
        UnsupportedError: names are missing; the message lists them, each with what needs it.
    """
    needed = (one for one in touched() if not one.since and not one.device)
    names.require(needed, "SGLang", sglang_version(), READ[-1])


if __name__ == "__main__":
    print(names.table(touched(), FIELDS))
