"""What the demonstration shows at the end, as text: answers side by side, and what was moved."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .formats import RecipeBytes

#: Tokens of an answer shown in the table; the verdict is about all of them.
TOKENS_SHOWN = 6


class Answers(NamedTuple):
    """What one server answered: token ids of each request, in order, and the seconds for all."""

    token_ids: list[list[int]]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests over the time until the last one was answered."""
        return sum(map(len, self.token_ids)) / self.seconds


class RankStats(NamedTuple):
    """What one rank's exchange moved since its start, over all MoE layers; sizes in bytes.

    A destination is one row put to one rank: a token goes at most once to each, however many of its
    experts live there. The `remote` counts leave out what a rank put to itself. The last two are
    what an all-gather and a reduce-scatter of the same layers would have moved for this rank.
    """

    ep_rank: int
    rounds: int
    tokens: int
    destinations: int
    remote_destinations: int
    bytes_dispatched_remote: int
    bytes_combined_remote: int
    bytes_allgather: int
    bytes_reducescatter: int


def read_stats(folder: Path) -> list[RankStats]:
    """The newest counters that the ranks of a server wrote into `folder`, ordered by rank."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
    ranks = [RankStats(**{name: rank[name] for name in RankStats._fields}) for rank in found]
    return sorted(ranks)


def wait_for_stats(folder: Path, *, quiet_s: float = 2.0, limit_s: float = 15.0) -> list[RankStats]:
    """The counters once they have not changed for `quiet_s`, or after `limit_s`.

    A running server writes them twice a second from a thread, and one that is told to stop may not
    get to write its last ones.
    """
    newest = read_stats(folder)
    end = time.monotonic() + limit_s
    quiet_since = time.monotonic()
    while time.monotonic() < min(end, quiet_since + quiet_s):
        time.sleep(0.1)
        before, newest = newest, read_stats(folder)
        if newest != before or not newest:
            quiet_since = time.monotonic()
    return newest


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The position of the first token that differs or is missing; None when all are equal."""
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def answers_table(
    prompts: Sequence[Sequence[int]],
    ours: Answers,
    theirs: Answers,
    names: tuple[str, str] = ("through moe_nvlink", "one rank"),
) -> str:
    """Each request's tokens from two servers side by side, with a verdict for each."""
    rows = [["request", "prompt", "new", *names, "verdict"]]
    pairs = zip(prompts, ours.token_ids, theirs.token_ids, strict=True)
    for number, (prompt, mine, other) in enumerate(pairs, start=1):
        at = first_difference(mine, other)
        verdict = "equal" if at is None else f"DIFFERENT from token {at + 1}"
        start = 0 if at is None else at
        row = [str(number), str(len(prompt)), str(len(mine)), _excerpt(mine, start)]
        rows.append([*row, _excerpt(other, start), verdict])
    return _table(rows)


def _excerpt(token_ids: Sequence[int], start: int) -> str:
    shown = " ".join(f"{token:3}" for token in token_ids[start : start + TOKENS_SHOWN])
    before = "... " if start else ""
    after = " ..." if len(token_ids) > start + TOKENS_SHOWN else ""
    return f"{before}{shown}{after}"


def exchange_table(ranks: Sequence[RankStats]) -> str:
    """What each rank's exchange moved to its peers, and what the collectives would have moved."""
    rows = [
        ["rank", "rounds", "tokens", "unique dest.", "to peers"]
        + ["dispatched", "combined", "all-gather", "reduce-scatter"]
    ]
    rows.extend(_stats_row(str(rank.ep_rank), rank) for rank in ranks)
    columns = list(zip(*ranks, strict=True))
    if columns:
        total = RankStats(*map(sum, columns))
        rows.append(_stats_row("all", total._replace(rounds=max(rank.rounds for rank in ranks))))
    return _table(rows)


def _stats_row(name: str, rank: RankStats) -> list[str]:
    counts = (rank.rounds, rank.tokens, rank.destinations, rank.remote_destinations)
    sizes = (
        rank.bytes_dispatched_remote,
        rank.bytes_combined_remote,
        rank.bytes_allgather,
        rank.bytes_reducescatter,
    )
    return [name, *(f"{count:,}" for count in counts), *map(human_bytes, sizes)]


def human_bytes(size: int) -> str:
    """A size in KiB or MiB with three digits or more: 5.27 MiB."""
    return f"{size / 2**10:.1f} KiB" if size < 2**20 else f"{size / 2**20:.2f} MiB"


def failures(
    prompts: Sequence[Sequence[int]],
    ours: Answers,
    theirs: Answers,
    ranks: Sequence[RankStats],
    *,
    ep_size: int,
    num_moe_layers: int,
) -> list[str]:
    """Why the demonstration failed, one sentence each; empty when it succeeded.

    Equal tokens prove nothing about the path they took, so the counters are held against the work:
    every token that the model read, in every MoE layer, must have gone through our exchange.
    """
    found = []
    pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
    different = sum(first_difference(mine, other) is not None for mine, other in pairs)
    if different:
        found.append(f"{different} of {len(pairs)} answers differ from the one-rank server's.")
    if len(ranks) != ep_size:
        found.append(f"{len(ranks)} of {ep_size} ranks wrote counters of what they exchanged.")
    # The last token of an answer is never read again.
    read = sum(len(p) + len(a) - 1 for p, a in zip(prompts, ours.token_ids, strict=True))
    exchanged = sum(rank.tokens for rank in ranks)
    if exchanged < read * num_moe_layers:
        found.append(
            f"The exchange saw {exchanged} tokens, fewer than the {read * num_moe_layers} that "
            f"{num_moe_layers} MoE layers handled: some of them took another way."
        )
    if not sum(rank.bytes_dispatched_remote for rank in ranks):
        found.append("Nothing moved from one rank to another.")
    return found


def formats_table(measured: Sequence[RecipeBytes]) -> str:
    """Bytes in dispatch by recipe, the first of which is what the others are held against."""
    rows = [["recipe", "bytes per token", "of bf16", "rows", "dispatched"]]
    rows += [
        [
            one.name,
            f"{one.per_token:,.10g}",
            f"{one.per_token / measured[0].per_token:.1%}",
            f"{one.rows:,}",
            human_bytes(one.dispatched),
        ]
        for one in measured
    ]
    return _table(rows)


def formats_failures(measured: Sequence[RecipeBytes]) -> list[str]:
    """Recipes that moved more or less than they say, one sentence each."""
    return [
        f"With {one.name} a token weighed {one.per_token:,.10g} bytes instead of {one.stated:,}."
        for one in measured
        if one.per_token != one.stated
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(f"  {line}" for line in lines)
