"""Kill CPU ranks at random, bring them back, and hold every round to the reference meanwhile.

    python benchmarks/bench_deaths.py --output_file benchmarks/results/DATE-cpu-deaths.json

This process is the supervisor that a user would have: it kills a rank (SIGKILL), tells the others
which one, and starts a process in its place. The ranks that live call `mask` and repeat the round
that failed; when the new process is ready, they call `renew` and it calls `join`. Rounds follow one
another without a pause. A bit other than the reference's ends the run without a result.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.reporting import tables
from benchmarks.reporting.files import Result
from moe_nvlink_plugin import MoeAllToAll, StoreGroup
from moe_nvlink_plugin.errors import ExchangeTimeoutError, PeerError
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Seen

#: A process imports torch for this long on a busy machine, and others wait for it.
START_S = 120
_POLL_S = 0.02
#: Rounds after which all ranks wait no longer than --timeout_s: see first_timeout_s.
_FIRST_ROUNDS = 3
SHM = Path("/dev/shm")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run; see parser()."""

    deaths: int
    every: float
    ep_size: int
    tokens: int
    hidden_size: int
    timeout_s: float
    seed: int

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be run."""
        if not 2 <= self.ep_size <= 64:
            raise ValueError(f"--ep_size {self.ep_size} is not between 2 and 64")
        if not 1 <= self.deaths <= 10_000:
            raise ValueError(f"--deaths {self.deaths} is not between 1 and 10000")
        if not 0 <= self.every <= 3600:
            raise ValueError(f"--every {self.every} is not between 0 and 3600")
        if not 0 < self.timeout_s <= 60:
            raise ValueError(f"--timeout_s {self.timeout_s} is not between 0 and 60")

    @property
    def case(self) -> Case:
        """The layer: four experts of each rank, of which a token has three."""
        return Case(
            name="deaths",
            tokens=(self.tokens,) * self.ep_size,
            num_experts=4 * self.ep_size,
            top_k=3,
            hidden_size=self.hidden_size,
            capacity=self.tokens,
            timeout_s=self.timeout_s,
        )


class Rank:
    """One process in its place, from its entrance until it is killed or told to stop.

    Attributes:
        step: number of the round; its inputs depend on nothing else. Equal on all ranks.
        generation: how often the ranks have changed by `renew`.
        deaths: how many deaths this rank has gone on after.
    """

    def __init__(self, place: int, port: int, options: Options, generation: int, deaths: int):
        limit = datetime.timedelta(seconds=START_S)
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        self.place, self.options, self.case = place, options, options.case
        self.generation, self.deaths, self.step = generation, deaths, 0
        self.layer = self._enter()
        self._back_from, self._rounds_to_serve = -1, _FIRST_ROUNDS

    def _enter(self) -> MoeAllToAll:
        places = tuple(range(self.options.ep_size))
        config = dataclasses.replace(
            self.case.config(self.place), places=places, ranks_may_leave=False
        )
        if self.generation == 0:
            return MoeAllToAll.create(config, self._group())
        self.store.set(f"comes/{self.generation}", "")
        self.step = int(self.store.get(f"renewal/{self.generation}"))
        (layer,) = MoeAllToAll.join([config], self._group())
        return layer

    def _group(self) -> StoreGroup:
        name = f"generation {self.generation}"
        return StoreGroup(self.store, name, self.place, self.options.ep_size)

    def serve(self) -> None:
        """Run rounds until all ranks stop together."""
        while not self._is_due("stop"):
            if self._is_due(f"renewal/{self.generation + 1}"):
                self._renew()
            try:
                self._round()
            except (ExchangeTimeoutError, PeerError):
                self._go_on_without_the_dead()
        self.layer.close()

    def _is_due(self, what: str) -> bool:
        """Return whether the step has come at which all ranks do `what`.

        The first of them chooses it, two steps on: nobody can end a step that it has not begun.
        """
        is_asked = self.place == min(self.layer.places) and self.store.check([f"{what}/asked"])
        if is_asked and not self.store.check([what]):
            self.store.set(what, str(self.step + 2))
        return self.store.check([what]) and self.step >= int(self.store.get(what))

    def _renew(self) -> None:
        self.generation += 1
        start = time.monotonic()
        self.layer.renew(self._group(), tuple(range(self.options.ep_size)))
        took, self._rounds_to_serve = time.monotonic() - start, _FIRST_ROUNDS
        self.store.set(f"renewed/{self.generation}/{self.place}", str(took))

    def _round(self) -> None:
        places = self.layer.places
        tokens = tuple(
            (self.step + place) % (self.options.tokens + 1) if place in places else 0
            for place in range(self.options.ep_size)
        )
        absent = tuple(place for place in range(self.options.ep_size) if place not in places)
        case = dataclasses.replace(self.case, tokens=tokens, left_out=absent)
        inputs = cases.make_inputs(case, tokens, seed=self.options.seed + self.step)
        seen = cases.run_round(self.layer, inputs[self.place])
        if self._back_from >= 0:
            self.store.set(f"back/{self._back_from}/{self.place}", str(time.monotonic()))
            self._back_from = -1
        self._check(case, inputs, seen)
        self.store.add("rounds", 1)
        self.step += 1
        self._rounds_to_serve -= 1
        if self._rounds_to_serve == 0:
            self.store.set(f"serves/{self.generation}/{self.place}", "")

    def _check(self, case: Case, inputs: list[cases.Inputs], seen: Seen) -> None:
        """Raise AssertionError if a bit of this rank's sums is another one.

        Experts compute with every row that arrives, so rows are checked by whom they belong to.
        """
        among = cases.among_active(case, inputs)[self.place]
        sums = compare.expected_combined(case, among, self.place)
        what = f"rank {self.place}, step {self.step}: combined"
        compare.assert_same_bits(compare.one_nan(seen.combined), compare.one_nan(sums), what)

    def _go_on_without_the_dead(self) -> None:
        """Leave out whom the supervisor has killed; repeat the first step that a rank lacks."""
        number = self.deaths
        dead = int(self.store.get(f"dead/{number}"))
        self.layer.mask(dead)
        self.store.set(f"lacks/{number}/{self.place}", str(self.step))
        lack = [int(self.store.get(f"lacks/{number}/{place}")) for place in self.layer.places]
        self.step, self._back_from = min(lack), number
        self.deaths += 1


def live(place: int, port: int, options: Options, generation: int, deaths: int) -> None:
    """Be the rank of a place: the body of a process."""
    torch.set_num_threads(1)
    Rank(place, port, options, generation, deaths).serve()


class Supervisor:
    """Starts, kills and replaces the ranks; see the module."""

    def __init__(self, options: Options) -> None:
        self.options, self.generation = options, 0
        self.deaths: list[dict[str, Any]] = []
        limit = datetime.timedelta(seconds=START_S)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._context = multiprocessing.get_context("spawn")
        self._ranks = [self._start(place) for place in range(options.ep_size)]
        self._pids = [process.pid for process in self._ranks]

    def _start(self, place: int) -> Any:
        given = (place, self.store.port, self.options, self.generation, len(self.deaths))
        process = self._context.Process(target=live, args=given, daemon=True)
        process.start()
        return process

    def run(self) -> None:
        """Kill a rank every so often and bring it back; then stop all.

        Raises:
            RuntimeError: a rank has ended by itself, or did not come.
        """
        options, draw = self.options, random.Random(self.options.seed)
        self._wait_until_all_serve()
        for _death in range(options.deaths):
            self._rest(options.every * draw.uniform(0.5, 1.0))
            self._kill_and_replace(draw.randrange(options.ep_size))
        self.store.set("stop/asked", "")
        for process in self._ranks:
            process.join(START_S)
            if process.exitcode != 0:
                raise RuntimeError(f"a rank ended with {process.exitcode}: see its message")

    def _kill_and_replace(self, place: int) -> None:
        number, others = len(self.deaths), set(range(self.options.ep_size)) - {place}
        self._ranks[place].kill()
        killed = time.monotonic()
        self._ranks[place].join()
        self.store.set(f"dead/{number}", str(place))
        self.deaths.append({"place": place})
        self.generation += 1
        self._ranks[place] = self._start(place)
        self._pids.append(self._ranks[place].pid)
        back = self._wait([f"back/{number}/{other}" for other in sorted(others)])
        self._wait([f"comes/{self.generation}"])
        self.store.set(f"renewal/{self.generation}/asked", "")
        renewed = self._wait([f"renewed/{self.generation}/{other}" for other in sorted(others)])
        self.deaths[-1] |= {
            "back_s": max(float(when) - killed for when in back),
            "renewal_ms": max(1000 * float(took) for took in renewed),
        }
        self._wait_until_all_serve()

    def _wait_until_all_serve(self) -> None:
        self._wait([f"serves/{self.generation}/{n}" for n in range(self.options.ep_size)])

    def _wait(self, keys: Sequence[str]) -> list[str]:
        deadline = time.monotonic() + START_S
        while not self.store.check(list(keys)):
            self._rest(_POLL_S)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ranks have not said {', '.join(keys)} in {START_S} s")
        return [self.store.get(key).decode() for key in keys]

    def _rest(self, seconds: float) -> None:
        """Wait, and look whether all ranks live."""
        deadline = time.monotonic() + seconds
        while True:
            ended = [rank for rank, one in enumerate(self._ranks) if one.exitcode is not None]
            if ended:
                raise RuntimeError(f"ranks {ended} have ended by themselves: see their messages")
            if (left := deadline - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _POLL_S))

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._ranks:
            process.kill()
            process.join()

    def left_behind(self) -> Iterator[str]:
        """Yield the names of shared memory that the ranks' processes had."""
        for pid in self._pids:
            yield from (path.name for path in SHM.glob(f"moe_nvlink-{os.getuid()}-{pid}-*"))


