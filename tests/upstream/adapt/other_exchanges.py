"""vLLM's tests of other all-to-alls, with our exchange in the place of theirs.

* distributed/test_mnnvl_alltoall.py: FlashInfer's two-sided exchange (`MoeAllToAll`, unquantised),
  and its one-sided exchange with quantised rows and FP8 on the way back (`MoeAllToAll` with recipe
  nvfp4, combine fp8_block).
* kernels/moe/test_deepep_moe.py: DeepEP's prepare/finalize before vLLM's experts; ours before
  experts in torch.
* kernels/moe/test_flashinfer_moe_ep.py: FlashInfer's whole layer, bit for bit on values that
  quantise exactly; ours and experts in torch, unquantised.

Only names of the test modules change: skip marks that ask for the other library, and its classes.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from . import ranks
from .torch_experts import TorchExperts, export_triton_experts

_MNNVL = "tests.distributed.test_mnnvl_alltoall"
_DEEPEP = "tests.kernels.moe.test_deepep_moe"
_WHOLE_LAYER = "tests.kernels.moe.test_flashinfer_moe_ep"

#: Words of skip marks that ask for what ours replaces.
ASK_FOR_ANOTHER = ("FlashInfer", "SYS_PTRACE", "deep_ep")
#: How far all outputs of a test together may be off, relative to their norm: roundings to bfloat16
#: between the products are below 0.01, roundings of rows and weights to FP8 below 0.06.
TOLERANCE = 0.1
CPU = torch.device("cpu")
#: The exit code of a rank whose test skips itself.
_SKIPS = 77


# What ranks need.


def placement(rank: int, num_ranks: int, num_experts: int) -> torch.Tensor:
    """vLLM's expert_map `[num_experts] int32` of contiguous, equally many experts a rank."""
    each = num_experts // num_ranks
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[rank * each : (rank + 1) * each] = torch.arange(each, dtype=torch.int32)
    return expert_map


def exchange_of(group: Any, **sizes: Any) -> Any:
    """A `MoeAllToAll` of these fields of its configuration over a group. Collective."""
    from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll

    config = AllToAllConfig(ep_size=group.size(), ep_rank=group.rank(), **sizes)
    return MoeAllToAll.create(config, group, CPU)


