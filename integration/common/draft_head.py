"""The LM head of a model that drafts tokens (MTP), shared by consecutive data-parallel ranks.

`DraftHead` is one worker's part: it knows how many rows the next draft step may have on any rank,
decides by that number alone whether the step is split, and calls the core. Every rank has the same
number, from the framework's own agreement on batch sizes, so every rank decides alike; a rank
without requests takes part with no rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed

from moe_nvlink_plugin import HeadConfig, HeadGroup, HeadStats, sharded_argmax, sharded_logits
from moe_nvlink_plugin.errors import DisagreementError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.lm_head import cost

from .agreement import Ranks, refuse_failed
from .options import AUTO, MTP_LM_HEAD
from .watch import FailureWatch

logger = logging.getLogger(__name__)

#: Group sizes that "auto" chooses from, where they divide the data-parallel size.
AUTO_SIZES = (2, 4, 8)

#: What a user writes if a head cannot be shared.
WAY_OUT = f'Remove "{MTP_LM_HEAD}", which leaves the head whole.'

#: Raises UnsupportedError for a head that cannot be shared: the head, and what the group expects.
RefuseUnfit: TypeAlias = Callable[[Any, HeadConfig], None]


class Plan(NamedTuple):
    """How a worker's draft shares its head; equal on all ranks.

    size: ranks of a group, 1 where each keeps the head to itself. crossover: most rows per rank at
    which a step is split, None where every step is. most_rows: of one rank in one step.
    full_logits: whether a step may ask for logits and not for tokens alone.
    """

    size: int
    crossover: int | None
    vocab_size: int
    hidden_size: int
    most_rows: int
    dtype: torch.dtype
    full_logits: bool

    def config(self, rank: int) -> HeadConfig:
        """Of the group's member with this data-parallel rank. Raises ConfigError as that does."""
        return HeadConfig(
            tp_size=self.size,
            tp_rank=rank % self.size,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_rows_per_rank=self.most_rows,
            dtype=self.dtype,
            full_logits=self.full_logits,
        )

    def report(self, device: torch.device) -> str:
        """What sharing is expected to do, for the log. Local."""
        shape, rates = _shape_and_rates(self, device)
        return cost.report(shape, self.size, self.most_rows, rates)


def choose_size(whole: Plan, size: int | str, ranks: int, device: torch.device) -> Plan:
    """`whole`, a plan without sharing, with the size and the crossover that a user wants. Local.

    size: `Options.mtp_lm_head_tp_size`. With "auto", size and crossover come from the rule of
    costs; with a number of ranks, every step is split. ranks: data-parallel size.
    """
    if size != AUTO:
        return whole._replace(size=int(size))
    shape, rates = _shape_and_rates(whole, device)
    sizes = [candidate for candidate in AUTO_SIZES if ranks % candidate == 0]
    chosen = cost.choose_size(shape, sizes, whole.most_rows, rates)
    if chosen == 1:
        return whole
    crossover = cost.crossover_rows(shape, chosen, rates, whole.most_rows)
    return whole._replace(size=chosen, crossover=crossover)


def _shape_and_rates(plan: Plan, device: torch.device) -> tuple[cost.HeadShape, cost.Rates]:
    element_bytes = plan.dtype.itemsize
    shape = cost.HeadShape(plan.vocab_size, plan.hidden_size, element_bytes)
    return shape, cost.rates_of(device, element_bytes)


def agree(mine: Plan | Exception, ranks: Ranks) -> Plan:
    """Returns the plan, once all ranks have the same. Collective over the data-parallel ranks.

    mine: the plan, or why this rank has none, so that no rank waits for it.

    Raises:
        Exception: `mine`, where it is one.
        PeerError: another rank has no plan.
        DisagreementError: on all ranks; "auto" on different GPUs is one way to it.
    """
    told = mine if isinstance(mine, Plan) else f"{type(mine).__name__}: {mine}"
    everyones = ranks.gather(told)
    if not isinstance(mine, Plan):
        raise mine
    refuse_failed([t if isinstance(t, str) else None for t in everyones], MTP_LM_HEAD)
    if any(theirs != mine for theirs in everyones):
        listed = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(everyones))
        raise DisagreementError(
            f"the ranks would share the draft's LM head differently; {listed}. Give all ranks the "
            f"same configuration, and {MTP_LM_HEAD} a number where their GPUs differ."
        )
    return mine


