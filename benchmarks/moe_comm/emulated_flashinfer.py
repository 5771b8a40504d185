"""Run FlashInfer's moe_a2a with all ranks on one GPU: a workspace `[ranks, bytes]`, a stream each.

Its kernels wait for each other, and nothing guarantees that those of two streams run together. What
is done so that they do, or so that nobody waits for ever (read in its sources):

- A group of one rank, which waits for nobody, compiles and loads them; buffers are made before.
- A verb of all ranks is one CUDA graph, a branch for each: nothing is allocated while a rank waits.
- Dispatch parks one CTA a rank. Combine parks all of them until every rank's first one has run; one
  rank's many could keep out another's first for ever. Up to as many CTAs as the GPU has SMs they
  surely run together, as its own tests assume. Above that its flags are set beforehand, untimed:
  combine then waits for nobody, is spared that time, and `given` says so.
- No programmatic dependent launch, as ours on branches: a kernel launched ahead of its time would
  keep room from what its own rank waits for.
- A wait that fails ends in a trap after minutes, which takes the process's CUDA context with it.
  So a process of its own tries the smallest and the largest batch first (probe).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import RankError, run_processes

from . import expected, flashinfer_api
from .cuda_clock import MOST_STREAMS, Body, Clock, on_branches
from .flashinfer_api import IDS_INDEX, NO_EXPERT
from .options import Options
from .routers import RankTokens, tokens_of

PROBE_LIMIT_S = 110.0
_PROBE_ROUNDS = 20


def unavailable(options: Options) -> str | None:
    """Say why it cannot run these options on emulated ranks; None: it can, if it runs at all."""
    if options.ep_size > MOST_STREAMS:
        return (
            f"{options.ep_size} emulated ranks need a stream each, and torch has {MOST_STREAMS} "
            f"different ones; at most --emulate_ranks {MOST_STREAMS}"
        )
    return flashinfer_api.unsupported(options)


class Layer:
    """All ranks at one batch, as emulated.Layer: their workspaces, and verbs of all of them.

    On a CPU, of a stand-in that waits for nobody.

    Args:
        api: flashinfer_api.load()'s, or a stand-in.
    """

    name, branches = "flashinfer", True

    def __init__(
        self, options: Options, tokens: int, inputs: Sequence[RankTokens], api: Any = None
    ) -> None:
        self._api = api = flashinfer_api.load() if api is None else api
        self.options, self.tokens, self.inputs = options, tokens, inputs
        self._device, ranks = inputs[0].hidden.device, range(options.ep_size)
        self._payloads = [flashinfer_api.payloads_of(options, mine) for mine in inputs]
        self.outputs = [torch.empty_like(mine.hidden) for mine in inputs]
        self.received: list[list[torch.Tensor]] = [[] for _ in inputs]
        self._offsets = [0 for _ in inputs]
        capacity = options.max_tokens or tokens
        size = flashinfer_api.workspace_bytes(options, self._payloads[0], capacity, api)
        shape = (options.ep_size, -(-size // 256) * 256)
        self._memory = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        group = {"ep_size": options.ep_size, "max_num_tokens": capacity}
        # What each rank's calls have in common.
        self._of_rank: list[dict[str, Any]] = [
            {
                "workspace": self._memory,
                "metainfo": api.moe_a2a_initialize(workspace=self._memory, ep_rank=rank, **group),
                "ep_rank": rank,
                "enable_pdl": False,
            }
            for rank in ranks
        ]
        self._of_round = {
            "runtime_max_tokens_per_rank": tokens,
            "ep_size": options.ep_size,
            "top_k": options.top_k,
        }
        self.given = (
            f"{flashinfer_api.given(options, api)}; a launch a rank and kernel, on branches of one "
            "graph, whose fork and join are in its time"
        )
        self.before: dict[str, Body] = {}
        # In this order: combine needs the offset that dispatch names.
        self.dispatch = self._body(self._dispatch)
        self.combine = self._body(self._combine)
        self.both = self._body(self._dispatch, self._combine)

    def _body(self, *verbs: Callable[[int], None]) -> Body:
        """Run the verbs of all ranks; one rank, which waits for nobody, needs no graph."""
        count = self.options.ep_size
        if self._device.type == "cuda" and count > 1:
            return on_branches(self._device, count, *verbs)

        def in_turn() -> None:
            for verb in verbs:
                for rank in range(count):
                    verb(rank)

        return in_turn

    def _dispatch(self, rank: int) -> None:
        """Dispatch of one rank, on the current stream."""
        answer = self._api.moe_a2a_dispatch(
            token_selected_experts=self.inputs[rank].topk_ids,
            input_payloads=self._payloads[rank],
            num_experts=self.options.num_experts,
            **self._of_rank[rank],
            **self._of_round,
        )
        self.received[rank], self._offsets[rank] = answer[0], int(answer[1])
        self._api.moe_a2a_sanitize_expert_ids(
            expert_ids=self.received[rank][IDS_INDEX],
            invalid_expert_id=NO_EXPERT,
            **self._of_rank[rank],
        )

    def _combine(self, rank: int) -> None:
        """Combine of one rank, on the current stream; its dispatch has named an offset."""
        self._api.moe_a2a_combine(
            payload=self.partial_rows(rank),
            local_num_tokens=self.tokens,
            combine_payload_offset=self._offsets[rank],
            payload_in_workspace=True,
            output=self.outputs[rank],
            **self._of_rank[rank],
            **self._of_round,
        )

    def partial_rows(self, rank: int) -> torch.Tensor:
        """Return where the experts would write, `[ep_size, tokens, hidden_size]`; no copy."""
        options, start = self.options, self._offsets[rank]
        size = options.ep_size * self.tokens * options.hidden_size * options.torch_dtype.itemsize
        rows: torch.Tensor = self._api.moe_a2a_wrap_payload_tensor_in_workspace(
            workspace=self._memory[rank, :],
            leading_shape=[options.ep_size, self.tokens],
            slice_start=start,
            slice_end=start + size,
            dtype=options.torch_dtype,
        )
        return rows

    def spare_waiting(self) -> None:
        """Let combine wait for nobody from here on: see the head of this file."""
        self.before = {"combine": lambda: self._arm(1), "both": lambda: self._arm(2)}
        self.given += "; combine's wait for its peers, which on one GPU could last for ever"

    def _arm(self, rounds_ahead: int) -> None:
        """Set every rank's flags of combine to what it will wait for, so many rounds ahead.

        Each dispatch and each combine counts its rank's round up by one. Combine waits until the
        flags of all peers equal that count.
        """
        pairs = self._api.get_moe_alltoall_module().moe_a2a_get_metainfo_index_pairs()
        index = {str(name): int(value) for name, value in zip(*pairs, strict=True)}
        count, flags = (
            int(self._of_rank[0]["metainfo"][index[f"MOE_A2A_{name}_OFFSET_INDEX"]]) // 4
            for name in ("FLAG_VAL", "COMBINE_COMPLETION_FLAGS")
        )
        words, ranks = self._memory.view(torch.int32), self.options.ep_size
        awaited = words[:, count : count + 1] + rounds_ahead
        words[:, flags : flags + ranks] = awaited

    def check(self) -> None:
        """Hold the sums to the check's experts; each element within the rounding of its terms.

        Raises:
            WrongResult: a wrong row.
        """
        for output in self.outputs:
            output.fill_(float("nan"))
        self.dispatch()
        for rank, arrived in enumerate(self.received):
            flashinfer_api.run_experts(self.options, rank, arrived, self.partial_rows(rank))
        self.before.get("combine", lambda: None)()
        self.combine()
        expected.check_outputs(self, self.outputs, "sum")

    def close(self) -> None:
        """Wait, so that graphs and buffers may go."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def make_layer(options: Options, tokens: int, inputs: Sequence[RankTokens]) -> Layer:
    """Make a Layer whose kernels are compiled and loaded, and whose ranks do not wait for ever.

    Compiling takes minutes the first time. A group of one rank does it, which waits for nobody: a
    capture, or a rank that a peer waits for, would launch collective kernels for the first time.
    """
    device = inputs[0].hidden.device
    if device.type != "cuda":
        return Layer(options, tokens, inputs)
    alone = dataclasses.replace(options, ep_size=1, batches=(1,), max_tokens=0, router="uniform")
    first = Layer(alone, 1, [tokens_of(alone, 1, 0).to(device)])
    first.both()
    first.close()
    layer = Layer(options, tokens, inputs)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if not surely_resident(options, tokens, num_sms):
        layer.spare_waiting()
    return layer


