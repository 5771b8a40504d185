"""vLLM's all-to-all manager of the expert-parallel group, with a worker's exchanges and heads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from vllm.distributed import get_ep_group
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from moe_nvlink_plugin import MoeAllToAll, env
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.common.stats import Publication
from moe_nvlink_plugin.integration.vllm import logs

from .backend import BACKEND, OurManager
from .choices import WORDING


class Part(Protocol):
    """What else a worker shares with other ranks."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None: ...

    def stats(self) -> Mapping[str, object]:
        """Return sections of the counters' file. Local."""
        ...

    def release_memory(self) -> None:
        """Give back what memory is shared, until `renew_memory`. Collective."""
        ...

    def renew_memory(self) -> None:
        """Map zeroed memory at the same addresses. Collective."""
        ...

    def close(self) -> None:
        """Release what is shared. Local; idempotent."""
        ...


P = TypeVar("P", bound=Part)


class MoeNvlinkAll2AllManager(All2AllManagerBase, OurManager):
    """Holds the worker's `ExchangePool`, and `part`s, where vLLM expects its own manager.

    Args:
        cpu_group: a gloo group, which is used at start-up only.
        tcp_store_group: as vLLM passes it.
        device: where this rank's layers work.
        options: what the user chose; None takes the defaults and reads no environment variable.
        holds_startup: whether the worker calls `end_startup`.
        publication: where the worker's counters go.
        name: as ExchangePool takes it.
        tolerates_faults: whether vLLM stops at a fault, and ranks go on after it.
    """

    def __init__(
        self,
        cpu_group: Any,
        tcp_store_group: Any = None,
        *,
        device: torch.device,
        options: Options | None = None,
        holds_startup: bool = False,
        publication: Publication | None = None,
        name: str = "",
        tolerates_faults: bool = False,
    ) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self.support_fault_tolerance = tolerates_faults
        logs.show_through(logging.getLogger("vllm"))  # vLLM has configured its loggers again
        self.ranks = Ranks(cpu_group, self.rank, self.world_size, WORDING)
        #: Each returns sections of the counters' file.
        self.sections: list[Callable[[], Mapping[str, object]]] = []
        self._parts: list[Part] = []
        self.pool = ExchangePool(
            self.ranks,
            device,
            options or Options(),
            name=name,
            tolerates_faults=tolerates_faults,
            holds_startup=holds_startup,
            more_stats=self._more_stats,
            publication=publication,
        )

    def _more_stats(self) -> dict[str, object]:
        return {name: section for read in self.sections for name, section in read().items()}

    def part(self, kind: type[P]) -> P:
        """Return the worker's only object of a class, made when first asked for. Local.

        Args:
            kind: the class. `destroy` closes the object, whose counters are in the counters' file.
        """
        for one in self._parts:
            if isinstance(one, kind):
                return one
        made = kind(self.ranks, self.pool.device)
        self._parts.append(made)
        self.sections.append(made.stats)
        return made

    def end_startup(self) -> None:
        """Give waits the ordinary limit from now on, because this worker has warmed up. Local."""
        self.pool.end_startup()

    @overrides
    def max_sms_used(self) -> int | None:
        """Return how many SMs our kernels may fill (MOE_NVLINK_MAX_SMS); None: all. Local."""
        return env.max_sms()

    @overrides
    def get_handle(self, kwargs: dict[str, Any]) -> MoeAllToAll:
        """Return the exchange for a geometry; kwargs are the fields of `Geometry`. Collective."""
        return self.pool.exchange(Geometry(**kwargs))

    # vLLM asks for these after each step, and before it tells users of a fault.

    @overrides
    def query_fault(self) -> torch.Tensor:
        """Return whether a verb has failed, a scalar bool on the device. Local."""
        return self.pool.has_failed()

    @overrides
    def query_active_mask(self) -> torch.Tensor:
        """Return `[ep_size]` int32 on the device: 0 for a rank that takes part, else 1. Local."""
        gone = [int(rank not in self.pool.places()) for rank in range(self.world_size)]
        return torch.tensor(gone, dtype=torch.int32, device=self.pool.device)

    @overrides
    def clean_buffers(self) -> None:
        """Forget what a fault has left. Collective over the ranks that take part."""
        self.go_on_without(())

    def go_on_without(self, ranks: Iterable[int]) -> None:
        """Forget what a fault has left, and leave out ranks that have died.

        Collective over the others. Raises as `MoeAllToAll.mask`.
        """
        self.pool.go_on_without(ranks)

    # Layers without a modular kernel call these three verbs. If a layer does, our prepare/finalize
    # is not in it, which must be an error.

    @overrides
    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: experts that route in their kernel cannot use our exchange."""
        raise self._not_modular()

    @overrides
    def dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: only our prepare/finalize calls our dispatch."""
        raise self._not_modular()

    @overrides
    def combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: only our prepare/finalize calls our combine."""
        raise self._not_modular()

    # vLLM's communicators of CUDA ranks call these two, and our worker of CPU ranks.

    @overrides
    def checkpoint_prepare(self) -> None:
        """Give all shared memory back; its addresses stay. Collective, between two steps.

        Until `checkpoint_restore` no rank can run a step. Raises as `MoeAllToAll.release` and
        `HeadGroup.release`; after an error all ranks call it again, or checkpoint_restore.
        """
        self.pool.release_memory()
        for one in self._parts:
            one.release_memory()

    @overrides
    def checkpoint_restore(self) -> None:
        """Map zeroed memory at the same addresses. Collective, between two steps.

        Raises as `MoeAllToAll.renew` and `HeadGroup.renew`; after an error all ranks call it again.
        """
        self.pool.renew_memory()
        for one in self._parts:
            one.renew_memory()

    @staticmethod
    def _not_modular() -> UnsupportedError:
        return UnsupportedError(
            f"--all2all-backend {BACKEND}: this MoE layer does not go through vLLM's modular "
            "kernel, so our exchange was not placed in it. Use another backend for this model."
        )

    @overrides
    def destroy(self) -> None:
        """Write the last counters; release exchanges and parts. Local; idempotent."""
        self.pool.close()
        for one in self._parts:
            one.close()


def manager_of_ep_group(what: str) -> MoeNvlinkAll2AllManager:
    """Return the manager of this worker's expert-parallel group. Local.

    Args:
        what: what needs the manager, for the message.

    Raises:
        UnsupportedError: the group has another manager.
    """
    manager = get_ep_group().device_communicator.all2all_manager
    if not isinstance(manager, MoeNvlinkAll2AllManager):
        raise UnsupportedError(
            f"{what}: the expert-parallel group has {type(manager).__name__} instead of our "
            "manager. Please report this with the command that started vLLM."
        )
    return manager
