"""all_to_all_single of the very rows our dispatch puts, both ways, by torch and gloo or NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.moe_comm.options import Options
from benchmarks.moe_comm.routers import RankTokens

from .base import (
    Complaints,
    Context,
    Packing,
    activations,
    check_combined,
    expert_rows,
    quantised,
)


class AllToAll:
    """The favourable reading: nothing but the two transfers is timed."""

    name = "all_to_all"
    given = (
        "split sizes and index lists are known, rows quantised, picked and packed as one row, "
        "before the clock starts; not unpacked; what comes back is not added up"
    )

    @staticmethod
    def unavailable(options: Options) -> str | None:
        return None

    def __init__(self, context: Context) -> None:
        self._context = context
        self._packing = Packing(context)
        self._send, self._order = self._plan()
        self._receive = [counts[context.rank] for counts in context.gathered(self._send)]
        self._picked = self._packing.pack(context.tokens)[self._order]
        hidden = context.tokens.hidden
        self._arrived = self._picked.new_empty((sum(self._receive), self._packing.row_bytes))
        self._computed = hidden.new_zeros((sum(self._receive), hidden.shape[1]))
        self._returned = hidden.new_empty((sum(self._send), hidden.shape[1]))

    def _plan(self) -> tuple[list[int], torch.Tensor]:
        """Rows for each rank, and the tokens in the order they go: by rank."""
        table = self._context.targets(self._context.tokens.topk_ids)
        return table.sum(0).tolist(), table.T.nonzero()[:, 1]

    def dispatch(self) -> None:
        dist.all_to_all_single(
            self._arrived, self._picked, self._receive, self._send, group=self._context.group
        )

    def combine(self) -> None:
        dist.all_to_all_single(
            self._returned, self._computed, self._send, self._receive, group=self._context.group
        )

    def check(self) -> None:
        """Every row from every rank and every row that comes back, bit for bit."""
        complaints = Complaints(self.name, self._context)
        self._check_arrival(complaints)
        self._returned.fill_(float("nan"))
        self.combine()
        hidden, ids, weights = (part[self._order] for part in self._context.tokens)
        rank_of_row = torch.repeat_interleave(torch.tensor(self._send)).to(ids.device)
        received = activations(self._context.options, *quantised(self._context.options, hidden))
        expected = expert_rows(self._context.options, rank_of_row, received, ids, weights)
        complaints.same(self._returned, expected, "rows that came back")
        complaints.raise_any()

    def _check_arrival(self, complaints: Complaints) -> None:
        self._arrived.zero_()
        self.dispatch()
        start = 0
        for source, count in enumerate(self._receive):
            tokens = self._context.tokens_of(source)
            sent = self._context.targets(tokens.topk_ids)[:, self._context.rank]
            expected = self._packing.pack(RankTokens(*(part[sent] for part in tokens)))
            complaints.same(
                self._arrived[start : start + count], expected, f"rows of rank {source}"
            )
            start += count
        parts = self._packing.unpack(self._arrived)
        self._computed.copy_(self._packing.expert_rows(self._context.rank, parts))

    def close(self) -> None:
        """Nothing: its buffers go with it."""


class AllToAllFull(AllToAll):
    """What a layer would pay: routes, tells the sizes, picks, moves, unpacks; moves back, adds up.

    In torch, on the rank's compute threads; fp32 sums, rounded once.
    """

    name = "all_to_all_full"
    given = "nothing but the experts' rows in place"
    capturable = False  # split sizes come to the host in the middle, which no CUDA graph can hold

    def dispatch(self) -> None:
        context = self._context
        self._send, self._order = self._plan()
        sizes = torch.tensor(self._send, device=context.device)
        told = torch.empty_like(sizes)
        dist.all_to_all_single(told, sizes, group=context.group)
        self._receive = told.tolist()
        self._picked = self._packing.pack(context.tokens)[self._order]
        self._arrived = self._picked.new_empty((sum(self._receive), self._packing.row_bytes))
        super().dispatch()
        self._unpacked = self._packing.unpack(self._arrived)

    def combine(self) -> None:
        super().combine()
        total = torch.zeros(self._context.tokens.hidden.shape, device=self._context.device)
        total.index_add_(0, self._order, self._returned.float())
        self._sum = total.to(self._returned.dtype)

    def check(self) -> None:
        """Every row from every rank bit for bit; the sum within its rounding."""
        complaints = Complaints(self.name, self._context)
        self._check_arrival(complaints)
        self.combine()
        check_combined(complaints, self._context, self._sum, exact=False)
        complaints.raise_any()
