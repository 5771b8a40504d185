"""The LM head's own kernels for GPUs, executed as PTX: as tests/support/head_ranks.py on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.lm_head.kernels import HEAD
from tests.support.head_ranks import Call, HeadRanksInStep, Round
from tests.support.ptx.backend import Grids


class PtxHeadRanks(HeadRanksInStep):
    """Ranks of one LM head, whose three kernels are executed as PTX.

    Args:
        config: of rank 0.
        options: of Grids.
    """

    def __init__(self, config: HeadConfig, **options: Any) -> None:
        super().__init__(config, None)
        self.grids = Grids(config.tp_size, **options)
        self._variant = HEAD.variant(dtype=element_code(config.dtype))
        self._kernels = {kernel.name: kernel for kernel in HEAD.kernels}

    def launch_all(self, kernel: str, ranks: Sequence[int], arguments: Sequence[Any]) -> None:
        made = self._variant.build(self._kernels[kernel], pdl=self.grids.pdl)
        self.grids.launch([made] * len(ranks), arguments, None, ranks=ranks)

    def multiply(self, rank: int, calls: Sequence[Call], of_round: Round) -> None:
        """The host in the product's place reads and spoils rows, and writes logits."""
        for name in ("head_rows", "head_logits"):
            region = self.view(rank, name, torch.uint8)
            self.grids.host_access(rank, region, writes=True)
        super().multiply(rank, calls, of_round)

    def view(self, rank: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        found = super().view(rank, name, dtype)
        if name == "head_pairs":  # the host spoils them
            self.grids.host_access(rank, found, writes=True)
        return found

    def close(self) -> None:
        super().close()
        self.grids.close()
