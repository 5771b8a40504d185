"""Our verbs without flags and waits, to see what these cost. Their results are wrong.

The text of the kernels is changed here, after the product has put it together; nothing of the
product can ask for it. What is left out, as in the reference's ablation:

- A cell still carries its count, but its store releases nothing, so no fence stands before it.
- Nobody waits for a cell or for a small batch's unit: what the first look finds is taken.
- No load acquires, and no epoch that differs is a fault.

What is kept: the arrivals of a rank's own CTAs, which tell which of them is the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from moe_nvlink_plugin.jit import host
from tests.support.delays import replace_once

from .expected import Context
from .ours import Ours

_NO_ORDER = """
#define store_release_sys store_relaxed_sys
#define load_acquire_sys load_relaxed_sys
#define kFaultAhead 0
#define kFaultGeometry 0
"""
_NO_REPORT = "#define report_fault(...) ((void)0)\n"
#: Lines of epoch_flags.h and peers.h before which these stand.
_PLACES = {
    "constexpr int kTagBits = 32 - kCountBits;\n": _NO_ORDER,
    "template <class Args, class Visit>\nHD void for_each_peer(const Args& args, int first,": (
        _NO_REPORT
    ),
}
_ASKS = ("HD bool has_reached(uint64_t cell, uint32_t epoch, uint32_t most_ahead = kAnyAhead) {",)
#: Of both kinds of units.
_ARRIVED = "HD bool has_arrived(uint32_t mark) const {"
#: A dispatch may follow another one.
_REPEATED = "HD bool lacks_combine(uint32_t dispatched, uint32_t combined) {"


def without_sync(text: str) -> str:
    """Return the text of kernels without flags and waits.

    Raises:
        AssertionError: the text is not as this module knows it.
    """
    for ask in _ASKS:
        text = replace_once(text, ask, f"{ask}\n  return true;")
    assert text.count(_ARRIVED) == 2, f"{text.count(_ARRIVED)} occurrences of {_ARRIVED!r}"
    text = text.replace(_ARRIVED, f"{_ARRIVED}\n  return true;")
    text = replace_once(text, _REPEATED, f"{_REPEATED}\n  return false;")
    for place, lines in _PLACES.items():
        text = replace_once(text, place, lines + place)
    return text


@contextmanager
def _host_library() -> Iterator[None]:
    """CPU ranks that are made meanwhile take a library without flags and waits."""
    load = host.load
    with mock.patch.object(host, "load", lambda text: load(without_sync(text))):
        yield


class OursWithoutSync(Ours):
    """MoeAllToAll of CPU ranks without flags and waits."""

    name = "moe_nvlink_no_sync"
    given = "no flags and no waits: what it delivers is wrong, and not checked"
    is_checked = False

    def __init__(self, context: Context) -> None:
        with _host_library():
            super().__init__(context)

    def check(self) -> None:
        """Run a round, and hold it to nothing."""
        self.dispatch()
        self.combine()
