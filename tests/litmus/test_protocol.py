"""The flag protocol under the PTX memory model: what must not happen, and would if it were broken.

Nothing here ran on a GPU. See ptx_model for what the model covers and protocol for the programs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.litmus import (
    counts_protocol,
    head_protocol,
    protocol,
    ptx_model,
    small_protocol,
    survivors_protocol,
)
from tests.litmus.kernel_source import Edit, Kernels, Operands, SourceError
from tests.litmus.program import Program
from tests.litmus.protocol import EPOCH_READ, arriving

MODULES = (protocol, head_protocol, small_protocol, counts_protocol, survivors_protocol)
SCENARIOS = {name: each for module in MODULES for name, each in module.SCENARIOS.items()}
TWINS = [(name, twin) for name, scenario in SCENARIOS.items() for twin in scenario.twins]
PROTOCOL_PAGE = Path(__file__).parents[2] / "kernels" / "PROTOCOL.md"


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


@pytest.mark.parametrize("name", SCENARIOS)
def test_stale_is_impossible(name: str, kernels: Kernels) -> None:
    scenario = SCENARIOS[name]
    program = Program(scenario.program(kernels))
    assert program.reachable(), "the threads never get this far"
    possible = [stale for stale in scenario.stale if program.allows(**stale)]
    assert not possible, f"{possible} in\n{scenario.program(kernels)}"


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_broken_twin_is_found(name: str, twin: str) -> None:
    scenario = SCENARIOS[name]
    program = Program(scenario.program(Kernels(*scenario.twins[twin])))
    assert any(program.allows(**stale) for stale in scenario.stale)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_axioms_apply(name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mixed-size race (ISA 8.7.2), and no verdict that hangs on what counts as a dependency."""
    scenario = SCENARIOS[name]
    program = Program(scenario.program(kernels))
    assert not program.mixed_size_race()
    monkeypatch.setattr(ptx_model, "AXIOMS", ptx_model.AXIOMS - {"No-thin-air"})
    assert not any(program.allows(**stale) for stale in scenario.stale)


def test_every_numbered_pair_has_a_scenario_and_twins() -> None:
    pairs = set(re.findall(r"^\| (P\d+) \|", PROTOCOL_PAGE.read_text(), re.MULTILINE))
    assert pairs
    assert {pair for scenario in SCENARIOS.values() for pair in scenario.pairs} == pairs
    assert all(scenario.twins for scenario in SCENARIOS.values())


# ---- Other designs, which the kernels are not: written out in PTX.

COUNTED_OUT = """
    gpu0.cta0.t1: st.weak row, 1; bar.sync
    gpu0.cta0.t0: bar.sync; {before} atom.relaxed.gpu.add first=0, arrivals, 1
    gpu0.cta1.t0: {before} atom.relaxed.gpu.add last=1, arrivals, 1; {fence}; st.relaxed.sys flag, 1
    gpu1.cta0.t0: ld.acquire.sys seen=1, flag; ld.weak got, row
"""


@pytest.mark.parametrize("fence", ["fence.acq_rel.sys", "fence.sc.sys"])
def test_a_fence_in_the_last_cta_only_lets_a_peer_read_stale_rows(fence: str) -> None:
    """The way of the libraries we compare with (PROTOCOL.md of the design, section 2, row 1)."""
    assert Program(COUNTED_OUT.format(before="", fence=fence)).allows(got=0)


def test_a_fence_in_every_cta_is_the_other_right_way() -> None:
    mended = Program(COUNTED_OUT.format(before="fence.acq_rel.gpu;", fence="fence.acq_rel.sys"))
    assert mended.reachable()
    assert not mended.allows(got=0)


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


# ---- The way from the kernels' text to the programs.


def test_each_access_is_named_after_its_instruction(kernels: Kernels) -> None:
    operations = {"ld": "load", "st": "store", "atom": "fetch_add"}
    accesses = {n: i for n, i in kernels.primitives.items() if i.startswith(tuple(operations))}
    assert len(accesses) >= 8
    for name, instruction in accesses.items():
        operation, order, scope, *words = instruction.removesuffix(".add").split(".")
        assert name == f"{operations[operation]}_{'words_' * len(words)}{order}_{scope}"


def test_a_new_ordered_access_is_noticed() -> None:
    added = Edit(
        "put_token", r"const Payload\& payload", "load_acquire_sys(flag); const Payload& payload"
    )
    with pytest.raises(SourceError, match="0 operands for the access put_token"):
        Kernels(added).thread("put_token", {})


def test_a_statement_that_moved_away_is_noticed() -> None:
    gone = Edit("dispatch_body", EPOCH_READ, "0")
    with pytest.raises(SourceError, match="nothing like"):
        arriving(Kernels(gone), arrival="first=0, arrivals, 1", epoch_read="ld.weak old, epoch")


def test_an_edit_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(SourceError, match="has no 'no such text' number 0"):
        Kernels(Edit("arrive", "no such text"))


