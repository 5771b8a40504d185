"""The loaded kernels of one shared LM head."""

from __future__ import annotations

from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.launch.base import Budget, Executor, Launch

from .config import HeadConfig
from .kernels import ARGMAX, COLLECT, GATHER, HEAD
from .shapes import RowSizes


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
