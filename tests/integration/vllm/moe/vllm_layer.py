"""One MoE layer of a rank: our prepare/finalize in vLLM's own modular kernel, on CPU tensors.

The experts are ours: they honour expert_map, stand for whatever vLLM chooses, take quantised rows
where their FusedMoEQuantConfig says so, and check what they are handed. Needs vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from typing_extensions import Self
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from moe_nvlink_plugin import AllToAllConfig, Dispatched, DispatchMetadata, MoeAllToAll
from moe_nvlink_plugin.integration.common import formats
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.formats import DispatchFormat, choose
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm.backend import CARRIER
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput
from moe_nvlink_plugin.integration.vllm.moe.prepare_finalize import UNQUANTISED
from moe_nvlink_plugin.testing import ThreadGroup
from tests.support.dense_layer import dense_of, experts_of
from tests.support.dense_layer import worst_of as worst_of
from tests.support.vllm_sizes import CAPACITY as CAPACITY
from tests.support.vllm_sizes import HIDDEN_SIZE as HIDDEN_SIZE
from tests.support.vllm_sizes import NUM_EXPERTS as NUM_EXPERTS
from tests.support.vllm_sizes import TOP_K as TOP_K
from tests.support.vllm_sizes import config_of as config_of

EXPERTS = experts_of(NUM_EXPERTS, HIDDEN_SIZE)
#: Of hidden states, ids and weights.
dense = functools.partial(dense_of, EXPERTS)
NO_OP = topk_weight_and_reduce.TopKWeightAndReduceNoOP()
#: Of experts that take floats; as much of FusedMoEQuantConfig as vLLM's kernel and ours look at.
NO_QUANT: Any = SimpleNamespace(quant_dtype=None, a2_scale=None)
DEFAULT_OPTIONS = Options()
GEOMETRY = Geometry(NUM_EXPERTS, TOP_K, HIDDEN_SIZE, CAPACITY, torch.float32)


def parallel_of(ep_size: int, rank: int, *, balances: bool = False) -> Any:
    """vLLM's configuration of data-parallel ranks that share the experts."""
    return moe_config.FusedMoEParallelConfig(
        **dict.fromkeys(("tp_size", "pcp_size", "sp_size"), 1),
        **dict.fromkeys(("tp_rank", "pcp_rank"), 0),
        **dict.fromkeys(("dp_size", "ep_size"), ep_size),
        **dict.fromkeys(("dp_rank", "ep_rank"), rank),
        use_ep=ep_size > 1,
        all2all_backend=CARRIER,
        enable_eplb=balances,
    )


def moe_config_of(ep_size: int, rank: int, local_experts: int, **values: Any) -> Any:
    """vLLM's description of such a layer. values: its sizes and type, and what replaces the usual.

    Experts are as many as `num_experts` says, and none of them is redundant.
    """
    usual = {
        "num_local_experts": local_experts,
        "num_logical_experts": values["num_experts"],
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": moe_config.RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel_of(ep_size, rank),
    }
    return moe_config.FusedMoEConfig(**{**usual, **values})


def ranks_of(group: Any) -> Ranks:
    return Ranks(group, group.rank, group.size, WORDING)


def pool_of(group: Any, options: Options = DEFAULT_OPTIONS) -> ExchangePool:
    """A worker's, for a rank that is a thread."""
    return ExchangePool(ranks_of(group), torch.device("cpu"), options)


def expert_map_of(config: AllToAllConfig) -> torch.Tensor | None:
    placed: torch.Tensor | None = determine_expert_map(
        config.ep_size, config.ep_rank, config.num_experts
    )[1]
    return placed


