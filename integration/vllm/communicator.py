"""Our all-to-all manager in the communicator of vLLM's expert-parallel group.

A worker builds its communicators after its configuration is current and before any model layer
exists, so this is also where our layer classes are put in place: only in workers, only on request.
"""

from __future__ import annotations

from typing import Any

import torch

from . import flag
from .options import options_of


def attach(communicator: Any, device: torch.device) -> None:
    """Replaces the all-to-all manager of an EP communicator by ours, once the flag asks for it.

    device: where this rank's layers work. Collective over the communicator's group when it takes
    effect. Raises UnsupportedError when this vLLM lacks a name we need, or when CPU ranks are not
    on one host, ConfigError for options that we do not have.
    """
    if not communicator.use_all2all or not flag.selected_here():
        return
    from vllm.config import get_current_vllm_config_or_none

    from . import compat

    compat.check_names(device.type)  # before the modules that import them
    from . import layers
    from .all2all_manager import MoeNvlinkAll2AllManager

    layers.put_in_place()
    communicator.all2all_manager = MoeNvlinkAll2AllManager(
        communicator.cpu_group,
        device=device,
        options=options_of(get_current_vllm_config_or_none()),
    )
