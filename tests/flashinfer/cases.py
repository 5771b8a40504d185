"""What every rank of a group runs, in one order: the backend, FlashInfer's layer, the drop-in.

Imported where FlashInfer can be imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import flashinfer.comm
import pytest
import torch
import torch.distributed as dist
from flashinfer.comm.comm_backend import TorchDistBackend
from flashinfer.comm.mapping import Mapping
from flashinfer.fused_moe.api import QuantFormat
from flashinfer.moe_ep import (
    BootstrapConfig,
    EpAlgorithm,
    EpLayout,
    FleetParams,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    SplitConfig,
)
from flashinfer.moe_ep.backends.split.comm import nvlink_common
from flashinfer.moe_ep.backends.split.comm.nvlink_one_sided import communication as one_sided
from flashinfer.moe_ep.backends.split.comm.nvlink_one_sided.config import NVLinkOneSidedConfig
from flashinfer.moe_ep.core.comm.communication import MoEEpCommParams, create_communication
from flashinfer.moe_ep.core.kernel.base import SplitKernelBackend
from flashinfer.moe_ep.core.kernel.registry import register_split_kernel

from moe_nvlink_plugin import reference
from moe_nvlink_plugin.errors import (
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    InputError,
    UnsupportedError,
)
from moe_nvlink_plugin.integration import flashinfer as ours
from moe_nvlink_plugin.integration.flashinfer import moe_alltoall, moe_ep, replacement

from . import wires
from .wires import HIDDEN, MAX_TOKENS, TOP_K, Wire, Work

Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """A function of (rank, ep_size) that every rank calls."""
    CASES[function.__name__] = function
    return function


def bootstrap(rank: int, ep_size: int) -> Any:
    return BootstrapConfig(world_size=ep_size, rank=rank, process_group=dist.group.WORLD)


def params_of(wire: Wire, num_experts: int, invalid_id: int = -1) -> MoEEpCommParams:
    return MoEEpCommParams(
        num_experts=num_experts,
        top_k=TOP_K,
        max_tokens_per_rank=MAX_TOKENS,
        hidden_size=HIDDEN,
        dtype=wire.dtype,
        dispatch_format=QuantFormat[wire.format] if wire.format else None,
        invalid_expert_id=invalid_id,
    )


@contextlib.contextmanager
def communication(
    rank: int, ep_size: int, params: MoEEpCommParams, **options: Any
) -> Iterator[Any]:
    config = ours.MoeNvlinkConfig(timeout_s=120, **options)
    made = create_communication(bootstrap(rank, ep_size), params, config)
    try:
        yield made
    finally:
        made.destroy()


def counts_of(ep_size: int, seed: int) -> list[int]:
    """Uneven; the last rank has no tokens in every other round."""
    counts = [(seed + 2 * rank) % MAX_TOKENS + 1 for rank in range(ep_size)]
    if seed % 2:
        counts[-1] = 0
    return counts


def check_received(
    ids: torch.Tensor,
    payloads: list[torch.Tensor],
    sent: list[list[torch.Tensor]],
    everyones: list[Work],
    share: tuple[int, int, int],
    invalid_id: int,
) -> None:
    """Rank-major, each token once; empty rows have the invalid id alone.

    Args:
        ids: `[ep_size, bound, top_k]` received.
        payloads: `[ep_size, bound, *]` received.
        sent: by rank, the payloads.
        share: first and end of this rank's experts, and num_experts.
    """
    first, end, num_experts = share
    for source, work in enumerate(everyones):
        is_mine = (work.ids >= first) & (work.ids < end)
        mine = is_mine.any(dim=1)
        count = int(mine.sum())
        if invalid_id < num_experts:
            kept = torch.where((work.ids >= 0) & (work.ids < num_experts), work.ids, -1)
        else:
            kept = torch.where(is_mine, work.ids, invalid_id)
        wanted = [kept[mine], *(payload[mine] for payload in sent[source])]
        found = [ids[source, :count], *(payload[source, :count] for payload in payloads)]
        assert wires.rows_as_bytes(*found) == wires.rows_as_bytes(*wanted), f"from rank {source}"
        assert (ids[source, count:] == invalid_id).all(), f"empty rows from rank {source}"


def share_of(rank: int, ep_size: int, num_experts: int) -> tuple[int, int, int]:
    num_local = num_experts // ep_size
    return rank * num_local, (rank + 1) * num_local, num_experts


# The backend of flashinfer.moe_ep.


def round_of(
    made: Any, wire: Wire, rank: int, seed: int, bound: int | None, *, in_region: bool
) -> None:
    """A dispatch, experts in torch, a combine; compared with the reference."""
    ep_size, num_experts = made.ep_size, made.params.num_experts
    everyones = wires.works(ep_size, num_experts, counts_of(ep_size, seed), seed)
    mine, share = everyones[rank], share_of(rank, ep_size, num_experts)
    rows, scales = wire.make(mine.hidden)
    got = made.dispatch(
        rows, mine.ids, mine.weights, hidden_states_scale=scales, max_tokens_per_rank=bound
    )
    assert got.tokens_per_rank == (bound or MAX_TOKENS)
    assert got.eplb_gathered_stats is None
    assert (got.hidden_states_scale is None) == (scales is None)
    received = [got.hidden_states] + ([] if scales is None else [got.hidden_states_scale])
    sent = [[t for t in wire.make(work.hidden) if t is not None] for work in everyones]
    shape = (ep_size, got.tokens_per_rank)
    check_received(
        got.topk_ids.view(*shape, TOP_K),
        [payload.view(*shape, -1) for payload in received],
        sent,
        everyones,
        share,
        made.params.invalid_expert_id,
    )
    is_empty = (got.topk_ids == made.params.invalid_expert_id).all(dim=1, keepdim=True)
    x = wire.read(got.hidden_states, got.hidden_states_scale)
    partial = wires.local_sums(x, got.topk_ids, got.topk_weights, *share[:2])
    partial = torch.where(is_empty, torch.nan, partial).to(wire.dtype)  # nobody may read those
    output = None
    if in_region:
        region = made.get_combine_input_buffer(wire.dtype)
        assert region.data_ptr() == made._rows.combine_input(wire.dtype, HIDDEN).data_ptr()
        partial = region.copy_(partial)
        output = torch.empty((len(mine.ids), HIDDEN), dtype=wire.dtype, device=wires.DEVICE)
    else:
        partial = partial.view(ep_size, -1, HIDDEN)
    total = made.combine(partial, output=output)
    assert output is None or total is output
    assert torch.equal(total, wires.expected(wire, mine, ep_size, num_experts)), wire.name


@case
def every_format(rank: int, ep_size: int) -> None:
    for number, wire in enumerate(wires.WIRES):
        invalid_id = (-1, 2 * ep_size, 1000)[number % 3]
        with communication(rank, ep_size, params_of(wire, 2 * ep_size, invalid_id)) as made:
            round_of(made, wire, rank, 2 * number, None, in_region=False)
            round_of(made, wire, rank, 2 * number + 1, MAX_TOKENS, in_region=True)


@case
def the_bound_of_each_call(rank: int, ep_size: int) -> None:
    with communication(rank, ep_size, params_of(wires.BF16, 2 * ep_size)) as made:
        assert made.supports_cuda_graph
        assert made.is_workload_feasible(MAX_TOKENS)
        assert not made.is_workload_feasible(MAX_TOKENS + 1)
        nothing = wires.works(ep_size, 2 * ep_size, [0] * ep_size)[rank]
        for bound in (1, 3, None):
            rows = nothing.hidden.to(torch.bfloat16)
            got = made.dispatch(rows, nothing.ids, max_tokens_per_rank=bound)
            assert got.hidden_states.shape == (ep_size * (bound or MAX_TOKENS), HIDDEN)
            assert got.topk_weights is None
            assert (got.topk_ids == -1).all()
            assert made.combine(got.hidden_states).shape == (0, HIDDEN)
        round_of(made, wires.BF16, rank, 2, MAX_TOKENS - 1, in_region=True)


@case
def communications_of_a_geometry_share_a_workspace(rank: int, ep_size: int) -> None:
    params = params_of(wires.BF16, 2 * ep_size)
    with communication(rank, ep_size, params) as one, communication(rank, ep_size, params) as two:
        assert one._rows is two._rows
        round_of(two, wires.BF16, rank, 1, None, in_region=True)
        two.destroy()
        two.destroy()
        with pytest.raises(ExchangeStateError, match="destroyed; create a new one"):
            two.combine(torch.empty(1, HIDDEN))
        round_of(one, wires.BF16, rank, 2, None, in_region=False)
        # Quantised rows on their way back: another geometry, another workspace.
        with communication(rank, ep_size, params, combine="fp8_block") as quantised:
            assert quantised._rows is not one._rows
            x = torch.randn(2, HIDDEN, dtype=torch.bfloat16, device=wires.DEVICE)
            ids = torch.full((2, TOP_K), 2 * rank, dtype=torch.int32, device=wires.DEVICE)
            got = quantised.dispatch(x, ids, torch.ones(2, TOP_K, device=wires.DEVICE))
            total = quantised.combine(got.hidden_states).float()
            torch.testing.assert_close(total, x.float(), rtol=0.07, atol=0.01)
    assert not moe_ep._shared


@case
def what_the_backend_refuses(rank: int, ep_size: int) -> None:
    with pytest.raises(ValueError, match=r"num_experts \(\d+\) divisible by the EP size"):
        create_communication(
            bootstrap(rank, ep_size), params_of(wires.BF16, 2 * ep_size + 1), "moe_nvlink"
        )
    with communication(rank, ep_size, params_of(wires.BF16, 2 * ep_size)) as made:
        x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
        ids, weights = torch.zeros(2, TOP_K, dtype=torch.int32), torch.zeros(2, TOP_K)
        for stats in (ids, ids[0].float(), ids[0, :0]):
            with pytest.raises(InputError, match=r"eplb_local_stats is .*pass \[num_experts\] int"):
                made.dispatch(x, ids, weights, eplb_local_stats=stats)
        for bound in (0, MAX_TOKENS + 1):
            with pytest.raises(InputError, match=f"={bound} is no integer from 1 to {MAX_TOKENS}"):
                made.dispatch(x, ids, weights, max_tokens_per_rank=bound)
        with pytest.raises(InputError, match="2 tokens exceed max_tokens=1 of this call"):
            made.dispatch(x, ids, weights, max_tokens_per_rank=1)
        with pytest.raises(InputError, match=r"topk_ids has shape \[2, 2\], expected \[2, 3\]"):
            made.dispatch(x, ids[:, :2].contiguous(), weights)
        with pytest.raises(InputError, match="topk_ids has dtype torch.float32"):
            made.dispatch(x, weights, weights)
        with pytest.raises(InputError, match="topk_weights has dtype torch.bfloat16"):
            made.dispatch(x, ids, weights.bfloat16())
        with pytest.raises(InputError, match="payload 0 is not contiguous"):
            made.dispatch(x.t().contiguous().t(), ids, weights)
        with pytest.raises(ConfigError, match=r"256\+8 bytes per token exceed 256"):
            made.dispatch(x, ids, weights, hidden_states_scale=torch.zeros(2, 2))
        masked = {"active_rank_mask": mask_of([0], ep_size)}
        with pytest.raises(InputError, match="is given, but enable_rank_mask=False; create the co"):
            made.dispatch(x, ids, weights, **masked)
        with pytest.raises(InputError, match="is given, but enable_rank_mask=False; create the co"):
            made.combine(x, **masked)
        with pytest.raises(ExchangeStateError, match="combine without dispatch"):
            made.combine(x)
        made.dispatch(x, ids, weights)
        with pytest.raises(ExchangeStateError, match="dispatch twice"):
            made.dispatch(x, ids, weights)
        with pytest.raises(InputError, match="combine_input of torch.float32 .*combine_dtypes"):
            made.get_combine_input_buffer(torch.float32)
        with pytest.raises(InputError, match=r"expert_output has shape \[3\]"):
            made.combine(torch.zeros(3, dtype=torch.bfloat16))
        made.combine(torch.zeros(ep_size * MAX_TOKENS, HIDDEN, dtype=torch.bfloat16))
    params = params_of(wires.BF16, 2 * ep_size)
    params = dataclasses.replace(params, hidden_size=HIDDEN + 16 * (rank == 1))
    with pytest.raises(DisagreementError, match=r"hidden_size: rank 0 has 128, rank 1 has 144"):
        create_communication(bootstrap(rank, ep_size), params, ours.MoeNvlinkConfig())
    assert not moe_ep._shared


@case
def flashinfers_layer_with_its_identity(rank: int, ep_size: int) -> None:
    num_experts = 2 * ep_size
    everyones = wires.works(ep_size, num_experts, counts_of(ep_size, 4))
    mine = everyones[rank]
    for wire in (wires.BF16, wires.FP32):
        layer = layer_of(rank, ep_size, num_experts, wire.dtype, kernel=None)
        x = mine.hidden.to(wire.dtype)
        output = layer(MoEEpTensors(x, mine.ids, mine.weights))
        table = reference.target_ranks(mine.ids, num_experts, ep_size)
        everyone = [[None if t is None else x[n] for t in row] for n, row in enumerate(table)]
        sums = [reference.pairwise_tree(rows) for rows in everyone]
        zeros = torch.zeros(HIDDEN)
        wanted = torch.stack([zeros if s is None else s for s in sums] or [zeros])[: len(x)]
        assert torch.equal(output, wanted.to(wire.dtype))
        layer.destroy()


def layer_of(rank: int, ep_size: int, num_experts: int, dtype: torch.dtype, kernel: object) -> Any:
    fleet = FleetParams(
        num_experts=num_experts,
        max_tokens_per_rank=MAX_TOKENS,
        token_hidden_size=HIDDEN,
        dtype_bytes=dtype.itemsize,
        algorithm=EpAlgorithm.LOW_LATENCY,
        layout=EpLayout.RANK_MAJOR,
    )
    w13, w2 = weights_of(num_experts, dtype)
    first, end, _ = share_of(rank, ep_size, num_experts)
    comm = ours.MoeNvlinkConfig(timeout_s=120)
    split = SplitConfig(comm=comm) if kernel is None else SplitConfig(comm=comm, kernel=kernel)
    pack = MoEWeightPack(w13[first:end], w2[first:end])
    return MoEEpLayer(bootstrap(rank, ep_size), fleet, pack, backend=split)


def weights_of(num_experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all experts."""
    random = torch.Generator().manual_seed(7)
    w13 = torch.randn(num_experts, 2 * 32, HIDDEN, generator=random) / 8
    w2 = torch.randn(num_experts, HIDDEN, 32, generator=random) / 8
    return w13.to(wires.DEVICE, dtype), w2.to(wires.DEVICE, dtype)


