"""vLLM's registry of prepare/finalize factories, which no release has: with a stand-in for it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import all2all_utils, prepare_finalize

from moe_nvlink_plugin.errors import ConfigError, PeerError, UnsupportedError
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, CARRIER, KEY, OurManager
from moe_nvlink_plugin.integration.vllm.moe import factory
from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
from moe_nvlink_plugin.integration.vllm.moe.method import MoeNvlinkFusedMoEMethod
from moe_nvlink_plugin.integration.vllm.plugin import flag
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm import vllm_config, vllm_registry
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import Weights
from tests.integration.vllm.vllm_registry import Factory, OpenParallelConfig, Registry

EP_SIZE = 2
ASKED = {KEY: BACKEND}
#: What a factory is asked with, beside a layer's configuration and a manager.
OTHERS: dict[str, Any] = {
    **dict.fromkeys(("quant_config", "routing_tables")),
    **dict.fromkeys(("use_monolithic", "eep_stage"), False),
    "allow_new_interface": True,
}


@pytest.fixture(autouse=True)
def no_warning_yet() -> None:
    factory._warn.cache_clear()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    return Registry(monkeypatch)


class Manager(OurManager):
    """Our manager of one rank, as far as a factory looks at it."""

    world_size = EP_SIZE

    def __init__(self, pool: Any) -> None:
        self.pool = pool


# The factory.


def test_the_factory_is_registered_once(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    factory.put_in_place()
    made = registry.factories[BACKEND]
    factory.put_in_place()  # the stand-in refuses a second one
    assert registry.factories == {BACKEND: made}
    assert issubclass(made, Factory)
    assert made.supports_sequence_parallel, "as under the carrier"
    assert caplog.text == ""


def _loaded(group: ThreadGroup, weights: Weights, *, named: bool = False) -> tuple[Any, Manager]:
    """The rank's layer, once vLLM has loaded it, and its manager."""
    manager = Manager(vllm_experts.join(group))
    backend = BACKEND if named else CARRIER
    return vllm_experts.loaded(group.rank, group.size, weights, backend=backend), manager


def _by_name(layer: Any, manager: Any, **more: Any) -> Any:
    """What vLLM makes for the layer's configuration if that has our name."""
    moe = layer.moe_config
    named = replace(moe, moe_parallel_config=replace(moe.moe_parallel_config, **_NAMED))
    experts = layer.quant_method.moe_kernel.fused_experts
    return all2all_utils.maybe_make_prepare_finalize(
        named,
        experts.quant_config,
        **{"allow_new_interface": True, "all2all_manager": manager, **more},
    )


_NAMED: dict[str, Any] = {"all2all_backend": BACKEND}


@pytest.mark.usefixtures("cpu_ranks")
def test_a_kernel_by_name_answers_as_our_layer(registry: Registry) -> None:
    weights = Weights(0)
    factory.put_in_place()

    def rank_main(group: ThreadGroup) -> None:
        layer, manager = _loaded(group, weights)
        theirs = layer.quant_method.moe_kernel
        made = _by_name(layer, manager)
        assert made.activation_format is mk.FusedMoEActivationFormat.Standard  # vLLM asks first
        kernel = mk.FusedMoEKernel(made, theirs.fused_experts)
        assert type(made) is type(theirs.prepare_finalize) is CpuPrepareAndFinalize
        assert made._exchange is theirs.prepare_finalize._exchange
        assert made.dispatch_format == theirs.prepare_finalize.dispatch_format
        again = mk.FusedMoEKernel(made, theirs.fused_experts)  # as vLLM's wrappers do

        expected = vllm_experts.check_rows(layer, group.rank, weights)
        for one in (kernel, again):
            layer.quant_method.moe_kernel = one
            assert torch.equal(vllm_experts.check_rows(layer, group.rank, weights), expected)

    run_ranks(EP_SIZE, rank_main)
    assert registry.asked == [BACKEND] * EP_SIZE


@pytest.mark.usefixtures("cpu_ranks")
def test_our_layer_is_served_by_our_method_alone(registry: Registry) -> None:
    """Also one whose own configuration has our name, which vLLM would ask the factory for."""
    weights = Weights(0)
    factory.put_in_place()

    def rank_main(group: ThreadGroup) -> None:
        layer, _manager = _loaded(group, weights, named=True)
        assert type(layer.quant_method) is MoeNvlinkFusedMoEMethod
        assert layer.moe_config.moe_parallel_config.all2all_backend == CARRIER
        vllm_experts.check_rows(layer, group.rank, weights)

    run_ranks(EP_SIZE, rank_main)
    assert registry.asked == []


@pytest.mark.usefixtures("cpu_ranks")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"use_monolithic": True}, "route inside their kernel.*--moe-backend"),
        ({"routing_tables": ("a", "b", "c")}, "--expert-placement-strategy"),
        ({"eep_stage": True}, "--enable-elastic-ep"),
        ({"all2all_manager": object()}, "has object instead of our manager"),
    ],
)
def test_what_a_factory_cannot_make_is_refused(
    registry: Registry, given: dict[str, Any], told: str
) -> None:
    factory.put_in_place()

    def rank_main(group: ThreadGroup) -> None:
        layer, manager = _loaded(group, Weights(0))
        with pytest.raises(UnsupportedError, match=f'"{BACKEND}": .*{told}'):
            _by_name(layer, manager, **given)
        layer.moe_config.skip_final_all_reduce = True
        with pytest.raises(UnsupportedError, match="Inkling"):
            factory.create(None, moe=layer.moe_config, all2all_manager=manager, **OTHERS)

    run_ranks(EP_SIZE, rank_main)


