"""Each place where a kernel asks for the mask is needed: without it, a check of masks fails.

All of them sleep in one library (tests/support/sanitizers.py), and each is woken by itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.jit import host
from tests.kernels.exchange import test_active_ranks as masks
from tests.kernels.exchange import test_survivors
from tests.support import emulated, emulated_text, sanitizers
from tests.support.sanitizers import Bugs, Edit, instead

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


def does_not_ask(function: str) -> list[Edit]:
    return [Edit(function, _ASKS, f"if (!AWAKE && !{_PEER}) return;")]


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
]
CHECKS = {name: check for check, mutants in BROKEN for name in mutants}
BUGS: Bugs = {name: edits for _check, mutants in BROKEN for name, edits in mutants.items()}
#: Those that `make test` looks at. They wait for nobody; after the others a rank that has ended its
#: part waits for those that have failed.
SAMPLE = ("dispatch signals it", "small dispatch counts rows for it")
NUMBERS = {name: number for number, name in enumerate(BUGS, 1)}

_WAKE = 'extern "C" void moe_nvlink_wake(int bug) { moe_nvlink::seeded_bug = bug; }\n'


@functools.cache
def library() -> Path:
    text = sanitizers.seed(emulated_text.host_source(), BUGS, NUMBERS) + _WAKE
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
    [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.long) for each in BUGS],
)
def test_it_is_noticed(
    name: str, wake: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = CHECKS[name]
    check(monkeypatch)  # asleep it changes nothing
    wake(NUMBERS[name])
    # A wrong result, a rank's error, or an error that does not come.
    with pytest.raises((Exception, pytest.fail.Exception)):
        check(monkeypatch)