@dataclasses.dataclass
class TorchExperts:
    """Config of the kernel below."""

    kernel_name: str = "torch_for_tests"


@register_split_kernel("torch_for_tests")
class TorchKernel(SplitKernelBackend):  # type: ignore[misc]
    """FlashInfer's inner kernels' contract in torch: SwiGLU of each local expert."""

    rows_seen: ClassVar[int] = 0

    @classmethod
    def kernel_name(cls) -> str:
        return "torch_for_tests"

    def compute(self, ctx: Any) -> torch.Tensor:
        pack = self._transformed_weights
        x = ctx.expert_tensors.reshape(ctx.num_tokens, -1).float()
        total = torch.zeros_like(x)
        for row, (ids, weights) in enumerate(
            zip(ctx.recv_topk_idx.tolist(), ctx.recv_topk_weights, strict=True)
        ):
            for k, expert in enumerate(ids):
                if expert >= 0:
                    TorchKernel.rows_seen += 1
                    total[row] += weights[k] * swiglu(x[row], pack.w13[expert], pack.w2[expert])
        return total.to(ctx.expert_tensors.dtype)


def swiglu(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (w13.float() @ x).chunk(2)
    return w2.float() @ (torch.nn.functional.silu(gate) * up)


@case
def flashinfers_layer_with_experts_in_torch(rank: int, ep_size: int) -> None:
    num_experts = 2 * ep_size
    mine = wires.works(ep_size, num_experts, counts_of(ep_size, 5))[rank]
    TorchKernel.rows_seen = 0
    layer = layer_of(rank, ep_size, num_experts, torch.bfloat16, TorchExperts())
    w13, w2 = weights_of(num_experts, torch.bfloat16)
    x = mine.hidden.bfloat16()
    tensors = MoEEpTensors(x, mine.ids, mine.weights)
    output = layer(tensors)
    state = layer.create_graph_state(tensors)  # what a capture would use
    assert torch.equal(layer(tensors, graph_state=state), output)
    wanted = torch.zeros(len(x), HIDDEN, device=wires.DEVICE)
    for n, ids in enumerate(mine.ids.tolist()):
        for k, expert in enumerate(ids):
            if 0 <= expert < num_experts:
                one = swiglu(x[n].float(), w13[expert], w2[expert])
                wanted[n] += mine.weights[n, k] * one
    torch.testing.assert_close(output.float(), wanted, rtol=0.03, atol=0.03)
    assert TorchKernel.rows_seen > 0
    layer.destroy()


# The drop-in.


def signature_of(function: Any) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults; annotations are each side's own."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@case
def the_drop_in_has_flashinfers_signatures(rank: int, ep_size: int) -> None:
    theirs = flashinfer.comm.MoeAlltoAll
    for name, member in vars(theirs).items():
        # workspaces included, which raise; not its constants and its private parts
        if callable(getattr(theirs, name)) and (name == "__init__" or not name.startswith("__")):
            mine = getattr(ours.MoeAlltoAll, name)
            assert signature_of(mine) == signature_of(getattr(theirs, name)), name
        elif isinstance(member, property):
            assert isinstance(vars(ours.MoeAlltoAll)[name], property)
    size = "moe_a2a_get_workspace_size_per_rank"
    mine = getattr(moe_alltoall, size)
    assert signature_of(mine) == signature_of(getattr(flashinfer.comm, size))
    with installed():
        patched = [name for name in vars(flashinfer.comm) if name in replacement._INSTALLED]
        assert len(patched) == len(replacement._INSTALLED)
        ours.install()  # a second time
    late = types.ModuleType("late")
    late.MoeAlltoAll = theirs  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {"late": late}),
        pytest.raises(ExchangeStateError, match="^late imported MoeAlltoAll .*install.. first"),
    ):
        ours.install()
    assert flashinfer.comm.MoeAlltoAll is theirs


