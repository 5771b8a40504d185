"""Counts per expert that travel with dispatch, as litmus programs; protocol.py says what those are.

A counter is at 0 between rounds. Words of the staging are as in small_protocol.py.
"""

from __future__ import annotations

from tests.litmus.kernel_source import Edit, Kernels, Operands
from tests.litmus.protocol import (
    A_FAULT,
    ANY_RELEASE_OR_ACQUIRE,
    ARRIVAL_RELAXED,
    COMBINE_DOES_NOT_WAIT,
    DISPATCH_DOES_NOT_WAIT,
    HAS_FAILED,
    IN_LAST_WARP,
    IS_FINISHER,
    IS_LAST,
    LOOKS_FOR_FAILURE,
    NO_BARRIER_BEFORE_ARRIVAL,
    NO_BARRIER_BEHIND_ARRIVAL,
    NO_BARRIER_BEHIND_ROUTE,
    NO_BARRIER_OF_WARP,
    NO_COUNTS,
    NONE_LEAVES,
    NOT_THE_LAST_THREAD,
    PUTS_TOKENS,
    QUANTISES_TOKENS,
    SIGNAL,
    SIGNAL_RELAXED,
    SIGNALLED,
    SLOT_TAKEN,
    THREAD_0,
    WAIT,
    Scenario,
    broken_arrival,
    combining,
    does_not_wait,
    text,
)
from tests.litmus.small_protocol import (
    ANNOUNCES,
    AWAITED,
    AWAITED_SIGNAL,
    CLEARS,
    COUNT_LOOKED_AT,
    DOES_NOT_PUBLISH,
    HAS_PULLED,
    HAS_RECEIVED,
    HEALTHY,
    NO_AWAIT,
    PUBLISHES,
    PUBLISHES_AFTER_PULL,
    SENDS,
    UNIT_CLEARED,
    UNIT_LOOKED_AT,
    UNIT_PUT,
    broken_p12,
    combining_small,
)

COUNTED = r"count_choice: "
COUNTER_READ = r"take_count: load"
COUNTER_CLEARED = r"take_count: store"
#: What the caller has counted, and a block that this thread has no unit of.
COUNTED_BY_CALLER = r"^args\.expert_counts != 0$"
SENDS_COUNTS = r"^has_counts && (is_last|role\.publishes\(\))"
TAKES_COUNTS = r"^has_counts( && role\.receives\(\))?$"
NO_UNIT = r"^!\(see_unit"

NO_BARRIER_BEHIND_COUNTING = Edit("publish_expert_counts", r"cta\.sync\(\);")
NO_BARRIER_BEHIND_AWAIT = Edit("publish_small_round", r"cta\.sync\(\);")
NO_BARRIER_BEHIND_CELLS = Edit("publish_round", r"cta\.sync\(\);")
COUNTERS_STAY = Edit("take_count", r"store_relaxed_gpu\(counter, 0\);")
SMALL_DISPATCH_DOES_NOT_WAIT = does_not_wait("small_dispatch")
SMALL_COMBINE_DOES_NOT_WAIT = does_not_wait("small_combine")
_HEALTHY = tuple(each for each in HEALTHY if each not in NO_COUNTS)


# ---- One thread of a dispatch with counts. An access without operands is left out.


def counting(kernels: Kernels, *, count: str = "", arrival: str = "") -> str:
    """Dispatch, a thread of a CTA with one token that is no finisher; `count` is of one choice."""
    operands: dict[str, Operands] = {LOOKS_FOR_FAILURE: "", SLOT_TAKEN: "", COUNTED: count}
    untaken = [IS_FINISHER, QUANTISES_TOKENS, IN_LAST_WARP]
    if arrival:
        operands[r"->arrivals"] = arrival
    else:
        untaken.append(THREAD_0)
    return kernels.thread("dispatch_body", operands, {}, untaken)


def _clears(kernels: Kernels, clear: str) -> dict[str, Operands]:
    there = "store_relaxed_gpu(counter" in kernels.bodies["take_count"]
    return {COUNTER_CLEARED: clear} if there else {}


