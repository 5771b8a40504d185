"""vLLM's MTP drafts with a shared LM head: subclasses that know when a step begins.

A draft step is one forward of the draft and one call of its LM head. vLLM's V1 runner sometimes
runs a forward only because other ranks do (a rank without requests, a profile run, inputs that are
too long for the draft). Then it has no attention metadata and does not call the head, so our
subclass calls the head without rows. The V2 runner always calls the head.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm import envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models import ModelRegistry

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.options import MTP_LM_HEAD
from moe_nvlink_plugin.integration.vllm.all2all_manager import manager_of_ep_group
from moe_nvlink_plugin.integration.vllm.backend import BACKEND
from moe_nvlink_plugin.integration.vllm.compat import DRAFTS, Draft

from .draft_head import DraftHead, DraftHeads, Plan
from .drafts import architecture
from .logits_processor import MoeNvlinkLogitsProcessor, plan_of, refuse_unfit


class MoeNvlinkDraft:
    """Mixin for one of vLLM's draft classes.

    ``forward`` stays vLLM's, so vLLM compiles and captures the same code as without us.
    ``__call__`` is neither compiled nor captured.
    """

    _serves_idle = False
    _draft_head: DraftHead | None = None

    @overrides
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Build the draft. Collective: all ranks build theirs at the same point of start-up."""
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        processor = self._processor()
        if not isinstance(processor, MoeNvlinkLogitsProcessor):
            raise UnsupportedError(
                f"{MTP_LM_HEAD}: {type(self).__name__} has a {type(processor).__name__} for its "
                "logits instead of ours. Please report this with the command that started vLLM."
            )
        self._serves_idle = not vllm_config.use_v2_model_runner
        self._draft_head = shared_head(vllm_config, processor.org_vocab_size)
        processor.draft_head = self._draft_head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's forward; then take part in a step for which this rank has no rows."""
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._draft_head is not None and is_forward_context_available():
            context = get_forward_context()
            lm_head = self._head(kwargs.get("spec_step_idx", 0))
            self._draft_head.check(lm_head)
            self._draft_head.forward_ran(_largest_batch(context))
            if self._serves_idle and context.attn_metadata is None:
                self._draft_head.serve_idle(lm_head)
        return output

    def get_top_tokens(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Return the draft tokens `[n]` int64 of `[n, hidden]`. Collective with a shared head."""
        rows = self._normed(hidden_states, spec_step_idx)
        tokens: torch.Tensor = self._processor().get_top_tokens(self._head(spec_step_idx), rows)
        return tokens

    # Where a draft keeps its head. Every step looks it up, because vLLM replaces the head after the
    # draft has been built.

    def _processor(self) -> Any:
        raise NotImplementedError

    def _head(self, step: int) -> Any:
        raise NotImplementedError

    def _normed(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        raise NotImplementedError


class HeadInModel(MoeNvlinkDraft):
    """Draft with one ``lm_head`` for all steps; the forward ends with the norm before the head."""

    def _processor(self) -> Any:
        return self.logits_processor  # type: ignore[attr-defined]

    def _head(self, step: int) -> Any:
        return self.lm_head  # type: ignore[attr-defined]

    def _normed(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        return hidden_states


class HeadInLayer(MoeNvlinkDraft):
    """Draft with a ``shared_head`` in each layer: the norm, then the head."""

    def _processor(self) -> Any:
        return self.model.logits_processor  # type: ignore[attr-defined]

    def _shared_head(self, step: int) -> Any:
        model = self.model  # type: ignore[attr-defined]
        return model.layers[
            str(model.mtp_start_layer_idx + step % model.num_mtp_layers)
        ].shared_head

    def _head(self, step: int) -> Any:
        return self._shared_head(step).head

    def _normed(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        rows: torch.Tensor = self._shared_head(step)(hidden_states)
        return rows


def _largest_batch(context: Any) -> int | None:
    """Return the most tokens of any rank in the forward of a context; None if unknown."""
    metadata = context.dp_metadata
    return None if metadata is None else int(metadata.num_tokens_across_dp_cpu.max())


def shared_head(vllm_config: Any, vocab_size: int) -> DraftHead | None:
    """Return this worker's part in its draft's LM head. Collective; raises as DraftHeads.head."""
    manager = manager_of_ep_group(MTP_LM_HEAD)
    device = manager.pool.device

    def find_plan() -> Plan:
        return plan_of(vllm_config, vocab_size, manager.ranks.size, device)

    return manager.part(DraftHeads).head(find_plan, refuse_unfit)


def put_in_place(vllm_config: Any, device_type: str) -> None:
    """Make vLLM build our subclass of this configuration's draft. Local; idempotent.

    Raises:
        UnsupportedError: vLLM lacks the draft's class, another plugin has replaced it, or vLLM
            would replay the draft's calls from a graph.
    """
    _refuse_replayed_calls(vllm_config, device_type)
    name = architecture(vllm_config)
    ours = _subclass(_imported(DRAFTS[name]), DRAFTS[name])
    draft_config = vllm_config.speculative_config.draft_model_config
    present, _ = ModelRegistry.resolve_model_cls([name], draft_config)
    if not issubclass(present, MoeNvlinkDraft):
        if present is not ours.__bases__[1]:
            raise UnsupportedError(
                f"{MTP_LM_HEAD}: another plugin has already registered {present.__module__}."
                f"{present.__qualname__} for {name}. Disable that plugin (VLLM_PLUGINS lists the "
                f'plugins to load), or remove "{MTP_LM_HEAD}".'
            )
        ModelRegistry.register_model(name, ours)
    built = get_model_cls(draft_config)
    if not issubclass(built, MoeNvlinkDraft):
        raise UnsupportedError(
            f"{MTP_LM_HEAD}: vLLM would build {built.__qualname__} although ours is registered for "
            f"{name}. Please report this with the command that started vLLM."
        )


def _refuse_replayed_calls(vllm_config: Any, device_type: str) -> None:
    """Raise UnsupportedError for breakable graphs of the V1 runner.

    Such a graph replays what a draft's call launched, but does not call the draft.
    """
    if (
        device_type == "cuda"
        and not vllm_config.use_v2_model_runner
        and envs.VLLM_USE_BREAKABLE_CUDAGRAPH
    ):
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: {MTP_LM_HEAD} with vLLM's V1 model runner and breakable "
            "CUDA graphs: set VLLM_USE_BREAKABLE_CUDAGRAPH=0 (or VLLM_USE_V2_MODEL_RUNNER=1)."
        )


def _imported(draft: Draft) -> type:
    try:
        found: type = getattr(importlib.import_module(draft.module), draft.name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"{MTP_LM_HEAD}: this vLLM has no {draft.module}.{draft.name} ({error}). Remove "
            f'"{MTP_LM_HEAD}", which leaves the head whole.'
        ) from error
    return found


def _subclass(base: type, draft: Draft) -> type:
    mixin = HeadInLayer if draft.head_in_layer else HeadInModel

    class SharedHeadDraft(mixin, base):  # type: ignore[valid-type, misc]
        pass

    SharedHeadDraft.__name__ = SharedHeadDraft.__qualname__ = f"MoeNvlink{draft.name}"
    SharedHeadDraft.__doc__ = f"{draft.module}.{draft.name} with a shared LM head."
    return SharedHeadDraft