def mapping_of(rank: int, ep_size: int) -> Any:
    return Mapping(
        rank=rank,
        tp_size=ep_size,
        moe_ep_size=ep_size,
        world_size=ep_size,
        gpus_per_node=ep_size,
        pp_size=1,
        cp_size=1,
    )


def drop_in(rank: int, ep_size: int, num_experts: int, **options: Any) -> Any:
    chosen: dict[str, Any] = {"hidden_size": HIDDEN, **options}
    if "workspace_size_per_rank" in chosen:
        del chosen["hidden_size"]
    config = types.SimpleNamespace(comm_backend=TorchDistBackend())
    chosen.setdefault("mnnvl_config", config)
    return flashinfer.comm.MoeAlltoAll(
        mapping_of(rank, ep_size), MAX_TOKENS, TOP_K, num_experts, **chosen
    )


def payloads_of(wire: Wire, work: Work) -> list[torch.Tensor]:
    rows, scales = wire.make(work.hidden)
    return [rows, *([] if scales is None else [scales]), work.ids, work.weights]


def drop_in_round(subject: Any, wire: Wire, rank: int, seed: int, invalid_id: int) -> None:
    ep_size, num_experts = subject.ep_size, subject.num_experts
    counts = counts_of(ep_size, seed)
    everyones = wires.works(ep_size, num_experts, counts, seed)
    mine, share = everyones[rank], share_of(rank, ep_size, num_experts)
    bound, in_workspace = max(counts), seed % 2 == 0
    payloads = payloads_of(wire, mine)
    received = subject.dispatch(
        mine.ids,
        payloads,
        bound,
        invalid_token_expert_id=invalid_id,
        expert_id_payload_index=len(payloads) - 2,
    )
    assert [r.dtype for r in received] == [p.dtype for p in payloads]
    assert [r.shape for r in received] == [(ep_size, bound, *p.shape[1:]) for p in payloads]
    *rows, ids, weights = received
    sent = [[*payloads_of(wire, work)[:-2], work.weights] for work in everyones]
    check_received(ids, [*rows, weights], sent, everyones, share, invalid_id)
    flat = [tensor.flatten(0, 1) for tensor in received]
    x = wire.read(flat[0], flat[1] if len(flat) == 4 else None)
    partial = wires.local_sums(x, flat[-2], flat[-1], *share[:2]).to(wire.dtype)
    partial = partial.view(ep_size, bound, HIDDEN)
    if in_workspace:
        region = subject.get_combine_payload_tensor_in_workspace(bound, HIDDEN, wire.dtype)
        partial = region.copy_(partial)
    total = subject.combine(partial, bound, payload_in_workspace=in_workspace)
    assert torch.equal(total, wires.expected(wire, mine, ep_size, num_experts)), wire.name


