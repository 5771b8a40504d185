"""A plugin of vLLM for tests: one rank computes what several would that exchange quantised rows.

The quantiser of a recipe and its inverse are applied to what the experts get, and a format of
combine to the partial sum of every rank's experts. Which, is read before each call from the file
`mode.json` beside this one, so that one server can serve for several comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin import recipes
from moe_nvlink_plugin.recipes import combine_formats

RECIPES = {recipe.name: recipe for recipe in (recipes.FP8_BLOCK, recipes.MXFP8, recipes.NVFP4)}
MODE_FILE = "mode.json"


class Mode(NamedTuple):
    """What the ranks would do: a recipe with its global scale, a format; None changes nothing.

    ep_size: ranks among which experts and their partial sums are divided.
    """

    dispatch: str | None = None
    global_scale: float | None = None
    combine: str | None = None
    ep_size: int = 2


def register() -> None:
    """vLLM's entry point, called in every process."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.apply = quantising(CPUUnquantizedExperts.apply)


def quantising(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's apply of experts, between the quantisers of the mode."""
    path = Path(__file__).with_name(MODE_FILE)

    def apply(
        self: Any, output: torch.Tensor, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        mode = Mode(*json.loads(path.read_text("utf-8")))
        rows = dispatched(hidden_states, mode)
        ids, weights = kwargs.pop("topk_ids"), kwargs.pop("topk_weights")
        owners = owner(self, ids, mode)
        total = torch.zeros_like(output, dtype=torch.float32)
        for rank in range(mode.ep_size):
            # A rank's experts get a row for each choice that is theirs.
            row, choice = (owners == rank).nonzero(as_tuple=True)
            done = torch.empty_like(rows[row])
            theirs = {
                "topk_ids": ids[row, choice].unsqueeze(1),
                "topk_weights": weights[row, choice].unsqueeze(1),
            }
            original(self, done, rows[row], *args, **theirs, **kwargs)
            partial = torch.zeros_like(total).index_add_(0, row, done.float())
            total += combined(partial.to(output.dtype), mode)
        output.copy_(total)

    return apply


def dispatched(rows: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Rows as they arrive."""
    if mode.dispatch is None:
        return rows
    recipe = RECIPES[mode.dispatch]
    scale = None if mode.global_scale is None else torch.tensor([mode.global_scale])
    return recipe.dequantise(*recipe.quantise(rows, scale), rows.dtype, scale)


def combined(partial_rows: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Partial rows as they are added."""
    found = combine_formats.combine_format(mode.combine)
    if found is None:
        return partial_rows.float()
    return found.dequantise(found.quantise(partial_rows))


def owner(experts: Any, topk_ids: torch.Tensor, mode: Mode) -> torch.Tensor:
    """The rank of every choice."""
    per_rank: int = experts.moe_config.num_experts // mode.ep_size
    return topk_ids // per_rank
