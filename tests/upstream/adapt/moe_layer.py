"""`tests/kernels/moe/test_moe_layer.py` of vLLM, through our backend.

Our backend joins the file's tables of backends, with what it supports. A check joins its ranks: a
subcase fails if its rows did not go through our exchange. `adapt` changes the module in pytest's
process when its tests are collected, and in every rank before it begins.

The file's inputs are equal on all ranks, and so small that outputs of zeros lie within its
tolerances. Here each data-parallel rank has its own inputs (`_own_inputs`), so large
(`input_scale`) that a missing row shows.

The reference is vLLM's `torch_experts` instead of Triton's kernel. What vLLM's expert load
balancing lacks on CPUs is the adapter's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER, KEY
from moe_nvlink_plugin.integration.vllm.balancing import eplb

from . import ranks

_MODULE = "tests.kernels.moe.test_moe_layer"

#: Dispatch formats by the tests' names. "fp8" and "modelopt_fp8" have one scale per tensor, for
#: which neither vLLM nor we have experts on CPUs without AMX.
ON_CPU = {None, "fp8_blocked"}
#: Experts with data parallelism, data or tensor parallelism alone, sequence parallel.
SUPPORTED = (True, False, False, True)

#: Factors of a rank's inputs, by data-parallel rank.
FACTORS = (1.0, -1.0, 0.75, -0.75)

#: Of the inputs' size by hidden size, unquantised and FP8: outputs that are large beside the file's
#: absolute tolerances, with roundings that are small beside them. Measured: rows have 0.2 to 5
#: (FP8: 0.05 to 1), and the largest deviation is at most 0.9 of what is tolerated. Part of it is
#: the reference's, which rounds the routed sum and the shared experts' output before it adds them.
SCALES = ({256: 16.0, 512: 8.0, 2048: 4.0}, {256: 8.0, 512: 4.2, 2048: 1.4})
#: More where 64 experts share a token's weights; a gate makes up for it with larger logits.
MORE_EXPERTS = 1.6
#: Less where a projection before and one after the experts enlarge what goes through them.
TRANSFORMED = {256: 0.75, 512: 0.4, 2048: 0.2}


def adapt() -> None:
    """Fits the test module, of this process, to our backend. Local, idempotent."""
    module: Any = importlib.import_module(_MODULE)
    if BACKEND in module.BACKENDS:
        return
    module.BACKENDS.insert(0, BACKEND)  # in place: parametrize marks hold the list
    module.BACKEND_SUPPORTED_QUANTS[BACKEND] = ON_CPU
    module.BACKEND_EP_DP_TP_SUPPORT[BACKEND] = SUPPORTED
    module.EPLB_SUPPORTED_BACKENDS.append(BACKEND)
    _choose_backend(module)
    module.sp_wrapper = functools.partial(_sequence_parallel, module)
    module._run_one_config = functools.partial(_run_one_config, module, module._run_one_config)
    from tests.kernels.utils import torch_experts

    module.fused_experts = functools.partial(_reference, torch_experts)
    module.make_test_weights = _Remembered(module.make_test_weights)


# In pytest's process.


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """When the module has been imported, and before its lists of parameters are read."""
    if metafunc.module.__name__ != _MODULE:
        return
    adapt()
    ranks.in_every_rank(adapt)
    generate = metafunc.module.generate_valid_test_configs
    if not isinstance(generate, functools.partial):
        metafunc.module.generate_valid_test_configs = functools.partial(_sorted, generate)


def _sorted(generate: Callable[..., list[Any]], *args: Any, **named: Any) -> list[Any]:
    """vLLM's subcases, those of equal weights together."""
    subcases = generate(*args, **named)
    return sorted(subcases, key=lambda c: (c.m, c.num_experts, c.use_routed_input_transform))


# How a test's configuration asks for us.


def _choose_backend(module: Any) -> None:
    """What the command line does with `--all2all-backend moe_nvlink`, for the two classes."""
    ours: list[Any] = []
    make_parallel, make_config = module.ParallelConfig, module.VllmConfig

    def parallel_config(**named: Any) -> Any:
        assert named["all2all_backend"] == BACKEND
        named["all2all_backend"] = CARRIER
        with eplb.allowed():
            ours.append(make_parallel(**named))
        return ours[-1]

    def vllm_config(**named: Any) -> Any:
        assert any(named["parallel_config"] is config for config in ours)
        with eplb.allowed():
            try:
                return make_config(additional_config={KEY: BACKEND}, **named)
            except UnsupportedError as refusal:
                pytest.skip(f"our backend refuses: {refusal}")

    module.ParallelConfig, module.VllmConfig = parallel_config, vllm_config


# In a rank.


