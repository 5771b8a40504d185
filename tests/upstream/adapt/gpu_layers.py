"""vLLM's tests of other all-to-alls, with our exchange in the place of theirs.

Never run on a GPU. On CPU processes those of `ON_CPU` run; the others need CUDA graphs, Triton or
FlashInfer's experts, or more memory than a test may take.

* distributed/test_mnnvl_alltoall.py: FlashInfer's two-sided exchange, whose rows come back once for
  each rank they went to (our prepare/finalize), and its one-sided one, with quantised rows, and FP8
  on the way back (`MoeAllToAll` with recipe nvfp4, combine fp8_block).
* kernels/moe/test_deepep_moe.py: DeepEP's prepare/finalize before vLLM's experts; ours before the
  same experts.
* kernels/moe/test_flashinfer_moe_ep.py: FlashInfer's whole layer, bit for bit on values that
  quantise exactly; ours and Triton's experts, unquantised.
* kernels/moe/test_moe_layer.py, the MoRI graph: a captured layer, replayed with other routing.
* distributed/test_eplb_fused_moe_layer*.py: experts that change their rank; ours exchanges rows in
  the data-parallel one.

The tests are changed in their modules' names only: skip marks that ask for the other library, the
classes of it, and configurations that name it.
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

from .. import settings
from ..groups import Device
from . import processes, shared_gpu

_MNNVL = "tests.distributed.test_mnnvl_alltoall"
_DEEPEP = "tests.kernels.moe.test_deepep_moe"
_DEEPEP_LAUNCHER, _LAYER_LAUNCHER = shared_gpu.LAUNCHERS
_WHOLE_LAYER = "tests.kernels.moe.test_flashinfer_moe_ep"
_LAYER = "tests.kernels.moe.test_moe_layer"
_EPLB = ("tests.distributed.test_eplb_fused_moe_layer",) + (
    "tests.distributed.test_eplb_fused_moe_layer_dep_nvfp4",
)
_EPLB_LAUNCHER = "tests.distributed.eplb_utils"
#: Modules whose tests run on CPU processes, too.
ON_CPU = (_MNNVL, _DEEPEP, _WHOLE_LAYER)

#: Of skip marks that ask for what ours stands in for.
ASK_FOR_ANOTHER = ("FlashInfer", "SYS_PTRACE", "deep_ep")

#: Of all outputs of a test together, relative to their norm: roundings to bfloat16 between the
#: products are below 0.01, those to FP8 of rows and weights below 0.06.
TOLERANCE = 0.1

_LOW_PRECISION = "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE"
_MORI = "mori_high_throughput"


# What ranks need.


def device() -> torch.device:
    """This rank's."""
    if settings.device() is Device.CPU:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def placement(rank: int, num_ranks: int, num_experts: int) -> torch.Tensor:
    """vLLM's expert_map `[num_experts] int32` of contiguous, equally many experts a rank."""
    each = num_experts // num_ranks
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32, device=device())
    expert_map[rank * each : (rank + 1) * each] = torch.arange(
        each, dtype=torch.int32, device=device()
    )
    return expert_map


def exchange_of(group: Any, **sizes: Any) -> Any:
    """A `MoeAllToAll` of these fields of its configuration over a group. Collective."""
    from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll

    config = AllToAllConfig(ep_size=group.size(), ep_rank=group.rank(), **sizes)
    return MoeAllToAll.create(config, group, device())


def prepare_finalize(exchange: Any, dispatch_format: Any = None) -> Any:
    """Our class for this device, as `layers` makes it."""
    from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
    from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize
    from moe_nvlink_plugin.integration.vllm.moe.prepare_finalize import UNQUANTISED

    config = exchange.config
    expert_map = placement(config.ep_rank, config.ep_size, config.num_experts)
    chosen = dispatch_format or UNQUANTISED
    if device().type == "cuda":
        return CudaPrepareAndFinalize([exchange], expert_map, chosen)
    return CpuPrepareAndFinalize(exchange, expert_map, chosen)


