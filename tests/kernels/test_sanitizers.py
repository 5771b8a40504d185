"""The kernel text under the thread, address and undefined-behaviour sanitizers.

And proof that the thread sanitizer looks: a release, an acquire, a barrier and every second buffer
are taken out once, and it must report a data race each time. That every other order and barrier is
needed is shown of the executed PTX (tests/ptx/test_mutants.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.launch import kernel
from moe_nvlink_plugin.lm_head.kernels import HEAD
from tests.support import sanitizers
from tests.support.delays import replace_once
from tests.support.long_tests import first_of
from tests.support.sanitizers import Bugs, Edit, instead, without

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

#: The same where rows are quantised.
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
    "an id that is not checked": "AddressSanitizer|runtime error",
    "a padded token's rows": "use-after-poison",
    "a padded token's row in the search for its amax": "use-after-poison",
}


class Group(NamedTuple):
    """Bugs that sleep in one library, by the room that shows them."""

    rooms: dict[str, Bugs]
    flags: tuple[str, ...]

    def bugs(self) -> Bugs:
        return {name: edits for bugs in self.rooms.values() for name, edits in bugs.items()}

    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.bugs(), 1)}


def kernel_text(bugs: Bugs, numbers: Mapping[str, int]) -> str:
    """With fewer finishers than there are CTAs, so that some CTAs are none, and for one element
    type, which spares the compiler the rest.
    """
    text = kernel.host_source((LAYER, HEAD))
    text = replace_once(text, "kMaxFinishers = 32", "kMaxFinishers = 2")
    text = replace_once(text, "int kElement = -1;", "int kElement = kElementFp32;")
    return sanitizers.seed(text, bugs, numbers)


def addresses(level: str, cta_threads: int = 4) -> tuple[str, ...]:
    return (*level.split(), *sanitizers.ADDRESSES, f"-DMOE_NVLINK_CTA_THREADS={cta_threads}")


ROOMS = ("layer", "head")
GROUPS = {
    "races": Group({"layer": {**SEEDED_BUGS, **FORMAT_BUGS}, "head": HEAD_BUGS}, sanitizers.RACES),
    "others": Group({"layer": OTHER_BUGS, "head": BAD_HEAD_ADDRESSES}, addresses("-O1")),
}
LibraryOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def library_of(tmp_path_factory: pytest.TempPathFactory) -> LibraryOf:
    """The library of a group of bugs, compiled once."""

    def build(name: str) -> Path:
        group, folder = GROUPS[name], tmp_path_factory.mktemp("library")
        text = kernel_text(group.bugs(), group.numbers())
        return sanitizers.build(text, folder / "library.so", *group.flags)

    return functools.cache(build)


def bugs_of(group: str) -> list[tuple[str, str]]:
    """Room and bug."""
    return [(room, bug) for room, bugs in GROUPS[group].rooms.items() for bug in bugs]


def check_rooms(flags: tuple[str, ...], folder: Path) -> None:
    library = sanitizers.build(kernel_text({}, {}), folder / "library.so", *flags)
    for room in ROOMS:
        sanitizers.check_all_is_well(library, room)


def test_no_data_race(tmp_path: Path) -> None:
    check_rooms(sanitizers.RACES, tmp_path)


@pytest.mark.parametrize(
    ("level", "cta_threads"), first_of([("-O1", 1), ("-O2 -ftree-vectorize", 1), ("-O1", 4)])
)
def test_no_bad_address_and_no_undefined_behaviour(
    level: str, cta_threads: int, tmp_path: Path
) -> None:
    """One thread as in the product, in rotation with its loops vectorised; at -O2, because with
    these sanitizers -O3 takes twice as long to compile. The library with sleeping bugs has four
    threads too.
    """
    check_rooms(addresses(level, cta_threads), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_sleeping_bug_does_nothing(group: str, room: str, library_of: LibraryOf) -> None:
    sanitizers.check_all_is_well(library_of(group), room)


@pytest.mark.long
@pytest.mark.parametrize(("room", "bug"), bugs_of("races"))
def test_the_thread_sanitizer_catches(room: str, bug: str, library_of: LibraryOf) -> None:
    number = GROUPS["races"].numbers()[bug]
    sanitizers.check_race_is_found(library_of("races"), room, number)


@pytest.mark.long
@pytest.mark.parametrize(("room", "bug"), bugs_of("others"))
def test_the_other_sanitizers_look(room: str, bug: str, library_of: LibraryOf) -> None:
    done = sanitizers.run(library_of("others"), room, GROUPS["others"].numbers()[bug])
    assert done.returncode != 0, bug
    assert re.search(REPORTS.get(bug, "AddressSanitizer"), done.stderr), done.stderr[:2000]
