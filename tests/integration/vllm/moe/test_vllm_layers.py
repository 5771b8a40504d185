"""Our classes in the place of vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm.config
from vllm.config import VllmConfig, parallel, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import start
from moe_nvlink_plugin.integration.vllm import all2all_manager, metrics
from moe_nvlink_plugin.integration.vllm.draft import logits_processor as draft_logits
from moe_nvlink_plugin.integration.vllm.draft import mtp
from moe_nvlink_plugin.integration.vllm.moe import features, layers, method
from moe_nvlink_plugin.integration.vllm.plugin import communicator, graphs
from tests.support.refusals import refused

CPU = torch.device("cpu")
LAYERS = ["MoERunner", "RoutedExperts"]


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is in place when a test begins, nor what it has put there when it has ended."""
    for owner, name in (
        (RoutedExperts, "__new__"),
        (parallel, "current_platform"),
        (base_router, "eplb_map_to_physical_and_record"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    with (
        mock.patch.dict(op_registry_oot, clear=True),
        mock.patch.dict(features._features, clear=True),
    ):
        yield


def test_a_communicator_that_was_not_asked_keeps_its_manager() -> None:
    given = SimpleNamespace(use_all2all=True, all2all_manager="theirs")
    communicator.attach(given, CPU)
    with set_current_vllm_config(VllmConfig()):
        communicator.attach(given, CPU)
    assert given.all2all_manager == "theirs"
    assert op_registry_oot == {}


def test_each_platform_has_its_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from moe_nvlink_plugin.integration.vllm.plugin import cuda_communicator, platform

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.given = [*args, *kwargs]

    def attach(self: Any, device: torch.device, _store: Any) -> None:
        self.given.append(str(device))

    monkeypatch.setattr(CudaCommunicator, "__init__", init)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda_communicator, "attach", attach)
    ours = [
        resolve_obj_by_qualname(f"{platform.__package__}.{name}")
        for name in platform._COMMUNICATORS.values()
    ]
    theirs = ["CpuCommunicator", "CpuCommunicator", "CudaCommunicator"]
    assert [cls.__mro__[1].__name__ for cls in ours] == theirs
    assert ours[-1]("group", unique_name="ep").given == ["group", "unique_name", "cuda:3"]


@pytest.mark.parametrize(
    ("put_in_place", "replaced"),
    [
        (
            layers.put_in_place,
            {RoutedExperts: layers.MoeNvlinkRoutedExperts, MoERunner: layers.MoeNvlinkMoERunner},
        ),
        (draft_logits.put_in_place, {LogitsProcessor: draft_logits.MoeNvlinkLogitsProcessor}),
    ],
    ids=["layers", "logits processor"],
)
def test_classes_are_replaced_once(
    put_in_place: Callable[[], None], replaced: dict[Any, type]
) -> None:
    put_in_place()
    put_in_place()
    assert op_registry_oot == {theirs.__name__: ours for theirs, ours in replaced.items()}
    assert {theirs: type(theirs.__new__(theirs)) for theirs in replaced} == replaced


@pytest.mark.parametrize(
    ("put_in_place", "replaced"),
    [(layers.put_in_place, RoutedExperts), (draft_logits.put_in_place, LogitsProcessor)],
    ids=["layers", "logits processor"],
)
def test_another_plugins_class_is_not_overwritten(
    put_in_place: Callable[[], None], replaced: Any
) -> None:
    theirs = type("Theirs", (replaced,), {})
    replaced.register_oot(theirs)
    with refused(UnsupportedError, replaced.__name__, "Theirs", "VLLM_PLUGINS"):
        put_in_place()
    assert op_registry_oot[replaced.__name__] is theirs


def test_a_models_own_class_of_experts_is_extended() -> None:
    """With its loader, whatever its name is: GPT-OSS, DBRX, the Transformers backend.

    Once; and another plugin's stays what it is.
    """
    from vllm.model_executor.models.dbrx import DbrxExperts
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
    from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

    class Base(GptOssRoutedExperts):  # type: ignore[misc]
        pass

    class Theirs(Base):
        pass

    layers.put_in_place()
    Base.register_oot(Theirs)
    ours, told = layers.MoeNvlinkRoutedExperts, []
    theirs = (GptOssRoutedExperts, DbrxExperts, TransformersRoutedExperts)
    kinds: tuple[Any, ...] = (*theirs, ours, Base)
    for cls in kinds:
        made = cls.__new__(cls, "layer 3", expert_map_manager=None)
        assert isinstance(made, cls)
        loader = type(made).weight_loader.__qualname__.partition(".")[0]
        told.append((type(made).__name__, isinstance(made, ours), loader))
    assert told == [
        ("MoeNvlinkGptOssRoutedExperts", True, ours.__name__),
        ("MoeNvlinkDbrxExperts", True, ours.__name__),
        ("MoeNvlinkTransformersRoutedExperts", True, ours.__name__),
        (ours.__name__, True, ours.__name__),
        ("Theirs", False, "GptOssRoutedExperts"),
    ]
    again = GptOssRoutedExperts.__new__(GptOssRoutedExperts)
    assert type(again) is type(GptOssRoutedExperts.__new__(GptOssRoutedExperts))


def test_a_models_own_loader_sees_the_method_that_ours_has_replaced() -> None:
    seen = []

    class Method:
        pass

    class Own(RoutedExperts):  # type: ignore[misc]
        def weight_loader(
            self, param: Any, loaded: Any, name: str, shard_id: str, expert_id: Any = None, *_: Any
        ) -> None:
            seen.append((type(self.quant_method), shard_id, expert_id))

    layers.put_in_place()
    layer = Own.__new__(Own)
    torch.nn.Module.__init__(layer)
    ours = object.__new__(method.MoeNvlinkFusedMoEMethod)
    torch.nn.Module.__init__(ours)
    ours.__dict__["old_quant_method"] = Method()
    layer.quant_method = ours
    layer.weight_loader(None, None, "name", "w13")  # as DBRX calls it
    assert seen == [(Method, "w13", None)]
    assert layer.quant_method is ours


@pytest.mark.parametrize(
    ("size", "drafts", "stage", "more", "has"),
    [
        (1, "mtp", 0, {}, []),
        (2, "mtp", 0, {}, []),
        ("auto", "mtp", 0, {}, []),
        (1, None, 1, {}, []),
        (1, None, 0, {"lora_config": "a LoRAConfig"}, ["AdaptersOnExperts"]),
        (1, None, 0, {"parallel_config": SimpleNamespace(enable_eplb=True)}, ["MovableExperts"]),
    ],
    ids=["whole head", "shared head", "auto", "later stage", "adapters", "balancer"],
)
def test_what_a_worker_puts_in_place(
    size: int | str,
    drafts: str | None,
    stage: int,
    more: dict[str, Any],
    has: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """By what its configuration asks for; only a shared LM head replaces more than MoE layers."""
    placed: list[Any] = []

    def manager(_group: Any, *, device: torch.device, options: Any, **given: Any) -> Any:
        return SimpleNamespace(ranks="the ranks", options=options, given=given)

    def place(config: Any, device_or_ranks: Any) -> None:
        assert config is asked
        placed.append(device_or_ranks)

    asked = SimpleNamespace(
        additional_config={
            "all2all_backend": "moe_nvlink",
            "moe_nvlink": {"mtp_lm_head_tp_size": size},
        },
        instance_id="some",
        speculative_config=SimpleNamespace(method=drafts) if drafts else None,
        **{"parallel_config": SimpleNamespace(enable_eplb=False), "lora_config": None, **more},
    )
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(metrics, "_files", {})
    monkeypatch.setattr(communicator, "_can_exchange", lambda *_: True)
    monkeypatch.setattr(mtp, "put_in_place", place)
    monkeypatch.setattr(graphs, "agree", place)
    monkeypatch.setattr(all2all_manager, "MoeNvlinkAll2AllManager", manager)
    of_stage = SimpleNamespace(rank_in_group=stage)
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: of_stage)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: asked)
    given = SimpleNamespace(use_all2all=True, all2all_manager=None, cpu_group=None)
    communicator.attach(given, CPU)
    shares_head = size != 1
    assert placed == (["cpu", "the ranks"] if shares_head else ["the ranks"])
    assert sorted(op_registry_oot) == (["LogitsProcessor", *LAYERS] if shares_head else LAYERS)
    assert [type(one).__name__ for one in features._features.values()] == has
    made: Any = given.all2all_manager
    assert made.options.mtp_lm_head_tp_size == size
    # A later stage of a pipeline: its counters' files have other names, as its ranks have not.
    assert made.given["name"] == ("stage1" if stage else "")
    assert (made.given["publication"] is None) == bool(stage)


