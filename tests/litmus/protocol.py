"""What the protocol promises, as litmus programs of the kernels' own text, each with broken twins.

A scenario is a program and outcomes that must be impossible. Its threads come out of
kernel_source: order, operation and scope of each access as they stand in kernels/. Ranks are GPUs;
the kernels of a rank are numbered along its stream. Experts are kernels that read or write plainly;
a kernel without the launch attribute waits for the one before it by being started, so theirs begin
with the wait.

A twin is the same scenario with something taken out of the kernels' text; then an outcome must have
become possible. A twin that stays impossible would mean that the scenario does not look at what it
says it looks at.

Few threads, rows and ranks stand for many: an access that is left out takes part in no order that
is claimed here, and what orders one row, peer or CTA orders each of them, by the same instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.litmus.kernel_source import Edit, Kernels, Operands

#: What broken twins take out of the text, by the twin's name.
Twins = dict[str, tuple[Edit, ...]]
#: Outcomes that must be impossible.
Stale = tuple[dict[str, int | str], ...]


class Scenario(NamedTuple):
    """pairs: pairs of kernels/PROTOCOL.md that it stands for. stale: what must not be."""

    pairs: tuple[str, ...]
    program: Callable[[Kernels], str]
    stale: Stale
    twins: Twins


# ---- Statements and conditions of the kernels, by their text.

ROW_PUT = r"\bput_token<"
EPOCH_READ = r"load_word\(&local_control\(args\)->epoch\)"
EPOCH_BUMP = r"store_word\(&local->epoch"
ARRIVALS_RESET = r"store_word\(&local->arrivals"
COUNTS_WRITTEN = r"shared\.counts\[peer\] = count"
MARKED = r"\bmark_empty_slots\("
LAID_OUT = r"\blay_out_scales\("
ROUTE_WRITTEN = r"route\.rows\[k\] = row"
PREPARES = r"quantising\.prepare\("
PUTS_QUANTISED = r"quantising\.put\("

#: The cell that dispatch stores for a peer, and the signal of the other kernels; relaxed in twins.
CELL_STORED = r"signal_peer: |publish_counts: store_relaxed_sys"
SIGNAL_STORED = r"signal_peer: |signal_peers: store_relaxed_sys"
#: A look at a cell, and the acquire behind it.
WAITS = r"(?:wait_for_epoch|is_reached_in_time): "
#: An access that looks at what no healthy round writes: left out of the programs.
LOOKS_FOR_FAILURE = r"load_fault: "

SLOT_TAKEN = r"&send_counters\[target\]"

#: The last warp alone waits for a small combine before this dispatch (small_protocol.py).
IN_LAST_WARP = r"^!\(lane < 0\)$"

#: What a thread of a dispatch without counts per expert does not come to (counts_protocol.py).
NO_COUNTS = (r"^!\(!has_expert_counts", r"^has_counts\b")

#: What a thread does not come to if no rank leaves (survivors_protocol.py).
NONE_LEAVES = r"^!\(args\.active_ranks == 0 \|\| load_word\(&local->has_pulled"
MASK_BEFORE = r"has_rank\(local->active_ranks"
IS_REACHED = r"^!has_reached\(seen = load_\w+\(cell\), epoch, most_ahead\)$"
TELLS_NO_END = r"^!\(args\.tells_end == 0"
#: The look at the word of a rank that leaves, and its own accesses at the end of combine.
LEAVER_AWAITED = r"wait_until_reached: "
END_ARRIVES = r"tell_end: fetch_add"
END_TOLD = r"tell_end: store_re"

PUTS_TOKENS = r"^int token = cta\.block"
QUANTISES_TOKENS = r"^!\(Config::kQuantiser == kQuantiserNone\)$"
FIRST_WARP = r"^cta\.thread < Cta::kWarpThreads$"
THREAD_0 = r"^cta\.thread == 0$"
IS_FINISHER = r"^!\(finisher < 0\)"
IS_LAST = r"^is_last$"
HAS_FAILED = r"^shared\.has_failed != 0$"
A_FAULT = r"^fault != 0$"
NOT_THE_LAST_THREAD = r"^!\(cta\.thread != cta\.num_threads - 1\)$"

ROW_READ = r"\bcombine_item_in_parts<"
ADDRESSES_FOUND = r"\bfind_rows<"
FAULT_CLEARED = r"shared\.faulted = 0"
FAULT_READ = r"return shared\.faulted"
SIGNALS = r"^format == kCombineUnquantised && cta\.block == 0 && !failed$"
QUANTISES = r"^Format != kCombineUnquantised$"
OTHER_FORMATS = (
    r"^format == kCombineFp8Block$",
    r"^format == kCombineNvfp4$",
    r"^format == kCombineFp8Tensor$",
)
OTHER_ELEMENTS = r"^element == kElementFp(16|32)$"
HAS_ITEMS = r"^int item = cta\.block"

ROWS_COUNTED = r"load_word\(&rows_from\(args\)"
ROWS_FROM_WRITTEN = r"store_word\(&rows_from\(args\)"
ROW_QUANTISED = r"\bquantise_slot<"
HAS_ROWS = r"; row < num_rows;"
HAS_QUANTISED = r"^!\(quantised == 0\)$"
COMPLETES = r"^!\(!completes_rows"
IS_LAST_NUMBER = r"^number == last$"
FIRST_NUMBER = r"shared\.taken\[0\] = take_row"
NEXT_NUMBER = r"shared\.taken\[1 - turn\] = take_row"
NUMBER_READ = r"row = shared\.taken\[turn\]"
ROWS_RESET = r"store_word\(&local_control\(args\)->combine_arrivals"
AMAX_LEFT = r"\bleave_row_amax<"
AMAX_TAKEN = r"\btake_row_amax\("

# ---- What breaks an ordered access.

ARRIVAL_RELAXED = Edit("arrive", "fetch_add_acq_rel_gpu", "fetch_add_relaxed_gpu")
ARRIVAL_RELEASES_ONLY = Edit("fetch_add_acq_rel_gpu", r"atom\.acq_rel", "atom.release")
ARRIVAL_ACQUIRES_ONLY = Edit("fetch_add_acq_rel_gpu", r"atom\.acq_rel", "atom.acquire")
ARRIVAL_OF_CTA_SCOPE = Edit("fetch_add_acq_rel_gpu", r"acq_rel\.gpu", "acq_rel.cta")
NO_BARRIER_BEFORE_ARRIVAL = Edit("arrive", r"cta\.sync\(\);", turn=0)
NO_BARRIER_BEHIND_ARRIVAL = Edit("arrive", r"cta\.sync\(\);", turn=1)
CELL_RELAXED = Edit("publish_counts", r"\bsignal_peer\(", "store_relaxed_sys(")
SIGNAL_RELAXED = Edit("signal_peers", r"\bsignal_peer\(", "store_relaxed_sys(")
RELEASE_OF_GPU_SCOPE = Edit("store_release_sys", r"release\.sys", "release.gpu")
ACQUIRE_RELAXED = Edit("wait_for_epoch", "load_acquire_sys", "load_relaxed_sys")
ACQUIRE_OF_GPU_SCOPE = Edit("load_acquire_sys", r"acquire\.sys", "acquire.gpu")
NO_BARRIER_BEHIND_COUNTS = Edit("dispatch_body", r"cta\.sync\(\);")
NO_P4_BARRIER = Edit("combine_barrier", r"cta\.sync\(\);", turn=1)
NO_BARRIER_BEHIND_CLEARING = Edit("combine_barrier", r"cta\.sync\(\);", turn=0)
NO_BARRIER_BEHIND_ROUTE = Edit("route_token", r"cta\.sync\(\);")
NO_BARRIER_OF_WARP = Edit("route_in_warp", r"cta\.sync_warp\(\);")
ONE_ROUTE = Edit("put_tokens", r"turn = 1 - turn;")
QUANTISING_ONE_ROUTE = Edit("put_quantised_tokens", r"turn = 1 - turn;")
QUANTISING_BARRIER_OF_WARP = Edit("put_quantised_tokens", r"cta\.sync\(\);", "cta.sync_warp();")
ONE_BUFFER = Edit("combine_items", r"turn = 1 - turn;")
NO_BARRIER_BEHIND_ITEM = Edit("combine_items", r"cta\.sync\(\);")
ROWS_RELAXED = Edit("completes_rows", "fetch_add_acq_rel_gpu", "fetch_add_relaxed_gpu")
NO_BARRIER_AFTER_ROW = Edit("quantise_received", r"cta\.sync\(\);")
NO_BARRIER_BEHIND_ROWS_ARRIVE = Edit("completes_rows", r"cta\.sync\(\);")
BARRIER_OF_WARP_BEHIND_AMAX = Edit("quantise_slot", r"cta\.sync\(\);", "cta.sync_warp();")
ONE_NUMBER = Edit("quantise_received", r"turn = 1 - turn;")


def does_not_wait(kernel: str) -> Edit:
    """A kernel that begins before the kernel before it has ended."""
    return Edit(f"{kernel}_body", r"if constexpr \(Config::kPdl\) pdl_wait\(\);")


DISPATCH_DOES_NOT_WAIT = does_not_wait("dispatch")
COMBINE_DOES_NOT_WAIT = does_not_wait("combine")


# ---- Parts of the tables of scenarios.


def broken_arrival(relaxed: Edit) -> Twins:
    """Twins whose arrivals order less. relaxed: takes both halves out."""
    return {
        "arrival relaxed": (relaxed,),
        "arrival only acquires": (ARRIVAL_ACQUIRES_ONLY,),
        "arrival only releases": (ARRIVAL_RELEASES_ONLY,),
    }


def mixed_up(*names: str, written: int = 3) -> Stale:
    """Outcomes in which one of three looks at buffers finds another item than its own.

    names: what each look finds, before the number of its item. written: items that are written.
    """
    numbers = range(written + 1)
    return tuple({f"{n}{a}": b} for n in names for a in (1, 2, 3) for b in numbers if a != b)


ANY_RELEASE_OR_ACQUIRE: Twins = {
    "release of GPU scope": (RELEASE_OF_GPU_SCOPE,),
    "acquire relaxed": (ACQUIRE_RELAXED,),
    "acquire of GPU scope": (ACQUIRE_OF_GPU_SCOPE,),
}


# ---- One thread of each kernel. An access without operands is left out.


def arriving(
    kernels: Kernels,
    *,
    token: bool = False,
    put: str = "",
    count: str = "",
    arrival: str = "",
    epoch_read: str = "",
) -> str:
    """Dispatch, a thread of a CTA that is no finisher; thread 0 of it has `arrival`'s operands.

    token: whether the CTA has one, whose row is `put` and whose slot is taken by `count`.
    """
    operands: dict[str, Operands] = {LOOKS_FOR_FAILURE: ""}
    plain: dict[str, Operands] = {}
    untaken = [IS_FINISHER, QUANTISES_TOKENS, IN_LAST_WARP, *NO_COUNTS]
    if arrival:
        operands[r"->arrivals"] = arrival
        plain[EPOCH_READ] = epoch_read
    else:
        untaken.append(THREAD_0)
    if token:
        plain[ROW_PUT] = put
        operands[SLOT_TAKEN] = count
    else:
        untaken.append(PUTS_TOKENS)
    return kernels.thread("dispatch_body", operands, plain, untaken)


def finishing(
    kernels: Kernels,
    *,
    arrival: str = "",
    last: bool = True,
    count: str = "",
    cell: str = "",
    reset: str = "",
    words: tuple[str, str] | None = None,
    wait: Operands = "",
    counts_written: str = "",
    rows_from: str = "",
    mark: str = "",
    laid_out: str = "",
    leaver: str = "",
    mask_seen: str = "",
) -> str:
    """Dispatch, a thread of a finisher without tokens; thread 0 of it has `arrival`'s operands.

    last: whether its CTA arrived last; then it loads `count`, stores `cell`, and clears the counter
    by `reset`, for the peer of this thread. words: what the last thread of the last CTA writes to
    arrivals and epoch. wait: operands of the look at a cell and of its acquire. counts_written,
    rows_from (of the last), mark, laid_out (of received scales): instructions. leaver, mask_seen:
    of the last, operands of its look at a rank that leaves, its look at the mask before.
    """
    operands: dict[str, Operands] = {WAITS: wait, LOOKS_FOR_FAILURE: ""}
    plain: dict[str, Operands] = {
        COUNTS_WRITTEN: counts_written,
        MARKED: mark,
        LAID_OUT: laid_out,
    }
    untaken = [PUTS_TOKENS, QUANTISES_TOKENS, IN_LAST_WARP, HAS_FAILED, A_FAULT, *NO_COUNTS]
    if leaver or mask_seen:
        untaken.append(IS_REACHED)
        if "await_leavers(" in kernels.bodies["publish_round"]:
            operands[LEAVER_AWAITED] = leaver
            plain[MASK_BEFORE] = mask_seen
    else:
        untaken.append(NONE_LEAVES)
    if arrival:
        operands[r"->arrivals"] = arrival
    else:
        untaken.append(THREAD_0)
    if last:
        operands[r"publish_counts: load"] = count
        operands[CELL_STORED] = cell
        operands[r"publish_counts: .*\], 0\)"] = reset
        plain[ROWS_FROM_WRITTEN] = rows_from
    else:
        untaken.append(IS_LAST)
    if last and words:
        plain[ARRIVALS_RESET], plain[EPOCH_BUMP] = words
    elif last:
        untaken.append(NOT_THE_LAST_THREAD)
    return kernels.thread("dispatch_body", operands, plain, untaken)


def combining(
    kernels: Kernels,
    *,
    signal: str | None = None,
    wait: Operands = "",
    items: int = 0,
    row_read: Operands = "",
    addresses: Operands = "",
    epoch_read: Operands = "",
    ends: tuple[str, str] | None = None,
) -> str:
    """Combine, a thread; of CTA 0 if it has operands for a signal ("": that of another thread).

    items: how many the CTA has; row_read and addresses are instructions of each. ends: of thread 0
    of a rank that may leave, operands of its arrival and of the word that it stores if it is the
    last.
    """
    operands: dict[str, Operands] = {WAITS: wait, LOOKS_FOR_FAILURE: ""}
    plain: dict[str, Operands] = {EPOCH_READ: epoch_read, ADDRESSES_FOUND: addresses}
    untaken = [OTHER_ELEMENTS, *OTHER_FORMATS, QUANTISES, HAS_FAILED, A_FAULT]
    if ends is None:
        untaken.append(TELLS_NO_END)
    else:
        operands[END_ARRIVES], operands[END_TOLD] = ends
        if not ends[1]:
            untaken.append(r"^!\(last != 0 && ")
            del operands[END_TOLD]
    if signal is None:
        untaken.append(SIGNALS)
    else:
        operands[SIGNAL_STORED] = signal
    if items:
        plain[ROW_READ] = row_read
    else:
        untaken.append(HAS_ITEMS)
    return kernels.thread("combine_body", operands, plain, untaken, {HAS_ITEMS: items or 1})


def combining_quantised(
    kernels: Kernels,
    *,
    count: str = "",
    rows: str | None = None,
    take: str | None = None,
    take_reset: str = "",
    arrival: str = "",
    signal: str | None = None,
    reset: str = "",
    wait: Operands = "",
    item: str | None = None,
) -> str:
    """Combine in fp8_block, a thread; thread 0 of its CTA has operands for `take` or `arrival`.

    count: how it reads the rows of its peer. rows: instructions by which it quantises its part of a
    row; None: its CTA gets no row. take: operands by which thread 0 takes its last number;
    take_reset: those of the store after it, if it is the last of all. signal: operands, if the CTA
    completes the rows. reset: what the last thread of that CTA writes. item: what the thread gets
    for the CTA's item, if that has one.
    """
    operands: dict[str, Operands] = {WAITS: wait, LOOKS_FOR_FAILURE: ""}
    plain: dict[str, Operands] = {ROWS_COUNTED: count}
    untaken = [SIGNALS, OTHER_ELEMENTS, *OTHER_FORMATS[1:], r"^format == kCombineUnquantised$"]
    untaken += [HAS_FAILED, A_FAULT, TELLS_NO_END]
    if rows is None:
        untaken += [HAS_ROWS, HAS_QUANTISED]
    else:
        plain[ROW_QUANTISED] = rows
    if take is None and not arrival:
        untaken.append(THREAD_0)
    else:
        numbers = (take or "",) if rows is None else ("", take or "")
        operands[r"take_row: .*->rows_taken"] = numbers
    if take_reset:
        operands[r"end_taking: .*->rows_taken"] = take_reset if rows is None else ("", take_reset)
    else:
        untaken.append(IS_LAST_NUMBER)
    if arrival:
        operands[r"->combine_arrivals"] = arrival
    if signal is None:
        untaken.append(COMPLETES)
    else:
        operands[SIGNAL_STORED] = signal
        plain[ROWS_RESET] = reset
    if item is None:
        untaken.append(HAS_ITEMS)
    else:
        plain[ROW_READ] = item
    return kernels.thread("combine_body", operands, plain, untaken)


def text(threads: dict[str, str]) -> str:
    return "\n".join(f"{place}: {instructions}" for place, instructions in threads.items())


# ---- Programs. `row`, `out` and the cells lie in the memory of the rank that is named beside them.

CELL = "count|epoch"
SEEN = (f"look=-|1, {CELL}", f"seen=-|1, {CELL}")  # of a waiter that leaves with epoch 1
SIGNAL = "zero|signalled"
SIGNALLED = (f"glance=-|1, {SIGNAL}", f"caught=-|1, {SIGNAL}")
WAIT = "griddepcontrol.wait"


def rows_before_cells(kernels: Kernels) -> str:
    """A row put by a CTA of rank 0 that is not the last, read by rank 1's experts.

    And by another thread of the CTA that waited, which copies scales into another layout.
    """
    return text(
        {
            "gpu0.k0.cta0.t1": arriving(kernels, token=True, put="st.weak row, 1"),
            "gpu0.k0.cta0.t0": arriving(kernels, token=True, arrival="first=0, arrivals, 1"),
            "gpu0.k0.cta1.t0": finishing(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": finishing(kernels, cell=f"{CELL}, 1|1"),
            "gpu1.k0.cta0.t0": finishing(kernels, last=False, wait=SEEN),
            "gpu1.k0.cta0.t1": finishing(kernels, last=False, laid_out="ld.weak inside, row"),
            "gpu1.k1.cta0.t0": f"{WAIT}; ld.weak got, row",
        }
    )


def slots_of_two_ctas(kernels: Kernels) -> str:
    """Two CTAs of a rank put a row to the same peer."""
    return text(
        {
            "gpu0.k0.cta0.t1": arriving(kernels, token=True, count="a, counter, 1"),
            "gpu0.k0.cta1.t1": arriving(kernels, token=True, count="b, counter, 1"),
        }
    )


def whole_count(kernels: Kernels) -> str:
    """Slots taken by two CTAs of rank 0; the count that arrives at rank 1 with the cell."""
    return text(
        {
            "gpu0.k0.cta0.t1": arriving(kernels, token=True, count="a, counter, 1"),
            "gpu0.k0.cta0.t0": arriving(kernels, token=True, arrival="first=0, arrivals, 1"),
            "gpu0.k0.cta1.t0": finishing(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": finishing(
                kernels, count="sent, counter", cell=f"{CELL}, sent|1", reset="counter, 0"
            ),
            "gpu1.k0.cta0.t0": finishing(
                kernels, last=False, wait=SEEN, counts_written="st.weak counts, seen"
            ),
            "gpu1.k0.cta0.t1": finishing(kernels, last=False, mark="ld.weak got, counts"),
        }
    )


def epoch_read_before_bump(kernels: Kernels) -> str:
    """A CTA of dispatch reads the epoch; the last one's last thread writes the next."""
    return text(
        {
            "gpu0.k0.cta0.t0": arriving(
                kernels, arrival="first=0, arrivals, 1", epoch_read="ld.weak old, epoch"
            ),
            "gpu0.k0.cta1.t0": finishing(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": finishing(
                kernels, words=("st.weak arrivals, 0", "st.weak epoch, 1")
            ),
        }
    )


