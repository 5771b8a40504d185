"""Do no harm: tests of vLLM that do not choose our backend end alike with our plugin and without.

Files are named one by one where a folder holds others that start engines or want GPUs: those would
take minutes to say that they cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..groups import Device, Group, Plugin

#: A plugin of `within`, for both sides of a comparison.
WITHIN: Mapping[str, str] = MappingProxyType({"PYTEST_PLUGINS": "moe_nvlink_upstream_hub"})


def _compared(name: str, title: str, *places: str, fast: tuple[str, ...] = ()) -> Group:
    return Group(
        name=f"harmless-{name}",
        title=title,
        arguments=places,
        plugin=Plugin.COMPARED,
        devices=frozenset({Device.CPU}),
        fast=fast,
        environment=WITHIN,
        test_timeout_s=180,
    )


def _without(*files: str) -> tuple[str, ...]:
    """Files that start engines, in a folder of those that do not."""
    return tuple(f"--ignore={file}" for file in files)


GROUPS: tuple[Group, ...] = (
    _compared(
        "config",
        "Configuration, variables and their hashes",
        "tests/config",
        "tests/test_config.py",
        "tests/test_envs.py",
        *_without("tests/config/test_mp_reducer.py"),
    ),
    _compared(
        "arguments",
        "Command line and engine arguments",
        "tests/engine/test_arg_utils.py",
        "tests/v1/engine/test_engine_args.py",
        "tests/utils_/test_argparse_utils.py",
        "tests/entrypoints/launchers/test_cli_args.py",
        "tests/entrypoints/cli/test_serve.py",
        fast=(
            "tests/engine/test_arg_utils.py",
            "tests/v1/engine/test_engine_args.py",
            "tests/utils_/test_argparse_utils.py",
        ),
    ),
    _compared(
        "scheduler",
        "Scheduler and KV cache manager",
        "tests/v1/core",
        *_without(
            "tests/v1/core/test_reset_prefix_cache_e2e.py", "tests/v1/core/test_scheduler_e2e.py"
        ),
    ),
    _compared(
        "engine",
        "Engine core and its output",
        "tests/v1/engine/test_abort_final_step.py",
        "tests/v1/engine/test_admission_control.py",
        "tests/v1/engine/test_engine_core_shutdown_signal.py",
        "tests/v1/engine/test_input_processor_trace_replay.py",
        "tests/v1/engine/test_iteration_logging.py",
        "tests/v1/engine/test_kv_cache_group_metadata.py",
        "tests/v1/engine/test_llm_engine_finalizer_is_weak.py",
        "tests/v1/engine/test_logprobs_processor.py",
        "tests/v1/engine/test_output_processor.py",
        "tests/v1/engine/test_parallel_sampling.py",
        "tests/v1/engine/test_startup_watch_processes.py",
        "tests/v1/engine/test_wake_up_contract.py",
        "tests/v1/executor/test_multiproc_executor.py",
        "tests/v1/metrics",
        "tests/test_request_input_bounds.py",
        "tests/test_sampling_params.py",
        "tests/test_pooling_params.py",
    ),
    _compared(
        "platform",
        "Platforms, logging, small tools",
        "tests/platforms",
        "tests/test_attention_backend_registry.py",
        "tests/test_logger.py",
        "tests/test_pcp_dp.py",
        "tests/test_ray_env.py",
        "tests/test_triton_utils.py",
        "tests/test_uvicorn_logging.py",
        "tests/test_version.py",
        "tests/test_zen_cpu_platform_detection.py",
        "tests/utils_/test_async_utils.py",
        "tests/utils_/test_cpu_resource_utils.py",
        "tests/utils_/test_func_utils.py",
        "tests/utils_/test_gc_utils.py",
        "tests/utils_/test_hashing.py",
        "tests/utils_/test_import_utils.py",
        "tests/utils_/test_network_utils.py",
        "tests/utils_/test_numa_utils.py",
        "tests/utils_/test_system_utils.py",
        "tests/utils_/test_torch_utils.py",
    ),
    _compared(
        "distributed",
        "Expert placement and balancing, shared memory between processes",
        "tests/distributed/test_eplb_algo.py",
        "tests/distributed/test_eplb_events.py",
        "tests/distributed/test_eplb_migration_scheduler.py",
        "tests/distributed/test_eplb_utils.py",
        "tests/distributed/test_events.py",
        "tests/distributed/test_expert_placement.py",
        "tests/distributed/test_kvlayout.py",
        "tests/distributed/test_mq_connect_ip.py",
        "tests/distributed/test_pipeline_partition.py",
        "tests/distributed/test_same_node.py",
        "tests/distributed/test_shm_buffer.py",
        "tests/distributed/test_shm_storage.py",
    ),
    _compared(
        "worker",
        "Speculative decoding, and workers without a model of the hub",
        "tests/v1/spec_decode/test_adaptive_verification.py",
        "tests/v1/spec_decode/test_dflash2.py",
        "tests/v1/spec_decode/test_dflash_causality.py",
        "tests/v1/spec_decode/test_draft_attention_backend_override.py",
        "tests/v1/spec_decode/test_draft_moe_backend_override.py",
        "tests/v1/spec_decode/test_dsv4_mtp_local_argmax.py",
        "tests/v1/spec_decode/test_dynamic_sd.py",
        "tests/v1/spec_decode/test_eagle_draft_attn_metadata.py",
        "tests/v1/spec_decode/test_llm_base_proposer_sampling.py",
        "tests/v1/spec_decode/test_ngram.py",
        "tests/v1/worker/test_attn_utils.py",
        "tests/v1/worker/test_cp_utils.py",
        "tests/v1/worker/test_gpu_batch_ordering.py",
        "tests/v1/worker/test_gpu_extract_hidden_states_speculator.py",
        "tests/v1/worker/test_gpu_rejection_sampler_chunking.py",
        "tests/v1/worker/test_gpu_target_dependent_ar_speculator.py",
        "tests/v1/worker/test_logits_processor_loader.py",
        "tests/v1/worker/test_spec_decode_embed_sharing_pp.py",
        "tests/v1/worker/test_utils.py",
        "tests/model_executor/test_cpu_unquantized_gemm_dispatch.py",
        "tests/model_executor/test_eagle_quantization.py",
        "tests/model_executor/test_routed_experts_capture.py",
    ),
)
