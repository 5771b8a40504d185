"""The shared LM head's part of the protocol as litmus programs; protocol.py says what those are."""

from __future__ import annotations

from tests.litmus.kernel_source import Edit, Kernels, Operands
from tests.litmus.protocol import (
    A_FAULT,
    ANY_RELEASE_OR_ACQUIRE,
    ARRIVAL_OF_CTA_SCOPE,
    CELL,
    EPOCH_BUMP,
    HAS_FAILED,
    HAS_ITEMS,
    LOOKS_FOR_FAILURE,
    SEEN,
    SIGNAL_STORED,
    THREAD_0,
    WAIT,
    WAITS,
    Scenario,
    broken_arrival,
    buffers,
    does_not_wait,
    mixed_up,
    text,
)
from tests.litmus.protocol import SIGNAL_RELAXED as CELL_RELAXED

# ---- Statements and conditions of the kernels, by their text.

ROWS_PUT = r"\bput_head_rows\("
GATHER_EPOCH = r"load_word\(&local->epoch\)"
ROUND_EPOCH = r"load_word\(&local_control\(args\)->epoch\)"
ARRIVALS_RESET = r"store_word\(arrivals"
COUNTS_LEFT = r"store_word\(&head_counts\(args\)\[peer\]"
COUNTS_READ = r"load_word\(&head_counts\(args\)\[peer\]\)"
PART_LEFT = r"shared\.parts\[turn\]\[cta"
WORD_PUT = r"\bput_word\("
IDS_TAKEN = r"\btake_ids\("
LOGITS_GOT = r"\bget_logits\("

GATHERED_LAST = r"^!\(!arrive_last\(cta, &local->arrivals"
COMPARED_LAST = r"^!\(!arrive_last\(cta, &local_control\(args\)->combine_arrivals"
BECAME_LAST = r"^shared\.is_last != 0$"
OTHER_ELEMENTS = r"^element == kElementFp(16|32)$"

# ---- What breaks an ordered access.

ARRIVAL_RELAXED = Edit("arrive_last", "fetch_add_acq_rel_gpu", "fetch_add_relaxed_gpu")
NO_BARRIER_BEFORE_ARRIVAL = Edit("head_gather_body", r"cta\.sync\(\);")
NO_BARRIER_BEHIND_ARRIVAL = Edit("arrive_last", r"cta\.sync\(\);")
NO_BARRIER_BEHIND_WAIT = Edit("head_argmax_body", r"cta\.sync\(\);", turn=1)
PARTS_BARRIER_OF_WARP = Edit("put_words", r"cta\.sync\(\);", "cta.sync_warp();")
ONE_BUFFER = Edit("put_words", r"turn = 1 - turn;")
GATHER_DOES_NOT_WAIT = does_not_wait("head_gather")
ARGMAX_DOES_NOT_WAIT = does_not_wait("head_argmax")
COLLECT_DOES_NOT_WAIT = does_not_wait("head_collect")

WORD_CELL = "splits|signalled"
SIGNALLED = (f"glance=-|1, {WORD_CELL}", f"caught=-|1, {WORD_CELL}")


# ---- One thread of each kernel. An access without operands is left out.


def gathering(
    kernels: Kernels,
    *,
    put: str = "",
    arrival: str = "",
    last: bool = True,
    reset: str = "",
    cell: str = "",
    wait: Operands = "",
    counts: str = "",
    epoch_read: str = "",
    bump: str | None = None,
) -> str:
    """A thread of gather; thread 0 of its CTA has `arrival`'s operands.

    last: whether the CTA arrives last; then the thread stores `cell` to a rank, waits for one, and
    leaves `counts`. reset, epoch_read, put, counts, bump: instructions; the last two of the last
    CTA only, `bump` of its last thread.
    """
    operands: dict[str, Operands] = {LOOKS_FOR_FAILURE: ""}
    plain: dict[str, Operands] = {ROWS_PUT: put, GATHER_EPOCH: epoch_read}
    untaken = [A_FAULT]
    _arrive(operands, plain, untaken, arrival, reset)
    if last:
        operands |= {WAITS: wait, SIGNAL_STORED: cell}
        plain[COUNTS_LEFT] = counts
        if bump is not None:
            plain[EPOCH_BUMP] = bump
    else:
        untaken.append(GATHERED_LAST)
    return kernels.thread("head_gather_body", operands, plain, untaken)


