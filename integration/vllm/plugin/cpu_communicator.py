"""Communicator of a CPU worker's groups; that of the expert-parallel group gets our manager."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from moe_nvlink_plugin.integration import overrides

from .communicator import attach


class MoeNvlinkCpuCommunicator(CpuCommunicator):
    """vLLM's communicator with our manager, if the flag asks for it."""

    @overrides
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        store_group = kwargs.pop("tcp_store_group", None)
        if store_group is None:
            super().__init__(*args, **kwargs)
        else:
            self._begin_without_world(*args, **kwargs)
        attach(self, torch.device("cpu"), store_group)

    def _begin_without_world(self, *args: Any, **named: Any) -> None:
        """Do what vLLM's does, for a group beside torch's world (elastic expert parallelism).

        vLLM's own takes no ranks of such a group, and makes a manager that could not serve it.
        """
        DeviceCommunicatorBase.__init__(self, *args, **named)
        self.dist_module = torch.distributed
        self.supports_tensor_dict = False

    @overrides
    def destroy(self) -> None:
        """Release the workspace together with the group. Local."""
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
        super().destroy()
