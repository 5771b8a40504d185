"""A rank's server, as `moe-nvlink watch` sees it: what it says of faults, and what it is told."""

from __future__ import annotations

import enum
import http.client
import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from moe_nvlink_plugin import frameworks
from moe_nvlink_plugin.errors import ConfigError

_REQUEST_S, _LONGEST = 5.0, 1 << 16
#: Asks no proxy of the environment, which would answer for a server that is gone.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError)


class State(enum.Enum):
    """What a look at a rank's server shows. DEAD: the server answers, its engine is dead."""

    HEALTHY, UNHEALTHY, DEAD, REFUSES, UNCLEAR = "healthy", "unhealthy", "dead", 1, 2


class Look(NamedTuple):
    """One look at a rank's server; text: the same for people, with what the server adds."""

    state: State
    text: str


def _ask(url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with DIRECT.open(request, timeout=_REQUEST_S) as answer:
            return answer.status, answer.read(_LONGEST)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(_LONGEST)


def look_at(rank: int, url: str) -> Look:
    """Return what a rank's server says now.

    Raises:
        ConfigError: it is the server of another rank.
    """
    try:
        # The status alone would not do: it stays what the engine said before it died.
        code, content = _ask(f"{url}/health")
        if code != 503:
            code, content = _ask(f"{url}/fault_tolerance/status")
    except _NO_ANSWER as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            return Look(State.REFUSES, "refuses connections")
        return Look(State.UNCLEAR, f"gives no answer ({reason!r:.200})")
    if code == 503:
        return Look(State.DEAD, "answers 503: its engine is dead, or not up yet")
    if code == 404:
        how = frameworks.advice(frameworks.FAULT_TOLERANCE)
        return Look(State.UNCLEAR, f"runs without fault tolerance: start it with that{how}")
    return _status(rank, url, code, content)


def _status(rank: int, url: str, code: int, content: bytes) -> Look:
    try:
        (engine,) = json.loads(content)["engines"]
        found, state = engine["id"], State(engine["status"])
        is_status = code == 200 and type(found) is int and isinstance(state.value, str)
    except (ValueError, LookupError, TypeError, RecursionError):
        is_status = False
    if not is_status:
        return Look(State.UNCLEAR, f"answers {code} and no rank's status: {content[:200]!r}")
    if found != rank:
        raise ConfigError(f"URL {rank} ({url}) is of rank {found}: name the URLs in rank order")
    notes = [f"{key}: {engine[key]!r:.200}" for key in ("fault_info", "ft_error") if key in engine]
    return Look(state, ", ".join([f"is {state.value}", *notes]))


def post(url: str, body: dict[str, Any]) -> str:
    """Return what went wrong; "" if the server took the instruction."""
    try:
        code, content = _ask(f"{url}/fault_tolerance/apply", body)
    except _NO_ANSWER as error:
        return f"gives no answer ({getattr(error, 'reason', error)!r:.200})"
    return "" if code == 202 else f"answers {code}: {content[:200]!r}"