@case
def the_drop_in_carries_every_format(rank: int, ep_size: int) -> None:
    with installed():
        num_experts = 2 * ep_size
        size = flashinfer.comm.moe_a2a_get_workspace_size_per_rank(
            ep_size, MAX_TOKENS, 4 * HIDDEN + 8 * TOP_K, 4 * HIDDEN
        )
        one = drop_in(rank, ep_size, num_experts, workspace_size_per_rank=size)
        two = drop_in(rank, ep_size, num_experts, workspace_size_per_rank=size)
        assert one._rows is two._rows, "the cache of workspaces"
        # Layers of several formats take turns on one workspace, as in SGLang.
        for number, wire in enumerate(wires.WIRES):
            invalid_id = (-1, num_experts, 1)[number % 3]
            drop_in_round((one, two)[number % 2], wire, rank, number, invalid_id)
        one._reset_workspace()


@case
def the_least_workspace_is_enough(rank: int, ep_size: int) -> None:
    """As sized for 16-bit rows; a bound of 0 on all ranks; a mapping without a communicator."""
    with installed():
        num_experts = 2 * ep_size
        subject = drop_in(rank, ep_size, num_experts, mnnvl_config=None)
        for seed, invalid_id in ((2, -1), (3, num_experts)):
            drop_in_round(subject, wires.BF16, rank, seed, invalid_id)
        nothing = wires.works(ep_size, num_experts, [0] * ep_size)[rank]
        received = subject.dispatch(nothing.ids, payloads_of(wires.BF16, nothing), 0)
        assert [tuple(r.shape[:2]) for r in received] == [(ep_size, 0)] * 3
        region = subject.get_combine_payload_tensor_in_workspace(0, HIDDEN, torch.bfloat16)
        assert subject.combine(region, 0, payload_in_workspace=True).shape == (0, HIDDEN)
        subject._reset_workspace()


