"""The exchanges of one worker: one per geometry, all on one workspace."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, env
from moe_nvlink_plugin.errors import ExchangeTimeoutError, MoeNvlinkError

from .agreement import Geometry, Proposal, Ranks
from .audit import AUDIT_BYTES, Audit, AuditReport
from .experts_input import ExpertsInput
from .formats import DispatchFormat, choose
from .options import Options
from .slow_rank import SlowRankWatch, Waits
from .stats import Publication, StatsWriter
from .watch import FailureWatch

logger = logging.getLogger(__name__)

#: The bound of a step is a multiple of this number, or the capacity. So are most sizes of the
#: frameworks' CUDA graphs; a graph of 12 tokens has 16 slots. And columns of fp32 scales over all
#: slots then begin at multiples of 16 bytes, which TMA needs.
BOUND_MULTIPLE = 8
#: Seconds that ranks wait for one another under fault tolerance, if MOE_NVLINK_TIMEOUT_S does not
#: say: users wait as long for an answer that does not come.
FAULT_TIMEOUT_S = 10.0


def bound_of_step(most_tokens: int | None, capacity: int) -> int:
    """Return the max_tokens of a step's dispatches. Local.

    Args:
        most_tokens: most tokens of any rank in this step, equal on all ranks; None: unknown.
        capacity: max_tokens_per_rank of the exchange.
    """
    if most_tokens is None:
        return capacity
    rounded = -(-max(most_tokens, 1) // BOUND_MULTIPLE) * BOUND_MULTIPLE
    return min(rounded, capacity)


class ExchangePool:
    """Owns the `MoeAllToAll` objects of one worker; every rank creates them in layer order.

    Args:
        ranks: the expert-parallel ranks.
        device: where this rank's layers work.
        options: what the user chose.
        name: tells the pools of one worker apart in the names of the counters' files.
        holds_startup: whether the adapter calls `end_startup`.
        tolerates_faults: whether the adapter calls `go_on_without` after a failure of the exchange,
            instead of ending the worker. Ranks then wait less long for one another.
        more_stats: returns further keys of the counters' file; waits for no launch.
        publication: where the counters go beside their file; the pool closes it.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        options: Options,
        *,
        name: str = "",
        holds_startup: bool = False,
        tolerates_faults: bool = False,
        more_stats: Callable[[], Mapping[str, object]] = dict,
        publication: Publication | None = None,
    ) -> None:
        self._name = name
        self.ranks, self.device, self.options = ranks, device, options
        #: Whether the rank's tokens are dummies; see `idling`.
        self.is_idle = False
        self._holds_startup = holds_startup
        self._tolerates_faults = tolerates_faults
        self._more_stats, self._publication = more_stats, publication
        self._exchanges: dict[Geometry, MoeAllToAll] = {}
        self._audits: dict[MoeAllToAll, Audit] = {}
        #: Scales that the user named, on the device, with their values.
        self._named_scales: list[tuple[torch.Tensor, float]] = []
        self._stats_writer: StatsWriter | None = None
        self._watch: FailureWatch | None = None
        self._slow_watch: SlowRankWatch | None = None

    @property
    def exchanges(self) -> list[MoeAllToAll]:
        """All exchanges, in the order of creation."""
        return list(self._exchanges.values())

    def config(self, geometry: Geometry) -> AllToAllConfig:
        """Return this rank's configuration for a geometry. Local; raises as AllToAllConfig.

        With Options.audit_every it has one extra payload more, the last.
        """
        if self.options.audit_every:
            payloads = (*geometry.extra_payload_bytes, AUDIT_BYTES)
            geometry = geometry._replace(extra_payload_bytes=payloads)
        return AllToAllConfig(
            ep_size=self.ranks.size,
            ep_rank=self.ranks.rank,
            combine=self.options.combine,
            tuning=self.options.tuning,
            ordered_slots=self.options.ordered_slots,
            leave_sms=self.options.overlap_shared_experts,
            ranks_may_leave=False,
            timeout_s=env.timeout_s(FAULT_TIMEOUT_S) if self._tolerates_faults else None,
            first_timeout_s=env.first_timeout_s() if self._tolerates_faults else None,
            **geometry._asdict(),
        )

    def exchange(self, geometry: Geometry) -> MoeAllToAll:
        """Return the exchange for a geometry; create it on first use. Collective if it is new.

        All exchanges share one workspace, which grows for a new geometry. Raises as
        `MoeAllToAll.create`.
        """
        if geometry in self._exchanges:
            return self._exchanges[geometry]
        first = next(iter(self._exchanges.values()), None)
        self.ranks.meet()
        config = self.config(geometry)
        created = MoeAllToAll.create(config, self.ranks.group, self.device, share_with=first)
        self._exchanges[geometry] = created
        if self.options.audit_every:
            self._audits[created] = Audit(created, self.options.audit_every, self.device)
        if first is None:
            self._begin(created)
        logger.info(
            "moe_nvlink exchange of rank %d of %d: %s",
            self.ranks.rank,
            self.ranks.size,
            created.config,
        )
        return created

    def audit_of(self, exchange: MoeAllToAll) -> Audit | None:
        """Return what audits an exchange of this pool; None without Options.audit_every. Local."""
        return self._audits.get(exchange)

    def agree_on_format(
        self, layer: str, experts: ExpertsInput, geometry: Geometry
    ) -> DispatchFormat:
        """Decide how the layer's rows travel. Collective; if one rank refuses, every rank raises.

        Raises as `formats.choose` and `Ranks.agree`.
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
            geometry._replace(
                recipe=None if chosen.recipe is None else chosen.recipe.name,
                scales_layout=chosen.scales_layout,
            ),
            scale,
            None if problem is None else f"{type(problem).__name__}: {problem}",
            None if chosen.global_scale is None else float(chosen.global_scale),
            self.options.audit_every,
        )
        if chosen.global_scale is not None and mine.named_scale is not None:
            self._named_scales.append((chosen.global_scale, mine.named_scale))
        self.ranks.agree(mine)
        if isinstance(problem, MoeNvlinkError):
            raise type(problem)(f"{self.ranks.wording.flag}: {layer}: {problem}") from problem
        if problem is not None:
            raise problem
        return chosen

    @contextlib.contextmanager
    def idling(self) -> Iterator[None]:
        """Surround a run of the model without requests, whose results nobody reads. Local."""
        self.is_idle = True
        try:
            yield
        finally:
            self.is_idle = False

    def restore(self) -> None:
        """Write our tensors again that the framework has allocated, and whose content is lost.

        Local. The workspace is outside of torch's memory, so nothing of it is lost.
        """
        for tensor, value in self._named_scales:
            tensor.fill_(value)
        for audit in self._audits.values():
            audit.restore()

    def end_startup(self) -> None:
        """Give waits the ordinary limit from now on, because this worker has warmed up. Local."""
        self._holds_startup = False
        for exchange in self._exchanges.values():  # one is enough: they share the workspace
            exchange.end_startup()

    def places(self) -> tuple[int, ...]:
        """Return the ranks that take part. Local."""
        for exchange in self._exchanges.values():
            return exchange.places
        return tuple(range(self.ranks.size))

    def has_failed(self) -> torch.Tensor:
        """Return whether a verb has failed, a scalar bool on the device. Local; capturable."""
        words = [word for exchange in self.exchanges[:1] for word in exchange.fault_words()]
        if not words:
            return torch.zeros((), dtype=torch.bool, device=self.device)
        return torch.stack(words).any()

    def raise_failure(self) -> None:
        """Raise the error of a verb that has failed, if one has. Local; waits for nothing."""
        for exchange in self.exchanges[:1]:
            if (failure := exchange.failure()) is not None:
                raise failure

    def go_on_without(self, ranks: Iterable[int]) -> None:
        """Go on without ranks that have died. Collective over the others; as `MoeAllToAll.mask`."""
        for exchange in self.exchanges[:1]:  # one is enough: they share the workspace
            exchange.mask(*ranks)
        for audit in self._audits.values():  # a fault may have come between the ranks' calls
            audit.restart()

    def go_on_without_late(self) -> tuple[int, ...]:
        """Meet all ranks, and go on without those that do not come. Collective over the others.

        Returns:
            Ranks that this call has left out.

        Raises:
            MoeNvlinkError: as `MoeAllToAll.mask`, but no timeout as long as it names new ranks.
        """
        before, late = self.places(), set[int]()
        while True:
            known = len(late)
            try:
                self.go_on_without(late)
                return tuple(rank for rank in before if rank not in self.places())
            except ExchangeTimeoutError as error:
                late.update(error.ranks)
                if len(late) == known:
                    raise

    def active_ranks_of(self, exchange: MoeAllToAll) -> torch.Tensor | None:
        """Return the mask that a CUDA graph must hold to outlive a death. Local.

        None if this pool ends with the first fault.
        """
        return exchange.active_ranks if self._tolerates_faults else None

    def release_memory(self) -> None:
        """Give back the memory of all exchanges. Collective; raises as `MoeAllToAll.release`."""
        for exchange in self.exchanges[:1]:  # one is enough: they share the workspace
            exchange.release()

    def renew_memory(self) -> None:
        """Map zeroed memory at the same addresses. Collective; raises as `MoeAllToAll.renew`."""
        for exchange in self.exchanges[:1]:
            exchange.renew(self.ranks.group, range(self.ranks.size))
        for audit in self._audits.values():
            audit.restart()

    def close(self) -> None:
        """Write the last counters and release the workspace. Local; idempotent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._slow_watch is not None:
            self._slow_watch.close()
            self._slow_watch = None
        if self._stats_writer is not None:
            self._stats_writer.close()
            self._stats_writer = None
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()
        self._audits.clear()

    def _begin(self, first: MoeAllToAll) -> None:
        """Start what all exchanges share by the workspace: start-up, counters, watches."""
        if self._holds_startup:
            first.hold_startup()
        self._start_stats(first)
        if self.device.type == "cuda" and not self._tolerates_faults:
            self._watch = FailureWatch(first.failure)
        if self.ranks.rank == 0 and self.ranks.size > 1:  # one line in the log, not one a rank
            of_pool = weakref.ref(first)  # a thread keeps no dropped exchange alive

            def waits() -> Waits | None:
                exchange = of_pool()
                # After a failure a peer may be gone, and its memory with it.
                if exchange is None or exchange.failure() is not None:
                    return None
                return exchange.waits()

            self._slow_watch = SlowRankWatch(waits)

    def _start_stats(self, exchange: MoeAllToAll) -> None:
        directory = env.stats_dir()
        # Without a place for counters, its thread still logs what audits find.
        if directory is None and self._publication is None and not self.options.audit_every:
            return
        report = AuditReport(self.ranks.rank)
        about = {"ep_rank": self.ranks.rank, "ep_size": self.ranks.size}

        def read() -> dict[str, Any]:
            faults = 0 if exchange.failure() is None else 1
            counted = exchange.stats(wait=False)._asdict()
            audited = report.snapshot(list(self._audits.values()))
            return {**counted, "faults": faults, **audited, **self._more_stats()}

        self._stats_writer = StatsWriter(
            directory, about, read, pool=self._name, publication=self._publication
        )
