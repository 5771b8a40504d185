"""What the ranks agree on before a layer gets its memory."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from moe_nvlink_plugin import plugins
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError, ExchangeStateError
from moe_nvlink_plugin.groups import Group, Placed, members_of, tell
from moe_nvlink_plugin.launch.base import Executor
from moe_nvlink_plugin.launch.executors import executor_for, with_index
from moe_nvlink_plugin.memory.workspace import Workspace
from moe_nvlink_plugin.recipes import Recipe

from . import tuning
from .layer import LayerExchange

#: Config fields that may differ from rank to rank.
OWN_FIELDS = ("ep_rank", "num_threads", "max_sms", "leave_sms", "tuning")


def place(config: AllToAllConfig, ranks: Group) -> Group:
    """Return the group of the exchange's places. Local.

    Args:
        config: this rank's configuration.
        ranks: the caller's group; has a rank for each of config.places, if these are given.

    Raises:
        ConfigError: it has another number of ranks, or this rank's place is not ep_rank.
    """
    if config.places is None:
        if (ranks.size, ranks.rank) != (config.ep_size, config.ep_rank):
            raise ConfigError(
                f"the group has {ranks.size} ranks and this is rank {ranks.rank}, but ep_size="
                f"{config.ep_size} and ep_rank={config.ep_rank}; pass the expert-parallel group"
            )
        return ranks
    if ranks.size != len(config.places) or config.places[ranks.rank] != config.ep_rank:
        raise ConfigError(
            f"the group has {ranks.size} ranks and this is rank {ranks.rank}, but places="
            f"{config.places} and ep_rank={config.ep_rank}; pass the group of the ranks in these "
            "places, in their order"
        )
    return Placed(ranks, config.places, config.ep_size)


def shared_values(config: AllToAllConfig) -> dict[str, str]:
    """Return name -> text of the fields that are equal on all ranks. Local."""
    values = {
        field.name: str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in OWN_FIELDS
    }
    return {**values, "tuning": str(config.choices)}


def check_complete(workspace: Workspace[Executor]) -> None:
    """Refuse a workspace that ranks have been left out of; they would be waited for."""
    empty = set(range(workspace.group.size)).difference(members_of(workspace.group))
    if gone := sorted(set(workspace.left_out) - empty):
        raise ExchangeStateError(
            f"mask() has left out rank(s) {', '.join(map(str, gone))} of share_with's workspace, "
            "and all ranks of the group create a layer together; create all layers before a rank "
            "dies, or anew on a process group of the ranks that live, or call renew() first"
        )


class Prepared(NamedTuple):
    """What `create` needs before the ranks have agreed.

    Attributes:
        group: the ranks in their places.
        config: with the choices of its file.
        recipe: what travels.
        workspace: a new one, or that of another layer.
        num_sms: SMs that a launch of this rank may fill.
    """

    group: Group
    config: AllToAllConfig
    recipe: Recipe
    workspace: Workspace[Executor]
    num_sms: int


def prepare(
    config: AllToAllConfig, ranks: Group, device: torch.device, share_with: LayerExchange | None
) -> Prepared:
    """Do the steps of `create` that can fail on this rank alone. Local.

    Raises:
        MoeNvlinkError: as MoeAllToAll.create documents it.
    """
    group = place(config, ranks)
    device = with_index(device)
    recipe = plugins.find_recipe(config)
    config = tuning.resolved(config, recipe.name, device)
    if share_with is not None:
        share_with.check_open()
        workspace = share_with.workspace
        if share_with.config.ranks_may_leave != config.ranks_may_leave:
            raise ConfigError(
                f"ranks_may_leave={config.ranks_may_leave}, but share_with has "
                f"{share_with.config.ranks_may_leave}; any layer of a workspace may be a rank's "
                "last one, so pass the same to all of them"
            )
        theirs = (workspace.group.size, workspace.group.rank, workspace.device)
        if theirs != (group.size, group.rank, device):
            raise ConfigError(
                f"share_with belongs to (group size, rank, device) {theirs}, this layer to "
                f"{(group.size, group.rank, device)}; layers share a workspace within one "
                "expert-parallel group only"
            )
        if workspace.is_elastic != (config.places is not None) or (
            list(members_of(workspace.group)) != list(members_of(group))
        ):
            raise ConfigError(
                f"places={config.places}, but the ranks of share_with's workspace are in places "
                f"{list(members_of(workspace.group))}; pass the same places, in their order, to "
                "all layers of a workspace"
            )
        return Prepared(group, config, recipe, workspace, _num_sms(config, workspace.executor))
    transport = plugins.find_transport(config.transport, device)
    executor = executor_for(transport.executor, device)
    num_sms = _num_sms(config, executor)
    workspace = Workspace(group, transport, executor, device)
    workspace.is_elastic = config.places is not None
    return Prepared(group, config, recipe, workspace, num_sms)


def _num_sms(config: AllToAllConfig, executor: Executor) -> int:
    share = executor.num_sms() // config.num_channels
    return min(share, config.max_sms or share)


def check_agreement(prepared: Prepared, *, shares: bool) -> int:
    """Check that configurations agree, and that all ranks share the same workspace or none.

    Collective. Otherwise some ranks would wait in the collective step that grows a workspace.

    Returns:
        `num_sms` of the rank that has the fewest.
    """
    group, config, _recipe, workspace, num_sms = prepared
    values = shared_values(config)
    values["share_with"] = f"a layer of workspace {workspace.name}" if shares else "None"
    everyones = tell(group, "create", values, (workspace.name, num_sms))
    if not shares:
        workspace.name = everyones[0][0]
    return min(int(of_rank) for _name, of_rank in everyones)