def kernel_of(group: Any, experts: Any, sizes: Mapping[str, Any], dispatch: str = "auto") -> Any:
    """vLLM's modular kernel of these experts after our prepare/finalize. Collective."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
    from moe_nvlink_plugin.integration.common.formats import choose
    from moe_nvlink_plugin.integration.common.options import Options
    from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
    from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput

    def find_recipe(name: str) -> Any:
        world = {"ep_size": group.size(), "ep_rank": group.rank()}
        return MoeAllToAll.check(AllToAllConfig(**world, **sizes, recipe=name))

    chosen = choose(
        VllmExpertsInput.of(experts),
        sizes["hidden_size"],
        sizes["dtype"],
        CPU,
        Options(dispatch=dispatch),
        find_recipe,
    )
    recipe = None if chosen.recipe is None else chosen.recipe.name
    exchange = exchange_of(group, **sizes, scales_layout=chosen.scales_layout, recipe=recipe)
    expert_map = placement(group.rank(), group.size(), sizes["num_experts"])
    return mk.FusedMoEKernel(CpuPrepareAndFinalize(exchange, expert_map, chosen), experts)


def check_used(exchange: Any) -> None:
    """Fails if rows did not go through the exchange."""
    stats = exchange.stats()
    assert stats.rounds > 0, "our exchange was not used"
    assert stats.bytes_dispatched_remote > 0, "no row went to another rank"


# FlashInfer's exchanges.


class TwoSided:
    """In the place of FlashInferNVLinkTwoSidedManager and of the two functions that take it.

    The test combines one dispatch twice. Ours combines once, so that it dispatches again.
    """

    def __init__(self, cpu_group: Any) -> None:
        self._group = cpu_group
        self.initialized = False

    def initialize(self, **_sizes: Any) -> None:
        """Nothing: sizes are known when rows come."""
        self.initialized = True

    def dispatch(
        self,
        sizes: list[int],
        rows: torch.Tensor,
        _global_scale: Any,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        top_k: int,
        num_experts: int,
        _quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Any, ...]:
        """In the place of flashinfer_alltoall_dispatch. Collective."""
        assert defer_input_quant, "the test asks for rows as they are"
        self._exchange = exchange_of(
            self._group,
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=rows.shape[1],
            max_tokens_per_rank=max(sizes),
            dtype=rows.dtype,
        )
        self._send = functools.partial(self._exchange.dispatch, rows, topk_ids, topk_weights)
        received = self._send()
        self._metadata = received.metadata
        return None, received.topk_ids, received.topk_weights, received.hidden_states, None

    def combine(
        self, rows: torch.Tensor, *, top_k: int, token_count: int, alltoall_info: None
    ) -> torch.Tensor:
        """In the place of flashinfer_alltoall_combine. Collective."""
        metadata = self._send().metadata if self._metadata is None else self._metadata
        self._metadata = None
        combined: torch.Tensor = self._exchange.combine(rows, metadata)
        assert combined.shape[0] == token_count
        return combined

    def cleanup(self) -> None:
        """Closes the exchange."""
        check_used(self._exchange)
        self._exchange.close()


class OneSided:
    """In the place of FlashInferNVLinkOneSidedManager and of its `moe_alltoall`."""

    def __init__(self, cpu_group: Any) -> None:
        self._group = cpu_group
        self.initialized = False
        variable = "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE"
        self.low_precision_combine = os.environ.get(variable) == "1"
        self.moe_alltoall: OneSided | None = None

    def initialize(
        self, *, x_bytes_per_token: int, x_sf_bytes_per_token: int, **sizes: Any
    ) -> None:
        """Rows of nvfp4, which the test's bytes are: half a byte an element, a scale for 16."""
        hidden_size = sizes["hidden_size"]
        assert (x_bytes_per_token, x_sf_bytes_per_token) == (hidden_size // 2, hidden_size // 16)
        self._exchange = exchange_of(
            self._group,
            max_tokens_per_rank=sizes.pop("max_num_tokens"),
            dtype=torch.bfloat16,
            recipe="nvfp4",
            combine="fp8_tensor" if self.low_precision_combine else "bf16",
            **sizes,
        )
        self.moe_alltoall, self.initialized = self, True

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
    ) -> list[torch.Tensor]:
        """Rows, their scales, ids and weights of all ranks. Collective."""
        rows, scales, ids, weights = input_payloads
        assert torch.equal(ids, token_selected_experts)
        scales = scales.view(torch.float8_e4m3fn)  # bytes in the test
        received = self._exchange.dispatch(
            rows, ids, weights, scales=scales, max_tokens=runtime_max_tokens_per_rank
        )
        self._metadata = received.metadata
        return [received.hidden_states, received.scales, received.topk_ids, received.topk_weights]

    def combine(self, payload: torch.Tensor, runtime_max_tokens_per_rank: int) -> torch.Tensor:
        """payload `[ranks, tokens, hidden_size]`. Collective."""
        assert payload.shape[1] == runtime_max_tokens_per_rank
        combined: torch.Tensor = self._exchange.combine(payload.flatten(0, 1), self._metadata)
        return combined

    def combine_into(
        self, *, payload: torch.Tensor, runtime_max_tokens_per_rank: int, output: torch.Tensor
    ) -> None:
        """Collective."""
        output.copy_(self.combine(payload, runtime_max_tokens_per_rank))

    def cleanup(self) -> None:
        """Closes the exchange."""
        check_used(self._exchange)
        self._exchange.close()


def _mnnvl_in_rank() -> None:
    all2all: Any = importlib.import_module("vllm.distributed.device_communicators.all2all")
    all2all.FlashInferNVLinkTwoSidedManager = TwoSided
    all2all.FlashInferNVLinkOneSidedManager = OneSided
    verbs: Any = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.prepare_finalize.flashinfer_nvlink_two_sided"
    )
    verbs.flashinfer_alltoall_dispatch = TwoSided.dispatch
    verbs.flashinfer_alltoall_combine = TwoSided.combine


def _mnnvl_in_parent(module: Any) -> None:
    module._spawn_workers = functools.partial(_spawn_workers, module._run_worker)


class _Printed:
    """In the place of a queue: the test's worker puts its traceback there, and exits."""

    put = staticmethod(print)