def next_round_starts_clean(kernels: Kernels) -> str:
    """What dispatch leaves for the next one and for combine: epoch, arrivals, a counter."""
    return text(
        {
            "gpu0.k0.cta0.t0": arriving(
                kernels, token=True, count="place, counter, 1", arrival="first=0, arrivals, 1"
            ),
            "gpu0.k0.cta1.t0": finishing(kernels, arrival="second=1, arrivals, 1"),
            "gpu0.k0.cta1.t1": finishing(
                kernels,
                count="sent, counter",
                reset="counter, 0",
                words=("st.weak arrivals, 0", "st.weak epoch, 1"),
            ),
            "gpu0.k1.cta0.t0": combining(kernels, epoch_read="ld.weak ours, epoch"),
            "gpu0.k2.cta0.t0": arriving(
                kernels,
                token=True,
                count="next_place, counter, 1",
                arrival="next_first, arrivals, 1",
                epoch_read="ld.weak base, epoch",
            ),
        }
    )


def experts_before_signal(kernels: Kernels) -> str:
    """Rank 0's experts write a row; in rank 1's combine one thread waits, another gets the row."""
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; st.weak out, 1",
            "gpu0.k1.cta0.t0": combining(kernels, signal=f"{SIGNAL}, 0|1"),
            "gpu1.k0.cta1.t0": combining(kernels, wait=SIGNALLED, items=1),
            "gpu1.k0.cta1.t1": combining(kernels, items=1, row_read="ld.weak got, out"),
        }
    )


