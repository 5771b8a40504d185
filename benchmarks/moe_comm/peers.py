"""Run what a user would take instead of ours: torch's collectives by gloo or NCCL, FlashInfer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_nvlink_plugin.verify import cases

from . import flashinfer_api
from .expected import Complaints, Context, Packing, Side, check_combined, expert_rows
from .flashinfer_api import IDS_INDEX, NO_EXPERT
from .options import Options
from .routers import RankTokens

#: Their names from torch 2.13 on, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gather(Side):
    """all_gather of all tokens, reduce_scatter of the partial rows of all of them.

    What vLLM's allgather_reducescatter does. It gathers activations, ids and weights one by one;
    here they are one row. The group's library for the device moves them.
    """

    given = (
        "tokens are quantised and packed as one row before the clock starts, and not unpacked; "
        "experts' rows are in place, zeros where a rank has no expert of a token; the sum is made "
        "in the activations' dtype"
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        ep_size, hidden = context.options.ep_size, context.tokens.hidden
        self._packing = Packing(context)
        self._packed = self._packing.pack(context.tokens)
        self.arrived = self._packed.new_empty((ep_size * len(hidden), self._packed.shape[1]))
        self._partial = hidden.new_zeros((ep_size * len(hidden), hidden.shape[1]))
        self.combined = torch.empty_like(hidden)

    def dispatch(self) -> None:
        _all_gather(self.arrived, self._packed, group=self.context.group)

    def combine(self) -> None:
        _reduce_scatter(self.combined, self._partial, group=self.context.group)

    def run_experts(self, complaints: Complaints) -> None:
        context = self.context
        for source in range(context.options.ep_size):
            mine = slice(source * context.num_tokens, (source + 1) * context.num_tokens)
            expected = self._packing.pack(context.tokens_of(source))
            complaints.same(self.arrived[mine], expected, f"rows of rank {source}")
            self._partial[mine] = self._packing.expert_rows(context.rank, self.arrived[mine])


class GlooGather(Gather):
    """Gather on CPU ranks."""

    name = "gloo_gather"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        if options.device == "cpu":
            return None
        return "gloo moves CPU tensors; on GPUs use nccl_gather, or --device cpu"


class GlooGatherFull(GlooGather):
    """GlooGather with what a layer would have to do around it."""

    name = "gloo_gather_full"
    given = "nothing but the experts' rows in place, zeros included"

    def dispatch(self) -> None:
        self._packed = self._packing.pack(self.context.tokens)
        super().dispatch()
        self._unpacked = self._packing.unpack(self.arrived)


class NcclGather(Gather):
    """Gather on GPUs, where the group's library is NCCL. Not run yet."""

    name = "nccl_gather"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        if options.device != "cuda":
            return "NCCL moves CUDA tensors; on CPUs use gloo_gather, or --device cuda"
        if not dist.is_nccl_available():
            return f"torch {torch.__version__} is built without NCCL; install a CUDA build"
        return None


class AllToAll(Side):
    """all_to_all_single of the very rows our dispatch puts, both ways, by torch and gloo or NCCL.

    The favourable reading: nothing but the two transfers is timed. What comes back is not added up.
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
        super().__init__(context)
        self._packing = Packing(context)
        self._send, self._order = self._plan()
        self._receive = [counts[context.rank] for counts in context.gathered(self._send)]
        self._picked = self._packing.pack(context.tokens)[self._order]
        hidden = context.tokens.hidden
        self.arrived = self._picked.new_empty((sum(self._receive), self._picked.shape[1]))
        self._computed = hidden.new_zeros((sum(self._receive), hidden.shape[1]))
        self._returned = self.combined = hidden.new_empty((sum(self._send), hidden.shape[1]))

    def _plan(self) -> tuple[list[int], torch.Tensor]:
        """Return the number of rows for each rank, and the tokens in that order."""
        table = self.context.targets(self.context.tokens.topk_ids)
        return table.sum(0).tolist(), table.T.nonzero()[:, 1]

    def dispatch(self) -> None:
        dist.all_to_all_single(
            self.arrived, self._picked, self._receive, self._send, group=self.context.group
        )

    def combine(self) -> None:
        dist.all_to_all_single(
            self._returned, self._computed, self._send, self._receive, group=self.context.group
        )

    def run_experts(self, complaints: Complaints) -> None:
        for source, rows in enumerate(torch.split(self.arrived, self._receive)):
            tokens = self.context.tokens_of(source)
            sent = self.context.targets(tokens.topk_ids)[:, self.context.rank]
            expected = self._packing.pack(RankTokens(*(part[sent] for part in tokens)))
            complaints.same(rows, expected, f"rows of rank {source}")
        self._computed.copy_(self._packing.expert_rows(self.context.rank, self.arrived))

    def check_result(self, complaints: Complaints) -> None:
        """Hold every row that came back to its experts', bit for bit."""
        config = self.context.config
        hidden, ids, weights = (part[self._order] for part in self.context.tokens)
        rank_of_row = torch.repeat_interleave(torch.tensor(self._send)).to(ids.device)
        received = cases.activations(config, *cases.quantised(config, hidden))
        expected = expert_rows(self.context.options, rank_of_row, received, ids, weights)
        complaints.same(self._returned, expected, "rows that came back")


