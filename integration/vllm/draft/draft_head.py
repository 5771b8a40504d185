"""The LM head of a model that drafts tokens (MTP), shared by consecutive data-parallel ranks.

`DraftHead` is one worker's part. It knows how many rows the next draft step may have on any rank,
decides by this number alone whether ranks split the step, and calls the core. The number comes from
the framework's own agreement on batch sizes, so it is equal on every rank, and every rank decides
alike. A rank without requests takes part with no rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed

from moe_nvlink_plugin import HeadConfig, HeadGroup, HeadStats, sharded_argmax, sharded_logits
from moe_nvlink_plugin.errors import DisagreementError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Ranks, refuse_failed
from moe_nvlink_plugin.integration.common.options import AUTO, MTP_LM_HEAD
from moe_nvlink_plugin.integration.common.watch import FailureWatch
from moe_nvlink_plugin.lm_head import cost

logger = logging.getLogger(__name__)

#: Group sizes among which "auto" chooses those that divide the data-parallel size.
AUTO_SIZES = (2, 4, 8)

#: What a user can do if a head cannot be shared.
WAY_OUT = f'Remove "{MTP_LM_HEAD}", which leaves the head whole.'

#: Raises UnsupportedError for a head that cannot be shared. Arguments: the head, and the group's
#: configuration.
RefuseUnfit: TypeAlias = Callable[[Any, HeadConfig], None]


class Plan(NamedTuple):
    """How a worker's draft shares its head; equal on all ranks.

    Attributes:
        size: ranks of a group; 1: each rank computes its whole head.
        crossover: most rows per rank at which ranks split a step; None: they split every step.
        vocab_size: rows of the head.
        hidden_size: elements of a row.
        most_rows: most rows of one rank in one step.
        dtype: type of rows and head.
        full_logits: whether a step may ask for logits, and not for tokens only.
    """

    size: int
    crossover: int | None
    vocab_size: int
    hidden_size: int
    most_rows: int
    dtype: torch.dtype
    full_logits: bool

    def config(self, rank: int) -> HeadConfig:
        """Return the configuration of a data-parallel rank's group. Raises as HeadConfig. Local."""
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
        """Describe for the log what sharing is expected to do. Local."""
        shape, rates = _shape_and_rates(self, device)
        return cost.report(shape, self.size, self.most_rows, rates)


def choose_size(whole: Plan, size: int | str, ranks: int, device: torch.device) -> Plan:
    """Return a plan with the group size and the crossover that a user wants. Local.

    Args:
        whole: the plan without sharing.
        size: `Options.mtp_lm_head_tp_size`. If it is "auto", size and crossover come from the rule
            of lm_head/cost.py. If it is a number of ranks, they split every step.
        ranks: data-parallel size.
        device: where this rank works.
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
    """Return the plan if all ranks have the same. Collective over the data-parallel ranks.

    Args:
        mine: the plan, or the exception because of which this rank has none. The rank tells it to
            the others, so no rank waits.
        ranks: the data-parallel ranks.

    Raises:
        Exception: `mine`, if it is one.
        PeerError: another rank has no plan.
        DisagreementError: the plans differ, for example because of "auto" on different GPUs.
            Raised on every rank.
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
    """Return the consecutive ranks that share a head with this rank, itself included."""
    first = rank - rank % size
    return range(first, first + size)


def group_of(cpu_group: Any, rank: int, size: int) -> Any:
    """Create a gloo group of the ranks `members_of`. Collective among them."""
    world = torch.distributed.get_process_group_ranks(cpu_group)
    members = [world[member] for member in members_of(rank, size)]
    return torch.distributed.new_group(members, backend="gloo", use_local_synchronization=True)


def refuse_shape(lm_head: Any, config: HeadConfig) -> None:
    """Raise UnsupportedError for a head of another size or type than the group's. Local.

    Args:
        lm_head: object whose `weight` is `[rows, hidden_size]`.
        config: the group's configuration.
    """
    weight = lm_head.weight
    rows, columns = weight.shape if weight.ndim == 2 else (0, 0)
    if rows < config.vocab_size or columns != config.hidden_size or weight.dtype != config.dtype:
        raise UnsupportedError(
            f"{MTP_LM_HEAD}: the draft's LM head is {list(weight.shape)} {weight.dtype}, needed "
            f"are [{config.vocab_size} or more, {config.hidden_size}] {config.dtype}. {WAY_OUT}"
        )


