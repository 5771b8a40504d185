"""Compares one row of each rank with what its sender sent, every N-th round, while a server serves.

With the option ``audit_every`` each row of a dispatch has two words more, an extra payload:

- a stamp: 0, or the number of the rank's audit, which grows, and below it that of the token;
- the checksum of the row as it travels, in one row of the rank's round; 0 in the others.

The receiver sees by the stamps that nobody wrote a slot in this round, or that a token stands in
two slots, and by the checksum wrong bytes of the audited row. Which row that is changes from audit
to audit. The words travel in every round, so a rank that audits and one that does not never misread
each other. But a row is only compared if the sender's N-th call is the receiver's too: ranks count
calls alike, because they run the same steps. A CUDA graph that has captured an N-th call audits at
each replay: stamp and row come from a number on the device. Its other calls never audit.

The checksum is over the row, its scales (in the linear layout), and, if ids travel as they are,
ids and router weights. A row that the kernels quantise is compared with that of the recipe's
`quantise`; those of nvfp4 on a GPU may differ in a bit by design, so there only stamps count.

Two whole rows of a round that have changed places are not seen: each has its own words with it.
Neither are rows that the received counts leave out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import Dispatched, MoeAllToAll, QuantisingRecipe

from .formats import Sent

logger = logging.getLogger(__name__)

#: Bytes of the extra payload: a stamp and a checksum.
AUDIT_BYTES = 16
_LATEST = torch.iinfo(torch.int64).max
#: Lower bits of a stamp: the token.
_TOKEN_BITS = 24
#: More audits of a channel than a rank sends before the host sees the turn of one that has ended.
_UNSEEN_TURNS = 1000
#: Of splitmix64, whose numbers have no pattern.
_STEP, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


class Audited(NamedTuple):
    """What a rank's audits have found; by source rank, since the exchange was made.

    Attributes:
        rows: rows that were compared.
        wrong: of these, rows with another checksum than their sender's.
        stale: audited rounds with a slot that nobody wrote in that round, or a token in two slots.
        slots: slot of the last wrong row; -1: there was none.
    """

    rows: list[int]
    wrong: list[int]
    stale: list[int]
    slots: list[int]


class Audit:
    """Sends and compares the words of one exchange; see the module.

    All its tensors are made here, outside of captures. An audited call waits for nothing and its
    shapes depend on no value, so a CUDA graph can capture it.

    Args:
        exchange: made with AUDIT_BYTES as its last extra payload.
        every: N: each N-th call of a channel is audited.
        device: where the exchange's tensors live.
    """

    def __init__(self, exchange: MoeAllToAll, every: int, device: torch.device) -> None:
        config = exchange.config
        self._exchange, self._every, self._device = exchange, every, device
        self._calls = [0] * config.num_channels
        self._is_turn = [False] * config.num_channels
        #: Whether the last round's checksums are over rows; equal on all ranks.
        self._has_rows = [False] * config.num_channels
        self._row = exchange.recipe.hidden_row(config.hidden_size)
        scales = exchange.recipe.scales_row(config.hidden_size)
        self._has_scales = scales is not None and config.scales_layout == "linear"
        self._has_routing = config.received_ids == "global"
        row_bytes = self._row.row_bytes + 8 * config.top_k
        self._factors_here = _factors(row_bytes + (scales.row_bytes if scales is not None else 0))

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        self._factors = empty(len(self._factors_here))
        self._nothing = empty(config.max_tokens_per_rank, 2)
        self._places = empty(config.max_tokens_per_rank)
        self._sources = empty(config.ep_size)
        self._turns = empty(config.num_channels)
        self._latest = empty(config.num_channels, config.ep_size)
        #: By channel: rows, wrong, stale and slots of `Audited`.
        self._found = empty(config.num_channels, 4, config.ep_size)
        self._shown = torch.zeros(
            self._found.shape, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._shown[:, 3] = -1
        self._shown_turns = torch.zeros(
            config.num_channels, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self.restore()

    def restore(self) -> None:
        """Write the tensors again, whose content may be lost. Local; not capturable."""
        self._factors.copy_(self._factors_here)
        self._nothing.zero_()
        self._places.copy_(torch.arange(len(self._places)))
        self._sources.copy_(torch.arange(len(self._sources)))
        # Later than this rank's own; if audits come less than 119 times a second, also than those
        # of a process whose place this rank has taken. In 39 bits until 2100.
        seen = int(self._shown_turns.max())
        self._turns.fill_(max(time.time_ns() >> 23, seen + _UNSEEN_TURNS if seen else 0))
        self._latest.zero_()
        self._found.copy_(self._shown)

    def restart(self) -> None:
        """Count calls from 0 again. All ranks do it together, so that they count alike. Local."""
        self._calls = [0] * len(self._calls)

    # The sender.

    def words(
        self,
        sent: Sent,
        ids: torch.Tensor,
        weights: torch.Tensor,
        is_padding: torch.Tensor | None = None,
        channel: int = 0,
    ) -> torch.Tensor:
        """Return `[num_tokens, 2]` int64: the last extra payload of a dispatch. Local; capturable.

        Args:
            sent: rows as dispatch gets them.
            ids: `[num_tokens, top_k]` integers.
            weights: `[num_tokens, top_k]` float32.
            is_padding: `[num_tokens]` bool, or None.
            channel: of the dispatch.
        """
        self._calls[channel] += 1
        self._is_turn[channel] = self._calls[channel] % self._every == 0
        self._has_rows[channel] = self._audits_rows(sent.rows)
        num_tokens = ids.shape[0]
        if not self._is_turn[channel] or num_tokens == 0:
            return self._nothing[:num_tokens]
        turn = self._turns[channel].add_(1)
        places = self._places[:num_tokens]
        is_expert = (ids >= 0) & (ids < self._exchange.config.num_experts)
        travels = is_expert.any(1)
        if is_padding is not None:
            travels = travels & ~is_padding
        # The first token from a place on that moves, among those that travel.
        order = torch.where(travels, num_tokens - (places - turn) % num_tokens, 0)
        token = order.argmax().view(1)
        checksum = self._sent_checksum(sent, ids, weights, is_expert, token)
        return torch.stack(
            [places + (turn << _TOKEN_BITS), torch.where(places == token, checksum, 0)], dim=1
        )

    def _sent_checksum(
        self,
        sent: Sent,
        ids: torch.Tensor,
        weights: torch.Tensor,
        is_expert: torch.Tensor,
        token: torch.Tensor,
    ) -> torch.Tensor:
        parts = []
        row = _select(sent.rows, token)
        scales = None if sent.scales is None else _select(sent.scales, token)
        is_finite: torch.Tensor | None = None
        if self._audits_rows(sent.rows):
            if self._is_quantised_on_the_way(sent.rows):
                is_finite = torch.isfinite(row).all()  # NaN may have other bits in the kernels
                recipe = self._exchange.recipe
                assert isinstance(recipe, QuantisingRecipe)
                scale = sent.global_scale if recipe.needs_global_scale else None
                row, scales = recipe.quantise(row, scale)
            parts.append(row)
            if self._has_scales and scales is not None:
                parts.append(scales)
        if self._audits_routing():
            known = torch.where(is_expert, ids, -1).to(torch.int32)
            parts += [_select(known, token), _select(weights, token)]
        if not parts:
            return torch.zeros(1, dtype=torch.int64, device=self._device)
        checksum = self._checksums(parts)
        return checksum if is_finite is None else torch.where(is_finite, checksum, 0)

    def _is_quantised_on_the_way(self, rows: torch.Tensor) -> bool:
        return rows.dtype != self._row.dtype

    def _audits_rows(self, rows: torch.Tensor) -> bool:
        if not self._is_quantised_on_the_way(rows):
            return True
        return not (self._exchange.recipe.name == "nvfp4" and self._device.type == "cuda")

    def _audits_routing(self) -> bool:
        # Ids of a rank that is left out travel as -1.
        everyone = len(self._exchange.places) == self._exchange.config.ep_size
        return self._has_routing and everyone

    # The receiver.

    def compared(self, received: Dispatched) -> Dispatched:
        """Compare in an N-th call; return what arrived, without the words. Local; capturable.

        Args:
            received: of the dispatch with `words`, which is complete.
        """
        *others, words = received.extra_payloads
        if self._is_turn[received.metadata.channel]:
            self._compare(received, words)
        return received._replace(extra_payloads=tuple(others))

    def _compare(self, received: Dispatched, words: torch.Tensor) -> None:
        size, bound = len(self._sources), received.metadata.max_tokens
        channel = received.metadata.channel
        stamped, sums = words.view(size, bound, 2).unbind(2)
        stamps = stamped >> _TOKEN_BITS
        # After a failure of the verb, slots hold anything.
        has_arrived = self._exchange.fault_words()[channel] == 0
        counts = torch.where(has_arrived, received.recv_counts, 0)
        filled = self._places[:bound] < counts.unsqueeze(1)
        newest = torch.where(filled, stamps, 0).amax(1)
        oldest = torch.where(filled, stamps, _LATEST).amin(1)
        latest = self._latest[channel]
        is_stale = (oldest < newest) | ((newest != 0) & (newest <= latest))
        is_stale |= self._has_doubles(stamped, filled)
        latest.copy_(torch.maximum(latest, newest))
        # Of several checksums all but one are old; the newest stamp has the row of this round.
        audited = filled & (sums != 0) & (stamps == newest.unsqueeze(1))
        place = audited.to(torch.int32).argmax(1)
        slots = place + self._sources * bound
        told = sums.gather(1, place.unsqueeze(1)).squeeze(1)
        is_compared = audited.any(1)
        found = self._found[channel]
        parts = self._received_parts(received, slots)
        if parts:
            is_wrong = is_compared & (self._checksums(parts) != told)
            found[:3].add_(torch.stack([is_compared, is_wrong, is_stale]))
            found[3].copy_(torch.where(is_wrong, slots, found[3]))
        else:
            found[2].add_(is_stale)
        self._shown[channel].copy_(found, non_blocking=True)
        self._shown_turns[channel].copy_(self._turns[channel], non_blocking=True)

    def _has_doubles(self, stamped: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        """Return `[ep_size]` bool: whether a token of the source stands in two slots. Local."""
        tokens = (stamped & (2**_TOKEN_BITS - 1)).clamp(max=stamped.shape[1] - 1)
        counted = (filled & (stamped != 0)).to(torch.int32)
        slots = torch.zeros_like(counted).scatter_add_(1, tokens, counted)
        return slots.amax(1) > 1

    def _received_parts(self, received: Dispatched, slots: torch.Tensor) -> list[torch.Tensor]:
        parts = []
        if self._has_rows[received.metadata.channel]:
            parts.append(_select(received.hidden_states, slots))
            if self._has_scales and received.scales is not None:
                parts.append(_select(received.scales, slots))
        if self._audits_routing():
            parts += [_select(received.topk_ids, slots), _select(received.topk_weights, slots)]
        return parts

    def _checksums(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `[num_rows]` int64, never 0: sums of words times odd factors of their places."""
        whole = torch.cat([_bytes(part) for part in parts], dim=1)
        if whole.shape[1] % 4 == 0:
            whole = whole.view(torch.int32)
        return (whole * self._factors[: whole.shape[1]]).sum(1) | 1

    # What it has found.

    def found(self) -> Audited:
        """Return the counters. Local; any thread; waits for no launch: the last may be missing."""
        rows, wrong, stale = self._shown[:, :3].sum(0).tolist()
        return Audited(rows, wrong, stale, self._shown[:, 3].amax(0).tolist())