GROWN = Edit(
    "arrive",
    r"cta\.sync\(\);",
    """
    if (early) return 0;
    if (left) { store_release_sys(a, 1); } else if (right) store_release_sys(b, 1);
    else { store_release_sys(c, 1); }
    for (int i = 0; i < n; ++i) load_relaxed_sys(d);
    while (load_acquire_sys(e) == 0) cta.sync();
    """,
)
LEFT, RIGHT = r"^!\(left\)$", r"^!\(right\)$"
BRANCHES = {
    "left": ([LEFT], "st.release.sys a, 1"),
    "right": ([r"^left$", RIGHT], "st.release.sys b, 1"),
    "neither": ([r"^left$", r"^right$"], "st.release.sys c, 1"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_and_loops_are_followed(name: str) -> None:
    untaken, store = BRANCHES[name]
    operands: dict[str, Operands] = {
        r"store": store.split(maxsplit=1)[1],
        r"load_relaxed": ("r0, d", "r1, d"),
        r"load_acquire": "r2, e",
        r"->arrivals": "",
    }
    looped = "ld.relaxed.sys r0, d; ld.relaxed.sys r1, d; ld.acquire.sys r2, e; bar.sync; bar.sync"
    thread = Kernels(GROWN).thread("arrive", operands, {}, untaken, {"^int i = 0": 2})
    assert thread == f"{store}; {looped}"


def test_nothing_stands_behind_an_early_return() -> None:
    assert Kernels(GROWN).thread("arrive", {}, {}, [r"^!\(early\)$"]) == ""


def test_what_the_reader_can_not_follow_is_an_error() -> None:
    odd = Edit("arrive", r"cta\.sync\(\);", "likely(1) if (left) cta.sync();")
    with pytest.raises(SourceError, match="can not tell what"):
        Kernels(odd).thread("arrive", {r"->arrivals": ""})


#: No kernel of ours: what ours do not write today and may tomorrow.
TOY = """
struct Cta {
  HD void sync() const { __syncthreads(); }
};
HD void store_release_sys(uint64_t* cell, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(cell), "l"(value) : "memory");
}
MOE_NVLINK_HOST_ONLY(HD void store_release_sys(uint64_t* cell) { *cell = 1; })
HD uint64_t load_acquire_sys(const uint64_t* cell) {
  uint64_t value;
  MOE_NVLINK_DEVICE_ONLY(asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(cell));)
  return value;
}
template <class Visit>
HD void for_each_peer(const Args& args, int first, int step, const Visit& visit) {
  for (int peer = first; peer < args.ep_size; peer += step) {
    if (is_dead(args, peer)) continue;
    visit(peer);
  }
}
template <class Visit>
HD void for_each_peer(const Args& args, const Cta& cta, const Visit& visit) {
  for_each_peer(args, cta.thread, cta.num_threads, visit);
  cta.sync();
}
template <class Config>
struct Signals {
  uint64_t* cells;
  HD void operator()(int peer) const { store_release_sys(cells + peer, 1); }
};
template <class Config>
HD void toy_body(const Args& args, const Cta& cta) {
  BODY
}
"""
STORE, LOAD, SYNC = "st.release.sys a, 1", "ld.acquire.sys r, b", "bar.sync"
#: name -> body, conditions that are false, what the thread does.
SHAPES: dict[str, tuple[str, list[str], list[str]]] = {
    "range": ("for (const Peer& peer : args.peers) { store_release_sys(a, 1); }", [], [STORE]),
    "continue": ("for (;;) { if (odd) continue; store_release_sys(a, 1); }", [r"^!\(odd"], []),
    "break": ("for (;;) { if (odd) { break; } store_release_sys(a, 1); }", [r"^odd$"], [STORE]),
    "do": ("do { cta.sync(); } while (load_acquire_sys(b) == 0);", [], [SYNC, LOAD]),
    "case": (
        "switch (args.kind) { case kOne: cta.sync(); break; default: store_release_sys(a, 1); }",
        ["default"],
        [SYNC],
    ),
    "choice": ("left ? store_release_sys(a, 1) : cta.sync();", ["^left$"], [SYNC]),
    "and": ("if (left && load_acquire_sys(b) != 0) cta.sync();", ["^left$"], [SYNC]),
    "or": ("if (left || load_acquire_sys(b) != 0) cta.sync();", [r"^!\(left\)$"], [SYNC]),
    "arguments": ("store_release_sys(a, load_acquire_sys(b));", [], [LOAD, STORE]),
    "lambda": (
        "for_each_peer(args, cta, [&](int peer) {\n"
        "  if (peer == 0) return;  // cta.sync();\n  store_release_sys(a, 1);\n});",
        [],
        [STORE, SYNC],
    ),
    "lambda of a peer that is dead": (
        "for_each_peer(args, cta, [&](int peer) { store_release_sys(a, 1); });",
        [r"^!\(is_dead"],
        [SYNC],
    ),
    "named lambda": (
        "const auto signal = [&](int peer) { store_release_sys(a, 1); };"
        " cta.sync(); for_each_peer(args, cta, signal);",
        [],
        [SYNC, STORE, SYNC],
    ),
    "lambda that nobody calls": ("const auto no = [&] { store_release_sys(a, 1); };", [], []),
    "lambda for a function of others": ("elsewhere([&] { cta.sync(); });", [], [SYNC]),
    "object": ("for_each_peer(args, cta, Signals<Config>{a});", [], [STORE, SYNC]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_code_are_read(name: str) -> None:
    body, untaken, expected = SHAPES[name]
    operands: dict[str, Operands] = {": store_release": "a, 1", ": load_acquire": "r, b"}
    used = {k: v for k, v in operands.items() if any(line.endswith(str(v)) for line in expected)}
    toy = Kernels(text=TOY.replace("BODY", body))
    assert toy.thread("toy_body", used, {}, untaken) == "; ".join(expected)
