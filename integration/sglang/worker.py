"""What one process of SGLang has of ours: a pool of exchanges per namespace.

The exchanges of one pool lie over each other in one workspace. The target model and a draft may run
at the same time on two streams, so each has a pool of its own.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
from typing import NamedTuple

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.runtime_context import get_device, get_flags, get_parallel, get_server_args

from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool

from . import backend, budget
from .backend import FLAG
from .choices import WORDING, options_of

TARGET, DRAFT = "target", "draft"

_pools: dict[str, ExchangePool] = {}


class SurvivingPool(ExchangePool):
    """Pool of a server that goes on when a rank dies."""

    @overrides
    def config(self, geometry: Geometry) -> AllToAllConfig:
        """Return this rank's configuration, without the kernels for small batches. Local.

        There combine waits for the ranks of its tokens alone. All ranks must notice a death in one
        forward: those that did would wait for another one in a meeting, and that one in SGLang's
        own steps for them.
        """
        return dataclasses.replace(super().config(geometry), small_tokens=0, small_combine_tokens=0)


class _Here(NamedTuple):
    """What is equal for all namespaces of this process."""

    ranks: Ranks
    device: torch.device
    options: Options
    capacity: int


def namespace() -> str:
    """Return TARGET, or DRAFT while SGLang builds or runs a draft. Local."""
    moe = get_flags().moe
    return DRAFT if moe.speculative_context or moe.in_speculative_scope else TARGET


def pool(name: str | None = None) -> ExchangePool:
    """Return the pool of a namespace, made on first use. Local.

    Args:
        name: TARGET or DRAFT; None: the current namespace.

    Raises:
        UnsupportedError: the expert-parallel group does not span all tensor-parallel ranks.
        ConfigError: as `options_of`.
    """
    name = namespace() if name is None else name
    if name not in _pools:
        here = _here()
        label = "" if name == TARGET else name
        survives = backend.keeps_record(get_server_args())
        _pools[name] = (SurvivingPool if survives else ExchangePool)(
            here.ranks,
            here.device,
            here.options,
            name=label,
            tolerates_faults=survives,
        )
    return _pools[name]


def capacity() -> int:
    """Return how many tokens a rank may dispatch in one round; equal on all ranks. Local."""
    return _here().capacity


def device() -> torch.device:
    """Return where this rank's layers work. Local; SGLang has chosen its GPU."""
    kind = get_device().device
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def options() -> Options:
    """Return this server's choices. Local."""
    return _here().options


def close() -> None:
    """Close every pool: write the last counters, release workspaces. Local; idempotent."""
    while _pools:
        _pools.popitem()[1].close()
    _here.cache_clear()


@functools.cache
def _here() -> _Here:
    """Return what all namespaces share; first asked while the target model is built. Local.

    Later, a draft's context may narrow the groups.
    """
    server_args = get_server_args()
    group, ep_size = get_parallel().moe_ep_group, resolved_view(server_args).ep_size
    if group.world_size != ep_size:
        raise UnsupportedError(
            f"{FLAG}: the expert-parallel group has {group.world_size} ranks, --ep-size is "
            f"{ep_size}. Please report this with the command that started SGLang."
        )
    atexit.register(close)
    return _Here(
        Ranks(group.cpu_group, group.rank_in_group, group.world_size, WORDING),
        device(),
        options_of(server_args),
        budget.of(server_args).tokens_per_rank,
    )
