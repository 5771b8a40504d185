"""vLLM's real schedulers without a model: configurations, requests, and a runner's answers."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections import deque
from collections.abc import Callable
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
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from moe_nvlink_plugin.integration.vllm.scheduler import GuaranteedNoEvictScheduler

BLOCK = 4
MAX_MODEL_LEN = 64
STOP, TOKEN = 1, 7
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
    "eos_token_id": STOP,
}
_ATTENTION = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


@functools.cache
def _model_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="vllm-schedulers-"))
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return str(folder)


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**_ATTENTION, **changes})


def window(size: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(**_ATTENTION, sliding_window=size)


def local(size: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(**_ATTENTION, attention_chunk_size=size)


def mamba(mode: str, drafts: int = 0, block_size: int = BLOCK) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((2,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


@functools.cache
def configuration(
    *,
    asynchronous: bool = False,
    policy: str = "fcfs",
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    prefix_caching: bool = True,
    drafts: str = "",
    num_drafts: int = 0,
    max_loras: int = 0,
    mamba_mode: str = "none",
    dcp: int = 1,
    additional: str = "{}",
    ours: bool = True,
) -> VllmConfig:
    """Return a configuration; equal arguments share one. `additional` is JSON."""
    init_none_hash(sha256)
    model = ModelConfig(
        model=_model_folder(),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        max_model_len=MAX_MODEL_LEN,
    )
    parallel = ParallelConfig()
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method=drafts,
            model=drafts if drafts == "ngram" else _model_folder(),
            num_speculative_tokens=num_drafts,
            prompt_lookup_max=3 if drafts == "ngram" else None,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
            scheduler_cls=GuaranteedNoEvictScheduler if ours and additional != "{}" else None,
        ),
        parallel_config=parallel,
        speculative_config=speculative,
        lora_config=LoRAConfig(max_loras=max_loras, max_lora_rank=8) if max_loras else None,
        additional_config=json.loads(additional),
    )
    # vLLM's CPU platform turns it off, and changes these:
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.mamba_cache_mode = mamba_mode
    config.parallel_config.decode_context_parallel_size = dcp
    return config


def scheduler(
    *,
    ours: bool = True,
    num_blocks: int = 20,
    specs: tuple[Any, ...] = (),
    capacity: dict[str, Any] | None = None,
    **chosen: Any,
) -> Any:
    """Return a scheduler with `num_blocks` blocks beside vLLM's null block."""
    if capacity is not None:
        chosen["additional"] = json.dumps({"moe_nvlink": {"capacity": capacity}})
    config = configuration(**chosen)
    config.cache_config.num_gpu_blocks = num_blocks + 1
    block_size = max((spec.block_size for spec in specs), default=BLOCK)
    block_size *= config.parallel_config.decode_context_parallel_size
    config.cache_config.block_size = block_size
    groups = [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs or (full(),))]
    theirs = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return (GuaranteedNoEvictScheduler if ours else theirs)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def request(
    name: str, prompt: list[int], max_tokens: int, *, structured: str = "", **changes: Any
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[STOP],
            structured_outputs=StructuredOutputsParams(regex=structured) if structured else None,
        ),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **changes,
    )


def prompt(seed: int, length: int) -> list[int]:
    """Return tokens that no other seed's prompt begins with."""
    return [2 + (seed * 67 + at * 7) % 990 for at in range(length)]


class Runner:
    """Runs a scheduler's steps without a model.

    Args:
        scheduler: vLLM's or ours.
        length: name of a request -> number of tokens of its output.
        seed: of how many drafts each step accepts.
    """

    def __init__(
        self, scheduler: Any, length: Callable[[str], int] = lambda name: 10**9, seed: int = 0
    ) -> None:
        self.scheduler = scheduler
        self._length = length
        self._random = random.Random(seed)
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._in_flight: deque[tuple[Any, dict[str, int]]] = deque()
        self._sampled: dict[str, int] = {}
        #: Names in the order in which they started; what each step scheduled; number of evictions.
        self.started: list[str] = []
        self.evicted = 0
        self.finished: dict[str, Any] = {}

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.started += [new.req_id for new in output.scheduled_new_reqs]
        self.evicted += len(output.preempted_req_ids or ())
        samples = {}
        for name in output.num_scheduled_tokens:
            if not self.scheduler.requests[name].is_prefill_chunk:
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                samples[name] = 1 + self._random.randint(0, drafts)
        self._in_flight.append((output, samples))
        if len(self._in_flight) > int(self._is_async):
            self._answer()
        return output

    def _answer(self) -> None:
        output, samples = self._in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        tokens = [self._tokens(name, samples.get(name, 0)) for name in names]
        results = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for one in (one for each in results.values() for one in each.outputs):
            if one.finish_reason is not None:
                self.finished[one.request_id] = one
        drafts = self.scheduler.num_spec_tokens
        if drafts and not self._is_async:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(names, [[TOKEN] * drafts for _ in names])
            )

    def _tokens(self, name: str, number: int) -> list[int]:
        done = self._sampled.get(name, 0)
        self._sampled[name] = done + number
        return [STOP if done + at + 1 >= self._length(name) else TOKEN for at in range(number)]

    def drain(self, most: int = 2000) -> list[dict[str, int]]:
        """Step until nothing is left; return what each step scheduled."""
        steps = []
        while self.scheduler.has_unfinished_requests():
            steps.append(dict(self.step().num_scheduled_tokens))
            assert len(steps) < most, "requests starve"
        while self._in_flight:
            self._answer()
        return steps
