"""Phase: what a kernel waits for, as a fault word names it."""

from __future__ import annotations

from typing import NamedTuple

from moe_nvlink_plugin.jit import header, source


class Phase(NamedTuple):
    """What a kernel waits for.

    Attributes:
        name: as errors have it.
        constant: the code that the kernel writes into the fault word.
        cells: the region that holds the cells of the peers.
        header: the file below kernels/ that has the constant.
    """

    name: str
    constant: str
    cells: str
    header: str = source.CONFIG_HEADER

    @property
    def code(self) -> int:
        """The value of the constant."""
        return header.constants(self.header)[self.constant]
