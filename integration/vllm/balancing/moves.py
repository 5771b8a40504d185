"""What our layers do after vLLM's load balancer has moved experts to other ranks.

A static activation scale is the largest of all experts on all ranks (`moe.method`). A move
permutes experts, so that scale stays. If a format kept one scale for each expert among the weights
that move, and the scales differed, ranks would quantise by different scales after a move. Therefore
the ranks agree on the scales again after each move, as they did when they loaded the weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin.integration.common.agreement import Proposal, Ranks
from moe_nvlink_plugin.integration.vllm.moe.layers import MoeNvlinkRoutedExperts
from moe_nvlink_plugin.integration.vllm.moe.method import MoeNvlinkFusedMoEMethod

from . import deaths

logger = logging.getLogger(__name__)


class MoveCounts(NamedTuple):
    """Counters of a worker.

    Attributes:
        rearrangements: how often the balancer has placed the experts anew.
        moved: physical experts that became another logical expert, over all layers and ranks.
    """

    rearrangements: int = 0
    moved: int = 0


class Moves:
    """Follows a worker's balancer: counts moves, and agrees on static scales after them.

    Args:
        ranks: the expert-parallel ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.counts: MoveCounts | None = None
        self._ranks = ranks
        self._placed: dict[str, torch.Tensor] = {}
        self._is_moving = False

    def follow(self, state: Any) -> None:
        """Look at vLLM's EplbState after each of its steps. Local.

        From now on, a step that ends a move is collective as `agree_again`.
        """
        self.counts = MoveCounts()
        self._placed = _placement(state)
        deaths.watch_moves(state)
        step = state.step

        @functools.wraps(step)
        def step_and_look(*args: Any, **named: Any) -> None:
            step(*args, **named)
            self._look(state)

        state.step = step_and_look

    def go_on(self, state: Any, ranks: Ranks) -> None:
        """Follow the same EplbState after ranks have come or gone, which has moved experts. Local.

        That move is not in the counters.

        Args:
            state: vLLM's EplbState.
            ranks: the expert-parallel ranks from now on.
        """
        self._ranks, self._is_moving, self._placed = ranks, False, _placement(state)
        for one in state.model_states.values():
            for layer in _layers(one):
                layer.have_moved = True

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the section of the counters' file; {} without a balancer. Local."""
        return {} if self.counts is None else {"eplb": self.counts._asdict()}

    def _look(self, state: Any) -> None:
        """Act on a move that has ended. vLLM sets the count of steps to 0 when a move begins."""
        self._is_moving |= state.expert_rearrangement_step == 0
        # Layers of an asynchronous move follow one by one, in later steps.
        if not self._is_moving or any(one.rebalanced for one in state.model_states.values()):
            return
        self._is_moving = False
        placed = _placement(state)
        moved = sum(int((placed[key] != self._placed[key]).sum()) for key in placed)
        self._placed = placed
        assert self.counts is not None
        self.counts = MoveCounts(self.counts.rearrangements + 1, self.counts.moved + moved)
        logger.debug("the load balancer has moved %d physical experts", moved)
        for one in state.model_states.values():
            layers = _layers(one)
            for layer in layers:
                layer.have_moved |= moved > 0
            agree_again(layers, self._ranks)


def agree_again(layers: Iterable[Any], ranks: Ranks) -> None:
    """Compare the layers' static scales on all ranks. Collective if a layer has one.

    Args:
        layers: our routed experts, in the same order on all ranks.
        ranks: the expert-parallel ranks.

    Raises:
        UnsupportedError: scales differ.
        PeerError: another rank raised.
    """
    for layer in layers:
        method = layer.quant_method
        if not isinstance(method, MoeNvlinkFusedMoEMethod) or not method.has_static_scale:
            continue
        with ranks.telling_all(layer.layer_name):
            scale = method.static_scale()
        ranks.agree(Proposal(layer.layer_name, static_scale=scale))


def _layers(model_state: Any) -> list[MoeNvlinkRoutedExperts]:
    return [m for m in model_state.model.modules() if isinstance(m, MoeNvlinkRoutedExperts)]


def _placement(state: Any) -> dict[str, torch.Tensor]:
    """Return, by model, `[num_layers, num_physical_experts]` logical experts, on the host."""
    models = state.model_states.items()
    return {key: one.physical_to_logical_map.to("cpu", copy=True) for key, one in models}
