"""The kernel text under the thread, address and undefined-behaviour sanitizers.

And proof that the thread sanitizer looks: a release, an acquire, a barrier and every second buffer
are taken out once, and it must report a data race each time. That every other order and barrier is
needed is shown of the executed PTX (tests/ptx/test_mutants.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import kernel_texts, sanitizers
from tests.support.delays import replace_once
from tests.support.long_tests import first_of
from tests.support.sanitizers import Bugs, Edit, instead, without

PROGRAM = Path(__file__).with_name("sanitizer_ranks.cpp")
HEAD_PROGRAM = Path(__file__).with_name("head_sanitizer_ranks.cpp")

SEEDED_BUGS: Bugs = {
    "P1 release": instead(
        "signal_peer",
        "store_release_sys",
        "store_relaxed_sys",
        when="cells == args.control.dispatch_cells",
    ),
    "P1 and P3 acquire": instead("wait_for_epoch", "load_acquire_sys", "load_relaxed_sys"),
    "P2 release and acquire": instead("arrive", "fetch_add_acq_rel_gpu", "fetch_add_relaxed_gpu"),
    "the epoch's reading before the arrival": [
        *instead("dispatch_body", "dispatched + 1", "0"),
        Edit(
            "dispatch_body",
            "const bool is_last = finisher == num_finishers(cta) - 1;",
            "const bool is_last = finisher == num_finishers(cta) - 1;"
            " if (AWAKE && cta.thread == 0) {"
            " shared.epoch = load_word(&local_control(args)->epoch) + 1; }"
            " if (AWAKE) { cta.sync(); }",
        ),
    ],
    "waiting for the last CTA before publishing": [
        Edit(
            "dispatch_body",
            "is_last = finisher == num_finishers(cta) - 1;",
            "is_last = finisher == (AWAKE ? 0 : num_finishers(cta) - 1);",
        )
    ],
    "a finisher's own wait": [
        Edit(
            "dispatch_body",
            "collect_counts(args, cta, is_last, shared);",
            "if (!AWAKE || is_last) collect_counts(args, cta, is_last, shared); else"
            " for (int i = cta.thread; i < args.geometry.ep_size; i += cta.num_threads)"
            " shared.counts[i] = load_word(reinterpret_cast<const int32_t*>(region_of(args,"
            " args.geometry.ep_rank, args.control.recv_counts)) + i);",
        )
    ],
    "one writer of recv_counts": [
        Edit(
            "collect_counts",
            "if (is_last) { store_word(&recv_counts",
            "if (is_last || (AWAKE && peer == 0)) { store_word(&recv_counts",
        )
    ],
    "second route": instead("put_tokens", "shared.routes[turn]", "shared.routes[0]"),
    "P4 barrier": without("combine_barrier", "cta.sync();", after="return shared.faulted != 0;"),
    "second rows": [
        Edit(
            "combine_items",
            "next.token, sizes, 1 - turn, shared);",
            "next.token, sizes, AWAKE ? turn : 1 - turn, shared);",
        )
    ],
    # In rounds of small batches. Units are words of std::atomic_ref, so a missing P10 is no race
    # here, nor is a unit that is not cleared in time: the software GPU looks at those.
    "P11 acquire": [Edit("await_pulled", "if (has_failed(args)) return;", "if (AWAKE) return;")],
    "second staged half": [
        Edit(
            "send_parts_of_tokens",
            "shared.staged + turn * kPartBytes<Unit>",
            "shared.staged + (AWAKE ? 0 : turn) * kPartBytes<Unit>",
        )
    ],
    "second half of what is received": [
        Edit(
            "receive_chunk",
            "staged + turn * kPartBytes<Unit>",
            "staged + (AWAKE ? 0 : turn) * kPartBytes<Unit>",
        )
    ],
}

#: The same where rows are quantised, in the program with the formats.
FORMAT_BUGS: Bugs = {
    "second number of a row": [
        Edit(
            "quantise_received",
            "row = shared.taken[turn])",
            "row = shared.taken[AWAKE ? 0 : turn])",
        ),
        Edit(
            "quantise_received",
            "shared.taken[1 - turn] = take_row(args, cta);"
            " end_taking(args, cta, shared.taken[1 - turn], num_rows);",
            "shared.taken[AWAKE ? 0 : 1 - turn] = take_row(args, cta);"
            " end_taking(args, cta, shared.taken[AWAKE ? 0 : 1 - turn], num_rows);",
        ),
    ],
    "counts of this rank's own": instead(
        "send_quantised",
        "load_word(&rows_from(args)[peer])",
        "cell_count(load_word(cell_of(args, args.geometry.ep_rank,"
        " args.control.dispatch_cells, peer)))",
    ),
    "barrier behind a row's amax": without("quantise_slot", "cta.sync();"),
    "second amax": [
        Edit(
            "put_quantised_tokens",
            f"{call} shared.amax[turn])",
            f"{call} shared.amax[AWAKE ? 0 : turn])",
        )
        for call in ("prepare(token,", "put(token, route,")
    ],
}

#: What the other sanitizers must see.
OTHER_BUGS: Bugs = {
    "a row one vector too long": instead("put_range", "offset < last", "offset < last + 1"),
    "an id that is not checked": instead(
        "target_rank_of", "expert < 0 || expert >= geometry.num_experts", "false"
    ),
    "a padded token's rows": instead("put_token", "!has_target<Config>(args, route)", "false"),
    "a padded token's row in the search for its amax": instead(
        "prepare", "!has_expert(token)", "false"
    ),
    "a block behind the end of a row": [
        Edit(
            "encode_row",
            "int whole = hidden_size / kLaneElements * kLaneElements;",
            "int whole = (hidden_size + (AWAKE ? kLaneElements - 1 : 0))"
            " / kLaneElements * kLaneElements;",
        )
    ],
}
# The same of the shared LM head.

HEAD_BUGS: Bugs = {
    "P6 release": instead(
        "signal_peer",
        "store_release_sys",
        "store_relaxed_sys",
        when="cells == args.control.dispatch_cells",
    ),
    "waiting for the last CTA before the cells": [
        Edit("arrive_last", "before + 1 ==", "before + (AWAKE ? 2 : 1) ==")
    ],
    "barrier behind the parts of an item": without("put_words", "cta.sync();"),
    "second parts": without("put_words", "turn = 1 - turn;"),
}

#: What the others must see there: rows, logits and words behind the end of what they lie in.
BAD_HEAD_ADDRESSES: Bugs = {
    "a row too long": [Edit("put_head_rows", "1, row_bytes,", "1, row_bytes + (AWAKE ? 4 : 0),")],
    "a column too many": [
        Edit(
            "columns_of_split",
            "first + each : width}",
            "first + each : width + (AWAKE ? kUnit * 4 : 0)}",
        )
    ],
}

#: Where it is not the address sanitizer, or more than its name.
REPORTS = {
    "an id that is not checked": "AddressSanitizer|runtime error|WRONG VALUE",
    "a padded token's rows": "use-after-poison",
    "a padded token's row in the search for its amax": "use-after-poison",
}


class Group(NamedTuple):
    """Bugs that sleep in one program.

    Attributes:
        program: ranks as threads, which include the text.
        text: makes the text of the kernels, without bugs.
        flags: of the compiler, the sanitizer's among them.
        are_races: whether the thread sanitizer must see each of them.
    """

    program: Path
    text: Callable[[], str]
    bugs: Bugs
    flags: tuple[str, ...] = sanitizers.RACES

    @property
    def are_races(self) -> bool:
        return self.flags is sanitizers.RACES

    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.bugs, 1)}


def kernel_text(*, formats: bool = True) -> str:
    """With fewer finishers than the program has CTAs, so that some CTAs are none, and for what the
    program uses of it, which spares the compiler the rest: one element type, no exported functions.
    """
    text = kernel_texts.host_unit(*kernel_texts.LAYER_FILES)
    text = replace_once(text, "kMaxFinishers = 32", "kMaxFinishers = 2")
    text = replace_once(text, "int kElement = -1;", "int kElement = kElementFp32;")
    if not formats:
        text = replace_once(text, "int kQuantiser = -1;", "int kQuantiser = kQuantiserNone;")
        text = replace_once(text, "int kCombine = -1;", "int kCombine = kCombineUnquantised;")
    return text


def head_text() -> str:
    """The LM head's kernels for one element type."""
    text = kernel_texts.host_unit(*kernel_texts.HEAD_FILES)
    return replace_once(text, "int kElement = -1;", "int kElement = kElementFp32;")