def comparing(
    kernels: Kernels,
    *,
    put: str | None = None,
    arrival: str = "",
    last: bool = True,
    reset: str = "",
    cell: str = "",
    wait: Operands = "",
    epoch_read: str = "",
    counts: str = "",
    take: str = "",
) -> str:
    """A thread of argmax, as gathering(). put: what it puts of the CTA's item, if that has one."""
    operands: dict[str, Operands] = {LOOKS_FOR_FAILURE: ""}
    plain: dict[str, Operands] = {ROUND_EPOCH: epoch_read, COUNTS_READ: counts}
    untaken = [A_FAULT, HAS_FAILED, OTHER_ELEMENTS]
    _arrive(operands, plain, untaken, arrival, reset)
    if put is None:
        untaken.append(HAS_ITEMS)
    else:
        plain[WORD_PUT] = put
    if last:
        operands |= {WAITS: wait, SIGNAL_STORED: cell}
        plain[IDS_TAKEN] = take
    else:
        untaken.append(COMPARED_LAST)
    return kernels.thread("head_argmax_body", operands, plain, untaken)


def _arrive(
    operands: dict[str, Operands],
    plain: dict[str, Operands],
    untaken: list[str],
    arrival: str,
    reset: str,
) -> None:
    if not arrival:
        untaken.append(THREAD_0)
        return
    operands[r"arrive_last: fetch"] = arrival
    plain[ARRIVALS_RESET] = reset


def collecting(kernels: Kernels, *, counts: str = "", got: str = "") -> str:
    """A thread of collect."""
    plain: dict[str, Operands] = {COUNTS_READ: counts, LOGITS_GOT: got}
    return kernels.thread("head_collect_body", {LOOKS_FOR_FAILURE: ""}, plain, [HAS_FAILED])


#: An arrival at a CTA that is the only one of its launch. Each word is named once in a program.
def alone(name: str) -> str:
    return f"{name}=0, {name}_arrivals, 1"


# ---- Programs. What a rank puts lies in the memory of the rank that reads it.


def rows_before_cells(kernels: Kernels) -> str:
    """A row put by a CTA of rank 0 that is not the last, read by rank 1's product."""
    return text(
        {
            "gpu0.k0.cta0.t0": gathering(kernels, last=False, arrival="first=0, arrivals, 1"),
            "gpu0.k0.cta0.t1": gathering(kernels, last=False, put="st.weak row, 1"),
            "gpu0.k0.cta1.t0": gathering(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": gathering(kernels, cell=f"{CELL}, 1|1"),
            "gpu1.k0.cta0.t0": gathering(kernels, arrival=alone("a"), wait=SEEN),
            "gpu1.k1.cta0.t0": f"{WAIT}; ld.weak got, row",
        }
    )


def rows_read_before_next_put(kernels: Kernels) -> str:
    """Rank 0's product n reads a row; rank 1's gather n+1 puts the next one there."""
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; ld.weak got, row",
            "gpu0.k1.cta0.t0": comparing(kernels, arrival=alone("a"), cell=f"{WORD_CELL}, 1|1"),
            "gpu1.k0.cta0.t0": comparing(kernels, arrival=alone("b"), wait=SIGNALLED),
            "gpu1.k1.cta0.t0": gathering(
                kernels, last=False, put="st.weak row, 2", arrival="first=0, arrivals, 1"
            ),
        }
    )


def words_before_cells(kernels: Kernels) -> str:
    """A word put by a CTA of rank 0 that is not the last; in the CTA of rank 1 that takes the ids
    one thread waits, another reads the word.
    """
    return text(
        {
            "gpu0.k0.cta0.t0": comparing(
                kernels, last=False, put="st.weak word, 1", arrival="first=0, arrivals, 1"
            ),
            "gpu0.k0.cta1.t0": comparing(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": comparing(kernels, cell=f"{WORD_CELL}, 1|1"),
            "gpu1.k0.cta0.t0": comparing(kernels, arrival=alone("a"), wait=SIGNALLED),
            "gpu1.k0.cta0.t1": comparing(kernels, take="ld.weak got, word"),
        }
    )


def words_read_before_next_put(kernels: Kernels) -> str:
    """Rank 1's argmax n reads a word; rank 0's argmax n+1 puts the next one there."""
    return text(
        {
            "gpu1.k0.cta0.t0": comparing(kernels, arrival=alone("a"), take="ld.weak got, word"),
            "gpu1.k1.cta0.t0": gathering(kernels, arrival=alone("b"), cell=f"{CELL}, 1|1"),
            "gpu0.k0.cta0.t0": gathering(kernels, arrival=alone("c"), wait=SEEN),
            "gpu0.k1.cta0.t0": comparing(
                kernels, last=False, put="st.weak word, 2", arrival="first=0, arrivals, 1"
            ),
        }
    )


def logits_before_cells(kernels: Kernels) -> str:
    """Rank 0's product writes a logit, rank 1's collect gets it, which has waited for nobody."""
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; st.weak logit, 1",
            "gpu0.k1.cta0.t0": comparing(kernels, arrival=alone("a"), cell=f"{WORD_CELL}, 1|1"),
            "gpu1.k0.cta0.t0": comparing(kernels, arrival=alone("b"), wait=SIGNALLED),
            "gpu1.k1.cta0.t0": collecting(kernels, got="ld.weak got, logit"),
        }
    )