def work_of(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden states, int32 ids (some of them -1, as vLLM's routers mark padding), weights."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=random)
    ids = scores.topk(TOP_K, dim=1).indices.to(torch.int32)
    ids = torch.where(torch.rand(ids.shape, generator=random) < 0.1, -1, ids)
    return (
        torch.randn(num_tokens, HIDDEN_SIZE, generator=random),
        ids,
        torch.rand(num_tokens, TOP_K, generator=random),
    )


def ragged(rank: int, rounds: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Work of a rank's rounds, empty and full ones among them; the ranks' sizes differ."""
    for number in range(rounds):
        num_tokens = (number * (rank + 2) + 3 * rank) % (CAPACITY + 1)
        yield work_of(num_tokens, 100 * number + rank)


class Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Experts of one rank as vLLM's for CUDA are: global ids, expert_map, all rows of the buffer.

    left_open: what they leave to finalize; with NoOP they weight and sum themselves. Rows without a
    local choice get NaN, which is what a GPU's uninitialised memory may be. quant_config: what they
    take; floats_of: makes floats of such rows and scales. defers: they quantise for themselves.
    made: the columns of their rows; they leave out the others, by which vLLM has padded rows.
    """

    #: Of experts as vLLM's for CPU are, which take local ids, one for each row: the first expert.
    first: int | None = None

    def __init__(
        self,
        quant_config: Any = NO_QUANT,
        floats_of: Callable[[torch.Tensor, Any], torch.Tensor] = lambda rows, scales: rows,
        *,
        left_open: mk.TopKWeightAndReduce = NO_OP,
        defers: bool = False,
        made: int = HIDDEN_SIZE,
    ) -> None:
        self.moe_config = SimpleNamespace(moe_parallel_config=None)
        self.quant_config = quant_config
        self.floats_of = floats_of
        self.defers = defers
        self.left_open = left_open
        self.made = made
        self.calls: list[SimpleNamespace] = []

    @property
    def expects_unquantized_inputs(self) -> bool:
        return self.defers

    def output_hidden_dim(self, hidden_dim: int) -> int:
        return self.made

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return self.left_open

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @property
    def sums(self) -> bool:
        return isinstance(self.left_open, topk_weight_and_reduce.TopKWeightAndReduceNoOP)

    def workspace_shapes(
        self, num_rows: int, width: int, hidden_size: int, top_k: int, *_: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        # hidden_size is what a row has of elements: half of it where two are in a byte.
        unreduced = (num_rows, top_k, self.made)
        output = (num_rows, self.made) if self.sums else unreduced
        return unreduced, (num_rows, width), output

    def apply(self, **given: Any) -> None:
        rows, ids, weights = given["hidden_states"], given["topk_ids"], given["topk_weights"]
        scales = given.get("a1q_scale")
        self.calls.append(
            SimpleNamespace(
                **given,
                ids_then=ids.clone(),
                weights_then=weights.clone(),
                rows_then=rows.clone(),
                scales_then=None if scales is None else scales.clone(),
            )
        )
        assert ids.dtype == torch.int32
        assert weights.dtype == torch.float32
        assert ids.is_contiguous()
        assert weights.is_contiguous()
        assert rows.is_contiguous()
        num_local, expert_map = given["w1"].shape[0], given["expert_map"]
        known = NUM_EXPERTS if self.first is None else num_local
        assert bool(((ids >= 0) & (ids < known)).all()), "ids that the kernels do not accept"
        local = ids
        if self.first is not None:
            assert ids.shape == (len(rows), 1)
            ids = ids + self.first
        elif expert_map is not None:
            local = expert_map[ids.long()]
        floats = self.floats_of(rows, scales)
        chosen = torch.einsum("nh,nkhj->nkj", floats, EXPERTS[ids.long()])[..., : self.made]
        unreduced = torch.where((local < 0).unsqueeze(-1), 0.0, torch.tanh(chosen))
        if not self.sums:
            given["output"].copy_(unreduced)
            return
        # Their own weights, of local choices only.
        summed = (unreduced * torch.where(local < 0, 0.0, weights).unsqueeze(-1)).sum(1)
        summed[(local < 0).all(1)] = float("nan")
        given["output"].copy_(summed)


LEFT_OPEN = {
    "NoOP": topk_weight_and_reduce.TopKWeightAndReduceNoOP,
    "Delegate": topk_weight_and_reduce.TopKWeightAndReduceDelegate,
    "Contiguous": topk_weight_and_reduce.TopKWeightAndReduceContiguous,
}


class _Scratch:
    def get_simultaneous(self, *asked: Any) -> list[torch.Tensor]:
        return [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in asked]


def _moe_sum(rows: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(rows.sum(1))


def take_cuda_branches(replace: Callable[[Any, str, Any], None]) -> None:
    """vLLM's modular kernel as it goes on CUDA, without the ops that need one. replace: setattr."""
    cuda = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False, is_cuda=lambda: True)
    replace(mk, "current_platform", cuda)
    replace(mk, "current_workspace_manager", _Scratch)
    replace(topk_weight_and_reduce, "ops", SimpleNamespace(moe_sum=_moe_sum))


def format_of(
    experts: Any,
    options: Options,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    hidden_size: int = HIDDEN_SIZE,
    *,
    is_cpu_rank: bool = False,
) -> DispatchFormat:
    """How rows of a layer of ours travel to such experts; but for CPU ranks as on GPUs."""

    def find_recipe(name: str) -> Any:
        row = {"dtype": dtype, "hidden_size": hidden_size}
        return MoeAllToAll.check(config_of(2, 0, recipe=name, **row))

    taken = VllmExpertsInput.of(experts)
    chosen = choose(taken, hidden_size, dtype, torch.device(device), options, find_recipe)
    if is_cpu_rank:
        return chosen
    chosen = formats.laid_out_by_dispatch(chosen, taken, hidden_size)
    return dataclasses.replace(chosen, stand_in=None)


def computed(
    kernel: Any,
    w1: torch.Tensor,
    w2: torch.Tensor,
    work: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    expert_map: torch.Tensor | None,
    activation: MoEActivation = MoEActivation.SILU,
    num_experts: int = NUM_EXPERTS,
) -> torch.Tensor:
    """What vLLM's kernel makes of a rank's tokens."""
    hidden, ids, weights = work
    result: torch.Tensor = kernel.impl.apply(
        hidden_states=hidden,
        w1=w1,
        w2=w2,
        topk_ids=ids,
        topk_weights=weights,
        activation=activation,
        global_num_experts=num_experts,
        expert_map=expert_map,
    )
    return result


def alone(**values: Any) -> Layer:
    """A layer of one rank."""
    (group,) = ThreadGroup.ranks(1)
    return Layer(group, **values)


class WithoutData:
    """An exchange whose tensors have shapes and no data: whoever reads a value is an error.

    Attributes:
        region: where the experts' rows belong.
        combined: what combine was given.
    """

    def __init__(self, chosen: DispatchFormat = UNQUANTISED, **values: Any) -> None:
        self.config = config_of(2, 1, **values)
        self.chosen = chosen
        self.slots = 2 * CAPACITY
        self.region = self._empty(HIDDEN_SIZE, torch.float32)
        self.combined: list[torch.Tensor] = []

    def _empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((self.slots, elements), dtype=dtype, device="meta")

    def dispatch(self, rows: torch.Tensor, ids: torch.Tensor, *_: Any, **_more: Any) -> Dispatched:
        recipe, scales = self.chosen.recipe, None
        hidden = self._empty(HIDDEN_SIZE, rows.dtype)
        if recipe is not None:
            row, scales_row = recipe.hidden_row(HIDDEN_SIZE), recipe.scales_row(HIDDEN_SIZE)
            hidden = self._empty(row.elements, row.dtype)
            if scales_row is not None:
                scales = self._empty(scales_row.elements, scales_row.dtype)
        return Dispatched(
            hidden_states=hidden,
            scales=scales,
            topk_ids=self._empty(TOP_K, torch.int32),
            topk_weights=self._empty(TOP_K, torch.float32),
            extra_payloads=(),
            recv_counts=torch.empty(2, dtype=torch.int32, device="meta"),
            metadata=DispatchMetadata(ids, 0, 0, -1, CAPACITY),
        )

    def combine_input(
        self, dtype: torch.dtype | None = None, *, hidden_size: int | None, metadata: Any
    ) -> torch.Tensor:
        assert hidden_size is None
        return self.region

    def combine(self, rows: torch.Tensor, metadata: Any, **given: Any) -> None:
        assert given.keys() == {"output", "hidden_size", "add", "scale"}
        self.combined.append(rows)


class Layer:
    """One rank's MoE layer: our prepare/finalize and the experts in vLLM's kernel.

    is_cpu_rank: with the class for CPU ranks, and experts as they are there.
    """

    def __init__(
        self,
        group: Any,
        left_open: str = "NoOP",
        experts: Experts | None = None,
        options: Options = DEFAULT_OPTIONS,
        device: str = "cpu",
        *,
        is_cpu_rank: bool = False,
        **values: Any,
    ) -> None:
        self.group, self.device = group, device
        self.experts = experts or Experts(left_open=LEFT_OPEN[left_open]())
        row = {name: values[name] for name in ("dtype", "hidden_size") if name in values}
        self.format = format_of(self.experts, options, device, **row, is_cpu_rank=is_cpu_rank)
        if self.format.recipe is not None:
            values["recipe"] = self.format.recipe.name
            values["scales_layout"] = self.format.scales_layout
        if is_cpu_rank:
            values["received_ids"] = GEOMETRY.received_ids
        config = config_of(group.size, group.rank, combine=options.combine, **values)
        self.exchange = MoeAllToAll.create(config, group, device)
        placed = expert_map_of(config)
        self.expert_map = None if placed is None else placed.to(device)
        of_device = CpuPrepareAndFinalize if is_cpu_rank else CudaPrepareAndFinalize
        self.subject: Any = of_device(self.exchange, self.expert_map, self.format)
        if is_cpu_rank:
            self.experts.first = self.subject._first
        self.kernel = mk.FusedMoEKernel(self.subject, self.experts)

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        local = NUM_EXPERTS if self.expert_map is None else int((self.expert_map >= 0).sum())
        shaped = torch.empty(local, HIDDEN_SIZE, HIDDEN_SIZE)  # vLLM reads its shape only
        return computed(self.kernel, shaped, shaped, (hidden, ids, weights), self.expert_map)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poison(self) -> None:
        """Fills what peers and experts will write with NaN, while no rank is in a round."""
        self._meet()
        self.exchange.combine_input().fill_(float("nan"))
        for call in self.experts.calls[-1:]:
            for given in (call.hidden_states, call.a1q_scale):
                if given is not None and given.ndim:
                    if given.dtype.itemsize == 1:
                        # NaN in e4m3, two largest numbers in a byte, a scale of 1 in ue8m0.
                        given.view(torch.uint8).fill_(0x7F)
                    else:
                        given.fill_(float("nan") if given.dtype.is_floating_point else 0x7F)
        self._meet()

    def _meet(self) -> None:
        """Waits until no rank has anything left to do."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.group.all_gather_object(None)

    def close(self) -> None:
        self.exchange.close()


def way_of(layer: Layer) -> tuple[str | None, bool]:
    """The recipe by which rows travelled, and whether the last ones were left where they belong."""
    recipe = None if layer.format.recipe is None else layer.format.recipe.name
    return recipe, layer.experts.calls[-1].output is layer.exchange.combine_input()