def kernel_of(group: Any, experts: Any, sizes: Mapping[str, Any], dispatch: str = "auto") -> Any:
    """vLLM's modular kernel of these experts behind our exchange. Collective."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
    from moe_nvlink_plugin.integration.common.formats import choose
    from moe_nvlink_plugin.integration.common.options import Options
    from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput

    world = {"ep_size": group.size(), "ep_rank": group.rank()}

    def find_recipe(name: str) -> Any:
        return MoeAllToAll.check(AllToAllConfig(**world, **sizes, recipe=name))

    chosen = choose(
        VllmExpertsInput.of(experts),
        sizes["hidden_size"],
        sizes["dtype"],
        device(),
        Options(dispatch=dispatch),
        find_recipe,
    )
    recipe = None if chosen.recipe is None else chosen.recipe.name
    exchange = exchange_of(group, **sizes, recipe=recipe)
    return mk.FusedMoEKernel(prepare_finalize(exchange, chosen), experts)


def _export_triton_experts() -> None:
    from .torch_experts import export_triton_experts

    export_triton_experts()


def torch_experts() -> Any:
    """The class of experts on CPUs, where vLLM's own of these tests do not run."""
    from .torch_experts import TorchExperts

    return TorchExperts


def check_used(exchange: Any) -> None:
    """Fails where rows did not go through the exchange."""
    stats = exchange.stats()
    assert stats.rounds > 0, "our exchange was not used"
    assert stats.bytes_dispatched_remote > 0, "no row went to another rank"


# FlashInfer's exchanges.


class TwoSided:
    """In the place of FlashInferNVLinkTwoSidedManager, for this file's worker."""

    def __init__(self, cpu_group: Any) -> None:
        self.cpu_group = cpu_group
        self.initialized = False
        self.sent: list[Sent] = []

    def initialize(self, **_sizes: Any) -> None:
        """Nothing: sizes are known when rows come."""
        self.initialized = True

    def cleanup(self) -> None:
        """Closes what was created."""
        for sent in self.sent:
            check_used(sent.exchange)
            sent.exchange.close()
        self.initialized = False


class Sent:
    """A dispatch, that may be combined several times, as FlashInfer's may."""

    def __init__(self, exchange: Any, arguments: tuple[Any, ...], num_experts: int) -> None:
        self.exchange = exchange
        self._arguments, self._num_experts = arguments, num_experts
        self._layer = prepare_finalize(exchange)
        self._waits = False

    def dispatch(self) -> tuple[Any, ...]:
        """Rows, scales, ids, weights, as our prepare hands them out. Collective."""
        rows, weights, ids, quant_config = self._arguments
        arrived = self._layer.prepare(
            rows, weights, ids, self._num_experts, None, False, quant_config, True
        )
        self._waits = True
        return (arrived[0], arrived[1], arrived[3], arrived[4])

    def combine(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The sums of the ranks' rows. Collective."""
        from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
            TopKWeightAndReduceNoOP,
        )

        rows = rows.clone()  # a view of the receive buffer, which a new dispatch writes
        if not self._waits:
            self.dispatch()
        self._waits = False
        output = torch.empty((num_tokens, rows.shape[1]), dtype=rows.dtype, device=rows.device)
        weights, ids = self._arguments[1:3]
        self._layer.finalize(output, rows, weights, ids, False, TopKWeightAndReduceNoOP())
        return output


def two_sided_dispatch(
    manager: TwoSided,
    sizes: list[int],
    rows: torch.Tensor,
    _global_scale: Any,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    top_k: int,
    num_experts: int,
    quant_config: Any,
    defer_input_quant: bool = False,
) -> tuple[Any, ...]:
    """In the place of flashinfer_alltoall_dispatch. Collective."""
    assert defer_input_quant, "the test asks for rows as they are"
    exchange = exchange_of(
        manager.cpu_group,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=rows.shape[1],
        max_tokens_per_rank=max(sizes),
        dtype=rows.dtype,
    )
    sent = Sent(exchange, (rows, topk_weights, topk_ids, quant_config), num_experts)
    manager.sent.append(sent)
    arrived, scales, ids, weights = sent.dispatch()
    return sent, ids, weights, arrived, scales