def logits_read_before_next_product(kernels: Kernels) -> str:
    """Rank 1's collect n gets a logit of rank 0, whose product n+1 writes the next one there."""
    return text(
        {
            "gpu1.k0.cta0.t0": collecting(kernels, got="ld.weak got, logit"),
            "gpu1.k1.cta0.t0": gathering(kernels, arrival=alone("a"), cell=f"{CELL}, 1|1"),
            "gpu0.k0.cta0.t0": gathering(kernels, arrival=alone("b"), wait=SEEN),
            "gpu0.k1.cta0.t0": f"{WAIT}; st.weak logit, 2",
        }
    )


def counts_of_the_round(kernels: Kernels) -> str:
    """Rank 1 is at gather n+1, and so its cell, while rank 0's collect n reads the counts."""
    keeps = gathering(kernels, arrival=alone("a"), wait=SEEN, counts="st.weak counts, seen")
    return text(
        {
            "gpu1.k0.cta0.t0": gathering(kernels, arrival=alone("b"), cell=f"{CELL}, 1|1"),
            "gpu0.k0.cta0.t0": keeps,
            "gpu0.k1.cta0.t0": comparing(kernels, arrival=alone("c"), cell=f"{WORD_CELL}, 1|1"),
            "gpu1.k1.cta0.t0": comparing(kernels, arrival=alone("d"), wait=SIGNALLED),
            "gpu1.k2.cta0.t0": gathering(kernels, arrival=alone("e"), cell=f"{CELL}, 9|2"),
            "gpu0.k2.cta0.t0": collecting(kernels, counts="ld.weak got, counts"),
        }
    )


def cell_read_before_next_cell(kernels: Kernels) -> str:
    """Rank 0 reads rank 1's cell of gather n; rank 1 sends the one of gather n+1."""
    late = (f"look, {CELL}", f"seen, {CELL}")
    return text(
        {
            "gpu0.k0.cta0.t0": gathering(kernels, arrival=alone("a"), wait=late),
            "gpu0.k1.cta0.t0": comparing(kernels, arrival=alone("b"), cell=f"{WORD_CELL}, 1|1"),
            "gpu1.k0.cta0.t0": comparing(kernels, arrival=alone("c"), wait=SIGNALLED),
            "gpu1.k1.cta0.t0": gathering(kernels, arrival=alone("d"), cell=f"{CELL}, 9|2"),
        }
    )


def word_cell_read_before_next_cell(kernels: Kernels) -> str:
    """Rank 0 reads rank 1's cell of argmax n; rank 1 sends the one of argmax n+1."""
    late = (f"glance, {WORD_CELL}", f"caught, {WORD_CELL}")
    return text(
        {
            "gpu0.k0.cta0.t0": comparing(kernels, arrival=alone("a"), wait=late),
            "gpu0.k1.cta0.t0": gathering(kernels, arrival=alone("b"), cell=f"{CELL}, 1|1"),
            "gpu1.k0.cta0.t0": gathering(kernels, arrival=alone("c"), wait=SEEN),
            "gpu1.k1.cta0.t0": comparing(kernels, arrival=alone("d"), cell=f"{WORD_CELL}, 9|2"),
        }
    )


