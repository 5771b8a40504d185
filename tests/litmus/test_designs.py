"""What lies in one word of the kernels and what in two, as litmus programs.

The kernels' own text is not here: tests/ptx/test_mutants.py runs it, and tests/ptx/test_axioms.py
makes programs of what no run can tell.
"""

from __future__ import annotations

import pytest

from tests.litmus.program import Program


def test_count_and_epoch_in_one_word_arrive_together() -> None:
    one = Program(
        """
        gpu0.cta0.t0: st.release.sys count|epoch, 5|1
        gpu1.cta0.t0: ld.relaxed.sys look=-|1, count|epoch
        """
    )
    assert one.reachable()
    assert not one.allows(look="0|1")


@pytest.mark.parametrize("order", ["count first", "epoch first"])
def test_count_and_epoch_in_two_words_do_not(order: str) -> None:
    """The same relaxed look; with the release it takes an acquire, and one order of the two."""
    looks = ["ld.relaxed.sys c, count", "ld.relaxed.sys e=1, epoch"]
    reader = "; ".join(looks if order == "count first" else reversed(looks))
    writer = "gpu0.cta0.t0: st.relaxed.sys count, 5; st.release.sys epoch, 1"
    assert Program(f"{writer}\ngpu1.cta0.t0: {reader}").allows(c=0)


def test_halves_of_the_cell_may_not_be_loaded_by_themselves() -> None:
    """What ptxas did to an acquire whose epoch nobody used: the model promises nothing then."""
    writer = "gpu0.cta0.t0: st.release.sys count|epoch, 5|1"
    reader = "ld.relaxed.sys look=-|1, count|epoch; ld.acquire.sys c, count"
    assert Program(f"{writer}\ngpu1.cta0.t0: {reader}").mixed_size_race()


#: P10: two words with data and a mark each; the accesses of a vector are in no order.
UNIT = ["st.relaxed.sys a|mark_a, 7|1", "st.relaxed.sys b|mark_b, 8|1"]


def unit(turned: bool, first: str = "-|1", second: str = "-|1") -> Program:
    """A unit is put and looked at. first, second: what the look that leaves has found."""
    put = "; ".join(reversed(UNIT) if turned else UNIT)
    look = f"ld.relaxed.sys got_a={first}, a|mark_a; ld.relaxed.sys got_b={second}, b|mark_b"
    return Program(f"gpu0.cta0.t0: {put}\ngpu1.cta0.t0: {look}")


@pytest.mark.parametrize("turned", [False, True])
def test_units_data_come_with_their_marks(turned: bool) -> None:
    program = unit(turned)
    assert program.reachable()
    assert not program.mixed_size_race()
    assert not program.allows(got_a="0|-")
    assert not program.allows(got_b="0|-")


@pytest.mark.parametrize("turned", [False, True])
def test_one_mark_does_not_do_for_both_words(turned: bool) -> None:
    assert unit(turned, first="-|-").allows(got_a="0|-")
    assert unit(turned, second="-|-").allows(got_b="0|-")