def addresses(level: str, cta_threads: int = 4) -> tuple[str, ...]:
    return (*level.split(), *sanitizers.ADDRESSES, f"-DMOE_NVLINK_CTA_THREADS={cta_threads}")


GROUPS = {
    "protocol": Group(PROGRAM, lambda: kernel_text(formats=False), SEEDED_BUGS),
    "formats": Group(PROGRAM, kernel_text, FORMAT_BUGS),
    "others": Group(PROGRAM, kernel_text, OTHER_BUGS, addresses("-O0")),
    "LM head": Group(HEAD_PROGRAM, head_text, HEAD_BUGS),
    "LM head, others": Group(HEAD_PROGRAM, head_text, BAD_HEAD_ADDRESSES, addresses("-O1")),
}
ProgramOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def program_of(tmp_path_factory: pytest.TempPathFactory) -> ProgramOf:
    """The program of a group of bugs, compiled once."""

    def build(name: str) -> Path:
        group = GROUPS[name]
        text = sanitizers.seed(group.text(), group.bugs, group.numbers())
        folder = tmp_path_factory.mktemp("program")
        return sanitizers.build(group.program, text, folder, *group.flags)

    return functools.cache(build)


def bugs(*, are_races: bool) -> list[tuple[str, str]]:
    """Group and bug."""
    return [(n, bug) for n, one in GROUPS.items() if one.are_races is are_races for bug in one.bugs]


