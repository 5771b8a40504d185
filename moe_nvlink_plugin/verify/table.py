"""Time one exchange beside what a user would take instead, ranks in turns, and print a table."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.exchange.all_to_all import MoeAllToAll
from moe_nvlink_plugin.exchange.sizes import layer_layout
from moe_nvlink_plugin.groups import all_or_none, as_group

from . import turns
from .ways import AllToAll, Batch, Gather, Ours, Way, peer_group

OURS, GATHER, ALL_TO_ALL = "moe_nvlink", "all-gather + reduce-scatter", "all-to-all"
PHASES = ("dispatch", "combine")

_READING = (
    "ours GB/s is what our dispatch carries between ranks, of the rank that sends most",
    "ours/best other compares dispatch + combine; below 1 ours takes less time",
    "rows travel as the activations are; experts are not timed, their rows are in place",
    "all-to-all first tells how many rows come, and adds up what comes back",
)


class Line(NamedTuple):
    """One row of the table; equal on all ranks.

    Attributes:
        tokens: number of tokens of each rank.
        times_us: way -> {"dispatch": us, "combine": us}: medians over the iterations of the slowest
            rank's time.
        sent_bytes: bytes that our dispatch carries to other ranks, the most of any rank.
        iterations: how often each way ran under the clock.
        notes: sentences about the whole table: ways and lines that it lacks, and why.
    """

    tokens: int
    times_us: dict[str, dict[str, float]]
    sent_bytes: int
    iterations: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bandwidth(self) -> float:
        """Our dispatch's GB/s (1e9 bytes) between ranks, of the rank that sends most."""
        return self.sent_bytes / self.times_us[OURS]["dispatch"] / 1e3

    @property
    def ratio(self) -> float | None:
        """Our dispatch and combine over those of the best other way; None: there is none."""
        sums = {way: sum(times.values()) for way, times in self.times_us.items()}
        ours = sums.pop(OURS)
        return ours / min(sums.values()) if sums else None


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    config: AllToAllConfig,
    tokens: Sequence[int],
    *,
    seconds: float,
    progress: Callable[[str], None] = lambda _what: None,
    most_bytes: int = 4 * 2**30,
) -> list[Line]:
    """Time dispatch and combine of each way. Collective; all arguments equal on all ranks.

    Each way comes first in some iterations, and has returned the right sums once before. The
    experts' part is not timed. Rows travel as config.dtype: recipe, combine, combine_scale,
    received_ids, scales_layout and max_tokens_per_rank of `config` are not used. On CPU ranks gloo
    moves the other ways' rows, on GPUs NCCL; Line.notes names a way that is missing. After an
    error the other ranks' waits end at their limits.

    Args:
        group: with a CPU backend; its timeout bounds the waits of torch's collectives.
        device: of the tensors; of a process's GPUs the current one.
        config: geometry; its timeouts bound the waits of our verbs. ep_rank differs by rank.
        tokens: numbers of tokens of a rank, each at least 1; a line for each.
        seconds: for all lines together. Each line has at least 5 iterations.
        progress: called on every rank before each line.
        most_bytes: of the exchange's workspace on a rank; larger lines are left out. The other
            ways take about three times as much beside it.

    Returns:
        The lines in the order of `tokens`, equal on all ranks.

    Raises:
        WrongResultError: names the way and the rank; the other ranks raise PeerError, which names
            them too.
        ConfigError: `tokens` is empty, or no line fits into most_bytes.
        MoeNvlinkError: what MoeAllToAll.create and the verbs raise.
        RuntimeError: torch's collective failed, for one because a rank did not come.
    """
    plain = dataclasses.replace(
        config,
        recipe=None,
        combine="bf16",
        combine_scale=1.0,
        received_ids="global",
        scales_layout="linear",
        tuning=config.choices,
    )
    kept, notes = _that_fit(plain, tokens, most_bytes)
    plain = dataclasses.replace(plain, max_tokens_per_rank=max(kept))
    peers, missing = peer_group(group, device, config)
    notes += [f"{GATHER} and {ALL_TO_ALL} left out: {missing}"] if missing else []
    whole, clock = Batch.of(plain, peers, device), turns.Clock(group, device)
    lines = []
    with MoeAllToAll.create(plain, group, device) as exchange:
        end = time.monotonic() + seconds  # what create compiles does not count
        for place, count in enumerate(kept):
            progress(f"{count} tokens a rank ({place + 1} of {len(kept)})")
            batch = whole.first(count)
            ways: dict[str, Way] = {OURS: Ours(exchange, batch)}
            if not missing:
                ways |= {GATHER: Gather(batch), ALL_TO_ALL: AllToAll(batch)}
            started = time.monotonic()
            _check(ways, batch, group)
            due = started + (end - started) / (len(kept) - place)
            samples = turns.in_turns(ways, clock, turns.iterations(ways, clock, group, due))
            exchange.synchronize()
            dist.all_reduce(samples, op=dist.ReduceOp.MAX, group=group)
            medians = samples.quantile(0.5, dim=2).tolist()
            per_way = [dict(zip(PHASES, of, strict=True)) for of in medians]
            times = dict(zip(ways, per_way, strict=True))
            sent = turns.agreed(group, dist.ReduceOp.MAX, batch.sent_bytes())[0]
            lines.append(Line(count, times, int(sent), samples.shape[2], tuple(notes)))
    if peers is not group:
        dist.destroy_process_group(peers)
    return lines


