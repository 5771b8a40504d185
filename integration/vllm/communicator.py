"""vLLM's communicator with our all-to-all manager in the expert-parallel group.

A worker builds its communicators after its configuration is current and before any model layer
exists, so this is also where our layer classes are put in place: only in workers, only on request.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from . import flag


def attach(communicator: Any) -> None:
    """Replaces the all-to-all manager of an EP communicator by ours, once the flag asks for it.

    Collective over the communicator's group when it takes effect. Raises UnsupportedError when
    this vLLM lacks a name we need, or the group leaves one host.
    """
    if not communicator.use_all2all or not flag.selected_here():
        return
    from . import compat, layers
    from .all2all_manager import MoeNvlinkAll2AllManager

    compat.check_names()
    layers.put_in_place()
    communicator.all2all_manager = MoeNvlinkAll2AllManager(communicator.cpu_group)


class MoeNvlinkCpuCommunicator(CpuCommunicator):
    """The communicator of every group of a CPU worker; only the EP group's is any different."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self)

    def destroy(self) -> None:
        """Releases the workspace with the group. Local."""
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
        super().destroy()
