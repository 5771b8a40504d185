"""A plugin of vLLM or SGLang: dispatch on CPU ranks tells its peers that they got nothing.

With FAULT_VARIABLE=STALE it tells them what they got in the epoch before, so that they wait. With
OVERWRITTEN, for large batches, each row from a rank but its first goes to the slot before its own.
"""

from __future__ import annotations

import os

FAULT_VARIABLE = "TESTS_PLANTED_FAULT"
LOST, STALE, OVERWRITTEN = "lost", "stale", "overwritten"
_CELL = "pack_cell(shared.epoch, count, tag)"
_PLACE = "row = geometry.ep_rank * geometry.max_tokens_per_rank + place;"
#: Fault -> what stands in the kernels' text, and what stands there instead.
FAULTS = {
    LOST: (_CELL, "pack_cell(shared.epoch, 0, tag)"),
    STALE: (_CELL, "pack_cell(shared.epoch - 1, count, tag)"),
    OVERWRITTEN: (_PLACE, _PLACE.replace("place;", "place - (place != 0);")),
}


def register() -> None:
    """Changes the text of the kernels before it is compiled."""
    from moe_nvlink_plugin.jit import host

    inner = host.load
    right, wrong = FAULTS[os.environ.get(FAULT_VARIABLE, LOST)]

    def load(text: str) -> host.HostLibrary:
        assert text.count(right) == 1
        return inner(text.replace(right, wrong))

    host.load = load  # type: ignore[assignment]
