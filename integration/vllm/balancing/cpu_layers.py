"""What vLLM's expert load balancing lacks in the MoE layers of CPU ranks.

On GPUs a kernel of vLLM turns logical ids into physical ids and counts each expert's tokens. On CPU
vLLM's function of that name returns the ids as they are. `put_in_place` replaces it.

The balancer moves row n of every parameter of a layer. vLLM's CPU experts keep packed weights.
Therefore a row must hold one whole expert, which `check_movable` finds out.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm.backend import BACKEND
from moe_nvlink_plugin.integration.vllm.moe import features

#: vLLM's kernel spreads tokens over replicas by this multiplicative hash: 2^32 / golden ratio.
_HASH = 2654435769
#: Sizes of the weights that `check_movable` packs; multiples of what any instruction set asks.
_ROWS, _COLUMNS = 64, 64


def put_in_place() -> None:
    """Make vLLM's routers map ids and count tokens on CPU, and layers check their weights.

    Local; idempotent.
    """
    routers: Any = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.router.base_router"
    )
    routers.eplb_map_to_physical_and_record = to_physical
    features.add(MovableExperts())


class MovableExperts(features.Feature):
    """Checks that vLLM's load balancer can move the experts of a CPU rank's layer.

    On CUDA ranks vLLM has checked the quant method when it created the layer.
    """

    def is_on(self, vllm_config: Any, moe_config: Any) -> bool:
        """Return whether the balancer moves the layer's experts. Local."""
        return bool(moe_config.moe_parallel_config.enable_eplb)

    def check(self, experts: Any, layer: Any) -> None:
        """Raise as `check_movable`. Local."""
        check_movable(experts, layer.layer_name)


def to_physical(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return physical ids, and count them in expert_load_view. Local.

    The choice among replicas is that of vLLM's GPU kernel: it depends on the token's row only.

    Args:
        topk_ids: `[num_tokens, top_k]` logical ids; an id outside of the range becomes -1.
        expert_load_view: `[num_physical_experts or more]` int32, to which counts are added.
        logical_to_physical_map: `[num_logical_experts, slots]`.
        logical_replica_count: `[num_logical_experts]`.
        record_enabled: one bool: whether to count.
        num_unpadded_tokens: one int: rows from there on are not counted. None: all are.

    Returns:
        `[num_tokens, top_k]` in the type of topk_ids.
    """
    num_logical = logical_replica_count.shape[0]
    is_valid = (topk_ids >= 0) & (topk_ids < num_logical)
    logical = torch.where(is_valid, topk_ids, 0).long()
    hashed = (torch.arange(topk_ids.shape[0]) * _HASH & 0xFFFFFFFF).unsqueeze(1)
    replica = hashed % logical_replica_count[logical].clamp(min=1)
    physical = torch.where(is_valid, logical_to_physical_map[logical, replica], -1)
    if record_enabled:
        rows = physical if num_unpadded_tokens is None else physical[: int(num_unpadded_tokens)]
        counts = torch.bincount(rows[rows >= 0], minlength=expert_load_view.shape[0])
        expert_load_view += counts.to(expert_load_view.dtype)
    return physical.to(topk_ids.dtype)


def check_movable(experts: Any, layer_name: str) -> None:
    """Check that a row of the experts' packed weights is one whole expert. Local.

    Args:
        experts: vLLM's experts of the layer.
        layer_name: name of the layer, for the message.

    Raises:
        UnsupportedError: it is not, or nothing is known of these experts' weights.
    """
    if isinstance(experts, CPUUnquantizedExperts) and _packs_by_expert(experts.isa):
        return
    raise UnsupportedError(
        f"--all2all-backend {BACKEND} with --enable-eplb: {type(experts).__name__} of {layer_name} "
        "packs its weights in a layout of which it is not known that experts can be moved one by "
        "one. On CPU ranks use unquantised weights or block FP8, or remove --enable-eplb."
    )


@functools.cache
def _packs_by_expert(isa: str) -> bool:
    """Pack two experts together, and the second alone; return whether its bytes are the same."""
    dtype = torch.float32 if isa == "vec" else torch.bfloat16
    both = torch.arange(2 * _ROWS * _COLUMNS).reshape(2, _ROWS, _COLUMNS).to(dtype)
    together, alone = (cpu_prepack_moe_weight(one, isa) for one in (both, both[1:].clone()))
    return torch.equal(together[1:], alone)
