"""What the ranks that live rely on when they go on without one; protocol.py says what this is."""

from __future__ import annotations

from tests.litmus.kernel_source import Edit, Kernels, Operands
from tests.litmus.protocol import (
    A_FAULT,
    ACQUIRE_OF_GPU_SCOPE,
    CELL_STORED,
    COMBINE_DOES_NOT_WAIT,
    DISPATCH_DOES_NOT_WAIT,
    HAS_FAILED,
    HAS_ITEMS,
    IN_LAST_WARP,
    LOOKS_FOR_FAILURE,
    NO_BARRIER_BEHIND_ITEM,
    NO_COUNTS,
    NONE_LEAVES,
    OTHER_ELEMENTS,
    OTHER_FORMATS,
    PUTS_TOKENS,
    QUANTISES,
    QUANTISES_TOKENS,
    RELEASE_OF_GPU_SCOPE,
    SIGNALS,
    TELLS_NO_END,
    THREAD_0,
    WAIT,
    WAITS,
    Scenario,
    broken_arrival,
    does_not_wait,
    finishing,
    text,
)
from tests.litmus.protocol import combining as pulling
from tests.litmus.small_protocol import AWAIT_RELAXED, AWAITED, HEALTHY, MASK_LEFT, publishing

NUMBER_GONE = r"leave_entry: store_relaxed_sys\(entry \+ kRankMaskWords, 0\)"
ENTRY_LEFT = r"leave_entry: store_\w+\(entry \+ word"
SIGNALLED = r"leave_entry: store_\w+\(entry \+ kRankMaskWords, args\.number"
ENTRY_TAKEN = r"take_entry: load_\w+\(entry \+ word"
LOOKED_AGAIN = r"take_entry: load_relaxed_sys\(cell"

NUMBER = "number"
SEEN = f"seen=1, {NUMBER}"

TWINS: dict[str, tuple[Edit, ...]] = {
    "number relaxed": (Edit("leave_entry", "store_release_sys", "store_relaxed_sys", turn=1),),
    "release of GPU scope": (RELEASE_OF_GPU_SCOPE,),
    "acquire relaxed": (AWAIT_RELAXED,),
    "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
}
DOES_NOT_WAIT: dict[str, tuple[Edit, ...]] = {"a meeting does not wait": (does_not_wait("meet"),)}


def meeting(
    kernels: Kernels,
    *,
    gone: str = "",
    entry: str = "",
    signal: str = "",
    wait: str = "",
    taken: str = "",
    again: str = "",
) -> str:
    """A thread of meet: operands by which it takes its number away, leaves its entry and signals;
    of its acquire, of what it takes of the peer's entry, and of its second look.
    """
    operands: dict[str, Operands] = {
        ENTRY_LEFT: entry,
        SIGNALLED: signal,
        AWAITED: wait,
        ENTRY_TAKEN: taken,
        LOOKED_AGAIN: again,
    }
    if "store_relaxed_sys" in kernels.bodies["leave_entry"].split("for")[0]:
        operands[NUMBER_GONE] = gone
    return kernels.thread("meet_body", operands, {}, HEALTHY)


def rows_before_zeros(kernels: Kernels) -> str:
    """Rank 1's broken round stores a row at rank 0, which clears its memory after the meeting."""
    return text(
        {
            "gpu1.k0.cta0.t0": f"{WAIT}; st.weak row, 5",
            "gpu1.k1.cta0.t0": meeting(kernels, signal=f"{NUMBER}, 1"),
            "gpu0.k0.cta0.t1": meeting(kernels, wait=SEEN),
            "gpu0.k1.cta0.t0": f"{WAIT}; st.weak row, 0",
        }
    )


def zeros_before_rows(kernels: Kernels) -> str:
    """Rank 0 clears its memory before the meeting; rank 1's next round stores a unit there."""
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; st.weak row, 0",
            "gpu0.k1.cta0.t1": meeting(kernels, signal=f"{NUMBER}, 2"),
            "gpu1.k0.cta0.t0": meeting(kernels, wait=f"seen=2, {NUMBER}"),
            "gpu1.k1.cta0.t0": f"{WAIT}; st.relaxed.sys row, 7",
        }
    )


def entries_before_numbers(kernels: Kernels) -> str:
    """Rank 1 takes what rank 0 has brought to the meeting."""
    return text(
        {
            "gpu0.k0.cta0.t1": meeting(kernels, entry="entry, 3", signal=f"{NUMBER}, 1"),
            "gpu1.k0.cta0.t0": meeting(kernels, wait=SEEN, taken="got, entry"),
        }
    )