def experts_read_before_next_put(kernels: Kernels) -> str:
    """Rank 0's experts read a row of round n; rank 1 puts one of round n+1 into the same slot."""
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; ld.weak got, row",
            "gpu0.k1.cta0.t0": combining(kernels, signal=f"{SIGNAL}, 0|1"),
            "gpu1.k0.cta1.t0": combining(kernels, wait=SIGNALLED),
            "gpu1.k1.cta0.t1": arriving(kernels, token=True, put="st.weak row, 2"),
        }
    )


def combine_read_before_next_experts(kernels: Kernels) -> str:
    """Rank 1's combine n gets a row of rank 0; rank 0's experts of round n+1 write the next."""
    return text(
        {
            "gpu1.k0.cta1.t0": combining(kernels, items=1, row_read="ld.weak got, out"),
            "gpu1.k1.cta0.t0": finishing(kernels, cell=f"{CELL}, 1|1"),
            "gpu0.k0.cta0.t0": finishing(kernels, last=False, wait=SEEN),
            "gpu0.k1.cta0.t0": f"{WAIT}; st.weak out, 2",
        }
    )


def mark_before_next_put(kernels: Kernels) -> str:
    """Rank 0 marks an empty slot, rank 1 fills it in the next round, rank 0's experts look."""
    return text(
        {
            "gpu0.k0.cta1.t0": finishing(kernels, last=False, mark="st.weak slot, -1"),
            "gpu0.k1.cta0.t0": WAIT,
            "gpu0.k2.cta0.t0": combining(kernels, signal=f"{SIGNAL}, 0|1"),
            "gpu1.k0.cta1.t0": combining(kernels, wait=SIGNALLED),
            "gpu1.k1.cta0.t0": arriving(
                kernels, token=True, put="st.weak slot, 7", arrival="first=0, arrivals, 1"
            ),
            "gpu1.k1.cta1.t0": finishing(
                kernels, arrival="second=1, arrivals, 1", cell=f"{CELL}, 1|1"
            ),
            "gpu0.k3.cta0.t0": finishing(kernels, last=False, wait=SEEN),
            "gpu0.k4.cta0.t0": f"{WAIT}; ld.weak got, slot",
        }
    )


