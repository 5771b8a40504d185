"""Checks a configuration at start-up, in every process that builds one.

Each rule refuses a combination that nobody has run through our exchange, or that vLLM would accept
silently because it sees the backend ``allgather_reducescatter``. Each message names the flag to
change.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.integration.common import refusals
from moe_nvlink_plugin.integration.common.options import MTP_LM_HEAD, Options
from moe_nvlink_plugin.integration.vllm import compat
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER, schedules
from moe_nvlink_plugin.integration.vllm.balancing import eplb
from moe_nvlink_plugin.integration.vllm.choices import WORDING, names, options_of
from moe_nvlink_plugin.integration.vllm.draft import drafts
from moe_nvlink_plugin.integration.vllm.lora import adapters

from . import graphs, worker

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
#: Module of vLLM that scales without Ray.
EXTERNAL_SCALING = "vllm.distributed.elastic_ep.external_elastic_ep"
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
        *_backends(vllm_config),
        *_pipeline(vllm_config, device_type),
        *_ray(vllm_config.parallel_config),
        *_faults(vllm_config, device_type),
        *_elastic(vllm_config, device_type),
    ]
    ours = worker.extends(str(vllm_config.parallel_config.worker_cls))
    problems += adapters.problems(vllm_config, worker_is_ours=ours)
    problems += eplb.problems(vllm_config, device_type, worker_is_ours=ours)
    options = Options()
    try:
        options = options_of(vllm_config)
    except ConfigError as error:
        problems.append(f"{error}.")
    problems += _fallback(vllm_config, options, device_type)
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
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        yield (
            f"dual batch overlap (--enable-dbo, --ubatch-size {parallel.ubatch_size}): vLLM allows "
            "it to a fixed list of its own backends and none of plugins (VllmConfig, "
            '"Microbatching currently only supports"). Remove these flags, or choose one of that '
            "list by --all2all-backend."
        )
    if parallel.prefill_context_parallel_size > 1:
        yield (
            f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}: only "
            "vLLM's V2 model runner for GPUs divides prompts, and there nobody has run it with "
            "our exchange. Set it to 1."
        )


def _backends(vllm_config: Any) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if parallel.all2all_backend != CARRIER:
        yield (
            f"--all2all-backend {parallel.all2all_backend} is set beside additional_config: "
            f"name one backend, {parallel.all2all_backend} or {BACKEND}."
        )


def _pipeline(vllm_config: Any, device_type: str) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size < 2:
        return
    flag = f"--pipeline-parallel-size {parallel.pipeline_parallel_size}"
    for is_on, other in (
        (vllm_config.speculative_config is not None, "--speculative-config"),
        (vllm_config.lora_config is not None, "--enable-lora"),
        (parallel.enable_eplb, "--enable-eplb"),
    ):
        if is_on:
            yield f"{flag} with {other}: nobody has run both with our exchange. Remove one."
    if device_type == "cpu" and vllm_config.compilation_config.mode == _NOT_COMPILED:
        yield (
            f"{flag} with --enforce-eager: vLLM's CPU runner makes the memory in which a later "
            "stage receives rows while it warms up, and it warms up compiled models only. Remove "
            "one."
        )


def _faults(vllm_config: Any, device_type: str) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if not parallel.enable_fault_tolerance:
        return
    flag = "fault tolerance (--enable-fault-tolerance)"
    if not worker.extends(str(parallel.worker_cls)):
        yield (
            f"{flag} with --worker-cls {parallel.worker_cls}: only our workers have it. Remove one."
        )
    for is_on, other in (
        (parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size above 1"),
        (vllm_config.speculative_config is not None, "--speculative-config"),
        (vllm_config.lora_config is not None, "--enable-lora"),
        (schedules(vllm_config), "our --scheduler-cls"),
        (parallel.data_parallel_backend == "ray" or parallel.use_ray, "Ray"),
    ):
        if is_on:
            yield f"{flag} with {other}: nobody has run both with our exchange. Remove one."
    if device_type != "cpu" and parallel.enable_eplb and parallel.eplb_config.use_async:
        yield (
            f"{flag} with vLLM's asynchronous load balancer, whose thread would wait for a dead "
            "rank. Add --eplb-config.use_async=false."
        )
    if device_type != "cpu" and not parallel.disable_nccl_for_dp_synchronization:
        yield (
            f"{flag}: vLLM's ranks would wait for a dead one in NCCL. Add "
            "--disable-nccl-for-dp-synchronization."
        )


def _elastic(vllm_config: Any, device_type: str) -> Iterator[str]:
    parallel = vllm_config.parallel_config
    if not parallel.enable_elastic_ep:
        return
    flag = "elastic expert parallelism (--enable-elastic-ep)"
    if importlib.util.find_spec(EXTERNAL_SCALING) is None:
        yield f"{flag}: before 0.33 vLLM scales by Ray only, which nobody has run. Remove it."
    elif not parallel.data_parallel_external_lb:
        yield f"{flag} needs one server a rank here: start each with --data-parallel-rank."
    if not worker.extends(str(parallel.worker_cls)):
        yield (
            f"{flag} with --worker-cls {parallel.worker_cls}: only our workers have it. Remove one."
        )
    is_compiled = vllm_config.compilation_config.mode != _NOT_COMPILED
    for is_on, other in (
        (parallel.tensor_parallel_size > 1, "--tensor-parallel-size above 1"),
        (vllm_config.speculative_config is not None, "--speculative-config"),
        (vllm_config.lora_config is not None, "--enable-lora"),
        (parallel.enable_fault_tolerance, "--enable-fault-tolerance"),
        (names(vllm_config, "fallback"), "the option `fallback`"),
        (schedules(vllm_config), "our --scheduler-cls"),
        (device_type == "cpu" and is_compiled, "a compiled model on CPU ranks"),
    ):
        if is_on:
            yield f"{flag} with {other}: nobody has run both with our exchange. Remove one."


def _ray(parallel: Any) -> Iterator[str]:
    """Refuse Ray where vLLM's platform names no resource for it, as vLLM's CPU platform."""
    asked = [
        flag
        for flag, asks in (
            ("--data-parallel-backend ray", parallel.data_parallel_backend == "ray"),
            ("--distributed-executor-backend ray", parallel.use_ray),
        )
        if asks
    ]
    if not asked:
        return
    from vllm.platforms import current_platform

    if not current_platform.ray_device_key:
        yield (
            f"{' and '.join(asked)}: vLLM's platform for {current_platform.device_name} names no "
            "resource of Ray by which its workers could be placed. Set both to mp, or leave them "
            "out."
        )


def _fallback(vllm_config: Any, options: Options, device_type: str) -> Iterator[str]:
    if options.fallback is None:
        return
    if device_type == "cpu":
        yield (
            f"{WORDING.options}: fallback={options.fallback!r} on CPU ranks: vLLM's own exchange "
            "cannot serve them, because its CpuCommunicator has no all_gatherv. Remove it."
        )
    if drafts.shares_head(vllm_config, options):
        yield (
            f"{WORDING.options}: fallback and {MTP_LM_HEAD}: ranks that fall back could not share "
            "the draft's LM head. Remove one of the two."
        )
    if adapters.on_experts(vllm_config.lora_config):
        yield (
            f"{WORDING.options}: fallback and LoRA on experts: vLLM's own exchange leaves a "
            "token's adapter behind. Remove it, or name other layers with --lora-target-modules."
        )


def _sleep(model: Any) -> Iterator[str]:
    if model is not None and model.enable_sleep_mode and model.sleep_mode_backend != SLEEPS:
        yield (
            f"--sleep-mode-backend {model.sleep_mode_backend}: the workspace stays in GPU memory "
            f"that other ranks have mapped, and only {SLEEPS} leaves it alone. Set "
            f"--sleep-mode-backend {SLEEPS}, or remove --enable-sleep-mode."
        )


def _model(vllm_config: Any, device_type: str, options: Options) -> Iterator[str]:
    from vllm import envs

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
    if num_experts % ep_size and adapters.on_experts(vllm_config.lora_config):
        yield (
            f"LoRA on experts with {num_experts} experts on {ep_size} ranks: vLLM takes a rank's "
            "adapters from its place if all ranks have equally many experts. Use another number "
            "of ranks, or name other layers with --lora-target-modules."
        )
    redundant = eplb.num_redundant(parallel)
    # A rank that joins is told by rank 0 how many redundant experts there will be.
    if parallel.enable_eplb and not envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH:
        yield from eplb.uneven(num_experts, redundant, ep_size)
    hidden_size = model.get_hidden_size()
    yield from refusals.exchange(
        model.model,
        options,
        ep_size=ep_size,
        num_experts=num_experts + redundant,
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