@pytest.mark.usefixtures("cpu_ranks")
def test_experts_that_one_rank_refuses_are_refused_on_all(registry: Registry) -> None:
    factory.put_in_place()

    def rank_main(group: ThreadGroup) -> None:
        layer, manager = _loaded(group, Weights(0))
        experts = layer.quant_method.moe_kernel.fused_experts
        if group.rank == 0:
            experts.workspace_dtype = lambda _act_dtype: torch.float64
        expected = UnsupportedError if group.rank == 0 else PeerError
        with pytest.raises(expected, match="reduces its rows into torch.float64"):
            mk.FusedMoEKernel(_by_name(layer, manager), experts)

    run_ranks(EP_SIZE, rank_main)


# A registry that we do not know, and none.


class OtherCreate(Factory):
    @classmethod
    def create(cls, *, moe: Any, quant_config: Any, group: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


class NoSequences:
    backend_name: str
    create = Factory.create


class NoFunction(Factory):
    create = "of another kind"  # type: ignore[assignment]


def _refuse(_cls: Any) -> None:
    raise TypeError("two arguments are needed")


#: What stands under one of the registry's names, None for nothing, and what is told of it.
OTHERS_REGISTRIES: dict[str, tuple[str, Any, str]] = {
    "no base": (vllm_registry.BASE, None, "it lacks .*MoEPrepareFinalizeFactory"),
    "no decorator": (vllm_registry.REGISTER, None, f"it lacks .*{vllm_registry.REGISTER}"),
    "no table": (vllm_registry.FACTORIES, None, f"it lacks .*{vllm_registry.FACTORIES}"),
    "no sequences": (
        *(vllm_registry.BASE, NoSequences, "it lacks .*Factory.supports_sequence_parallel"),
    ),
    "another create": (
        vllm_registry.BASE,
        OtherCreate,
        r"takes \['moe', 'quant_config', 'group'\], we know \['moe', ",
    ),
    "no function": (vllm_registry.BASE, NoFunction, "TypeError: .*not a callable"),
    "a decorator that keeps nothing": (
        *(vllm_registry.REGISTER, lambda cls: cls, "it has None for moe_nvlink"),
    ),
    "one that refuses": (vllm_registry.REGISTER, _refuse, "TypeError: two arguments are needed"),
    "a list": (vllm_registry.FACTORIES, [BACKEND], "AttributeError: 'list' object"),
    "another's factory": (
        *(vllm_registry.FACTORIES, {BACKEND: OtherCreate}, "it has .*OtherCreate.* for moe"),
    ),
}


@pytest.mark.parametrize(
    ("name", "value", "told"), OTHERS_REGISTRIES.values(), ids=OTHERS_REGISTRIES
)
@pytest.mark.usefixtures("registry")
def test_another_registry_is_left_alone_with_one_warning(
    name: str,
    value: Any,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = prepare_finalize if name == vllm_registry.BASE else all2all_utils
    if value is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, value)
    before = copy.copy(getattr(all2all_utils, vllm_registry.FACTORIES, {}))
    with caplog.at_level(logging.WARNING):
        factory.put_in_place()
        factory.put_in_place()
    (warning,) = caplog.records
    assert re.search(told, warning.getMessage())
    assert getattr(all2all_utils, vllm_registry.FACTORIES, {}) == before


def test_without_a_registry_nothing_changes(caplog: pytest.LogCaptureFixture) -> None:
    before = dict(vars(all2all_utils)), dict(vars(prepare_finalize))
    factory.put_in_place()
    assert (dict(vars(all2all_utils)), dict(vars(prepare_finalize))) == before
    assert caplog.text == ""


# The name, where vLLM takes any.


@pytest.mark.parametrize(
    ("arguments", "backend", "additional"),
    [
        ([], CARRIER, {}),
        (["--all2all-backend", "moe_nvlink"], CARRIER, ASKED),
        (["--all2all-backend", "deepep_v2"], "deepep_v2", {}),
        (["--all2all-backend", "somebody_elses"], "somebody_elses", {}),
    ],
)
@pytest.mark.usefixtures("registry")
def test_the_command_line_takes_every_name(
    arguments: list[str], backend: str, additional: dict[str, Any]
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser = vllm_config.parser()
    engine_args = AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))
    assert engine_args.all2all_backend == backend
    assert engine_args.additional_config == additional
    option = parser._option_string_actions["--all2all-backend"]
    assert option.choices is None
    assert option.metavar.count(BACKEND) == 1
    assert BACKEND in parser.format_help()


def _from_parallel_config(args: Any) -> Any:
    """As for a user who makes a ParallelConfig: without what we do to EngineArgs."""
    flag.patch_engine_args()
    return type(args).create_engine_config.moe_nvlink_original(args)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "create", [lambda args: args.create_engine_config(), _from_parallel_config]
)
def test_python_takes_the_name(create: Callable[[Any], Any], checkpoint: Path) -> None:
    config = create(vllm_config.args_with_us(checkpoint, additional_config={"mine": 1}))
    assert isinstance(config.parallel_config, OpenParallelConfig)
    assert config.parallel_config.all2all_backend == CARRIER
    assert {key: config.additional_config[key] for key in ("mine", KEY)} == {"mine": 1, **ASKED}


@pytest.mark.usefixtures("registry")
def test_additional_config_must_be_a_dict(checkpoint: Path) -> None:
    config = _from_parallel_config(vllm_config.args_with_us(checkpoint))
    config.parallel_config.all2all_backend, config.additional_config = BACKEND, object()
    with pytest.raises(ConfigError, match="must be a dict"):
        flag.take_name(config)