def cell_read_before_next_cell(kernels: Kernels) -> str:
    """A late finisher of rank 0 reads the cell of round n; rank 1 sends the one of round n+1."""
    return text(
        {
            "gpu0.k0.cta1.t0": finishing(
                kernels, last=False, wait=(f"look, {CELL}", f"seen, {CELL}")
            ),
            "gpu0.k1.cta0.t0": combining(kernels, signal=f"{SIGNAL}, 0|1"),
            "gpu1.k0.cta1.t0": combining(kernels, wait=SIGNALLED),
            "gpu1.k1.cta0.t0": finishing(kernels, cell=f"{CELL}, 9|2"),
        }
    )


def signal_read_before_next_signal(kernels: Kernels) -> str:
    """A late CTA of rank 0 reads the signal of round n; rank 1 sends the one of round n+1."""
    return text(
        {
            "gpu0.k0.cta1.t0": combining(kernels, wait=(f"glance, {SIGNAL}", f"caught, {SIGNAL}")),
            "gpu0.k1.cta0.t0": finishing(kernels, cell=f"{CELL}, 1|1"),
            "gpu1.k0.cta0.t0": finishing(kernels, last=False, wait=SEEN),
            "gpu1.k1.cta0.t0": combining(kernels, signal=f"{SIGNAL}, 0|2"),
        }
    )


