"""Communicator of a CUDA worker's groups; that of the expert-parallel group gets our manager."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from moe_nvlink_plugin.integration import overrides

from .communicator import attach


class MoeNvlinkCudaCommunicator(CudaCommunicator):
    """vLLM's communicator with our manager, if the flag asks for it.

    vLLM's destroy also destroys the manager.
    """

    @overrides
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The worker has chosen its GPU before it builds any group.
        device = torch.device("cuda", torch.cuda.current_device())
        attach(self, device, kwargs.get("tcp_store_group"))
