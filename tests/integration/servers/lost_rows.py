"""A plugin of vLLM or SGLang: dispatch on CPU ranks tells its peers that they got nothing.

With FAULT_VARIABLE=STALE it tells them what they got in the epoch before, so that they wait.
"""

from __future__ import annotations

import os

RIGHT = "pack_cell(shared.epoch, count, tag)"
FAULT_VARIABLE = "TESTS_PLANTED_FAULT"
LOST, STALE = "lost", "stale"
WRONG = {
    LOST: "pack_cell(shared.epoch, 0, tag)",
    STALE: "pack_cell(shared.epoch - 1, count, tag)",
}


def register() -> None:
    """Changes the text of the kernels before it is compiled."""
    from moe_nvlink_plugin.jit import host

    inner = host.load
    wrong = WRONG[os.environ.get(FAULT_VARIABLE, LOST)]

    def load(text: str) -> host.HostLibrary:
        assert text.count(RIGHT) == 1
        return inner(text.replace(RIGHT, wrong))

    host.load = load  # type: ignore[assignment]
