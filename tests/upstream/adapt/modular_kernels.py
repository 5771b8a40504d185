"""`tests/kernels/moe/test_modular_kernel_combinations.py` with our prepare/finalize, on CPU ranks.

The harness's register functions get our prepare/finalize and the experts that run on every x86 CPU.
Its `make_modular_kernel` then makes vLLM's kernel as for "allgather_reducescatter". Our production
code (`method`) replaces the layer's quant method by ours, with that kernel's experts, as it does
when a model's weights are loaded. `MORE_CASES` adds four ranks, float16 and float32.

The file compares with an absolute tolerance of 0.03, which is more than most of its outputs. Here
the same output is compared with the same reference row by row (`within`). It is the output of a
second round, after a round with other tokens. The exchange's counters must equal the number of rows
that the router's ids ask for, so that no test passes without us.

vLLM's torch references replace its CUDA quantisers. vLLM's experts for AMX
(`X86CPUUnquantizedExperts`, `CPUExpertsFp8`) are not registered: with them the cases would depend
on the machine.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)

from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER, KEY
from moe_nvlink_plugin.integration.vllm.moe import cpu_fp8_experts, method
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize

from . import ranks
from .torch_experts import TorchExperts, export_triton_experts

_MODULE = "tests.kernels.moe.test_modular_kernel_combinations"
_TOOLS = "tests.kernels.moe.modular_kernel_tools"

#: World size and dtype of further cases, each for our prepare/finalize and CPUUnquantizedExperts.
MORE_CASES = ((4, torch.bfloat16), (2, torch.float16), (2, torch.float32))

#: How far a row may be from the reference, relative to the reference's norm. Unquantised: roundings
#: to the dtype between the products and of the ranks' partial sums. FP8: also those to e4m3.
TOLERANCE = 0.02
FP8_TOLERANCE = 0.06


class Fp8RowsExperts(cpu_fp8_experts.Fp8RowsMixin, CPUUnquantizedExperts):
    """What `serve_without_amx` makes of vLLM's CPU experts, by a name that can be pickled.

    The harness asks experts for their scheme, vLLM never asks these, which it did not choose.
    """

    _supports_quant_scheme = staticmethod(
        lambda weight_key, activation_key: (
            (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)
        )
    )


class Fp8TorchExperts(TorchExperts):
    """Experts that take FP8 rows with any of the harness's scales."""

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is not None and activation_key is not None

    def _floats(self, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """rows e4m3, with scales of one element, `[rows, 1]` or of blocks."""
        assert rows.dtype == torch.float8_e4m3fn, "rows must arrive quantised"
        assert scales is not None, "rows must arrive with their scales"
        return _times(rows, scales)

    def _expert(
        self, rows: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, expert: int
    ) -> torch.Tensor:
        gate, up = (rows @ _times(w1, self.w1_scale[expert]).T).chunk(2, dim=1)
        middle = (torch.nn.functional.silu(gate) * up).to(self.moe_config.in_dtype)
        block = self.quant_config.block_shape
        if block is None:
            quantised = scaled_fp8_quant(
                middle, use_per_token_if_dynamic=self.quant_config.per_act_token_quant
            )
        else:
            quantised = per_token_group_quant_fp8(middle, block[1])
        return _times(*quantised) @ _times(w2, self.w2_scale[expert]).T


def _times(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 `[rows, columns]` times the scale of the tensor, the row or the block, in fp32."""
    scales = scales.float()
    if scales.ndim == 2:
        for dim in (0, 1):
            scales = scales.repeat_interleave(values.shape[dim] // scales.shape[dim], dim=dim)
    return values.float() * scales


# vLLM's quantisers and its router, which are CUDA kernels.


def scaled_fp8_quant(
    given: torch.Tensor,
    scale: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for all of `[rows, columns]` or one per row, `[1]` or `[rows, 1]`."""
    reference = _references()
    if scale is not None:
        limit = torch.finfo(torch.float8_e4m3fn).max
        return (given.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn), scale
    quantised: tuple[torch.Tensor, torch.Tensor] = (
        reference.ref_dynamic_per_token_quant(given, torch.float8_e4m3fn)
        if use_per_token_if_dynamic
        else reference.ref_dynamic_per_tensor_fp8_quant(given)
    )
    return quantised


def per_token_group_quant_fp8(
    x: torch.Tensor, group_size: int, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for every `group_size` elements of a row."""
    quantised: tuple[torch.Tensor, torch.Tensor]
    quantised = _references().native_per_token_group_quant_fp8(x.contiguous(), group_size)
    return quantised


def _references() -> Any:
    """vLLM's, of the package `tests` that lies where its tests run."""
    return importlib.import_module("tests.kernels.quant_utils")


def fused_topk(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The softmax router: weights, ids and a third result that nobody reads."""
    assert not renormalize, "the harness does not renormalise"
    weights, ids = torch.softmax(gating_output.float(), dim=-1).topk(topk, dim=-1)
    return weights, ids.to(torch.int32), ids


# What the harness is told.


def _before_import() -> None:
    """What the harness needs to be importable. Local, idempotent."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.fused_moe as fused_moe
    import vllm.model_executor.layers.fused_moe.utils as fused_moe_utils

    torch.accelerator.is_available = lambda: False
    export_triton_experts()
    fused_moe.fused_topk = fused_topk
    ops.scaled_fp8_quant = scaled_fp8_quant
    fused_moe_utils.per_token_group_quant_fp8 = per_token_group_quant_fp8


def adapt() -> None:
    """Changes the harness in this process, before the test module is imported. Idempotent."""
    _before_import()
    common: Any = importlib.import_module(f"{_TOOLS}.common")
    objects = importlib.import_module(f"{_TOOLS}.mk_objects")
    if CpuPrepareAndFinalize in objects.PREPARE_FINALIZE_INFO:
        return
    _register(objects)
    common.Config.make_env_data = _with_our_flag(common.Config.make_env_data)
    kernels = _Kernels(common)
    common.make_modular_kernel = kernels.make
    common._maybe_convert_weights_for_experts = kernels.remember_weights
    common.run_modular_kernel = kernels.run
    common.reference_moe_impl = kernels.reference


def _register(objects: Any) -> None:
    rows = objects.standard_format
    floats = [torch.bfloat16, torch.float16, torch.float32]
    fp8 = [torch.float8_e4m3fn]
    objects.register_prepare_and_finalize(
        CpuPrepareAndFinalize,
        rows,
        [*floats, *fp8],
        blocked_quantization_support=True,
        backend=BACKEND,
    )
    objects.register_experts(CPUUnquantizedExperts, rows, floats, False)
    objects.register_experts(Fp8RowsExperts, rows, fp8, True)
    objects.register_experts(Fp8TorchExperts, rows, fp8, True)


def _with_our_flag(original: Any) -> Any:
    """Names us where a configuration made without EngineArgs does: beside the carrier."""

    @functools.wraps(original)
    def make_env_data(config: Any) -> Any:
        vllm_config, environment = original(config)
        if config.all2all_backend() == BACKEND:
            vllm_config.parallel_config.all2all_backend = CARRIER
            vllm_config.additional_config = {KEY: BACKEND}
        return vllm_config, environment

    return make_env_data


class _Layer(torch.nn.Module):
    """As much of vLLM's RoutedExperts as its experts and our code look at."""

    def __init__(self, moe_config: Any, expert_map: torch.Tensor | None, weights: Any) -> None:
        super().__init__()
        self.layer_name = "of the harness"
        self.moe_config = moe_config
        self.activation = moe_config.activation
        self.expert_map = expert_map
        for name in ("w13", "w2"):
            given = name.replace("13", "1")
            self.keep(f"{name}_weight", getattr(weights, given))
            self.keep(f"{name}_weight_scale_inv", getattr(weights, f"{given}_scale"))

    def keep(self, name: str, value: torch.Tensor | None) -> None:
        """A parameter that shares the value's memory; none for None."""
        if value is not None:
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def _replace_quant_method(self, quant_method: Any) -> None:
        self.quant_method = quant_method


class _Method:
    """A quant method that has made the harness's kernel, as our code looks at it."""

    moe_quant_config = None

    def __init__(self, kernel: Any, *, ours: bool) -> None:
        self._made, self._ours = kernel, ours
        self.moe_kernel: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        self.moe_kernel, experts = self._made, self._made.fused_experts
        left_to_us = self._ours and isinstance(experts, cpu_fp8_experts.Fp8RowsMixin)
        if isinstance(experts, CPUUnquantizedExperts) and not left_to_us:
            experts.process_weights_after_loading(layer)


class _Kernels:
    """The harness's functions in one rank, each around the original."""

    def __init__(self, common: Any) -> None:
        self._make = common.make_modular_kernel
        self._convert = common._maybe_convert_weights_for_experts
        self._run = common.run_modular_kernel
        self._reference = common.reference_moe_impl
        self._weights: Any = None  # of this rank; the harness reads them after `make`
        self._output: torch.Tensor | None = None

    def remember_weights(self, config: Any, rank_weights: Any) -> Any:
        """In the place of what reorders weights for other experts."""
        self._weights = self._convert(config, rank_weights)
        return self._weights

    def make(self, config: Any, vllm_config: Any, quant_config: Any) -> Any:
        """vLLM's kernel; where our flag is given, with our prepare/finalize."""
        kernel = self._make(config, vllm_config, quant_config)
        moe = kernel.fused_experts.moe_config
        layer = _Layer(moe, _expert_map(config, moe), self._weights)
        ours = config.all2all_backend() == BACKEND
        layer.quant_method = _Method(kernel, ours=ours)
        if ours:
            # The harness gives every rank a scale of its own. Our code makes them one, in place,
            # where its reference too finds it.
            layer.keep("w13_input_scale", quant_config.a1_scale)
            method.install_after_loading(layer.quant_method)
        layer.quant_method.process_weights_after_loading(layer)
        self._weights.w1, self._weights.w2 = layer.w13_weight.data, layer.w2_weight.data
        kernel, expected = layer.quant_method.moe_kernel, config.prepare_finalize_type
        made = type(kernel.prepare_finalize)
        assert made is expected, f"{made.__name__} was made for {expected.__name__}"
        if config.all2all_backend() == BACKEND:
            kernel.apply = functools.partial(_after_other_tokens, kernel.apply)
        return kernel

    def run(self, pgi: Any, vllm_config: Any, config: Any, weights: Any, tensors: Any) -> Any:
        """The harness's, and the rows that went through our exchange are counted."""
        before = _counters(config)
        with ranks.in_step():
            self._output = self._run(pgi, vllm_config, config, weights, tensors)
        if before is not None:
            after = _counters(config) or before
            moved = tuple(int(now - then) for now, then in zip(after, before, strict=True))
            once = asked_of(tensors.topk_ids, config.num_local_experts, pgi.rank)
            asked = tuple(2 * count for count in once)
            assert moved == asked, (
                f"rounds, tokens, destinations and remote ones are {moved}, and the router asks "
                f"for {asked}"
            )
        return self._output

    def reference(self, config: Any, weights: Any, tensors: Any) -> torch.Tensor:
        """The harness's reference; the output that it is made for is held against it here."""
        expected: torch.Tensor = self._reference(config, weights, tensors)
        if self._output is not None:
            tolerance = TOLERANCE if config.quant_dtype is None else FP8_TOLERANCE
            within(self._output, expected, tolerance)
        return expected


def _after_other_tokens(apply: Any, **named: Any) -> Any:
    """The second of two rounds that differ in their tokens alone; rows of the first would show."""
    apply(**{**named, "hidden_states": named["hidden_states"].flip(0)})
    return apply(**named)


def asked_of(topk_ids: torch.Tensor, num_local_experts: int, rank: int) -> tuple[int, ...]:
    """What one round of `[tokens, top_k]` ids adds to a rank's counters, see `_counters`. Local."""
    owners = [set(row) for row in (topk_ids // num_local_experts).tolist()]
    return 1, len(owners), sum(map(len, owners)), sum(len(ranks - {rank}) for ranks in owners)


def within(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raises AssertionError unless every row of `[tokens, hidden]` is near its reference. Local."""
    off = (output.float() - expected.float()).norm(dim=1)
    size = expected.float().norm(dim=1)
    wrong = torch.nonzero(~(off <= tolerance * size)).flatten().tolist()
    if wrong:
        worst = (off / size).nan_to_num(float("inf")).max().item()
        raise AssertionError(
            f"{len(wrong)} of {len(output)} rows are off by more than {tolerance} of their norm, "
            f"the worst by {worst:.3g}: rows {wrong[:16]}"
        )
    print(f"rows are off by {(off / size).max().item():.2e} of their norm at most")


def _expert_map(config: Any, moe: Any) -> torch.Tensor | None:
    if config.world_size == 1:
        return None
    parallel = moe.moe_parallel_config
    placed: torch.Tensor = determine_expert_map(parallel.ep_size, parallel.ep_rank, config.E)[1]
    return placed


def _counters(config: Any) -> tuple[int, ...] | None:
    """Rounds, tokens, destinations and remote destinations of our exchanges so far."""
    if config.all2all_backend() != BACKEND:
        return None
    manager: Any = get_ep_group().device_communicator.all2all_manager
    exchanges = manager.pool.exchanges
    if not exchanges:
        return (0, 0, 0, 0)
    return tuple(exchanges[0].stats()[:4])  # one exchange's counters are the whole workspace's


# What pytest is told.


def pytest_collection() -> None:
    """After all conftests, before test modules are imported."""
    ranks.in_every_rank(adapt)
    adapt()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Adds `MORE_CASES` to the file's own."""
    if metafunc.module.__name__ != _MODULE:
        return
    for mark in metafunc.definition.iter_markers("parametrize"):
        cases = mark.args[1]
        if not any(CpuPrepareAndFinalize in case for case in cases if isinstance(case, tuple)):
            continue
        known = set(map(repr, cases))
        cases += [case for case in _more_cases(cases) if repr(case) not in known]


def _more_cases(cases: list[Any]) -> Iterator[Any]:
    for k, n, e, _, quant, activation, ours, experts, _ in list(cases):
        if ours is CpuPrepareAndFinalize and experts is CPUUnquantizedExperts:
            for world_size, dtype in MORE_CASES:
                yield k, n, e, dtype, quant, activation, ours, experts, world_size


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Our cases need none of the packages that the multi-GPU test asks for."""
    for item in items:
        ours = getattr(item, "callspec", None)
        if ours and ours.params.get("prepare_finalize_type") is CpuPrepareAndFinalize:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skipif"]
