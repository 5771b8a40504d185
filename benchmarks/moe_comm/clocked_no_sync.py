"""Our kernels on the clock, without flags and waits. Its imports are the software GPU's."""

from __future__ import annotations

from tests.support.ptx import build

from . import clocked
from .no_sync import without_sync


class ClockedWithoutSync(clocked.Ours):
    """Our kernels on the clock, without flags and waits."""

    def _text(self) -> str:
        return without_sync(super()._text())

    def _load(self) -> build.Library:
        library = super()._load()
        for site in (site for kernel in library.values() for site in kernel.sites):
            # The clock takes an ordered load whose word is on its way for one that polls.
            if site.kind == "load" and site.order == "relaxed":
                site.order = "weak"
        return library

    def run(self, verb: str) -> clocked.Clocked:
        """Run a verb twice, so that the second time finds the counts that it must not wait for."""
        super().run(verb)
        return super().run(verb)