def surely_resident(options: Options, tokens: int, num_sms: int) -> bool:
    """Say whether all CTAs of all ranks' combine run together: a CTA a token, one an SM."""
    return options.ep_size * tokens <= num_sms


def probe(options: Options) -> str | None:
    """Try the smallest and the largest batch in a process of its own; return why they fail."""
    reason = flashinfer_api.missing()
    if reason is not None:
        return reason
    extremes = tuple(sorted({min(options.batches), max(options.batches)}))
    asked = dataclasses.replace(options, batches=extremes)
    alone: Any = {"method": "spawn", "meets": False, "ends_with_parent": True}
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_processes(1, _try, Path(folder), asked, timeout_s=PROBE_LIMIT_S, **alone)
        except RankError as error:
            return f"a trial of {extremes} tokens ended so: {' '.join(error.failures[0][:2])}"
    return None


def _try(_rank: int, _size: int, options: Options) -> None:
    for tokens in options.batches:
        inputs = [tokens_of(options, tokens, rank).to("cuda") for rank in range(options.ep_size)]
        layer = make_layer(options, tokens, inputs)
        layer.check()
        for phase in ("dispatch", "combine", "both") * _PROBE_ROUNDS:
            layer.before.get(phase, lambda: None)()
            getattr(layer, phase)()
        if options.kernel_breakdown:
            Clock("cuda", 2, 0).kernels(layer.combine, layer.before.get("combine"))
        layer.check()
        layer.close()
