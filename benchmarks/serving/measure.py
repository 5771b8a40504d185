"""Send waves of requests to servers in turns, check every token, measure throughput with spread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import pandas as pd
import psutil

from benchmarks import common

#: A server is idle when it uses less than this share of one core for IDLE_WINDOW_S.
IDLE_SHARE = 0.1
IDLE_WINDOW_S = 0.15
IDLE_LIMIT_S = 10.0
#: In bf16, of a server's tokens that follow equal ones. Executed once, with 0.2B: 2 to 4 of 100
#: differed, with ours and with tensor parallelism. Rows or experts that an exchange mixes up should
#: change nearly every token.
MOST_DIFFERENT = 0.1

QUANTILES = {"median": 0.5, "q25": 0.25, "q75": 0.75}


class WrongTokensError(Exception):
    """A server's tokens differ from the expected ones; nothing may be reported."""


class Asked(NamedTuple):
    """Prompts, and the tokens with which a one-rank server answered them; all equally long.

    is_exact: every token must be equal. That holds in float32. In bf16 sums in another order, of
    another batch or of parts on two ranks, are rounded differently, and where two tokens are nearly
    as likely, another one is chosen; what follows cannot be compared. So there each answer is
    compared up to its first token that differs, and of all tokens compared, MOST_DIFFERENT may.
    """

    prompts: list[list[int]]
    expected: list[list[int]]
    is_exact: bool = True


class Processes(Protocol):
    """The processes of a server."""

    @property
    def pids(self) -> list[int]: ...


class Server(Processes, Protocol):
    """A server that is up: see servers.py."""

    name: str

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """Return tokens for prompts that are sent at once, spread over the ranks in turn."""
        ...


class Wave(NamedTuple):
    """One measurement: generated tokens per second, and what else used the cores meanwhile."""

    backend: str
    concurrency: int
    round: int
    tokens_per_s: float
    tokens_checked: int
    tokens_different: int
    own_cores: float
    other_cores: float


def run_wave(
    server: Server, asked: Asked, concurrency: int, number: int, others: Sequence[Server]
) -> Wave:
    """`concurrency` requests at once, from sending them to the last answer.

    Raises:
        WrongTokensError: a token is not the one-rank server's, where all have to be.
    """
    prompts, expected = asked.prompts[:concurrency], asked.expected[:concurrency]
    before = [cpu_seconds([server]), cpu_seconds(others)]
    started = time.perf_counter()
    answers = server.answer(prompts, len(expected[0]))
    seconds = time.perf_counter() - started
    after = [cpu_seconds([server]), cpu_seconds(others)]
    if asked.is_exact:
        check(server.name, answers, expected)
    rate = sum(map(len, answers)) / seconds
    cores = ((b - a) / seconds for a, b in zip(before, after, strict=True))
    return Wave(server.name, concurrency, number, rate, *compare(answers, expected), *cores)


def check(name: str, answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    """Raise WrongTokensError at the first answer that differs, with its first token that does."""
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        if list(mine) != list(theirs):
            pairs = zip(mine, theirs, strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(theirs)))
            raise WrongTokensError(
                f"{name}: request {number} differs from the other server's answer from token "
                f"{at + 1} of {len(theirs)} on; with {len(expected)} requests at once"
            )


def compare(answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return how many tokens come after equal tokens only, and how many of these differ."""
    checked = different = 0
    for mine, theirs in zip(answers, expected, strict=True):
        pairs = zip(mine, theirs, strict=True)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        checked += len(theirs) if at is None else at + 1
        different += at is not None
    return checked, different


def check_shares(waves: pd.DataFrame) -> None:
    """Raise WrongTokensError if more of a server's tokens differ than rounding explains."""
    for name, of in waves.groupby("backend", sort=False):
        checked, different = int(of.tokens_checked.sum()), int(of.tokens_different.sum())
        if different > MOST_DIFFERENT * checked:
            raise WrongTokensError(
                f"{name}: {different} of {checked} tokens differ from one rank's after equal "
                f"tokens; at most {MOST_DIFFERENT:.0%} may"
            )


def interleave(
    servers: Sequence[Server],
    asked: Asked,
    concurrencies: Sequence[int],
    rounds: int,
    progress: Callable[[str], None],
) -> pd.DataFrame:
    """Return waves as rows: `rounds` of each server, which take turns.

    Each server first answers a checked wave that is not measured.

    Raises:
        WrongTokensError: see Asked.
    """
    by_name = {server.name: server for server in servers}
    waves = []
    for concurrency in concurrencies:
        for number in range(-1, rounds):
            for name in common.order_of(list(by_name), number):
                server = by_name[name]
                others = [one for one in servers if one is not server]
                for other in others:
                    wait_until_idle(other)
                wave = run_wave(server, asked, concurrency, number, others)
                waves += [wave] if number >= 0 else []
                used_ms = 1000 * wave.own_cores / wave.tokens_per_s
                rate = f"{wave.tokens_per_s:.0f} tokens/s, {used_ms:.2f} ms of a core per token"
                progress(f"{name}, {concurrency} at once: {rate}")
    found = pd.DataFrame(waves, columns=Wave._fields)
    check_shares(found)
    return found


def wait_until_idle(server: Processes) -> None:
    """Wait until the ranks rest: they go on for some steps after their last request.

    Returns after IDLE_LIMIT_S in any case: what an idle server uses is in the result.
    """
    deadline = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < deadline:
        before = cpu_seconds([server])
        time.sleep(IDLE_WINDOW_S)
        if cpu_seconds([server]) - before < IDLE_SHARE * IDLE_WINDOW_S:
            return


def cpu_seconds(servers: Iterable[Processes]) -> float:
    """Return the CPU time of the servers' processes and threads so far; 0 for gone processes."""
    seconds = 0.0
    for pid in (pid for server in servers for pid in server.pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            seconds += times.user + times.system
    return seconds


def spread(values: Any) -> dict[str, float]:
    """Return median and quartiles of a series."""
    return {name: float(values.quantile(q)) for name, q in QUANTILES.items()}


def rows_of(waves: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row per server and concurrency."""
    return [
        {
            "backend": name,
            "concurrency": int(concurrency),
            "decode_tokens_per_s": spread(of.tokens_per_s),
            "tokens_checked": int(of.tokens_checked.sum()),
            "tokens_different": int(of.tokens_different.sum()),
            "cores_used": float(of.own_cores.median()),
            "cpu_ms_per_token": spread(1000 * of.own_cores / of.tokens_per_s),
            "cores_used_by_idle_servers": float(of.other_cores.max()),
        }
        for (name, concurrency), of in waves.groupby(["backend", "concurrency"], sort=False)
    ]


def ratios_of(waves: pd.DataFrame, ours: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return our throughput over each peer's, by concurrency, round by round, with spread."""
    rates = waves.set_index(["concurrency", "round", "backend"]).tokens_per_s.unstack()
    return {
        str(peer): {
            str(concurrency): spread(ratios)
            for concurrency, ratios in (rates[ours] / rates[peer]).groupby("concurrency")
        }
        for peer in rates.columns
        if peer != ours
    }
