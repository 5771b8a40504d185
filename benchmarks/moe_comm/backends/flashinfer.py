"""FlashInfer's MoeAlltoAll, a process per rank; the interface is in flashinfer_api.py.

Its memory is MNNVL's, its handles travel by the torch group: no MPI. Not run yet.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.moe_comm import flashinfer_api
from benchmarks.moe_comm.flashinfer_api import NO_EXPERT, Payloads, experts
from benchmarks.moe_comm.options import Options

from .base import Complaints, Context, check_combined


class FlashInfer:
    """Experts are taken to have written to its workspace, as ours are.

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
        check_combined(complaints, context, self._output, exact=False)
        complaints.raise_any()

    def close(self) -> None:
        """Nothing: FlashInfer keeps its workspace for the next of the same size."""