def fault_is_seen(kernels: Kernels) -> str:
    """Thread 0 clears the CTA's fault flag, thread 1 sets it, thread 0 looks."""
    fails = {
        rf"{WAITS}|leave_fault: |load_fault: ": "",
        r"combine_barrier: store_relaxed_cta": "faulted, 1",
    }
    untaken = [SIGNALS, OTHER_ELEMENTS, *OTHER_FORMATS, QUANTISES, HAS_ITEMS, HAS_FAILED]
    untaken.append(TELLS_NO_END)
    clears = {FAULT_CLEARED: "st.weak faulted, 0", FAULT_READ: "ld.weak got, faulted"}
    return text(
        {
            "gpu0.k0.cta0.t0": kernels.thread(
                "combine_body",
                {rf"{WAITS}|load_fault: ": ""},
                clears,
                [*untaken, A_FAULT],
            ),
            "gpu0.k0.cta0.t1": kernels.thread("combine_body", fails, {}, [*untaken, THREAD_0]),
        }
    )


def buffers(kernels: Kernels, function: str, used: str, turned: str) -> tuple[str, str, str]:
    """Which of two buffers three turns of a loop use, by its text: one and the other, or one."""
    body = kernels.bodies[function]
    return ("a", "b", "a") if used in body and turned in body else ("a", "a", "a")


def route_of_three_tokens(kernels: Kernels) -> str:
    """A fast warp routes tokens 1, 2, 3 of a CTA; a slow one reads the route of each."""
    route = buffers(kernels, "put_tokens", "shared.routes[turn]", "turn = 1 - turn;")
    operands = {r"->arrivals": "", LOOKS_FOR_FAILURE: ""}
    writes = tuple(f"st.weak route_{where}, {token}" for token, where in enumerate(route, 1))
    reads = tuple(f"ld.weak token{token}, route_{where}" for token, where in enumerate(route, 1))
    turns = {PUTS_TOKENS: 3}
    return text(
        {
            "gpu0.k0.cta0.t0": kernels.thread(
                "dispatch_body",
                operands | {SLOT_TAKEN: ""},
                {ROUTE_WRITTEN: writes},
                [IS_FINISHER, QUANTISES_TOKENS, IN_LAST_WARP, *NO_COUNTS],
                turns,
            ),
            "gpu0.k0.cta0.t32": kernels.thread(
                "dispatch_body",
                {LOOKS_FOR_FAILURE: ""},
                {ROW_PUT: reads},
                [IS_FINISHER, QUANTISES_TOKENS, THREAD_0, FIRST_WARP, IN_LAST_WARP],
                turns,
            ),
        }
    )


