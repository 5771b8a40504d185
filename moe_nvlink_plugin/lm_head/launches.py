"""The kernels of one shared LM head, loaded."""

from __future__ import annotations

from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.base import Budget, Executor, Launch

from .config import HeadConfig
from .kernels import ARGMAX, COLLECT, GATHER, HEAD
from .shapes import RowSizes


class HeadLaunches:
    """The three kernels, all with HeadArgs, which a launch copies. One thread at a time.

    Attributes:
        gather: reads num_rows.
        argmax: reads row_bound, sets row_splits.
        collect: reads num_rows.

    Raises:
        CompileError: the kernels cannot be had, or threads cannot be started.
        ConfigError: the device has no room for what may wait there at the same time.
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