def test_no_data_race(tmp_path: Path) -> None:
    program = sanitizers.build(PROGRAM, kernel_text(), tmp_path, *sanitizers.RACES)
    sanitizers.check_all_is_well(program)


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_a_sleeping_bug_does_nothing(group: str, program_of: ProgramOf) -> None:
    sanitizers.check_all_is_well(program_of(group))


@pytest.mark.long
@pytest.mark.parametrize(("group", "bug"), bugs(are_races=True))
def test_the_thread_sanitizer_catches(group: str, bug: str, program_of: ProgramOf) -> None:
    sanitizers.check_race_is_found(program_of(group), GROUPS[group].numbers()[bug])


@pytest.mark.parametrize(
    ("level", "cta_threads"), first_of([("-O1", 1), ("-O2 -ftree-vectorize", 1), ("-O1", 4)])
)
def test_no_bad_address_and_no_undefined_behaviour(
    level: str, cta_threads: int, tmp_path: Path
) -> None:
    """One thread as in the product, in rotation with its loops vectorised; at -O2, because with
    these sanitizers -O3 takes twice as long to compile. The program with sleeping bugs has four
    threads too.
    """
    flags = addresses(level, cta_threads)
    sanitizers.check_all_is_well(sanitizers.build(PROGRAM, kernel_text(), tmp_path, *flags))


@pytest.mark.long
@pytest.mark.parametrize(("group", "bug"), bugs(are_races=False))
def test_the_other_sanitizers_look(group: str, bug: str, program_of: ProgramOf) -> None:
    done = sanitizers.run(program_of(group), GROUPS[group].numbers()[bug])
    assert done.returncode != 0, bug
    assert re.search(REPORTS.get(bug, "AddressSanitizer"), done.stderr), done.stderr[:2000]
