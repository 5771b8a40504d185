"""The small batches' part of the protocol as litmus programs; protocol.py says what those are.

A unit is two words; a program has one or both of them. Words of the first round hold 1, those of
the next round 2, cleared ones 0. The mark of a word is the second half of it where a program tells
the data from the mark.
"""

from __future__ import annotations

import re

from tests.litmus.kernel_source import Edit, Kernels, Operands
from tests.litmus.protocol import (
    ACQUIRE_OF_GPU_SCOPE,
    ACQUIRE_RELAXED,
    CELL,
    FIRST_WARP,
    IS_FINISHER,
    IS_REACHED,
    LOOKS_FOR_FAILURE,
    MASK_BEFORE,
    NO_BARRIER_BEHIND_ROUTE,
    NO_COUNTS,
    OTHER_ELEMENTS,
    QUANTISES_TOKENS,
    RELEASE_OF_GPU_SCOPE,
    ROW_PUT,
    SIGNAL,
    SIGNAL_RELAXED,
    THREAD_0,
    WAIT,
    Scenario,
    Twins,
    arriving,
    buffers,
    combining,
    does_not_wait,
    mixed_up,
    text,
)

# ---- Statements and conditions of the kernels, by their text.

UNIT_PUT = r"put_unit: "
UNIT_LOOKED_AT = r"look_at_unit: "
UNIT_CLEARED = r"\bclear_unit\("
#: The acquire of the combine before (P12), the look at a cell for its count or before P11's
#: acquire, and that acquire.
AWAITED = r"wait_until_reached: "
COUNT_LOOKED_AT = r"is_reached_in_time: "
PULLED_ACQUIRED = r"wait_for_epoch: "
SIGNALS = r"signal_peer: |signal_peers: store_relaxed_sys"
ANNOUNCES = r"publish_small_round: store_relaxed_sys"
TELLS_PULLED = r"signal_peer: |tell_pulled: store_relaxed_sys"
COMBINED_READ = r"\bload_state\("
COMBINED_LEFT = r"\bleave_combined\("
EPOCH_LEFT = r"store_word\(&local->epoch"
EPOCH_READ = r"load_word\(&local_control\(args\)->epoch\)"
COUNTS_LEFT = r"store_word\(&rows_from\(args\)\[peer\]"
COUNT_READ = r"load_word\(&rows_from\(args\)\[sent\.source\]\)"
STAGED = r"piece_in\(staged, cta\.thread\) = piece"
PUTS_UNITS = r"\bput_units<"
TAKEN = r"\btake_units\("
STORED = r"\bstore_chunk\("

SENDS = r"^role\.sends\(\)$"
RECEIVES = r"^role\.receives\(\)$"
PUBLISHES = r"^role\.publishes\(\)$"
DOES_NOT_PUBLISH = r"^!role\.publishes\(\)$"
MASK_LEFT = r"\bleave_mask\("
AWAITS_COMBINE = r"\bawait_previous_round\("
PUBLISHES_AFTER_PULL = r"^role\.publishes\(\) && round\.has_pulled != 0 && shared\.faulted == 0$"
HAS_PULLED = r"^round\.has_pulled != 0 && !has_failed$"
NO_RANK_LEAVES = r"^round\.has_pulled != 0 && args\.active_ranks != 0"
#: What a healthy thread without quantiser and counts does not come to; second looks are left out,
#: too.
HEALTHY = (
    r"^Config::kQuantiser != kQuantiserNone$",
    r"^round\.has_failed$",
    r"^round\.is_repeated\(\)$",
    r"^share\.first\.token >= args\.geometry\.num_tokens$",
    r"^has_failed$",
    r"^fault != 0$",
    r"^!\(fault == 0\)$",
    r"^!\(cell_epoch\(cell\) == epoch\)$",
    r"^!\(see_unit",
    r"^missing != 0$",
    r"^!\(missing == 0\)$",
    IS_REACHED,
    NO_RANK_LEAVES,
    *NO_COUNTS,
)
HAS_NO_TOKEN = r"^cta\.block >= args\.geometry\.num_tokens$"
HAS_TOKENS = r"^SentItem item"
HAS_RECEIVED = r"^ReceivedRow row"

COMBINE_RECEIVES = r"^!\(!role\.receives\(\)\)$"
COMBINE_SIGNALS = r"^role\.publishes\(\) && !round\.has_failed$"
COMBINE_HAS_ITEMS = r"^int item = share"
MORE_PARTS = r"^!\(cta\.block \+ plan\.role\.num_senders >= most_items\)$"
MORE_UNITS = r"^unit \+= cta\.num_threads; unit < end"