def _spawn_workers(
    run_worker: Callable[..., None], worker: Any, world_size: int, *, dp_size: int | None = None
) -> None:
    """The test's: its own asks ranks for what they say of themselves, not for how they ended."""
    from vllm.utils.network_utils import get_open_port

    ports = str(get_open_port()), str(get_open_port())
    args = (world_size, ports[0], worker, dp_size, ports[1], _Printed())
    ranks.spawn(run_worker, args, nprocs=world_size)


# DeepEP's prepare/finalize.


def _close(
    assert_close: Callable[..., None],
    expected: torch.Tensor,
    actual: torch.Tensor,
    k: int,
    use_fp8_dispatch: bool,
) -> None:
    """The file's comparison, in which outputs of small shapes may be zeros, and one by norms."""
    assert_close(expected, actual, k, use_fp8_dispatch)
    distance = (actual.float() - expected.float()).norm()
    assert distance <= TOLERANCE * expected.float().norm(), f"{distance} of {expected.norm()}"


def _deepep_in_rank() -> None:
    export_triton_experts()
    module: Any = importlib.import_module(_DEEPEP)
    original = module.deep_ep_moe_impl

    def deep_ep_moe_impl(
        pg: Any, pgi: Any, low_latency_mode: bool, dp_size: int, test_tensors: Any, *rest: Any
    ) -> torch.Tensor:
        # The test's own kernels learn the sizes from buffers; ours from its configuration.
        kernels: list[Any] = []
        make = functools.partial(make_deepep_kernel, module, test_tensors.config, kernels)
        module.make_modular_kernel = make
        combined: torch.Tensor = original(pg, pgi, low_latency_mode, dp_size, test_tensors, *rest)
        check_used(kernels[0].prepare_finalize._exchange)
        return combined

    module.deep_ep_moe_impl = deep_ep_moe_impl
    module.assert_deepep_close = functools.partial(_close, module.assert_deepep_close)


def make_deepep_kernel(
    module: Any,
    config: Any,
    kernels: list[Any],
    _pg: Any,
    _pgi: Any,
    low_latency_mode: bool,
    hidden_size: int,
    _dp_size: int,
    num_experts: int,
    _num_local_experts: int,
    _q_dtype: Any,
    use_fp8_dispatch: bool,
    quant_config: Any,
) -> Any:
    """In the place of the test's make_modular_kernel. Collective.

    Rows per expert, which DeepEP's low-latency exchange makes, are not ours: such tests get the
    experts of the others. FP8 rows of that exchange have a scale for 128 elements: fp8_block.
    """
    experts = TorchExperts(moe_config=module.make_dummy_moe_config(), quant_config=quant_config)
    sizes = {
        "num_experts": num_experts,
        "top_k": config.topk,
        "hidden_size": hidden_size,
        "max_tokens_per_rank": min(config.m, module.MAX_TOKENS_PER_RANK)
        if low_latency_mode
        else config.m,
        "dtype": torch.bfloat16,
    }
    group = torch.distributed.new_group(backend="gloo")
    kernel = kernel_of(group, experts, sizes, "fp8_block" if use_fp8_dispatch else "auto")
    kernel.prepare_finalize.buffer = types.SimpleNamespace(
        clean_low_latency_buffer=lambda *_sizes: None
    )
    kernels.append(kernel)
    return kernel


def _deepep_in_parent(module: Any) -> None:
    # Of the sizes that DeepEP's low-latency kernels have, the one that the test asks for.
    module.DeepEPLLPrepareAndFinalize = types.SimpleNamespace(SUPPORTED_HIDDEN_SIZES=[2560])


# FlashInfer's whole layer.


