"""Small batches: up to how many tokens they have kernels of their own, and how CTAs share these.

The numbers are those of an H200 with near memory, at 2 and at 8 ranks, and of units with 12 bytes
of data (run: benchmarks/NOTES.md, 2026-11-26). A part has as many units of 14 bytes, and is taken
to cost as much. Far memory favours the kernels for small batches, which wait for fewer trips.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping

from moe_nvlink_plugin.config import MAX_STAGING_BYTES, AllToAllConfig
from moe_nvlink_plugin.launch.shape import ceil_div
from moe_nvlink_plugin.recipes import PayloadRow, QuantisingRecipe, Recipe

from .shapes import SmallSizes
from .sizes import (
    are_whole_words,
    combines_small_batches,
    packed_bytes,
    payload_rows,
    row_data_bytes,
    staging_rows,
    summed_data_bytes,
    widest_combine_row,
)

logger = logging.getLogger(__name__)

#: Units of a row that one CTA takes at a time (kPartUnits of config.h).
PART_UNITS = 256
#: Most bytes of a packed row that dispatch quantises (kMaxStagedBytes of config.h).
MAX_STAGED_BYTES = 16384

#: What a CTA needs to put a part to n targets, in times that it needs to receive a part; and to add
#: up a part of n rows, in times that it needs to send a part: (for none, for each). Of the splits
#: tried, these give the best.
_SENT_TO_TARGETS = (10 / 6, 1 / 6)
_SUM_OF_ROWS = (2.0, 1 / 3)


def with_small_tokens(config: AllToAllConfig, recipe: Recipe, num_sms: int) -> AllToAllConfig:
    """Return the configuration with limits of small batches: what it asks for, and fits. Local.

    Each verb has its own limit: combine moves other rows than dispatch. If the configuration asks
    for a verb of small batches whose rows do not fit, one log line of the process says why.

    Args:
        config: the layer's configuration.
        recipe: what travels.
        num_sms: SMs that a launch may fill, of all ranks the fewest; 0 for CPU ranks, where a fence
            costs nothing and nobody who does not ask for it gets these kernels.
    """
    rows = payload_rows(config, recipe)
    packed = packed_bytes(row.row_bytes for row in rows.values())
    asked, to_combine = config.small_tokens, config.small_combine_tokens
    if asked is None:
        asked = config.choices.small_tokens
        if asked is None:
            most = config.choices.most_small_tokens
            asked = min(most, _worth_it_in_dispatch(config, packed, num_sms))
        if to_combine is None:
            to_combine = config.choices.small_combine_tokens
        if to_combine is None:
            to_combine = _worth_it_in_combine(config, num_sms)
    staged = staging_rows(config, packed)
    too_odd = _unfit_for_dispatch(rows, recipe, packed)
    if too_odd:
        del staged["dispatch_staging"]
        if config.small_tokens:
            _say_once(f"small_tokens={config.small_tokens} does not hold for dispatch: {too_odd}")
    if not combines_small_batches(config):
        if config.small_combine_tokens:
            _say_once(
                f"small_combine_tokens={config.small_combine_tokens} does not hold: combine="
                f"{config.combine!r} with rows of {widest_combine_row(config)} bytes has no kernel "
                'for small batches; it needs "bf16" and a multiple of 4 bytes'
            )
        to_combine = 0
    token_bytes = config.ep_size * sum(staged.values())
    room = MAX_STAGING_BYTES // token_bytes if token_bytes else 0
    most = min(asked, config.max_tokens_per_rank, room)
    to_combine = most if to_combine is None else min(to_combine, most)
    most = 0 if too_odd else most
    return dataclasses.replace(config, small_tokens=most, small_combine_tokens=to_combine)


def _unfit_for_dispatch(rows: Mapping[str, PayloadRow], recipe: Recipe, packed: int) -> str:
    """Return why units cannot carry a token's payloads, and what to do; "" if they can."""
    if isinstance(recipe, QuantisingRecipe) and packed > MAX_STAGED_BYTES:
        return (
            f"with recipe {recipe.name} the payloads of a token may take {MAX_STAGED_BYTES} bytes, "
            f"and take {packed}; send fewer extra payloads, or quantise before dispatch"
        )
    odd = [
        f"{row.row_bytes} of {name.removeprefix('recv_')}"
        for name, row in rows.items()
        if not are_whole_words([row.row_bytes])
    ]
    if odd:
        return (
            f"the bytes of a row must be a multiple of 4 ({', '.join(odd)}); pad it, or dispatch "
            "takes the kernel for large batches"
        )
    return ""


@functools.cache
def _say_once(text: str) -> None:
    """Log, once per process, what is asked for and does not hold."""
    logger.warning("moe_nvlink: %s", text)


def _worth_it_in_dispatch(config: AllToAllConfig, packed: int, num_sms: int) -> int:
    targets = _rows_per_token(config)
    choices = config.choices
    parts = _dispatch_parts(config, packed)
    token = parts * (_cost(_SENT_TO_TARGETS, targets) + targets)
    return int(choices.small_dispatch_parts * choices.small_ctas_per_sm * num_sms / token)


def _worth_it_in_combine(config: AllToAllConfig, num_sms: int) -> int:
    rows = _rows_per_token(config)
    parts = _combine_parts(config, widest_combine_row(config) // config.hidden_size)
    token = parts * (rows + _cost(_SUM_OF_ROWS, rows))
    choices = config.choices
    return int(choices.small_combine_parts * choices.small_ctas_per_sm * num_sms / token)


def small_dispatch_sizes(
    config: AllToAllConfig, row_bytes: Mapping[str, int], quantiser: int
) -> SmallSizes:
    """Return what the launch shape of a small batch's dispatch depends on.

    Args:
        config: the layer's configuration.
        row_bytes: name of the payload's region -> bytes of one token's row.
        quantiser: kQuantiser* of config.h, or 0; with one, a CTA quantises whole rows.
    """
    choices = config.choices
    parts = _dispatch_parts(config, packed_bytes(row_bytes.values()))
    targets = _rows_per_token(config)
    sent_parts = 1 if quantiser else parts
    cost = parts / sent_parts * _cost(_SENT_TO_TARGETS, targets) * choices.sent_weight
    return SmallSizes(
        sent_parts,
        parts,
        received_rows=targets,
        sent_cost=cost,
        fixed_parts=True,
        choices=choices,
    )


def small_combine_sizes(config: AllToAllConfig, element_bytes: int) -> SmallSizes:
    """Return what the launch shape of a small batch's combine depends on.

    Args:
        config: the layer's configuration.
        element_bytes: bytes of an element of the experts' rows.
    """
    parts = _combine_parts(config, element_bytes)
    rows = _rows_per_token(config)
    choices = config.choices
    cost = _cost(_SUM_OF_ROWS, rows) * choices.summed_weight
    return SmallSizes(parts, parts, sent_rows=rows, received_cost=cost, choices=choices)


def _dispatch_parts(config: AllToAllConfig, packed: int) -> int:
    return ceil_div(packed, PART_UNITS * row_data_bytes(config))


def _combine_parts(config: AllToAllConfig, element_bytes: int) -> int:
    part_bytes = PART_UNITS * summed_data_bytes(config, element_bytes)
    return ceil_div(config.hidden_size * element_bytes, part_bytes)


def _cost(costs: tuple[float, float], count: int) -> float:
    return costs[0] + count * costs[1]


def _rows_per_token(config: AllToAllConfig) -> int:
    """Return how many ranks get a token's row at most."""
    return min(config.ep_size, config.top_k)
