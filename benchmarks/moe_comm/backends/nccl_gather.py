"""all_gather of all tokens, reduce_scatter of the partial rows of all of them, by NCCL on GPUs.

What vLLM's allgather_reducescatter does; it gathers activations, ids and weights one by one, here
they are one row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.moe_comm.options import Options

from .gloo_gather import Gather


class NcclGather(Gather):
    """The group's library for CUDA tensors is NCCL. Not run yet."""

    name = "nccl_gather"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        if options.device != "cuda":
            return "NCCL moves CUDA tensors; on CPUs use gloo_gather, or --device cuda"
        if not dist.is_nccl_available():
            return f"torch {torch.__version__} is built without NCCL; install a CUDA build"
        return None
