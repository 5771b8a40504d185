"""The kernel text under the thread, address and undefined-behaviour sanitizers.

And proof that the thread sanitizer looks: every release, acquire and barrier the protocol needs is
taken out once, and it must report a data race each time.

The bugs stand in the text of a few programs beside what they break, asleep, and a program's
argument wakes one of them: that costs a compilation for each program and not one for every bug.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_nvlink_plugin import env
from tests.support import kernel_texts
from tests.support.delays import replace_once

pytestmark = pytest.mark.timeout(280)

PROGRAM = Path(__file__).with_name("sanitizer_ranks.cpp")
TSAN_STATUS = 66

Edit = tuple[str, str]

#: Of the bug that is awake; set before the first thread is started.
PRELUDE = """
#define MOE_NVLINK_HAS_SEEDED_BUGS
namespace moe_nvlink { inline int seeded_bug = 0; }
"""

#: name -> edits: what stands in the kernel text, what stands there instead. Spaces match any space;
#: AWAKE is whether this bug is.
SEEDED_BUGS: dict[str, tuple[Edit, ...]] = {
    "P1 release": (
        (
            "store_release_sys(cell_of(args, peer, args.control.dispatch_cells",
            "(AWAKE ? store_relaxed_sys : store_release_sys)"
            "(cell_of(args, peer, args.control.dispatch_cells",
        ),
    ),
    "P1 and P3 acquire": (
        (
            "*seen = load_acquire_sys(cell);",
            "*seen = AWAKE ? load_relaxed_sys(cell) : load_acquire_sys(cell);",
        ),
    ),
    "P2 release and acquire": (
        (
            "fetch_add_acq_rel_gpu(&local_control(args)->arrivals",
            "(AWAKE ? fetch_add_relaxed_gpu : fetch_add_acq_rel_gpu)"
            "(&local_control(args)->arrivals",
        ),
    ),
    "P2 barrier before the arrival": (
        (
            "cta.sync(); if (cta.thread == 0) { // P2: release",
            "if (!AWAKE) { cta.sync(); } if (cta.thread == 0) { // P2: release",
        ),
    ),
    "barrier behind the arrival": (
        (
            "cta.sync(); return shared.finisher;",
            "if (!AWAKE) { cta.sync(); } return shared.finisher;",
        ),
    ),
    "the epoch's reading before the arrival": (
        (
            "shared.epoch = load_word(&local_control(args)->epoch) + 1;",
            "shared.epoch = AWAKE ? 0 : load_word(&local_control(args)->epoch) + 1;",
        ),
        (
            "const bool is_last = finisher == num_finishers(cta) - 1;",
            "const bool is_last = finisher == num_finishers(cta) - 1;"
            " if (AWAKE && cta.thread == 0) {"
            " shared.epoch = load_word(&local_control(args)->epoch) + 1; }"
            " if (AWAKE) { cta.sync(); }",
        ),
    ),
    "waiting for the last CTA before publishing": (
        (
            "const bool is_last = finisher == num_finishers(cta) - 1;",
            "const bool is_last = finisher == (AWAKE ? 0 : num_finishers(cta) - 1);",
        ),
    ),
    "a finisher's own wait": (
        (
            "collect_counts(args, cta, is_last, shared);",
            "if (!AWAKE || is_last) collect_counts(args, cta, is_last, shared); else"
            " for (int i = cta.thread; i < args.geometry.ep_size; i += cta.num_threads)"
            " shared.counts[i] = load_word(reinterpret_cast<const int32_t*>(region_of(args,"
            " args.geometry.ep_rank, args.control.recv_counts)) + i);",
        ),
    ),
    "one writer of recv_counts": (
        (
            "if (is_last) { store_word(&recv_counts",
            "if (is_last || (AWAKE && peer == 0)) { store_word(&recv_counts",
        ),
    ),
    "barrier behind the sent rows": (
        ("cta.sync(); // sent is whole", "if (!AWAKE) cta.sync(); // sent is whole"),
    ),
    "barrier behind the counts": (
        ("cta.sync(); // counts of all peers", "if (!AWAKE) cta.sync(); // counts of all peers"),
    ),
    "barrier behind the target ranks": (
        ("cta.sync_warp(); // the targets", "if (!AWAKE) cta.sync_warp(); // the targets"),
    ),
    # Left in at a CTA's first two tokens, which fill both routes: addresses never written would
    # crash the program before it is known for a race.
    "barrier behind the route": (
        (
            "cta.sync(); // the route is whole",
            "if (!AWAKE || token < 2 * cta.num_blocks) cta.sync();",
        ),
    ),
    "second route": (
        (
            "TokenRoute& route = shared.routes[turn]; route_token<Config>",
            "TokenRoute& route = shared.routes[AWAKE ? 0 : turn]; route_token<Config>",
        ),
    ),
    "P3 release": (
        (
            "store_release_sys(cell_of(args, peer, args.control.combine_cells",
            "(AWAKE ? store_relaxed_sys : store_release_sys)"
            "(cell_of(args, peer, args.control.combine_cells",
        ),
    ),
    "P4 barrier": (
        (
            "cta.sync(); return shared.faulted != 0;",
            "if (!AWAKE) { cta.sync(); } return shared.faulted != 0;",
        ),
    ),
    "barrier between two items": (
        ("cta.sync(); here = next;", "if (!AWAKE) { cta.sync(); } here = next;"),
    ),
    "second rows": (
        (
            "next.token, sizes, 1 - turn, shared);",
            "next.token, sizes, AWAKE ? turn : 1 - turn, shared);",
        ),
    ),
}

#: The same where combine quantises, in the program with its formats.
FORMAT_BUGS: dict[str, tuple[Edit, ...]] = {
    "P5 release and acquire": (
        (
            "fetch_add_acq_rel_gpu(&local_control(args)->combine_arrivals",
            "(AWAKE ? fetch_add_relaxed_gpu : fetch_add_acq_rel_gpu)"
            "(&local_control(args)->combine_arrivals",
        ),
    ),
    # After a CTA's last row; before, the barrier publishes the number of the next one.
    "P5 barrier before the arrival": (
        (
            "cta.sync(); } return quantised;",
            "if (!AWAKE || shared.taken[turn] < num_rows) { cta.sync(); } } return quantised;",
        ),
    ),
    "second number of a row": (
        (
            "for (uint32_t row = shared.taken[0]; row < num_rows; row = shared.taken[turn]) {",
            "for (uint32_t row = shared.taken[0]; row < num_rows;"
            " row = shared.taken[AWAKE ? 0 : turn]) {",
        ),
        (
            "shared.taken[1 - turn] = take_row(args);"
            " end_taking(args, cta, shared.taken[1 - turn], num_rows);",
            "shared.taken[AWAKE ? 0 : 1 - turn] = take_row(args);"
            " end_taking(args, cta, shared.taken[AWAKE ? 0 : 1 - turn], num_rows);",
        ),
    ),
    "counts of this rank's own": (
        (
            "shared.counts[peer] = load_word(&rows_from(args)[peer]);",
            "shared.counts[peer] = AWAKE ? cell_count(load_word(cell_of(args,"
            " args.geometry.ep_rank, args.control.dispatch_cells, peer)))"
            " : load_word(&rows_from(args)[peer]);",
        ),
    ),
    "barrier behind a row's amax": (
        ("cta.sync(); // the row's amax", "if (!AWAKE) cta.sync(); // the row's amax"),
    ),
}

#: And where dispatch does.
QUANTISER_BUGS: dict[str, tuple[Edit, ...]] = {
    # Left in at a CTA's first two tokens, as above.
    "barrier before a row's amax is taken": (
        (
            "cta.sync(); // the route and the parts of the row's amax are whole",
            "if (!AWAKE || token < 2 * cta.num_blocks) cta.sync();",
        ),
    ),
    "second amax": (
        (
            "quantising.prepare(token, shared.amax[turn]);",
            "quantising.prepare(token, shared.amax[AWAKE ? 0 : turn]);",
        ),
        (
            "quantising.put(token, route, shared.amax[turn]);",
            "quantising.put(token, route, shared.amax[AWAKE ? 0 : turn]);",
        ),
    ),
}

#: What the other sanitizers must see.
OTHER_BUGS: dict[str, tuple[Edit, ...]] = {
    "a row one vector too long": (
        (
            "for (int offset = first + lane * Bytes; offset < last;",
            "for (int offset = first + lane * Bytes; offset < last + (AWAKE ? 1 : 0);",
        ),
    ),
    "an id that is not checked": (
        (
            "if (expert < 0 || expert >= geometry.num_experts) return kNoSlot;",
            "if (!AWAKE && (expert < 0 || expert >= geometry.num_experts)) return kNoSlot;",
        ),
    ),
    "a padded token's rows": (
        (
            "if (!has_target<Config>(args, route)) return; MOE_NVLINK_ROLLED",
            "if (!AWAKE && !has_target<Config>(args, route)) { return; }\nMOE_NVLINK_ROLLED\n",
        ),
    ),
    "a padded token's row in the search for its amax": (
        ("if (!has_expert(token)) return;", "if (!AWAKE && !has_expert(token)) return;"),
    ),
    "a block behind the end of a row": (
        (
            "FormatOf<Quantiser>::Type; int whole = hidden_size / kLaneElements * kLaneElements;",
            "FormatOf<Quantiser>::Type; int whole = (hidden_size + (AWAKE ? kLaneElements - 1 : 0))"
            " / kLaneElements * kLaneElements;",
        ),
    ),
}

RACES = {**SEEDED_BUGS, **FORMAT_BUGS, **QUANTISER_BUGS}
NUMBERS = {name: number for number, name in enumerate({**RACES, **OTHER_BUGS}, 1)}
#: Each with the bugs that sleep in one program.
GROUPS = {
    "protocol": SEEDED_BUGS,
    "formats": FORMAT_BUGS,
    "quantisers": QUANTISER_BUGS,
    "others": OTHER_BUGS,
}
ProgramOf = Callable[[str], Path]


def kernel_text(*, quantisers: bool = True, formats: bool = True) -> str:
    """With fewer finishers than the program has CTAs, so that some CTAs are none, and for what the
    program uses of it, which spares the compiler the rest: one element type, no exported functions.
    """
    text = kernel_texts.host_unit(*kernel_texts.LAYER_FILES)
    text = replace_once(text, "kMaxFinishers = 32", "kMaxFinishers = 2")
    text = replace_once(text, "int kElement = -1;", "int kElement = kElementFp32;")
    if not quantisers:
        text = replace_once(text, "int kQuantiser = -1;", "int kQuantiser = kQuantiserNone;")
    if not formats:
        text = replace_once(text, "int kCombine = -1;", "int kCombine = kCombineUnquantised;")
    return text


def seed_bugs(text: str, bugs: dict[str, tuple[Edit, ...]]) -> str:
    for name, edits in bugs.items():
        for old, new in edits:
            found = re.findall(r"\s+".join(re.escape(word) for word in old.split()), text)
            assert len(found) == 1, f"{name}: {len(found)} occurrences of {old!r} in the text"
            awake = new.replace("AWAKE", f"(seeded_bug == {NUMBERS[name]})")
            assert awake != new, f"{name}: {old!r} would be replaced where the bug sleeps, too"
            text = replace_once(text, found[0], awake)
    return PRELUDE + text


def build(text: str, folder: Path, *flags: str) -> Path:
    (folder / "kernel_text.h").write_text(text, encoding="utf-8")
    program = folder / "ranks"
    command = [
        *(*shlex.split(env.cxx()), "-std=c++20", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"),
        "-Wno-psabi",  # registers wider than the baseline machine's stay within the program
        *(*flags, "-I", str(folder), str(PROGRAM), "-o", str(program)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    # Without address randomisation: older sanitizer runtimes do not find their shadow memory where
    # vm.mmap_rnd_bits is large.
    setarch = shutil.which("setarch")
    command = [*([setarch, "-R"] if setarch else []), str(program), *arguments]
    # vLLM preloads an allocator for the processes it starts; in front of it the address sanitizer
    # refuses to work.
    usual = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env=usual | options
    )


def build_for_tsan(text: str, folder: Path) -> Path:
    return build(text, folder, "-O1", "-fsanitize=thread", "-DMOE_NVLINK_CTA_THREADS=4")


def run_under_tsan(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(program, *arguments, TSAN_OPTIONS=f"halt_on_error=1:exitcode={TSAN_STATUS}")


def build_group(group: str, folder: Path) -> Path:
    text = kernel_text(quantisers=group in ("quantisers", "others"), formats=group == "formats")
    text = seed_bugs(text, GROUPS[group])
    if group != "others":
        return build_for_tsan(text, folder)
    flags = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return build(text, folder, *flags)


@pytest.fixture(scope="module")
def program_of(tmp_path_factory: pytest.TempPathFactory) -> ProgramOf:
    """The program of a group of bugs, compiled once."""
    return functools.cache(lambda group: build_group(group, tmp_path_factory.mktemp(group)))


def test_no_data_race(tmp_path: Path) -> None:
    done = run_under_tsan(build_for_tsan(kernel_text(), tmp_path))
    assert done.returncode == 0, done.stderr[:4000]
    assert "all rounds verified" in done.stdout


@pytest.mark.parametrize("group", GROUPS)
def test_a_sleeping_bug_does_nothing(group: str, program_of: ProgramOf) -> None:
    done = run_under_tsan(program_of(group), "0")
    assert done.returncode == 0, done.stderr[:4000]
    assert "all rounds verified" in done.stdout


@pytest.mark.parametrize("bug", RACES)
def test_the_thread_sanitizer_catches(bug: str, program_of: ProgramOf) -> None:
    program = program_of(next(group for group, bugs in GROUPS.items() if bug in bugs))
    # Whether two accesses meet depends on the schedule: a few tries, where one is enough.
    for _attempt in range(5):
        done = run_under_tsan(program, str(NUMBERS[bug]))
        if "WARNING: ThreadSanitizer: data race" in done.stderr:
            assert done.returncode == TSAN_STATUS
            return
    last = f"{done.returncode}, {done.stdout} {done.stderr[:2000]}"
    pytest.fail(f"without {bug} the sanitizer saw nothing: {last}")


@pytest.mark.parametrize("cta_threads", [1, 4])
def test_no_bad_address_and_no_undefined_behaviour(cta_threads: int, tmp_path: Path) -> None:
    """One thread as in the product, and its loops vectorised; at -O2, because with these sanitizers
    -O3 takes twice as long to compile.
    """
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    threads = f"-DMOE_NVLINK_CTA_THREADS={cta_threads}"
    level = ("-O2", "-ftree-vectorize") if cta_threads == 1 else ("-O1",)
    done = run(build(kernel_text(), tmp_path, *level, *flags, threads))
    assert done.returncode == 0, done.stderr[:4000]
    assert "all rounds verified" in done.stdout


@pytest.mark.parametrize(
    ("bug", "report"),
    [
        ("a row one vector too long", "AddressSanitizer"),
        ("an id that is not checked", "AddressSanitizer|runtime error|WRONG VALUE"),
        ("a padded token's rows", "use-after-poison"),
        ("a padded token's row in the search for its amax", "use-after-poison"),
        ("a block behind the end of a row", "AddressSanitizer"),
    ],
    ids=["address", "unchecked-id", "padded-token", "padded-amax", "block"],
)
def test_the_other_sanitizers_look(bug: str, report: str, program_of: ProgramOf) -> None:
    done = run(program_of("others"), str(NUMBERS[bug]))
    assert done.returncode != 0, bug
    assert re.search(report, done.stderr), done.stderr[:2000]
