"""Count the bytes of one batch from the ids of all ranks.

*logical*  tokens x min(ep_size, top_k) rows of activations and scales: the convention of the
           published figures (TensorRT-LLM's, DeepEP's). It counts the rank's own share and as many
           ranks for a token as there could be, and leaves out ids and weights.
*put*      rows that are copied: each token once for every rank that owns one of its experts, its
           own rank included; ids and weights with them.
*wire*     the put rows that go to other ranks: what a link would carry.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from moe_nvlink_plugin.exchange.sizes import combine_row, quantised_combine_rows
from moe_nvlink_plugin.plugins import find_recipe

from .options import Options
from .routers import ids_of, target_table

#: Of one (token, k): an int32 id and a float32 weight.
ID_AND_WEIGHT_BYTES = 8


class Traffic(NamedTuple):
    """What one batch moves: rows per rank, bytes per row.

    Attributes:
        logical_rows: of one rank, by the published convention.
        put_rows: per rank, the unique (token, rank) destinations of its tokens.
        wire_rows: the put rows that go to other ranks.
        dispatch_row_bytes: activations and scales.
        dispatch_extra_bytes: ids and weights.
        combine_row_bytes: a partial row, as it travels back.
    """

    logical_rows: int
    put_rows: tuple[int, ...]
    wire_rows: tuple[int, ...]
    dispatch_row_bytes: int
    dispatch_extra_bytes: int
    combine_row_bytes: int

    def logical_bytes(self, phase: str) -> float:
        """Return one rank's bytes by the published convention."""
        rows = {"dispatch": self.dispatch_row_bytes, "combine": self.combine_row_bytes}
        return float(self.logical_rows * rows.get(phase, sum(rows.values())))

    def put_bytes(self, phase: str, rank: int) -> int:
        """Return what one rank's batch has copied, ids and weights included."""
        return self.put_rows[rank] * self._row_bytes(phase)

    def mean_put_bytes(self, phase: str) -> float:
        """Return put_bytes of the mean rank."""
        return statistics.fmean(self.put_rows) * self._row_bytes(phase)

    def mean_wire_bytes(self, phase: str) -> float:
        """Return what crosses a link, of the mean rank, ids and weights included."""
        return statistics.fmean(self.wire_rows) * self._row_bytes(phase)

    def _row_bytes(self, phase: str) -> int:
        dispatch = self.dispatch_row_bytes + self.dispatch_extra_bytes
        rows = {"dispatch": dispatch, "combine": self.combine_row_bytes}
        return rows.get(phase, sum(rows.values()))  # "both"


def traffic(options: Options, tokens: int) -> Traffic:
    """Count one batch of `tokens` per rank."""
    put_rows, wire_rows = [], []
    for rank in range(options.ep_size):
        ids = ids_of(options, tokens, rank)
        table = target_table(ids, options.num_experts, options.ep_size)
        put_rows.append(int(table.sum()))
        wire_rows.append(put_rows[-1] - int(table[:, rank].sum()))
    config = options.config(0, tokens)
    recipe = find_recipe(config)
    scales = recipe.scales_row(options.hidden_size)
    row = recipe.hidden_row(options.hidden_size).row_bytes
    back = quantised_combine_rows(config).values()
    return Traffic(
        logical_rows=tokens * min(options.ep_size, options.top_k),
        put_rows=tuple(put_rows),
        wire_rows=tuple(wire_rows),
        dispatch_row_bytes=row + (0 if scales is None else scales.row_bytes),
        dispatch_extra_bytes=options.top_k * ID_AND_WEIGHT_BYTES,
        combine_row_bytes=sum(one.row_bytes for one in back) or combine_row(config).row_bytes,
    )
