"""moe-nvlink top: which ranks of a running model the others wait for, from servers' metrics."""

from __future__ import annotations

import http.client
import math
import re
import sys
import time
import urllib.error
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moe_nvlink_plugin.errors import ConfigError, PeerError

from .rank_server import DIRECT

_TIMEOUT_S = 10.0
#: Ranks have fewer; int() refuses thousands.
_MOST_DIGITS = 10
#: One sample of ours as prometheus_client writes it: no label of ours has a quote or a comma.
_SAMPLE = re.compile(r"^moe_nvlink_(\w+)_total\{([^}]*)\} (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
#: Moves a terminal's cursor to the upper left corner and clears what is below.
_HOME = "\x1b[H\x1b[J"
_COLUMNS = (
    f"{'rank':>4}  {'waited for':>10}  {'most by':>16}  {'by all':>8}  {'waits':>8}  "
    f"{'rounds/s':>8}  {'tokens/s':>9}  {'MB/s':>8}  {'faults':>6}"
)

#: Counters of one rank: (name of the metric, its peer or "") -> sum over the other labels.
Counters = dict[tuple[str, str], float]


class Look(NamedTuple):
    """Counters of all ranks at one moment, in seconds of a clock that is never set back."""

    at: float
    ranks: dict[int, Counters]


def parse(texts: Iterable[str], at: float) -> Look:
    """Return what the metrics of several servers say about our ranks. Local."""
    ranks: dict[int, Counters] = {}
    for text in texts:
        for name, text_of_labels, value in _SAMPLE.findall(text):
            labels = dict(_LABEL.findall(text_of_labels))
            rank, count = labels.get("ep_rank", ""), _number(value)
            is_ours = rank.isdecimal() and len(rank) < _MOST_DIGITS
            if not is_ours or count is None:  # another program's metric of such a name
                continue
            counters = ranks.setdefault(int(rank), {})
            key = (name, labels.get("peer", ""))
            counters[key] = counters.get(key, 0.0) + count
    return Look(at, ranks)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class _Rates(NamedTuple):
    """What ranks did between two looks, a second."""

    before: Look
    after: Look

    def of(self, rank: int, name: str, peer: int | None = None) -> float:
        """Return a rank's counter; without a peer, over all peers."""
        before, after = self.before.ranks.get(rank, {}), self.after.ranks[rank]
        more = sum(
            value - before.get(key, 0.0)
            for key, value in after.items()
            if key[0] == name and (peer is None or key[1] == str(peer))
        )
        # A server that was started again counts from 0.
        return max(more, 0.0) / (self.after.at - self.before.at)


def table(before: Look, after: Look) -> str:
    """Return the ranks as text, the rank first for which the others have waited longest. Local.

    Columns: how long the other ranks have waited for the rank, on average; which rank most; how
    long each of the others has at least; how long the rank itself has waited for others, in all.
    These are parts of the time between the looks.
    """
    if not after.ranks:
        return "no rank shows metrics of moe_nvlink yet"
    rates = _Rates(before, after)
    rows = []
    for rank in after.ranks:
        waits = {
            other: rates.of(other, "wait_seconds", rank)
            for other in sorted(after.ranks)
            if other != rank
        }
        average = sum(waits.values()) / len(waits) if waits else 0.0
        rows.append((-average, rank, _row(rates, rank, average, waits)))
    return "\n".join([_COLUMNS, *(row for _, _, row in sorted(rows))])


def _row(rates: _Rates, rank: int, average: float, waits: dict[int, float]) -> str:
    most = max(waits, key=lambda other: waits[other], default=rank)
    by = f"rank {most} {waits[most]:.1%}" if average else "-"
    faults = rates.after.ranks[rank].get(("faults", ""), 0.0)
    return (
        f"{rank:>4}  {average:>10.1%}  {by:>16}  {min(waits.values(), default=0.0):>8.1%}  "
        f"{rates.of(rank, 'wait_seconds'):>8.1%}  {rates.of(rank, 'rounds'):>8.1f}  "
        f"{rates.of(rank, 'tokens'):>9.0f}  {rates.of(rank, 'bytes') / 1e6:>8.1f}  "
        f"{faults:>6.0f}"
    )


def fetch(url: str) -> str:
    """Return the metrics of a server.

    Raises:
        ConfigError: it is no URL of a web server.
        PeerError: the server does not answer with metrics.
    """
    no_server = f"{url!r} is no URL of a server; write for example http://localhost:8000"
    if not names_a_server(url):
        raise ConfigError(no_server)
    where = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with DIRECT.open(where, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except urllib.error.HTTPError as error:
        raise PeerError(
            f"{where} answers {error.code} {error.reason}; name a server itself, such as "
            "http://localhost:8000"
        ) from error
    except ValueError as error:  # a name or a path that no request can hold, such as http://a..b
        raise ConfigError(f"{no_server}: {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise PeerError(f"{where} does not answer: {error}; is the server up?") from error
    return content.decode("utf-8", "replace")


def names_a_server(url: str) -> bool:
    """Return whether it is the URL of a web server."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or beyond 65535
        return False


def _look(urls: Sequence[str]) -> Look:
    return parse([fetch(url) for url in urls], time.monotonic())


def main(urls: Sequence[str], interval_s: float, *, once: bool) -> int:
    """Print a table every interval_s seconds until Ctrl-C, or once; return the exit code.

    Raises as `fetch`.
    """
    # A shell's >&- leaves Python no standard output.
    home = _HOME if sys.stdout and sys.stdout.isatty() and not once else ""
    try:
        before = _look(urls)
        while True:
            time.sleep(interval_s)
            after = _look(urls)
            text = table(before, after)
            moment = time.strftime("%H:%M:%S")
            print(f"{home}{moment}  {len(after.ranks)} rank(s)\n{text}", flush=True)
            if once:
                return 0
            before = after
    except KeyboardInterrupt:
        return 0
