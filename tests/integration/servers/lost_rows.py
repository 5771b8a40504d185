"""A plugin of vLLM or SGLang: dispatch on CPU ranks tells its peers that they got nothing."""

from __future__ import annotations

RIGHT, WRONG = "pack_cell(shared.epoch, count, tag)", "pack_cell(shared.epoch, 0, tag)"


def register() -> None:
    """Changes the text of the kernels before it is compiled."""
    from moe_nvlink_plugin.jit import host

    inner = host.load

    def load(text: str) -> host.HostLibrary:
        assert text.count(RIGHT) == 1
        return inner(text.replace(RIGHT, WRONG))

    host.load = load  # type: ignore[assignment]
