"""The exchanges of one worker: one per geometry and capacity, all on one workspace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, env
from moe_nvlink_plugin.errors import MoeNvlinkError

from .agreement import Geometry, Proposal, Ranks
from .formats import DispatchFormat, ExpertsInput, choose
from .options import Options
from .stats import StatsWriter
from .watch import FailureWatch

logger = logging.getLogger(__name__)

#: The smallest capacity that gets an exchange of its own; below it, slots cost next to nothing.
SMALLEST_CAPACITY = 8


class ExchangePool:
    """Owns the `MoeAllToAll` objects of one worker; every rank creates them in layer order."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        options: Options,
        *,
        name: str = "",
        holds_startup: bool = False,
        more_stats: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """device: where this rank's layers work. holds_startup: somebody calls `end_startup`.

        name: tells the pools of one worker apart, in the file of counters. more_stats: further keys
        of that file.
        """
        self._name = name
        self.ranks, self.device, self.options = ranks, device, options
        self._holds_startup = holds_startup
        self._more_stats = more_stats
        self._exchanges: dict[Geometry, MoeAllToAll] = {}
        self._stats_writer: StatsWriter | None = None
        self._watch: FailureWatch | None = None

    @property
    def exchanges(self) -> list[MoeAllToAll]:
        """Every exchange so far, in the order of creation."""
        return list(self._exchanges.values())

    def config(self, geometry: Geometry) -> AllToAllConfig:
        """This rank's configuration of a geometry's exchange. Local; ConfigError as that raises."""
        return AllToAllConfig(
            ep_size=self.ranks.size,
            ep_rank=self.ranks.rank,
            combine=self.options.combine,
            **geometry._asdict(),
        )

    def exchange(self, geometry: Geometry) -> MoeAllToAll:
        """The exchange for a geometry, created on first use. Collective when it creates.

        All exchanges share one workspace, which grows with a new geometry. Raises what
        `MoeAllToAll.create` raises, ConfigError and DisagreementError among it.
        """
        known = geometry in self._exchanges
        found = self._find_or_create(geometry)
        if not known:
            logger.info(
                "moe_nvlink exchange of rank %d of %d: %s",
                self.ranks.rank,
                self.ranks.size,
                found.config,
            )
        return found

    def exchanges_by_capacity(self, geometry: Geometry) -> list[MoeAllToAll]:
        """Exchanges that differ in capacity alone, ascending. Collective when it creates.

        Powers of two, and geometry's own as the last. They lie over each other in the workspace,
        which therefore is no larger for them.
        """
        # The largest first: the workspace is placed once and need not grow for the others.
        largest, smaller = self.exchange(geometry), []
        capacity = SMALLEST_CAPACITY
        while capacity < geometry.max_tokens_per_rank:
            smaller.append(self._find_or_create(geometry._replace(max_tokens_per_rank=capacity)))
            capacity *= 2
        return [*smaller, largest]

    def exchanges_of_layer(self, geometry: Geometry) -> list[MoeAllToAll]:
        """The exchanges that a layer needs on this rank's device. Collective when it creates.

        On a GPU the experts are handed every slot of the chosen capacity; CPU ranks copy the filled
        rows, so that one capacity is enough for them.
        """
        if self.device.type == "cuda":
            return self.exchanges_by_capacity(geometry)
        return [self.exchange(geometry)]

    def agree_on_format(
        self, layer: str, experts: ExpertsInput, geometry: Geometry
    ) -> DispatchFormat:
        """How the layer's rows travel. Collective; if one rank refuses, every rank raises.

        Raises what `formats.choose` and `Ranks.agree` raise.
        """

        def find_recipe(name: str) -> Any:
            return MoeAllToAll.check(self.config(geometry._replace(recipe=name)))

        chosen, scale = DispatchFormat(), None
        problem: Exception | None = None
        try:
            chosen = choose(
                experts,
                geometry.hidden_size,
                geometry.dtype,
                self.device,
                self.options,
                find_recipe,
            )
            scale = chosen.static_scale(experts)
        except Exception as error:
            problem = error
        mine = Proposal(
            layer,
            geometry._replace(recipe=None if chosen.recipe is None else chosen.recipe.name),
            scale,
            None if problem is None else f"{type(problem).__name__}: {problem}",
            None if chosen.global_scale is None else float(chosen.global_scale),
        )
        self.ranks.agree(mine)
        if isinstance(problem, MoeNvlinkError):
            raise type(problem)(f"{self.ranks.wording.flag}: {layer}: {problem}") from problem
        if problem is not None:
            raise problem
        return chosen

    def end_startup(self) -> None:
        """This worker has warmed up: from now on its waits have the ordinary limit. Local."""
        self._holds_startup = False
        for exchange in self._exchanges.values():  # one would do: they share the workspace
            exchange.end_startup()

    def close(self) -> None:
        """Writes the last counters and releases the workspace. Local, idempotent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._stats_writer is not None:
            self._stats_writer.close()
            self._stats_writer = None
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()

    def _find_or_create(self, geometry: Geometry) -> MoeAllToAll:
        if geometry in self._exchanges:
            return self._exchanges[geometry]
        first = next(iter(self._exchanges.values()), None)
        self.ranks.meet()
        created = MoeAllToAll.create(
            self.config(geometry), self.ranks.group, self.device, share_with=first
        )
        self._exchanges[geometry] = created
        if first is None:
            self._begin(created)
        return created

    def _begin(self, first: MoeAllToAll) -> None:
        """What the first exchange does for all: they share workspace, counters and fault words."""
        if self._holds_startup:
            first.hold_startup()
        self._start_stats(first)
        if self.device.type == "cuda":
            self._watch = FailureWatch(first.failure)

    def _start_stats(self, exchange: MoeAllToAll) -> None:
        directory = env.stats_dir()
        if directory is None:
            return
        about = {"ep_rank": self.ranks.rank, "ep_size": self.ranks.size}

        def read() -> dict[str, Any]:
            return {**exchange.stats()._asdict(), **self._more_stats()}

        # A GPU's are copied from it, which from another thread would spoil the capture of a CUDA
        # graph: there they are written once, when the worker ends.
        watch = self.device.type == "cpu"
        self._stats_writer = StatsWriter(directory, about, read, pool=self._name, watch=watch)
