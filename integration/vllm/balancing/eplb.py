"""Expert load balancing (``--enable-eplb``): what is refused, and what vLLM lacks on CPU ranks.

vLLM counts the tokens of each expert. Every so many steps it computes a new placement, moves the
weights, and rewrites its map of logical to physical experts. With redundant experts, a logical
expert has several physical ones. The exchange gets physical ids, whose owners never change:
physical expert n is on rank ``n // num_local_experts``. Therefore a move changes nothing of a
layer's exchange.

On CPU, vLLM refuses the flag, its model runner does not create the balancer, and its routers leave
ids logical. This module, `host_balancer` and `cpu_layers` fill that in.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from typing import Any

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, OurPlatform

#: Name of vLLM's communicator that moves weights of CPU ranks.
CPU_COMMUNICATOR = "torch_gloo"

logger = logging.getLogger(__name__)


def problems(vllm_config: Any, device_type: str, *, worker_is_ours: bool) -> Iterator[str]:
    """Yield what load balancing cannot serve; nothing if it is off. Local.

    Args:
        vllm_config: vLLM's VllmConfig, which asks for our backend.
        device_type: "cpu" or "cuda".
        worker_is_ours: whether workers will be of our class.
    """
    parallel = vllm_config.parallel_config
    if not parallel.enable_eplb or device_type != "cpu":
        return
    communicator = parallel.eplb_config.communicator
    if communicator != CPU_COMMUNICATOR:
        yield (
            f"expert load balancing by the communicator {communicator}: CPU ranks move weights by "
            f"{CPU_COMMUNICATOR} only. Add --eplb-config.communicator={CPU_COMMUNICATOR}."
        )
    if vllm_config.speculative_config is not None:
        yield (
            "expert load balancing with a draft model on CPU ranks, where vLLM's model runner does "
            "not register drafts: remove --enable-eplb or --speculative-config."
        )
    if not worker_is_ours:
        yield (
            f"expert load balancing with --worker-cls {parallel.worker_cls} on CPU ranks, where "
            "our worker creates the balancer: remove --enable-eplb or --worker-cls."
        )
    if vllm_config.use_v2_model_runner:
        yield (
            "expert load balancing with vLLM's second model runner on CPU ranks: remove "
            "--enable-eplb, or set VLLM_USE_V2_MODEL_RUNNER=0."
        )


def num_redundant(parallel: Any) -> int:
    """Return how many physical experts a layer has more than logical ones. Local."""
    return int(parallel.eplb_config.num_redundant_experts) if parallel.enable_eplb else 0


def uneven(num_experts: int, redundant: int, ep_size: int) -> Iterator[str]:
    """Yield a problem if the ranks would not own equally many physical experts. Local."""
    physical = num_experts + redundant
    if physical % ep_size:
        fitting = redundant + ep_size - physical % ep_size
        yield (
            f"expert load balancing of {num_experts} experts and {redundant} redundant experts on "
            f"{ep_size} ranks: vLLM needs equally many on each rank. Add "
            f"--eplb-config.num_redundant_experts={fitting}."
        )


def adjust(vllm_config: Any, device_type: str) -> None:
    """Make CPU ranks move experts between two steps, not beside them. Local; idempotent.

    vLLM's asynchronous balancer, its default, is a thread with a stream of an accelerator.
    """
    parallel = vllm_config.parallel_config
    if parallel.enable_eplb and device_type == "cpu" and parallel.eplb_config.use_async:
        parallel.eplb_config.use_async = False
        logger.warning(
            "Expert load balancing: CPU ranks move experts between two steps "
            "(--eplb-config.use_async=false); vLLM's asynchronous balancer needs an accelerator."
        )


class _PlatformForBalancing:
    """vLLM's platform, except that it lets ParallelConfig accept ``enable_eplb``."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        """Return True. ParallelConfig asks this for ``enable_eplb`` only."""
        return True


def allow() -> None:
    """Make this process's ParallelConfig accept ``enable_eplb`` on CPU. Local; idempotent.

    Workers need it too: vLLM checks a configuration again when it copies it with other values.
    """
    parallel: Any = importlib.import_module("vllm.config.parallel")
    present = parallel.current_platform
    is_cpu = present.device_type == "cpu"
    if is_cpu and isinstance(present, OurPlatform):
        parallel.current_platform = _PlatformForBalancing(present)


def put_in_place(device_type: str) -> None:
    """Let a worker's configuration and layers have the load balancer. Local; idempotent.

    Args:
        device_type: "cpu" or "cuda".
    """
    allow()
    if device_type == "cpu":
        from . import cpu_layers

        cpu_layers.put_in_place()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Surround the creation of a configuration that asks for us with `allow`. Local."""
    parallel: Any = importlib.import_module("vllm.config.parallel")
    before = parallel.current_platform
    allow()
    try:
        yield
    finally:
        parallel.current_platform = before


def begin(vllm_worker: Any, manager: Any) -> Any:
    """Follow the balancer of a worker that has loaded its model; create it on CPU. Local.

    Returns its `Moves`.

    Args:
        vllm_worker: our worker.
        manager: its MoeNvlinkAll2AllManager.

    Raises:
        UnsupportedError: vLLM cannot move the experts of this model.
    """
    runner = vllm_worker.model_runner
    if vllm_worker.device.type == "cpu":
        from .host_balancer import create

        create(runner)
    state = runner.eplb_state
    if not state.model_states:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND} with --enable-eplb: vLLM's class of "
            f"{runner.model_config.model} does not tell its balancer of MoE layers (it is no "
            "MixtureOfExperts). Remove --enable-eplb."
        )
    from .moves import Moves

    moves = Moves(manager.ranks)
    moves.follow(state)
    manager.sections.append(moves.stats)
    return moves
