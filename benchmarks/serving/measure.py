"""Waves of requests against servers in turns, checked token by token, as throughput with spread."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks import common

#: A server is idle when it uses less than this share of one core for IDLE_WINDOW_S.
IDLE_SHARE = 0.1
IDLE_WINDOW_S = 0.15
IDLE_LIMIT_S = 10.0


class WrongTokensError(Exception):
    """A server's tokens differ from those of the one-rank server; nothing may be reported."""


class Asked(NamedTuple):
    """Prompts, and the tokens with which a one-rank server answered them; all equally long."""

    prompts: list[list[int]]
    expected: list[list[int]]


class Server(Protocol):
    """One server that is up: see servers.py."""

    name: str

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        ...

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """Tokens for prompts that are sent at once, spread over the ranks in turn."""
        ...


class Wave(NamedTuple):
    """One measurement: generated tokens per second, and what else used the cores meanwhile."""

    tokens_per_s: float
    tokens_checked: int
    own_cores: float
    other_cores: float


#: name of the server -> concurrency -> its waves, in the order of the rounds
Waves = dict[str, dict[int, list[Wave]]]


def run_wave(server: Server, asked: Asked, concurrency: int, others: Sequence[Server]) -> Wave:
    """`concurrency` requests at once, from sending them to the last answer.

    Raises:
        WrongTokensError: a token is not the one-rank server's.
    """
    prompts, expected = asked.prompts[:concurrency], asked.expected[:concurrency]
    own, other = [server.pids], [one.pids for one in others]
    before = (_cpu_s(own), _cpu_s(other))
    started = time.perf_counter()
    answers = server.answer(prompts, len(expected[0]))
    seconds = time.perf_counter() - started
    after = (_cpu_s(own), _cpu_s(other))
    check(server.name, answers, expected)
    tokens = sum(map(len, answers))
    own_cores, other_cores = ((b - a) / seconds for a, b in zip(before, after, strict=True))
    return Wave(tokens / seconds, tokens, own_cores, other_cores)


def check(name: str, answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """Raises WrongTokensError at the first answer that differs, with its first token that does."""
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        if list(mine) != list(theirs):
            pairs = zip(mine, theirs, strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))
            raise WrongTokensError(
                f"{name}: request {number} differs from the one-rank server's answer from token "
                f"{at + 1} of {len(theirs)} on; with {len(expected)} requests at once"
            )


def interleave(
    servers: Sequence[Server],
    asked: Asked,
    concurrencies: Sequence[int],
    rounds: int,
    progress: Callable[[str], None],
) -> Waves:
    """One unmeasured, checked wave each, then `rounds` of them, the servers taking turns."""
    by_name = {server.name: server for server in servers}
    waves: Waves = {name: {c: [] for c in concurrencies} for name in by_name}
    for concurrency in concurrencies:
        for number in range(-1, rounds):
            for name in common.order_of(list(by_name), number):
                server = by_name[name]
                others = [one for one in servers if one is not server]
                for other in others:
                    wait_until_idle(other)
                wave = run_wave(server, asked, concurrency, others)
                if number >= 0:
                    waves[name][concurrency].append(wave)
                progress(f"{name}, {concurrency} at once: {wave.tokens_per_s:.0f} tokens/s")
    return waves


def wait_until_idle(server: Server) -> None:
    """Data-parallel ranks go on for some steps after their last request; returns when they rest.

    Returns after IDLE_LIMIT_S in any case: what an idle server uses is in the result.
    """
    deadline = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < deadline:
        before = _cpu_s([server.pids])
        time.sleep(IDLE_WINDOW_S)
        if _cpu_s([server.pids]) - before < IDLE_SHARE * IDLE_WINDOW_S:
            return


def _cpu_s(groups: Sequence[Sequence[int]]) -> float:
    return sum(cpu_seconds(pid) for pids in groups for pid in pids)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its threads so far; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    # One value has no quartiles but itself.
    several = [*values, *values] if len(values) == 1 else values
    low, _middle, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": statistics.median(values), "q25": low, "q75": high}


def rows_of(waves: Waves) -> list[dict[str, Any]]:
    """One row per server and concurrency."""
    return [
        {
            "backend": name,
            "concurrency": concurrency,
            "decode_tokens_per_s": spread([wave.tokens_per_s for wave in taken]),
            "tokens_checked": sum(wave.tokens_checked for wave in taken),
            "cores_used": statistics.median(wave.own_cores for wave in taken),
            "cores_used_by_idle_servers": max(wave.other_cores for wave in taken),
        }
        for name, by_concurrency in waves.items()
        for concurrency, taken in by_concurrency.items()
    ]


def ratios_of(waves: Waves, ours: str) -> dict[str, dict[str, dict[str, float]]]:
    """By peer and concurrency: our throughput over the peer's, round by round, with spread."""
    return {
        peer: {
            str(concurrency): spread(
                [
                    mine.tokens_per_s / theirs.tokens_per_s
                    for mine, theirs in zip(waves[ours][concurrency], taken, strict=True)
                ]
            )
            for concurrency, taken in by_concurrency.items()
        }
        for peer, by_concurrency in waves.items()
        if peer != ours
    }


def ask_ranks(
    complete: Callable[[Sequence[Sequence[int]], int], list[list[int]]],
    prompts: Sequence[Sequence[int]],
    ranks: int,
) -> list[list[int]]:
    """Request i goes to rank i modulo ranks, all at once; answers in the order of the prompts.

    complete: sends prompts to a rank and returns their tokens.
    """
    shares = [list(prompts[rank::ranks]) for rank in range(ranks)]
    with ThreadPoolExecutor(max_workers=ranks) as pool:
        pending = [
            pool.submit(complete, share, rank) if share else None
            for rank, share in enumerate(shares)
        ]
        found = [iter(one.result()) if one is not None else iter(()) for one in pending]
    return [next(found[number % ranks]) for number in range(len(prompts))]
