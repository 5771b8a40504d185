"""How pytest-xdist hands the suite out: file by file, servers beside patient tests, some alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from xdist.scheduler.loadscope import LoadScopeScheduling

_SERVERS, _ALONE = "servers", "alone"


class Kinds(NamedTuple):
    """How the ids of tests begin that are not like others.

    patient: no clock of theirs minds that servers take the processors. servers: run in one process,
    in their order, beside patient tests or nothing. alone: likewise, beside nothing, at the end.
    """

    patient: tuple[str, ...]
    servers: tuple[str, ...]
    alone: tuple[str, ...]


class FilesThenAlone(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """A file's tests stay in one process, with its fixtures and what it has compiled."""

    def __init__(self, kinds: Kinds, config: Any, log: Any) -> None:
        super().__init__(config, log)
        self._kinds = kinds

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(self._kinds.servers):
            return _SERVERS
        return _ALONE if nodeid.startswith(self._kinds.alone) else nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: Any) -> None:
        others = [other for other in self.nodes if other is not node]
        unit = self._unit_for(others)
        if unit is not None:
            self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)
        elif not all(other.shutting_down for other in others):
            node.shutdown()  # runs what it still has; one of the others goes on
        # else: this one waits, with its last test, until the others have ended.

    def _unit_for(self, others: list[Any]) -> str | None:
        """What a process gets next; None while the others must end before anything can start."""
        queue: list[str] = list(self.workqueue)
        files = [unit for unit in queue if unit not in (_SERVERS, _ALONE)]
        patient = [unit for unit in files if unit.startswith(self._kinds.patient)]
        ordinary = [unit for unit in files if unit not in patient]
        if ordinary:
            return ordinary[0]
        if _SERVERS in queue and all(map(self._is_patient, others)):
            return _SERVERS
        if patient:
            return patient[0]
        return None if others else queue[0]

    def _is_patient(self, node: Any) -> bool:
        """Whether all that a process still has to run is patient."""
        return all(
            unit.startswith(self._kinds.patient)
            for unit, tests in self.assigned_work[node].items()
            if not all(tests.values())
        )

    def remove_node(self, node: Any) -> str | None:
        crashed: str | None = super().remove_node(node)
        if self.workqueue:
            for other in self.nodes:
                self._reschedule(other)
        return crashed
