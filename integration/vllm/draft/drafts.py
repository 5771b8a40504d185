"""The MTP drafts whose LM head ranks can share, and what a configuration says of them.

This module imports nothing of vLLM, because it runs in every process that builds a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_nvlink_plugin.integration.common.options import AUTO, MTP_LM_HEAD, Options
from moe_nvlink_plugin.integration.vllm.choices import WORDING, names
from moe_nvlink_plugin.integration.vllm.compat import DRAFTS

#: `speculative_config.method` of drafts that come with their target model.
METHOD = "mtp"
_VARIABLE = "MOE_NVLINK_MTP_LM_HEAD_TP"
_OFF = f'remove "{MTP_LM_HEAD}" and {_VARIABLE}, which leaves the head whole'


def is_mtp(vllm_config: Any) -> bool:
    """Return whether a configuration drafts with its target's MTP layers. Local; any object."""
    return getattr(getattr(vllm_config, "speculative_config", None), "method", None) == METHOD


def shares_head(vllm_config: Any, options: Options) -> bool:
    """Return whether ranks share the head of this configuration's draft. Local."""
    return options.shares_lm_head and is_mtp(vllm_config)


def architecture(vllm_config: Any) -> str:
    """Return vLLM's name of the draft's architecture. Local; only if `is_mtp`."""
    found = vllm_config.speculative_config.draft_model_config.hf_config.architectures
    return str((found or ["none"])[0])


def greedy(speculative: Any) -> bool:
    """Return whether each draft token is an argmax and nobody reads its logits. Local."""
    return speculative.draft_sample_method == "greedy" and not getattr(
        speculative, "enable_adaptive_verification", False
    )


def ask_for_tokens(vllm_config: Any, options: Options) -> None:
    """Make vLLM ask a greedy draft for tokens (`get_top_tokens`) instead of logits.

    Local; idempotent. Then only pairs of value and token travel back. It sets
    ``speculative_config.use_local_argmax_reduction``.
    """
    if shares_head(vllm_config, options) and greedy(vllm_config.speculative_config):
        vllm_config.speculative_config.use_local_argmax_reduction = True


def problems(vllm_config: Any, options: Options) -> Iterator[str]:
    """Yield why a configuration allows no shared head, each with the flag to change. Local."""
    if not options.shares_lm_head:
        return
    if not is_mtp(vllm_config):
        if names(vllm_config, MTP_LM_HEAD):
            yield (
                f"{WORDING.options}: {MTP_LM_HEAD}={options.mtp_lm_head_tp_size!r} is for "
                "the LM head of an MTP draft, and there is none: add --speculative-config "
                f'\'{{"method": "{METHOD}", "num_speculative_tokens": 1}}\', or {_OFF}.'
            )
        return
    yield from _parallel(vllm_config.parallel_config, options.mtp_lm_head_tp_size)
    yield from _draft(vllm_config)
    yield from _head(vllm_config)


def _parallel(parallel: Any, size: int | str) -> Iterator[str]:
    if parallel.tensor_parallel_size > 1:
        yield (
            f"{MTP_LM_HEAD}={size!r} with --tensor-parallel-size {parallel.tensor_parallel_size}: "
            "tensor parallelism has split the LM head already. Set --tensor-parallel-size to 1, or "
            f"{_OFF}."
        )
    ranks = parallel.data_parallel_size
    if size == AUTO or not isinstance(size, int):
        return
    if size > ranks or ranks % size:
        fitting = ", ".join(str(n) for n in range(2, ranks + 1) if ranks % n == 0)
        yield (
            f"{MTP_LM_HEAD}={size} (or {_VARIABLE}) does not divide --data-parallel-size {ranks}: "
            f"set it to one of {fitting or 'none'}, or to auto, or {_OFF}."
        )


def _draft(vllm_config: Any) -> Iterator[str]:
    name = architecture(vllm_config)
    if name not in DRAFTS:
        yield (
            f"{MTP_LM_HEAD} serves the drafts {', '.join(DRAFTS)}; this model's is {name}: {_OFF}."
        )


def _head(vllm_config: Any) -> Iterator[str]:
    model = vllm_config.model_config
    if model is not None and model.head_dtype != model.dtype:
        yield (
            f"{MTP_LM_HEAD} multiplies in the model's type {model.dtype}, and head_dtype is "
            f'{model.head_dtype}: remove "head_dtype" from --hf-overrides, or {_OFF}.'
        )
    quantised = getattr(vllm_config.speculative_config, "draft_lm_head_quantization", None)
    if quantised is not None:
        yield (
            f"{MTP_LM_HEAD} with draft_lm_head_quantization {quantised}: a shared head is not "
            f"quantised. Remove the latter from --speculative-config, or {_OFF}."
        )
