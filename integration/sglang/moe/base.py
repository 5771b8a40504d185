"""Dispatch and combine as SGLang's dispatcher: what all runners and devices have in common.

Who weights and who reduces: the runner applies the router weights and sums over its local experts;
our combine sums the partial rows of the ranks, unweighted. So the result is complete on the rank
whose tokens they are, as after SGLang's own FlashInfer dispatcher.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInputFormat
from sglang.srt.runtime_context import get_forward, get_parallel

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.config import ACTIVATION_DTYPES, local_expert_range
from moe_nvlink_plugin.errors import ConfigError, ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.agreement import Geometry
from moe_nvlink_plugin.integration.common.formats import DispatchFormat
from moe_nvlink_plugin.integration.common.options import AUTO
from moe_nvlink_plugin.integration.common.pool import ExchangePool, bound_of_step

from .experts_input import SglangExpertsInput, natural_recipe, wanted_recipe
from .routing import Routing, routing_of
from .runners import Runner
from .streams import order_of


class Round(NamedTuple):
    """A dispatch that waits for its combine, and how its tokens were routed."""

    received: Dispatched
    routing: Routing


class Arrived(NamedTuple):
    """Rows that arrived, as the runner takes them, beside the ids and weights of the same rows."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor


class MoeNvlinkDispatcher(BaseDispatcher, abc.ABC):
    """Dispatcher of one MoE layer. Layers of a pool share its workspace, and by geometry exchanges.

    Args:
        config: SGLang's MoeRunnerConfig of the layer.
        pool: the worker's exchanges.
        capacity: most tokens that a rank dispatches.
        runner: what the layer's runner takes.
        block_shape: rows and columns of a block of the layer's FP8 weights, or None.

    Raises:
        UnsupportedError: the exchange would misplace the layer; or as
            `ExchangePool.agree_on_format`.
    """

    #: Of what `combine` is given: that of what `dispatch` returned.
    combine_format: CombineInputFormat

    def __init__(
        self,
        config: Any,
        pool: ExchangePool,
        capacity: int,
        runner: Runner,
        block_shape: Sequence[int] | None = None,
    ) -> None:
        """Make the exchange for the rows of a layer without quantisation. Collective.

        Every rank builds its layers in the same order. The workspace exists then, before SGLang
        measures how much memory it may give to its KV cache.
        """
        super().__init__()
        self.runner_backend = config.runner_backend
        self._pool, self._runner, self._block_shape = pool, runner, block_shape
        self._name = f"MoE layer {config.layer_id}"
        with pool.ranks.telling_all(self._name):
            self._geometry = _geometry(config, capacity)
            _check(config, self._geometry, pool)
        self._first, self._end = local_expert_range(
            self._geometry.num_experts, pool.ranks.size, pool.ranks.rank
        )
        self._order = order_of(pool)
        self._round: Round | None = None
        self._configured = False
        self._experts = SglangExpertsInput(pool.ranks.wording, runner)
        self._format = DispatchFormat()
        self._set_up(self._experts)

    # What SGLang calls.

    @overrides
    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        """Choose the format in which the layer's rows travel. Collective the first time.

        SGLang calls it when the layer's weights are loaded. If it calls again because weights are
        replaced while it serves, only the value of a static scale may have changed: graphs keep the
        format they were captured with.

        Raises:
            UnsupportedError: the format would change then; or as `ExchangePool.agree_on_format`.
        """
        super().set_quant_config(quant_config)
        experts = self._experts_input(quant_config)
        if not self._configured:
            self._set_up(experts)
            self._configured = True
        elif experts.recipe != self._experts.recipe:
            raise UnsupportedError(
                f"{self._pool.ranks.wording.flag}: new weights would change the rows of "
                f"{self._name} from {self._experts.recipe or 'floats'} to "
                f"{experts.recipe or 'floats'}. Start a new server for them."
            )
        self._experts = experts

    @overrides
    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Send each token to the ranks of its experts; return what the runner takes. Collective.

        A rank without tokens takes part with empty tensors.

        Args:
            hidden_states: `[num_tokens, hidden_size]`.
            topk_output: output of SGLang's TopK, with physical ids, -1 for none.

        Raises:
            UnsupportedError: `routing` does not read this form of top-k.
            MoeNvlinkError: as `MoeAllToAll.dispatch`.
        """
        routing = routing_of(topk_output, hidden_states.shape[0])
        sent = self._format.send(hidden_states.contiguous(), self._experts)
        audit = self._pool.audit_of(self._exchange)
        payloads = () if audit is None else (audit.words(sent, routing.ids, routing.weights),)
        self._order.begins()
        received = self._exchange.dispatch(
            sent.rows,
            routing.ids,
            routing.weights,
            payloads,
            scales=sent.scales,
            global_scale=sent.global_scale,
            max_tokens=self._bound_of_this_step(),
            active_ranks=self._pool.active_ranks_of(self._exchange),
        )
        if audit is not None:
            received = audit.compared(received)
        self._round = Round(received, routing)
        return self._hand_out(self._round)

    @overrides
    def combine(self, combine_input: Any) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`: the sums over all ranks' experts. Collective.

        Args:
            combine_input: output of the runner, in the format that `dispatch` returned.

        Raises:
            ExchangeStateError: there was no dispatch.
            UnsupportedError: the runner returned another format.
            MoeNvlinkError: as `MoeAllToAll.combine`.
        """
        if self._round is None:
            raise ExchangeStateError("combine without a dispatch: call dispatch first, once each.")
        current, self._round = self._round, None
        if combine_input.format != self.combine_format:
            raise UnsupportedError(
                f"{self._pool.ranks.wording.flag}: {self._name} was dispatched in the format "
                f"{self.combine_format.value}, its runner returns {combine_input.format.value}. "
                "Please report this with the command that started SGLang."
            )
        rows = self._partial_rows(combine_input.hidden_states, current)
        combined = self._exchange.combine(rows, current.received.metadata)
        self._order.ended()
        return combined

    # Where devices and runners differ.

    @abc.abstractmethod
    def _hand_out(self, current: Round) -> Any:
        """Return what the runner takes of a round that has arrived. Local."""

    def _partial_rows(self, rows: torch.Tensor, current: Round) -> torch.Tensor:
        """Return `[num_slots, hidden_size]`: the runner's rows in the slots of the round. Local."""
        return rows

    # What they share.

    def _bound_of_this_step(self) -> int:
        """Return max_tokens of this step, equal on all ranks. Local."""
        capacity = self._exchange.config.max_tokens_per_rank
        return bound_of_step(most_tokens_of_a_rank(), capacity)

    def _combine_input(self, current: Round) -> torch.Tensor:
        """Return the combine region in the slots of a round. Local."""
        return self._exchange.combine_input(metadata=current.received.metadata)

    def _is_local(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids >= self._first) & (ids < self._end)

    def _experts_input(self, quant_config: Mapping[str, Any]) -> SglangExpertsInput:
        options = self._pool.options
        natural = natural_recipe(quant_config, self._runner, self._block_shape)
        recipe = wanted_recipe(natural, options)
        if recipe is not None and options.dispatch == AUTO and not self._fits(recipe):
            recipe = None  # this layer's rows travel as they are
        scale = quant_config.get("input_global_scale")
        return SglangExpertsInput(self._pool.ranks.wording, self._runner, recipe, scale)

    def _fits(self, recipe: str) -> bool:
        try:
            MoeAllToAll.check(self._pool.config(self._geometry._replace(recipe=recipe)))
        except ConfigError:
            return False
        return True

    def _set_up(self, experts: SglangExpertsInput) -> None:
        """Agree on a format, and make its exchange. Collective."""
        chosen = self._pool.agree_on_format(self._name, experts, self._geometry)
        recipe = None if chosen.recipe is None else chosen.recipe.name
        self._exchange = self._pool.exchange(self._geometry._replace(recipe=recipe))
        self._experts, self._format = experts, chosen


