"""SGLang's types for the dispatchers: the real ones where SGLang is installed, else stand-ins.

A stand-in has the names and fields of SGLang's type and nothing else; `integration.sglang.compat`
lists them, and the drift test holds that list against SGLang's source. Stand-ins are in sys.modules
only inside of `importable()`.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

IS_REAL = importlib.util.find_spec("sglang") is not None


class DispatchOutputFormat(enum.Enum):
    STANDARD = "standard"
    FLASHINFER = "flashinfer"


class CombineInputFormat(enum.Enum):
    STANDARD = "standard"
    FLASHINFER = "flashinfer"


class BaseDispatcher:
    def __init__(self) -> None:
        self.quant_config: dict[str, Any] = {}
        self.runner_backend = None

    def set_quant_config(self, quant_config: dict[str, Any]) -> None:
        self.quant_config = quant_config


class StandardDispatchOutput(NamedTuple):
    hidden_states: Any
    hidden_states_scale: Any
    topk_output: Any
    hidden_states_pre_quant: Any = None

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.STANDARD


class StandardCombineInput(NamedTuple):
    hidden_states: Any

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.STANDARD


class FlashinferDispatchOutput(NamedTuple):
    hidden_states: Any
    hidden_states_scale: Any
    topk_output: Any
    moe_output: Any = None
    output_dtype: Any = None

    @property
    def format(self) -> DispatchOutputFormat:
        return DispatchOutputFormat.FLASHINFER


class FlashinferCombineInput(NamedTuple):
    hidden_states: Any

    @property
    def format(self) -> CombineInputFormat:
        return CombineInputFormat.FLASHINFER


class StandardTopKOutput(NamedTuple):
    topk_weights: Any
    topk_ids: Any
    router_logits: Any


class TritonKernelTopKOutput(NamedTuple):
    a_ragged_metadata: Any
    gather_indx: Any
    scatter_indx: Any
    gate_scal: Any
    n_expts_act: int


class BypassedTopKOutput(NamedTuple):
    hidden_states: Any
    raw_router_logits: Any
    topk_config: Any

    def to_standard(self, layer_id: int | None = None) -> Any:
        raise NotImplementedError


class PackedTopKOutput(NamedTuple):
    packed_topk_ids: Any
    router_logits: Any


class TopKOutputChecker:
    @staticmethod
    def format_is_standard(topk_output: Any) -> bool:
        return isinstance(topk_output, StandardTopKOutput)

    @staticmethod
    def format_is_triton_kernels(topk_output: Any) -> bool:
        return isinstance(topk_output, TritonKernelTopKOutput)

    @staticmethod
    def format_is_bypassed(topk_output: Any) -> bool:
        return isinstance(topk_output, BypassedTopKOutput)


class FusedOpPool:
    _fused_funcs: dict[tuple[str, str], Any] = {}  # noqa: RUF012

    @classmethod
    def get_fused_func(cls, dispatch_name: str, runner_name: str) -> Any:
        return cls._fused_funcs.get((dispatch_name, runner_name))


def register_fused_func(a2a_backend_name: str, runner_backend_name: str) -> Callable[[Any], Any]:
    def decorator(function: Any) -> Any:
        key = (a2a_backend_name, runner_backend_name)
        if key in FusedOpPool._fused_funcs:
            raise ValueError(f"{key} is already registered")
        FusedOpPool._fused_funcs[key] = function
        return function

    return decorator


_MOE = "sglang.srt.layers.moe"
_MODULES: dict[str, dict[str, Any]] = {
    f"{_MOE}.token_dispatcher": {"FlashinferDispatchOutput": FlashinferDispatchOutput},
    f"{_MOE}.token_dispatcher.base": {
        "BaseDispatcher": BaseDispatcher,
        "CombineInputFormat": CombineInputFormat,
    },
    f"{_MOE}.token_dispatcher.standard": {
        "StandardDispatchOutput": StandardDispatchOutput,
        "StandardCombineInput": StandardCombineInput,
    },
    f"{_MOE}.token_dispatcher.flashinfer": {"FlashinferCombineInput": FlashinferCombineInput},
    f"{_MOE}.topk": {
        "StandardTopKOutput": StandardTopKOutput,
        "TritonKernelTopKOutput": TritonKernelTopKOutput,
        "BypassedTopKOutput": BypassedTopKOutput,
        "PackedTopKOutput": PackedTopKOutput,
        "TopKOutputChecker": TopKOutputChecker,
    },
    f"{_MOE}.moe_runner.base": {
        "FusedOpPool": FusedOpPool,
        "register_fused_func": register_fused_func,
    },
    "sglang.srt.layers.dp_attention": {"get_dp_global_num_tokens": lambda: None},
    "sglang.srt.runtime_context": {
        "get_forward": lambda: SimpleNamespace(sp_active=False),
        "get_parallel": lambda: SimpleNamespace(attn_tp_size=1),
    },
}


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """SGLang's types can be imported inside."""
    if IS_REAL:
        yield
        return
    made: dict[str, ModuleType] = {}
    for name in _MODULES:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
            module.__path__ = []
    for name, contents in _MODULES.items():
        vars(made[name]).update(contents)
    with mock.patch.dict(sys.modules, made):
        yield
