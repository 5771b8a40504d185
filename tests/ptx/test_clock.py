"""The clock of the software GPU: kernels whose time is known by hand, and what holds of ours.

The table here has round numbers and free instructions, so that times add up exactly.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu_constants
from benchmarks.moe_comm.clocked import Bulk, Clocked, Ours, Small
from benchmarks.moe_comm.terms import Work
from moe_nvlink_plugin.jit import nvrtc
from tests.support.ptx import build, costs
from tests.support.ptx.critical_path import Clock, Launch, Mirror, round_trips, totals
from tests.support.ptx.machine import Machine

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

FREE = 1e12  # bytes per ns
TABLE = dict.fromkeys((row.name for row in costs.TABLE), 0.0) | {
    "num_sms": 4,
    "threads_per_sm": 1024,
    "shared_ns": 7,
    "l1_ns": 11,
    "l2_ns": 100,
    "remote_ns": 1000,
    "fence_gpu_ns": 30,
    "fence_sys_ns": 50,
    "acquire_ns": 3,
    "atomic_ns": 120,
    "atomic_gap_ns": 4,
    "barrier_ns": 5,
    "warp_barrier_ns": 2,
    "shuffle_ns": 13,
    "launch_ns": 2000,
    "pdl_ns": 300,
    "link_bytes_per_ns": FREE,
    "header_bytes": 16,
    "granule_bytes": 32,
    "sm_bytes_per_ns": FREE,
    "sm_lines_in_flight": 256,
}
BEGIN = TABLE["launch_ns"]
STORED = TABLE["l2_ns"]  # a kernel ends when what it stored is acknowledged

_BODIES = {
    # Two loads, the second at the address that the first one gives.
    "chase": """
        ld.global.u64 %rd3, [%rd1];
        ld.global.u64 %rd4, [%rd3];
        st.global.u64 [%rd2], %rd4;""",
    "together": """
        ld.global.u64 %rd3, [%rd1];
        ld.global.u64 %rd4, [%rd1+256];
        add.u64 %rd5, %rd3, %rd4;
        st.global.u64 [%rd2], %rd5;""",
    "shared": """
        st.shared.u64 [word], %rd2;
        ld.shared.u64 %rd3, [word];
        st.global.u64 [%rd3], %rd3;""",
    "shuffle": """
        shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
        st.global.u32 [%rd2], %r2;""",
    "atomics": """
        atom.relaxed.gpu.global.add.u32 %r2, [%rd1], 1;
        cvt.u64.u32 %rd3, %r2;
        add.u64 %rd3, %rd3, %rd2;
        st.global.u8 [%rd3], 1;""",
    "release": """
        st.global.u64 [%rd1], 5;
        st.release.sys.global.u64 [%rd2], 7;""",
    "async_release": """
        st.global.u64 [%rd1], 5;
        st.async.release.sys.global.b64 [%rd2], 7;
        st.relaxed.sys.global.u64 [%rd2+8], 7;""",
    # Thread 1 stores to a peer; thread 0 releases a word of its own after they met.
    "release_after_barrier": """
        setp.ne.u32 %p1, %r1, 1;
        @%p1 bra $after_store;
        st.global.u64 [%rd1], 5;
    $after_store:
        bar.sync 0;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra $after_release;
        st.release.sys.global.u64 [%rd2], 7;
    $after_release:""",
    # CTA 0 stores to a peer and arrives; CTA 1 waits for the arrival and releases.
    "release_after_acquire": """
        mov.u32 %r3, %ctaid.x;
        setp.ne.u32 %p1, %r3, 0;
        @%p1 bra $wait;
        st.global.u64 [%rd1], 5;
        atom.acq_rel.gpu.global.add.u32 %r2, [%rd2], 1;
        bra $done;
    $wait:
        ld.acquire.gpu.global.u32 %r2, [%rd2];
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra $wait;
        st.release.sys.global.u64 [%rd2+8], 7;
    $done:""",
    "tell": "st.release.sys.global.u64 [%rd1], 1;",
    "hear": """
    $poll:
        ld.relaxed.sys.global.u64 %rd3, [%rd1];
        setp.eq.u64 %p1, %rd3, 0;
        @%p1 bra $poll;""",
    # Tells the peer, then hears it.
    "meet": """
        st.release.sys.global.u64 [%rd1], 1;
    $meet:
        ld.relaxed.sys.global.u64 %rd3, [%rd2];
        setp.eq.u64 %p1, %rd3, 0;
        @%p1 bra $meet;""",
    "first": """
        griddepcontrol.launch_dependents;
        ld.global.u64 %rd3, [%rd1];
        ld.global.u64 %rd4, [%rd3];
        ld.global.u64 %rd5, [%rd4];
        st.global.u64 [%rd2], %rd5;""",
    "second": """
        griddepcontrol.wait;
        st.global.u64 [%rd2], %rd1;""",
    # Every thread stores 16 bytes.
    "copy": """
        mov.u32 %r3, %ctaid.x;
        mov.u32 %r4, %ntid.x;
        mad.lo.u32 %r5, %r3, %r4, %r1;
        mul.wide.u32 %rd3, %r5, 16;
        add.u64 %rd4, %rd1, %rd3;
        st.global.v4.u32 [%rd4], {%r1, %r1, %r1, %r1};""",
}
_ENTRY = """
.visible .entry {name}(.param .u64 a, .param .u64 b)
{{
    .reg .pred %p<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    .shared .align 8 .b8 word[8];
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    mov.u32 %r1, %tid.x;{body}
    ret;
}}
"""


@functools.cache
def library() -> build.Library:
    entries = "".join(_ENTRY.format(name=name, body=body) for name, body in _BODIES.items())
    return build.load(".version 8.3\n.target sm_90a\n.address_size 64\n" + entries, clock=True)


class Ranks:
    """Ranks with 64 KiB each, zeros, and launches on them."""

    def __init__(self, ranks: int = 2, **changes: float) -> None:
        self.machine = Machine(ranks, clock=True)
        self.clock = Clock(self.machine, TABLE | changes)
        self.memory = [np.zeros(8192, np.uint64) for _ in range(ranks)]
        for rank, memory in enumerate(self.memory):
            self.machine.allocate(rank, memory.ctypes.data, memory.nbytes, f"memory {rank}")

    def at(self, rank: int, word: int = 0) -> int:
        return int(self.memory[rank].ctypes.data) + 8 * word

    def launch(self, name: str, a: int, b: int, *, rank: int = 0, grid: int = 1, block: int = 1,
               pdl: bool = False) -> None:  # fmt: skip
        params = np.array([a, b], np.uint64).tobytes()
        self.machine.launch(rank, library()[name], grid, block, params, pdl=pdl)

    def run(self) -> dict[int, Launch]:
        """The last launch of each rank."""
        self.machine.run()
        return {launch.rank: launch for launch in self.clock.launches()}

    def ns(self, name: str, a: int, b: int, *, grid: int = 1, block: int = 1) -> float:
        """How long one kernel of rank 0 takes after its launch."""
        self.launch(name, a, b, grid=grid, block=block)
        return float(self.run()[0].end_ns - BEGIN)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.machine.close()


#: Kernel, its operands as (rank, word), CTAs, threads, ns. Word 1 has the address of another one.
KNOWN: dict[str, tuple[str, tuple[int, int], tuple[int, int], int, int, float]] = {
    "loads that depend add up": ("chase", (0, 1), (0, 900), 1, 1, 2 * 100 + STORED),
    "others do not": ("together", (0, 0), (0, 900), 1, 1, 100 + STORED),
    "a peer costs its round trip": ("together", (1, 0), (0, 900), 1, 1, 1000 + STORED),
    "shared memory": ("shared", (0, 0), (0, 8), 1, 1, 7 + STORED),
    "a shuffle": ("shuffle", (0, 0), (0, 8), 1, 32, 13 + STORED),
    "atomics on a word queue": ("atomics", (0, 0), (0, 64), 1, 32, 31 * 4 + 120 + STORED),
    "a barrier": ("release_after_barrier", (1, 0), (0, 0), 1, 32, 1000 + 50 + STORED),
    "a free link": ("copy", (1, 0), (0, 0), 16, 256, 1000),
}


@pytest.mark.parametrize("what", KNOWN)
def test_what_is_known_by_hand(what: str, ranks: Ranks) -> None:
    kernel, a, b, grid, block, ns = KNOWN[what]
    ranks.memory[0][1] = ranks.at(0, 512)
    took = ranks.ns(kernel, ranks.at(*a), ranks.at(*b), grid=grid, block=block)
    assert took == pytest.approx(ns)


def test_a_release_waits_for_acknowledgements_of_peers(ranks: Ranks) -> None:
    took = ranks.ns("release", ranks.at(1), ranks.at(0))
    assert took == pytest.approx(1000 + 50 + STORED)
    path = ranks.clock.launches()[0].path
    assert [step.kind for step in path] == [
        "launch", "remote store acknowledged", "fence", "local store acknowledged"
    ]  # fmt: skip
    assert path[1].text == "st.global.u64 [%rd1], 5"


@pytest.mark.parametrize(("word", "arrives"), [(0, 1000 + 50 + 500), (1, 500)])
def test_an_asynchronous_release_holds_its_word_alone(word: int, arrives: float) -> None:
    """The word comes when that of a release would, and what the thread stores behind it before."""
    ranks = Ranks()
    ranks.launch("async_release", ranks.at(1, 64), ranks.at(1), rank=0)
    ranks.launch("hear", ranks.at(1, word), 0, rank=1)
    ended = ranks.run()
    polled = 50 + 100 * math.ceil((arrives - 50) / 100)
    assert ended[1].end_ns == pytest.approx(BEGIN + polled + 50)
    assert ended[0].end_ns == pytest.approx(BEGIN + 1000 + 50 + 1000)


def test_a_relaxed_store_waits_for_nothing(ranks: Ranks) -> None:
    """The control: the kernel's end alone waits for the peer."""
    site = next(site for site in library()["release"].sites if site.order == "release")
    site.order = "relaxed"
    try:
        assert ranks.ns("release", ranks.at(1), ranks.at(0)) == pytest.approx(1000)
    finally:
        library().reset()


