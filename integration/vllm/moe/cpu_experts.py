"""vLLM's CPU experts for the choices of this rank's experts only.

vLLM's CPU experts compute all top_k choices of every row that they get, and a row arrives here if
one of its choices is an expert of this rank. For choices of other ranks' experts they would compute
this rank's first expert with weight 0: with two ranks and top_k 4, half of the choices.

Their kernel accepts any top_k. So it gets one row for each choice of this rank, with top_k 1. It
groups the rows by expert itself, and it reads the weights as vLLM has packed them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def compute_local_choices(quant_method: Any) -> None:
    """Give a quant method our experts instead of vLLM's unquantised experts for CPUs. Local.

    It changes no other quant method: whether other kernels of vLLM accept such rows is not known.
    """
    chosen = getattr(quant_method, "experts_cls", None)
    if isinstance(chosen, type) and issubclass(chosen, CPUUnquantizedExperts):
        quant_method.experts_cls = of_local_choices(chosen)


class LocalChoicesMixin:
    """Mixin for vLLM's CPU experts: choices with weight 0 cost nothing."""

    _use_zentorch: bool

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        """Run vLLM's apply for each choice, and add the results of a row in float32.

        Args:
            output: `[num_rows, hidden_size]`, written.
            hidden_states: `[num_rows, hidden_size]`, of output's type.
            topk_weights: `[num_rows, top_k]`; 0 for choices of other ranks' experts.
            topk_ids: `[num_rows, top_k]` local ids.
            **kwargs: further arguments of vLLM's apply.
        """
        compute = functools.partial(super().apply, **kwargs)  # type: ignore[misc]
        top_k = topk_ids.shape[1]
        # A row with one choice has arrived for that choice. zentorch was not tried with such rows.
        if top_k == 1 or self._use_zentorch:
            compute(
                output=output,
                hidden_states=hidden_states,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
            )
            return
        choices = topk_weights.flatten().nonzero().flatten()
        rows = choices // top_k
        computed = output.new_empty(len(rows), output.shape[1])
        if len(rows):
            compute(
                output=computed,
                hidden_states=hidden_states.index_select(0, rows),
                topk_weights=topk_weights.flatten().index_select(0, choices).unsqueeze(1),
                topk_ids=topk_ids.flatten().index_select(0, choices).unsqueeze(1),
            )
        sums = torch.zeros(output.shape, dtype=torch.float32)
        output.copy_(sums.index_add_(0, rows, computed.float()))


@functools.cache
def of_local_choices(base: type[mk.FusedMoEExperts]) -> type[mk.FusedMoEExperts]:
    """Return a subclass of one of vLLM's classes that computes local choices only. Local."""
    return type(f"LocalChoices{base.__name__}", (LocalChoicesMixin, base), {"__module__": __name__})
