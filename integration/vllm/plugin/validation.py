"""Checks a configuration at start-up, in every process that builds one.

Each rule refuses a combination that nobody has run through our exchange, or that vLLM would accept
silently because it sees the backend ``allgather_reducescatter``. Each message names the flag to
change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.integration.common import refusals
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm import compat
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER
from moe_nvlink_plugin.integration.vllm.choices import WORDING, options_of
from moe_nvlink_plugin.integration.vllm.draft import drafts

from . import graphs

# vLLM's CPU experts kernel needs a multiple of 32 columns. We check it here, because vLLM's own
# message names neither the size nor the model.
CPU_HIDDEN_MULTIPLE = 32

#: Models of vLLM's `DeepseekV2Model`. It tells a tensor-parallel rank's slice of a batch from the
#: whole batch by the number of rows, and both have one row if the batch has one token. A compiled
#: model is right: it does what the comparison said of the larger batch that vLLM traces.
SLICES_BY_ROWS = frozenset(
    (
        *("DeepseekForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
        "MistralLarge3ForCausalLM",
    )
)
#: vLLM's mechanism of sleep that frees what its own allocator has made, and nothing else.
SLEEPS = "cumem"
_NOT_COMPILED = 0  # vLLM's CompilationMode.NONE

logger = logging.getLogger(__name__)


def check(vllm_config: Any, device_type: str) -> Options:
    """Return the options of a configuration that we can serve. Local.

    Args:
        vllm_config: vLLM's VllmConfig, which asks for our backend.
        device_type: "cpu" or "cuda".

    Raises:
        UnsupportedError: we cannot serve it; the message lists every reason.
    """
    problems = [
        *refusals.device(device_type),
        *_parallel(vllm_config.parallel_config),
        *_untried_sizes(vllm_config.parallel_config, device_type),
    ]
    problems += _features(vllm_config)
    options = Options()
    try:
        options = options_of(vllm_config)
    except ConfigError as error:
        problems.append(f"{error}.")
    if vllm_config.model_config is not None and not problems:
        problems += _model(vllm_config, device_type, options)
    problems += drafts.problems(vllm_config, options)
    problems += graphs.problems(vllm_config)
    problems += _sleep(vllm_config.model_config)
    refusals.refuse(problems, compat.vllm_version(), WORDING)
    compat.warn_if_untried(device_type)
    _warn_of_single_tokens(vllm_config)
    return options


def _warn_of_single_tokens(vllm_config: Any) -> None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model is None or parallel.tensor_parallel_size < 2:
        return
    is_compiled = vllm_config.compilation_config.mode != _NOT_COMPILED
    if model.architecture in SLICES_BY_ROWS and not is_compiled:
        logger.warning(
            "If a step has one token, vLLM's %s gives wrong tokens with --tensor-parallel-size %s "
            "and without torch.compile, with any backend (vLLM pull request 50691). Remove "
            "--enforce-eager or what else turns torch.compile off, or set "
            "--tensor-parallel-size 1.",
            model.architecture,
            parallel.tensor_parallel_size,
        )


def _parallel(parallel: Any) -> Iterator[str]:
    if not parallel.enable_expert_parallel:
        yield "expert parallelism is off: add --enable-expert-parallel."
    if parallel.data_parallel_size < 2:
        yield (
            f"--data-parallel-size is {parallel.data_parallel_size}: with one data-parallel rank "
            "vLLM's MoE layers exchange no tokens. Use 2 or more, or drop the flag."
        )
    if parallel.all2all_backend != CARRIER:
        yield (
            f"--all2all-backend {parallel.all2all_backend} is set beside additional_config: "
            f"name one backend, {parallel.all2all_backend} or {BACKEND}."
        )
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        yield (
            f"dual batch overlap (--enable-dbo, --ubatch-size {parallel.ubatch_size}): "
            "remove these flags."
        )
    if parallel.enable_elastic_ep:
        yield "elastic expert parallelism: remove --enable-elastic-ep."
    if parallel.enable_eplb:
        yield "expert load balancing: remove --enable-eplb."


def _untried_sizes(parallel: Any, device_type: str) -> Iterator[str]:
    for size, option, what in (
        (parallel.prefill_context_parallel_size, "--prefill-context-parallel-size", "PCP"),
        (parallel.pipeline_parallel_size, "--pipeline-parallel-size", "pipeline parallelism"),
    ):
        if size > 1:
            yield f"{what}: {option} is {size}, set it to 1."
    yield from refusals.several_cpu_hosts(device_type, parallel.nnodes)


def _features(vllm_config: Any) -> Iterator[str]:
    if vllm_config.lora_config is not None:
        yield "LoRA: remove --enable-lora (adapters would not follow their tokens)."


def _sleep(model: Any) -> Iterator[str]:
    if model is not None and model.enable_sleep_mode and model.sleep_mode_backend != SLEEPS:
        yield (
            f"--sleep-mode-backend {model.sleep_mode_backend}: the workspace stays in GPU memory "
            f"that other ranks have mapped, and only {SLEEPS} leaves it alone. Set "
            f"--sleep-mode-backend {SLEEPS}, or remove --enable-sleep-mode."
        )


def _model(vllm_config: Any, device_type: str, options: Options) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_experts = model.get_num_experts()
    if num_experts <= 0:
        yield f"model {model.model} has no MoE layers: drop the flag."
        return
    ep_size = parallel.data_parallel_size * parallel.tensor_parallel_size
    if num_experts < ep_size:
        yield (
            f"{num_experts} experts on {ep_size} ranks (--data-parallel-size times "
            "--tensor-parallel-size): every rank needs at least one expert."
        )
    hidden_size = model.get_hidden_size()
    yield from refusals.exchange(
        model.model,
        options,
        ep_size=ep_size,
        num_experts=num_experts,
        top_k=model.get_num_experts_per_tok(),
        hidden_size=hidden_size,
        max_tokens_per_rank=vllm_config.scheduler_config.max_num_batched_tokens,
        dtype=model.dtype,
    )
    if device_type == "cpu" and hidden_size % CPU_HIDDEN_MULTIPLE:
        yield (
            f"hidden_size {hidden_size} of {model.model}: vLLM's CPU experts need a multiple of "
            f"{CPU_HIDDEN_MULTIPLE}."
        )