def entry_written_anew(kernels: Kernels) -> str:
    """Rank 0 calls again with another mask while rank 1 takes that of the first call."""
    return text(
        {
            "gpu0.k0.cta0.t1": meeting(kernels, entry="entry, 3", signal=f"{NUMBER}, 1"),
            "gpu0.k1.cta0.t1": meeting(
                kernels, gone=f"{NUMBER}, 0", entry="entry, 5", signal=f"{NUMBER}, 2"
            ),
            "gpu1.k0.cta0.t0": meeting(
                kernels, wait=SEEN, taken="got, entry", again=f"again=1, {NUMBER}"
            ),
        }
    )


def two_meetings(kernels: Kernels) -> str:
    """A row of the broken round, rank 0's zero, a row of the next round, and a look at it."""

    def at(here: int, there: int, half: str, number: int) -> str:
        name = f"{half}_at_"
        return meeting(
            kernels, signal=f"{name}{there}, {number}", wait=f"{half}{here}={number}, {name}{here}"
        )

    return text(
        {
            "gpu1.k0.cta0.t0": f"{WAIT}; st.weak row, 5",
            "gpu1.k1.cta0.t0": at(1, 0, "odd", 1),
            "gpu0.k0.cta0.t1": at(0, 1, "odd", 1),
            "gpu0.k1.cta0.t0": f"{WAIT}; st.weak row, 0",
            "gpu0.k2.cta0.t1": at(0, 1, "even", 2),
            "gpu1.k2.cta0.t0": at(1, 0, "even", 2),
            "gpu1.k3.cta0.t0": f"{WAIT}; st.weak row, 7",
            "gpu1.k4.cta0.t0": f"{WAIT}; ld.weak got, row",
        }
    )


# ---- Rounds with a mask.

MASK_SEEN = r"\bload_exclusion\("
MASK_TAKEN = r"\bis_active\(args, peer\)"


def dispatching(kernels: Kernels, *, seen: str = "", left: str = "") -> str:
    """Dispatch, the last thread of the last CTA: it looks at the caller's mask and leaves it."""
    operands: dict[str, Operands] = {WAITS: "", CELL_STORED: ""}
    operands |= {r"publish_counts: load": "", r"publish_counts: .*\], 0\)": ""}
    untaken = [PUTS_TOKENS, QUANTISES_TOKENS, IN_LAST_WARP, HAS_FAILED, A_FAULT, THREAD_0]
    untaken += [*NO_COUNTS, NONE_LEAVES]
    return kernels.thread("dispatch_body", operands, {MASK_SEEN: seen, MASK_LEFT: left}, untaken)


def combining(kernels: Kernels, taken: str) -> str:
    """Combine, a thread that asks whether its peer takes part."""
    operands: dict[str, Operands] = {WAITS: "", LOOKS_FOR_FAILURE: ""}
    untaken = [OTHER_ELEMENTS, *OTHER_FORMATS, QUANTISES, HAS_FAILED, A_FAULT, SIGNALS, HAS_ITEMS]
    untaken.append(TELLS_NO_END)
    return kernels.thread("combine_body", operands, {MASK_TAKEN: taken}, untaken)


def mask_before_replay(kernels: Kernels) -> str:
    """A kernel of the caller changes the mask; the replayed dispatch comes after it."""
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; st.weak given, 1",
            "gpu0.k1.cta0.t0": dispatching(kernels, seen="ld.weak got, given"),
        }
    )


def mask_of_the_round(kernels: Kernels) -> str:
    """Combine takes the mask that its dispatch has left, not that of the dispatch after it."""
    return text(
        {
            "gpu0.k0.cta0.t0": dispatching(kernels, left="st.weak mask, 1"),
            "gpu0.k1.cta0.t1": combining(kernels, "ld.weak got, mask"),
            "gpu0.k2.cta0.t0": dispatching(kernels, left="st.weak mask, 2"),
        }
    )


# ---- A rank that leaves.

WORD = "told"
LEAVER_SEEN = f"seen=-|1, {WORD}|epoch"
END_RELAXED = Edit("tell_end", "fetch_add_acq_rel_gpu", "fetch_add_relaxed_gpu")
BULK_AWAITS_NOBODY = Edit("publish_round", r"await_leavers\([^;]*\);")
NO_BARRIER_BEFORE_MASK = Edit("publish_round", r"cta\.sync\(\);")
SMALL_NO_BARRIER_BEFORE_MASK = Edit("publish_small_round", r"cta\.sync\(\);", turn=1)
BROKEN_P14 = broken_arrival(END_RELAXED) | {
    "no barrier behind the reads": (NO_BARRIER_BEHIND_ITEM,),
    "word relaxed": (Edit("tell_end", "store_release_sys", "store_relaxed_sys"),),
    "release of GPU scope": (RELEASE_OF_GPU_SCOPE,),
    "acquire relaxed": (AWAIT_RELAXED,),
    "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
}


