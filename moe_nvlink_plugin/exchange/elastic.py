"""Ranks that come and go: an exchange goes on with the ranks of another group.

Each renewal gives every rank fresh memory at the addresses that it has. So epochs, cells and rows
of before are gone, newcomers begin where the others do, and a late process of a dead rank writes
only to pages that nobody else has mapped any more. Masks leave out the places that have no rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moe_nvlink_plugin.config import AllToAllConfig, check_kind, check_places
from moe_nvlink_plugin.errors import (
    DisagreementError,
    ExchangeStateError,
    InputError,
    UnsupportedError,
)
from moe_nvlink_plugin.groups import Group, all_or_none, as_group, members_of, tell
from moe_nvlink_plugin.launch.base import Executor
from moe_nvlink_plugin.memory.layout import Extents, WorkspaceLayout
from moe_nvlink_plugin.memory.startup import Timeouts
from moe_nvlink_plugin.memory.workspace import Workspace

from . import agreement, rank_masks
from .layer import LayerExchange, end_verbs, layers_on

_CALL = "renew or join"
#: Fields that a newcomer takes from the others, or that the call names.
_TAKEN = ("small_tokens", "small_combine_tokens", "places")


class _Known(NamedTuple):
    """What a rank that has the exchange tells the newcomers.

    Attributes:
        name: the workspace's.
        extents: what is mapped of its memory.
        layouts: what each layer has where; it may be older than the last layer's.
        numbers: the layers' numbers on the workspace.
        layers_so_far: how many layers there have been.
        small: small_tokens and small_combine_tokens of each layer.
    """

    name: str
    extents: Extents
    layouts: tuple[WorkspaceLayout, ...]
    numbers: tuple[int, ...]
    layers_so_far: int
    small: tuple[tuple[int | None, int | None], ...]


def renew(layer: LayerExchange, group: Any, places: Sequence[int]) -> None:
    """Go on with the ranks of a group, as MoeAllToAll.renew documents it."""
    layer.check_open()
    workspace, config = layer.workspace, layer.config
    if workspace.is_parents:
        workspace.check_usable()
    ranks = as_group(group, Timeouts.of(config).first)
    layers = layers_on(workspace)
    with contextlib.ExitStack() as locks:
        placed = all_or_none(
            ranks, "preparing the renewal", lambda: _prepare(layers, ranks, places, locks)
        )
        known = _known(layers)
        configs = [one.config for one in layers]
        _agree(placed, configs, known, is_elastic=workspace.is_elastic)
        with workspace.renewing(lambda: _all_stop(placed, workspace)):
            workspace.renew(placed, known.extents)
            all_or_none(placed, "loading the kernels", lambda: None)
            _begin(workspace)


def release(layer: LayerExchange) -> None:
    """Give the memory back until the next renewal, as MoeAllToAll.release documents it."""
    layer.check_open()
    workspace = layer.workspace
    layers = layers_on(workspace)

    def stop() -> None:
        workspace.executor.synchronize_device()  # a verb of any stream may have failed
        for one in layers:
            one.synchronize()
        if bool(workspace.pending.any()):
            raise ExchangeStateError(
                "release() between a dispatch and its combine; call combine first, and wait() for "
                "a verb that runs beside its caller; or call renew(), which forgets the round"
            )

    numbers = str([one.number for one in layers])
    workspace.give_back("release", {"workspace": workspace.name, "layers": numbers}, stop)


def _known(layers: Sequence[LayerExchange]) -> _Known:
    workspace = layers[0].workspace
    return _Known(
        workspace.name,
        tuple(workspace.extents),
        (*(layer.layout for layer in layers), workspace.layout),
        tuple(layer.number for layer in layers),
        workspace.layers_so_far,
        tuple((one.config.small_tokens, one.config.small_combine_tokens) for one in layers),
    )


def join(
    configs: Sequence[AllToAllConfig], group: Any, device: torch.device
) -> list[LayerExchange]:
    """Enter an exchange, as MoeAllToAll.join documents it."""
    configs = list(configs)
    if not configs:
        raise InputError("configs is empty; pass the configuration of each layer on the workspace")
    for config in configs:
        check_kind(config, AllToAllConfig)
    ranks = as_group(group, Timeouts.of(configs[0]).first)
    prepared = all_or_none(
        ranks,
        "preparing the renewal",
        lambda: [agreement.prepare(config, ranks, device, None) for config in configs],
    )
    placed, workspace = prepared[0].group, prepared[0].workspace
    configs = [one.config for one in prepared]
    known = _agree(placed, configs, None, is_elastic=workspace.is_elastic)
    _all_stop(placed, None)
    workspace.name = known.name
    configs = [
        dataclasses.replace(config, small_tokens=dispatch, small_combine_tokens=combine)
        for config, (dispatch, combine) in zip(configs, known.small, strict=True)
    ]
    layers: list[LayerExchange] = []

    def load() -> None:
        of_each = zip(configs, prepared, known.numbers, known.layouts, strict=False)
        for config, one, number, layout in of_each:
            with workspace.one_more_user(layout):
                layers.append(LayerExchange(config, one.recipe, workspace, number))
        workspace.count(known.layouts[-1], known.layers_so_far)

    workspace.enter(placed, known.layouts[-1], known.extents)
    try:
        all_or_none(placed, "loading the kernels", load)
    except BaseException:
        for layer in layers:
            layer.close()
        workspace.forsake()
        raise
    _begin(workspace)
    return layers


def _prepare(
    layers: Sequence[LayerExchange],
    ranks: Group,
    places: Sequence[int],
    locks: contextlib.ExitStack,
) -> Group:
    """Check what is asked for; take the workspace's locks into `locks`; return the group. Local."""
    workspace, config = layers[0].workspace, layers[0].config
    workspace.check_no_capture("renew()")
    checked = check_places("places", places, config.ep_size, config.ep_rank)
    if not workspace.is_elastic and len(checked) < config.ep_size:
        raise ExchangeStateError(
            f"places={checked} leave some of {config.ep_size} places empty, but the exchange was "
            "created without places, so a CUDA graph may have no mask; create it with places=(...)"
        )
    if not hasattr(workspace.memory, "renew"):
        raise UnsupportedError(
            f"memory of {type(workspace.memory).__name__} cannot be renewed; use the transport "
            "host or nvlink, or create the exchange anew"
        )
    placed = agreement.place(dataclasses.replace(config, places=checked), ranks)
    for channel in range(workspace.layout.num_channels):
        locks.enter_context(workspace.channel_lock(channel))
    return placed