def two_sided_combine(
    _manager: TwoSided, rows: torch.Tensor, *, top_k: int, token_count: int, alltoall_info: Sent
) -> torch.Tensor:
    """In the place of flashinfer_alltoall_combine. Collective."""
    assert top_k > 0
    return alltoall_info.combine(rows, token_count)


class OneSided:
    """In the place of FlashInferNVLinkOneSidedManager, for this file's workers."""

    def __init__(self, cpu_group: Any) -> None:
        self._group = cpu_group
        self.initialized = False
        self.low_precision_combine = os.environ.get(_LOW_PRECISION) == "1"
        self.moe_alltoall: OneSidedExchange | None = None

    def initialize(
        self, *, x_bytes_per_token: int, x_sf_bytes_per_token: int, **sizes: Any
    ) -> None:
        """Rows of nvfp4, which the test's bytes are: half a byte an element, a scale for 16."""
        hidden_size = sizes["hidden_size"]
        assert (x_bytes_per_token, x_sf_bytes_per_token) == (hidden_size // 2, hidden_size // 16)
        self.moe_alltoall = OneSidedExchange(
            exchange_of(
                self._group,
                max_tokens_per_rank=sizes.pop("max_num_tokens"),
                dtype=torch.bfloat16,
                recipe="nvfp4",
                combine="fp8_block" if self.low_precision_combine else "bf16",
                **sizes,
            )
        )
        self.initialized = True

    def combine_into(
        self, *, payload: torch.Tensor, runtime_max_tokens_per_rank: int, output: torch.Tensor
    ) -> None:
        """Collective."""
        assert self.moe_alltoall is not None
        output.copy_(self.moe_alltoall.combine(payload, runtime_max_tokens_per_rank))

    def cleanup(self) -> None:
        """Closes it."""
        if self.moe_alltoall is not None:
            self.moe_alltoall.close()
        self.initialized = False


class OneSidedExchange:
    """In the place of FlashInfer's MoeAlltoAll."""

    def __init__(self, exchange: Any) -> None:
        self._exchange = exchange
        self._metadata: Any = None

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
    ) -> list[torch.Tensor]:
        """Rows, their scales, ids and weights of all ranks. Collective."""
        rows, scales, ids, weights = input_payloads
        assert torch.equal(ids, token_selected_experts)
        config = self._exchange.config
        assert runtime_max_tokens_per_rank == config.max_tokens_per_rank
        scales = scales.view(torch.float8_e4m3fn)  # bytes in the test
        received = self._exchange.dispatch(rows, ids, weights, scales=scales)
        self._metadata = received.metadata
        return [received.hidden_states, received.scales, received.topk_ids, received.topk_weights]

    def combine(self, payload: torch.Tensor, runtime_max_tokens_per_rank: int) -> torch.Tensor:
        """payload `[ranks, tokens, hidden_size]`. Collective."""
        assert payload.shape[1] == runtime_max_tokens_per_rank
        metadata, self._metadata = self._metadata, None
        combined: torch.Tensor = self._exchange.combine(payload.flatten(0, 1), metadata)
        return combined

    def close(self) -> None:
        """The exchange's."""
        check_used(self._exchange)
        self._exchange.close()


def _mnnvl_in_rank() -> None:
    all2all = importlib.import_module("vllm.distributed.device_communicators.all2all")
    all2all.FlashInferNVLinkTwoSidedManager = TwoSided  # type: ignore[attr-defined]
    all2all.FlashInferNVLinkOneSidedManager = OneSided  # type: ignore[attr-defined]
    verbs: Any = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.prepare_finalize.flashinfer_nvlink_two_sided"
    )
    verbs.flashinfer_alltoall_dispatch = two_sided_dispatch
    verbs.flashinfer_alltoall_combine = two_sided_combine


