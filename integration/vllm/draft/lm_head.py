"""The LM head of an MTP draft, shared by consecutive data-parallel ranks.

`DraftHead` is one worker's part: it knows how many rows the next draft step may have on any rank,
decides by that number alone whether the step is split, and calls the core. Every rank has the same
number, from vLLM's own agreement on batch sizes, so every rank decides alike; a rank without
requests takes part with no rows.

`MoeNvlinkLogitsProcessor` stands where vLLM has its ``LogitsProcessor``. Only a draft's is ever
given a `DraftHead`; the target's does what vLLM's does.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import torch.distributed
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from moe_nvlink_plugin import HeadConfig, HeadGroup, HeadStats, sharded_argmax, sharded_logits
from moe_nvlink_plugin.errors import (
    DisagreementError,
    MoeNvlinkError,
    PeerError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration.vllm.plugin import replacement
from moe_nvlink_plugin.integration.vllm.plugin.options import AUTO, MTP_LM_HEAD, options_of
from moe_nvlink_plugin.lm_head import cost as head_cost

from . import drafts

logger = logging.getLogger("vllm.plugins.moe_nvlink")

#: Group sizes that "auto" chooses from, where they divide the data-parallel size.
AUTO_SIZES = (2, 4, 8)


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
        return head_cost.report(shape, self.size, self.most_rows, rates)


def plan_of(vllm_config: Any, vocab_size: int, ranks: int, device: torch.device) -> Plan:
    """What this rank would do for its draft. Local.

    vllm_config: with a draft that `drafts.problems` has found nothing against. ranks: data-parallel
    size. "auto" takes the size and the crossover from `head_cost`; a number of ranks is taken at
    its word, and every step is split.
    """
    options = options_of(vllm_config)
    speculative = vllm_config.speculative_config
    whole = Plan(
        size=1,
        crossover=None,
        vocab_size=vocab_size,
        hidden_size=speculative.draft_model_config.get_hidden_size(),
        most_rows=vllm_config.scheduler_config.max_num_seqs,
        dtype=vllm_config.model_config.dtype,
        full_logits=not (drafts.greedy(speculative) and speculative.use_local_argmax_reduction),
    )
    if options.mtp_lm_head_tp_size != AUTO:
        return whole._replace(size=int(options.mtp_lm_head_tp_size))
    shape, rates = _shape_and_rates(whole, device)
    sizes = [size for size in AUTO_SIZES if ranks % size == 0]
    size = head_cost.choose_size(shape, sizes, whole.most_rows, rates)
    if size == 1:
        return whole
    crossover = head_cost.crossover_rows(shape, size, rates, whole.most_rows)
    return whole._replace(size=size, crossover=crossover)


def _shape_and_rates(
    plan: Plan, device: torch.device
) -> tuple[head_cost.HeadShape, head_cost.Rates]:
    element_bytes = plan.dtype.itemsize
    shape = head_cost.HeadShape(plan.vocab_size, plan.hidden_size, element_bytes)
    return shape, head_cost.rates_of(device, element_bytes)


def agree(mine: Plan | Exception, cpu_group: Any, ranks: int) -> Plan:
    """Returns the plan, once all ranks have the same. Collective over the data-parallel ranks.

    mine: or why this rank has none; nobody then waits for it in vain.

    Raises:
        Exception: `mine`, where it is one.
        PeerError: another rank has no plan.
        DisagreementError: on all ranks; "auto" on different GPUs is one way to it.
    """
    everyones: list[Any] = [None] * ranks
    told = mine if isinstance(mine, Plan) else f"{type(mine).__name__}: {mine}"
    torch.distributed.all_gather_object(everyones, told, group=cpu_group)
    if not isinstance(mine, Plan):
        raise mine
    failed = [f"rank {rank}: {t}" for rank, t in enumerate(everyones) if isinstance(t, str)]
    if failed:
        raise PeerError(f"{MTP_LM_HEAD} cannot be set up on another rank; {'; '.join(failed)}")
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


class DraftHead:
    """One worker's part in a shared LM head."""

    def __init__(self, group: HeadGroup, crossover: int | None) -> None:
        """crossover: as in `Plan`. Takes over `group`, and closes it."""
        self.group = group
        self._crossover = crossover
        self._largest_batch: int | None = None
        self._known: Any = None
        self.steps_whole = 0

    def forward_ran(self, largest_batch: int | None) -> None:
        """Notes the largest batch of any rank in the draft's forward; it bounds the rows after it.

        Local. None: vLLM has agreed on none.
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

        Local. Raises UnsupportedError as `refuse_unfit`. Not when the draft is built: vLLM puts the
        target's head in the place of the draft's after that.
        """
        if lm_head is not self._known:
            refuse_unfit(lm_head, self.group.config)
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


def refuse_unfit(lm_head: Any, config: HeadConfig) -> None:
    """Raises UnsupportedError for a head whose rows cannot be multiplied as they lie. Local."""
    way_out = f'Remove "{MTP_LM_HEAD}", which leaves the head whole.'
    method = getattr(lm_head, "quant_method", None)
    if not isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        raise UnsupportedError(
            f"{MTP_LM_HEAD}: the draft's LM head is quantised ({type(method).__name__}), and a "
            f"shared head is multiplied in the model's type. {way_out}"
        )
    weight = lm_head.weight
    rows, columns = weight.shape if weight.ndim == 2 else (0, 0)
    if rows < config.vocab_size or columns != config.hidden_size or weight.dtype != config.dtype:
        raise UnsupportedError(
            f"{MTP_LM_HEAD}: the draft's LM head is {list(weight.shape)} {weight.dtype}, needed "
            f"are [{config.vocab_size} or more, {config.hidden_size}] {config.dtype}. {way_out}"
        )


class MoeNvlinkLogitsProcessor(LogitsProcessor):
    """vLLM's logits processor; a draft's goes through `draft_head` once that is set."""

    draft_head: DraftHead | None = None

    def get_top_tokens(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[n] int64`: the draft tokens of `[n, hidden]`. Collective for a draft's."""
        tokens: torch.Tensor
        if self.draft_head is None:
            tokens = super().get_top_tokens(lm_head, hidden_states, embedding_bias)
            return tokens
        bound = self.draft_head.next_bound()
        if bound is not None:
            return self.draft_head.tokens(
                lm_head,
                hidden_states,
                embedding_bias,
                bound,
                soft_cap=self.soft_cap,
                scale=self.scale,
            )
        # As without us, where the argmax of what `forward` returns would be taken. vLLM's own
        # get_top_tokens refuses a scale that is not positive, which a split step does not.
        logits = super()._get_logits(hidden_states, lm_head, embedding_bias)
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        if self.scale != 1.0:
            logits = logits * self.scale
        tokens = logits.argmax(dim=-1)
        return tokens

    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: Any,
        embedding_bias: torch.Tensor | None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        """`[n, vocab]`, to which `forward` applies soft cap and scale. Collective for a draft's."""
        bound = None if self.draft_head is None else self.draft_head.next_bound()
        if bound is None or self.draft_head is None:
            logits: torch.Tensor | None = super()._get_logits(
                hidden_states, lm_head, embedding_bias, skip_gather
            )
            return logits
        return self.draft_head.logits(lm_head, hidden_states, embedding_bias, bound)


def put_in_place() -> None:
    """Registers our logits processor. Local, idempotent; UnsupportedError as `replacement`."""
    replacement.put_in_place(LogitsProcessor, MoeNvlinkLogitsProcessor)
