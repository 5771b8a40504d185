"""The shared LM head's kernels under the sanitizers: test_sanitizers.py is for the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import kernel_texts, sanitizers
from tests.support.delays import replace_once
from tests.support.sanitizers import Bugs, Edit, instead, without

pytestmark = pytest.mark.timeout(280)

PROGRAM = Path(__file__).with_name("head_sanitizer_ranks.cpp")

#: Which of the two counters of LocalControl, whose region begins at a multiple of 256 bytes.
_IS_GATHER = (
    "(reinterpret_cast<uint64_t>(arrivals) % kRegionAlignment == offsetof(LocalControl, arrivals))"
)

RACES: Bugs = {
    "P6 release": instead(
        "signal_peer",
        "store_release_sys",
        "store_relaxed_sys",
        when="cells == args.control.dispatch_cells",
    ),
    "P8 release": instead(
        "signal_peer",
        "store_release_sys",
        "store_relaxed_sys",
        when="cells == args.control.combine_cells",
    ),
    "P6 and P8 acquire": instead("wait_for_epoch", "load_acquire_sys", "load_relaxed_sys"),
    "P7 release and acquire": instead(
        "arrive_last", "fetch_add_acq_rel_gpu", "fetch_add_relaxed_gpu", when=_IS_GATHER
    ),
    "P9 release and acquire": instead(
        "arrive_last", "fetch_add_acq_rel_gpu", "fetch_add_relaxed_gpu", when=f"!{_IS_GATHER}"
    ),
    "P7 barrier before the arrival": without("head_gather_body", "cta.sync();"),
    "barrier behind the arrival": without("arrive_last", "cta.sync();"),
    "waiting for the last CTA before the cells": [
        Edit("arrive_last", "before + 1 ==", "before + (AWAKE ? 2 : 1) ==")
    ],
    "barrier behind the counts of argmax": without(
        "head_argmax_body", "cta.sync();", after="const int num_rows"
    ),
    "barrier behind the counts of collect": without("head_collect_body", "cta.sync();"),
    "barrier behind the parts of an item": without("put_words", "cta.sync();"),
    "second parts": without("put_words", "turn = 1 - turn;"),
    "barrier behind the wait": without("head_argmax_body", "cta.sync();", after="take_ids"),
}

#: What the others must see: rows, logits and words behind the end of what they lie in.
BAD_ADDRESSES: Bugs = {
    "a row too long": [Edit("put_head_rows", "1, row_bytes,", "1, row_bytes + (AWAKE ? 4 : 0),")],
    "a column too many": [
        Edit(
            "columns_of_split",
            "first + each : width}",
            "first + each : width + (AWAKE ? kUnit * 4 : 0)}",
        )
    ],
}
BUGS = {**RACES, **BAD_ADDRESSES}
NUMBERS = {name: number for number, name in enumerate(BUGS, 1)}


def kernel_text() -> str:
    """The kernels for one element type, with all bugs asleep."""
    text = kernel_texts.host_unit(*kernel_texts.HEAD_FILES)
    text = replace_once(text, "int kElement = -1;", "int kElement = kElementFp32;")
    return "#include <cstddef>\n" + sanitizers.seed(text, BUGS, NUMBERS)


@pytest.fixture(scope="module")
def under_tsan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tsan")
    return sanitizers.build(PROGRAM, kernel_text(), folder, *sanitizers.RACES)


@pytest.fixture(scope="module")
def under_asan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("-O1", *sanitizers.ADDRESSES, "-DMOE_NVLINK_CTA_THREADS=4")
    return sanitizers.build(PROGRAM, kernel_text(), tmp_path_factory.mktemp("asan"), *flags)


def test_no_data_race(under_tsan: Path) -> None:
    sanitizers.check_all_is_well(under_tsan)


@pytest.mark.parametrize("bug", RACES)
def test_the_thread_sanitizer_catches(bug: str, under_tsan: Path) -> None:
    sanitizers.check_race_is_found(under_tsan, NUMBERS[bug])


def test_no_bad_address_and_no_undefined_behaviour(under_asan: Path) -> None:
    sanitizers.check_all_is_well(under_asan)


@pytest.mark.parametrize("bug", BAD_ADDRESSES)
def test_the_address_sanitizer_looks(bug: str, under_asan: Path) -> None:
    done = sanitizers.run(under_asan, NUMBERS[bug])
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr, done.stderr[:2000]
