"""Run FlashInfer's one-sided kernels on the software GPU, on the inputs of our tests.

    case = Case(tokens=(3, 2), hidden_size=256, dtype=torch.bfloat16)
    library = load("sm_90a", geometry(case))
    with Machine(ranks=2) as machine:
        seen = Round(case, make_inputs(case), library, machine).run()

Stores, fences and flags have the order of its PTX: on a machine with races=True what nothing orders
is reported, as for our kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from moe_nvlink_plugin.verify.cases import Case, Inputs, Seen, expert_rows
from tests.support.ptx import build
from tests.support.ptx.machine import Machine

from . import peer_cake, peer_launches, peer_source
from .peer_launches import Geometry, Launch, RankMemory

CAKE = "cake"


class Library(NamedTuple):
    """Its kernels for machines of one mode.

    Attributes:
        names: in C++ -> in the PTX.
        verbs: peer_launches or peer_cake, which say what dispatch and combine launch.
    """

    kernels: build.Library
    names: dict[str, str]
    verbs: ModuleType

    def kernel(self, launch: Launch) -> build.Kernel:
        return self.kernels[self.names[launch.kernel]]


def geometry(case: Case) -> Geometry:
    """Return a case's geometry.

    Raises:
        ValueError: the case has what a round here does not do, or its kernels do not.
    """
    if case.dtype != torch.bfloat16 or case.recipe or case.extras or case.combine != "bf16":
        raise ValueError(f"{case.name}: a round takes unquantised bfloat16 rows and no extras")
    return Geometry(case.ep_size, case.num_experts, case.top_k, case.hidden_size, case.capacity)


def load(architecture: str, of: Geometry, *, races: bool = False) -> Library:
    """Return the kernels of a round for machines of a mode. Seconds, and a minute the first time.

    Args:
        architecture: such as "sm_90a"; or CAKE, the other back end's, for sm_100a.

    Raises:
        FetchError, CompileError: as peer_source.compiled.
    """
    if architecture == CAKE:
        if of.top_k != peer_cake.TOP_K or of.hidden_size % peer_cake.ROW_MULTIPLE:
            raise ValueError(
                f"top_k={of.top_k} and hidden_size={of.hidden_size} have other kernels in {CAKE}; "
                f"take {peer_cake.TOP_K} and a multiple of {peer_cake.ROW_MULTIPLE}"
            )
        compiled = peer_source.compiled_cake(tuple(peer_cake.KERNELS.values()))
    else:
        compiled = peer_source.compiled(architecture, tuple(of.kernels().values()))
    verbs = peer_cake if architecture == CAKE else peer_launches
    return Library(build.load(compiled.ptx, races=races), compiled.names, verbs)


class Round:
    """All ranks of one exchange in ordinary memory, on a machine.

    Attributes:
        bases: the address of each rank's workspace.
    """

    def __init__(
        self, case: Case, inputs: Sequence[Inputs], library: Library, machine: Machine
    ) -> None:
        self.case, self.geometry = case, geometry(case)
        self._library, self._machine = library, machine
        self._at = self.geometry.offsets()
        self._workspaces = torch.zeros((case.ep_size, self._at.size), dtype=torch.uint8)
        self.bases = [row.data_ptr() for row in self._workspaces]
        self._payloads = [
            (rank.hidden_states.contiguous(), rank.topk_ids.int(), rank.topk_weights.contiguous())
            for rank in inputs
        ]
        self.outputs = [torch.full_like(hidden, torch.nan) for hidden, *_ in self._payloads]
        machine.use(library.kernels)
        for rank, base in enumerate(self.bases):
            machine.allocate(rank, base, self._at.size, f"workspace of rank {rank}")
            named = (*self._payloads[rank], self.outputs[rank])
            for tensor, name in zip(named, ("hidden", "ids", "weights", "output"), strict=True):
                machine.allocate(rank, tensor.data_ptr(), tensor.nbytes, f"{name} of rank {rank}")

    def _given(self, rank: int) -> RankMemory:
        payloads = self._payloads[rank]
        hidden, ids, weights = (tensor.data_ptr() for tensor in payloads)
        return RankMemory(len(payloads[0]), (hidden, ids, weights), self.outputs[rank].data_ptr())

    # ---- what is launched

    def launches(self, verb: str, rank: int) -> list[Launch]:
        """Return what a rank's "dispatch" or "combine" launches.

        Combine reads the experts' rows in the workspaces, where they lie already.
        """
        given = (self.geometry, rank, self.bases, self._given(rank))
        found: list[Launch] = getattr(self._library.verbs, verb)(*given)
        return found

    def enqueue(self, verb: str, rank: int) -> None:
        """Put a verb's launches into a rank's stream; nothing runs."""
        for launch in self.launches(verb, rank):
            self._machine.launch(
                rank,
                self._library.kernel(launch),
                launch.grid,
                launch.block,
                launch.params,
                shared_bytes=launch.shared_bytes,
                pdl=True,
            )

    # ---- what lies in the workspaces

    def _part(
        self, rank: int, start: int, shape: tuple[int, ...], kind: torch.dtype
    ) -> torch.Tensor:
        count = torch.Size(shape).numel() * kind.itemsize
        self._machine.host_read(rank, self.bases[rank] + start, count)
        return self._workspaces[rank, start : start + count].view(kind).view(shape)

    def received(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, ids and weights that a rank has, `[ep_size * capacity, n]` each."""
        of, (hidden, ids, weights) = self.geometry, self._at.payloads
        slots = of.ep_size * of.max_tokens
        return (
            self._part(rank, hidden, (slots, of.hidden_size), torch.bfloat16),
            self._part(rank, ids, (slots, of.top_k), torch.int32),
            self._part(rank, weights, (slots, of.top_k), torch.float32),
        )

    def recv_counts(self, rank: int) -> torch.Tensor:
        """Return how many rows each rank sent here, `[ep_size]`."""
        return self._part(rank, self._at.recv_counters, (self.geometry.ep_size,), torch.int32)

    def send_slots(self, rank: int) -> torch.Tensor:
        """Return where a rank's rows went, as DispatchMetadata.send_slots has it."""
        of, shape = self.geometry, (len(self._payloads[rank][0]), self.geometry.top_k)
        targets = self._part(rank, self._at.topk_target_ranks, shape, torch.int32)
        places = self._part(rank, self._at.topk_send_indices, shape, torch.int32)
        return torch.where(places >= 0, targets * of.max_tokens + places, -1)

    def run_experts(self, rank: int) -> None:
        """Write the partial rows of the tests' experts to where combine reads them."""
        of, (hidden, ids, weights) = self.geometry, self.received(rank)
        rows = expert_rows(self.case.config(rank), rank, hidden, ids, weights)
        rows[ids[:, 0] == peer_launches.NO_EXPERT] = 0.0  # whatever lies there; no rank reads it
        start, count = self._at.combine_rows, rows.nbytes
        self._machine.host_write(rank, self.bases[rank] + start, count)
        region = self._workspaces[rank, start : start + count].view(torch.bfloat16)
        region.view(of.ep_size * of.max_tokens, of.hidden_size).copy_(rows)

    # ---- one round

    def run(self) -> list[Seen]:
        """Dispatch, experts, combine on every rank; return what each rank saw.

        Raises:
            PtxError: what the machine found.
        """
        ranks = range(self.case.ep_size)
        for rank in ranks:
            self.enqueue("dispatch", rank)
        self._machine.run()
        before = [self._seen_before_combine(rank) for rank in ranks]
        for rank in ranks:
            self.run_experts(rank)
            self.enqueue("combine", rank)
        self._machine.run()
        for rank in ranks:
            self._machine.host_read(rank, self.outputs[rank].data_ptr(), self.outputs[rank].nbytes)
        return [
            seen._replace(combined=output.clone())
            for seen, output in zip(before, self.outputs, strict=True)
        ]

    def _seen_before_combine(self, rank: int) -> Seen:
        hidden, ids, weights = (each.clone() for each in self.received(rank))
        counts, slots = self.recv_counts(rank).clone(), self.send_slots(rank)
        return Seen(counts, ids, (weights, hidden), slots, torch.empty(0))
