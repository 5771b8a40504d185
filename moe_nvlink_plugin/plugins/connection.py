"""Tries, before anything is set up, whether a transport connects some ranks."""

from __future__ import annotations

from typing import Any

import torch

from moe_nvlink_plugin import env
from moe_nvlink_plugin.groups import all_or_none, as_group
from moe_nvlink_plugin.transport import Extent

from .registry import find_transport


def check_connected(group: Any, device: torch.device | str = "cpu") -> None:
    """Check that a transport connects these ranks. Collective; not capturable.

    The ranks map the least memory that the transport maps of each other, and unmap it. So an
    adapter can choose another backend, or refuse to start, before it loads weights.

    Args:
        group: as `MoeAllToAll.create` takes it.
        device: where this rank's tensors live.

    Raises:
        MoeNvlinkError: on every rank: no transport connects them. The message says why, and what
            to do. A rank whose own step succeeded raises PeerError.
    """
    ranks, here = as_group(group, env.first_timeout_s()), torch.device(device)
    transport = all_or_none(ranks, "finding a transport", lambda: find_transport(None, here))
    memory = transport.reserve(ranks, transport.extent_alignment, here)
    try:
        memory.extend([Extent(0, transport.extent_alignment)])
    finally:
        memory.close()
