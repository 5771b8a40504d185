"""The shared LM head of vLLM's MTP drafts: its plan, its limits, and our logits processor.

vLLM creates `MoeNvlinkLogitsProcessor` instead of its ``LogitsProcessor``. Only the processor of a
draft gets a `DraftHead`; the target's processor does what vLLM's does.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.options import MTP_LM_HEAD
from moe_nvlink_plugin.integration.vllm import compat
from moe_nvlink_plugin.integration.vllm.choices import options_of

from . import drafts
from .draft_head import (
    WAY_OUT,
    DraftHead,
    Plan,
    choose_size,
    refuse_shape,
)


def plan_of(vllm_config: Any, vocab_size: int, ranks: int, device: torch.device) -> Plan:
    """Return the plan that this rank proposes for its draft. Local.

    Args:
        vllm_config: a configuration for which `drafts.problems` yields nothing.
        vocab_size: rows of the head.
        ranks: data-parallel size.
        device: where this rank works.
    """
    speculative = vllm_config.speculative_config
    whole = Plan(
        size=1,
        crossover=None,
        vocab_size=vocab_size,
        hidden_size=speculative.draft_model_config.get_hidden_size(),
        most_rows=vllm_config.scheduler_config.max_num_seqs,
        dtype=vllm_config.model_config.dtype,
        full_logits=not (drafts.greedy(speculative) and speculative.use_local_argmax_reduction),
    )
    return choose_size(whole, options_of(vllm_config).mtp_lm_head_tp_size, ranks, device)


def refuse_unfit(lm_head: Any, config: HeadConfig) -> None:
    """Raise UnsupportedError for a quantised head, or one of another size or type. Local."""
    method = getattr(lm_head, "quant_method", None)
    if not isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        raise UnsupportedError(
            f"{MTP_LM_HEAD}: the draft's LM head is quantised ({type(method).__name__}), and a "
            f"shared head is multiplied in the model's type. {WAY_OUT}"
        )
    refuse_shape(lm_head, config)


class MoeNvlinkLogitsProcessor(LogitsProcessor):
    """vLLM's logits processor; it uses `draft_head` if a draft has set it."""

    draft_head: DraftHead | None = None

    @overrides
    def get_top_tokens(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the draft tokens `[n]` int64 of `[n, hidden]`. Collective with `draft_head`."""
        tokens: torch.Tensor
        if self.draft_head is None:
            tokens = super().get_top_tokens(lm_head, hidden_states, embedding_bias)
            return tokens
        bound = self.draft_head.next_bound()
        if bound is not None:
            return self.draft_head.tokens(
                lm_head,
                hidden_states,
                embedding_bias,
                bound,
                soft_cap=self.soft_cap,
                scale=self.scale,
            )
        # As without us, where vLLM takes the argmax of what `forward` returns. vLLM's own
        # get_top_tokens refuses a scale that is not positive; a split step accepts it.
        logits = super()._get_logits(hidden_states, lm_head, embedding_bias)
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        if self.scale != 1.0:
            logits = logits * self.scale
        tokens = logits.argmax(dim=-1)
        return tokens

    @overrides
    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: Any,
        embedding_bias: torch.Tensor | None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        """Return logits `[n, vocab]`; `forward` applies soft cap and scale to them.

        Collective with `draft_head`.
        """
        bound = None if self.draft_head is None else self.draft_head.next_bound()
        if bound is None or self.draft_head is None:
            logits: torch.Tensor | None = super()._get_logits(
                hidden_states, lm_head, embedding_bias, skip_gather
            )
            return logits
        return self.draft_head.logits(lm_head, hidden_states, embedding_bias, bound)


def put_in_place() -> None:
    """Register our logits processor. Local; idempotent; raises as `compat.put_in_place`."""
    compat.put_in_place(LogitsProcessor, MoeNvlinkLogitsProcessor)