class DraftHead:
    """One worker's part in a shared LM head.

    Args:
        group: the group; DraftHead closes it.
        crossover: as in `Plan`.
        refuse_unfit: raises for a head that cannot be shared; `check` calls it.

    Attributes:
        steps_whole: number of steps that "auto" did not split.
    """

    def __init__(self, group: HeadGroup, crossover: int | None, refuse_unfit: RefuseUnfit) -> None:
        self.group = group
        self._refuse_unfit = refuse_unfit
        self._crossover = crossover
        self._largest_batch: int | None = None
        self._known: Any = None
        self.steps_whole = 0

    def forward_ran(self, largest_batch: int | None) -> None:
        """Record the largest batch of any rank in the draft's forward. Local.

        The step after the forward has at most so many rows on any rank.

        Args:
            largest_batch: number of tokens; None if the ranks have not agreed on batch sizes.
        """
        self._largest_batch = largest_batch

    def next_bound(self) -> int | None:
        """Return the most rows of any rank in the next step; None: ranks do not split it. Local.

        The result is equal on all ranks. What `forward_ran` recorded holds for one step. If a
        replayed forward has recorded nothing, the bound is the capacity, on all ranks alike.
        """
        most = self.group.config.max_rows_per_rank
        batch, self._largest_batch = self._largest_batch, None
        bound = most if batch is None else max(1, min(batch, most))
        if self._crossover is None or bound <= self._crossover:
            return bound
        self.steps_whole += 1
        return None

    def serve_idle(self, lm_head: Any) -> None:
        """Take part in a step without rows, if ranks split it. Collective."""
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
        """Return the argmax over the whole vocabulary for this rank's rows. Collective; capturable.

        Args:
            lm_head: object whose `weight` is `[rows, hidden_size]`.
            hidden: `[n, hidden_size]`.
            bias: `[vocab_size]` or None.
            bound: result of `next_bound`.
            soft_cap: as sharded_argmax takes it.
            scale: as sharded_argmax takes it.

        Returns:
            `[n]` int64.
        """
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
        """Return the logits `[n, vocab_size]` without soft cap and scale. Collective; capturable.

        The arguments are those of `tokens`.
        """
        return sharded_logits(
            hidden.contiguous(), self._weight(lm_head), group=self.group, bias=bias, row_bound=bound
        )

    def check(self, lm_head: Any) -> None:
        """Check that a head can be shared. Local. Raises UnsupportedError as `refuse_unfit`.

        Every forward calls this, also if ranks do not split its step, so an unfit head ends the
        profile run. The constructor could not check: after it a framework may replace the draft's
        head by the target's.
        """
        if lm_head is not self._known:
            self._refuse_unfit(lm_head, self.group.config)
            self._known = lm_head

    def _weight(self, lm_head: Any) -> torch.Tensor:
        self.check(lm_head)
        weight: torch.Tensor = lm_head.weight
        return weight

    def stats(self) -> dict[str, int]:
        """Return counters of this rank by name; `steps_whole` as in the class. Local."""
        stats: HeadStats = self.group.stats(wait=False)
        return {
            "tp_size": self.group.config.tp_size,
            "steps_whole": self.steps_whole,
            **stats._asdict(),
        }

    def failure(self) -> MoeNvlinkError | None:
        """Return what HeadGroup.failure returns. Local."""
        return self.group.failure()

    def close(self) -> None:
        """Release the group's memory. Local; idempotent."""
        self.group.close()


class DraftHeads:
    """The shared heads of one worker's drafts, one per plan.

    Args:
        ranks: the data-parallel ranks.
        device: where this rank's drafts work.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._heads: dict[Plan, DraftHead] = {}
        self._groups: dict[Plan, Any] = {}
        self._watches: list[FailureWatch] = []

    def head(self, find_plan: Callable[[], Plan], refuse_unfit: RefuseUnfit) -> DraftHead | None:
        """Return this worker's part in the LM head of a draft; None if ranks do not share it.

        Collective over all ranks; then groups of consecutive ranks each create a `HeadGroup`. Rank
        0 logs what the head is expected to cost.

        Raises:
            DisagreementError: the ranks have different plans.
            PeerError: another rank has no plan.
            Exception: what find_plan and HeadGroup.create raise.
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
        """Return the head of a plan that the ranks have agreed on. Collective if it is new."""
        if plan not in self._heads:
            self._heads[plan] = self._create(plan, refuse_unfit)
        return self._heads[plan]

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the section of the counters' file; {} without a head. Local."""
        heads = [head.stats() for head in list(self._heads.values())]
        return {"mtp_lm_head": heads[0]} if heads else {}

    def release_memory(self) -> None:
        """Give back the memory of all heads. Collective; raises as `HeadGroup.release`."""
        for head in self._heads.values():
            head.group.release()

    def renew_memory(self) -> None:
        """Map zeroed memory at the same addresses. Collective; raises as `HeadGroup.renew`."""
        for plan, head in self._heads.items():
            head.group.renew(self._group_of(plan))

    def _group_of(self, plan: Plan) -> Any:
        if plan not in self._groups:
            self._groups[plan] = group_of(self._ranks.group, self._ranks.rank, plan.size)
        return self._groups[plan]

    def close(self) -> None:
        """Release the memory of all heads. Local; idempotent."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        for head in self._heads.values():
            head.close()
        self._heads.clear()
        self._groups.clear()  # gloo's threads end with the last reference

    def _create(self, plan: Plan, refuse_unfit: RefuseUnfit) -> DraftHead:
        rank = self._ranks.rank
        group = HeadGroup.create(plan.config(rank), self._group_of(plan), self._device)
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
