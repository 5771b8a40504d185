"""MoeAllToAll, whole: what a layer calls, with the buffers a layer would give it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.exchange import layer as exchange
from tests.support import cases

from .expected import Complaints, Context, check_combined, expert_rows
from .options import OURS, Options
from .routers import RankTokens


class Ours:
    """Dispatch takes activations (a recipe quantises them on the way); experts are taken to have
    written to combine_input().
    """

    name = OURS
    given = "nothing"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        return None

    def __init__(self, context: Context) -> None:
        options = context.options
        self._context = context
        config = options.config(context.rank, context.num_tokens)
        self._exchange = MoeAllToAll.create(config, context.group, context.device)
        self._capacity = config.max_tokens_per_rank
        if self._capacity == context.num_tokens:
            self.given = (
                "buffers of exactly the batch's size; a server's are larger, and dispatch marks "
                "every empty slot"
            )
        self._scale = cases.global_scale(config, context.device)
        self._output = torch.empty_like(context.tokens.hidden)
        self._rows = self._exchange.combine_input()
        self._received: Dispatched | None = None

    def dispatch(self) -> None:
        hidden, ids, weights = self._context.tokens
        self._received = self._exchange.dispatch(hidden, ids, weights, global_scale=self._scale)

    def combine(self) -> None:
        assert self._received is not None
        self._exchange.combine(self._rows, self._received.metadata, output=self._output)

    def close(self) -> None:
        self._exchange.close()

    def check(self) -> None:
        """Bit for bit as moe_nvlink_plugin.reference; on a GPU, a row of nvfp4 to a code or two."""
        context, complaints = self._context, Complaints(self.name, self._context)
        self._output.fill_(float("nan"))
        self.dispatch()
        received = self._received
        assert received is not None
        slots = context.gathered(received.metadata.send_slots.cpu())
        for source, of_source in enumerate(slots):
            self._check_source(complaints, received, source, of_source.to(context.device))
        hidden = cases.activations(context.config, received.hidden_states, received.scales)
        of_experts = (hidden, received.topk_ids.clamp(min=0), received.topk_weights)
        filled = received.topk_ids[:, 0] >= 0
        rows = expert_rows(context.options, context.rank, *(part[filled] for part in of_experts))
        self._rows[filled] = rows
        self.combine()
        self._exchange.synchronize()
        check_combined(complaints, context, self._output, "alike" if self._is_near else "exact")
        complaints.raise_any()

    @property
    def _is_near(self) -> bool:
        """A GPU's nvfp4 takes approximate reciprocals, so that a code may be the next one."""
        return self._context.device.type == "cuda" and self._context.options.recipe == "nvfp4"

    def _check_source(
        self, complaints: Complaints, received: Dispatched, source: int, slots: torch.Tensor
    ) -> None:
        """Every row of one source, in the slot it says, and -1 behind them."""
        context = self._context
        what = f"rows of rank {source}"
        tokens = context.tokens_of(source)
        sent = context.targets(tokens.topk_ids)[:, context.rank]
        count = int(sent.sum())
        complaints.same(
            received.recv_counts[source].cpu(), torch.tensor(count).int(), f"{what}: count"
        )
        first = context.rank * self._capacity
        here = (slots >= first) & (slots < first + self._capacity)
        complaints.same(here.sum(1), sent.long(), f"{what}: slots a token")
        if int(here.sum()) != count:
            return
        place = torch.where(here, slots - first, 0).sum(1)[sent]
        complaints.same(
            place.sort().values, torch.arange(count, device=place.device), f"{what}: places"
        )
        mine = slice(source * self._capacity, (source + 1) * self._capacity)
        arrived = [received.topk_ids, received.topk_weights, received.hidden_states]
        if received.scales is not None:
            arrived.append(received.scales)
        here_are = [part[mine][place] for part in arrived]
        self._check_payloads(complaints, here_are, tokens, sent, what)
        empty = received.topk_ids[mine][count:]
        complaints.same(empty, torch.full_like(empty, -1), f"{what}: empty slots")

    def _check_payloads(
        self,
        complaints: Complaints,
        arrived: list[torch.Tensor],
        tokens: RankTokens,
        sent: torch.Tensor,
        what: str,
    ) -> None:
        config = self._context.config
        rows = cases.quantised(config, tokens.hidden[sent])
        ids, weights, *got = arrived
        complaints.same(ids, tokens.topk_ids[sent], f"{what}: ids")
        complaints.same(weights, tokens.topk_weights[sent], f"{what}: weights")
        if self._is_near:
            received, sent_rows = cases.activations(config, *got), cases.activations(config, *rows)
            complaints.alike(received, sent_rows, what)
            return
        expected = [part for part in rows if part is not None]
        for name, one, other in zip(("hidden states", "scales"), got, expected, strict=False):
            complaints.same(one.view(torch.uint8), other.view(torch.uint8), f"{what}: {name}")

    # What a CPU rank's time is made of.

    def kernel_times(
        self, align: Callable[[], None], iterations: int
    ) -> dict[str, dict[str, float]]:
        """Microseconds, medians over iterations and ranks, of CPU ranks on one machine. Collective.

        python: around the call into the kernel's library. kernel: in that call, of which
        before_last_rank passed before the last rank had made its call: waiting by the protocol, or
        work that others' lateness hides.
        """
        found = {}
        with _TimedLauncher(self._exchange) as launcher:
            taken: dict[str, list[tuple[float, float, float]]] = {"dispatch": [], "combine": []}
            for _ in range(iterations):
                for verb, body in (("dispatch", self.dispatch), ("combine", self.combine)):
                    align()
                    start = time.perf_counter()
                    body()
                    total = time.perf_counter() - start
                    taken[verb].append((*launcher.last, total))
        for verb, mine in taken.items():
            found[verb] = _told_apart(
                torch.tensor(self._context.gathered(mine), dtype=torch.float64)
            )
        return found


def _told_apart(times: torch.Tensor) -> dict[str, float]:
    """times: `[ranks, iterations, 3]` seconds: call began, call ended, whole verb.

    perf_counter is one clock for all processes of a machine.
    """
    began, ended, whole = times.unbind(2)
    last = began.amax(dim=0)
    parts = {
        "python_us": whole - (ended - began),
        "kernel_us": ended - began,
        "before_last_rank_us": torch.minimum(last, ended) - began,
        "after_last_rank_us": (ended - last).clamp(min=0),
    }
    return {
        name: statistics.median((part * 1e6).flatten().tolist()) for name, part in parts.items()
    }


class _TimedLauncher:
    """Stands before the launcher of a layer's first channel and notes when it is called."""

    def __init__(self, layer: MoeAllToAll) -> None:
        self._channel: Any = exchange.find(layer._handle).channel(0)
        self._launcher: Any = self._channel._launches
        self.last = (0.0, 0.0)

    def __enter__(self) -> _TimedLauncher:
        self._channel._launches = self
        return self

    def __exit__(self, *_exception: object) -> None:
        self._channel._launches = self._launcher

    def dispatch(self, args: Any) -> None:
        self._timed(self._launcher.dispatch, args)

    def combine(self, args: Any) -> None:
        self._timed(self._launcher.combine, args)

    def _timed(self, call: Callable[[Any], None], args: Any) -> None:
        start = time.perf_counter()
        call(args)
        self.last = (start, time.perf_counter())
