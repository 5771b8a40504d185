"""vLLM's communicators with our all-to-all manager in the expert-parallel group.

A worker builds its communicators after its configuration is current and before any model layer
exists, so this is also where our layer classes are put in place: only in workers, only on request.
"""

from __future__ import annotations

from typing import Any

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


def _with_our_manager(base: type[Any], name: str) -> type[Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        base.__init__(self, *args, **kwargs)
        attach(self)

    def destroy(self: Any) -> None:
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
        base.destroy(self)

    members = {"__module__": __name__, "__init__": __init__, "destroy": destroy}
    return type(name, (base,), members)


def __getattr__(name: str) -> Any:
    """Builds the subclass a platform names; each base is importable on its own platform only."""
    if name == "MoeNvlinkCpuCommunicator":
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator as Base
    elif name == "MoeNvlinkCudaCommunicator":
        from vllm.distributed.device_communicators.cuda_communicator import (
            CudaCommunicator as Base,
        )
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = _with_our_manager(Base, name)
    globals()[name] = cls
    return cls
