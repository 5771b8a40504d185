"""The exchanges of one worker: one per layer geometry, all on one workspace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from moe_nvlink_plugin import AllToAllConfig, HeadGroup, MoeAllToAll, env
from moe_nvlink_plugin.errors import (
    DisagreementError,
    PeerError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration.common.stats import StatsWriter
from moe_nvlink_plugin.integration.common.watch import FailureWatch

from .flag import BACKEND
from .options import QUANTISE_ON_ARRIVAL, Options

if TYPE_CHECKING:
    from moe_nvlink_plugin.integration.vllm.draft.lm_head import DraftHead

logger = logging.getLogger("vllm.plugins.moe_nvlink")

#: The smallest capacity that gets an exchange of its own; below it, slots cost next to nothing.
SMALLEST_CAPACITY = 8


class Geometry(NamedTuple):
    """What makes two MoE layers able to share one exchange."""

    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    recipe: str | None = None


class Proposal(NamedTuple):
    """What one rank would set a layer up with.

    layer: its name; geometry: of its exchange, None where that is not the question; static_scale:
    that its rows are quantised by, None where they bring their own; problem: why this rank cannot
    set it up, None where it can; named_scale: of a recipe that a user named, None where it has
    none.
    """

    layer: str
    geometry: Geometry | None = None
    static_scale: float | None = None
    problem: str | None = None
    named_scale: float | None = None


class MoeNvlinkAll2AllManager(All2AllManagerBase):
    """Owns the `MoeAllToAll` objects of the EP group; every rank creates them in layer order."""

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
        self.device = device
        self.options = options or Options()
        self._holds_startup = holds_startup
        self._met = False
        self._exchanges: dict[Geometry, MoeAllToAll] = {}
        self._draft_heads: dict[Any, DraftHead] = {}
        self._stats_writer: StatsWriter | None = None
        self._watches: list[FailureWatch] = []
        _show_core_logs()

    def exchange(self, geometry: Geometry) -> MoeAllToAll:
        """The exchange for a geometry, created on first use. Collective when it creates.

        All exchanges share one workspace, which grows with a new geometry. Raises what
        `MoeAllToAll.create` raises, ConfigError and DisagreementError among it.
        """
        known = geometry in self._exchanges
        found = self._find_or_create(geometry)
        if not known:
            logger.info(
                "moe_nvlink exchange of rank %d of %d: %s", self.rank, self.world_size, found.config
            )
        return found

    def config(self, geometry: Geometry) -> AllToAllConfig:
        """This rank's configuration of a geometry's exchange. Local; ConfigError as that raises."""
        return AllToAllConfig(
            ep_size=self.world_size,
            ep_rank=self.rank,
            combine=self.options.combine,
            **geometry._asdict(),
        )

    def end_startup(self) -> None:
        """This worker has warmed up: from now on its waits have the ordinary limit. Local."""
        self._holds_startup = False
        for exchange in self._exchanges.values():  # one would do: they share the workspace
            exchange.end_startup()

    def agree(self, mine: Proposal) -> None:
        """Returns when all ranks propose the same for a layer. Collective.

        Raises:
            UnsupportedError: static scales differ; a token quantised by one rank's scale would be
                read by another's.
            DisagreementError: anything else differs.
            PeerError: another rank has a problem; a rank with one of its own returns.
        """
        self._meet()
        everyones: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(everyones, mine, group=self.cpu_group)
        _refuse_differences(mine, everyones)

    def _meet(self) -> None:
        if not self._met:
            # Ranks load weights at different speeds, for longer than an exchange would wait: the
            # first to arrive waits by vLLM's own patience.
            torch.distributed.barrier(self.cpu_group)
            self._met = True

    def _find_or_create(self, geometry: Geometry) -> MoeAllToAll:
        if geometry in self._exchanges:
            return self._exchanges[geometry]
        first = next(iter(self._exchanges.values()), None)
        self._meet()
        created = MoeAllToAll.create(
            self.config(geometry), self.cpu_group, self.device, share_with=first
        )
        self._exchanges[geometry] = created
        if first is None and self._holds_startup:
            created.hold_startup()
        if first is None:
            self._start_stats(created)
            if self.device.type == "cuda":
                # One layer answers for all: they share the workspace and its fault words.
                self._watches.append(FailureWatch(created.failure))
        return created

    def exchanges_by_capacity(self, geometry: Geometry) -> list[MoeAllToAll]:
        """Exchanges that differ in capacity alone, ascending. Collective when it creates.

        Powers of two, and geometry's own as the last. They lie over each other in the workspace,
        which therefore is no larger for them.
        """
        # The largest first: the workspace is placed once and need not grow for the others.
        largest, smaller = self.exchange(geometry), []
        capacity = SMALLEST_CAPACITY
        while capacity < geometry.max_tokens_per_rank:
            smaller.append(self._find_or_create(geometry._replace(max_tokens_per_rank=capacity)))
            capacity *= 2
        return [*smaller, largest]

    def max_sms_used(self) -> int | None:
        """SMs that a kernel of ours may fill (MOE_NVLINK_MAX_SMS); None: all of them. Local."""
        return env.max_sms()

    def get_handle(self, kwargs: dict[str, Any]) -> MoeAllToAll:
        """vLLM's name for `exchange`; kwargs are the fields of `Geometry`."""
        return self.exchange(Geometry(**kwargs))

    def draft_head(self, vllm_config: Any, vocab_size: int) -> DraftHead | None:
        """This worker's part in the LM head of its draft; None where every rank keeps it whole.

        Collective over all ranks, of which groups of consecutive ones then create a `HeadGroup`;
        raises what that raises, and DisagreementError when ranks would group differently. Logs what
        the head costs.
        """
        from moe_nvlink_plugin.integration.vllm.draft import lm_head

        mine: Any
        try:
            mine = lm_head.plan_of(vllm_config, vocab_size, self.world_size, self.device)
            mine.config(self.rank)  # reads this host's variables
        except Exception as error:
            mine = error
        self._meet()
        plan = lm_head.agree(mine, self.cpu_group, self.world_size)
        if self.rank == 0:
            logger.info("moe_nvlink draft, every rank: %s", plan.report(self.device))
        if plan.size == 1:
            return None
        if plan not in self._draft_heads:
            self._draft_heads[plan] = self._create_draft_head(plan)
        return self._draft_heads[plan]

    def _create_draft_head(self, plan: Any) -> DraftHead:
        from moe_nvlink_plugin.integration.vllm.draft import lm_head

        ranks = lm_head.group_of(self.cpu_group, self.rank, plan.size)
        group = HeadGroup.create(plan.config(self.rank), ranks, self.device)
        if self.device.type == "cuda":
            self._watches.append(FailureWatch(group.failure, what="The draft's shared LM head"))
        logger.info(
            "moe_nvlink draft head of rank %d: shared with ranks %s, split up to %s rows a rank, "
            "%.4g MB of symmetric memory",
            self.rank,
            list(lm_head.members_of(self.rank, plan.size)),
            plan.most_rows if plan.crossover is None else plan.crossover,
            group.workspace_bytes / 1e6,
        )
        return lm_head.DraftHead(group, plan.crossover)

    def _start_stats(self, exchange: MoeAllToAll) -> None:
        directory = env.stats_dir()
        if directory is None:
            return

        about = {"ep_rank": self.rank, "ep_size": self.world_size}

        def read() -> dict[str, Any]:
            # One exchange's counters are the whole workspace's.
            heads = [head.stats() for head in list(self._draft_heads.values())]
            return {**exchange.stats()._asdict(), **({"mtp_lm_head": heads[0]} if heads else {})}

        # A GPU's are copied from it, which from another thread would spoil the capture of a CUDA
        # graph: there they are written once, when the worker ends.
        self._stats_writer = StatsWriter(directory, about, read, watch=self.device.type == "cpu")

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
        """Writes the last counters and releases the workspace. Local, idempotent."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        if self._stats_writer is not None:
            self._stats_writer.close()
            self._stats_writer = None
        for head in self._draft_heads.values():
            head.close()
        self._draft_heads.clear()
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()


def _refuse_differences(mine: Proposal, everyones: list[Proposal]) -> None:
    if mine.problem is not None:
        return  # its own error says more
    failed = [f"rank {r}: {p.problem}" for r, p in enumerate(everyones) if p.problem is not None]
    if failed:
        raise PeerError(f"{mine.layer} cannot be set up on another rank; {'; '.join(failed)}")
    if any(
        theirs._replace(static_scale=None) != mine._replace(static_scale=None)
        for theirs in everyones
    ):
        raise DisagreementError(
            "the ranks set up different layers or formats; "
            + ", ".join(
                f"rank {r} has {p.layer}: {p.geometry}, dispatch_global_scale {p.named_scale}"
                for r, p in enumerate(everyones)
            )
        )
    if len({theirs.static_scale for theirs in everyones}) > 1:
        each = ", ".join(f"rank {r} has {p.static_scale}" for r, p in enumerate(everyones))
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: the static activation scale of {mine.layer} differs "
            f"between ranks: {each}. vLLM takes it from the experts of each rank, but a token that "
            f"one rank quantises is read by others. {QUANTISE_ON_ARRIVAL}"
        )


def _show_core_logs() -> None:
    """Lets the core's messages (the workspace's size among them) appear in vLLM's log."""
    core, vllm = logging.getLogger("moe_nvlink_plugin"), logging.getLogger("vllm")
    if not core.handlers:
        for handler in vllm.handlers:
            core.addHandler(handler)
        core.setLevel(vllm.level)
        core.propagate = False  # the root logger would print each message a second time