def sending_counts(
    kernels: Kernels, *, arrival: str = "", read: str = "", clear: str = "", put: str = ""
) -> str:
    """Dispatch, a thread of the last CTA, which has no tokens: it sends a unit of one counter."""
    operands: dict[str, Operands] = {
        LOOKS_FOR_FAILURE: "",
        r"(?:wait_for_epoch|is_reached_in_time): ": "",
        r"publish_counts: load": "",
        r"signal_peer: ": "",
        r"publish_counts: .*\], 0\)": "",
        COUNTER_READ: read,
        UNIT_PUT: put,
        **_clears(kernels, clear),
    }
    untaken = [PUTS_TOKENS, QUANTISES_TOKENS, IN_LAST_WARP, HAS_FAILED, A_FAULT]
    untaken += [NOT_THE_LAST_THREAD, TAKES_COUNTS, COUNTED_BY_CALLER, NONE_LEAVES]
    if arrival:
        operands[r"->arrivals"] = arrival
    else:
        untaken.append(THREAD_0)
    return kernels.thread("dispatch_body", operands, {}, untaken)


def taking_counts(kernels: Kernels, *, look: str, clear: str) -> str:
    """Dispatch, a thread of a finisher that is not the last: it takes a unit."""
    operands: dict[str, Operands] = {
        LOOKS_FOR_FAILURE: "",
        r"(?:wait_for_epoch|is_reached_in_time): ": "",
        UNIT_LOOKED_AT: look,
    }
    untaken = [PUTS_TOKENS, QUANTISES_TOKENS, IN_LAST_WARP, HAS_FAILED, A_FAULT, NO_UNIT]
    untaken += [THREAD_0, IS_LAST, SENDS_COUNTS]
    return kernels.thread("dispatch_body", operands, {UNIT_CLEARED: clear}, untaken)


def publishing_counts(
    kernels: Kernels,
    *,
    awaits: str = "",
    count: str = "",
    read: str = "",
    clear: str = "",
    put: str = "",
) -> str:
    """Small dispatch, a thread of CTA F: it counts a choice, and sends a unit of one counter."""
    waits = "await_combine(" in kernels.bodies["await_previous_round"]
    operands: dict[str, Operands] = {
        LOOKS_FOR_FAILURE: "",
        COUNT_LOOKED_AT: "",
        ANNOUNCES: "",
        COUNTED: count,
        COUNTER_READ: read,
        UNIT_PUT: put,
        **_clears(kernels, clear),
        **({AWAITED: awaits} if waits else {}),
    }
    untaken = [*_HEALTHY, SENDS, DOES_NOT_PUBLISH, HAS_RECEIVED, HAS_PULLED, PUBLISHES_AFTER_PULL]
    untaken += [TAKES_COUNTS, COUNTED_BY_CALLER]
    return kernels.thread("small_dispatch_body", operands, {}, untaken)


def taking_small_counts(kernels: Kernels, *, look: str, clear: str) -> str:
    """Small dispatch, a thread of a receiver without rows: it takes a unit."""
    waits = "await_combine(" in kernels.bodies["await_previous_round"]
    operands: dict[str, Operands] = {
        LOOKS_FOR_FAILURE: "",
        COUNT_LOOKED_AT: "",
        UNIT_LOOKED_AT: look,
        **({AWAITED: ""} if waits else {}),
    }
    untaken = [*_HEALTHY, SENDS, PUBLISHES, PUBLISHES_AFTER_PULL, HAS_RECEIVED, SENDS_COUNTS]
    return kernels.thread("small_dispatch_body", operands, {UNIT_CLEARED: clear}, untaken)


# ---- Programs.

COUNTS = "counter, 1"