def test_a_release_covers_what_an_acquire_has_found(ranks: Ranks) -> None:
    """CTA 0's fence waits for the peer, so CTA 1's word comes after it."""
    ranks.launch("release_after_acquire", ranks.at(1), ranks.at(0), grid=2)
    took = ranks.run()[0].end_ns - BEGIN
    assert took > 1000 + 50 + STORED - 1
    kinds = round_trips(ranks.clock.launches()[0].path)
    assert kinds["remote store acknowledged"] == 1


def test_a_poll_ends_after_the_word_has_arrived_and_been_fetched(ranks: Ranks) -> None:
    ranks.launch("tell", ranks.at(1), 0, rank=0)
    ranks.launch("hear", ranks.at(1), 0, rank=1)
    ended = ranks.run()
    arrived = BEGIN + 50 + 500  # fence, one way
    # Rank 1's polls are in its L2 every 100 ns, at 50 for the first time.
    assert ended[1].end_ns == pytest.approx(arrived + 50)
    path = [step.kind for step in ended[1].path]
    assert path == ["launch", "fence", "flight of a word", "poll"]
    assert ended[0].end_ns == pytest.approx(arrived + 500)


def test_a_launch_with_pdl_saves_what_the_table_says() -> None:
    ends = []
    for pdl in (False, True):
        ranks = Ranks()
        chain = ranks.memory[1]
        chain[0], chain[64] = ranks.at(1, 64), ranks.at(1, 128)
        ranks.launch("first", ranks.at(1), ranks.at(0, 900))
        ranks.launch("second", 0, ranks.at(0, 901), pdl=pdl)
        ends.append(ranks.run()[0].end_ns)
    first = BEGIN + 3 * 1000 + STORED
    assert ends[0] == pytest.approx(first + 2000 + STORED)
    assert ends[0] - ends[1] == pytest.approx(2000 - 300)


