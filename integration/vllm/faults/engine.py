"""The engine's half: which ranks live on, their data-parallel group, and what the status says."""

from __future__ import annotations

import datetime
import json
import logging
import time
from typing import Any

from vllm.distributed import stateless_destroy_torch_distributed_process_group
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine import (
    FT_STATUS_CALL_ID,
    EngineCoreOutputs,
    EngineCoreRequestType,
    EngineStatusType,
    UtilityOutput,
)
from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel
from vllm.v1.fault_tolerance.utils import FaultToleranceRequest, FaultToleranceResult
from vllm.v1.serial_utils import UtilityResult

from moe_nvlink_plugin.errors import PeerError, UnsupportedError
from moe_nvlink_plugin.integration import overrides

from .worker import MEETING_LIMIT, bound_waits

logger = logging.getLogger(__name__)

#: Name of the parameter of `retry` that lists data-parallel ranks that do not come back.
DEAD = "dead_ranks"
#: Seconds that a rank waits for the others to be told.
RETRY_S = 60
_POLL_S = 0.05


def _bound_waits_from_the_first_step(engine: Any, parallel_config: Any) -> None:
    """Let this engine wait less long for the others from its first step on. Local.

    Not before: until then vLLM compares the engines' configurations, of which the limit is a part.
    """

    def has_unfinished(local: bool) -> bool:
        del engine._has_global_unfinished_reqs  # vLLM's own shows again
        bound_waits(engine.dp_group, parallel_config)
        found: bool = engine._has_global_unfinished_reqs(local)
        return found

    engine._has_global_unfinished_reqs = has_unfinished


