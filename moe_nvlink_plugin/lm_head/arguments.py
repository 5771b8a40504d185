"""Fills the argument struct of the LM head's kernels (HeadArgs of args.h)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_nvlink_plugin.launch.arguments import Window, element_code, new_arguments
from moe_nvlink_plugin.memory.layout import Region

from .config import HeadConfig
from .kernels import GATHER


def head_arguments(
    config: HeadConfig, regions: Mapping[str, Region], base_ptr: int, rank_stride: int
) -> Any:
    """Make the HeadArgs of the rank `config.tp_rank`, for the three kernels of a call.

    At each call, the caller sets row_bound, num_rows, is_compact, soft_cap, scale, timeout_ns and
    the addresses of the call's tensors.

    Args:
        config: the group's configuration.
        regions: regions of the group, by name.
        base_ptr: address of rank 0's workspace.
        rank_stride: bytes from one rank's workspace to the next rank's.
    """
    args = new_arguments(GATHER, regions, Window(base_ptr, rank_stride), config.timeout_s)
    for name in ("tp_size", "tp_rank", "vocab_size", "hidden_size", "shard_size"):
        setattr(args.geometry, name, getattr(config, name))
    args.geometry.max_rows_per_rank = config.max_rows_per_rank
    args.geometry.element = element_code(config.dtype)
    args.rows_region = regions["head_rows"].block
    args.pairs_region = regions["head_pairs"].block
    if config.full_logits:
        args.logits_region = regions["head_logits"].block
    args.row_splits = 1
    return args