def members_of(rank: int, size: int) -> range:
    """The consecutive ranks that share a head with this one."""
    first = rank - rank % size
    return range(first, first + size)


def group_of(cpu_group: Any, rank: int, size: int) -> Any:
    """A gloo group of this rank's `members_of`. Collective among them."""
    world = torch.distributed.get_process_group_ranks(cpu_group)
    members = [world[member] for member in members_of(rank, size)]
    return torch.distributed.new_group(members, backend="gloo", use_local_synchronization=True)


def refuse_shape(lm_head: Any, config: HeadConfig) -> None:
    """Raises UnsupportedError for a head of another size or type than the group's. Local.

    lm_head: has the `weight`, `[rows, hidden_size]`.
    """
    weight = lm_head.weight
    rows, columns = weight.shape if weight.ndim == 2 else (0, 0)
    if rows < config.vocab_size or columns != config.hidden_size or weight.dtype != config.dtype:
        raise UnsupportedError(
            f"{MTP_LM_HEAD}: the draft's LM head is {list(weight.shape)} {weight.dtype}, needed "
            f"are [{config.vocab_size} or more, {config.hidden_size}] {config.dtype}. {WAY_OUT}"
        )


class DraftHead:
    """One worker's part in a shared LM head."""

    def __init__(self, group: HeadGroup, crossover: int | None, refuse_unfit: RefuseUnfit) -> None:
        """crossover: as in `Plan`. refuse_unfit: what `check` asks. Takes over `group`."""
        self.group = group
        self._refuse_unfit = refuse_unfit
        self._crossover = crossover
        self._largest_batch: int | None = None
        self._known: Any = None
        self.steps_whole = 0

    def forward_ran(self, largest_batch: int | None) -> None:
        """Notes the largest batch of any rank in the draft's forward; it bounds the rows after it.

        Local. None: the ranks have agreed on none.
        """
        self._largest_batch = largest_batch

    def next_bound(self) -> int | None:
        """The most rows of any rank in the step that begins; None: it is not split. Local.

        Equal on all ranks. What a forward said holds for one step: where a forward is replayed and
        says nothing, the bound is the capacity, on all ranks alike.
        """
        most = self.group.config.max_rows_per_rank
        batch, self._largest_batch = self._largest_batch, None
        bound = most if batch is None else max(1, min(batch, most))
        if self._crossover is None or bound <= self._crossover:
            return bound
        self.steps_whole += 1
        return None

    def serve_idle(self, lm_head: Any) -> None:
        """Takes part in a step without rows, where it is split. Collective; result unused."""
        bound = self.next_bound()
        if bound is not None:
            weight = self._weight(lm_head)
            none = weight.new_empty(0, self.group.config.hidden_size)
            sharded_argmax(none, weight, group=self.group, row_bound=bound)

    def tokens(
        self,
        lm_head: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        bound: int,
        *,
        soft_cap: float | None,
        scale: float,
    ) -> torch.Tensor:
        """`[n] int64`: the argmax of the whole vocabulary for this rank's rows. Collective."""
        return sharded_argmax(
            hidden.contiguous(),
            self._weight(lm_head),
            group=self.group,
            bias=bias,
            soft_cap=soft_cap,
            scale=scale,
            row_bound=bound,
        )

    def logits(
        self, lm_head: Any, hidden: torch.Tensor, bias: torch.Tensor | None, bound: int
    ) -> torch.Tensor:
        """`[n, vocab_size]`: the product of this rank's rows, nothing applied yet. Collective."""
        return sharded_logits(
            hidden.contiguous(), self._weight(lm_head), group=self.group, bias=bias, row_bound=bound
        )

    def check(self, lm_head: Any) -> None:
        """Of every forward, split or not: a head that cannot be shared ends the profile run.

        Local. Raises UnsupportedError as `refuse_unfit`. Not when the draft is built: a framework
        may put the target's head in the place of the draft's after that.
        """
        if lm_head is not self._known:
            self._refuse_unfit(lm_head, self.group.config)
            self._known = lm_head

    def _weight(self, lm_head: Any) -> torch.Tensor:
        self.check(lm_head)
        weight: torch.Tensor = lm_head.weight
        return weight

    def stats(self) -> dict[str, int]:
        """Counters of this rank; `steps_whole` are those that "auto" did not split. Local."""
        stats: HeadStats = self.group.stats()
        return {
            "tp_size": self.group.config.tp_size,
            "steps_whole": self.steps_whole,
            **stats._asdict(),
        }

    def failure(self) -> MoeNvlinkError | None:
        """As HeadGroup.failure."""
        return self.group.failure()

    def close(self) -> None:
        """Gives up the group's memory. Local, idempotent."""
        self.group.close()


