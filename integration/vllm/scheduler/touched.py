"""The names of vLLM that our schedulers touch; a part of `integration.vllm.compat`'s lists."""

from __future__ import annotations

from moe_nvlink_plugin.integration.common.names import Fields, Touched, methods

_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_MANAGER = "vllm.v1.core.kv_cache_manager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_SCHEDULER = "vllm.v1.core.sched.scheduler"

NEEDED_FOR = "scheduling"

TOUCHED = tuple(
    one._replace(needed_for=NEEDED_FOR)
    for one in (
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
)

FIELDS = (
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
