"""Times two sets of choices against each other, ranks in turns, each bit held to today's."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_nvlink_plugin.choices import TODAY, Choices
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import (
    CompileError,
    ConfigError,
    DriverError,
    MismatchError,
    PeerError,
    TransportError,
    UnsupportedError,
)
from moe_nvlink_plugin.exchange.all_to_all import MoeAllToAll
from moe_nvlink_plugin.groups import all_or_none, as_group
from moe_nvlink_plugin.recipes import QuantisingRecipe

from . import turns
from .search import Ratios
from .ways import Batch, Way


class Trials:
    """A layer with today's choices, and others of the same layer beside it. Collective.

    Args:
        group: with a CPU backend.
        device: of the tensors.
        config: of the layer; its choices are not used.
        tokens: loads: numbers of tokens of a rank.

    Attributes:
        seconds: for each comparison.

    Raises:
        ConfigError: the recipe takes no activations.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        config: AllToAllConfig,
        tokens: Sequence[int],
    ) -> None:
        self.seconds = 1.0
        self._group, self._device = group, device
        self._config = dataclasses.replace(config, tuning=TODAY)
        recipe = MoeAllToAll.check(self._config)
        self._recipe = recipe if isinstance(recipe, QuantisingRecipe) else None
        if recipe.name.startswith("bytes_"):
            raise ConfigError(
                f"recipe={recipe.name!r} takes rows that the caller has made; tune a recipe that "
                "takes activations"
            )
        self._clock = turns.Clock(group, device)
        whole = Batch.of(self._config, group, device)
        self._batches = [whole.first(count) for count in tokens]
        self._kept = {TODAY: MoeAllToAll.create(self._config, group, device)}
        self._outputs = [self._way(TODAY, batch).round() for batch in self._batches]

    def close(self) -> None:
        """Close all layers. Local."""
        for exchange in self._kept.values():
            exchange.close()
        self._kept = {}

    def __call__(self, first: Choices, second: Choices) -> Ratios | None:
        """Return the second one's times over the first one's; see search.Compare. Collective.

        Raises:
            MismatchError: other bits than with today's choices; PeerError on the other ranks.
            MoeNvlinkError: what the verbs raise.
        """
        # At most three layers: today's, the best so far, and the candidate.
        for choices in set(self._kept) - {TODAY, first, second}:
            self._kept.pop(choices).close()
        if not all(self._has(choices) for choices in (first, second)):
            return None
        return [self._ratios(first, second, batch) for batch in self._batches]

    def _has(self, choices: Choices) -> bool:
        """Create the layer with these choices; return whether it can run. Collective."""
        if choices in self._kept:
            return True
        config = dataclasses.replace(self._config, tuning=choices)
        if choices.host_threads is not None:
            config = dataclasses.replace(config, num_threads=choices.host_threads)
        try:
            created = MoeAllToAll.create(
                config, self._group, self._device, share_with=self._kept[TODAY]
            )
        except (CompileError, DriverError, PeerError, TransportError, UnsupportedError):
            return False  # on every rank
        self._kept[choices] = created
        ranks = as_group(self._group, self._config.timeout_s or 0.0)
        for batch, output in zip(self._batches, self._outputs, strict=True):
            check = functools.partial(_check, choices, self._way(choices, batch).round(), output)
            all_or_none(ranks, f"trying {choices}", check)
        return True

    def _ratios(self, first: Choices, second: Choices, batch: Batch) -> list[float]:
        both = [self._way(choices, batch) for choices in (first, second)]
        due = time.monotonic() + self.seconds / len(self._batches)
        for way in both:
            way.round()  # so that the experts' rows are in place
        ways: dict[str, Way] = dict(zip(("first", "second"), both, strict=True))
        count = turns.iterations(ways, self._clock, self._group, due)
        samples = turns.in_turns(ways, self._clock, count)
        dist.all_reduce(samples, op=dist.ReduceOp.MAX, group=self._group)
        times = samples.sum(1)  # of both verbs
        ratios: list[float] = (times[1] / times[0]).tolist()
        return ratios

    def _way(self, choices: Choices, batch: Batch) -> _Round:
        return _Round(self._kept[choices], batch, self._recipe)


def _check(choices: Choices, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
        raise MismatchError(
            f"with {choices} combine returned other bits than with today's choices; no choice may "
            "change a result, so please report this, with what moe-nvlink verify says"
        )


class _Round(Way):
    """A layer's exchange of activations, in any format that quantises them."""

    def __init__(
        self, exchange: MoeAllToAll, batch: Batch, recipe: QuantisingRecipe | None
    ) -> None:
        self._exchange, self._batch, self._recipe = exchange, batch, recipe
        self._scale: torch.Tensor | None = None
        if recipe is not None and recipe.needs_global_scale:
            self._scale = batch.hidden.new_ones((), dtype=torch.float32)

    def dispatch(self) -> None:
        one = self._batch
        self._received = self._exchange.dispatch(
            one.hidden, one.ids, one.weights, max_tokens=len(one.hidden), global_scale=self._scale
        )

    def run_experts(self) -> None:
        got, hidden = self._received, self._received.hidden_states
        if self._recipe is not None:
            hidden = self._recipe.dequantise(
                hidden, got.scales, self._batch.hidden.dtype, self._scale
            )
        rows = self._exchange.combine_input(metadata=got.metadata)
        self._batch.run_experts(hidden, got.topk_ids, got.topk_weights, rows)

    def combine(self) -> torch.Tensor:
        metadata = self._received.metadata
        return self._exchange.combine(self._exchange.combine_input(metadata=metadata), metadata)

    def round(self) -> torch.Tensor:
        """Return the sums of a round. Collective."""
        self.dispatch()
        self.run_experts()
        return self.combine()
