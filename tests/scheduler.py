"""How pytest-xdist hands the suite out: file by file, and some tests alone at the end."""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling


class FilesThenAlone(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """A file's tests stay in one process, with its fixtures and what it has compiled.

    Tests whose ids begin as `alone` says, which must come last in the order, are one unit, that
    starts when only one process is left.
    """

    def __init__(self, alone: tuple[str, ...], config: Any, log: Any) -> None:
        super().__init__(config, log)
        self._alone = alone

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(self._alone) else nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: Any) -> None:
        if "alone" in self.workqueue:
            self.workqueue.move_to_end("alone")  # a crashed process's files come back behind it
        others = [other for other in self.nodes if other is not node]
        if next(iter(self.workqueue)) != "alone" or not others:
            super()._assign_work_unit(node)
        elif not all(other.shutting_down for other in others):
            node.shutdown()  # runs what it still has; one of the others goes on
        # else: this one waits, with its last test, until the others have ended.

    def remove_node(self, node: Any) -> str | None:
        crashed: str | None = super().remove_node(node)
        if self.workqueue:
            for other in self.nodes:
                self._reschedule(other)
        return crashed