def _run_one_config(module: Any, run: Callable[..., None], *args: Any, **named: Any) -> None:
    """One subcase: vLLM's, with inputs of this rank's own and a look at who moved the rows."""
    bound = inspect.signature(run).bind(*args, **named)
    bound.apply_defaults()
    case = SimpleNamespace(**bound.arguments)
    assert case.backend == BACKEND
    bound.arguments["input_scale"] = _input_scale(case) * FACTORS[case.dp_rank % len(FACTORS)]
    bound.arguments["test_body_fn"] = functools.partial(_through_us, case.test_body_fn)
    own = functools.partial(_own_inputs, module.setup_moe_test_data, case.dp_rank)
    # As in vLLM's workers. The file records gradients for nobody, and gloo, which gathers a tensor
    # parallel group's rows where vLLM's library for the CPU has no shared memory for that, writes
    # no output that has some.
    inference = torch.no_grad()
    inputs = mock.patch.object(module, "setup_moe_test_data", own)
    with ranks.in_step(), inference, inputs:
        return run(*bound.args, **bound.kwargs)


def _input_scale(case: Any) -> float:
    scale = SCALES[case.quantization is not None][case.k]
    if case.num_experts > 8 and not case.use_gate:
        scale *= MORE_EXPERTS
    return scale * TRANSFORMED[case.k] if case.use_routed_input_transform else scale


def _own_inputs(make: Callable[..., Any], dp_rank: int, **named: Any) -> Any:
    """The rows in another order on each rank, and routed to other experts."""
    data = make(**named)
    return dataclasses.replace(
        data,
        hidden_states=data.hidden_states.roll(dp_rank, 0),
        router_logits=data.router_logits.roll(dp_rank, -1),
    )


def _through_us(body: Callable[..., Any], **named: Any) -> Any:
    """The test's body; AssertionError if its rows did not go through our exchange, once a layer."""
    from vllm.distributed import get_ep_group

    from moe_nvlink_plugin.integration.vllm.all2all_manager import MoeNvlinkAll2AllManager
    from moe_nvlink_plugin.integration.vllm.moe.prepare_finalize import MoeNvlinkPrepareAndFinalize

    manager = get_ep_group().device_communicator.all2all_manager
    assert isinstance(manager, MoeNvlinkAll2AllManager), f"the manager is {type(manager).__name__}"
    moe = named["moe_layer"].moe_config
    ours = named["moe_layer"]._quant_method.moe_kernel.prepare_finalize
    assert isinstance(ours, MoeNvlinkPrepareAndFinalize), f"not ours: {type(ours).__name__}"
    exchange = ours._exchange
    before = exchange.stats()
    outputs = body(**named)
    after = exchange.stats()
    rounds = 2 if named["vllm_config"].parallel_config.enable_eplb else 1
    rows = rounds * -(-named["m"] // moe.sp_size)  # of a sequence's slice; the last is padded
    counted = (after.rounds - before.rounds, after.tokens - before.tokens)
    assert counted == (rounds, rows), f"{counted} rounds and rows of us, not {(rounds, rows)}"
    # With balancing the file compares our layer with itself, rebalanced. That is equal to the
    # reference as well, and an error that both have shows.
    return named["baseline_output"], outputs[1]


def _sequence_parallel(
    module: Any, layer: Any, is_sequence_parallel: bool | None = None
) -> Callable[..., torch.Tensor]:
    """The file's `sp_wrapper`, which hands back the rows of the first slice alone: here of all."""
    if is_sequence_parallel is None:
        is_sequence_parallel = layer.moe_config.moe_parallel_config.is_sequence_parallel
    if not is_sequence_parallel:
        return layer  # type: ignore[no-any-return]

    def sliced(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        mine = (module.sequence_parallel_chunk(t) for t in (hidden_states, router_logits))
        gathered: torch.Tensor = module.tensor_model_parallel_all_gather(layer(*mine), 0)
        return gathered[: hidden_states.shape[0]]

    return sliced


# vLLM's references and weights.


def _reference(
    torch_experts: Callable[..., torch.Tensor],
    *,
    hidden_states: torch.Tensor,
    quant_config: Any,
    apply_router_weight_on_input: bool,
    topk_weights: torch.Tensor,
    **named: Any,
) -> torch.Tensor:
    """vLLM's torch reference, called as the file calls `fused_experts`."""
    assert quant_config.quant_dtype is None
    assert not apply_router_weight_on_input
    return torch_experts(hidden_states, topk_weight=topk_weights, **named)


class _Remembered:
    """`make_test_weights`, which draws the same large weights for many subcases in a row."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._asked: Any = None
        self._drawn: Any = None
        self._state_after: Any = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        """As drawn the last time, if the generator stands where it stood then."""
        asked = (args, named, torch.get_rng_state().numpy().tobytes())
        if asked != self._asked:
            self._asked = self._drawn = None  # memory for two is not there
            self._drawn = self._make(*args, **named)
            self._asked, self._state_after = asked, torch.get_rng_state()
        torch.set_rng_state(self._state_after)
        return self._drawn
