"""A shared LM head, all ranks of a group on ONE device, in ordinary memory.

tests/support/emulated.py launches the kernels of all ranks at once: one grid on a GPU, threads on a
CPU. Launch shapes are what the product would choose for a rank's share of the SMs; the matrix
products between the kernels are torch's. One device shows neither NVLink ordering nor remote
latency nor bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch.kernel import Kernel
from moe_nvlink_plugin.lm_head.kernels import ARGMAX, GATHER, RowSizes
from moe_nvlink_plugin.lm_head.launches import head_arguments, head_layout
from tests.support import emulated


class EmulatedHead:
    """All ranks of one group with `rows` rows each, and what each does in one step.

    Attributes:
        gather, argmax: the kernels of all ranks, one launch each.
        ids: of each rank, `[rows]`: what argmax writes.
    """

    def __init__(
        self,
        configs: Sequence[HeadConfig],
        backend: emulated.Backend,
        hidden: Sequence[torch.Tensor],
    ) -> None:
        self.configs, self.hidden = configs, hidden
        first = configs[0]
        self.rows, self.device = len(hidden[0]), hidden[0].device
        (self._regions,) = emulated._packed_regions(head_layout(first))
        end = max(region.offset + region.size_bytes for region in self._regions.values())
        shape_of_all = (first.tp_size, -(-end // 4096) * 4096)
        self._memory = torch.zeros(shape_of_all, dtype=torch.uint8, device=self.device)
        slots = first.tp_size * self.rows
        widths = [last - at for at, last in (config.shard(config.tp_rank) for config in configs)]
        self.logits = [
            torch.empty((slots, width), dtype=first.dtype, device=self.device) for width in widths
        ]
        self.ids = [torch.empty(self.rows, dtype=torch.int64, device=self.device) for _ in configs]
        row_bytes, width_bytes = (
            size * first.dtype.itemsize for size in (first.hidden_size, first.shard_size)
        )
        self.gather = self._prepare(backend, GATHER, RowSizes(row_bytes, first.tp_size))
        self.argmax = self._prepare(backend, ARGMAX, width_bytes)

    def _prepare(self, backend: emulated.Backend, kernel: Kernel[Any], sizes: Any) -> Any:
        launched = [self._arguments(rank) for rank in range(len(self.configs))]
        if not isinstance(backend, emulated.CudaBackend):
            return backend.prepare(kernel.name, launched)
        limits = backend.limits(kernel.name, len(launched))
        chosen = kernel.shape(kernel.count(launched[0]), sizes, limits)
        for args in launched:
            if kernel.splits:
                setattr(args, kernel.splits, chosen.splits)
        return backend.prepare(kernel.name, launched, chosen)

    def _arguments(self, rank: int) -> Any:
        """Return one rank's arguments of both kernels."""
        window = (self._memory.data_ptr(), self._memory.stride(0))
        args = head_arguments(self.configs[rank], self._regions, *window)
        args.geometry.num_rows = args.geometry.row_bound = self.rows
        args.hidden = self.hidden[rank].data_ptr()
        args.logits, args.output = self.logits[rank].data_ptr(), self.ids[rank].data_ptr()
        args.scale = 1.0
        return args

    def product(self, rank: int, head: torch.Tensor) -> None:
        """Make one rank's part of the logits, of the rows that it has gathered."""
        first, last = self.configs[rank].shard(rank)
        torch.mm(self._gathered(rank), head[first:last].T, out=self.logits[rank])

    def _gathered(self, rank: int) -> torch.Tensor:
        config, region = self.configs[rank], self._regions["head_rows"]
        slots = config.tp_size * self.rows
        size = slots * config.hidden_size * config.dtype.itemsize
        rows = self._memory[rank, region.offset : region.offset + size]
        return rows.view(config.dtype).view(slots, config.hidden_size)

    def step(self, head: torch.Tensor) -> None:
        """Do what all ranks together do for one draft step."""
        self.gather()
        for rank in range(len(self.configs)):
            self.product(rank, head)
        self.argmax()

    def check_faults(self) -> None:
        """Raise AssertionError if a rank has a fault word; wait for the device."""
        field: Any = structs()["LocalControl"].fault
        at = self._regions["local"].offset + field.offset
        words = self._memory[:, at : at + 8].cpu().contiguous().view(torch.int64)
        assert not words.any(), f"fault words {words.flatten().tolist()}"