def most_tokens_of_a_rank() -> int | None:
    """Return the most tokens of any rank in this step, equal on all ranks; None if unknown. Local.

    It reads only integers of the host, so a captured graph keeps the size it was captured for.
    SGLang agrees on the batch of each data-parallel rank before the forward; the ranks of its
    attention group then share these rows out. If prefill is sequence parallel, SGLang shares rows
    out in another way, and the result is None.
    """
    batches: list[int] | None = get_dp_global_num_tokens()
    if not batches or get_forward().sp_active:
        return None
    ranks: int = get_parallel().attn_tp_size
    return -(-max(batches) // ranks)


def _geometry(config: Any, capacity: int) -> Geometry:
    dtype = config.params_dtype
    return Geometry(
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        max_tokens_per_rank=capacity,
        dtype=dtype if dtype in ACTIVATION_DTYPES else torch.get_default_dtype(),
    )


def _check(config: Any, geometry: Geometry, pool: ExchangePool) -> None:
    """Raise UnsupportedError for a layer that the exchange would misplace. Local."""
    flag, ranks = pool.ranks.wording.flag, pool.ranks.size
    if config.num_fused_shared_experts:
        raise UnsupportedError(
            f"{flag}: SGLang has fused {config.num_fused_shared_experts} shared experts into the "
            "routed ones, which every rank would hold. Add --disable-shared-experts-fusion."
        )
    if config.no_combine:
        raise UnsupportedError(
            f"{flag}: this MoE layer adds up its top_k rows outside of the runner (no_combine), "
            "and our combine takes their sum. Use another backend for this model."
        )
    # SGLang's layers with this flag all-reduce what combine returns, which is complete.
    if getattr(config.layer, "reduce_results", False):
        raise UnsupportedError(
            f"{flag}: this MoE layer sums its output over the tensor-parallel ranks itself "
            "(reduce_results), and would sum a second time what our combine has summed. Drop the "
            "flag for this model."
        )
    if config.num_local_experts * ranks != geometry.num_experts:
        raise UnsupportedError(
            f"{flag}: this rank holds {config.num_local_experts} of {geometry.num_experts} "
            f"experts, and the expert-parallel group has {ranks} ranks. Set --ep-size to "
            "--tp-size, and --ep-num-redundant-experts so that the ranks hold equally many."
        )
