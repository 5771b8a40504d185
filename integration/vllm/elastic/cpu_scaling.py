"""What vLLM lacks for CPU ranks that join and leave. On CUDA ranks nothing of this is used.

vLLM's own steps load dummy weights, which old ranks replace by theirs over NCCL. A CPU rank that
joins loads the checkpoint instead: vLLM's layers keep packed copies of their weights, which a
transfer would not change. The experts come from the load balancer, as on GPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator

from moe_nvlink_plugin.integration import overrides

from .scaling import MoeNvlinkScaling
from .scaling import put_in_place as _put_in_place

#: Of all messages: those between two ranks arrive in order.
_TAG = 0


def put_in_place() -> None:
    """As `scaling.put_in_place`; and the load balancer moves weights by gloo. Local; idempotent."""
    _put_in_place()
    balancer: Any = importlib.import_module("vllm.distributed.eplb.eplb_state")
    balancer.create_eplb_communicator = by_gloo


def by_gloo(group_coordinator: Any, *_args: Any, **_named: Any) -> GlooMoves:
    """Return what moves weights in a group: ``eplb_state.create_eplb_communicator``. Local.

    vLLM's own accepts only NCCL and NIXL for groups beside torch's world.
    """
    return GlooMoves(group_coordinator.cpu_group)


class GlooMoves(EplbCommunicator):
    """Moves weights by the methods of a gloo group. torch's functions need one of torch's world.

    Args:
        group: a gloo group of the expert-parallel ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._asked: list[tuple[Callable[..., Any], torch.Tensor, int]] = []

    @overrides
    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        """Note tensors for a rank. Local."""
        self._asked += [(self._group.send, tensor, dst_rank) for tensor in tensors]

    @overrides
    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        """Note where tensors of a rank go. Local."""
        self._asked += [(self._group.recv, tensor, src_rank) for tensor in tensors]

    @overrides
    def execute(self) -> None:
        """Send and receive what was noted. Collective over the ranks that noted each other."""
        asked, self._asked = self._asked, []
        for work in [verb([tensor], rank, _TAG) for verb, tensor, rank in asked]:
            work.wait()


class CpuScaling(MoeNvlinkScaling):
    """The steps of a CPU worker."""

    @overrides
    def load_model(self) -> None:
        """Load the checkpoint, on a rank that joins. Collective as `moe.method.install`."""
        self.worker.load_model()

    @overrides
    def transfer_weights(self, old_dp_size: int, new_dp_size: int) -> None:
        """Do nothing: the newcomers have loaded the checkpoint."""

    @overrides
    def prepare_new_worker(self) -> None:
        """Do nothing, for the same reason."""

    @overrides
    def warmup_new_worker(self) -> None:
        """Do nothing: the kernels that vLLM would warm are those of GPUs."""

    @overrides
    def warm_and_capture(self) -> None:
        """End start-up in the new groups: there are no graphs, and nothing is compiled. Local."""
        self.worker.compile_or_warm_up_model()

    @overrides
    def _warm_target_groups(self, dp_group: Any, ep_group: Any) -> None:
        """Do nothing: gloo needs no warm-up, and a CPU has no stream to do it on."""

    def _experts(self, module: Any, moe: Any, all2all_manager: Any) -> Any:
        """Return the layer's experts: those of CPU ranks do not depend on the number of ranks."""
        return module._quant_method.moe_kernel.fused_experts
