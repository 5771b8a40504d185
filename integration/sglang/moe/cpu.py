"""The standard form on CPU ranks: one row per local choice, each with one expert.

The receive buffer has room for every rank's capacity, and is mostly empty. SGLang's native CPU
experts compute every row they are given, and break on -1, on an expert that a row names twice and
on a batch without rows. So they get a row for each choice of an expert of this rank, with top_k 1
and weight 1. Weights are applied here, and rows of one token added up, in fp32: in the order of
SGLang's experts, which round each row once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.moe.token_dispatcher.base import CombineInputFormat
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from moe_nvlink_plugin.errors import UnsupportedError

from .base import MoeNvlinkDispatcher, Round


class _Routes(NamedTuple):
    """The local choices of a round, in the order of the rows.

    Attributes:
        slots: `[num_rows]`: the filled slots of the receive buffer.
        weights: `[num_rows, top_k]` float32.
        chosen: `[num_rows, top_k]` bool, with as many True as rows were handed out.
    """

    slots: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor


class CpuDispatcher(MoeNvlinkDispatcher):
    """Copies the chosen rows out of the workspace, and their sums back into its slots."""

    combine_format = CombineInputFormat.STANDARD

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.apply_router_weight_on_input:
            raise UnsupportedError(
                "SGLang's experts for a CPU do not serve a model that weights the experts' input "
                "(apply_router_weight_on_input). Serve it on a GPU."
            )
        super().__init__(config, *args, **kwargs)
        self._routes: _Routes | None = None

    def _hand_out(self, current: Round) -> StandardDispatchOutput:
        received = current.received
        slots = _filled(received.recv_counts, received.metadata.max_tokens)
        ids, weights = received.topk_ids[slots], received.topk_weights[slots]
        chosen = self._is_local(ids)
        self._routes = _Routes(slots, weights, chosen)
        scales = None if received.scales is None else received.scales[slots]
        rows, _ = self._format.receive(
            received.hidden_states[slots], scales, weights, self._experts
        )
        routed = rows.repeat_interleave(chosen.sum(1), dim=0)
        experts = (ids[chosen] - self._first).unsqueeze(1)
        if not len(routed):  # a batch without rows is an error of the experts
            routed, experts = rows.new_zeros(1, rows.shape[1]), experts.new_zeros(1, 1)
        weight = torch.ones(experts.shape, dtype=torch.float32)
        topk_output = StandardTopKOutput(weight, experts, current.routing.logits)
        return StandardDispatchOutput(routed, None, topk_output)

    def _bound_of_this_step(self) -> int:
        # The experts get filled rows alone, so a smaller bound would save little, and SGLang's
        # number was read in its CUDA path only.
        return int(self._exchange.config.max_tokens_per_rank)

    def _partial_rows(self, rows: torch.Tensor, current: Round) -> torch.Tensor:
        assert self._routes is not None
        (slots, weights, chosen), self._routes = self._routes, None
        region = self._combine_input(current)
        weighted = torch.zeros(*chosen.shape, region.shape[1], dtype=torch.float32)
        weighted[chosen] = rows[: int(chosen.sum())].float() * weights[chosen].unsqueeze(1)
        region[slots] = weighted.sum(1).to(region.dtype)
        return region


def _filled(recv_counts: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Return `[num_rows]` int64: the slots of the rank-major buffers that hold a row. Local."""
    counts = recv_counts.tolist()
    starts = range(0, max_tokens * len(counts), max_tokens)
    slots = [torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
    return torch.cat(slots)
