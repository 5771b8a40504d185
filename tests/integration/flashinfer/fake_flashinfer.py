"""FlashInfer's moe_a2a for CPU tensors: the names and parameters of 0.7.2.post1 that the benchmarks
use, and a workspace of our own.

Ranks run one after the other and wait for nobody; or, as MoeAlltoAll, in threads that meet at a
barrier. `strict`: combine refuses to run where the real one would wait, by the same flags.
"""

from __future__ import annotations

import threading
import types
from typing import Any

import torch

from moe_nvlink_plugin.config import local_expert_range

NAMES = ("FLAG_VAL", "COMBINE_COMPLETION_FLAGS", "PAYLOAD_DATA")
FLAG, ROUTES = 0, 8  # words
strict = False


def _pad(size: int) -> int:
    return -(-size // 128) * 128


def _aux_bytes(ep_size: int, max_num_tokens: int) -> int:
    return _pad(4 * (ROUTES + ep_size + 2 * 32 * max_num_tokens))


def get_moe_alltoall_module() -> Any:
    return types.SimpleNamespace(
        moe_a2a_get_metainfo_index_pairs=lambda: (
            [f"MOE_A2A_{name}_OFFSET_INDEX" for name in NAMES],
            range(len(NAMES)),
        )
    )


def moe_a2a_get_workspace_size_per_rank(
    ep_size: int,
    max_num_tokens: int,
    total_dispatch_payload_size_per_token: int,
    combine_payload_size_per_token: int,
) -> int:
    slots = ep_size * max_num_tokens
    return (
        _aux_bytes(ep_size, max_num_tokens)
        + _pad(slots * total_dispatch_payload_size_per_token)
        + _pad(slots * combine_payload_size_per_token)
    )


def moe_a2a_initialize(
    workspace: torch.Tensor,
    ep_rank: int,
    ep_size: int,
    max_num_tokens: int,
) -> torch.Tensor:
    workspace[ep_rank].zero_()
    payloads = _aux_bytes(ep_size, max_num_tokens)
    return torch.tensor([4 * FLAG, 4 * ROUTES, payloads])


def _routes(workspace: torch.Tensor, rank: int, ep_size: int, shape: tuple[int, int]) -> Any:
    """`[2, tokens, top_k]`: target rank and slot of the first id on each rank, else -1."""
    words = workspace[rank].view(torch.int32)
    start, size = ROUTES + ep_size, 2 * shape[0] * shape[1]
    return words[start : start + size].view(2, *shape)


def moe_a2a_dispatch(
    token_selected_experts: torch.Tensor,
    input_payloads: list[torch.Tensor],
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    num_experts: int,
    enable_pdl: bool | None = None,
) -> tuple[list[torch.Tensor], int, None]:
    tokens = runtime_max_tokens_per_rank
    workspace[ep_rank].view(torch.int32)[FLAG] += 1
    shape = (len(token_selected_experts), top_k)
    routes = _routes(workspace, ep_rank, ep_size, shape)
    routes.fill_(-1)
    ends = [local_expert_range(num_experts, ep_size, rank)[1] for rank in range(ep_size)]
    sent = [0] * ep_size
    for token, ids in enumerate(token_selected_experts.tolist()):
        for k, expert in enumerate(ids):
            target = next(rank for rank, end in enumerate(ends) if expert < end)
            if target in routes[0, token].tolist():
                continue
            routes[:, token, k] = torch.tensor([target, sent[target]])
            views = _views(workspace, metainfo, target, ep_size, tokens, input_payloads)[0]
            for view, payload in zip(views, input_payloads, strict=True):
                view[ep_rank, sent[target]] = payload[token]
            sent[target] += 1
    for target, count in enumerate(sent):  # what the sanitising launch would find out
        ids_view = _views(workspace, metainfo, target, ep_size, tokens, input_payloads)[0][1]
        ids_view[ep_rank, count:] = -99
    views, offset = _views(workspace, metainfo, ep_rank, ep_size, tokens, input_payloads)
    return views, offset, None


def _views(
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    rank: int,
    ep_size: int,
    tokens: int,
    payloads: list[torch.Tensor],
) -> tuple[list[torch.Tensor], int]:
    views, offset = [], int(metainfo[2])
    for payload in payloads:
        size = ep_size * tokens * payload.shape[1] * payload.dtype.itemsize
        flat = workspace[rank, offset : offset + size].view(payload.dtype)
        views.append(flat.view(ep_size, tokens, -1))
        offset += size
    return views, _pad(offset)


def moe_a2a_sanitize_expert_ids(
    expert_ids: torch.Tensor,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    ep_rank: int,
    invalid_expert_id: int,
    enable_pdl: bool | None = None,
) -> None:
    # Of ranks that have not dispatched yet there is nothing to mark; theirs come with their rows.
    expert_ids[expert_ids == -99] = invalid_expert_id


def moe_a2a_wrap_payload_tensor_in_workspace(
    workspace: torch.Tensor,
    leading_shape: list[int],
    slice_start: int,
    slice_end: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    assert workspace.dim() == 1, "the fake knows one rank's workspace"
    return workspace[slice_start:slice_end].view(dtype).view(*leading_shape, -1)


def moe_a2a_combine(
    payload: torch.Tensor,
    local_num_tokens: int,
    workspace: torch.Tensor,
    metainfo: torch.Tensor,
    runtime_max_tokens_per_rank: int,
    ep_rank: int,
    ep_size: int,
    top_k: int,
    combine_payload_offset: int,
    payload_in_workspace: bool = False,
    output: torch.Tensor | None = None,
    *,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    assert payload_in_workspace
    assert output is not None
    words = workspace.view(torch.int32)
    words[ep_rank, FLAG] += 1
    words[:, ROUTES + ep_rank] = words[ep_rank, FLAG]
    if strict and not bool(
        (words[ep_rank, ROUTES : ROUTES + ep_size] == words[ep_rank, FLAG]).all()
    ):
        raise TimeoutError(f"rank {ep_rank} would wait")
    hidden = payload.shape[2]
    size = ep_size * runtime_max_tokens_per_rank * hidden * payload.dtype.itemsize
    routes = _routes(workspace, ep_rank, ep_size, (local_num_tokens, top_k))
    output.zero_()
    for token in range(local_num_tokens):
        total = torch.zeros(hidden)
        for target, slot in routes[:, token].T.tolist():
            if target >= 0:
                start = combine_payload_offset
                rows = workspace[target, start : start + size].view(payload.dtype)
                total += rows.view(ep_size, -1, hidden)[ep_rank, slot].float()
        output[token] = total.to(output.dtype)
    return output


class Mapping:
    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        tp_size: int = 1,
        moe_ep_size: int = -1,
    ) -> None:
        assert world_size == tp_size == moe_ep_size
        self.moe_ep_rank, self.moe_ep_size = rank, moe_ep_size


class MnnvlConfig:
    def __init__(self, comm_backend: Any = None) -> None:
        self.comm_backend = comm_backend


class TorchDistBackend:
    def __init__(self, group: Any = None) -> None:
        self.group = group


class MoeAlltoAll:
    """Ranks are threads; the group is their barrier."""

    _made: dict[int, torch.Tensor] = {}  # noqa: RUF012

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        mnnvl_config: MnnvlConfig | None = None,
    ) -> None:
        assert workspace_size_per_rank is not None
        assert mnnvl_config is not None
        self._barrier: threading.Barrier = mnnvl_config.comm_backend.group
        self._rank, self._ep_size = mapping.moe_ep_rank, mapping.moe_ep_size
        if self._rank == 0:
            shape = (self._ep_size, workspace_size_per_rank)
            self._made[id(self._barrier)] = torch.zeros(shape, dtype=torch.uint8)
        self._barrier.wait()
        self._workspace = self._made[id(self._barrier)]
        group = (self._rank, self._ep_size, max_num_tokens)
        self._of_rank: dict[str, Any] = {
            "workspace": self._workspace,
            "metainfo": moe_a2a_initialize(self._workspace, *group),
            "ep_rank": self._rank,
        }
        self._of_round: dict[str, Any] = {"ep_size": self._ep_size, "top_k": top_k}
        self._num_experts, self._offset, self._phase = num_experts, 0, "idle"
        self._barrier.wait()

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
    ) -> list[torch.Tensor]:
        assert self._phase == "idle"
        assert invalid_token_expert_id is not None
        assert expert_id_payload_index is not None
        self._tokens = len(token_selected_experts)
        received, self._offset, _stats = moe_a2a_dispatch(
            token_selected_experts,
            input_payloads,
            runtime_max_tokens_per_rank=self._tokens,
            num_experts=self._num_experts,
            **self._of_rank,
            **self._of_round,
        )
        self._barrier.wait()
        ids = received[expert_id_payload_index]
        moe_a2a_sanitize_expert_ids(ids, invalid_expert_id=invalid_token_expert_id, **self._of_rank)
        self._phase = "dispatched"
        return received

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        size = self._ep_size * runtime_max_tokens_per_rank * hidden_size * dtype.itemsize
        return moe_a2a_wrap_payload_tensor_in_workspace(
            self._workspace[self._rank],
            [self._ep_size, runtime_max_tokens_per_rank],
            self._offset,
            self._offset + size,
            dtype,
        )

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._phase == "dispatched"
        self._barrier.wait()
        combined = moe_a2a_combine(
            payload,
            self._tokens,
            runtime_max_tokens_per_rank=runtime_max_tokens_per_rank,
            combine_payload_offset=self._offset,
            payload_in_workspace=payload_in_workspace,
            output=output,
            **self._of_rank,
            **self._of_round,
        )
        self._barrier.wait()
        self._phase = "idle"
        return combined