def route_of_three_quantised_tokens(kernels: Kernels) -> str:
    """The same where the tokens are quantised, and with each its part of the row's amax."""
    body = "put_quantised_tokens"
    routing: dict[str, Operands] = {SLOT_TAKEN: "", LOOKS_FOR_FAILURE: ""}
    where = buffers(kernels, body, "shared.routes[turn]", "turn = 1 - turn;")
    assert kernels.bodies[body].count("shared.amax[turn]") == 2
    tokens = list(enumerate(where, 1))
    turns, untaken = {PUTS_TOKENS: 3}, [IN_LAST_WARP, *NO_COUNTS]
    writes: dict[str, Operands] = {
        ROUTE_WRITTEN: tuple(f"st.weak route_{place}, {token}" for token, place in tokens),
        PREPARES: tuple(f"st.weak amax_{place}, {token}" for token, place in tokens),
    }
    reads: dict[str, Operands] = {
        ROW_PUT: tuple(f"ld.weak token{token}, route_{place}" for token, place in tokens),
        PUTS_QUANTISED: tuple(f"ld.weak amax{token}, amax_{place}" for token, place in tokens),
    }
    return text(
        {
            "gpu0.k0.cta0.t0": kernels.thread(body, routing, writes, untaken, turns),
            "gpu0.k0.cta0.t32": kernels.thread(body, {}, reads, [FIRST_WARP, *untaken], turns),
        }
    )


def targets_within_a_warp(kernels: Kernels) -> str:
    """A lane finds the target rank of its k; another looks whether an earlier k has the same."""

    def lane(plain: dict[str, Operands]) -> str:
        routing: dict[str, Operands] = {SLOT_TAKEN: "", LOOKS_FOR_FAILURE: ""}
        return kernels.thread("route_token", routing, plain, NO_COUNTS)

    return text(
        {
            "gpu0.k0.cta0.t0": lane({r"route\.target_ranks\[k\] = target": "st.weak target, 1"}),
            "gpu0.k0.cta0.t1": lane({r"route\.target_ranks\[earlier\]": "ld.weak got, target"}),
        }
    )


def addresses_of_three_items(kernels: Kernels) -> str:
    """A fast warp finds the rows of items 1, 2, 3 of a CTA of combine; a slow one reads them."""
    used = "next.token, sizes, 1 - turn, shared"
    where = buffers(kernels, "combine_items", used, "turn = 1 - turn;")
    writes = tuple(f"st.weak rows_{place}, {item}" for item, place in enumerate(where, 1))
    reads = tuple(f"ld.weak item{item}, rows_{place}" for item, place in enumerate(where, 1))
    return text(
        {
            # The last turn looks one item ahead as well.
            "gpu0.k0.cta1.t0": combining(kernels, items=3, addresses=(*writes, "")),
            "gpu0.k0.cta1.t32": combining(kernels, items=3, row_read=reads),
        }
    )


def quantised_before_signal(kernels: Kernels) -> str:
    """Rank 0's experts write a row, a CTA that is not the last quantises it, rank 1 gets it."""
    quantises = "ld.weak raw, out; st.weak quantised, raw"
    return text(
        {
            "gpu0.k0.cta0.t0": f"{WAIT}; st.weak out, 1",
            "gpu0.k1.cta0.t0": combining_quantised(kernels, rows="", arrival="first=0, arrived, 1"),
            "gpu0.k1.cta0.t1": combining_quantised(kernels, rows=quantises),
            "gpu0.k1.cta1.t0": combining_quantised(
                kernels, rows="", arrival="second=1, arrived, 1", signal=""
            ),
            "gpu0.k1.cta1.t1": combining_quantised(kernels, rows="", signal=f"{SIGNAL}, 0|1"),
            "gpu1.k0.cta1.t0": combining_quantised(kernels, wait=SIGNALLED, item=""),
            "gpu1.k0.cta1.t1": combining_quantised(kernels, item="ld.weak got, quantised"),
        }
    )


def next_combine_starts_clean(kernels: Kernels) -> str:
    """What the CTA that completes a combine leaves for the combine after the next dispatch."""
    return text(
        {
            "gpu0.k0.cta0.t0": combining_quantised(kernels, rows="", arrival="first=0, arrived, 1"),
            "gpu0.k0.cta1.t0": combining_quantised(
                kernels,
                rows="",
                arrival="second=1, arrived, 1",
                signal="",
                reset="st.weak arrived, 0",
            ),
            "gpu0.k1.cta0.t0": WAIT,
            "gpu0.k2.cta0.t0": combining_quantised(
                kernels, rows="", arrival="next_first, arrived, 1"
            ),
        }
    )


def rows_of_two_ctas(kernels: Kernels) -> str:
    """Two CTAs of a rank take a row each."""
    return text(
        {
            "gpu0.k0.cta0.t0": combining_quantised(kernels, take="a, taken, 1"),
            "gpu0.k0.cta1.t0": combining_quantised(kernels, take="b, taken, 1"),
        }
    )


def next_taking_starts_at_the_first_row(kernels: Kernels) -> str:
    """The CTA with the last number of a combine puts the word back for the next combine."""
    return text(
        {
            "gpu0.k0.cta0.t0": combining_quantised(kernels, take="first=0, taken, 1"),
            "gpu0.k0.cta1.t0": combining_quantised(
                kernels, take="second=1, taken, 1", take_reset="taken, 0"
            ),
            "gpu0.k1.cta0.t0": WAIT,
            "gpu0.k2.cta0.t0": combining_quantised(kernels, take="next_first, taken, 1"),
        }
    )