# ---- What breaks an order.

DISPATCH_DOES_NOT_WAIT = does_not_wait("small_dispatch")
COMBINE_DOES_NOT_WAIT = does_not_wait("small_combine")
AWAIT_RELAXED = Edit("wait_until_reached", "load_acquire_sys", "load_relaxed_sys")
NO_AWAIT = Edit("await_previous_round", r"await_combine\([^;]*\);")
BULK_DOES_NOT_AWAIT = Edit("await_small_combine", r"await_combine\([^;]*\);")
NO_BARRIER_BEHIND_AWAIT = Edit("send_parts_of_tokens", r"cta\.sync\(\);")
PULLED_RELAXED = Edit("tell_pulled", r"\bsignal_peer\(", "store_relaxed_sys(")
ONE_STAGING = Edit("staging_of", r"epoch % 2", "0")
ONE_MARK = Edit("has_arrived", r"&&\s*halves\[3\] >> 16 == mark")
NO_MARK_OF_FIRST = Edit("has_arrived", r"halves\[1\] >> 16 == mark\s*&&")
ONE_STAGED_HALF = Edit("send_parts_of_tokens", r"turn = 1 - turn;")
ONE_TAKEN_HALF = Edit("receive_chunk", r"turn = 1 - turn;")
NO_BARRIER_BEHIND_UNITS = Edit("receive_chunk", r"cta\.sync_warp\(\);")


def broken_p12(no_await: Edit) -> Twins:
    """Twins that break P12. no_await: takes the dispatch's wait away."""
    return {
        "signal relaxed": (SIGNAL_RELAXED,),
        "acquire relaxed": (AWAIT_RELAXED,),
        "release of GPU scope": (RELEASE_OF_GPU_SCOPE,),
        "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
        "nobody waits for the combine before": (no_await,),
    }


# ---- One thread of each kernel. An access without operands is left out.


def _awaiting(kernels: Kernels, awaits: str) -> dict[str, Operands]:
    """Operands of the look at the combine cell, unless a twin has taken it away."""
    there = "await_combine(" in kernels.bodies["await_previous_round"]
    return {LOOKS_FOR_FAILURE: "", **({AWAITED: awaits} if there else {})}


def sending(kernels: Kernels, *, awaits: str = "", put: str = "") -> str:
    """Dispatch, a thread of a sender with one token, which awaits the combine before."""
    untaken = [*HEALTHY, RECEIVES, PUBLISHES]
    operands = _awaiting(kernels, awaits) | {UNIT_PUT: put}
    return kernels.thread("small_dispatch_body", operands, {}, untaken)


def publishing(
    kernels: Kernels,
    *,
    awaits: str = "",
    cell: str = "",
    count: str = "",
    pulled: bool = False,
    tells: str = "",
    awaits_pulled: tuple[str, str] = ("", ""),
    epoch_left: str = "",
    counts_left: str = "",
    combined_read: str = "",
    leaver: str = "",
    mask_seen: str = "",
    mask_left: str = "",
) -> str:
    """Dispatch, a thread of CTA F, which is a receiver without rows.

    awaits, cell, count: operands of the look at the combine before, of the cell that it stores, and
    of the look at a cell. pulled: after a pull combine. Then tells, awaits_pulled: of the cell that
    says so, and of the look at such a cell and its acquire. leaver: of the look at a rank that
    leaves; then the thread awaits no combine. The others are instructions.
    """
    operands = _awaiting(kernels, awaits) | {ANNOUNCES: cell}
    plain: dict[str, Operands] = {
        EPOCH_LEFT: epoch_left,
        COUNTS_LEFT: counts_left,
        COMBINED_READ: combined_read,
    }
    untaken = [*HEALTHY, SENDS, DOES_NOT_PUBLISH, HAS_RECEIVED]
    if leaver or mask_seen or mask_left:
        untaken.remove(NO_RANK_LEAVES)
        plain |= {MASK_BEFORE: mask_seen, MASK_LEFT: mask_left}
        plain[AWAITS_COMBINE] = ""
        operands[AWAITED] = leaver
    if pulled:
        look, acquire = awaits_pulled
        operands |= {TELLS_PULLED: tells, COUNT_LOOKED_AT: (count, look)}
        operands[PULLED_ACQUIRED] = acquire
    else:
        operands[COUNT_LOOKED_AT] = count
        untaken += [HAS_PULLED, PUBLISHES_AFTER_PULL]
    return kernels.thread("small_dispatch_body", operands, plain, untaken)


