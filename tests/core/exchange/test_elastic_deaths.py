"""A rank is stopped and replaced, wakes, its successor is killed and replaced: by processes."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pickle
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_nvlink_plugin import MoeAllToAll, StoreGroup
from moe_nvlink_plugin.errors import (
    ExchangeStateError,
    ExchangeTimeoutError,
    MoeNvlinkError,
    PeerError,
)
from moe_nvlink_plugin.exchange import elastic
from moe_nvlink_plugin.memory import workspace as workspaces
from moe_nvlink_plugin.transport import host
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case, Seen
from tests.core.exchange.test_elastic import ROUNDS, at_stage, check_round, config_of
from tests.support.long_tests import first_of
from tests.support.ranks import run_processes

CASE = Case(name="deaths", tokens=(5, 2, 7), num_experts=6, top_k=3, timeout_s=4.0)
PLACES = (0, 1, 2)
#: The place of each process: the third is stopped, the fourth killed, the fifth stays.
PLACE_OF = (0, 1, 2, 2, 2)
STOPPED, KILLED, LAST = 2, 3, 4
SHM = Path("/dev/shm")


def left_by(store: TCPStore, processes: int) -> list[str]:
    """Names of shared memory that these processes had; other tests' processes have some, too."""
    pids = [store.get(f"process{number}").decode() for number in range(processes)]
    of_each = [SHM.glob(f"moe_nvlink-{os.getuid()}-{pid}-*") for pid in pids]
    return [path.name for paths in of_each for path in paths]


class Life:
    """What one process does and sees."""

    def __init__(self, process: int, port: int, case: Case) -> None:
        limit = datetime.timedelta(seconds=100)
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        self.store.set(f"process{process}", str(os.getpid()))
        self.place, self.case = PLACE_OF[process], case
        self.seen: dict[int, list[Seen]] = {}
        self.layer: MoeAllToAll | None = None

    def enter(self, stage: str) -> MoeAllToAll:
        """Create, renew or join, with three ranks in their places."""
        group = StoreGroup(self.store, stage, self.place, len(PLACES))
        config = config_of(self.case, self.place, PLACES)
        if self.layer is not None:
            self.layer.renew(group, PLACES)
        elif stage == "first":
            self.layer = MoeAllToAll.create(config, group)
        else:
            (self.layer,) = MoeAllToAll.join([config], group)
        return self.layer

    def rounds(self, stage: int, places: tuple[int, ...] = PLACES) -> None:
        """Two rounds, the inputs of which the stage's number decides."""
        assert self.layer is not None
        assert self.layer.places == places
        numbers = [at_stage(self.case, stage, n, places)[1][self.place] for n in range(ROUNDS)]
        self.seen[stage] = [cases.run_round(self.layer, inputs) for inputs in numbers]


def _as_stopped(life: Life) -> str:
    """Take part at first; be stopped in a dispatch; what comes after the stop, until an error."""
    layer = life.enter("first")
    life.rounds(0)
    inputs = at_stage(life.case, 9, 0, PLACES)[1][life.place]
    life.store.set("pid", str(os.getpid()))
    try:
        for _round in range(100):  # alone: it waits until it is stopped, or for nobody afterwards
            cases.run_round(layer, inputs)
    except MoeNvlinkError as error:
        return type(error).__name__
    raise AssertionError("no round had an end")


def _as_survivor(life: Life) -> list[str]:
    life.enter("first")
    life.rounds(0)
    pid = int(life.store.get("pid"))
    if life.place == 0:
        os.kill(pid, signal.SIGSTOP)
        life.store.set("stopped", "")
    life.store.get("stopped")
    layer = life.enter("second")  # no mask() before
    life.rounds(1)
    if life.place == 0:
        os.kill(pid, signal.SIGCONT)
    life.store.get("woken")  # set by the parent, when that process has ended
    life.rounds(2)
    life.store.set(f"ready{life.place}", "")
    named = []
    try:  # the fourth process has been killed
        life.rounds(3)
    except ExchangeTimeoutError as error:
        named = list(error.ranks)
    assert named == [2], "a fault of fresh memory must reach the host"
    layer.mask(2)
    life.rounds(4, (0, 1))
    life.enter("third")
    life.rounds(5)
    return []


def _as_killed(life: Life) -> None:
    life.enter("second")
    life.rounds(1)
    life.store.get("woken")
    life.rounds(2)
    for place in (0, 1):
        life.store.get(f"ready{place}")
    life.store.set("seen", pickle.dumps(life.seen).hex())
    os.kill(os.getpid(), signal.SIGKILL)


def _as_last(life: Life) -> None:
    life.enter("third")
    life.rounds(5)


_ROLES: tuple[Callable[[Life], object], ...] = (
    _as_survivor,
    _as_survivor,
    _as_stopped,
    _as_killed,
    _as_last,
)


def _live(process: int, _size: int, port: int, case: Case) -> tuple[object, dict[int, list[Seen]]]:
    life = Life(process, port, case)
    said = _ROLES[process](life)
    if process == STOPPED:
        life.store.set("woken", "")
    if life.layer is not None:
        life.layer.close()
    return said, life.seen