def _mnnvl_in_parent(module: Any) -> None:
    shared_gpu.begin_ranks_here(_MNNVL, "_run_worker", seated=False)
    module._spawn_workers = functools.partial(ending_well, module.mp, module._spawn_workers)


def ending_well(
    launcher: Any, spawn_workers: Callable[..., None], *arguments: Any, **named: Any
) -> None:
    """Calls a launcher of vLLM's tests, which starts ranks with the module `launcher`.

    Such launchers join their ranks one by one, and ask what the ranks have told of themselves, not
    how they ended. Here a rank that fails ends the wait for the others, and the launch.
    """
    started: list[Any] = []
    original = launcher.Process

    def process(*of: Any, **by_name: Any) -> Any:
        started.append(original(*of, **by_name))
        return _Joined(started[-1], functools.partial(processes.join_together, started))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "Process", process)
        spawn_workers(*arguments, **named)
    assert started, "no rank was started"
    processes.join_together(started)


class _Joined:
    """A process as launchers know it, whose `join` is that of all ranks together."""

    def __init__(self, process: Any, join: Callable[[], None]) -> None:
        self._process, self._join = process, join

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def join(self, _timeout: float | None = None) -> None:
        """multiprocessing's name for it."""
        self._join()


# DeepEP's prepare/finalize.


class _Current(NamedTuple):
    config: Any


_current: list[_Current] = []
_exchanges: list[Any] = []


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
    _export_triton_experts()
    module: Any = importlib.import_module(_DEEPEP)
    original = module.deep_ep_moe_impl

    def deep_ep_moe_impl(
        pg: Any, pgi: Any, low_latency_mode: bool, dp_size: int, test_tensors: Any, *rest: Any
    ) -> torch.Tensor:
        # The test's own kernels learn the sizes from buffers; ours from its configuration.
        _current[:] = [_Current(test_tensors.config)]
        combined: torch.Tensor = original(pg, pgi, low_latency_mode, dp_size, test_tensors, *rest)
        check_used(_exchanges.pop())
        return combined

    module.deep_ep_moe_impl = deep_ep_moe_impl
    module.assert_deepep_close = functools.partial(_close, module.assert_deepep_close)
    module.make_modular_kernel = make_deepep_kernel
    if settings.device() is Device.CPU:
        from . import modular_kernels

        module.per_token_group_quant_fp8 = modular_kernels.per_token_group_quant_fp8