class MoeNvlinkEngineSentinel(EngineCoreSentinel):
    """vLLM's sentinel of an engine, whose `retry` may leave out ranks."""

    @overrides
    def __init__(self, engine: Any, parallel_config: Any) -> None:
        super().__init__(engine, parallel_config)
        self.status_type: Any = EngineStatusType.HEALTHY
        if hasattr(engine, "dp_group"):
            _bound_waits_from_the_first_step(engine, parallel_config)
        #: Data-parallel ranks that have died, in this retry or before.
        self.dead: tuple[int, ...] = ()
        #: Experts that only these have, as ranges `8-15`.
        self.lost: list[str] = []

    @overrides
    def handle_command(self, client_idx: int, call_id: int, ft_args: dict[str, Any]) -> None:
        """Do as vLLM does; an idle engine, which has noticed nothing, takes `retry` too. Local.

        It is called in the thread that also brings requests, so an idle engine stays idle.
        """
        if self.status_type == EngineStatusType.HEALTHY and self._is_idle():
            self.status_type = EngineStatusType.UNHEALTHY
            try:
                super().handle_command(client_idx, call_id, ft_args)
            finally:
                # The instruction has failed, and no fault of its own has stopped the engine.
                if self.status_type == EngineStatusType.UNHEALTHY and self.resumed.is_set():
                    self.status_type = EngineStatusType.HEALTHY
            return
        super().handle_command(client_idx, call_id, ft_args)

    def _is_idle(self) -> bool:
        engine = self.engine
        is_at_work = engine.engines_running or engine.scheduler.has_requests()
        return not is_at_work and engine.input_queue.empty()

    @overrides
    def retry(self, ft_request: FaultToleranceRequest) -> FaultToleranceResult:
        """Go on with the ranks that live. Collective over these.

        Args:
            ft_request: its params may have `dead_ranks`, equal on all ranks that live.
        """
        named = ft_request.params.get(DEAD, [])
        if problem := self._problem(named):
            logger.error("[FT] %s", problem)
            return FaultToleranceResult(ft_request.request_id, success=False, reason=problem)
        dead = tuple(sorted({*self.dead, *named}))
        # As vLLM's, which drops what the workers answer. When it has resumed the engine, nobody
        # else may ask its workers.
        params, engine = ft_request.params, self.engine
        params.update(self._reinit_dp_group(dead))
        is_at_work = params.pop("running")
        engine.step_counter = 0
        lost, *_others = engine.model_executor.collective_rpc(
            "handle_ft_command", args=(ft_request,)
        )
        if (drain := getattr(self, "_drain_batch_queue", None)) is not None:  # vLLM 0.33
            drain()
        self.dead, self.lost = dead, lost
        if dead:
            logger.warning("[FT] %s", self._loss())
        self.status_type = EngineStatusType.HEALTHY
        self._push_status()
        if is_at_work and not engine.engines_running:
            engine.engines_running = True  # until all find out together that nobody has work
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        self.resumed.set()
        return FaultToleranceResult(ft_request.request_id, success=True)

    def _problem(self, named: Any) -> str:
        parallel = self.engine.vllm_config.parallel_config
        size, me = parallel.data_parallel_size, parallel.data_parallel_rank
        wrong = f"{DEAD}={named!r} must list data-parallel ranks from 0 to {size - 1}"
        if not isinstance(named, list):
            return wrong
        for rank in named:
            if type(rank) is not int or not 0 <= rank < size:
                return wrong
        if me in named:
            return f"{DEAD}={named} names rank {me}, which is this one and lives"
        if 0 in named:
            return (
                f"{DEAD}={named} names rank 0, whose process has the store and the coordinator of "
                "all ranks: no rank can go on without it; start all servers anew"
            )
        return ""

    @overrides
    def _reinit_dp_group(self, dead: tuple[int, ...] = ()) -> dict[str, Any]:
        """Make a group of the ranks that live; return what their workers need. Collective."""
        engine, parallel = self.engine, self.engine.vllm_config.parallel_config
        alive = [rank for rank in range(parallel.data_parallel_size) if rank not in dead]
        me = alive.index(parallel.data_parallel_rank)
        told = self._tell(alive, me)
        stateless_destroy_torch_distributed_process_group(engine.dp_group)
        # The store of the first group stays: it lives with rank 0, as later ones would.
        engine.dp_group, _store = stateless_init_torch_distributed_process_group(
            parallel.data_parallel_master_ip,
            told["port"],
            me,
            len(alive),
            backend="gloo",
            return_store=True,
            timeout=MEETING_LIMIT,
        )
        bound_waits(engine.dp_group, parallel)
        return {
            "new_stateless_dp_group_ports": told["worker_ports"],
            "alive": alive,
            "running": told["running"],
        }

    def _tell(self, alive: list[int], me: int) -> dict[str, Any]:
        """Return what all ranks use, which rank 0 chooses. Collective over the ranks that live.

        Raises:
            PeerError: a rank was not told within RETRY_S. Nothing has changed; tell all again.
            UnsupportedError: the ranks were told of different deaths.
        """
        engine, parallel = self.engine, self.engine.vllm_config.parallel_config
        store = engine.dp_store
        everyones = self._hear(alive, me)
        key = "moe_nvlink_retry/" + "-".join(str(theirs["attempt"]) for theirs in everyones)
        if me == 0:
            ports = [get_open_port() for _ in range(parallel.world_size)]
            chosen = {"worker_ports": ports, "port": get_open_port()}
            store.set(f"{key}/chosen", json.dumps(chosen).encode())
        told: dict[str, Any] = json.loads(store.get(f"{key}/chosen").decode())
        told["running"] = any(theirs["running"] for theirs in everyones)
        return told

    def _hear(self, alive: list[int], me: int) -> list[dict[str, Any]]:
        """Return what each rank says of its newest attempt. Collective; raises as `_tell`.

        A rank says so until its attempt ends. Ranks go on when all have named the same ranks, and
        when each knows that the others know it. By the attempts they name the rest of this one.
        """
        store, rank = self.engine.dp_store, alive[me]
        self._dp_reinit_epoch += 1
        mine: dict[str, Any] = {"attempt": self._dp_reinit_epoch, "alive": alive}
        mine["running"] = self.engine.engines_running
        own = f"moe_nvlink_retry/of {rank}"
        deadline = time.monotonic() + RETRY_S
        try:
            store.set(own, json.dumps(mine).encode())
            everyones = self._poll(alive, deadline)
            seen = "-".join(str(theirs["attempt"]) for theirs in everyones)
            store.set(f"moe_nvlink_retry/{seen}/{rank}", b"")
            left = datetime.timedelta(seconds=max(deadline - time.monotonic(), 1))
            store.wait([f"moe_nvlink_retry/{seen}/{other}" for other in alive], left)
        except RuntimeError as error:  # torch's DistStoreError
            raise PeerError(
                f"not all of ranks {alive} were told to retry within {RETRY_S} s: {error}; post it "
                "to all servers that live, with those ranks that have died"
            ) from error
        finally:
            store.set(own, json.dumps({**mine, "alive": None}).encode())
        return everyones

    def _poll(self, alive: list[int], deadline: float) -> list[dict[str, Any]]:
        """Return what all ranks say, once all of them go on with the same ranks."""
        store, others = self.engine.dp_store, [f"moe_nvlink_retry/of {rank}" for rank in alive]
        differing: list[Any] = []
        while True:
            left = datetime.timedelta(seconds=max(deadline - time.monotonic(), _POLL_S))
            store.wait(others, left)  # each has spoken once
            everyones = [json.loads(store.get(other).decode()) for other in others]
            said = [theirs["alive"] for theirs in everyones]
            if all(of_rank == alive for of_rank in said):
                return everyones
            differing = [of_rank for of_rank in said if of_rank not in (None, alive)] or differing
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if differing:
            raise UnsupportedError(
                f"this retry goes on with ranks {alive}, others with {differing}; post the same "
                f"{DEAD} to all servers"
            )
        raise PeerError(
            f"not all of ranks {alive} were told to retry within {RETRY_S} s; post it to all "
            "servers that live, with those ranks that have died"
        )

    def _loss(self) -> str:
        gone = f"data-parallel rank(s) {', '.join(map(str, self.dead))} have died"
        if not self.lost:
            return f"{gone}; every expert has a replica on another rank, so no answer changes"
        return (
            f"{gone}, and the others go on without experts {', '.join(self.lost)} (with a load "
            "balancer: of some MoE layers): answers differ from the whole model's"
        )

    @overrides
    def _push_status(self) -> None:
        """Push the status as vLLM does, with what is lost. Local."""
        if not self.dead:
            super()._push_status()
            return
        status: dict[str, Any] = {"id": self.engine_index, "status": self.status_type.name.lower()}
        if self.status_type == EngineStatusType.UNHEALTHY:
            status["fault_info"] = self.fault_info
        status["dead_ranks"], status["lost_experts"] = list(self.dead), self.lost
        output = UtilityOutput(call_id=FT_STATUS_CALL_ID, result=UtilityResult(status))
        outputs = EngineCoreOutputs(utility_output=output)
        outputs.engine_index = self.engine_index
        self.engine.output_queue.put_nowait((0, outputs))
