"""Our worker class: where vLLM takes it, where it does not, and what it tells our exchange."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from moe_nvlink_plugin.errors import ExchangeStateError, UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Geometry, Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.vllm import backend
from moe_nvlink_plugin.integration.vllm.all2all_manager import MoeNvlinkAll2AllManager
from moe_nvlink_plugin.integration.vllm.draft import draft_head
from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput
from moe_nvlink_plugin.integration.vllm.plugin import worker
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.core.exchange.small_exchange import assert_still_works, config
from tests.integration.vllm.moe.vllm_layer import pool_of
from tests.integration.vllm.vllm_config import config_with_us
from tests.support import small_head

CPU = "vllm.v1.worker.cpu_worker.CPUWorker"


class Manager(SimpleNamespace, backend.OurManager):
    """As much of our manager as a worker uses."""


def in_ep_group(manager: object, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager=manager))
    monkeypatch.setattr("vllm.distributed.get_ep_group", lambda: group)


def ours(vllms: type) -> Any:
    """Our worker above a class that stands for vLLM's."""
    return type("Made", (worker.TellsOurExchange, vllms), {})()


@pytest.fixture
def vllms_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's base class of managers, without vLLM's groups."""

    def init(self: Any, cpu_group: Any, tcp_store_group: Any = None) -> None:
        self.rank, self.world_size = cpu_group.rank, cpu_group.size

    monkeypatch.setattr(All2AllManagerBase, "__init__", init)


def test_the_flag_makes_the_worker_ours(checkpoint: Path) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    asked = config_with_us(checkpoint)
    assert worker.is_in_place(asked)
    found = resolve_obj_by_qualname(asked.parallel_config.worker_cls)
    assert issubclass(found, (worker.TellsOurExchange, resolve_obj_by_qualname(CPU)))
    assert found.__mro__[1] is worker.TellsOurExchange, "in front of vLLM's"
    worker.put_in_place(asked)
    assert resolve_obj_by_qualname(asked.parallel_config.worker_cls) is found, "once more: the same"


def test_a_users_own_worker_stays(checkpoint: Path) -> None:
    config = config_with_us(checkpoint, worker_cls="some.where.Worker")
    assert config.parallel_config.worker_cls == "some.where.Worker"
    assert not worker.is_in_place(config)


def test_startup_ends_when_the_worker_has_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class VllmsWorker:
        model_runner = SimpleNamespace(
            lora_manager=SimpleNamespace(_load_adapter=lambda request: request)
        )

        def compile_or_warm_up_model(self) -> str:
            events.append("warmed up")
            return "times"

    in_ep_group(Manager(end_startup=lambda: events.append("start-up over")), monkeypatch)
    assert ours(VllmsWorker).compile_or_warm_up_model() == "times"
    assert events == ["warmed up", "start-up over"]
    guarded = VllmsWorker.model_runner.lora_manager._load_adapter
    assert guarded.__wrapped__, "adapters that we cannot serve are refused"


def test_a_dummy_batch_is_one_of_an_idle_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = ThreadGroup.ranks(1)
    made_pool = pool_of(group)

    class VllmsWorker:
        model_runner = SimpleNamespace(
            lora_config="some",
            _set_active_loras=lambda *_given: None,
            maybe_dummy_run_with_lora=None,
            model=torch.nn.Identity(),
        )

        def execute_dummy_batch(self) -> None:
            assert made_pool.is_idle
            assert self.model_runner.maybe_dummy_run_with_lora is not None, "keeps adapters"
            assert "forward" in vars(self.model_runner.model), "leaves out what it can"
            raise RuntimeError("out of memory")

    in_ep_group(Manager(pool=made_pool), monkeypatch)
    assert not made_pool.is_idle
    with pytest.raises(RuntimeError, match="out of memory"):
        ours(VllmsWorker).execute_dummy_batch()
    assert not made_pool.is_idle


def test_a_worker_whose_ranks_have_fallen_back_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager is vLLM's, which knows neither start-up nor idle ranks."""
    events: list[str] = []

    class VllmsWorker:
        model_runner = SimpleNamespace(lora_config=None)

        def compile_or_warm_up_model(self) -> str:
            return "times"

        def execute_dummy_batch(self) -> None:
            events.append("dummy batch")

    in_ep_group(object(), monkeypatch)
    assert ours(VllmsWorker).compile_or_warm_up_model() == "times"
    ours(VllmsWorker).execute_dummy_batch()
    assert events == ["dummy batch"]


