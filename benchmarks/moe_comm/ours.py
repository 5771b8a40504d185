"""Run MoeAllToAll, whole: what a layer calls, with the buffers a layer would give it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from moe_nvlink_plugin import AllToAllConfig, Dispatched, MoeAllToAll
from moe_nvlink_plugin.verify import cases

from .expected import Complaints, Context, Side, expert_rows
from .options import OURS, Options


class Ours(Side):
    """MoeAllToAll of one rank.

    Dispatch takes activations, which a recipe quantises on the way. The experts are taken to have
    written to combine_input(), or elsewhere if options say so.
    """

    name = OURS
    given = "nothing"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        return None

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        config = self._config(context)
        self._exchange = MoeAllToAll.create(config, context.group, context.device)
        self._capacity = config.max_tokens_per_rank
        if self._capacity == context.num_tokens:
            self.given = (
                "buffers of exactly the batch's size; a server's are larger, and dispatch marks "
                "every empty slot"
            )
        # A GPU's nvfp4 takes approximate reciprocals, so that a code may be the next one.
        self.how = (
            "alike" if context.device.type == "cuda" and config.recipe == "nvfp4" else "exact"
        )
        self._scale = cases.global_scale(config, context.device)
        self.combined = torch.empty_like(context.tokens.hidden)
        self._rows = self._exchange.combine_input()
        if not context.options.payload_in_workspace:
            self._rows = torch.empty_like(self._rows)
        self.received: Dispatched

    def _config(self, context: Context) -> AllToAllConfig:
        return context.config

    def dispatch(self) -> None:
        hidden, ids, weights = self.context.tokens
        self.received = self._exchange.dispatch(hidden, ids, weights, global_scale=self._scale)

    def combine(self) -> None:
        self._exchange.combine(self._rows, self.received.metadata, output=self.combined)

    def close(self) -> None:
        self._exchange.close()

    def run_experts(self, complaints: Complaints) -> None:
        context, received = self.context, self.received
        slots = context.gathered(received.metadata.send_slots.cpu())
        for source, of_source in enumerate(slots):
            self._check_source(complaints, source, of_source.to(context.device))
        for source in range(context.options.ep_size):  # the rows of all take more memory
            mine = self._slice_of(source)
            scales = None if received.scales is None else received.scales[mine]
            hidden = cases.activations(context.config, received.hidden_states[mine], scales)
            of_experts = (hidden, received.topk_ids[mine], received.topk_weights[mine])
            filled = received.topk_ids[mine, 0] >= 0
            rows = expert_rows(
                context.options, context.rank, *(part[filled] for part in of_experts)
            )
            self._rows[mine][filled] = rows

    def _slice_of(self, source: int) -> slice:
        return slice(source * self._capacity, (source + 1) * self._capacity)

    def check_result(self, complaints: Complaints) -> None:
        """Demand the reference's bits; of nvfp4 on a GPU, rows off by a code or two."""
        self._exchange.synchronize()
        super().check_result(complaints)

    def _check_source(self, complaints: Complaints, source: int, slots: torch.Tensor) -> None:
        """Demand every row of one source in the slot that it recorded, and -1 after them."""
        context, received, what = self.context, self.received, f"rows of rank {source}"
        tokens = context.tokens_of(source)
        sent = context.targets(tokens.topk_ids)[:, context.rank]
        count = int(sent.sum())
        place = slots - context.rank * self._capacity
        here = (place >= 0) & (place < self._capacity)
        complaints.same(here.sum(1), sent.long(), f"{what}: slots a token")
        place = torch.where(here, place, 0).sum(1)[sent].clamp(max=self._capacity - 1)
        told = torch.tensor([int(received.recv_counts[source]), *place.sort().values.tolist()])
        complaints.same(told, torch.tensor([count, *range(count)]), f"{what}: count, places")
        mine = self._slice_of(source)
        ids, weights = received.topk_ids[mine], received.topk_weights[mine]
        complaints.same(ids[place], tokens.topk_ids[sent], f"{what}: ids")
        complaints.same(weights[place], tokens.topk_weights[sent], f"{what}: weights")
        complaints.same(ids[count:], torch.full_like(ids[count:], -1), f"{what}: empty slots")
        rows = received.hidden_states[mine][place]
        scales = None if received.scales is None else received.scales[mine][place]
        wanted = cases.quantised(context.config, tokens.hidden[sent])
        if self.how == "alike":
            got = cases.activations(context.config, rows, scales)
            complaints.alike(got, cases.activations(context.config, *wanted), what)
            return
        complaints.same(_bytes(rows), _bytes(wanted.rows), f"{what}: hidden states")
        if scales is not None and wanted.scales is not None:
            complaints.same(_bytes(scales), _bytes(wanted.scales), f"{what}: scales")

    def kernel_times(
        self, align: Callable[[], None], iterations: int
    ) -> dict[str, dict[str, float]]:
        """Return microseconds of CPU ranks on one machine, medians over iterations and ranks.

        whole: the verb. python: around the call into the kernel's library. kernel: in that call, of
        which before_last_rank passed before the last rank had made its call (waiting by the
        protocol, or work that others' lateness hides), and after_last_rank after it. Collective.
        """
        channel: Any = self._exchange._layer.channel(0)
        taken: dict[str, list[tuple[float, float, float]]] = {"dispatch": [], "combine": []}
        launches = _TimedLaunches(channel._launches)
        with mock.patch.object(channel, "_launches", launches):
            for _ in range(iterations):
                for verb, body in (("dispatch", self.dispatch), ("combine", self.combine)):
                    align()
                    start = time.perf_counter()
                    body()
                    taken[verb].append((*launches.last, time.perf_counter() - start))
        return {verb: _told_apart(self.context.gathered(mine)) for verb, mine in taken.items()}


class _TimedLaunches:
    """Stand-in for the launches of a layer's channel that notes when each call began and ended."""

    def __init__(self, launches: Any) -> None:
        self._launches = launches
        self.last = (0.0, 0.0)

    def dispatch(self, args: Any) -> None:
        self._timed(self._launches.dispatch, args)

    def combine(self, args: Any) -> None:
        self._timed(self._launches.combine, args)

    def _timed(self, call: Callable[[Any], None], args: Any) -> None:
        start = time.perf_counter()
        call(args)
        self.last = (start, time.perf_counter())


def _told_apart(times: list[list[tuple[float, float, float]]]) -> dict[str, float]:
    """Split times by rank and iteration, in seconds: call began, call ended, whole verb.

    perf_counter is one clock for all processes of a machine.
    """
    began, ended, whole = torch.tensor(times, dtype=torch.float64).unbind(2)
    last = began.amax(dim=0)
    parts = {
        "whole_us": whole,
        "python_us": whole - (ended - began),
        "kernel_us": ended - began,
        "before_last_rank_us": torch.minimum(last, ended) - began,
        "after_last_rank_us": (ended - last).clamp(min=0),
    }
    return {name: float(part.quantile(0.5)) * 1e6 for name, part in parts.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