def receiving(kernels: Kernels, *, count: str = "", look: str = "", clear: str = "") -> str:
    """Dispatch, a thread of a receiver. look: operands of the look that finds a unit."""
    operands = _awaiting(kernels, "") | {COUNT_LOOKED_AT: count}
    plain: dict[str, Operands] = {}
    untaken = [*HEALTHY, SENDS, PUBLISHES, PUBLISHES_AFTER_PULL]
    if look:
        operands[UNIT_LOOKED_AT] = look
        plain[UNIT_CLEARED] = clear
    else:
        untaken.append(HAS_RECEIVED)
    return kernels.thread("small_dispatch_body", operands, plain, untaken)


def combining_small(
    kernels: Kernels,
    *,
    put: str = "",
    signal: str = "",
    look: str = "",
    clear: str = "",
    epoch_read: str = "",
    count_read: str = "",
    combined_left: str = "",
) -> str:
    """Combine, a thread: of a sender by `put`, of the CTA that signals, or of a receiver.

    put, signal, look: operands. The others are instructions.
    """
    operands: dict[str, Operands] = {LOOKS_FOR_FAILURE: ""}
    plain: dict[str, Operands] = {EPOCH_READ: epoch_read}
    untaken = [*HEALTHY, OTHER_ELEMENTS]
    if put:
        operands[UNIT_PUT] = put
        plain[COUNT_READ] = count_read
        untaken += [MORE_PARTS, MORE_UNITS, COMBINE_RECEIVES]
    else:
        untaken.append(SENDS)
    if signal:
        operands[SIGNALS] = signal
        plain[COMBINED_LEFT] = combined_left
    else:
        untaken.append(COMBINE_SIGNALS)
    if look:
        operands[UNIT_LOOKED_AT] = look
        plain[UNIT_CLEARED] = clear
    else:
        untaken.append(COMBINE_HAS_ITEMS)
    return kernels.thread("small_combine_body", operands, plain, untaken)


def marks_asked(kernels: Kernels) -> list[str]:
    """What a look that leaves must have found of a unit's two words, by the text."""
    asked = re.findall(r"halves\[(\d)\] >> 16 == mark", kernels.bodies["has_arrived"])
    return ["-|1" if half in asked else "-|-" for half in ("1", "3")]


# ---- Programs.

PULLED = "zero|pulled"
AWAITED_SIGNAL = f"awaited=-|1, {SIGNAL}"
SIGNALLED = f"{SIGNAL}, 0|1"
CLEARS = "st.weak word, 0"


def unit_with_its_marks(kernels: Kernels, *, turned: bool = False) -> str:
    """Rank 0 puts a unit, rank 1 leaves its poll; the two words are in no order."""
    first, second = marks_asked(kernels)
    put = ["a|mark_a, 7|1", "b|mark_b, 8|1"]
    look = [f"got_a={first}, a|mark_a", f"got_b={second}, b|mark_b"]
    return text(
        {
            "gpu0.k0.cta0.t0": sending(kernels, put=" & ".join(put[:: -1 if turned else 1])),
            "gpu1.k0.cta1.t0": receiving(kernels, look=" & ".join(look)),
        }
    )


def unit_with_its_marks_turned(kernels: Kernels) -> str:
    """The same with the second word first."""
    return unit_with_its_marks(kernels, turned=True)


def cleared_before_next_put(kernels: Kernels) -> str:
    """Rank 1 clears a word of dispatch n; rank 0 puts one of dispatch n+1 to the same place."""
    return text(
        {
            "gpu0.k0.cta0.t1": sending(kernels, put="word, 1"),
            "gpu1.k0.cta1.t0": receiving(kernels, look="got=1, word", clear=CLEARS),
            "gpu1.k1.cta0.t0": combining_small(kernels, signal=SIGNALLED),
            "gpu0.k1.cta0.t0": WAIT,
            "gpu0.k2.cta0.t0": sending(kernels, awaits=AWAITED_SIGNAL),
            "gpu0.k2.cta0.t1": sending(kernels, put="word, 2"),
        }
    )


def combined_before_next_of_parity(kernels: Kernels) -> str:
    """Rank 1 clears a word of combine n; rank 0 puts one of combine n+2, of the same parity."""
    return text(
        {
            "gpu1.k0.cta1.t0": combining_small(kernels, look="got=1, word", clear=CLEARS),
            "gpu1.k1.cta0.t0": publishing(kernels),
            "gpu1.k2.cta0.t0": combining_small(kernels, signal=SIGNALLED),
            "gpu0.k0.cta0.t0": combining_small(kernels, put="word, 1"),
            "gpu0.k1.cta0.t0": publishing(kernels, awaits=AWAITED_SIGNAL),
            "gpu0.k2.cta0.t0": combining_small(kernels, put="word, 2"),
        }
    )


