"""vLLM's expert load balancer on CPU ranks, as its GPU model runners create it.

The balancer takes the time by events of an accelerator, and its communicator ``torch_gloo`` waits
for the accelerator's stream. On CPU torch has neither, and whatever was called has happened.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.v1.worker.gpu.eplb_utils import EPLBController

from moe_nvlink_plugin.integration import overrides


class HostEplbState(EplbState):
    """vLLM's balancer, with events and a stream of the host while it runs."""

    @overrides
    def __init__(self, parallel_config: Any, device: torch.device) -> None:
        with _events_of_the_host():
            super().__init__(parallel_config, device)

    @overrides
    def rearrange(
        self,
        is_profile: bool = False,
        rank_mapping: dict[int, int] | None = None,
        use_last_expert_load: bool = False,
    ) -> Any:
        """Move experts as vLLM does. Collective over the expert-parallel group."""
        with _events_of_the_host():
            return super().rearrange(is_profile, rank_mapping, use_last_expert_load)


def create(model_runner: Any) -> None:
    """Give a CPU model runner the balancer for its loaded model. Local.

    A model whose class vLLM cannot balance gets a balancer without models.
    """
    controller = EPLBController(model_runner.parallel_config, model_runner.device)
    state = HostEplbState(model_runner.parallel_config, model_runner.device)
    controller.state = state
    controller.maybe_register_model(model_runner.model, model_runner.model_config)
    model_runner.eplb_state = state
    for one in state.model_states.values():
        model_runner._moe_model = one.model


class _HostEvent:
    """What the balancer asks of torch.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time. Local."""
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return: the event has happened. Local."""

    def elapsed_time(self, end: _HostEvent) -> float:
        """Return the milliseconds from this event to another. Local."""
        return 1e3 * (end._recorded_s - self._recorded_s)


class _HostStream:
    """What the communicator asks of the current stream."""

    def synchronize(self) -> None:
        """Return: there is nothing to wait for. Local."""


@contextlib.contextmanager
def _events_of_the_host() -> Iterator[None]:
    before = torch.Event, torch.accelerator.current_stream
    torch.Event = _HostEvent  # type: ignore[misc, assignment]
    torch.accelerator.current_stream = _HostStream  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Event, torch.accelerator.current_stream = before  # type: ignore[misc]