def test_the_link_bounds_a_large_copy() -> None:
    """64 KiB at 2 bytes a ns, and a header for every 128 bytes."""
    ranks = Ranks(link_bytes_per_ns=2)
    took = ranks.ns("copy", ranks.at(1), 0, grid=16, block=256)
    on_the_link = 65536 * (128 + 16) / 128 / 2
    assert took == pytest.approx(on_the_link + 1000, rel=0.01)


def test_a_rank_that_stands_for_both() -> None:
    """What it stores to the peer's word is stored to its own."""
    ranks = Ranks()
    ranks.clock = Clock(ranks.machine, TABLE, [Mirror(ranks.at(1), ranks.at(0), 8)])
    assert ranks.ns("meet", ranks.at(1), ranks.at(0)) == pytest.approx(50 + 1000)
    assert ranks.memory[0][0] == 1


def test_every_cost_says_where_it_comes_from() -> None:
    for row in costs.TABLE:
        assert set(row.known) <= set(costs.KNOWN), row
        assert row.meaning, row
        assert row.source or set(row.known) == {"estimate"}, row
        assert row.known[1] != "measured", row


def test_what_is_measured_stands_in_its_file() -> None:
    """Rounded; and each row that the file has is measured."""
    file = Path(gpu_constants.__file__).parent / "results/2026-11-26-h200-2-constants.json"
    medians = {
        row["cost"]: row["ns"]["median"]
        for row in json.loads(file.read_text())["rows"]
        if row["cost"]
    }
    assert {row.name for row in costs.TABLE if row.known[0] == "measured"} == set(medians)
    taken = costs.costs("h200")
    assert {name: taken[name] for name in medians} == pytest.approx(medians, rel=0.01)