class AllToAllFull(AllToAll):
    """AllToAll with what a layer would pay: it routes, tells the sizes, picks, moves, unpacks; then
    it moves back and adds up in fp32, rounded once. In torch, on the rank's compute threads.
    """

    name = "all_to_all_full"
    given = "nothing but the experts' rows in place"
    capturable = False  # split sizes come to the host in the middle, which no CUDA graph can hold

    def dispatch(self) -> None:
        context = self.context
        self._send, self._order = self._plan()
        sizes = torch.tensor(self._send, device=context.device)
        told = torch.empty_like(sizes)
        dist.all_to_all_single(told, sizes, group=context.group)
        self._receive = told.tolist()
        self._picked = self._packing.pack(context.tokens)[self._order]
        self.arrived = self._picked.new_empty((sum(self._receive), self._picked.shape[1]))
        super().dispatch()
        self._unpacked = self._packing.unpack(self.arrived)

    def combine(self) -> None:
        super().combine()
        total = torch.zeros(self.context.tokens.hidden.shape, device=self.context.device)
        total.index_add_(0, self._order, self._returned.float())
        self.combined = total.to(self._returned.dtype)

    def check_result(self, complaints: Complaints) -> None:
        check_combined(complaints, self.context, self.combined, "sum")


class FlashInfer(Side):
    """FlashInfer's MoeAlltoAll, a process per rank; the interface is in flashinfer_api.py.

    Its memory is MNNVL's, its handles travel by the torch group: no MPI. Experts are taken to have
    written to its workspace, as ours are. Not run yet.

    Args:
        api: flashinfer_api.load()'s, or a stand-in.
    """

    name = "flashinfer"

    @staticmethod
    def unavailable(options: Options) -> str | None:
        return flashinfer_api.unsupported(options) or flashinfer_api.missing()

    def __init__(self, context: Context, api: Any = None) -> None:
        super().__init__(context)
        self._api = api = flashinfer_api.load() if api is None else api
        options = context.options
        self.given = flashinfer_api.given(options, api) + "; PDL as it chooses"
        self._payloads = flashinfer_api.payloads_of(options, context.tokens)
        self.combined = torch.empty_like(context.tokens.hidden)
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
        ep_size = self.context.options.ep_size
        return self._api.Mapping(
            world_size=ep_size,
            rank=self.context.rank,
            gpus_per_node=max(torch.cuda.device_count(), 1),
            tp_size=ep_size,
            moe_ep_size=ep_size,
        )

    def dispatch(self) -> None:
        context = self.context
        self._received = self._exchange.dispatch(
            token_selected_experts=context.tokens.topk_ids,
            input_payloads=self._payloads,
            runtime_max_tokens_per_rank=context.num_tokens,
            invalid_token_expert_id=NO_EXPERT,
            expert_id_payload_index=IDS_INDEX,
        )
        self._rows = self._exchange.get_combine_payload_tensor_in_workspace(
            runtime_max_tokens_per_rank=context.num_tokens,
            hidden_size=context.options.hidden_size,
            dtype=context.options.torch_dtype,
        )

    def combine(self) -> None:
        self._exchange.combine(
            payload=self._rows,
            runtime_max_tokens_per_rank=self.context.num_tokens,
            payload_in_workspace=True,
            output=self.combined,
        )

    def run_experts(self, complaints: Complaints) -> None:
        """Check nothing: a sum within its rounding shows that every row has arrived."""
        context = self.context
        flashinfer_api.run_experts(context.options, context.rank, self._received, self._rows)
