"""Mutants that no run reports, and the axioms of the memory model do.

Strong accesses never race, so the machine reports of them only what a run reads. There a load finds
the latest store, where the model lets it find an earlier one. So of the accesses of meet that
test_mutants.py lists as redundant for that reason, programs are made here, with order and scope as
they stand in the PTX, for the evaluator of tests/litmus.
"""

from __future__ import annotations

import re

import pytest

from tests.litmus import ptx_model
from tests.litmus.program import Program
from tests.ptx.test_mutants import BY_MASK, CALLED_ONCE, GROUPS, all_mutants, reason_of
from tests.support.ptx.build import Site
from tests.support.ptx.mutants import Mutant

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

#: What meet does, by the mutants' names; an entry has two words of a mask, and a number.
GONE = r"leave_entry: store_\w+\(entry \+ kRankMaskWords, 0\)"
MASK_LEFT = r"leave_entry: store_\w+\(entry \+ word, .* \({} of 2\)"
NUMBER_LEFT = r"leave_entry: store_\w+\(entry \+ kRankMaskWords, args\.number\)"
#: The first look, which finds the number, or one after a poll.
NUMBER_SEEN = r"take_entry > wait_until_reached: .* \({} of 2\)"
MASK_TAKEN = r"take_entry: store_word\(taken \+ word, load_\w+\(entry \+ word\)\); \({} of 2\)"
SEEN_AGAIN = r"take_entry: .*while \(load_\w+\(cell\) != seen\)"

#: Outcomes that must be impossible.
Stale = tuple[dict[str, int | str], ...]


class Meeting:
    """Instructions of meet as its table of sites has them now."""

    def __init__(self, every: list[Mutant]) -> None:
        self._sites = {each.where: each.site for each in every}

    def leave(self, number: int, mask: tuple[int, int]) -> str:
        """A rank brings its mask to a meeting."""
        return "; ".join(
            (
                self._access(GONE, "number, 0"),
                self._access(MASK_LEFT.format(1), f"first, {mask[0]}"),
                self._access(MASK_LEFT.format(2), f"second, {mask[1]}"),
                self._access(NUMBER_LEFT, f"number, {number}"),
            )
        )

    def take(self, look: int) -> str:
        """A peer takes it at meeting 1, whose number it finds at its first or at a later look."""
        return "; ".join(
            (
                self._access(NUMBER_SEEN.format(look), "seen=1, number"),
                self._access(MASK_TAKEN.format(1), "one, first"),
                self._access(MASK_TAKEN.format(2), "two, second"),
                self._access(SEEN_AGAIN, "again=1, number"),
            )
        )

    def _access(self, place: str, operands: str) -> str:
        (site,) = (self._sites[where] for where in self._sites if re.search(place, where))
        return f"{_operation(site)} {operands}"


def _operation(site: Site) -> str:
    return f"{ {'load': 'ld', 'store': 'st'}[site.kind] }.{site.order}.{site.scope}"


WAIT = "griddepcontrol.wait"


def row_before_zeros(meeting: Meeting, look: int) -> tuple[str, Stale]:
    """P13: rank 1's broken round stores a row at rank 0, which clears it after the meeting."""
    text = f"""
        gpu1.k0.cta0.t0: {WAIT}; st.weak row, 5
        gpu1.k1.cta0.t0: {WAIT}; {meeting.leave(1, (3, 4))}
        gpu0.k0.cta0.t0: {WAIT}; {meeting.take(look)}
        gpu0.k1.cta0.t0: {WAIT}; st.weak row, 0
    """
    return text, ({"row": 5},)


def mask_of_another_call(meeting: Meeting, look: int) -> tuple[str, Stale]:
    """Rank 0 calls again with another mask while rank 1 takes that of the first call."""
    text = f"""
        gpu0.k0.cta0.t0: {WAIT}; {meeting.leave(1, (3, 4))}
        gpu0.k1.cta0.t0: {WAIT}; {meeting.leave(2, (5, 6))}
        gpu1.k0.cta0.t0: {WAIT}; {meeting.take(look)}
    """
    return text, ({"one": 5}, {"two": 6})


PROGRAMS = [(make, look) for make in (row_before_zeros, mask_of_another_call) for look in (1, 2)]


def findings(meeting: Meeting) -> list[str]:
    """What the model allows of meet as it is now, and the protocol does not."""
    found = []
    for make, look in PROGRAMS:
        text, stale = make(meeting, look)
        program = Program(text)
        assert program.reachable(), text
        found += [f"{outcome} in\n{text}" for outcome in stale if program.allows(**outcome)]
        found += [f"a race in\n{text}"] if program.race() else []
    return found


@pytest.fixture(scope="module")
def every() -> list[Mutant]:
    """All of meet."""
    return all_mutants(GROUPS["meet"]())


@pytest.mark.parametrize("axioms", ["all", "without No-thin-air"])
def test_nothing_is_found(
    axioms: str, every: list[Mutant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No verdict hangs on what counts as a dependency, nor is there a mixed-size race."""
    if axioms != "all":
        monkeypatch.setattr(ptx_model, "AXIOMS", ptx_model.AXIOMS - {"No-thin-air"})
    meeting = Meeting(every)
    assert not findings(meeting)
    assert not any(Program(make(meeting, look)[0]).mixed_size_race() for make, look in PROGRAMS)


def test_mutants_that_no_run_reports(every: list[Mutant]) -> None:
    left = [each for each in every if reason_of(each) in (BY_MASK, CALLED_ONCE)]
    assert {reason_of(each) for each in left} == {BY_MASK, CALLED_ONCE}
    for mutant in left:
        with mutant.applied():
            assert findings(Meeting(every)), mutant


def test_a_number_that_stays_is_noticed(every: list[Mutant]) -> None:
    """An entry is written anew while its number stands there."""
    text, stale = mask_of_another_call(Meeting(every), 1)
    stays = re.sub(r"st\.\w+\.\w+ number, 0; ", "", text)
    assert stays != text
    assert any(Program(stays).allows(**outcome) for outcome in stale)