def _all_stop(placed: Group, workspace: Workspace[Executor] | None) -> None:
    """End what runs on the old ranks, after nothing can be refused any more. Collective."""

    def stop() -> None:
        if workspace is None:  # of a newcomer
            return
        end_verbs(workspace)
        workspace.executor.synchronize_device()
        workspace.keep_totals()

    all_or_none(placed, "ending the rounds", stop)


def _agree(
    placed: Group, configs: Sequence[AllToAllConfig], known: _Known | None, *, is_elastic: bool
) -> _Known:
    """Check that all ranks mean the same exchange; return what it is. Collective.

    Raises:
        InputError: no rank has the exchange.
        DisagreementError: layers or workspaces differ.
    """
    values = {
        f"{name} of layer {index}": text
        for index, config in enumerate(configs)
        for name, text in agreement.shared_values(config).items()
        if name not in _TAKEN
    }
    values["places"] = str(list(members_of(placed)))
    values["places in the configuration"] = "given" if is_elastic else "none"
    told = tell(placed, _CALL, values, known)
    those = [theirs for theirs in told if theirs is not None]
    if not those:
        raise InputError(
            "no rank of the group has the exchange: all have called join(); call create() on all"
        )
    first: _Known = those[0]
    for place, theirs in zip(members_of(placed), told, strict=True):
        if theirs is not None and theirs != first:
            raise DisagreementError(
                f"rank {place} has workspace {theirs.name} with layers {theirs.numbers}, another "
                f"rank {first.name} with {first.numbers}; call renew() on layers of one workspace"
            )
    return first


def _begin(workspace: Workspace[Executor]) -> None:
    """Make the workspace usable with the ranks that are there. Local."""
    size, left_out = workspace.group.size, workspace.left_out
    mask = rank_masks.rank_mask((r for r in range(size) if r not in left_out), size)
    for layer in layers_on(workspace):
        if workspace.is_elastic:
            places = tuple(members_of(workspace.group))
            layer.config = dataclasses.replace(layer.config, places=places)
    workspace.recover(left_out, mask, with_newcomers=True)