class DraftHeads:
    """The shared heads of one worker's drafts, one per plan."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """device: where this rank's drafts work."""
        self._ranks, self._device = ranks, device
        self._heads: dict[Plan, DraftHead] = {}
        self._watches: list[FailureWatch] = []

    def head(self, find_plan: Callable[[], Plan], refuse_unfit: RefuseUnfit) -> DraftHead | None:
        """This worker's part in the LM head of a draft; None where every rank keeps it whole.

        Collective over all ranks, of which groups of consecutive ones then create a `HeadGroup`;
        raises what that raises and what find_plan raises, and DisagreementError when ranks would
        group differently. Logs what the head costs.
        """
        mine: Plan | Exception
        try:
            mine = find_plan()
            mine.config(self._ranks.rank)  # reads this host's variables
        except Exception as error:
            mine = error
        self._ranks.meet()
        plan = agree(mine, self._ranks)
        if self._ranks.rank == 0:
            logger.info("moe_nvlink draft, every rank: %s", plan.report(self._device))
        if plan.size == 1:
            return None
        return self.of_plan(plan, refuse_unfit)

    def of_plan(self, plan: Plan, refuse_unfit: RefuseUnfit) -> DraftHead:
        """The head of a plan that the ranks have agreed on. Collective when it creates."""
        if plan not in self._heads:
            self._heads[plan] = self._create(plan, refuse_unfit)
        return self._heads[plan]

    def stats(self) -> dict[str, dict[str, int]]:
        """The section of the counters' file, {} without a head. Local."""
        heads = [head.stats() for head in list(self._heads.values())]
        return {"mtp_lm_head": heads[0]} if heads else {}

    def close(self) -> None:
        """Gives up the heads' memory. Local, idempotent."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        for head in self._heads.values():
            head.close()
        self._heads.clear()

    def _create(self, plan: Plan, refuse_unfit: RefuseUnfit) -> DraftHead:
        rank = self._ranks.rank
        group = HeadGroup.create(
            plan.config(rank), group_of(self._ranks.group, rank, plan.size), self._device
        )
        if self._device.type == "cuda":
            self._watches.append(FailureWatch(group.failure, what="The draft's shared LM head"))
        logger.info(
            "moe_nvlink draft head of rank %d: shared with ranks %s, split up to %s rows a rank, "
            "%.4g MB of symmetric memory",
            rank,
            list(members_of(rank, plan.size)),
            plan.most_rows if plan.crossover is None else plan.crossover,
            group.workspace_bytes / 1e6,
        )
        return DraftHead(group, plan.crossover, refuse_unfit)
