"""What the ranks that live rely on when they go on without one; protocol.py says what this is."""

from __future__ import annotations

from tests.litmus.kernel_source import Edit, Kernels, Operands
from tests.litmus.protocol import ACQUIRE_OF_GPU_SCOPE, RELEASE_OF_GPU_SCOPE, WAIT, Scenario, text
from tests.litmus.small_protocol import AWAIT_RELAXED, AWAITED, HEALTHY, PDL_WAIT

ENTRY_LEFT = r"store_word\(entry \+ kRankMaskWords"
SIGNALLED = r"meet_body: store_release_sys|meet_body: store_relaxed_sys"

NUMBER = "number"
SEEN = f"seen=1, {NUMBER}"

TWINS: dict[str, tuple[Edit, ...]] = {
    "number relaxed": (Edit("meet_body", "store_release_sys", "store_relaxed_sys"),),
    "release of GPU scope": (RELEASE_OF_GPU_SCOPE,),
    "acquire relaxed": (AWAIT_RELAXED,),
    "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
}
DOES_NOT_WAIT: dict[str, tuple[Edit, ...]] = {
    "a meeting does not wait": (Edit("meet_body", PDL_WAIT),)
}


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


SCENARIOS = {
    "a broken round's rows come before the zeros": Scenario(
        ("P13",), rows_before_zeros, ({"row": 5},), TWINS | DOES_NOT_WAIT
    ),
    "zeros come before the next round's units": Scenario(
        ("P13",), zeros_before_rows, ({"row": 0},), TWINS | DOES_NOT_WAIT
    ),
    "what ranks bring to a meeting is there": Scenario(
        ("P13",), entries_before_numbers, ({"got": 0},), TWINS
    ),
}