def run(options: Options) -> dict[str, Any]:
    """Return the result. Raises RuntimeError if a rank fails or leaves memory behind."""
    start, supervisor = time.monotonic(), Supervisor(options)
    try:
        supervisor.run()
    finally:
        supervisor.end()
    if left := sorted(supervisor.left_behind()):
        raise RuntimeError(f"{SHM} still has {', '.join(left)}")
    return {
        "schema": 1,
        "kind": "deaths",
        "machine": common.describe_run(),
        "options": dataclasses.asdict(options),
        "measured_s": time.monotonic() - start,
        "rounds": supervisor.store.add("rounds", 0),
        "rows": supervisor.deaths,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--deaths", type=int, default=15)
    add(
        "--every", type=float, default=20.0, help="seconds from a return to the next death, at most"
    )
    add("--ep_size", type=int, default=4)
    add("--tokens", type=int, default=16, help="of a rank in a round, at most")
    add("--hidden_size", type=int, default=1024)
    add("--timeout_s", type=float, default=2.0, help="that ranks wait for one another")
    add("--seed", type=int, default=0)
    add("--output_file", type=Path, help="JSON file for the result")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    made = parser()
    given = made.parse_args(arguments)
    try:
        options = common.options_from(Options, given)
    except ValueError as error:
        made.error(str(error))
    try:
        result = run(options)
    except RuntimeError as error:
        print(f"no result: {error}", file=sys.stderr)
        return 1
    print(tables.deaths(Result(given.output_file or Path("deaths"), result)))
    if given.output_file is not None:
        common.write_json(given.output_file, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