def make_deepep_kernel(
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
    module: Any = importlib.import_module(_DEEPEP)
    config = _current[0].config
    capacity = min(config.m, module.MAX_TOKENS_PER_RANK) if low_latency_mode else config.m
    moe_config = module.make_dummy_moe_config()
    if settings.device() is Device.CPU:
        experts = torch_experts()(moe_config=moe_config, quant_config=quant_config)
    else:
        experts = module.TritonExperts(moe_config=moe_config, quant_config=quant_config)
    sizes = {
        "num_experts": num_experts,
        "top_k": config.topk,
        "hidden_size": hidden_size,
        "max_tokens_per_rank": capacity,
        "dtype": torch.bfloat16,
    }
    kernel = kernel_of(
        torch.distributed.new_group(backend="gloo"),
        experts,
        sizes,
        "fp8_block" if use_fp8_dispatch else "auto",
    )
    _exchanges.append(kernel.prepare_finalize._exchange)
    kernel.prepare_finalize.buffer = types.SimpleNamespace(
        clean_low_latency_buffer=lambda *_sizes: None
    )
    return kernel


def _deepep_in_parent(module: Any) -> None:
    launcher: Any = importlib.import_module(_DEEPEP_LAUNCHER)
    shared_gpu.begin_ranks_here(_DEEPEP_LAUNCHER, "_worker_parallel_launch", seated=True)
    # Of the sizes that DeepEP's low-latency kernels have, the one that the test asks for.
    module.DeepEPLLPrepareAndFinalize = types.SimpleNamespace(SUPPORTED_HIDDEN_SIZES=[2560])
    if settings.device() is Device.CPU:
        launcher.spawn = _fork


def _fork(function: Callable[..., Any], **named: Any) -> Any:
    start: Any = importlib.import_module("torch.multiprocessing").start_processes
    return start(function, start_method="forkserver", **named)


# FlashInfer's whole layer.


class WholeLayer:
    """In the place of FlashInferMoeEp: our exchange and vLLM's Triton experts, in bfloat16."""

    def __init__(self, moe: Any, weights: Any, **_named: Any) -> None:
        from vllm.distributed import get_ep_group
        from vllm.model_executor.layers.fused_moe import TritonExperts
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(device())
        self._weights, self._num_experts = weights, moe.num_experts
        sizes = {
            "num_experts": moe.num_experts,
            "top_k": moe.experts_per_token,
            "hidden_size": moe.hidden_dim,
            "max_tokens_per_rank": moe.max_num_tokens,
            "dtype": moe.in_dtype,
        }
        on_cpu = settings.device() is Device.CPU
        experts_class: Any = torch_experts() if on_cpu else TritonExperts
        experts = experts_class(moe_config=moe, quant_config=FUSED_MOE_UNQUANTIZED_CONFIG)
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
    _export_triton_experts()
    module: Any = importlib.import_module(_WHOLE_LAYER)
    module.FlashInferMoeEp = WholeLayer
    module.FlashInferMoeEpExperts = types.SimpleNamespace(
        is_supported_config=lambda *_arguments: (True, None)
    )


def _whole_layer_in_parent(module: Any) -> None:
    shared_gpu.begin_ranks_here(_EPLB_LAUNCHER, "_distributed_worker_wrapper", seated=False)
    launcher: Any = importlib.import_module(_EPLB_LAUNCHER)
    run = functools.partial(_at_a_free_port, ending_well, launcher.mp, module.distributed_run)
    on_cpu = settings.device() is Device.CPU
    module.distributed_run = functools.partial(_smaller, run) if on_cpu else run
    # The test asks pytest whether FlashInfer can be imported; ours needs none.
    module.pytest = types.SimpleNamespace(importorskip=lambda _name: None, skip=pytest.skip)


def _at_a_free_port(run: Callable[..., None], *arguments: Any) -> None:
    shared_gpu.choose_port()
    run(*arguments)


def _smaller(
    run: Callable[..., None], work: Any, world_size: int, geometry: Any, *rest: Any
) -> None:
    """On CPUs: as many experts, each of them small. A test's values need 512 columns."""
    run(work, world_size, replace(geometry, hidden_size=512, intermediate_size=32), *rest)


# Experts that change their rank.


def _eplb_in_rank() -> None:
    for name in _EPLB:
        module: Any = importlib.import_module(name)
        module.VllmConfig = _naming_us(module.VllmConfig)


def _naming_us(original: Callable[..., Any]) -> Callable[..., Any]:
    """Configurations that ask for us, as `--all2all-backend moe_nvlink` would leave them."""
    from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER, KEY

    def vllm_config(*arguments: Any, **named: Any) -> Any:
        made = original(*arguments, **named)
        # Afterwards: the sizes that our validation asks for are set by the test, field by field.
        made.additional_config = {KEY: BACKEND}
        made.parallel_config.all2all_backend = CARRIER
        return made

    return vllm_config


def _eplb_in_parent(_module: Any) -> None:
    shared_gpu.begin_ranks_here(_EPLB_LAUNCHER, "_distributed_worker_wrapper", seated=False)


# A layer in a CUDA graph.


class _Rocm:
    """vLLM's platform for a test that asks for MoRI's; everything but that question is answered
    by the real one.
    """

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_rocm(self) -> bool:
        """The test's first question."""
        return True


def _graph_in_parent(module: Any) -> None:
    aiter_ops: Any = importlib.import_module("vllm._aiter_ops")
    aiter_ops.is_aiter_found_and_supported = lambda: True
    module.has_mori = lambda: True
    module.current_platform = _Rocm(module.current_platform)
    parallel_config, vllm_config = module.ParallelConfig, module.VllmConfig

    def carried(**named: Any) -> Any:
        from moe_nvlink_plugin.integration.vllm.backend import CARRIER

        if named.get("all2all_backend") == _MORI:
            named["all2all_backend"] = CARRIER
        return parallel_config(**named)

    module.ParallelConfig = carried
    module.VllmConfig = _naming_us(vllm_config)
    shared_gpu.begin_ranks_here(_LAYER_LAUNCHER, "_worker_parallel_launch", seated=True)


def _graph_in_rank() -> None:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize

    setattr(CudaPrepareAndFinalize, "use_fp8_dispatch", False)  # noqa: B010  # MoRI's
    package = "vllm.model_executor.layers.fused_moe"
    for name, attribute, ours in (
        ("prepare_finalize.mori", "MoriPrepareAndFinalize", CudaPrepareAndFinalize),
        ("experts.rocm_aiter_moe", "AiterExperts", mk.FusedMoEExpertsModular),
    ):
        stand_in = types.ModuleType(f"{package}.{name}")
        setattr(stand_in, attribute, ours)
        sys.modules[stand_in.__name__] = stand_in


# pytest's side.


class Adaptation(NamedTuple):
    """What is done to a test module in pytest's process, and in its ranks before they begin."""

    in_parent: Callable[[Any], None]
    in_rank: Callable[[], None]


ADAPTATIONS: dict[str, Adaptation] = {
    _MNNVL: Adaptation(_mnnvl_in_parent, _mnnvl_in_rank),
    _DEEPEP: Adaptation(_deepep_in_parent, _deepep_in_rank),
    _WHOLE_LAYER: Adaptation(_whole_layer_in_parent, _whole_layer_in_rank),
    _LAYER: Adaptation(_graph_in_parent, _graph_in_rank),
    **dict.fromkeys(_EPLB, Adaptation(_eplb_in_parent, _eplb_in_rank)),
}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before test modules are imported: what is exported only where Triton is."""
    _export_triton_experts()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test modules are imported, and none of their tests has run."""
    for name, module in {item.module.__name__: item.module for item in items}.items():  # type: ignore[attr-defined]
        if name in ADAPTATIONS:
            ADAPTATIONS[name].in_parent(module)
            shared_gpu.in_every_rank(ADAPTATIONS[name].in_rank)
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if not _asks_for_another(mark)]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> object | None:
    """vLLM's `workspace_init` asks for device number 0; on CPUs ranks have what they need."""
    if fixturedef.argname != "workspace_init" or settings.device() is Device.GPU:
        return None
    fixturedef.cached_result = (True, fixturedef.cache_key(request), None)
    return True


def _asks_for_another(mark: pytest.Mark) -> bool:
    reason = str(mark.kwargs.get("reason", ""))
    return mark.name == "skipif" and any(word in reason for word in ASK_FOR_ANOTHER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """One test imports FlashInfer to ask what its combine can; ours can what it asks."""
    if item.name.startswith("test_one_sided_combine_low_precision"):
        with pytest.MonkeyPatch.context() as patch:
            for module in _flashinfer_that_can():
                patch.setitem(sys.modules, module.__name__, module)
            return (yield)
    return (yield)


def _flashinfer_that_can() -> list[types.ModuleType]:
    names = ("flashinfer", "flashinfer.comm", "flashinfer.comm.trtllm_moe_alltoall")
    modules = [types.ModuleType(name) for name in names]
    combine = {"combine": lambda _self, use_low_precision=False: use_low_precision}
    modules[-1].MoeAlltoAll = type("MoeAlltoAll", (), combine)  # type: ignore[attr-defined]
    return modules
