"""The shared LM head's kernels under the sanitizers: test_sanitizers.py is for the others.

One program for each sanitizer: the bugs stand in its text beside what they break, asleep, and its
argument wakes one of them. That costs one compilation and not one for every bug.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.kernels import test_sanitizers
from tests.support import kernel_texts
from tests.support.delays import replace_once

pytestmark = pytest.mark.timeout(280)

PROGRAM = Path(__file__).with_name("head_sanitizer_ranks.cpp")
#: Of the bug that is awake; set before the first thread is started.
PRELUDE = "namespace moe_nvlink { inline int seeded_bug = 0; }\n"

#: name -> what stands in the kernel text, and what instead; `{bug}` is the bug's number.
RACES: dict[str, tuple[str, str]] = {
    "P6 release": (
        "    store_release_sys(cell_of(args, peer, cells, geometry.tp_rank),",
        "    (seeded_bug == {bug} && cells == args.control.dispatch_cells ? store_relaxed_sys"
        " : store_release_sys)(cell_of(args, peer, cells, geometry.tp_rank),",
    ),
    "P8 release": (
        " : store_release_sys)(cell_of(args, peer, cells, geometry.tp_rank),",
        " : seeded_bug == {bug} && cells == args.control.combine_cells ? store_relaxed_sys"
        " : store_release_sys)(cell_of(args, peer, cells, geometry.tp_rank),",
    ),
    "P6 and P8 acquire": (
        "*seen = load_acquire_sys(cell);",
        "*seen = seeded_bug == {bug} ? load_relaxed_sys(cell) : load_acquire_sys(cell);",
    ),
    "P7 release and acquire": (
        "before = fetch_add_acq_rel_gpu(arrivals, 1);",
        "before = (seeded_bug == {bug} && is_gather(arrivals) ? fetch_add_relaxed_gpu"
        " : fetch_add_acq_rel_gpu)(arrivals, 1);",
    ),
    "P9 release and acquire": (
        " : fetch_add_acq_rel_gpu)(arrivals, 1);",
        " : seeded_bug == {bug} && !is_gather(arrivals) ? fetch_add_relaxed_gpu"
        " : fetch_add_acq_rel_gpu)(arrivals, 1);",
    ),
    "P7 and P9 barrier before the arrival": (
        "  cta.sync();\n  if (cta.thread == 0) {\n    // P7 (gather)",
        "  if (seeded_bug != {bug}) cta.sync();\n  if (cta.thread == 0) {\n    // P7 (gather)",
    ),
    "barrier behind the arrival": (
        "  cta.sync();\n  return shared.is_last != 0;",
        "  if (seeded_bug != {bug}) cta.sync();\n  return shared.is_last != 0;",
    ),
    "waiting for the last CTA before the cells": (
        "shared.is_last = before + 1 == static_cast<uint32_t>(cta.num_blocks) ? 1 : 0;",
        "shared.is_last = before + (seeded_bug == {bug} ? 2 : 1) =="
        " static_cast<uint32_t>(cta.num_blocks) ? 1 : 0;",
    ),
    "barrier behind the counts of argmax": (
        "  cta.sync();\n  const int num_rows = sum_of_counts",
        "  if (seeded_bug != {bug}) cta.sync();\n  const int num_rows = sum_of_counts",
    ),
    "barrier behind the counts of collect": (
        "  cta.sync();\n  if (shared.has_failed != 0) {\n    fill_with_nan",
        "  if (seeded_bug != {bug}) cta.sync();\n  if (shared.has_failed != 0) {\n"
        "    fill_with_nan",
    ),
    "barrier behind the parts of an item": (
        "    cta.sync();\n    put_word(args",
        "    if (seeded_bug != {bug}) cta.sync();\n    put_word(args",
    ),
    "second parts": ("    turn = 1 - turn;", "    if (seeded_bug != {bug}) turn = 1 - turn;"),
    "barrier behind the wait": (
        "  cta.sync();  // splits and faulted",
        "  if (seeded_bug != {bug}) cta.sync();  // splits and faulted",
    ),
}

#: What the others must see: rows, logits and words behind the end of what they lie in.
BAD_ADDRESSES: dict[str, tuple[str, str]] = {
    "a row too long": (
        "    put_row(cta, cta.thread, source, &target, 1, row_bytes,",
        "    put_row(cta, cta.thread, source, &target, 1, row_bytes +"
        " (seeded_bug == {bug} ? 4 : 0),",
    ),
    "a column too many": (
        "  return Columns{first, each < width - first ? first + each : width};",
        "  return Columns{first, each < width - first ? first + each"
        " : width + (seeded_bug == {bug} ? kUnit * 4 : 0)};",
    ),
}
BUGS = {**RACES, **BAD_ADDRESSES}
NUMBERS = {name: number for number, name in enumerate(BUGS, 1)}

#: Which of the two counters of LocalControl, whose region begins at a multiple of 256 bytes.
IS_GATHER = """
HD bool is_gather(const uint32_t* arrivals) {
  return reinterpret_cast<uint64_t>(arrivals) % kRegionAlignment ==
         offsetof(LocalControl, arrivals);
}
"""


def kernel_text() -> str:
    """The kernels for one element type, with all bugs asleep."""
    text = kernel_texts.host_unit(*kernel_texts.HEAD_FILES)
    text = replace_once(text, "int kElement = -1;", "int kElement = kElementFp32;")
    for name, (old, new) in BUGS.items():
        text = replace_once(text, old, new.replace("{bug}", str(NUMBERS[name])))
    marker = "// What all ranks of a round must agree on, in 7 bits, as geometry_tag()"
    text = replace_once(text, marker, IS_GATHER + marker)
    return "#include <cstddef>\n" + PRELUDE + text


def build(folder: Path, *flags: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_sanitizers, "PROGRAM", PROGRAM)
        return test_sanitizers.build(
            kernel_text(), folder, "-O1", *flags, "-DMOE_NVLINK_CTA_THREADS=4"
        )


@pytest.fixture(scope="module")
def under_tsan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("tsan"), "-fsanitize=thread")


@pytest.fixture(scope="module")
def under_asan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return build(tmp_path_factory.mktemp("asan"), *flags)


def run(program: Path, bug: str = "") -> subprocess.CompletedProcess[str]:
    status = test_sanitizers.TSAN_STATUS
    return test_sanitizers.run(
        program, str(NUMBERS.get(bug, 0)), TSAN_OPTIONS=f"halt_on_error=1:exitcode={status}"
    )


def test_no_data_race(under_tsan: Path) -> None:
    done = run(under_tsan)
    assert done.returncode == 0, done.stderr[:4000]
    assert "all rounds verified" in done.stdout


@pytest.mark.parametrize("bug", RACES)
def test_the_thread_sanitizer_catches(bug: str, under_tsan: Path) -> None:
    # Whether two accesses meet depends on the schedule: a few tries, where one is enough.
    for _attempt in range(5):
        done = run(under_tsan, bug)
        if "WARNING: ThreadSanitizer: data race" in done.stderr:
            assert done.returncode == test_sanitizers.TSAN_STATUS
            return
    last = f"{done.returncode}, {done.stdout} {done.stderr[:2000]}"
    pytest.fail(f"without {bug} the sanitizer saw nothing: {last}")


def test_no_bad_address_and_no_undefined_behaviour(under_asan: Path) -> None:
    done = run(under_asan)
    assert done.returncode == 0, done.stderr[:4000]
    assert "all rounds verified" in done.stdout


@pytest.mark.parametrize("bug", BAD_ADDRESSES)
def test_the_address_sanitizer_looks(bug: str, under_asan: Path) -> None:
    done = run(under_asan, bug)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr, done.stderr[:2000]
