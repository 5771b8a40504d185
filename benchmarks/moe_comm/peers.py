"""Run what a user would take instead of ours: torch's collectives by gloo or NCCL, FlashInfer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support import cases

from . import flashinfer_api
from .expected import Complaints, Context, Packing, check_combined, expert_rows
from .flashinfer_api import NO_EXPERT, Payloads, experts
from .options import Options
from .routers import RankTokens

#: Their names from torch 2.13 on, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather:
    """all_gather of all tokens, reduce_scatter of the partial rows of all of them.

    What vLLM's allgather_reducescatter does; it gathers activations, ids and weights one by one,
    here they are one row. By whatever library the group has for the device.
    """

    name = "gather"
    given = (
        "tokens are quantised and packed as one row before the clock starts, and not unpacked; "
        "experts' rows are in place, zeros where a rank has no expert of a token; the sum is made "
        "in the activations' dtype"
    )

    def __init__(self, context: Context) -> None:
        self._context = context
        ep_size, hidden = context.options.ep_size, context.tokens.hidden
        self._packing = Packing(context)
        self._packed = self._packing.pack(context.tokens)
        self._gathered = self._packed.new_empty((ep_size * len(hidden), self._packing.row_bytes))
        self._partial = hidden.new_zeros((ep_size * len(hidden), hidden.shape[1]))
        self._reduced = torch.empty_like(hidden)

    def dispatch(self) -> None:
        _all_gather(self._gathered, self._packed, group=self._context.group)

    def combine(self) -> None:
        _reduce_scatter(self._reduced, self._partial, group=self._context.group)

    def check(self) -> None:
        """Every row from every rank, bit for bit; the sum within its rounding."""
        context, complaints = self._context, Complaints(self.name, self._context)
        self._gathered.zero_()
        self._reduced.fill_(float("nan"))
        self.dispatch()
        for source in range(context.options.ep_size):
            mine = slice(source * context.num_tokens, (source + 1) * context.num_tokens)
            expected = self._packing.pack(context.tokens_of(source))
            complaints.same(self._gathered[mine], expected, f"rows of rank {source}")
            parts = self._packing.unpack(self._gathered[mine])
            self._partial[mine] = self._packing.expert_rows(context.rank, parts)
        self.combine()
        check_combined(complaints, context, self._reduced, "sum")
        complaints.raise_any()

    def close(self) -> None:
        """Nothing: its buffers go with it."""


class GlooGather(Gather):
    """On CPU ranks."""

    name = "gloo_gather"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        if options.device == "cpu":
            return None
        return "gloo moves CPU tensors; on GPUs use nccl_gather, or --device cpu"


class GlooGatherFull(GlooGather):
    """With what a layer would have to do around it."""

    name = "gloo_gather_full"
    given = "nothing but the experts' rows in place, zeros included"

    def dispatch(self) -> None:
        self._packed = self._packing.pack(self._context.tokens)
        super().dispatch()
        self._unpacked = self._packing.unpack(self._gathered)


class NcclGather(Gather):
    """The group's library for CUDA tensors is NCCL. Not run yet."""

    name = "nccl_gather"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        if options.device != "cuda":
            return "NCCL moves CUDA tensors; on CPUs use gloo_gather, or --device cuda"
        if not dist.is_nccl_available():
            return f"torch {torch.__version__} is built without NCCL; install a CUDA build"
        return None


class AllToAll:
    """all_to_all_single of the very rows our dispatch puts, both ways, by torch and gloo or NCCL.

    The favourable reading: nothing but the two transfers is timed.
    """

    name = "all_to_all"
    given = (
        "split sizes and index lists are known, rows quantised, picked and packed as one row, "
        "before the clock starts; not unpacked; what comes back is not added up"
    )

    @staticmethod
    def unavailable(options: Options) -> str | None:
        return None

    def __init__(self, context: Context) -> None:
        self._context = context
        self._packing = Packing(context)
        self._send, self._order = self._plan()
        self._receive = [counts[context.rank] for counts in context.gathered(self._send)]
        self._picked = self._packing.pack(context.tokens)[self._order]
        hidden = context.tokens.hidden
        self._arrived = self._picked.new_empty((sum(self._receive), self._packing.row_bytes))
        self._computed = hidden.new_zeros((sum(self._receive), hidden.shape[1]))
        self._returned = hidden.new_empty((sum(self._send), hidden.shape[1]))

    def _plan(self) -> tuple[list[int], torch.Tensor]:
        """Rows for each rank, and the tokens in the order they go: by rank."""
        table = self._context.targets(self._context.tokens.topk_ids)
        return table.sum(0).tolist(), table.T.nonzero()[:, 1]

    def dispatch(self) -> None:
        dist.all_to_all_single(
            self._arrived, self._picked, self._receive, self._send, group=self._context.group
        )

    def combine(self) -> None:
        dist.all_to_all_single(
            self._returned, self._computed, self._send, self._receive, group=self._context.group
        )

    def check(self) -> None:
        """Every row from every rank and every row that comes back, bit for bit."""
        complaints = Complaints(self.name, self._context)
        self._check_arrival(complaints)
        self._returned.fill_(float("nan"))
        self.combine()
        hidden, ids, weights = (part[self._order] for part in self._context.tokens)
        rank_of_row = torch.repeat_interleave(torch.tensor(self._send)).to(ids.device)
        config = self._context.config
        received = cases.activations(config, *cases.quantised(config, hidden))
        expected = expert_rows(self._context.options, rank_of_row, received, ids, weights)
        complaints.same(self._returned, expected, "rows that came back")
        complaints.raise_any()

    def _check_arrival(self, complaints: Complaints) -> None:
        self._arrived.zero_()
        self.dispatch()
        start = 0
        for source, count in enumerate(self._receive):
            tokens = self._context.tokens_of(source)
            sent = self._context.targets(tokens.topk_ids)[:, self._context.rank]
            expected = self._packing.pack(RankTokens(*(part[sent] for part in tokens)))
            complaints.same(
                self._arrived[start : start + count], expected, f"rows of rank {source}"
            )
            start += count
        parts = self._packing.unpack(self._arrived)
        self._computed.copy_(self._packing.expert_rows(self._context.rank, parts))

    def close(self) -> None:
        """Nothing: its buffers go with it."""