def combined_before_next_round(kernels: Kernels) -> str:
    """Rank 1 clears a word of combine n after its signal n; rank 0 has acquired that, and no more,
    when it puts a word of combine n+1: to the other staging.
    """
    cleared = "word" if "epoch % 2" in kernels.bodies["staging_of"] else "next"
    return text(
        {
            "gpu0.k0.cta0.t0": combining_small(kernels, put=f"{cleared}, 1"),
            "gpu1.k0.cta0.t0": combining_small(kernels, signal=SIGNALLED),
            "gpu1.k0.cta1.t0": combining_small(
                kernels, look=f"got=1, {cleared}", clear=f"st.weak {cleared}, 0"
            ),
            "gpu0.k1.cta0.t0": publishing(kernels, awaits=AWAITED_SIGNAL),
            "gpu0.k2.cta0.t0": combining_small(kernels, put="next, 2"),
        }
    )


def pulled_before_next_experts(kernels: Kernels) -> str:
    """Rank 1's pull combine reads a row of rank 0, whose experts write the next one after a small
    dispatch.
    """
    return text(
        {
            "gpu1.k0.cta1.t0": combining(kernels, items=1, row_read="ld.weak got, out"),
            "gpu1.k1.cta0.t0": publishing(kernels, pulled=True, tells=f"{PULLED}, 0|1"),
            "gpu0.k0.cta0.t0": publishing(
                kernels,
                pulled=True,
                awaits_pulled=(f"look=-|1, {PULLED}", f"seen=-|1, {PULLED}"),
            ),
            "gpu0.k1.cta0.t0": f"{WAIT}; st.weak out, 2",
        }
    )


def experts_read_before_bulk_put(kernels: Kernels) -> str:
    """Rank 0's experts read a row of a small round; rank 1's next dispatch is of any size."""
    untaken = [*HEALTHY, IS_FINISHER, QUANTISES_TOKENS, FIRST_WARP, THREAD_0, HAS_NO_TOKEN]
    waits = "await_combine(" in kernels.bodies["await_small_combine"]
    awaits: dict[str, Operands] = {AWAITED: AWAITED_SIGNAL} if waits else {}
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; ld.weak got, row",
            "gpu0.k1.cta0.t0": combining_small(kernels, signal=SIGNALLED),
            "gpu1.k0.cta0.t0": arriving(kernels, token=True, put="st.weak row, 2"),
            "gpu1.k0.cta0.t32": kernels.thread(
                "dispatch_body", {LOOKS_FOR_FAILURE: "", **awaits}, {ROW_PUT: ""}, untaken
            ),
        }
    )


def cell_looked_at_before_the_next(kernels: Kernels) -> str:
    """A late receiver of rank 0 looks at the cell of round n; rank 1 stores that of round n+1."""
    return text(
        {
            "gpu0.k0.cta1.t0": receiving(kernels, count=f"look, {CELL}"),
            "gpu0.k1.cta0.t0": combining_small(kernels, signal=SIGNALLED),
            "gpu1.k0.cta0.t0": publishing(kernels, awaits=AWAITED_SIGNAL, cell=f"{CELL}, 9|2"),
        }
    )


def small_state_of_the_next_kernel(kernels: Kernels) -> str:
    """Epochs and counts that a small round leaves for the kernels after it."""
    return text(
        {
            "gpu0.k0.cta0.t0": publishing(
                kernels, epoch_left="st.weak epoch, 1", counts_left="st.weak rows, 5"
            ),
            "gpu0.k1.cta0.t0": combining_small(
                kernels,
                put="sent, 1",
                epoch_read="ld.weak ours, epoch",
                count_read="ld.weak count, rows",
            ),
            "gpu0.k1.cta1.t0": combining_small(
                kernels, signal=SIGNALLED, combined_left="st.weak combined, 1"
            ),
            "gpu0.k2.cta0.t0": publishing(
                kernels, combined_read="ld.weak base, combined", epoch_left="st.weak epoch, 2"
            ),
        }
    )


