"""A stand-in for vLLM's registry of prepare/finalize factories (pull request 50556).

Written after the pull request's description, because no release has it: the base class, the
decorator, what asks a factory, and an option and a configuration that take any name.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from vllm import config as vllm_config
from vllm.engine import arg_utils
from vllm.model_executor.layers.fused_moe import all2all_utils, prepare_finalize

from moe_nvlink_plugin.integration.vllm.plugin import flag

_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.unquantized"
FACTORIES = "_PREPARE_FINALIZE_FACTORIES"
REGISTER = "register_moe_prepare_finalize_factory"
BASE = "MoEPrepareFinalizeFactory"


class Factory:
    """The base class of factories."""

    backend_name: str
    supports_sequence_parallel: bool = False

    @classmethod
    def create(
        cls,
        *,
        moe: Any,
        quant_config: Any,
        routing_tables: Any,
        all2all_manager: Any,
        allow_new_interface: bool,
        use_monolithic: bool,
        eep_stage: bool,
    ) -> Any:
        raise NotImplementedError


@vllm_config.config
class OpenParallelConfig(vllm_config.ParallelConfig):  # type: ignore[misc]
    """vLLM's, which takes any name."""

    all2all_backend: str = "allgather_reducescatter"


class Registry:
    """The registry, in vLLM's modules until the test ends.

    Attributes:
        factories: what was registered, by name.
        asked: names for which a factory was asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.factories: dict[str, Any] = {}
        self.asked: list[str] = []
        self._built_in = all2all_utils.maybe_make_prepare_finalize
        self._add_choice = flag.add_choice
        for owner, name, value in (
            (prepare_finalize, BASE, Factory),
            (all2all_utils, FACTORIES, self.factories),
            (all2all_utils, REGISTER, self.register),
            (all2all_utils, "maybe_make_prepare_finalize", self.make),
            (importlib.import_module(_ORACLE), "maybe_make_prepare_finalize", self.make),
            (arg_utils, "ParallelConfig", OpenParallelConfig),
            (flag, "add_choice", self.add_choice),
        ):
            monkeypatch.setattr(owner, name, value, raising=False)
        # Of 0.32's and 0.33's command line, which removes one of the choices before it is built.
        closed, get_kwargs = vllm_config.ParallelConfig, arg_utils.get_kwargs
        monkeypatch.setattr(
            arg_utils,
            "get_kwargs",
            lambda cls: get_kwargs(closed if cls is OpenParallelConfig else cls),
        )

    def register(self, cls: Any) -> Any:
        """The decorator. A name that is there already is refused."""
        if cls.backend_name in self.factories:
            raise ValueError(f"{cls.backend_name} is registered")
        self.factories[cls.backend_name] = cls
        return cls

    def make(self, moe: Any, quant_config: Any, all2all_manager: Any = None, **more: Any) -> Any:
        """vLLM's function that makes a prepare/finalize: it asks a factory, if there is one."""
        given = {"moe": moe, "quant_config": quant_config, **more}
        chosen = moe.moe_parallel_config.all2all_backend
        factory = self.factories.get(chosen)
        if factory is None or not moe.moe_parallel_config.use_all2all_kernels:
            return self._built_in(all2all_manager=all2all_manager, **given)
        self.asked.append(chosen)
        manager = all2all_manager or all2all_utils.get_ep_all2all_manager()
        usual: dict[str, Any] = dict.fromkeys(("use_monolithic", "eep_stage"), False)
        return factory.create(all2all_manager=manager, **usual | {"routing_tables": None} | given)

    def add_choice(self, parser: Any) -> None:
        """What the plugin does to the command line, whose option has no choices any more."""
        action = parser._option_string_actions["--all2all-backend"]
        action.metavar, action.choices = list(action.choices), None
        self._add_choice(parser)
