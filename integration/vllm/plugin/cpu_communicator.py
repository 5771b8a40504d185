"""Communicator of a CPU worker's groups; that of the expert-parallel group gets our manager."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from moe_nvlink_plugin.integration import overrides

from .communicator import attach


class MoeNvlinkCpuCommunicator(CpuCommunicator):
    """vLLM's communicator with our manager, if the flag asks for it."""

    @overrides
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self, torch.device("cpu"))

    @overrides
    def destroy(self) -> None:
        """Release the workspace together with the group. Local."""
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
        super().destroy()