@case
def ids_without_an_invalid_id_arrive_as_sent(rank: int, ep_size: int) -> None:
    """Those of no expert too, and of a copy. The last rank has no tokens and the same plan."""
    num_experts = 2 * ep_size
    everyones = wires.works(ep_size, num_experts, [2] * (ep_size - 1) + [0], 3)
    everyones[0].ids[:] = torch.tensor([[num_experts - 1, -1, 2**30], [0, 2**30, -1]])
    mine, (first, end, _) = everyones[rank], share_of(rank, ep_size, num_experts)
    rows, ids, weights = payloads_of(wires.BF16, mine)
    with installed():
        subject = drop_in(rank, ep_size, num_experts)
        with pytest.raises(UnsupportedError, match="that is not token_selected_experts"):
            subject.dispatch(ids, [rows, ids.clone(), weights], 2, -1, 1)
        for sent_ids in (ids, ids.clone()):
            received = subject.dispatch(ids, [rows, sent_ids, weights], 2, None, 1)
            for source, work in enumerate(everyones):
                is_mine = ((work.ids >= first) & (work.ids < end)).any(dim=1)
                count = int(is_mine.sum())
                found = (payload[source, :count] for payload in received)
                wanted = (payload[is_mine] for payload in payloads_of(wires.BF16, work))
                assert wires.rows_as_bytes(*found) == wires.rows_as_bytes(*wanted)
            subject.combine(received[0], 2)
        subject._reset_workspace()


class Renumbered(TorchDistBackend):  # type: ignore[misc]
    """The last two ranks in the other order, those before them as they are."""

    def Get_rank(self) -> int:  # noqa: N802
        rank: int = super().Get_rank()
        size: int = self.Get_size()
        return 2 * size - 3 - rank if rank >= size - 2 else rank

    def Split(self, color: int, key: int) -> Any:  # noqa: N802
        return TorchDistBackend().Split(color, key)


@case
def the_ranks_of_a_communicator_split_it_together(rank: int, ep_size: int) -> None:
    """Of four ranks, two have the numbers of the mapping already."""
    subjects = [(Renumbered(), mapping_of(rank, ep_size))]
    if ep_size == 4:  # two groups of two
        pairs = Mapping(world_size=4, rank=rank, tp_size=4, moe_ep_size=2, moe_tp_size=2)
        subjects.append((TorchDistBackend(), pairs))
    for communicator, mapping in subjects:
        config = types.SimpleNamespace(comm_backend=communicator)
        group = moe_alltoall._ep_group(mapping, config)
        assert group.all_gather_object(rank) == list(mapping.moe_ep_group)
        assert (group.size, group.rank) == (mapping.moe_ep_size, mapping.moe_ep_rank)


@case
def a_reset_leaves_the_next_workspace_alone(rank: int, ep_size: int) -> None:
    with installed():
        old, other = (drop_in(rank, ep_size, 2 * ep_size) for _ in range(2))
        drop_in_round(old, wires.BF16, rank, 2, -1)
        old._reset_workspace()
        with pytest.raises(ExchangeStateError, match="workspace is closed; create a new object"):
            drop_in_round(other, wires.BF16, rank, 2, -1)
        new = drop_in(rank, ep_size, 2 * ep_size)
        other._reset_workspace()
        assert drop_in(rank, ep_size, 2 * ep_size)._rows is new._rows
        drop_in_round(new, wires.BF16, rank, 3, -1)
        new._reset_workspace()


@case
def a_checkpoint_keeps_what_objects_of_these_sizes_are(rank: int, ep_size: int) -> None:
    """FlashInfer's calls, each twice, as a process does that is saved in between."""
    wire, meeting = wires.WIRES[0], TorchDistBackend()
    with installed():
        first, second = (drop_in(rank, ep_size, 4 * ep_size) for _ in range(2))
        drop_in_round(first, wire, rank, 0, -1)
        for seed, subject in ((1, first), (3, second)):
            subject.checkpoint_restore(meeting)
            subject.checkpoint_prepare()
            subject.checkpoint_prepare()
            with pytest.raises(ExchangeStateError, match="checkpoint_restore on all ranks"):
                drop_in_round(first, wire, rank, seed, -1)
            with pytest.raises(ConfigError, match=f"but the workspace has ep_size={ep_size} and"):
                second.checkpoint_restore(Alone())
            second.checkpoint_restore(meeting)
            second.checkpoint_restore(meeting)
            drop_in_round(first, wire, rank, seed, -1)
            drop_in_round(second, wire, rank, seed + 1, -1)
        first._reset_workspace()


class Alone:
    """A communicator of one rank."""

    def Get_rank(self) -> int:  # noqa: N802 (MPI's spelling)
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """FlashInfer's own backend does not ask for a GPU, which its kernels alone need."""
    ours.install()
    try:
        assert flashinfer.comm.MoeAlltoAll is ours.MoeAlltoAll
        with contextlib.ExitStack() as patches:
            for module in (nvlink_common, one_sided):
                patch = mock.patch.object(module, "nvlink_platform_supported", return_value=True)
                patches.enter_context(patch)
            yield
    finally:
        ours.uninstall()
    assert flashinfer.comm.MoeAlltoAll is not ours.MoeAlltoAll


