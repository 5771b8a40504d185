"""Processes that join an exchange, leave it, give its memory back and die, device by name.

tests/gpu/test_comings.py runs this on "cuda", tests/kernels/exchange/test_real_path.py on "cpu".
All rounds of a process are replays of one graph, captured before the first change of ranks.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import MoeAllToAll, StoreGroup
from moe_nvlink_plugin.errors import ExchangeStateError, ExchangeTimeoutError
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case, Inputs
from tests.support import emulated, real_path, users_form

PAIR, ALL = (0, 1), (0, 1, 2)
COMES = 2
ROUNDS = 3


class Round(NamedTuple):
    """A replay: who was there, what this rank filled in, and what it got out."""

    places: tuple[int, ...]
    given: Inputs
    output: torch.Tensor


class Life:
    """One process's layer, from its entrance to its end.

    Attributes:
        seen: its replays, in order.
        addresses: of the rows that experts write, after each entrance; they must not change.
        freed: bytes of the device's memory that a release gave back; 0 on a CPU.
    """

    def __init__(self, place: int, device: str, *, small: bool) -> None:
        self.place, self.device = place, device
        self.case = users_form.of_processes(len(ALL), small=small)
        self.seen: list[Round] = []
        self.addresses: set[int] = set()
        self.freed = 0
        self.layer: MoeAllToAll
        self._static: users_form.UsersLayer
        self._replay: Any = None

    def group(self, name: str, places: Sequence[int]) -> StoreGroup:
        """The group of these places, made by each of them under this name."""
        store = dist.distributed_c10d._get_default_store()
        return StoreGroup(store, name, places.index(self.place), len(places))

    def enter(self, name: str, places: tuple[int, ...]) -> None:
        """Create the exchange, join it, or renew it: what this process has not done yet."""
        group = self.group(name, places)
        if self._replay is not None:
            self.layer.renew(group, places)
        else:
            limits: dict[str, Any] = {
                "timeout_s": users_form.DEATH_S[self.device],
                "first_timeout_s": real_path.WAIT_S[self.device],
            }
            config = dataclasses.replace(self.case.config(self.place), places=places, **limits)
            if name == "first":
                self.layer = MoeAllToAll.create(config, group, self.device)
            else:
                (self.layer,) = MoeAllToAll.join([config], group, self.device)
            self._static = users_form.UsersLayer(self.layer, self.device)
        self.addresses.add(self.layer.combine_input().data_ptr())

    def capture(self) -> None:
        """Capture a round; a round of nobody's tokens runs before it, on all ranks."""
        self._static.ids.fill_(-1)
        self._replay = real_path.replayable(self._static, self.device)

    def empty_round(self) -> None:
        """Take part in the round that runs before another rank's capture."""
        self._static.ids.fill_(-1)
        self._replay()

    def rounds(self, stage: int) -> None:
        """ROUNDS replays, the inputs of which depend on the stage."""
        case = dataclasses.replace(self.case, seed=self.case.seed + stage)
        for of_round in emulated.varying_inputs(case, ROUNDS):
            self._static.fill(of_round[self.place].to(self.device))
            self._replay()
            given, output = self._static.filled(), self._static.output.cpu().clone()
            self.layer.synchronize()
            self.seen.append(Round(self.layer.places, given, output))

    def release(self, name: str, places: Sequence[int]) -> None:
        """Give the memory back, look how much that was, and be refused a round."""
        before = _free_bytes(self.device)
        self.group(f"{name}: looked", places).all_gather_object(None)
        self.layer.release()
        self.group(f"{name}: given", places).all_gather_object(None)
        self.freed = _free_bytes(self.device) - before
        self.group(f"{name}: looked again", places).all_gather_object(None)
        with pytest.raises(ExchangeStateError, match=r"call renew\(\)"):
            self.layer.combine_input()

    def until_a_death(self) -> None:
        """Rounds outside of the graph until the newcomer has died; it is then masked."""
        inputs = emulated.varying_inputs(self.case, 1)[0][self.place].to(self.device)
        with pytest.raises(ExchangeTimeoutError) as caught:
            users_form._rounds_until_an_error(self.layer, inputs, dies=False)
        assert COMES in caught.value.ranks, caught.value
        users_form._mask(self.layer, COMES)

    def die(self) -> None:
        """Be killed while the dispatch of a round runs."""
        inputs = emulated.varying_inputs(self.case, 1)[0][self.place].to(self.device)
        self.layer.dispatch(*inputs[:3], active_ranks=self.layer.active_ranks)
        os.kill(os.getpid(), signal.SIGKILL)


class Lived(NamedTuple):
    """What a process that is alive at the end returns."""

    seen: list[Round]
    addresses: set[int]
    freed: int


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def process_stays(place: int, _size: int, device: str, small: bool) -> Lived | None:
    """Three ranks; one leaves, joins again and is killed; the two go on, in fresh memory.

    On one GPU the kernels of the two have room for a third from the beginning alone.
    """
    if place == COMES:
        _comes_twice(device, small)
        return None
    life = Life(place, device, small=small)
    life.enter("first", ALL)
    life.capture()
    life.rounds(0)
    life.layer.leave(COMES)
    life.rounds(1)
    life.enter("two", PAIR)
    life.rounds(2)
    life.release("alone", PAIR)
    life.enter("back", PAIR)
    life.rounds(3)
    life.enter("a third again", ALL)
    life.empty_round()
    life.rounds(4)
    life.until_a_death()
    life.rounds(5)
    life.enter("without the dead", PAIR)
    life.rounds(6)
    life.layer.close()
    return Lived(life.seen, life.addresses, life.freed)


def _comes_twice(device: str, small: bool) -> None:
    first = Life(COMES, device, small=small)
    first.enter("first", ALL)
    first.capture()
    first.rounds(0)
    first.layer.leave(COMES)
    first.layer.close()
    second = Life(COMES, device, small=small)
    second.enter("a third again", ALL)
    second.capture()
    second.rounds(4)
    second.die()


#: Who is there in the stages of process_stays.
STAGES = (ALL, PAIR, PAIR, PAIR, ALL, PAIR, PAIR)


def check(lives: Sequence[Lived | None], device: str, *, small: bool) -> None:
    """Every replay of the two that stay equals the oracle; memory came back; addresses stayed."""
    case = users_form.of_processes(len(ALL), small=small)
    for place in PAIR:
        life = lives[place]
        assert life is not None
        assert len(life.addresses) == 1
        assert (life.freed > 0) == (device == "cuda"), life.freed
        expected_places = [places for places in STAGES for _ in range(ROUNDS)]
        assert [round_.places for round_ in life.seen] == expected_places
        for number, round_ in enumerate(life.seen):
            _check_round(case, place, round_, f"rank {place}, replay {number}")


def _check_round(case: Case, place: int, seen: Round, what: str) -> None:
    absent = tuple(place for place in ALL if place not in seen.places)
    masked = dataclasses.replace(case, left_out=absent)
    nobodys = seen.given._replace(topk_ids=torch.full_like(seen.given.topk_ids, -1))
    everyones = [seen.given if other == place else nobodys for other in ALL]
    given = cases.among_active(masked, everyones)[place]
    expected = compare.expected_combined(case, given, place)
    compare.assert_same_bits(compare.one_nan(seen.output), compare.one_nan(expected), what)
