"""vLLM's real schedulers without a model: configurations, requests, and a runner's answers."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from moe_nvlink_plugin.integration.vllm.scheduler import GuaranteedNoEvictScheduler

BLOCK = 4
MAX_MODEL_LEN = 64
_EOS = 1
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": _EOS,
}


@functools.cache
def _model_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="vllm-schedulers-"))
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return str(folder)


@functools.cache
def _model_config() -> ModelConfig:
    init_none_hash(sha256)
    return ModelConfig(
        model=_model_folder(),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=MAX_MODEL_LEN,
    )


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, **changes
    )


def window(size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=size
    )


def scheduler(
    *,
    ours: bool = True,
    num_blocks: int = 20,
    specs: tuple[Any, ...] = (),
    asynchronous: bool = False,
    policy: str = "fcfs",
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 32,
    prefix_caching: bool = True,
    num_drafts: int = 0,
    capacity: dict[str, Any] | None = None,
    max_loras: int = 0,
    **changes: Any,
) -> Any:
    """Return a scheduler with `num_blocks` blocks beside vLLM's null block."""
    speculative = None
    if num_drafts:
        speculative = SpeculativeConfig(
            model="ngram", num_speculative_tokens=num_drafts, prompt_lookup_max=3
        )
    config = VllmConfig(
        model_config=_model_config(),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            policy=policy,
        ),
        parallel_config=ParallelConfig(),
        speculative_config=speculative,
        lora_config=LoRAConfig(max_loras=max_loras, max_lora_rank=8) if max_loras else None,
        additional_config={"moe_nvlink": {"capacity": capacity}} if capacity else {},
    )
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = num_blocks + 1
    groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs or (full(),))]
    theirs = AsyncScheduler if asynchronous else Scheduler
    return (GuaranteedNoEvictScheduler if ours else theirs)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
        **changes,
    )


def request(name: str, prompt: list[int], max_tokens: int, **changes: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **changes,
    )


def answer(output: Any, tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: at for at, name in enumerate(ids)},
        sampled_token_ids=[tokens.get(name, []) for name in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def step(scheduler: Any) -> Any:
    """Schedule, and let each request that has no tokens left to compute sample token 7."""
    output = scheduler.schedule()
    tokens = {
        name: [7]
        for name in output.num_scheduled_tokens
        if scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_tokens
    }
    scheduler.update_from_output(output, answer(output, tokens))
    return output