def test_ranks_that_no_transport_connects_stop_or_fall_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 speaks for all of them."""
    warned: list[str] = []
    monkeypatch.setattr(communicator, "why_apart", lambda ranks, on: f"{ranks.size} ranks on {on}")
    monkeypatch.setattr(start.logger, "warning", lambda text, *more: warned.append(text % more))
    asked = SimpleNamespace(additional_config={"all2all_backend": "moe_nvlink"})
    monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: asked)
    given = SimpleNamespace(use_all2all=True, all2all_manager="theirs")

    def attach(rank: int, device: torch.device) -> None:
        given.cpu_group = SimpleNamespace(
            rank=lambda: rank, size=lambda: 2, all_gather_object=lambda mine: [mine] * 2
        )
        communicator.attach(given, device)

    told, way_out = [], '{"moe_nvlink": {"fallback": "allgather_reducescatter"}}'
    of_ranks = tuple(enumerate((CPU, torch.device("cuda", 3))))
    for rank, device in of_ranks:
        with pytest.raises(UnsupportedError) as caught:
            attach(rank, device)
        told.append(str(caught.value))
    reason = "--all2all-backend moe_nvlink: no transport connects the ranks: 2 ranks on"
    assert told[0] == f"{reason} cpu. Drop the flag."
    assert told[1].startswith(f"{reason} cuda:3. Drop the flag, or add --additional-config")
    assert told[1].endswith(f"{way_out}' on all ranks.")
    asked.additional_config["moe_nvlink"] = {"fallback": "allgather_reducescatter"}
    for rank, device in of_ranks:
        attach(rank, device)
    (warning,) = warned  # rank 0's
    assert "vLLM's own exchange (allgather_reducescatter)" in warning
    assert "2 ranks on cpu" in warning
    assert (given.all2all_manager, op_registry_oot) == ("theirs", {}), "vLLM is as without us"


@pytest.mark.parametrize(
    ("known", "asked", "then"),
    [
        ({}, True, {}),
        ({"require_decomposed_backend": False}, True, {"require_decomposed_backend": True}),
        ({}, False, {}),
        ({"require_decomposed_backend": False}, False, {"require_decomposed_backend": False}),
    ],
)
def test_experts_that_route_themselves_are_left_out_where_vllm_can(
    known: dict[str, bool], asked: bool, then: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what our class does to the layer's configuration before vLLM chooses experts by it."""
    seen = []

    def get(_self: Any, _prefix: str, _quant: Any, moe: Any) -> Any:
        seen.append({name: value for name, value in vars(moe).items() if name in then})
        return SimpleNamespace(process_weights_after_loading=None)

    monkeypatch.setattr(RoutedExperts, "_get_quant_method", get)
    monkeypatch.setattr(layers, "selected_here", lambda: asked)
    ep = SimpleNamespace(use_all2all_kernels=True, all2all_backend="allgather_reducescatter")
    moe = SimpleNamespace(moe_parallel_config=ep, **known)
    object.__new__(layers.MoeNvlinkRoutedExperts)._get_quant_method("prefix", None, moe)
    assert seen == [then]
    assert hasattr(moe, "require_decomposed_backend") == bool(known)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_device_chooses_the_class(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def of(kind: str) -> Callable[..., Any]:
        def make(exchange: Any, *_more: Any) -> Any:
            made.append((kind, exchange))
            return SimpleNamespace()

        return make

    monkeypatch.setattr(method, "CudaPrepareAndFinalize", of("cuda"))
    monkeypatch.setattr(method, "CpuPrepareAndFinalize", of("cpu"))
    options = SimpleNamespace(overlap_shared_experts=False)
    pool: Any = SimpleNamespace(device=torch.device(device), options=options, audit_of=str)
    exchange: Any = "one"
    method._prepare_finalize(pool, exchange, None, None)  # type: ignore[arg-type]
    assert made == [(device, "one")]