def epoch_read_before_bump(kernels: Kernels) -> str:
    """A CTA of gather reads the epoch; the last one's last thread writes the next."""
    return text(
        {
            "gpu0.k0.cta0.t0": gathering(
                kernels,
                last=False,
                arrival="first=0, arrivals, 1",
                epoch_read="ld.weak old, epoch",
            ),
            "gpu0.k0.cta1.t0": gathering(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": gathering(kernels, bump="st.weak epoch, 1"),
        }
    )


def next_round_starts_clean(kernels: Kernels) -> str:
    """What gather leaves for argmax and for the next gather: epoch and arrivals."""
    return text(
        {
            "gpu0.k0.cta0.t0": gathering(kernels, last=False, arrival="first=0, arrivals, 1"),
            "gpu0.k0.cta1.t0": gathering(
                kernels,
                arrival="second=1, arrivals, 1",
                reset="st.weak arrivals, 0",
                bump="st.weak epoch, 1",
            ),
            "gpu0.k1.cta0.t0": comparing(
                kernels, last=False, arrival="a=0, others, 1", epoch_read="ld.weak ours, epoch"
            ),
            "gpu0.k2.cta0.t0": gathering(
                kernels,
                last=False,
                arrival="next_first, arrivals, 1",
                epoch_read="ld.weak base, epoch",
            ),
        }
    )


def parts_of_three_items(kernels: Kernels) -> str:
    """A fast warp leaves its largest word of items 1, 2, 3 of a CTA; a slow one reads each."""
    where = buffers(kernels, "put_words", "shared.parts[turn]", "turn = 1 - turn;")
    writes = tuple(f"st.weak parts_{place}, {item}" for item, place in enumerate(where, 1))
    reads = tuple(f"ld.weak item{item}, parts_{place}" for item, place in enumerate(where, 1))

    def thread(plain: dict[str, Operands]) -> str:
        return kernels.thread("put_words", {}, plain, [], {HAS_ITEMS: 3})

    return text(
        {
            "gpu0.k0.cta0.t32": thread({PART_LEFT: writes}),
            "gpu0.k0.cta0.t0": thread({WORD_PUT: reads}),
        }
    )


SCENARIOS = {
    "head: rows before cells": Scenario(
        ("P6", "P7"),
        rows_before_cells,
        ({"got": 0},),
        {
            **broken_arrival(ARRIVAL_RELAXED),
            "arrival of CTA scope": (ARRIVAL_OF_CTA_SCOPE,),
            "no barrier before the arrival": (NO_BARRIER_BEFORE_ARRIVAL,),
            "no barrier behind the arrival": (NO_BARRIER_BEHIND_ARRIVAL,),
            "cell relaxed": (CELL_RELAXED,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: rows are read before the next put": Scenario(
        ("P8",),
        rows_read_before_next_put,
        ({"got": 2},),
        {
            "cell relaxed": (CELL_RELAXED,),
            "argmax does not wait for the product": (ARGMAX_DOES_NOT_WAIT,),
            "gather does not wait for argmax": (GATHER_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: words before cells": Scenario(
        ("P8", "P9"),
        words_before_cells,
        ({"got": 0},),
        {
            **broken_arrival(ARRIVAL_RELAXED),
            "arrival of CTA scope": (ARRIVAL_OF_CTA_SCOPE,),
            "no barrier behind the arrival": (NO_BARRIER_BEHIND_ARRIVAL,),
            "no barrier behind the wait": (NO_BARRIER_BEHIND_WAIT,),
            "cell relaxed": (CELL_RELAXED,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: words are read before the next are put": Scenario(
        ("P6",),
        words_read_before_next_put,
        ({"got": 2},),
        {
            "cell relaxed": (CELL_RELAXED,),
            "gather does not wait for argmax": (GATHER_DOES_NOT_WAIT,),
            "argmax does not wait for gather": (ARGMAX_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: logits before cells": Scenario(
        ("P8",),
        logits_before_cells,
        ({"got": 0},),
        {
            "cell relaxed": (CELL_RELAXED,),
            "argmax does not wait for the product": (ARGMAX_DOES_NOT_WAIT,),
            "collect does not wait for argmax": (COLLECT_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: logits are read before the next product": Scenario(
        ("P6",),
        logits_read_before_next_product,
        ({"got": 2},),
        {
            "cell relaxed": (CELL_RELAXED,),
            "gather does not wait for collect": (GATHER_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: counts are of this round": Scenario(
        ("P6",),
        counts_of_the_round,
        ({"got": 0}, {"got": 9}),
        {
            "collect does not wait for argmax": (COLLECT_DOES_NOT_WAIT,),
            "argmax does not wait for gather": (ARGMAX_DOES_NOT_WAIT,),
        },
    ),
    "head: a cell of gather is read before the next one": Scenario(
        ("P8",),
        cell_read_before_next_cell,
        ({"look": "9|2"}, {"seen": "9|2"}),
        {
            "argmax does not wait for gather": (ARGMAX_DOES_NOT_WAIT,),
            "gather does not wait for argmax": (GATHER_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: a cell of argmax is read before the next one": Scenario(
        ("P6",),
        word_cell_read_before_next_cell,
        ({"glance": "9|2"}, {"caught": "9|2"}),
        {
            "gather does not wait for argmax": (GATHER_DOES_NOT_WAIT,),
            "argmax does not wait for gather": (ARGMAX_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "head: the epoch is read before it is bumped": Scenario(
        ("P7",),
        epoch_read_before_bump,
        ({"old": 1},),
        broken_arrival(ARRIVAL_RELAXED),
    ),
    "head: the next round starts clean": Scenario(
        ("P7",),
        next_round_starts_clean,
        ({"ours": 0}, {"base": 0}, {"next_first": 2}, {"next_first": 1}),
        {
            "argmax does not wait for gather": (ARGMAX_DOES_NOT_WAIT,),
            "gather does not wait for argmax": (GATHER_DOES_NOT_WAIT,),
        },
    ),
    "head: parts of three items": Scenario(
        (),
        parts_of_three_items,
        mixed_up("item"),
        {
            "a barrier of the warp only": (PARTS_BARRIER_OF_WARP,),
            "one buffer": (ONE_BUFFER,),
        },
    ),
}