@case
def what_the_drop_in_refuses(rank: int, ep_size: int) -> None:
    with installed():
        subject = drop_in(rank, ep_size, 2 * ep_size)
        x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
        ids, weights = torch.zeros(2, TOP_K, dtype=torch.int32), torch.zeros(2, TOP_K)
        payloads = [x, ids, weights]
        _refused_dispatches(subject, payloads)
        subject.dispatch(ids, payloads, 2)
        good = torch.zeros(ep_size, 2, HIDDEN, dtype=torch.bfloat16)
        with pytest.raises(UnsupportedError, match="output_dtype=torch.bfloat16, and convert"):
            subject.combine(good.half(), 2, use_low_precision=True, output_dtype=torch.float16)
        with pytest.raises(UnsupportedError, match="output_dtype=torch.bfloat16, and convert"):
            subject.combine(good, 2, output_dtype=torch.float8_e4m3fn)
        with pytest.raises(UnsupportedError, match="no output_scales"):
            subject.combine(good, 2, output_scales=weights)
        with pytest.raises(InputError, match="is given, but enable_rank_mask=False; construct"):
            subject.combine(good, 2, active_rank_mask=mask_of([rank], ep_size))
        with pytest.raises(InputError, match="=3, but the dispatch had 2"):
            subject.combine(good, 3)
        with pytest.raises(InputError, match=r"payload has shape \[1, 2, 128\]; pass"):
            subject.combine(good[:1] if ep_size > 1 else good.repeat(2, 1, 1), 2)
        with pytest.raises(InputError, match="payload_in_workspace=True, but payload lies elsew"):
            subject.combine(good, 2, payload_in_workspace=True)
        with pytest.raises(
            InputError, match=r"hidden_size=256 of torch.bfloat16 makes rows of 512"
        ):
            subject.get_combine_payload_tensor_in_workspace(2, 256, torch.bfloat16)
        assert torch.equal(subject.combine(good, 2, output_dtype=torch.bfloat16), x)
        with pytest.raises(ExchangeStateError, match="combine called before a successful dispatch"):
            subject.combine(good, 2)
        subject._reset_workspace()


def _refused_dispatches(subject: Any, payloads: list[torch.Tensor]) -> None:
    x, ids, weights = payloads
    with pytest.raises(InputError, match="is given, but enable_rank_mask=False; construct"):
        subject.dispatch(ids, payloads, 2, active_rank_mask=mask_of([0], subject.ep_size))
    with pytest.raises(InputError, match=r"has shape \[3\], but eplb_stats_num_experts=0; cons"):
        subject.dispatch(ids, payloads, 2, eplb_local_stats=ids[0])
    with pytest.raises(InputError, match=f"=7 is no integer from 1 to {MAX_TOKENS}"):
        subject.dispatch(ids, payloads, 7)
    with pytest.raises(InputError, match="input_payloads is empty"):
        subject.dispatch(ids, [], 2)
    with pytest.raises(InputError, match="expert_id_payload_index=None, but invalid"):
        subject.dispatch(ids, payloads, 2, 5)
    with pytest.raises(InputError, match="expert_id_payload_index=3 names none of 3 payloads"):
        subject.dispatch(ids, payloads, 2, 5, 3)
    with pytest.raises(UnsupportedError, match="that is not token_selected_experts"):
        subject.dispatch(ids.clone(), payloads, 2, -1, 1)
    with pytest.raises(InputError, match=r"has dtype torch.int64; pass .to\(torch.int32\)"):
        subject.dispatch(ids.long(), [x, ids.long(), weights], 2)
    with pytest.raises(ConfigError, match=r"256\+12\+12\+256\+256 bytes per token exceed 5\d\d"):
        subject.dispatch(ids, [*payloads, x, x], 2)
    with pytest.raises(ExchangeStateError, match="get_combine_payload_tensor.* before a successf"):
        subject.get_combine_payload_tensor_in_workspace(2, HIDDEN, torch.bfloat16)
    with pytest.raises(UnsupportedError, match="no backend='cake'"):
        drop_in(subject.ep_rank, subject.ep_size, subject.num_experts, backend="cake")
    with pytest.raises(ConfigError, match="both are None"):
        drop_in(subject.ep_rank, subject.ep_size, 4, hidden_size=None)
    with pytest.raises(ConfigError, match="num_experts=0 must be a positive integer"):
        drop_in(subject.ep_rank, subject.ep_size, 0)
    with pytest.raises(ConfigError, match="but the mapping has moe_ep_size=1 and moe_ep_rank=0"):
        moe_alltoall._ep_group(mapping_of(0, 1), None)
    # In these FlashInfer's own tests read counters.
    for name in ("metainfo", "mnnvl_mem", "workspace"):
        assert not hasattr(subject, name)
        with pytest.raises(AttributeError, match=f"no {name}, which shows the workspace of Flash"):
            getattr(subject, name)
    with pytest.raises(UnsupportedError, match="no moe_a2a_dispatch on a caller's workspace; use"):
        flashinfer.comm.moe_a2a_dispatch(ids, payloads)


def mask_of(ranks: Sequence[int], ep_size: int) -> torch.Tensor:
    mask: torch.Tensor = flashinfer.comm.moe_a2a_active_rank_mask(ranks, ep_size)
    return mask


@case
def ranks_that_may_leave_cost_extra(rank: int, ep_size: int) -> None:
    """Only where the caller enables masks; such objects have a workspace of their own."""
    params, found = params_of(wires.BF16, 2 * ep_size), []
    for masks in ({}, {"enable_rank_mask": True}):
        usually = communication(rank, ep_size, params)
        with usually as usual, communication(rank, ep_size, params, **masks) as made:
            found.append((made._rows is usual._rows, *may_leave(made._rows)))
    with installed():
        usual = drop_in(rank, ep_size, 2 * ep_size)
        for masks in ({}, {"enable_rank_mask": True}):
            made = drop_in(rank, ep_size, 2 * ep_size, **masks)
            drop_in_round(made, wires.BF16, rank, 2, -1)
            found.append((made._rows is usual._rows, *may_leave(made._rows)))
            dist.barrier()
            made._reset_workspace()
    assert found == [(True, False), (False, True)] * 2


