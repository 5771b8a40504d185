"""Each place where a kernel asks for the mask is needed: without it, a check of masks fails. And
other mistakes, which the checks of small batches and of counts notice.

All of them sleep in one library (tests/support/sanitizers.py), and each is woken by itself.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.jit import host
from tests.kernels.exchange import test_active_ranks as masks
from tests.kernels.exchange import test_expert_counts, test_survivors
from tests.kernels.exchange.small import test_small_dispatch
from tests.support import emulated, emulated_text, sanitizers
from tests.support.sanitizers import Bugs, Edit, instead, without

#: Of waits for a rank that is left out. The checks have waits of their own that are in time.
TIMEOUT_S = 2.0

_ASKS = "if (!is_active(args, peer)) return;"
_PEER = "is_active(args, peer)"
_ALL = "args.active_ranks == 0"

Check = Callable[[pytest.MonkeyPatch], None]


def going(small: bool, combine: str = "bf16") -> Check:
    return lambda _: masks.check_ranks_that_go(combine, small=small, timeout_s=TIMEOUT_S)


def going_with_counts(_: pytest.MonkeyPatch) -> None:
    masks.check_ranks_that_go("bf16", num_expert_counts=16, timeout_s=TIMEOUT_S)


def differing(small: bool) -> Check:
    return lambda _: masks.test_masks_that_differ(small)


def left_out(small: bool) -> Check:
    return functools.partial(masks.test_a_mask_without_oneself_that_only_the_kernel_sees, small)


def counters(_: pytest.MonkeyPatch) -> None:
    masks.test_counters(small=True)


def two_words(_: pytest.MonkeyPatch) -> None:
    masks.test_a_mask_of_two_words(small=False)


def going_on(_: pytest.MonkeyPatch) -> None:
    test_survivors.check_that_ranks_go_on(TIMEOUT_S)


def one_small_round(_: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(
        test_small_dispatch.LONG, received_ids="elsewhere", tokens=(5, 3, 2), timeout_s=TIMEOUT_S
    )
    test_small_dispatch.check_one_round(case)


def turns(_: pytest.MonkeyPatch) -> None:
    test_small_dispatch.check_turns()


def overtaking(small: bool) -> Check:
    return lambda _: test_small_dispatch.check_nobody_overtakes(small, TIMEOUT_S)


def counts(_: pytest.MonkeyPatch) -> None:
    # A rank without tokens has nothing to complain of, and would wait for the others.
    case = dataclasses.replace(
        test_expert_counts.FIVE, routing="distinct", tokens=(8, 1, 5, 7, 3), timeout_s=5.0
    )
    test_expert_counts.test_as_the_reference(case, small=False)


def does_not_ask(function: str) -> list[Edit]:
    return [Edit(function, _ASKS, f"if (!AWAKE && !{_PEER}) return;")]


_SENDS = "put_unit(count_unit_at(args, peer, args.geometry.ep_rank, unit), packed);"
NO_COUNTS = "rank 2 sends no counts"

#: What is broken, by the check that must fail.
BROKEN: list[tuple[Check, dict[str, list[Edit]]]] = [
    (
        going(small=False),
        {
            "dispatch routes to a rank that is left out": instead(
                "active_target_of", "is_active(args, target)", "true"
            ),
            "dispatch signals it": instead("publish_counts", _PEER, "true"),
            "dispatch waits for it": instead("collect_counts", _PEER, "true"),
            "combine signals it": instead("signal_peers", _PEER, "true"),
            "combine waits for it": does_not_ask("combine_barrier"),
            "combine has no mask": instead("is_active", "args.is_masked == 0", "true"),
            "a dispatch waits for a rank that left rounds ago": instead(
                "await_leavers", "!has_rank(local->active_ranks, peer)", "false"
            ),
        },
    ),
    (
        going(small=True),
        {
            "small dispatch routes to it": instead(
                "active_owner_of", "is_active(args, owner)", "true"
            ),
            "small dispatch signals it": does_not_ask("publish_small_round"),
            "small dispatch waits for it": instead("see_counts", _PEER, "true"),
            "a dispatch waits for its combine": does_not_ask("await_combine"),
            "ids of its experts stay": instead("keeps", _ALL, "true"),
            "dispatch leaves no mask": instead("leave_mask", _ALL, "true"),
        },
    ),
    (
        going(small=True, combine="fp8_block"),
        {"small dispatch waits for what it has pulled": does_not_ask("await_pulled")},
    ),
    (
        counters,
        {
            "small dispatch counts rows for it": instead(
                "count_sent_rows", "is_active(args, rank)", "true"
            )
        },
    ),
    (differing(small=False), {"a mask has no tag": instead("mask_tag", _ALL, "true")}),
    (differing(small=True), {"a small round's mask has no tag": instead("mask_tag", _ALL, "true")}),
    (
        left_out(small=False),
        {
            "a rank that leaves itself out goes on": instead(
                "load_exclusion", "args.active_ranks != 0", "false"
            )
        },
    ),
    (
        left_out(small=True),
        {"it does not report that": instead("report_left_out", "is_active(args, me)", "true")},
    ),
    (
        two_words,
        {"the second word is not read": instead("has_rank", "mask + rank / 64", "mask")},
    ),
    (
        going_with_counts,
        {
            "counts are sent to it": does_not_ask("send_expert_counts"),
            "counts of it are awaited": instead(
                "receive_expert_counts", "is_active(args, source)", "true"
            ),
        },
    ),
    (
        going_on,
        {
            "meet waits for a rank that has gone": [
                Edit("meet_body", f"if ({_PEER}) {{", f"if (AWAKE || {_PEER}) {{")
            ],
            "meet has no mask in its entry": instead(
                "leave_entry", "args.active_ranks[word]", "uint64_t{0}"
            ),
            "meet tells nobody": [Edit("meet_body", _ASKS, f"if (AWAKE || !{_PEER}) return;")],
        },
    ),
    (
        one_small_round,
        {
            "slots count other tokens": instead("with", "tokens[turn].has(range, top_k)", "true"),
            "ids of other ranks' experts stay": instead(
                "store_choices", "received.keeps(args, id)", "true"
            ),
            "the first empty id stays": instead(
                "mark_small_slices", "filled + column", "filled + 1 + column"
            ),
        },
    ),
    (
        turns,
        {
            "a unit is not cleared": without(
                "take_units", "clear_unit<Unit>(units + i * kUnitBytes);"
            )
        },
    ),
    (
        overtaking(small=True),
        {
            "P12 of a small batch": without(
                "await_previous_round",
                "await_combine(args, first, cta.num_threads, round.combined, is_counted, faulted);",
            )
        },
    ),
    (
        overtaking(small=False),
        {
            "P12 of a large batch": without(
                "await_small_combine",
                "await_combine(args, lane, Cta::kWarpThreads, epoch, cta.block == 0, has_failed);",
            )
        },
    ),
    (
        counts,
        {
            "counters are not cleared": without("take_count", "store_relaxed_gpu(counter, 0);"),
            "units of counts are not cleared": without(
                "receive_expert_counts", "clear_unit<TwoMarkUnit>(place);"
            ),
            "an id counts once": [
                Edit(
                    "route_in_warp",
                    "if (target != kNoSlot) count_choice",
                    "if (AWAKE ? k == 0 : target != kNoSlot) count_choice",
                )
            ],
        },
    ),
]
CHECKS = {name: check for check, mutants in BROKEN for name in mutants}
BUGS: Bugs = {
    **{name: edits for _check, mutants in BROKEN for name, edits in mutants.items()},
    NO_COUNTS: [
        Edit("send_expert_counts", _SENDS, f"if (!AWAKE || args.geometry.ep_rank != 2) {_SENDS}")
    ],
}
#: Those that `make test` looks at. They wait for nobody; after the others a rank that has ended its
#: part waits for those that have failed.
SAMPLE = (
    *(
        "dispatch signals it",
        "small dispatch counts rows for it",
        "ids of other ranks' experts stay",
    ),
    *("a unit is not cleared", "P12 of a small batch", "counters are not cleared"),
    *("slots count other tokens", "units of counts are not cleared"),
)
#: Of those whose text is the point: another error would hide that nobody looks any more.
SAYS = {"a unit is not cleared": "dispatch has left a unit"}
NUMBERS = {name: number for number, name in enumerate(BUGS, 1)}


@functools.cache
def library() -> Path:
    text = sanitizers.seed(emulated_text.host_source(), BUGS, NUMBERS) + sanitizers.WAKE
    return host.build(text, emulated.FLAGS_OF_DELAYED)


@pytest.fixture
def wake(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ranks of this process run the library from now on; the function wakes one of its bugs."""
    path = library()
    loaded: Any = ctypes.CDLL(str(path))
    of_ranks = host.HostLibrary(path)
    monkeypatch.setattr(host, "load", lambda _text: of_ranks)
    # Emulated ranks build theirs.
    monkeypatch.setattr(host, "build", lambda *_args: path)
    waken: Callable[[int], None] = loaded.moe_nvlink_wake
    waken(0)
    return waken


@pytest.mark.parametrize(
    "name",
    [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.long) for each in CHECKS],
)
def test_it_is_noticed(
    name: str, wake: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = CHECKS[name]
    check(monkeypatch)  # asleep it changes nothing
    wake(NUMBERS[name])
    # A wrong result, a rank's error, or an error that does not come.
    with pytest.raises((Exception, pytest.fail.Exception), match=SAYS.get(name)):
        check(monkeypatch)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_a_rank_that_sends_rows_and_no_counts(small: bool, wake: Callable[[int], None]) -> None:
    wake(NUMBERS[NO_COUNTS])
    test_expert_counts.check_who_sends_no_counts(small)