class AuditReport:
    """Adds up the audits of a worker, and logs the first fault.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._has_logged = rank, False

    def snapshot(self, audits: Sequence[Audit]) -> dict[str, Any]:
        """Return keys of the counters' file. Local; waits for no launch."""
        all_found = [audit.found() for audit in audits]
        if not all_found:
            return {}
        faults = [_added(one.wrong, one.stale) for one in all_found]
        if not self._has_logged and any(map(any, faults)):
            self._has_logged = True
            self._log(all_found)
        return {
            "audited": _added(*(one.rows for one in all_found)),
            "audit_faults": _added(*faults),
        }

    def _log(self, all_found: Sequence[Audited]) -> None:
        texts = []
        for number, one in enumerate(all_found):
            for source in range(len(one.rows)):
                if one.wrong[source]:
                    texts.append(
                        f"exchange {number}: {one.wrong[source]} of {one.rows[source]} rows from "
                        f"rank {source} have other bytes than it sent, last in slot "
                        f"{one.slots[source]}"
                    )
                if one.stale[source]:
                    texts.append(
                        f"exchange {number}: in {one.stale[source]} rounds a slot of rank {source} "
                        "has no row, an old one, or that of another slot"
                    )
        logger.error(
            "The audit (audit_every) of rank %d found wrong rows; answers since then may be wrong, "
            "and the server goes on. %s. Restart it with self_check: full, and please report this.",
            self._rank,
            "; ".join(texts),
        )


def _added(*columns: Sequence[int]) -> list[int]:
    return [sum(values) for values in zip(*columns, strict=True)]


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return rows `[num_rows, ...]` of any type as `[num_rows, bytes]`."""
    return rows.contiguous().view(rows.shape[0], -1).view(torch.uint8)


def _select(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows; torch selects rows of every 8-bit type as bytes."""
    if rows.dtype.itemsize == 1:
        return rows.view(torch.uint8).index_select(0, indices).view(rows.dtype)
    return rows.index_select(0, indices)


def _factors(count: int) -> torch.Tensor:
    """Return `[count]` int64: odd numbers without a pattern, equal in every process."""
    numbers = []
    for place in range(1, count + 1):
        mixed = place * _STEP % 2**64
        mixed = (mixed ^ mixed >> 30) * _MIX % 2**64
        mixed = (mixed ^ mixed >> 27) | 1
        numbers.append(mixed - 2**64 if mixed >= 2**63 else mixed)
    return torch.tensor(numbers, dtype=torch.int64)
