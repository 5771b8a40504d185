"""all_gather of all tokens, reduce_scatter of the partial rows of all of them, by torch and gloo.

What vLLM's allgather_reducescatter does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.moe_comm.options import Options

from .base import Complaints, Context, Packing, check_combined

#: Their names from torch 2.13 on, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather:
    """By whatever library the group has for the device."""

    name = "gather"
    given = (
        "tokens are quantised and packed as one row before the clock starts, and not unpacked; "
        "experts' rows are in place, zeros where a rank has no expert of a token; the sum is made "
        "in the activations' dtype"
    )

    def __init__(self, context: Context) -> None:
        self._context = context
        ep_size, hidden = context.options.ep_size, context.tokens.hidden
        self._packing = Packing(context)
        self._packed = self._packing.pack(context.tokens)
        self._gathered = self._packed.new_empty((ep_size * len(hidden), self._packing.row_bytes))
        self._partial = hidden.new_zeros((ep_size * len(hidden), hidden.shape[1]))
        self._reduced = torch.empty_like(hidden)

    def dispatch(self) -> None:
        _all_gather(self._gathered, self._packed, group=self._context.group)

    def combine(self) -> None:
        _reduce_scatter(self._reduced, self._partial, group=self._context.group)

    def check(self) -> None:
        """Every row from every rank, bit for bit; the sum within its rounding."""
        context, complaints = self._context, Complaints(self.name, self._context)
        self._gathered.zero_()
        self._reduced.fill_(float("nan"))
        self.dispatch()
        for source in range(context.options.ep_size):
            mine = slice(source * context.num_tokens, (source + 1) * context.num_tokens)
            expected = self._packing.pack(context.tokens_of(source))
            complaints.same(self._gathered[mine], expected, f"rows of rank {source}")
            parts = self._packing.unpack(self._gathered[mine])
            self._partial[mine] = self._packing.expert_rows(context.rank, parts)
        self.combine()
        check_combined(complaints, context, self._reduced, exact=False)
        complaints.raise_any()

    def close(self) -> None:
        """Nothing: its buffers go with it."""


class GlooGather(Gather):
    """On CPU ranks."""

    name = "gloo_gather"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        if options.device == "cpu":
            return None
        return "gloo moves CPU tensors; on GPUs use nccl_gather, or --device cpu"


class GlooGatherFull(GlooGather):
    """With what a layer would have to do around it."""

    name = "gloo_gather_full"
    given = "nothing but the experts' rows in place, zeros included"

    def dispatch(self) -> None:
        self._packed = self._packing.pack(self._context.tokens)
        super().dispatch()
        self._unpacked = self._packing.unpack(self._gathered)