# ---- our kernels

SMALL = Work(ep_size=4, tokens=1, hidden_size=512, top_k=4, num_experts=16)


def timed(
    work: Work,
    changes: dict[str, float] | None = None,
    *,
    of: type[Ours] = Bulk,
    is_whole: bool = True,
) -> dict[str, Clocked]:
    with of(work, "h200", changes, is_whole=is_whole) as layer:
        return {verb: layer.run(verb) for verb in ("dispatch", "combine")}


#: The same of what several tests look at.
timed_once = functools.cache(timed)


@pytest.mark.long
@pytest.mark.parametrize("of", [Small, Bulk])
def test_more_tokens_take_no_less_time(of: type[Ours]) -> None:
    """With free fences: one for each launch hides the rest of a small combine."""
    free = {"fence_sys_ns": 0.0}
    ends = [timed(SMALL._replace(tokens=tokens), free, of=of) for tokens in (1, 4, 64)]
    a_poll = 1e-3 * costs.costs("h200")["l2_ns"]  # by so much luck decides
    for verb in ("dispatch", "combine"):
        few, more, many = (end[verb].us for end in ends)
        assert few < more + a_poll, verb
        assert more < many + a_poll, verb
        assert 1.01 * few < many, verb


@pytest.mark.parametrize("of", [Small, Bulk])
def test_a_run_can_be_repeated(of: type[Ours]) -> None:
    assert timed(SMALL, of=of) == timed_once(SMALL, of=of)


#: What GATED takes on the clock, in us: change a figure in the commit that changes the time, which
#: then says why. NVRTC of another version makes other code.
NVRTC = "13.5"
GATED = SMALL._replace(tokens=4)
FIGURES = {
    ("Small", "dispatch"): 5.661,
    ("Small", "combine"): 5.581,
    ("Bulk", "dispatch"): 10.16,
    ("Bulk", "combine"): 7.713,
}


@pytest.mark.parametrize("of", [Small, Bulk])
def test_no_change_makes_a_verb_slower_unseen(of: type[Ours]) -> None:
    if nvrtc.version() != NVRTC:
        pytest.skip(f"the figures are of NVRTC {NVRTC}, here is {nvrtc.version()}")
    for verb, clocked in timed(GATED, of=of, is_whole=False).items():
        assert clocked.us == pytest.approx(FIGURES[of.__name__, verb], rel=0.02), verb


@pytest.mark.parametrize("name", ["fence_sys_ns", "atomic_ns", "launch_ns"])
def test_a_cost_moves_a_verb_by_what_its_path_says(name: str) -> None:
    kinds = {"fence_sys_ns": "fence", "atomic_ns": "atomic", "launch_ns": "launch"}
    row = next(row for row in costs.TABLE if row.name == name)
    before, after = timed_once(SMALL, of=Bulk), timed(SMALL, {name: row.h200 + 400})
    for verb in ("dispatch", "combine"):
        us, path, _ = before[verb]
        on_path = [step for step in path if step.kind == kinds[name]]
        if name == "fence_sys_ns":
            on_path = [step for step in on_path if ".sys" in step.text]
        moved = 1e3 * (after[verb].us - us)
        # A link's bins are 32 ns long.
        assert moved == pytest.approx(400 * len(on_path), abs=64), (verb, totals(path))


@pytest.mark.parametrize("of", [Small, Bulk])
@pytest.mark.parametrize("tokens", [1, 8])
def test_one_rank_stands_for_all(tokens: int, of: type[Ours]) -> None:
    """Small: the units of peers' rows, too, come when rank 0's come there."""
    work = SMALL._replace(tokens=tokens)
    whole, one = timed_once(work, of=of), timed(work, of=of, is_whole=False)
    for verb in ("dispatch", "combine"):
        assert one[verb].us == pytest.approx(whole[verb].us, rel=0.03), verb


@pytest.mark.long
def test_a_token_more_takes_no_less_time() -> None:
    """With 64 tokens a row's lines at 8 ranks, and the ranks' places, have the same low bits."""
    ends = [timed(Work(8, tokens), is_whole=False) for tokens in range(62, 67)]
    for verb in ("dispatch", "combine"):
        times = [end[verb].us for end in ends]
        assert times == sorted(times), verb