def whole_counts(kernels: Kernels) -> str:
    """Choices counted by two threads of a CTA; the last CTA reads the counter."""
    return text(
        {
            "gpu0.k0.cta0.t1": counting(kernels, count=f"one, {COUNTS}"),
            "gpu0.k0.cta0.t0": counting(
                kernels, count=f"other, {COUNTS}", arrival="first=0, arrivals, 1"
            ),
            "gpu0.k0.cta1.t0": sending_counts(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": sending_counts(kernels, read="sent, counter", clear="counter, 0"),
        }
    )


def counters_of_the_next_round(kernels: Kernels) -> str:
    """The last CTA clears a counter; the next dispatch counts from 0."""
    return text(
        {
            "gpu0.k0.cta0.t1": counting(kernels, count=f"one, {COUNTS}"),
            "gpu0.k0.cta0.t0": counting(kernels, arrival="first=0, arrivals, 1"),
            "gpu0.k0.cta1.t0": sending_counts(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": sending_counts(kernels, read="sent, counter", clear="counter, 0"),
            "gpu0.k1.cta0.t0": combining(kernels),
            "gpu0.k2.cta0.t1": counting(kernels, count=f"next, {COUNTS}"),
        }
    )


def whole_small_counts(kernels: Kernels) -> str:
    """One thread of CTA F counts, another reads the counter and clears it; the next round counts
    from 0.
    """
    return text(
        {
            "gpu0.k0.cta0.t0": publishing_counts(kernels, count=f"one, {COUNTS}"),
            "gpu0.k0.cta0.t1": publishing_counts(
                kernels, count=f"other, {COUNTS}", read="sent, counter", clear="counter, 0"
            ),
            "gpu0.k1.cta0.t0": combining_small(kernels, signal=f"{SIGNAL}, 0|1"),
            "gpu0.k2.cta0.t0": publishing_counts(kernels, count=f"next, {COUNTS}"),
        }
    )


def cleared_before_next_counts(kernels: Kernels) -> str:
    """Rank 1 clears a word of dispatch n; rank 0 sends one of dispatch n+1 to the same place."""
    return text(
        {
            "gpu0.k0.cta1.t1": sending_counts(kernels, put="word, 1"),
            "gpu1.k0.cta0.t1": taking_counts(kernels, look="got=1, word", clear=CLEARS),
            "gpu1.k1.cta0.t0": combining(kernels, signal=f"{SIGNAL}, 0|1"),
            "gpu0.k1.cta0.t0": combining(kernels, wait=SIGNALLED),
            "gpu0.k2.cta1.t1": sending_counts(kernels, put="word, 2"),
        }
    )


def cleared_before_next_small_counts(kernels: Kernels) -> str:
    """The same with rounds of small batches."""
    return text(
        {
            "gpu0.k0.cta0.t1": publishing_counts(kernels, put="word, 1"),
            "gpu1.k0.cta1.t0": taking_small_counts(kernels, look="got=1, word", clear=CLEARS),
            "gpu1.k1.cta0.t0": combining_small(kernels, signal=f"{SIGNAL}, 0|1"),
            "gpu0.k1.cta0.t0": WAIT,
            "gpu0.k2.cta0.t0": publishing_counts(kernels, awaits=AWAITED_SIGNAL),
            "gpu0.k2.cta0.t1": publishing_counts(kernels, put="word, 2"),
        }
    )


SCENARIOS = {
    "counts of all CTAs are sent": Scenario(
        ("P2",),
        whole_counts,
        ({"sent": 0}, {"sent": 1}),
        {
            **broken_arrival(ARRIVAL_RELAXED),
            # Each of the three does for the choices, each of the two for what the last CTA reads.
            "no barrier before the arrival": (
                NO_BARRIER_BEFORE_ARRIVAL,
                NO_BARRIER_BEHIND_ROUTE,
                NO_BARRIER_OF_WARP,
            ),
            "no barrier behind the arrival": (NO_BARRIER_BEHIND_ARRIVAL, NO_BARRIER_BEHIND_CELLS),
        },
    ),
    "the next round counts from 0": Scenario(
        ("P2",),
        counters_of_the_next_round,
        ({"next": 1},),
        {
            "counters stay": (COUNTERS_STAY,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "counts of all threads are sent": Scenario(
        (),
        whole_small_counts,
        ({"sent": 0}, {"sent": 1}, {"next": 1}, {"next": 2}),
        {
            "no barrier behind the counting": (NO_BARRIER_BEHIND_COUNTING,),
            "counters stay": (COUNTERS_STAY,),
            "dispatch does not wait for combine": (SMALL_DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for dispatch": (SMALL_COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "units of counts are clear before the next ones": Scenario(
        ("P3",),
        cleared_before_next_counts,
        ({"word": 0}, {"word": 1}),
        {
            "signal relaxed": (SIGNAL_RELAXED,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "units of counts are clear before the next ones of small batches": Scenario(
        ("P12",),
        cleared_before_next_small_counts,
        ({"word": 0}, {"word": 1}),
        {
            **broken_p12(NO_AWAIT),
            "no barrier behind the wait": (NO_BARRIER_BEHIND_AWAIT, NO_BARRIER_BEHIND_COUNTING),
            "combine does not wait for dispatch": (SMALL_COMBINE_DOES_NOT_WAIT,),
        },
    ),
}
