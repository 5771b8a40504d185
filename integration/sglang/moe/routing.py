"""SGLang's forms of top-k, as ids and weights by token, and as routes sorted by expert.

All of it is torch on shapes that depend on no value: it may be captured into a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.moe.topk import TopKOutputChecker, TritonKernelTopKOutput

from moe_nvlink_plugin.errors import UnsupportedError


class Routing(NamedTuple):
    """Where the rows of one rank go.

    Attributes:
        ids: `[num_tokens, top_k]` int32 or int64, global; -1 has no destination.
        weights: `[num_tokens, top_k]` float32.
        logits: the router's, as SGLang passes them on; None if it has none.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    logits: torch.Tensor | None


class SortedRoutes(NamedTuple):
    """Routes (a row and one of its experts) in the order of the experts.

    Attributes:
        counts: `[num_experts]` int32: routes of each expert.
        order: `[num_routes]` int32: numbers `row * top_k + k`.
        weights: `[num_routes]` float32, in that order.
    """

    counts: torch.Tensor
    order: torch.Tensor
    weights: torch.Tensor


def routing_of(topk_output: Any, num_tokens: int) -> Routing:
    """Return ids and weights of what SGLang's TopK made for so many tokens. Local; capturable.

    Raises:
        UnsupportedError: topk_output has the packed form, which does not keep weights in float32.
    """
    if TopKOutputChecker.format_is_bypassed(topk_output):
        topk_output = topk_output.to_standard()
    if TopKOutputChecker.format_is_triton_kernels(topk_output):
        return _of_sorted(topk_output, num_tokens)
    if not TopKOutputChecker.format_is_standard(topk_output):
        raise UnsupportedError(
            f"SGLang's TopK made a {type(topk_output).__name__} for this MoE layer; dispatch takes "
            "ids and weights. Choose another --moe-runner-backend (triton is one)."
        )
    return Routing(
        topk_output.topk_ids.contiguous(),
        topk_output.topk_weights.to(torch.float32).contiguous(),
        topk_output.router_logits,
    )


def sorted_routes(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> SortedRoutes:
    """Sort routes by expert, for the runner triton_kernel. Local; capturable.

    Args:
        ids: `[num_rows, top_k]`, local. A route of no expert here becomes a route of expert 0 with
            weight 0, because the runner adds up all top_k routes of a row, computed or not.
        weights: `[num_rows, top_k]`.
        num_experts: number of this rank's experts.
    """
    flat = ids.flatten().clamp(min=0).to(torch.int64)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    kept = weights.masked_fill(ids < 0, 0.0).flatten()
    return SortedRoutes(counts, order.to(torch.int32), kept[order])


def triton_kernel_output(routes: SortedRoutes, top_k: int) -> Any:
    """Return sorted routes in the form of SGLang's TopK for triton_kernel. Local; GPU only."""
    from triton_kernels.tensor import make_ragged_tensor_metadata

    return TritonKernelTopKOutput(
        a_ragged_metadata=make_ragged_tensor_metadata(routes.counts, routes.order.shape[0]),
        gather_indx=torch.div(routes.order, top_k, rounding_mode="trunc"),
        scatter_indx=routes.order,
        gate_scal=routes.weights,
        n_expts_act=top_k,
    )


def _of_sorted(topk_output: Any, num_tokens: int) -> Routing:
    """Return ids and weights by token, of routes sorted by global expert. Local; capturable.

    A batch padded for a CUDA graph has fewer routes than entries; the rest of the entries may hold
    anything.
    """
    top_k = topk_output.n_expts_act
    ends = topk_output.a_ragged_metadata.slice_sizes.to(torch.int64).cumsum(0)
    order = topk_output.scatter_indx.to(torch.int64)
    num_routes = num_tokens * top_k
    place = torch.arange(num_routes, device=order.device)
    expert = torch.searchsorted(ends, place, right=True)
    is_route = place < ends[-1]
    # Entries that are no routes go to one more place, which is cut off.
    order = order.masked_fill(~is_route, num_routes)
    ids = torch.full((num_routes + 1,), -1, dtype=torch.int64, device=order.device)
    weights = torch.zeros(num_routes + 1, dtype=torch.float32, device=order.device)
    ids.scatter_(0, order, expert)
    weights.scatter_(0, order, topk_output.gate_scal.to(torch.float32))
    shape = (num_tokens, top_k)
    return Routing(ids[:-1].view(shape).contiguous(), weights[:-1].view(shape).contiguous(), None)