class WholeLayer:
    """In the place of FlashInferMoeEp: our exchange and experts in bfloat16."""

    def __init__(self, moe: Any, weights: Any, **_named: Any) -> None:
        from vllm.distributed import get_ep_group
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(CPU)
        self._weights, self._num_experts = weights, moe.num_experts
        sizes = {
            "num_experts": moe.num_experts,
            "top_k": moe.experts_per_token,
            "hidden_size": moe.hidden_dim,
            "max_tokens_per_rank": moe.max_num_tokens,
            "dtype": moe.in_dtype,
        }
        experts = TorchExperts(moe_config=moe, quant_config=FUSED_MOE_UNQUANTIZED_CONFIG)
        self._group = get_ep_group().cpu_group
        self._kernel = kernel_of(self._group, experts, sizes)

    def warmup(self) -> None:
        """Nothing: kernels are compiled when they are first used."""

    def expert_weight_views(self) -> list[torch.Tensor]:
        """What the experts read."""
        return [self._weights.w13, self._weights.w2]

    def __call__(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Collective."""
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        group = self._group
        output: torch.Tensor = self._kernel.apply(
            hidden_states=rows,
            w1=self._weights.w13,
            w2=self._weights.w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=MoEActivation.SILU,
            global_num_experts=self._num_experts,
            expert_map=placement(group.rank(), group.size(), self._num_experts),
            apply_router_weight_on_input=False,
        )
        return output

    def destroy(self) -> None:
        """Closes the exchange."""
        exchange = self._kernel.prepare_finalize._exchange
        check_used(exchange)
        exchange.close()


def _whole_layer_in_rank() -> None:
    export_triton_experts()
    module: Any = importlib.import_module(_WHOLE_LAYER)
    module.FlashInferMoeEp = WholeLayer
    module.FlashInferMoeEpExperts = types.SimpleNamespace(
        is_supported_config=lambda *_arguments: (True, None)
    )


def _whole_layer_in_parent(module: Any) -> None:
    module.distributed_run = _with_small_experts
    # The test asks pytest whether FlashInfer can be imported; ours needs none.
    module.pytest = types.SimpleNamespace(importorskip=lambda _name: None, skip=pytest.skip)


def _with_small_experts(work: Any, world_size: int, geometry: Any, *rest: Any) -> None:
    """As many experts, each of them small. A test's values need 512 columns."""
    small = replace(geometry, hidden_size=512, intermediate_size=32)
    distributed_run(work, world_size, small, *rest)


def distributed_run(work: Callable[..., None], world_size: int, *args: Any) -> None:
    """vLLM's of this name, at a free port: its own says 12345 to each run of a machine."""
    from vllm.utils.network_utils import get_open_port

    try:
        described = (work, world_size, str(get_open_port()), args)
        ranks.spawn(_numbered, described, nprocs=world_size)
    except ProcessExitedException as ended:
        if ended.exit_code == _SKIPS:
            pytest.skip(f"rank {ended.error_index} skips the test")
        raise


def _numbered(
    rank: int, work: Callable[..., None], world_size: int, port: str, args: tuple[Any, ...]
) -> None:
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    env |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "localhost"}
    try:
        work({name: str(value) for name, value in env.items()}, world_size, *args)
    except pytest.skip.Exception as skip:
        print(skip)
        sys.exit(_SKIPS)


# pytest's side.


class Adaptation(NamedTuple):
    """What is done to a test module in pytest's process, and in its ranks before they begin."""

    in_parent: Callable[[Any], None]
    in_rank: Callable[[], None]


ADAPTATIONS: dict[str, Adaptation] = {
    _MNNVL: Adaptation(_mnnvl_in_parent, _mnnvl_in_rank),
    _DEEPEP: Adaptation(_deepep_in_parent, _deepep_in_rank),
    _WHOLE_LAYER: Adaptation(_whole_layer_in_parent, _whole_layer_in_rank),
}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before test modules are imported: what is exported only where Triton is."""
    export_triton_experts()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test modules are imported, and none of their tests has run."""
    for name, module in {item.module.__name__: item.module for item in items}.items():  # type: ignore[attr-defined]
        if name in ADAPTATIONS:
            ADAPTATIONS[name].in_parent(module)
            ranks.in_every_rank(ADAPTATIONS[name].in_rank)
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if not _asks_for_another(mark)]


def _asks_for_another(mark: pytest.Mark) -> bool:
    reason = str(mark.kwargs.get("reason", ""))
    return mark.name == "skipif" and any(word in reason for word in ASK_FOR_ANOTHER)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> object | None:
    """vLLM's `workspace_init` asks for device number 0; ranks have what they need."""
    if fixturedef.argname != "workspace_init":
        return None
    fixturedef.cached_result = (True, fixturedef.cache_key(request), None)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """One test imports FlashInfer to ask what its combine can; ours can what it asks."""
    if not item.name.startswith("test_one_sided_combine_low_precision"):
        return (yield)
    combine = {"combine": lambda _self, use_low_precision=False: use_low_precision}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.trtllm_moe_alltoall"):
            module: Any = types.ModuleType(name)
            module.MoeAlltoAll = type("MoeAlltoAll", (), combine)
            patch.setitem(sys.modules, name, module)
        return (yield)
