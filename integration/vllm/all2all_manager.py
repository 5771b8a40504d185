"""vLLM's all-to-all manager of the expert-parallel group: what one worker has of ours."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import torch
from vllm.distributed import get_ep_group
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from moe_nvlink_plugin import MoeAllToAll, env
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import logs
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.draft_head import DraftHeads
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool

from .backend import BACKEND
from .choices import WORDING


class MoeNvlinkAll2AllManager(All2AllManagerBase):
    """Holds the worker's `ExchangePool` and `DraftHeads`, where vLLM looks for its own manager."""

    def __init__(
        self,
        cpu_group: Any,
        tcp_store_group: Any = None,
        *,
        device: torch.device,
        options: Options | None = None,
        holds_startup: bool = False,
    ) -> None:
        """device: where this rank's layers work. cpu_group: a gloo group, for start-up only.

        options: None takes the defaults, without asking the environment. holds_startup: somebody
        calls `end_startup`.
        """
        super().__init__(cpu_group, tcp_store_group)
        if self.internode and device.type == "cpu":
            raise UnsupportedError(
                f"--all2all-backend {BACKEND}: the {self.world_size} ranks of the expert-parallel "
                "group are not on one host, and the host transport is shared memory. Start all "
                "ranks on one host, or drop the flag."
            )
        logs.show_through(logging.getLogger("vllm"))  # this worker has configured its loggers since
        self.ranks = Ranks(cpu_group, self.rank, self.world_size, WORDING)
        self.heads = DraftHeads(self.ranks, device)
        self.pool = ExchangePool(
            self.ranks,
            device,
            options or Options(),
            holds_startup=holds_startup,
            more_stats=self.heads.stats,
        )

    def end_startup(self) -> None:
        """This worker has warmed up: from now on its waits have the ordinary limit. Local."""
        self.pool.end_startup()

    def max_sms_used(self) -> int | None:
        """SMs that a kernel of ours may fill (MOE_NVLINK_MAX_SMS); None: all of them. Local."""
        return env.max_sms()

    def get_handle(self, kwargs: dict[str, Any]) -> MoeAllToAll:
        """vLLM's name for `ExchangePool.exchange`; kwargs are the fields of `Geometry`."""
        return self.pool.exchange(Geometry(**kwargs))

    # The three verbs of vLLM's managers without a modular kernel. Layers reach them only when our
    # prepare/finalize was not put in place, which must not pass in silence.

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not served: experts that route inside their kernel cannot take our exchange."""
        raise self._not_modular()

    def dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not served: our dispatch is called from our prepare/finalize."""
        raise self._not_modular()

    def combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not served: our combine is called from our prepare/finalize."""
        raise self._not_modular()

    @staticmethod
    def _not_modular() -> UnsupportedError:
        return UnsupportedError(
            f"--all2all-backend {BACKEND}: this MoE layer does not go through vLLM's modular "
            "kernel, so our exchange was not placed in it. Use another backend for this model."
        )

    def destroy(self) -> None:
        """Writes the last counters and releases what the worker has of ours. Local, idempotent."""
        self.pool.close()
        self.heads.close()


def manager_of_ep_group(what: str) -> MoeNvlinkAll2AllManager:
    """The manager of this worker's expert-parallel group. Local.

    what: asks for it, for the message of UnsupportedError, which is raised for another manager.
    """
    manager = get_ep_group().device_communicator.all2all_manager
    if not isinstance(manager, MoeNvlinkAll2AllManager):
        raise UnsupportedError(
            f"{what}: the expert-parallel group has {type(manager).__name__} instead of our "
            "manager. Please report this with the command that started vLLM."
        )
    return manager