def may_leave(rows: Any) -> set[bool]:
    return {exchange.config.ranks_may_leave for exchange in rows._exchanges.values()}


@case
def rounds_without_the_last_rank(rank: int, ep_size: int) -> None:
    """Which has taken part before; both doors, and masks that are none."""
    num_experts, survivors = 2 * ep_size, range(ep_size - 1)
    mask = mask_of(survivors, ep_size)
    work = wires.works(ep_size, num_experts, [3] * ep_size, 8)[rank]
    # The experts of the last rank are no experts any more.
    last, _end, _all = share_of(ep_size - 1, ep_size, num_experts)
    left = dataclasses.replace(work, ids=torch.where(work.ids >= last, -1, work.ids))
    wanted = wires.expected(wires.BF16, left, ep_size, num_experts)
    first, end, _ = share_of(rank, ep_size, num_experts)
    payloads = payloads_of(wires.BF16, work)
    params = params_of(wires.BF16, num_experts)
    with communication(rank, ep_size, params, enable_rank_mask=True) as made:
        round_of(made, wires.BF16, rank, 2, None, in_region=False)
        if rank in survivors:
            for _ in range(2):
                got = made.dispatch(*payloads, active_rank_mask=mask)
                x = got.hidden_states.float()
                partial = wires.local_sums(x, got.topk_ids, got.topk_weights, first, end)
                total = made.combine(partial.bfloat16(), active_rank_mask=mask)
                assert torch.equal(total, wanted)
        with pytest.raises(InputError, match=r"active_rank_mask is torch.int32 \[1\] on .*; pass"):
            made.dispatch(*payloads, active_rank_mask=mask.int())
        others = mask_of([other for other in range(ep_size) if other != rank], ep_size)
        with pytest.raises(InputError, match=f"but this is rank {rank}; a rank that dispatches"):
            made.dispatch(*payloads, active_rank_mask=others)
    with installed():
        subject = drop_in(rank, ep_size, num_experts, enable_rank_mask=True)
        drop_in_round(subject, wires.BF16, rank, 2, -1)
        if rank in survivors:

            def partial_sums() -> torch.Tensor:
                rows, ids, weights = subject.dispatch(work.ids, payloads, 3, -1, 1, None, mask)
                x, flat_ids, flat_weights = (t.flatten(0, 1) for t in (rows.float(), ids, weights))
                partial = wires.local_sums(x, flat_ids, flat_weights, first, end).bfloat16()
                return partial.view(ep_size, 3, HIDDEN)

            partial, other = partial_sums(), mask_of(range(ep_size), ep_size)
            with pytest.raises(InputError, match=r"but the dispatch had \(\d,\); pass the same"):
                subject.combine(partial, 3, active_rank_mask=other)
            assert torch.equal(subject.combine(partial, 3, active_rank_mask=mask), wanted)
            # The exchange for FP8 would need the last rank, so rows are cast and travel in bf16.
            total = subject.combine(partial_sums(), 3, use_low_precision=True)
            torch.testing.assert_close(total, wanted, rtol=0.1, atol=0.1 * float(wanted.max()))
            assert not subject._sends_fp8
        dist.barrier()
        subject._reset_workspace()


