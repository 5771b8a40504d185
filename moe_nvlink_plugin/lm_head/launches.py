"""The kernels of one shared LM head, loaded; their argument struct (HeadArgs); their regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_nvlink_plugin.launch.arguments import Window, element_code, new_arguments
from moe_nvlink_plugin.launch.base import Budget, Executor, Launch
from moe_nvlink_plugin.memory.layout import REGION_ALIGNMENT, Region, WorkspaceLayout

from .config import HeadConfig
from .kernels import ARGMAX, COLLECT, GATHER, HEAD, MOST_HEAD_SPLITS, RowSizes


def head_layout(config: HeadConfig, alignment: int = REGION_ALIGNMENT) -> WorkspaceLayout:
    """Make the layout of one shared LM head. Nothing joins its workspace later.

    Args:
        config: the group's configuration.
        alignment: bytes to which the transport aligns places.

    Raises:
        ConfigError: there are more bytes than a window holds.
    """
    slots = config.tp_size * config.max_rows_per_rank
    sizes = {
        "head_rows": slots * config.hidden_size * config.dtype.itemsize,  # slice s: by rank s
        "head_pairs": slots * MOST_HEAD_SPLITS * 8,  # slice s: by rank s, of this rank's rows
    }
    if config.full_logits:
        sizes["head_logits"] = slots * config.shard_size * config.dtype.itemsize  # by this rank
    return WorkspaceLayout.of(config.tp_size, 1, sizes, alignment, room=1)


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


class HeadLaunches:
    """Three kernels, which all take HeadArgs; a launch copies them. One thread at a time.

    Args:
        executor: launches the kernels.
        config: the group's configuration.
        ranks_on_device: ranks of the group on this device, as SymmetricMemory counts them.

    Attributes:
        gather: launches gather; its shape depends on num_rows of the arguments.
        argmax: launches argmax; its shape depends on row_bound; it sets row_splits.
        collect: launches collect; its shape depends on num_rows.

    Raises:
        CompileError: the kernels cannot be compiled, or threads cannot be started.
        UnsupportedError: the kernels are not in the cache, and there is no compiler.
        ConfigError: the device has no room for all kernels that may wait there at the same time.
    """

    def __init__(self, executor: Executor, config: HeadConfig, ranks_on_device: int = 1) -> None:
        assert config.num_threads is not None
        budget = Budget(
            config.num_threads, config.max_sms, config.tp_size, ranks_on_device=ranks_on_device
        )
        launcher = executor.launcher(HEAD.variant(dtype=element_code(config.dtype)), budget)
        row_bytes = config.hidden_size * config.dtype.itemsize
        logits_bytes = config.shard_size * config.dtype.itemsize
        self.gather: Launch = launcher.load(GATHER, RowSizes(row_bytes, config.tp_size))
        self.argmax: Launch = launcher.load(ARGMAX, logits_bytes)
        self.collect: Launch = launcher.load(COLLECT, RowSizes(logits_bytes, config.tp_size))