@pytest.mark.parametrize("small", first_of([True, False]), ids=["small", "large"])
def test_a_rank_wakes_when_it_has_been_replaced(small: bool, tmp_path: Path) -> None:
    """Its stores change nothing; a kill after the join is noticed; a third process takes over."""
    case = dataclasses.replace(CASE, small=small)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lives = run_processes(
        len(PLACE_OF), _live, tmp_path, store.port, case, killed=(KILLED,), meets=False
    )
    assert lives[STOPPED][0] in ("ExchangeTimeoutError", "PeerError")
    assert left_by(store, len(PLACE_OF)) == []
    seen_by = {p: life[1] for p, life in enumerate(lives) if life is not None}
    seen_by[KILLED] = pickle.loads(bytes.fromhex(store.get("seen").decode()))
    of_stage = {
        0: (0, 1, STOPPED),
        1: (0, 1, KILLED),
        2: (0, 1, KILLED),
        4: (0, 1),
        5: (0, 1, LAST),
    }
    for stage, processes in of_stage.items():
        places = PLACES if stage != 4 else (0, 1)
        for number in range(ROUNDS):
            masked, inputs = at_stage(case, stage, number, places)
            seen = {PLACE_OF[p]: seen_by[p][stage][number] for p in processes}
            check_round(masked, inputs, seen)


# A rank is killed in the middle of a renewal.

#: Name of a step -> the module that runs it under all_or_none, what that calls it, and whether the
#: rank dies before its own part, or after it and before it tells the others.
STEPS: dict[str, tuple[Any, str, str]] = {
    "stopped": (elastic, "ending the rounds", "after"),
    "unmapped": (host, "reserving addresses", "after"),
    "created": (host, "creating shared memory", "after"),
    "shared": (host, "mapping shared memory", "before"),
    "mapped": (host, "mapping shared memory", "after"),
    "initialised": (workspaces, "initialising the workspace", "after"),
    "at the last agreement": (elastic, "loading the kernels", "after"),
}
DOOMED = 2


def die_at(step: str) -> None:
    """Let this process be killed there."""
    module, wanted, when = STEPS[step]
    plain = module.all_or_none

    def all_or_none(group: Any, what: str, body: Callable[[], Any]) -> Any:
        def part() -> Any:
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            body()
            os.kill(os.getpid(), signal.SIGKILL)

        return plain(group, what, part if what == wanted else body)

    module.all_or_none = all_or_none


class Watching(StoreGroup):
    """Gives up on the doomed rank when its process has ended, not after the store's long limit."""

    def __init__(self, store: Any, name: str, rank: int, size: int, pidfd: int) -> None:
        super().__init__(store, name, rank, size)
        self._pidfd, self._patient, self._hasty = pidfd, store, store.clone()
        self._hasty.set_timeout(datetime.timedelta(milliseconds=100))

    def _value_of(self, rank: int, step: str) -> Any:
        said = [f"{step}/{rank}"]
        while rank == DOOMED and not self._patient.check(said):
            if select.select([self._pidfd], [], [], 0.01)[0]:
                # It may have spoken just before its end.
                self._store = self._patient if self._patient.check(said) else self._hasty
                break
        return super()._value_of(rank, step)


def _renew_with_the_doomed(
    place: int, _size: int, port: int, case: Case, step: str
) -> dict[int, list[Seen]]:
    life = Life(place, port, case)
    layer = life.enter("first")
    life.rounds(0)
    if place == DOOMED:
        life.store.set("pid", str(os.getpid()))
        die_at(step)
        life.enter("fatal")
        raise AssertionError("nothing has killed the rank")
    pidfd = os.pidfd_open(int(life.store.get("pid")))
    before = layer.stats()
    with pytest.raises(PeerError, match=f"rank {DOOMED} "):
        layer.renew(Watching(life.store, "fatal", place, len(PLACES), pidfd), PLACES)
    if step != "stopped":
        with pytest.raises(ExchangeStateError, match=r"has no memory.*call renew\(\) again"):
            cases.run_round(layer, at_stage(case, 0, 0, PLACES)[1][place])
    assert layer.stats().rounds == before.rounds
    layer.renew(StoreGroup(life.store, "without it", place, 2), (0, 1))
    life.rounds(1, (0, 1))
    assert layer.stats().rounds == before.rounds + ROUNDS
    layer.close()
    return life.seen


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_is_killed_in_the_middle_of_a_renewal(step: str, tmp_path: Path) -> None:
    """The others learn of it at that step, and renew without it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lives = run_processes(
        len(PLACES),
        _renew_with_the_doomed,
        tmp_path,
        store.port,
        CASE,
        step,
        killed=(DOOMED,),
        meets=False,
    )
    assert left_by(store, len(PLACES)) == []
    for number in range(ROUNDS):
        masked, inputs = at_stage(CASE, 1, number, (0, 1))
        check_round(masked, inputs, {place: lives[place][1][number] for place in (0, 1)})