def counts_of_a_late_cta(kernels: Kernels) -> str:
    """A CTA of rank 0's combine reads its counts after others of it have signalled; by then rank 1
    has sent the cell of the next round, and only rank 0's own dispatch may bring it to the counts.
    """
    return text(
        {
            "gpu0.k0.cta0.t1": finishing(kernels, rows_from="st.weak rows, 5"),
            "gpu0.k1.cta0.t1": combining_quantised(kernels, count="ld.weak got, rows"),
            "gpu0.k2.cta0.t1": finishing(kernels, rows_from="st.weak rows, 9"),
        }
    )


def quantised_read_before_next(kernels: Kernels) -> str:
    """Rank 1's combine n gets a quantised row; rank 0's combine n+1 writes the next one."""
    return text(
        {
            "gpu1.k0.cta1.t0": combining_quantised(kernels, item="ld.weak got, quantised"),
            "gpu1.k1.cta0.t0": finishing(kernels, cell=f"{CELL}, 1|1"),
            "gpu0.k0.cta0.t0": finishing(kernels, last=False, wait=SEEN),
            "gpu0.k1.cta0.t0": combining_quantised(kernels, rows="st.weak quantised, 2"),
        }
    )


def amax_of_three_rows(kernels: Kernels) -> str:
    """A fast warp leaves its part of the amax of rows 1, 2, 3 of a CTA; a slow one takes each."""
    writes = tuple(f"st.weak amax, {row}" for row in (1, 2, 3))
    reads = tuple(f"ld.weak row{row}, amax" for row in (1, 2, 3))

    def thread(plain: dict[str, Operands]) -> str:
        untaken = [r"^Format == kCombineFp8(Block|Tensor)$", THREAD_0]
        return kernels.thread("quantise_received", {}, plain, untaken, {HAS_ROWS: 3})

    return text(
        {
            "gpu0.k0.cta0.t0": thread({AMAX_LEFT: writes}),
            "gpu0.k0.cta0.t32": thread({AMAX_TAKEN: reads}),
        }
    )


def numbers_of_three_rows(kernels: Kernels) -> str:
    """Thread 0 takes the numbers of a CTA's rows 1, 2, 3, each while the row before is quantised;
    another warp reads each. In fp8_block, which has no barrier for a row's amax.
    """
    where = buffers(kernels, "quantise_received", "shared.taken[1 - turn]", "turn = 1 - turn;")
    first, *following = (f"st.weak taken_{place}, {row}" for row, place in enumerate(where, 1))
    reads = tuple(f"ld.weak row{row}, taken_{place}" for row, place in enumerate(where, 1))
    untaken = [HAS_FAILED, COMPLETES, HAS_QUANTISED, IS_LAST_NUMBER]
    untaken.append(r"^!\(Format == kCombineFp8Block\)$")
    turns = {HAS_ROWS: 3}
    takes: dict[str, Operands] = {
        FIRST_NUMBER: first,
        NEXT_NUMBER: (*following, f"st.weak taken_{where[1]}, 4"),
    }
    left_out: dict[str, Operands] = {r"take_row: ": ""}
    return text(
        {
            "gpu0.k0.cta0.t0": kernels.thread("send_quantised", left_out, takes, untaken, turns),
            "gpu0.k0.cta0.t32": kernels.thread(
                "send_quantised", {}, {NUMBER_READ: reads}, [*untaken, THREAD_0], turns
            ),
        }
    )