def leaving(kernels: Kernels) -> dict[str, str]:
    """Rank 0's last combine: a thread of a CTA that is not the last reads a row of rank 1."""
    return {
        "gpu0.k0.cta0.t1": pulling(kernels, items=1, row_read="ld.weak got, out"),
        "gpu0.k0.cta0.t0": pulling(kernels, items=1, ends=("first=0, arrivals, 1", "")),
        "gpu0.k0.cta1.t0": pulling(
            kernels, items=1, ends=("second=1, arrivals, 1", f"{WORD}|epoch, 0|1")
        ),
    }


def left_before_next_experts(kernels: Kernels) -> str:
    """Rank 1's dispatch leaves out rank 0; then its experts write the next round's row."""
    return text(
        leaving(kernels)
        | {
            "gpu1.k0.cta0.t0": finishing(kernels, leaver=LEAVER_SEEN),
            "gpu1.k1.cta0.t0": f"{WAIT}; st.weak out, 2",
        }
    )


def left_before_next_small_experts(kernels: Kernels) -> str:
    """The same after a small dispatch."""
    return text(
        leaving(kernels)
        | {
            "gpu1.k0.cta0.t0": publishing(kernels, pulled=True, leaver=LEAVER_SEEN),
            "gpu1.k1.cta0.t0": f"{WAIT}; st.weak out, 2",
        }
    )


def mask_before_is_read(kernels: Kernels) -> str:
    """A thread of the last CTA looks at the mask before; the CTA's last one leaves the next."""
    return text(
        {
            "gpu0.k0.cta0.t0": finishing(kernels, mask_seen="ld.weak got, mask"),
            "gpu0.k0.cta0.t1": dispatching(kernels, left="st.weak mask, 2"),
        }
    )


def mask_before_is_read_in_small(kernels: Kernels) -> str:
    """The same of CTA F."""
    return text(
        {
            "gpu0.k0.cta0.t0": publishing(kernels, pulled=True, mask_seen="ld.weak got, mask"),
            "gpu0.k0.cta0.t1": publishing(kernels, pulled=True, mask_left="st.weak mask, 2"),
        }
    )


SCENARIOS = {
    "a rank that leaves has read before the next experts write": Scenario(
        ("P14",),
        left_before_next_experts,
        ({"got": 2},),
        BROKEN_P14 | {"nobody waits for it": (BULK_AWAITS_NOBODY,)},
    ),
    "and before the experts of a small round": Scenario(
        ("P14",), left_before_next_small_experts, ({"got": 2},), BROKEN_P14
    ),
    "the mask before is read before the next one is left": Scenario(
        (), mask_before_is_read, ({"got": 2},), {"no barrier": (NO_BARRIER_BEFORE_MASK,)}
    ),
    "the mask before is read in a small round": Scenario(
        (),
        mask_before_is_read_in_small,
        ({"got": 2},),
        {"no barrier": (SMALL_NO_BARRIER_BEFORE_MASK,)},
    ),
    "a broken round's rows come before the zeros": Scenario(
        ("P13",), rows_before_zeros, ({"row": 5},), TWINS | DOES_NOT_WAIT
    ),
    "zeros come before the next round's units": Scenario(
        ("P13",), zeros_before_rows, ({"row": 0},), TWINS | DOES_NOT_WAIT
    ),
    "both meetings of a call": Scenario(
        ("P13",), two_meetings, ({"got": 5}, {"got": 0}), TWINS | DOES_NOT_WAIT
    ),
    "what ranks bring to a meeting is there": Scenario(
        ("P13",), entries_before_numbers, ({"got": 0},), TWINS
    ),
    "an entry that is written anew is not taken": Scenario(
        (),
        entry_written_anew,
        ({"got": 5},),
        {
            "the number stays": (Edit("leave_entry", r"store_relaxed_sys\([^;]*\);"),),
            "mask relaxed": (Edit("leave_entry", "store_release_sys", "store_relaxed_sys"),),
            "mask taken relaxed": (Edit("take_entry", "load_acquire_sys", "load_relaxed_sys"),),
        },
    ),
    "a replayed dispatch takes the mask of now": Scenario(
        (), mask_before_replay, ({"got": 0},), {"dispatch does not wait": (DISPATCH_DOES_NOT_WAIT,)}
    ),
    "combine takes its dispatch's mask": Scenario(
        (),
        mask_of_the_round,
        ({"got": 0}, {"got": 2}),
        {
            "combine does not wait": (COMBINE_DOES_NOT_WAIT,),
            "dispatch does not wait": (DISPATCH_DOES_NOT_WAIT,),
        },
    ),
}
