"""The LM head's own kernels for GPUs, executed as PTX: as tests/support/head_ranks.py on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.launch.arguments import element_code
from moe_nvlink_plugin.lm_head.kernels import HEAD
from tests.support.head_ranks import Call, HeadRanks, Round, Steps
from tests.support.ptx.backend import Grids


class PtxHeadRanks(HeadRanks):
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

    def run(
        self, calls: Sequence[Call], of_round: Round, ranks: Sequence[int] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The round of these ranks, all by default, one kernel of all ranks after another."""
        here = list(range(len(calls)) if ranks is None else ranks)
        steps = [self.steps(rank, calls, of_round) for rank in here]
        for kernel in self._kernels.values():
            launched = [next(of_rank) for of_rank in steps]
            assert {name for name, _args in launched} == {kernel.name}
            build_of_all = self._variant.build(kernel, pdl=self.grids.pdl)
            self.grids.launch(
                [build_of_all] * len(here), [args for _name, args in launched], None, ranks=here
            )
        return [_result(of_rank) for of_rank in steps]

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


def _result(steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logits of a rank whose kernels have all ended."""
    try:
        kernel, _args = next(steps)
    except StopIteration as end:
        results: tuple[torch.Tensor, torch.Tensor] = end.value
        return results
    raise AssertionError(f"{kernel} has not been launched")