SCENARIOS = {
    "rows before cells": Scenario(
        ("P1", "P2"),
        rows_before_cells,
        ({"got": 0}, {"inside": 0}),
        {
            **broken_arrival(ARRIVAL_RELAXED),  # relaxed is the references' way
            "arrival of CTA scope": (ARRIVAL_OF_CTA_SCOPE,),
            "no barrier before the arrival": (NO_BARRIER_BEFORE_ARRIVAL,),
            "no barrier behind the arrival": (NO_BARRIER_BEHIND_ARRIVAL,),
            "cell relaxed": (CELL_RELAXED,),
            "no barrier behind the wait": (NO_BARRIER_BEHIND_COUNTS,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "each row has its own slot": Scenario(
        (),
        slots_of_two_ctas,
        ({"a": 0, "b": 0}, {"a": 1, "b": 1}, {"counter": 1}),
        {"slots taken in CTA scope": (Edit("fetch_add_relaxed_gpu", r"\.gpu", ".cta"),)},
    ),
    "the count is whole": Scenario(
        ("P2",),
        whole_count,
        ({"got": 0}, {"seen": "0|-"}),
        {
            **broken_arrival(ARRIVAL_RELAXED),
            "arrival of CTA scope": (ARRIVAL_OF_CTA_SCOPE,),
            # Each of the two does for the slots, which are taken before the route is whole.
            "no barrier before the arrival": (NO_BARRIER_BEFORE_ARRIVAL, NO_BARRIER_BEHIND_ROUTE),
            "no barrier behind the arrival": (NO_BARRIER_BEHIND_ARRIVAL,),
            "no barrier behind the counts": (NO_BARRIER_BEHIND_COUNTS,),
        },
    ),
    "the epoch is read before it is bumped": Scenario(
        ("P2",),
        epoch_read_before_bump,
        ({"old": 1},),
        broken_arrival(ARRIVAL_RELAXED),
    ),
    "the next round starts clean": Scenario(
        ("P2",),
        next_round_starts_clean,
        ({"ours": 0}, {"base": 0}, {"next_first": 2}, {"next_place": 1}, {"next_first": 1}),
        {
            "dispatch does not wait for the kernel before": (DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for the kernel before": (COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "experts' rows before the signal": Scenario(
        ("P3", "P4"),
        experts_before_signal,
        ({"got": 0},),
        {
            "signal relaxed": (SIGNAL_RELAXED,),
            "no barrier behind the acquire": (NO_P4_BARRIER,),
            "combine does not wait for the experts": (COMBINE_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "experts have read before the next put": Scenario(
        ("P3",),
        experts_read_before_next_put,
        ({"got": 2},),
        {
            "signal relaxed": (SIGNAL_RELAXED,),
            "combine does not wait for the experts": (COMBINE_DOES_NOT_WAIT,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "combine has read before the next experts write": Scenario(
        ("P1",),
        combine_read_before_next_experts,
        ({"got": 2},),
        {
            "cell relaxed": (CELL_RELAXED,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "a slot's mark before the next put": Scenario(
        ("P1", "P2", "P3"),
        mark_before_next_put,
        ({"got": -1}, {"slot": -1}),
        {
            "signal relaxed": (SIGNAL_RELAXED,),
            "cell relaxed": (CELL_RELAXED,),
            "arrival relaxed": (ARRIVAL_RELAXED,),
            "combine does not wait for the kernel before": (COMBINE_DOES_NOT_WAIT,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    # Without the release of the word in between these hold as well: who reads the later word
    # acquires it, which puts its own later release behind what that is said to have caused.
    "a cell is read before the next one": Scenario(
        ("P3",),
        cell_read_before_next_cell,
        ({"look": "9|2"}, {"seen": "9|2"}),
        {
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "a signal is read before the next one": Scenario(
        ("P1",),
        signal_read_before_next_signal,
        ({"glance": "0|2"}, {"caught": "0|2"}),
        {
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "a fault is seen by all threads of a CTA": Scenario(
        (),
        fault_is_seen,
        ({"got": 0},),
        {
            "no barrier behind the clearing": (NO_BARRIER_BEHIND_CLEARING,),
            "no barrier behind the wait": (NO_P4_BARRIER,),
        },
    ),
    "targets of a token's experts": Scenario(
        (),
        targets_within_a_warp,
        ({"got": 0},),
        {"no barrier of the warp": (NO_BARRIER_OF_WARP,)},
    ),
    "routes of three tokens": Scenario(
        (),
        route_of_three_tokens,
        mixed_up("token"),
        {
            "no barrier behind a route": (NO_BARRIER_BEHIND_ROUTE,),
            "one buffer": (ONE_ROUTE,),
        },
    ),
    "routes of three quantised tokens": Scenario(
        (),
        route_of_three_quantised_tokens,
        mixed_up("token", "amax"),
        {
            "a barrier of the warp only": (QUANTISING_BARRIER_OF_WARP,),
            "one buffer": (QUANTISING_ONE_ROUTE,),
        },
    ),
    "addresses of three items": Scenario(
        (),
        addresses_of_three_items,
        mixed_up("item"),
        {
            "no barrier behind an item": (NO_BARRIER_BEHIND_ITEM,),
            "one buffer": (ONE_BUFFER,),
        },
    ),
    "each row is quantised by one CTA": Scenario(
        (),
        rows_of_two_ctas,
        ({"a": 0, "b": 0}, {"a": 1, "b": 1}, {"taken": 1}),
        {"rows taken in CTA scope": (Edit("fetch_add_relaxed_gpu", r"\.gpu", ".cta"),)},
    ),
    "quantised rows before the signal": Scenario(
        ("P3", "P4", "P5"),
        quantised_before_signal,
        ({"got": 0},),
        {
            **broken_arrival(ROWS_RELAXED),
            "arrival of CTA scope": (ARRIVAL_OF_CTA_SCOPE,),
            "no barrier before the arrival": (NO_BARRIER_AFTER_ROW,),
            "no barrier behind the arrival": (NO_BARRIER_BEHIND_ROWS_ARRIVE,),
            "signal relaxed": (SIGNAL_RELAXED,),
            "no barrier behind the acquire": (NO_P4_BARRIER,),
            "combine does not wait for the experts": (COMBINE_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "the next quantising combine starts clean": Scenario(
        ("P5",),
        next_combine_starts_clean,
        ({"next_first": 2}, {"next_first": 1}),
        {"combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,)},
    ),
    "the next combine takes from the first row on": Scenario(
        (),
        next_taking_starts_at_the_first_row,
        ({"next_first": 2}, {"next_first": 1}),
        {"combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,)},
    ),
    "a late CTA counts the rows of its own round": Scenario(
        (),
        counts_of_a_late_cta,
        ({"got": 0}, {"got": 9}),
        {
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
        },
    ),
    "combine has read before the next rows are quantised": Scenario(
        ("P1",),
        quantised_read_before_next,
        ({"got": 2},),
        {
            "cell relaxed": (CELL_RELAXED,),
            "dispatch does not wait for combine": (DISPATCH_DOES_NOT_WAIT,),
            "combine does not wait for dispatch": (COMBINE_DOES_NOT_WAIT,),
            **ANY_RELEASE_OR_ACQUIRE,
        },
    ),
    "amax of three rows": Scenario(
        (),
        amax_of_three_rows,
        mixed_up("row"),
        {
            "a barrier of the warp only": (BARRIER_OF_WARP_BEHIND_AMAX,),
            "no barrier after a row": (NO_BARRIER_AFTER_ROW,),
        },
    ),
    "numbers of three rows": Scenario(
        (),
        numbers_of_three_rows,
        mixed_up("row", written=4),
        {
            "no barrier after a row": (NO_BARRIER_AFTER_ROW,),
            "one buffer": (ONE_NUMBER,),
        },
    ),
}