class AllToAllFull(AllToAll):
    """What a layer would pay: routes, tells the sizes, picks, moves, unpacks; moves back, adds up.

    In torch, on the rank's compute threads; fp32 sums, rounded once.
    """

    name = "all_to_all_full"
    given = "nothing but the experts' rows in place"
    capturable = False  # split sizes come to the host in the middle, which no CUDA graph can hold

    def dispatch(self) -> None:
        context = self._context
        self._send, self._order = self._plan()
        sizes = torch.tensor(self._send, device=context.device)
        told = torch.empty_like(sizes)
        dist.all_to_all_single(told, sizes, group=context.group)
        self._receive = told.tolist()
        self._picked = self._packing.pack(context.tokens)[self._order]
        self._arrived = self._picked.new_empty((sum(self._receive), self._packing.row_bytes))
        super().dispatch()
        self._unpacked = self._packing.unpack(self._arrived)

    def combine(self) -> None:
        super().combine()
        total = torch.zeros(self._context.tokens.hidden.shape, device=self._context.device)
        total.index_add_(0, self._order, self._returned.float())
        self._sum = total.to(self._returned.dtype)

    def check(self) -> None:
        """Every row from every rank bit for bit; the sum within its rounding."""
        complaints = Complaints(self.name, self._context)
        self._check_arrival(complaints)
        self.combine()
        check_combined(complaints, self._context, self._sum, "sum")
        complaints.raise_any()


class FlashInfer:
    """FlashInfer's MoeAlltoAll, a process per rank; the interface is in flashinfer_api.py.

    Its memory is MNNVL's, its handles travel by the torch group: no MPI. Experts are taken to have
    written to its workspace, as ours are. Not run yet.

    Args:
        api: flashinfer_api.load()'s, or a stand-in.
    """

    name = "flashinfer"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        return flashinfer_api.unavailable(options)

    def __init__(self, context: Context, api: Any = None) -> None:
        self._api = api = flashinfer_api.load() if api is None else api
        self._context, options = context, context.options
        self.given = flashinfer_api.given(options, api) + "; PDL as it chooses"
        self._payloads = Payloads.of(options, context.tokens)
        self._output = torch.empty_like(context.tokens.hidden)
        self._received: list[torch.Tensor] = []
        # One workspace for all batches of a run: it keeps every one that it has ever made.
        capacity = options.max_tokens or max(options.batches)
        self._exchange = api.MoeAlltoAll(
            mapping=self._mapping(),
            max_num_tokens=capacity,
            top_k=options.top_k,
            num_experts=options.num_experts,
            workspace_size_per_rank=flashinfer_api.workspace_bytes(
                options, self._payloads, capacity, api
            ),
            mnnvl_config=api.MnnvlConfig(comm_backend=api.TorchDistBackend(group=context.group)),
        )

    def _mapping(self) -> Any:
        ep_size = self._context.options.ep_size
        return self._api.Mapping(
            world_size=ep_size,
            rank=self._context.rank,
            gpus_per_node=max(torch.cuda.device_count(), 1),
            tp_size=ep_size,
            moe_ep_size=ep_size,
        )

    def dispatch(self) -> None:
        context = self._context
        self._received = self._exchange.dispatch(
            token_selected_experts=context.tokens.topk_ids,
            input_payloads=self._payloads.tensors,
            runtime_max_tokens_per_rank=context.num_tokens,
            invalid_token_expert_id=NO_EXPERT,
            expert_id_payload_index=self._payloads.ids_index,
        )
        self._rows = self._exchange.get_combine_payload_tensor_in_workspace(
            runtime_max_tokens_per_rank=context.num_tokens,
            hidden_size=context.options.hidden_size,
            dtype=context.options.torch_dtype,
        )

    def combine(self) -> None:
        self._exchange.combine(
            payload=self._rows,
            runtime_max_tokens_per_rank=self._context.num_tokens,
            payload_in_workspace=True,
            output=self._output,
        )

    def check(self) -> None:
        """Each element of the sum within its rounding; so every row has arrived where it should."""
        context, complaints = self._context, Complaints(self.name, self._context)
        self._output.fill_(float("nan"))
        self.dispatch()
        experts(context.options, context.rank, self._received, self._rows)
        self.combine()
        check_combined(complaints, context, self._output, "sum")
        complaints.raise_any()

    def close(self) -> None:
        """Nothing: FlashInfer keeps its workspace for the next of the same size."""