def staged_parts_of_three_items(kernels: Kernels) -> str:
    """A fast warp stages parts and routes 1, 2, 3 of a sender; a slow one puts each."""
    function = "send_parts_of_tokens"
    where = buffers(kernels, function, "shared.staged + turn * kPartBytes", "turn = 1 - turn;")
    writes = tuple(f"st.weak part_{place}, {item}" for item, place in enumerate(where, 1))
    reads = tuple(f"ld.weak item{item}, part_{place}" for item, place in enumerate(where, 1))
    untaken = [*HEALTHY, r"^is_first$"]
    turns = {HAS_TOKENS: 3}
    return text(
        {
            "gpu0.k0.cta0.t0": kernels.thread(
                function, {UNIT_PUT: ""}, {STAGED: writes}, untaken, turns
            ),
            "gpu0.k0.cta0.t32": kernels.thread(function, {}, {PUTS_UNITS: reads}, untaken, turns),
        }
    )


def taken_parts_of_three_items(kernels: Kernels) -> str:
    """A fast lane takes the units of rows 1, 2, 3 of a warp; a slow one stores each."""
    function = "receive_chunk"
    where = buffers(kernels, function, "staged + turn * kPartBytes", "turn = 1 - turn;")
    writes = tuple(f"st.weak part_{place}, {item}" for item, place in enumerate(where, 1))
    reads = tuple(f"ld.weak item{item}, part_{place}" for item, place in enumerate(where, 1))
    turns = {HAS_RECEIVED: 3}
    of_slow: dict[str, Operands] = {STORED: reads, TAKEN: ""}
    return text(
        {
            "gpu0.k0.cta0.t0": kernels.thread(function, {}, {TAKEN: writes}, [], turns),
            "gpu0.k0.cta0.t1": kernels.thread(function, {}, of_slow, [], turns),
        }
    )


_ONE_MARK: Twins = {
    "the second mark is not asked for": (ONE_MARK,),
    "the first mark is not asked for": (NO_MARK_OF_FIRST,),
}

SCENARIOS = {
    "a unit's data come with its marks": Scenario(
        ("P10",),
        unit_with_its_marks,
        ({"got_a": "0|-"}, {"got_b": "0|-"}),
        _ONE_MARK,
    ),
    "a unit's data come with its marks, in the other order": Scenario(
        ("P10",),
        unit_with_its_marks_turned,
        ({"got_a": "0|-"}, {"got_b": "0|-"}),
        _ONE_MARK,
    ),
    "units are clear before the next ones": Scenario(
        ("P12",),
        cleared_before_next_put,
        ({"word": 0}, {"word": 1}),
        {
            **broken_p12(NO_AWAIT),
            "no barrier behind the wait": (NO_BARRIER_BEHIND_AWAIT,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "units of a parity are clear before its next ones": Scenario(
        ("P12",),
        combined_before_next_of_parity,
        ({"word": 0}, {"word": 1}),
        {
            **broken_p12(NO_AWAIT),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "units of the next round are in the other staging": Scenario(
        ("P12",),
        combined_before_next_round,
        ({"next": 0},),
        {"one staging": (ONE_STAGING,)},
    ),
    "combine has pulled before the next experts write": Scenario(
        ("P11",),
        pulled_before_next_experts,
        ({"got": 2},),
        {
            "cell relaxed": (PULLED_RELAXED,),
            "cell not acquired": (ACQUIRE_RELAXED,),
            "release of GPU scope": (RELEASE_OF_GPU_SCOPE,),
            "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
        },
    ),
    "experts have read before a bulk dispatch puts": Scenario(
        ("P12",),
        experts_read_before_bulk_put,
        ({"got": 2},),
        {
            **broken_p12(BULK_DOES_NOT_AWAIT),
            "no barrier behind the wait": (NO_BARRIER_BEHIND_ROUTE,),
            "combine does not wait for the experts": (COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "a cell is looked at before the next one": Scenario(
        ("P12",),
        cell_looked_at_before_the_next,
        ({"look": "9|2"},),
        {
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
            "acquire relaxed": (AWAIT_RELAXED,),
            "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
            "nobody waits for the combine before": (NO_AWAIT,),
        },
    ),
    "a small round leaves epochs and counts": Scenario(
        (),
        small_state_of_the_next_kernel,
        ({"ours": 0}, {"ours": 2}, {"count": 0}, {"base": 0}),
        {
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "staged parts of three items": Scenario(
        (),
        staged_parts_of_three_items,
        mixed_up("item"),
        {
            "no barrier behind what is staged": (NO_BARRIER_BEHIND_AWAIT,),
            "one half": (ONE_STAGED_HALF,),
        },
    ),
    "taken parts of three items": Scenario(
        (),
        taken_parts_of_three_items,
        mixed_up("item"),
        {
            "no barrier behind the units": (NO_BARRIER_BEHIND_UNITS,),
            "one half": (ONE_TAKEN_HALF,),
        },
    ),
}