@pytest.mark.parametrize(
    ("tags", "is_restored"), [(None, True), (["weights"], True), (["kv_cache"], False)]
)
def test_waking_writes_what_sleep_has_lost(
    tags: list[str] | None, is_restored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that the user named lies among the weights, and vLLM takes it for one of them."""
    (group,) = ThreadGroup.ranks(1)
    made_pool = pool_of(group, Options(dispatch="nvfp4", dispatch_global_scale=0.25))
    geometry = Geometry(4, 2, 128, 8, torch.float32)
    floats = VllmExpertsInput(SimpleNamespace(quant_dtype=None), takes_floats=True)
    chosen = made_pool.agree_on_format("a layer", floats, geometry)
    assert chosen.global_scale is not None
    scale: torch.Tensor = chosen.global_scale
    woken: list[Any] = []

    class VllmsWorker:
        def wake_up(self, tags: list[str] | None = None) -> None:
            scale.fill_(float("nan"))
            woken.append(tags)

    in_ep_group(Manager(pool=made_pool), monkeypatch)
    ours(VllmsWorker).wake_up(tags)
    assert woken == [tags]
    assert (scale.tolist() == [0.25]) == is_restored


@pytest.mark.parametrize("holds", [True, False])
def test_the_manager_holds_startup_for_all_layers(holds: bool, vllms_manager: None) -> None:
    """The geometry that comes first holds it, those on the same workspace with it."""
    (group,) = ThreadGroup.ranks(1)
    manager = MoeNvlinkAll2AllManager(group, device=torch.device("cpu"), holds_startup=holds)
    usual = config()
    geometry = Geometry(4, 2, usual.hidden_size, 8, torch.float32)
    layers = [manager.pool.exchange(geometry._replace(top_k=top_k)) for top_k in (2, 1)]
    assert manager.get_handle(geometry._asdict()) is layers[0]
    for layer in layers:
        for _ in range(2):
            layer._layer.workspace.startup.complete_round()
    states = {layer._layer.workspace.startup._is_over for layer in layers}
    assert states == {not holds}
    manager.end_startup()
    assert all(layer._layer.workspace.startup._is_over for layer in layers)
    manager.destroy()
    manager.destroy()
    assert manager.pool.exchanges == []


def test_the_naive_path_of_the_manager_is_an_error(vllms_manager: None) -> None:
    (group,) = ThreadGroup.ranks(1)
    manager: Any = MoeNvlinkAll2AllManager(group, device=torch.device("cpu"))
    for verb in ("dispatch", "dispatch_router_logits", "combine"):
        with pytest.raises(UnsupportedError, match="modular kernel"):
            getattr(manager, verb)(None)
    manager.destroy()


def test_the_manager_makes_a_part_once_and_closes_it(vllms_manager: None) -> None:
    """A shared LM head is one: `draft.mtp` asks for it when it builds a draft."""
    events: list[str] = []

    class Heads:
        def __init__(self, ranks: Ranks, device: torch.device) -> None:
            events.append(f"{ranks.size} rank on {device}")

        def stats(self) -> dict[str, int]:
            return {"heads": 3}

        def release_memory(self) -> None:
            raise AssertionError("no checkpoint")

        renew_memory = release_memory

        def close(self) -> None:
            events.append("closed")

    (group,) = ThreadGroup.ranks(1)
    manager = MoeNvlinkAll2AllManager(group, device=torch.device("cpu"))
    assert manager._more_stats() == {}
    assert manager.part(Heads) is manager.part(Heads)
    assert manager._more_stats() == {"heads": 3}
    manager.destroy()
    assert events == ["1 rank on cpu", "closed"]


def test_a_checkpoint_gives_all_memory_back(
    vllms_manager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of all layers and of the draft's head; restored without a prepare it is renewed too."""
    monkeypatch.setattr(draft_head, "group_of", lambda group, _rank, _size: group)
    of_head = small_head.config(2)
    plan = draft_head.Plan(
        size=2,
        crossover=None,
        vocab_size=of_head.vocab_size,
        hidden_size=of_head.hidden_size,
        most_rows=of_head.max_rows_per_rank,
        dtype=of_head.dtype,
        full_logits=False,
    )
    given = small_head.problem(of_head, [1, 3], 1)

    def body(group: ThreadGroup) -> list[int]:
        manager = MoeNvlinkAll2AllManager(group, device=torch.device("cpu"))
        geometry = Geometry(4, 2, config().hidden_size, 8, torch.float32, extra_payload_bytes=(6,))
        of = [geometry, geometry._replace(max_tokens_per_rank=16)]
        layers = [manager.get_handle(one._asdict()) for one in of]
        head = manager.part(draft_head.DraftHeads).of_plan(plan, lambda *_: None).group
        for again in (0, 1, 2):
            for _ in range(again):
                manager.checkpoint_prepare()
                with pytest.raises(ExchangeStateError, match="vLLM: checkpoint_restore"):
                    assert_still_works(layers[1])
                with pytest.raises(ExchangeStateError, match="vLLM: checkpoint_restore"):
                    small_head.check_argmax(head, given)
            manager.checkpoint_restore()
            for layer in layers:
                assert_still_works(layer)
            small_head.check_argmax(head, given)
        rounds = [layers[0].stats().rounds, head.stats().rounds]
        manager.destroy()
        return rounds

    assert run_ranks(2, body) == [[6, 3], [6, 3]]


@pytest.mark.parametrize(
    ("device", "seen"), [("cpu", ["our manager"]), ("cuda", ["vLLM"]), (None, ["vLLM"])]
)
@pytest.mark.parametrize("method", ["checkpoint_prepare", "checkpoint_restore"])
def test_who_is_told_of_a_checkpoint(
    device: str | None, seen: list[str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for an accelerator first, which CPU ranks have not."""
    told: list[str] = []
    pool = SimpleNamespace(device=SimpleNamespace(type=device))
    manager = Manager(pool=pool, **{method: lambda: told.append("our manager")})
    in_ep_group(manager if device else object(), monkeypatch)
    base = type("VllmsWorker", (), {method: lambda _self: told.append("vLLM")})
    getattr(ours(base), method)()
    assert told == seen