def render(lines: Sequence[Line], device: torch.device) -> str:
    """Return the table as text of at most 100 columns, its notes below it. Local.

    Args:
        lines: what measure returned, at least one.
        device: which they were measured on.
    """
    ways = list(lines[0].times_us)
    widths = [max(len(way), 19) for way in ways]
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU ranks"
    fewest, most = (of(line.iterations for line in lines) for of in (min, max))
    heads = [f"{way:>{width}}" for way, width in zip(ways, widths, strict=True)]
    verbs = [f"{'dispatch':>{width - 9}}{'combine':>9}" for width in widths]
    told = [
        f"One exchange on {machine}: us of the slowest rank, medians of {fewest} to {most} rounds",
        "  ".join(["tokens", *heads, "  ours", "     ours/"]),
        "  ".join(["a rank", *verbs, "  GB/s", "best other"]),
    ]
    for line in lines:
        pairs = [
            f"{_short(times['dispatch']):>{width - 9}}{_short(times['combine']):>9}"
            for times, width in zip(line.times_us.values(), widths, strict=True)
        ]
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        told.append(
            "  ".join([f"{line.tokens:6}", *pairs, _three_digits(line.bandwidth), f"{ratio:>10}"])
        )
    reading = _READING if ALL_TO_ALL in ways else _READING[:-1]
    for note in (*reading, *lines[0].notes):
        told += textwrap.wrap(f"note: {note}", 100, subsequent_indent="  ")
    return "\n".join(told)


def _three_digits(gb_s: float) -> str:
    return f"{gb_s:6.3f}" if gb_s < 10 else f"{gb_s:6.1f}"


def _short(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 1e5 else f"{microseconds:.0f}"


def _that_fit(
    config: AllToAllConfig, tokens: Sequence[int], most_bytes: int
) -> tuple[list[int], list[str]]:
    """Return the numbers of tokens whose workspace fits, and notes about those that do not."""
    if not tokens:
        raise ConfigError("tokens is empty; name at least one number of tokens a rank")
    recipe, needs = MoeAllToAll.check(config), {}
    for count in tokens:
        large = dataclasses.replace(config, max_tokens_per_rank=count)
        needs[count] = layer_layout(large, recipe).total_bytes
    kept = [count for count in tokens if needs[count] <= most_bytes]
    left_out = [count for count in tokens if needs[count] > most_bytes]
    if not kept:
        raise ConfigError(
            f"none of {list(tokens)} tokens a rank fits: the smallest workspace takes "
            f"{min(needs.values())} bytes and most_bytes={most_bytes}; raise most_bytes or name "
            "fewer tokens"
        )
    if not left_out:
        return kept, []
    least = min(needs[count] for count in left_out)
    return kept, [
        f"{', '.join(map(str, left_out))} tokens a rank left out: the workspace would take "
        f"{least / 2**20:.0f} MiB or more, the limit is {most_bytes / 2**20:.0f} MiB"
    ]


def _check(ways: Mapping[str, Way], batch: Batch, group: dist.ProcessGroup) -> None:
    """Run each way once and hold its sums to the experts'. Collective; raises on every rank."""
    ranks = as_group(group, batch.config.timeout_s or 0.0)
    for name, way in ways.items():
        way.dispatch()
        way.run_experts()
        judge = functools.partial(batch.check, name, way.combine())
        all_or_none(ranks, f"checking {name}", judge)
