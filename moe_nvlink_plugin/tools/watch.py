"""moe-nvlink watch: posts `retry` to the servers of a model's ranks after a fault or a death."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from moe_nvlink_plugin.errors import ConfigError

from .rank_server import Look, State, look_at, post
from .top import names_a_server

#: Exit codes beside 0, of Ctrl-C, and 1, of a wrong argument.
RANK_0_DIED, GAVE_UP = 3, 4
#: Ranks that are healthy beside an unhealthy one may notice soon: times the patience to wait for.
_NOTICING = 5


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command; restart: words of a command in which {rank} and {url} may stand."""

    act: bool = False
    patience_s: float = 3.0
    timeout_s: float = 60.0
    attempts: int = 3
    interval_s: float = 1.0
    restart: tuple[str, ...] = ()


@dataclasses.dataclass
class _Rank:
    url: str
    state: State = State.UNCLEAR
    text: str = ""
    has_answered: bool = False
    refuses_since: float = math.inf
    gone_since: float = math.inf
    is_dead: bool = False

    def note(self, look: Look, now: float) -> None:
        self.state, self.text = look
        refuses = look.state is State.REFUSES
        self.has_answered |= self.is_up()
        self.refuses_since = min(self.refuses_since, now) if refuses else math.inf
        is_gone = refuses or look.state is State.DEAD
        self.gone_since = min(self.gone_since, now) if is_gone else math.inf

    def is_up(self) -> bool:
        return self.state in (State.HEALTHY, State.UNHEALTHY)

    def gone_for(self, now: float, fault_since: float) -> float:
        """Without a fault, a server that has never answered is one that still starts."""
        alone = self.refuses_since if self.has_answered else math.inf
        return now - min(alone, max(self.gone_since, fault_since))


@dataclasses.dataclass
class _Fault:
    """A fault that has not healed; due: when to post; targets: to which ranks, none for all."""

    since: float
    due: float
    is_death: bool = False
    attempts: int = 0
    targets: list[int] = dataclasses.field(default_factory=list)
    waits_for: list[int] = dataclasses.field(default_factory=list)


class Watch:
    """Looks at the servers of all ranks, named in rank order, and acts; now, sleep: the clock."""

    def __init__(
        self,
        urls: Sequence[str],
        options: Options,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        for url in urls:
            if not names_a_server(url):
                raise ConfigError(f"{url!r} is no URL of a server, such as http://localhost:8000")
        self._ranks = [_Rank(url.rstrip("/")) for url in urls]
        self._options, self._now, self._sleep = options, now, sleep
        self._fault: _Fault | None = None
        self._pool = ThreadPoolExecutor(len(urls))

    def run(self) -> int:
        """Watch until Ctrl-C, or until nothing can heal; return the exit code.

        Raises as `look_at`.
        """
        acts = "acts" if self._options.act else "dry run, says what --act would do"
        self._say(f"watches {len(self._ranks)} rank(s); {acts}")
        urls = [rank.url for rank in self._ranks]
        with self._pool:
            try:
                while True:
                    looks = list(self._pool.map(look_at, range(len(urls)), urls))
                    code = self._step(looks, self._now())
                    if code is not None:
                        return code
                    self._sleep(self._options.interval_s)
            except KeyboardInterrupt:
                return 0

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)

    def _step(self, looks: Sequence[Look], now: float) -> int | None:
        """Return the exit code if nothing can heal any more."""
        options, ranks = self._options, self._ranks
        for number, (rank, look) in enumerate(zip(ranks, looks, strict=True)):
            is_news = look.text != rank.text
            rank.note(look, now)
            # A dry run has left nobody out. With --act the rank stays out: see the help.
            rank.is_dead &= options.act or not rank.is_up()
            if is_news:
                self._say(f"rank {number} {look.text}{', and stays out' if rank.is_dead else ''}")
        if self._fault is None and State.UNHEALTHY in (r.state for r in ranks if not r.is_dead):
            # A server may look healthy for a moment after its engine has died.
            self._fault = _Fault(now, due=now + options.patience_s)
        since = self._fault.since if self._fault else math.inf
        for number, rank in enumerate(ranks):
            if not rank.is_dead and rank.gone_for(now, since) >= options.patience_s:
                rank.is_dead = True
                self._say(f"rank {number} is dead: it {rank.text}")
                self._fault = _Fault(min(since, now), due=now, is_death=True)
                if number == 0:
                    self._say("the group ends with rank 0: start all ranks again")
                    return RANK_0_DIED
                self._restart(number, rank.url)
        return self._treat(self._fault, now) if self._fault else None

    def _treat(self, fault: _Fault, now: float) -> int | None:
        live = [number for number, rank in enumerate(self._ranks) if not rank.is_dead]
        waits_for = [number for number in live if not self._ranks[number].is_up()]
        if waits_for != fault.waits_for and waits_for:
            self._say(f"{_names(waits_for)}: neither up nor dead yet; if one hangs, end its server")
        fault.waits_for = waits_for
        if waits_for:
            return None
        is_new_death = fault.is_death and not fault.attempts
        states = {self._ranks[number].state for number in live}
        if states == {State.HEALTHY} and not is_new_death and not fault.targets:
            self._say(f"{_names(live)}: all healthy")
            self._fault = None
        elif now >= max(fault.due, self._noticed(fault, states)):
            if fault.attempts == self._options.attempts:
                self._say(f"gives up after {fault.attempts} attempt(s): start all ranks again")
                return GAVE_UP
            self._retry(fault, fault.targets or live)
        return None

    def _noticed(self, fault: _Fault, states: set[State]) -> float:
        """Return when not to wait any more for ranks that look healthy: they would refuse."""
        waits = len(states) > 1 and not fault.attempts
        return fault.since + _NOTICING * self._options.patience_s if waits else fault.since

    def _retry(self, fault: _Fault, targets: list[int]) -> None:
        """Post to all targets at once: they wait for one another."""
        options = self._options
        fault.attempts += 1
        # Those of earlier faults too: the survivors make a new group of all others.
        dead = [number for number, rank in enumerate(self._ranks) if rank.is_dead]
        body = {"instruction": "retry", "params": {"dead_ranks": dead} if dead else {}}
        if not options.act:
            self._say(f"would post {json.dumps(body)} to {_names(targets)}")
            fault.due = math.inf
            return
        attempt = f"attempt {fault.attempts} of {options.attempts}"
        self._say(f"posts {json.dumps(body)} to {_names(targets)}, {attempt}")
        urls = [self._ranks[number].url for number in targets]
        problems = self._pool.map(lambda url: post(url, body), urls)
        fault.targets = []
        for number, problem in zip(targets, problems, strict=True):
            if problem:  # the others have taken it, and wait for this rank
                self._say(f"rank {number} did not take it: it {problem}")
                fault.targets.append(number)
        fault.due = self._now() + (options.patience_s if fault.targets else options.timeout_s)

    def _restart(self, number: int, url: str) -> None:
        """Run the command for a rank that has died, which it does once, and do not wait for it."""
        words = [
            word.replace("{rank}", str(number)).replace("{url}", url)
            for word in self._options.restart
        ]
        if not words:
            return
        self._say(f"{'runs' if self._options.act else 'would run'} {shlex.join(words)}")
        if self._options.act:
            try:  # in a session of its own: our Ctrl-C is not for the rank
                subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
            except (OSError, ValueError) as error:
                self._say(f"cannot run it: {error}")


def _names(ranks: Sequence[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"
