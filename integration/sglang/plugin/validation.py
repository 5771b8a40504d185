"""What we refuse while SGLang resolves its arguments, with the flag to change.

A rule here is a combination nobody has run through our exchange, or one that SGLang would accept in
silence because it knows our backend only as ``customized``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.integration.common import refusals
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.sglang import (
    backend,
    choices,
    compat,
    draft,
    own_exchange,
    sizes,
)
from moe_nvlink_plugin.integration.sglang.budget import Budget
from moe_nvlink_plugin.integration.sglang.moe import runners

#: Runners that take what our dispatchers hand them; "auto" is SGLang's choice by weight format.
RUNNERS = ("auto", *runners.NAMES)
#: Models that leave out their own sum of the experts' outputs wherever SGLang's flashinfer backend
#: has them do so. Others know DeepEP alone, and would sum twice.
ARCHITECTURES = (
    *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "NemotronHForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
)


def check(server_args: Any) -> Options:
    """Return the options of arguments that we can serve. Local.

    Args:
        server_args: arguments that name our backend, before SGLang's step for such backends.

    Raises:
        UnsupportedError: we cannot serve them; the message lists every reason.
    """
    view = resolved_view(server_args)
    problems = [
        *refusals.device(view.device),
        *_draft(server_args),
        *_parallel(view),
        *_overlap(view),
        *_features(view),
        *_runner(view),
    ]
    options = Options()
    try:
        options = choices.options_of(server_args)
    except ConfigError as error:
        problems.append(f"{error}.")
    if (refused := draft.refusal(options)) is not None:
        problems.append(refused)
    if options.overlap_shared_experts:
        problems.append(
            "overlap_shared_experts is not served under SGLang: its dispatchers run both verbs on "
            "the stream of the experts. Remove it."
        )
    problems += own_exchange.refusals(server_args, view, options)
    if not problems:
        problems += _model(server_args, view, options)
    refusals.refuse(problems, compat.sglang_version(), choices.WORDING)
    compat.warn_if_untried(view.device)
    return options


def check_budget(server_args: Any, budget: Budget) -> None:
    """Raise UnsupportedError if no capacity bounds what a rank dispatches, or none fits. Local."""
    view = resolved_view(server_args)
    problems = [*_chunks(view), *_exchange(server_args, view, budget)]
    refusals.refuse(problems, compat.sglang_version(), choices.WORDING)


def _draft(server_args: Any) -> Iterator[str]:
    if not backend.serves_target(server_args):
        yield (
            f"{backend.DRAFT_FLAG} without {backend.FLAG}: expert parallelism spans the same ranks "
            "for both. Add the second flag, or drop the first."
        )


def _parallel(view: Any) -> Iterator[str]:
    if view.tp_size < 2:
        yield (
            f"--tp-size is {view.tp_size}: expert parallelism spans the tensor-parallel ranks, and "
            "one rank exchanges no tokens. Use 2 or more, or drop the flag."
        )
    if view.ep_size not in (1, view.tp_size):
        yield (
            f"--ep-size is {view.ep_size}, --tp-size {view.tp_size}: remove --ep-size, which "
            "becomes --tp-size."
        )
    for size, option in (
        (view.pp_size, "--pp-size"),
        (view.attn_cp_size, "--attn-cp-size"),
        (view.dcp_size, "--dcp-size"),
        (view.moe_dp_size, "--moe-dp-size"),
        (view.dwdp_size, "--dwdp-size"),
    ):
        if size > 1:
            yield f"{option} is {size}, which nobody has run through our exchange: set it to 1."
    yield from refusals.several_cpu_hosts(view.device, view.nnodes)
    if view.disable_attn_tp_gather and view.tp_size > view.attn_dp_size:
        yield (
            "--disable-attn-tp-gather: a batch that does not divide among the ranks of an "
            "attention group stays whole on each of them. Remove it."
        )
    if backend.keeps_record(view):
        yield from _elastic(view)


def _elastic(view: Any) -> Iterator[str]:
    """Refuse what does not outlive a death, and ranks that come."""
    if view.elastic_ep_backend != "mooncake" or view.device != "cuda":
        yield (
            f"--elastic-ep-backend {view.elastic_ep_backend} on {view.device}: SGLang's own groups "
            "outlive a rank with mooncake on GPUs alone; others wait for the dead one. Remove "
            "--elastic-ep-backend."
        )
    if not view.enable_eplb:
        yield (
            "--elastic-ep-backend without --enable-eplb: nothing would move the experts of a rank "
            "that has died. Add the second flag, or drop the first."
        )
    if view.ep_join_mode is not None or (view.max_ep_size or 0) > view.tp_size:
        yield (
            "ranks that return or join: no hook of SGLang's tells the others when to take one into "
            "the exchange. Remove --elastic-ep-join-mode and --max-ep-size; start all ranks again "
            "to have a rank back."
        )
    if view.speculative_algorithm is not None:
        yield (
            "--elastic-ep-backend with a draft, whose forwards SGLang would not run again: remove "
            "one of them."
        )


def _overlap(view: Any) -> Iterator[str]:
    """Refuse overlaps: they want a dispatcher in halves, the second also rows in expert order."""
    if view.enable_two_batch_overlap:
        yield "two-batch overlap: remove --enable-two-batch-overlap."
    if view.enable_single_batch_overlap:
        yield "single-batch overlap: remove --enable-single-batch-overlap."
    if view.enable_pdmux:
        yield "prefill beside decode on one GPU: remove --enable-pdmux."


def _features(view: Any) -> Iterator[str]:
    if view.enable_waterfill:
        yield "waterfill is for DeepEP and MegaMoE: remove --enable-waterfill."
    if view.enforce_shared_experts_fusion:
        yield (
            "shared experts are not exchanged, and cannot be fused with those that are: remove "
            "--enforce-shared-experts-fusion."
        )
    if view.enable_lora or view.lora_paths:
        yield (
            "LoRA (adapters would not follow their tokens): remove --enable-lora and --lora-paths."
        )
    if view.enable_return_routed_experts:
        yield (
            "--enable-return-routed-experts: SGLang gathers the choices of scattered tokens for "
            "DeepEP alone, and would return those of other tokens. Remove it."
        )
    if view.kt_weight_path is not None:
        yield "experts on the CPU (KTransformers) read other ids: remove --kt-weight-path."


def _runner(view: Any) -> Iterator[str]:
    for runner, option in (
        (view.moe_runner_backend, "--moe-runner-backend"),
        (view.speculative_moe_runner_backend, "--speculative-moe-runner-backend"),
    ):
        if runner is not None and runner not in RUNNERS:
            yield f"{option} {runner}: choose one of {', '.join(RUNNERS)}."


def _model(server_args: Any, view: Any, options: Options) -> Iterator[str]:
    model = model_config_of(server_args)
    architecture = next(iter(model.hf_config.architectures or ()), None)
    if architecture not in ARCHITECTURES:
        yield (
            f"architecture {architecture} of {view.model_path}: it is not one of "
            f"{', '.join(ARCHITECTURES)}. Others may sum the experts' outputs a second time. Drop "
            "the flag for this model."
        )
        return
    num_experts = sizes.num_experts(model.hf_text_config)
    if num_experts == 0:
        yield f"model {view.model_path} has no MoE layers: drop the flag."
    elif num_experts < view.tp_size:
        yield (
            f"{num_experts} experts on {view.tp_size} ranks (--tp-size): every rank needs at least "
            "one expert."
        )


def _chunks(view: Any) -> Iterator[str]:
    if view.disaggregation_mode != "decode" and (view.chunked_prefill_size or 0) <= 0:
        yield (
            f"--chunked-prefill-size is {view.chunked_prefill_size}: without chunks nothing bounds "
            "the tokens of one prefill, and the exchange has slots for a fixed number. Set it to "
            "8192, for example."
        )


def _exchange(server_args: Any, view: Any, budget: Budget) -> Iterator[str]:
    options = choices.options_of(server_args)
    yield from refusals.exchange(str(view.model_path), options, **sizes.of(server_args, budget))