def low_precision_round(
    subject: Any, rank: int, number: int, dtype: torch.dtype = torch.bfloat16, width: int = HIDDEN
) -> int:
    """A round whose rows saturate in part; returns the bytes that came back, for each row."""
    ep_size = subject.ep_size
    ids = torch.arange(3 * TOP_K, dtype=torch.int32).view(3, TOP_K) % subject.num_experts
    weights = torch.ones(3, TOP_K)
    tokens = torch.arange(3, dtype=torch.bfloat16)[:, None].repeat(1, HIDDEN)
    received = subject.dispatch(ids, [tokens, ids, weights], 3)[0]
    slots = received[..., 0].nan_to_num().clamp(0, 2).long()  # which token; empty slots: any
    generator = torch.Generator().manual_seed(number)
    drawn = 1e3 * torch.randn(ep_size, ep_size, 3, width, generator=generator)  # [from, to, ...]
    partial, in_workspace = drawn.to(dtype), number % 2 == 0
    rows = torch.stack([partial[rank, to, slots[to]] for to in range(ep_size)])
    if in_workspace:
        region = subject.get_combine_payload_tensor_in_workspace(3, width, dtype)
        rows = region.copy_(rows)
    exchange = subject._rows._round.exchange
    before = exchange.stats()
    total = subject.combine(rows, 3, in_workspace, use_low_precision=True)
    owners = [sorted({int(e) * ep_size // subject.num_experts for e in row}) for row in ids]
    cast = partial.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    wanted = [cast[owners[token], rank, token].sum(0) for token in range(3)]
    assert total.dtype is torch.bfloat16
    # Sums of multiples of 2**-9 below 2**15 are exact in any order.
    assert torch.equal(total, torch.stack(wanted).bfloat16()), number
    after = exchange.stats()
    moved: int = after.bytes_combined - before.bytes_combined
    return moved // sum(map(len, owners))


@case
def low_precision_of_the_drop_in(rank: int, ep_size: int) -> None:
    """FlashInfer's cast from the first round on; rows that can travel in FP8 do from the second."""
    with installed():
        subject, other = (drop_in(rank, ep_size, 4 * ep_size, hidden_size=256) for _ in range(2))
        assert [low_precision_round(subject, rank, number) for number in range(4)] == [
            2 * HIDDEN,
            *([HIDDEN] * 3),
        ]
        # fp16 rows in the round that was prepared for FP8, then without it; a width of no block.
        assert low_precision_round(subject, rank, 5, torch.float16) == HIDDEN
        assert low_precision_round(subject, rank, 6, torch.float16) == 2 * HIDDEN
        assert low_precision_round(subject, rank, 8, torch.float32, 40) == 80
        assert low_precision_round(subject, rank, 9, width=40) == 80
        assert low_precision_round(subject, rank, 10) == 2 * HIDDEN
        ids, rows = torch.zeros(1, TOP_K, dtype=torch.int32), torch.full((1, HIDDEN), 500.0)
        good = torch.full((ep_size, 1, HIDDEN), math.inf).bfloat16()
        good[..., 1::2] = 500.0
        subject.dispatch(ids, [rows, ids], 1)
        with pytest.raises(InputError, match="use_low_precision=False, but this object's combine"):
            subject.combine(good, 1)
        total = subject.combine(good, 1, use_low_precision=True)
        assert bool(total[:, ::2].isnan().all())
        assert bool((total[:, 1::2] == 448.0).all())
        other.dispatch(ids, [rows, ids], 1)  # another object, on the same workspace
        assert torch.equal(other.combine(good, 1), good[rank])
        other.dispatch(ids, [rows, ids], 1)
        again = other.combine(good, 1, use_low_precision=True)  # only cast
        torch.testing.assert_close(again, total, rtol=0, atol=0, equal_nan=True)
        subject._reset_workspace()


@case
def flashinfers_own_backend_on_the_drop_in(rank: int, ep_size: int) -> None:
    """Its class nvlink_one_sided, which vLLM 0.33 takes, finds the class that is installed."""
    params = params_of(wires.BF16, 2 * ep_size)
    with installed():
        made = create_communication(bootstrap(rank, ep_size), params, "nvlink_one_sided")
        assert type(made.alltoall) is ours.MoeAlltoAll
        everyones = wires.works(ep_size, 2 * ep_size, counts_of(ep_size, 6), 6)
        mine, share = everyones[rank], share_of(rank, ep_size, 2 * ep_size)
        got = made.dispatch(mine.hidden.bfloat16(), mine.ids, mine.weights)
        x = got.hidden_states.float()
        partial = wires.local_sums(x, got.topk_ids, got.topk_weights, *share[:2])
        region = made.get_combine_input_buffer(torch.bfloat16)
        total = made.combine(region.copy_(partial))
        assert torch.equal(total, wires.expected(wires.BF16, mine, ep_size, 2 * ep_size))
        made.alltoall._reset_workspace()


def stats_of(rank: int, number: int) -> torch.Tensor:
    """Of seven experts, whatever number the exchange has; negative and large ones too."""
    words = torch.arange(7, dtype=torch.int32, device=wires.DEVICE) - 3 + 100 * rank
    return words * ((1 + number * 2**20) * (-1 if number % 2 else 1))


def gathered(ep_size: int, number: int) -> torch.Tensor:
    return torch.stack([stats_of(source, number) for source in range(ep_size)])


@case
def statistics_of_experts(rank: int, ep_size: int) -> None:
    """Both doors, FlashInfer's class on the second, calls without statistics in between, and a
    round without the last rank.
    """
    num_experts, survivors = 2 * ep_size, range(ep_size - 1)
    params, mask = params_of(wires.BF16, num_experts), mask_of(survivors, ep_size)
    work = wires.works(ep_size, num_experts, counts_of(ep_size, 3), 3)[rank]
    rows, ids, weights = payloads = payloads_of(wires.BF16, work)
    with communication(rank, ep_size, params, enable_rank_mask=True) as made:
        for number in range(3):
            got = made.dispatch(*payloads, eplb_local_stats=stats_of(rank, number))
            assert torch.equal(got.eplb_gathered_stats, gathered(ep_size, number))
            made.combine(torch.zeros_like(got.hidden_states))
            round_of(made, wires.BF16, rank, number, None, in_region=False)
        if rank in survivors:
            told = {"active_rank_mask": mask, "eplb_local_stats": stats_of(rank, 5)}
            got = made.dispatch(*payloads, **told)
            wanted = gathered(ep_size, 5)
            wanted[-1] = 0
            assert torch.equal(got.eplb_gathered_stats, wanted)
            made.combine(torch.zeros_like(got.hidden_states))
        dist.barrier()
    with installed():
        subject = drop_in(rank, ep_size, num_experts, eplb_stats_num_experts=7)
        assert (subject.enable_eplb, subject.eplb_gathered_stats) == (True, None)
        for number in range(2):
            stats = stats_of(rank, number)
            received = subject.dispatch(ids, payloads, MAX_TOKENS, eplb_local_stats=stats)
            assert torch.equal(subject.eplb_gathered_stats, gathered(ep_size, number))
            subject.combine(torch.zeros_like(received[0]), MAX_TOKENS)
            assert [subject.eplb_gathered_stats] == [None]
            drop_in_round(subject, wires.BF16, rank, number, -1)
        subject._reset_workspace()
        config = NVLinkOneSidedConfig(eplb_stats_num_experts=7)
        made = create_communication(bootstrap(rank, ep_size), params, config)
        got = made.dispatch(rows, ids, weights, eplb_local_stats=stats_of(rank, 1))
        assert torch.equal(got.eplb_gathered_stats, gathered(ep_size, 1))
        made.combine(torch.zeros_like(got.hidden_states))
        made.alltoall._reset_workspace()


@case
def the_newcomers_page(rank: int, ep_size: int) -> None:
    """The lines of FlashInfer's README, as they stand there; the ranks have met before."""
    readme = Path(__file__).parents[2] / "integration" / "flashinfer" / "README.md"
    text = readme.read_text(encoding="utf-8")
    section = text.partition("## A backend of flashinfer.moe_ep")[2]
    page = section.partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {}
    with mock.patch.object(dist, "init_process_group") as meet:
        exec(compile(page, "README.md", "exec"), found)
    meet.assert_called_once_with("gloo")
    assert found["moe"].ep_size == ep_size
    torch.testing.assert_close(found["output"], found["x"], rtol=0.02, atol=0.01)
    assert not moe_ep._shared
