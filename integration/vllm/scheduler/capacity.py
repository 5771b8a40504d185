"""The options: ``additional_config["moe_nvlink"]["capacity"]``, with or without our exchange."""

from __future__ import annotations

import bisect
import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.integration.vllm import logs
from moe_nvlink_plugin.integration.vllm.backend import additional
from moe_nvlink_plugin.integration.vllm.choices import CAPACITY, KEY

from . import reports

NO_EVICT, MAX_UTILIZATION = "guaranteed_no_evict", "max_utilization"
ESTIMATE = "estimate"

#: The estimate is this quantile of the lengths of the last outputs; so many are remembered, and so
#: many must have ended before there is an estimate.
QUANTILE, REMEMBERED, FEWEST = 0.95, 1024, 32

_WHERE = f'additional_config["{KEY}"]["{CAPACITY}"]'


class Capacity(NamedTuple):
    """What a user chose.

    Attributes:
        policy: "guaranteed_no_evict": a request is admitted only if what it may still take is
            free. "max_utilization": vLLM's own rule.
        reserve: for which output a request is admitted. A number in (0, 1]: for that part of its
            max_tokens. "estimate": for as many tokens as the outputs before it had, see
            `OutputLengths`. At 1.0 nothing is ever evicted; else vLLM may evict as it does without
            us.
    """

    policy: str = NO_EVICT
    reserve: float | str = 1.0


def prepare(vllm_config: Any) -> None:
    """Check the options, and let this process's /metrics show the scheduler. Local.

    It runs in the processes that build a configuration, as servers do.

    Raises:
        ConfigError: an option is not allowed.
        UnsupportedError: vLLM would schedule this model with a class that ours does not extend.
    """
    check(vllm_config)
    reports.serve(vllm_config)


def check(vllm_config: Any) -> Capacity:
    """Return the options of a configuration that our schedulers can serve. Raises as `prepare`."""
    logs.show_through(logging.getLogger("vllm"))  # vLLM has configured its loggers again
    if vllm_config.diffusion_config is not None:
        raise UnsupportedError(
            "GuaranteedNoEvictScheduler does not extend the scheduler that vLLM has for diffusion "
            "models. Remove --scheduler-cls"
        )
    return read(vllm_config)


def read(vllm_config: Any) -> Capacity:
    """Return the choice of a configuration. Local; takes any object and None.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed; the message lists the allowed.
    """
    ours = additional(vllm_config).get(KEY)
    if ours is not None and not isinstance(ours, Mapping):
        raise ConfigError(
            f'additional_config["{KEY}"] is a {type(ours).__name__}, it must be a dict'
        )
    given = {} if ours is None else ours.get(CAPACITY, {})
    keys = ", ".join(Capacity._fields)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_WHERE} is a {type(given).__name__}, it must be a dict of {keys}")
    unknown = sorted(set(given) - set(Capacity._fields), key=str)
    if unknown:
        raise ConfigError(f"{_WHERE} has no {', '.join(map(repr, unknown))}; its keys are {keys}")
    chosen = Capacity(**given)
    if chosen.policy not in (NO_EVICT, MAX_UTILIZATION):
        raise ConfigError(
            f"{_WHERE}: policy={chosen.policy!r} is not one of {NO_EVICT}, {MAX_UTILIZATION}"
        )
    if chosen.policy == MAX_UTILIZATION and "reserve" in given:
        raise ConfigError(
            f"{_WHERE}: reserve={chosen.reserve!r} has no meaning with policy={MAX_UTILIZATION!r}, "
            f"which reserves nothing; remove it, or choose policy={NO_EVICT!r}"
        )
    number = isinstance(chosen.reserve, int | float) and not isinstance(chosen.reserve, bool)
    if chosen.reserve != ESTIMATE and not (number and 0 < float(chosen.reserve) <= 1):
        raise ConfigError(
            f"{_WHERE}: reserve={chosen.reserve!r} is no number above 0 and up to 1 (a part of "
            f"max_tokens), nor {ESTIMATE!r}"
        )
    return chosen


class OutputLengths:
    """Lengths of the last outputs, of which a new one exceeds the estimate at most one in twenty.

    That holds if new outputs are like the last `REMEMBERED` ones. The estimate is the smallest
    length that is not below `QUANTILE` of them. Aborted requests and streaming sessions do not
    count, because nobody knows how long their outputs would have become.
    """

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, num_tokens: int) -> None:
        """Note the length of an output that has ended."""
        if len(self._last) == REMEMBERED:
            del self._sorted[bisect.bisect_left(self._sorted, self._last.popleft())]
        self._last.append(num_tokens)
        bisect.insort(self._sorted, num_tokens)

    def estimate(self) -> int | None:
        """Return the estimate; None: fewer than `FEWEST` outputs have ended."""
        if len(self._sorted) < FEWEST:
            return None
        return self._sorted[math.ceil(QUANTILE * len(self._sorted)) - 1]


class Reserve:
    """Says for how many output tokens a request is admitted.

    Args:
        chosen: a part of the most that it may have, or "estimate".
    """

    def __init__(self, chosen: float | str) -> None:
        self.lengths = OutputLengths() if chosen == ESTIMATE else None
        self._part = 1.0 if isinstance(chosen, str) else float(chosen)

    def tokens(self, most: int) -> int:
        """Return the number of output tokens to reserve for, of the `most` a request may have."""
        if self.lengths is None:
            return math.ceil(self._part * most)
        estimate = self.lengths.estimate()
        return most if estimate is None else min(most, estimate)
