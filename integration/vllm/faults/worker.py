"""The worker's half: the exchange and the groups go on without the ranks that have died."""

from __future__ import annotations

import datetime
import logging
import math
from typing import Any

import torch
from vllm.distributed import (
    get_dp_group,
    stateless_destroy_torch_distributed_process_group,
    stateless_init_torch_distributed_process_group,
)
from vllm.platforms import current_platform
from vllm.v1.fault_tolerance.utils import FaultToleranceRequest
from vllm.v1.worker.sentinel.gpu_worker_sentinel import WorkerSentinel

from moe_nvlink_plugin import env
from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.common.pool import FAULT_TIMEOUT_S
from moe_nvlink_plugin.integration.vllm.all2all_manager import manager_of_ep_group
from moe_nvlink_plugin.integration.vllm.balancing import deaths

logger = logging.getLogger(__name__)

#: How long ranks wait for one another to meet in the groups that `retry` makes. A rank that dies
#: meanwhile holds the others for as long.
MEETING_LIMIT = datetime.timedelta(seconds=60)
#: In vLLM's own groups ranks wait as many times as long as in the exchange: a step has many rounds.
STEPS_LIMIT = 3


class MoeNvlinkWorkerSentinel(WorkerSentinel):
    """vLLM's sentinel of a worker, for our exchange."""

    @overrides
    def __init__(self, worker: Any) -> None:
        # Not vLLM's, which knows a list of backends and refuses all others.
        parallel = worker.parallel_config
        self.worker = worker
        self.dp_rank, self.dp_size = parallel.data_parallel_rank, parallel.data_parallel_size
        self.data_parallel_master_ip = parallel.data_parallel_master_ip

    @overrides
    def retry(self, ft_request: FaultToleranceRequest) -> list[str]:
        """Drop all requests, meet the other ranks, and take the new group. Collective.

        Returns:
            The experts, as ranges `8-15`, that only dead ranks have.
        """
        params, parallel = ft_request.params, self.worker.parallel_config
        alive: list[int] = params["alive"]
        self._clean_worker_state()
        each = expert_ranks(parallel)
        dead = [rank for rank in range(self.dp_size) if rank not in alive]
        experts_gone = [rank * each + part for rank in dead for part in range(each)]
        manager = manager_of_ep_group("fault tolerance")
        lost = self._leave_out(experts_gone, manager.world_size)
        manager.go_on_without(experts_gone)
        group = get_dp_group()
        stateless_destroy_torch_distributed_process_group(group.cpu_group)
        group.cpu_group = stateless_init_torch_distributed_process_group(
            self.data_parallel_master_ip,
            params["new_stateless_dp_group_ports"][self.worker.rank % parallel.world_size],
            alive.index(self.dp_rank),
            len(alive),
            backend="gloo",
            timeout=MEETING_LIMIT,
        )
        bound_waits(group.cpu_group, group)
        if current_platform.is_cpu():
            group.device_group = group.cpu_group
        elif dead:
            logger.warning(
                "vLLM asks every data-parallel rank whether it may replay a CUDA graph, and a dead "
                "one answers no: from now on steps run without graphs, which is slower"
            )
        return lost

    def _leave_out(self, ranks: list[int], ep_size: int) -> list[str]:
        """Route to replicas, if there are any; return the experts that are lost. Local."""
        if self.worker.parallel_config.enable_eplb:
            state = self.worker.model_runner.eplb_state
            return ranges(sorted(deaths.leave_out(state, ranks, ep_size)))
        experts = self.worker.model_config.get_num_experts()
        owned = (range(*local_expert_range(experts, ep_size, rank)) for rank in ranks)
        return ranges([expert for of_rank in owned for expert in of_rank])


def bound_waits(group: Any, passes_on: Any) -> None:
    """Let ranks wait less long for one another in a gloo group of vLLM's. Local.

    Between two steps vLLM's ranks meet there, and its own limit is half an hour, or none: a rank
    that stops or dies just then would hold the others as long.

    Args:
        group: the group.
        passes_on: the coordinator of a worker's group, or the ParallelConfig of an engine, from
            which vLLM 0.33 takes the limit of each wait. Without one there, it sets none.
    """
    limit = datetime.timedelta(seconds=STEPS_LIMIT * env.timeout_s(FAULT_TIMEOUT_S))
    group._get_backend(torch.device("cpu"))._set_default_timeout(limit)
    if hasattr(passes_on, "cpu_timeout"):
        passes_on.cpu_timeout = min(limit, passes_on.cpu_timeout or limit)
    if hasattr(passes_on, "cpu_distributed_timeout_seconds"):
        whole = math.ceil(limit.total_seconds())
        asked = passes_on.cpu_distributed_timeout_seconds or whole
        passes_on.cpu_distributed_timeout_seconds = min(whole, asked)


def bound_waits_of_steps() -> None:
    """Bound the waits in which this worker meets the others before a step. Local."""
    coordinator = get_dp_group()
    bound_waits(coordinator.cpu_group, coordinator)


def ranges(numbers: list[int]) -> list[str]:
    """Return ascending numbers as ranges: `["0-3", "8"]`. Local."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in found]


def expert_ranks(parallel: Any) -> int:
    """Return how many expert-parallel ranks a data-parallel rank has. Local."""
    return int(parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)
