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
    NO_COUNTS,
    OTHER_ELEMENTS,
    OTHER_FORMATS,
    PUTS_TOKENS,
    QUANTISES,
    QUANTISES_TOKENS,
    RELEASE_OF_GPU_SCOPE,
    SIGNALS,
    THREAD_0,
    WAIT,
    WAITS,
    Scenario,
    does_not_wait,
    text,
)
from tests.litmus.small_protocol import AWAIT_RELAXED, AWAITED, HEALTHY

ENTRY_LEFT = r"store_word\(entry \+ word"
SIGNALLED = r"meet_body: store_release_sys|meet_body: store_relaxed_sys"

NUMBER = "number"
SEEN = f"seen=1, {NUMBER}"

TWINS: dict[str, tuple[Edit, ...]] = {
    "number relaxed": (Edit("meet_body", "store_release_sys", "store_relaxed_sys"),),
    "release of GPU scope": (RELEASE_OF_GPU_SCOPE,),
    "acquire relaxed": (AWAIT_RELAXED,),
    "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
}
DOES_NOT_WAIT: dict[str, tuple[Edit, ...]] = {"a meeting does not wait": (does_not_wait("meet"),)}


def meeting(kernels: Kernels, *, signal: str = "", wait: str = "", entry: str = "") -> str:
    """A thread of meet: operands of its signal and of its acquire; the instruction by which it
    leaves its entry.
    """
    operands: dict[str, Operands] = {SIGNALLED: signal, AWAITED: wait}
    return kernels.thread("meet_body", operands, {ENTRY_LEFT: entry}, HEALTHY)


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
    """Rank 1's host reads by its next kernel what rank 0 brought to the meeting."""
    return text(
        {
            "gpu0.k0.cta0.t1": meeting(kernels, entry="st.weak entry, 3", signal=f"{NUMBER}, 1"),
            "gpu1.k0.cta0.t0": meeting(kernels, wait=SEEN),
            "gpu1.k1.cta0.t0": f"{WAIT}; ld.weak got, entry",
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
MASK_LEFT = r"\bleave_mask\("
MASK_TAKEN = r"\bis_active\(args, peer\)"


def dispatching(kernels: Kernels, *, seen: str = "", left: str = "") -> str:
    """Dispatch, the last thread of the last CTA: it looks at the caller's mask and leaves it."""
    operands: dict[str, Operands] = {WAITS: "", CELL_STORED: ""}
    operands |= {r"publish_counts: load": "", r"publish_counts: .*\], 0\)": ""}
    untaken = [PUTS_TOKENS, QUANTISES_TOKENS, IN_LAST_WARP, HAS_FAILED, A_FAULT, THREAD_0]
    untaken += NO_COUNTS
    return kernels.thread("dispatch_body", operands, {MASK_SEEN: seen, MASK_LEFT: left}, untaken)


def combining(kernels: Kernels, taken: str) -> str:
    """Combine, a thread that asks whether its peer takes part."""
    operands: dict[str, Operands] = {WAITS: "", LOOKS_FOR_FAILURE: ""}
    untaken = [OTHER_ELEMENTS, *OTHER_FORMATS, QUANTISES, HAS_FAILED, A_FAULT, SIGNALS, HAS_ITEMS]
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


SCENARIOS = {
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
