"""Our classes in the place of vLLM's; in one process of its own, since a replacement stays."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

_SCRIPT = """
import json
import torch
import vllm.config
from types import SimpleNamespace
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.vllm import all2all_manager
from moe_nvlink_plugin.integration.vllm.all2all_manager import MoeNvlinkAll2AllManager
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.draft import logits_processor as draft_logits, mtp
from moe_nvlink_plugin.integration.vllm.moe import features, layers, method
from moe_nvlink_plugin.integration.common import start
from moe_nvlink_plugin.integration.vllm.plugin import communicator, graphs
from moe_nvlink_plugin.testing import ThreadGroup

results = {}


def scenario(function):
    op_registry_oot.clear()
    features._features.clear()
    results[function.__name__] = function()


def refusal(call):
    try:
        call()
    except UnsupportedError as error:
        return str(error)
    return "nothing was refused"


@scenario
def not_asked():
    given = SimpleNamespace(use_all2all=True, all2all_manager="theirs")
    communicator.attach(given, torch.device("cpu"))
    with set_current_vllm_config(VllmConfig()):
        communicator.attach(given, torch.device("cpu"))
    return [given.all2all_manager, sorted(op_registry_oot)]


@scenario
def communicators():
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from moe_nvlink_plugin.integration.vllm.plugin import cuda_communicator, platform

    def init(self, *args, **kwargs):
        self.given = [*args, *kwargs]

    CudaCommunicator.__init__ = init
    torch.cuda.current_device = lambda: 3
    cuda_communicator.attach = lambda self, device, store: self.given.append(str(device))
    ours = [
        resolve_obj_by_qualname(f"{platform.__package__}.{name}")
        for name in platform._COMMUNICATORS.values()
    ]
    made = ours[-1]("group", unique_name="ep")
    return [[cls.__mro__[1].__name__ for cls in ours], made.given]


@scenario
def replaced():
    layers.put_in_place()
    layers.put_in_place()
    made = RoutedExperts.__new__(RoutedExperts), MoERunner.__new__(MoERunner)
    return [sorted(op_registry_oot), *(type(m).__name__ for m in made)]


@scenario
def models_own():
    # Classes that models bring, with loaders of their own; another plugin's stays what it is.
    from vllm.model_executor.models.dbrx import DbrxExperts
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
    from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

    class Base(GptOssRoutedExperts):
        pass

    class Theirs(Base):
        pass

    layers.put_in_place()
    Base.register_oot(Theirs)
    told, ours = [], layers.MoeNvlinkRoutedExperts
    for cls in (GptOssRoutedExperts, DbrxExperts, TransformersRoutedExperts, ours, Base):
        made = cls.__new__(cls, "layer 3", expert_map_manager=None)
        loader = type(made).weight_loader.__qualname__.partition(".")[0]
        told.append([type(made).__name__, isinstance(made, cls), isinstance(made, ours), loader])
    again = GptOssRoutedExperts.__new__(GptOssRoutedExperts)
    return [told, type(again) is type(GptOssRoutedExperts.__new__(GptOssRoutedExperts))]


@scenario
def reloaded():
    # What a model's own loader sees of the quant method that ours has replaced.
    seen = []

    class Method:
        pass

    class Own(RoutedExperts):
        def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id=None,
                          return_success=False):
            seen.append([type(self.quant_method).__name__, shard_id, expert_id])

    layers.put_in_place()
    layer = Own.__new__(Own)
    torch.nn.Module.__init__(layer)
    ours = object.__new__(method.MoeNvlinkFusedMoEMethod)
    torch.nn.Module.__init__(ours)
    ours.__dict__["old_quant_method"] = Method()
    layer.quant_method = ours
    layer.weight_loader(None, None, "name", "w13")  # as DBRX calls it
    return [seen, type(layer.quant_method).__name__]


@scenario
def opaque():
    # What a layer calls; also on CPUs, where vLLM's own is traced into.
    runners = [
        SimpleNamespace(_shared_experts=shared, _ends_in_combine=ends)
        for shared, ends in [(None, False), ("some", False), ("some", True)]
    ]
    return [str(layers.MoeNvlinkMoERunner._select_forward(runner)) for runner in runners]


@scenario
def taken():
    class Theirs(RoutedExperts):
        pass

    RoutedExperts.register_oot(Theirs)
    return [refusal(layers.put_in_place), op_registry_oot["RoutedExperts"] is Theirs]


@scenario
def logits_processor():
    draft_logits.put_in_place()
    draft_logits.put_in_place()
    made = LogitsProcessor.__new__(LogitsProcessor)
    return [sorted(op_registry_oot), type(made).__name__]


@scenario
def logits_processor_taken():
    class Theirs(LogitsProcessor):
        pass

    LogitsProcessor.register_oot(Theirs)
    return [refusal(draft_logits.put_in_place), op_registry_oot["LogitsProcessor"] is Theirs]


@scenario
def attached():
    # What a worker puts in place, by what its configuration asks for.
    placed, kept = [], (
        vllm.config.get_current_vllm_config_or_none,
        mtp.put_in_place,
        all2all_manager.MoeNvlinkAll2AllManager,
        communicator._can_exchange,
        graphs.agree,
    )
    communicator._can_exchange = lambda *_: True
    mtp.put_in_place = lambda config, device: placed.append([config.name, device])
    all2all_manager.MoeNvlinkAll2AllManager = lambda group, device, options, **more: (
        SimpleNamespace(ranks="the ranks", options=options, given=more)
    )
    vllm.distributed.get_pp_group = lambda: SimpleNamespace(rank_in_group=stage)
    graphs.agree = lambda config, ranks: placed.append([config.name, ranks])
    for name, size, method, stage, balances, lora in [
        ("whole", 1, "mtp", 0, False, None),
        ("shared", 2, "mtp", 0, False, None),
        ("auto", "auto", "mtp", 0, False, None),
        ("no draft", 1, None, 1, False, None),
        ("adapts", 1, None, 0, False, "a LoRAConfig"),
        ("balances", 1, None, 0, True, None),
    ]:
        features._features.clear()
        op_registry_oot.clear()
        asked = {"all2all_backend": "moe_nvlink", "moe_nvlink": {"mtp_lm_head_tp_size": size}}
        config = SimpleNamespace(
            name=name,
            additional_config=asked,
            parallel_config=SimpleNamespace(enable_eplb=balances),
            lora_config=lora,
            instance_id=name,
            speculative_config=SimpleNamespace(method=method) if method else None,
        )
        vllm.config.get_current_vllm_config_or_none = lambda: config
        given = SimpleNamespace(use_all2all=True, all2all_manager=None, cpu_group=None)
        communicator.attach(given, torch.device("cpu"))
        size = given.all2all_manager.options.mtp_lm_head_tp_size
        more = given.all2all_manager.given
        shown = [more["name"], more["publication"] is not None]
        shown += [type(one).__name__ for one in features._features.values()]
        placed.append([name, size, sorted(op_registry_oot), *shown])
    (
        vllm.config.get_current_vllm_config_or_none,
        mtp.put_in_place,
        all2all_manager.MoeNvlinkAll2AllManager,
        communicator._can_exchange,
        graphs.agree,
    ) = kept
    return placed


@scenario
def not_modular():
    told, (group,) = [], ThreadGroup.ranks(1)
    method._pool = lambda: SimpleNamespace(ranks=Ranks(group, 0, 1, WORDING))
    for kernel in (None, SimpleNamespace(is_monolithic=True, fused_experts=None)):
        theirs = SimpleNamespace(moe_kernel=None)
        theirs.process_weights_after_loading = lambda layer: setattr(theirs, "moe_kernel", kernel)
        layer = SimpleNamespace(layer_name="layer 7")
        told.append(refusal(lambda: method.install(theirs, layer)))
    return told


@scenario
def naive_path():
    def init(self, cpu_group, tcp_store_group=None):
        self.world_size, self.rank = 1, 0

    All2AllManagerBase.__init__ = init
    manager = MoeNvlinkAll2AllManager(None, device=torch.device("cpu"))
    verbs = "dispatch", "dispatch_router_logits", "combine"
    return [refusal(lambda: getattr(manager, verb)(None)) for verb in verbs]


@scenario
def apart():
    # What becomes of ranks that no transport connects; rank 0 speaks for all of them.
    kept = vllm.config.get_current_vllm_config_or_none, communicator.why_apart
    communicator.why_apart = lambda ranks, device: f"{ranks.size} ranks on {device}"
    warned, told = [], []
    start.logger.warning = lambda text, *values: warned.append(text % values)
    given = SimpleNamespace(use_all2all=True, all2all_manager="theirs")
    for options in ({}, {"fallback": "allgather_reducescatter"}):
        asked = {"all2all_backend": "moe_nvlink", "moe_nvlink": options}
        config = SimpleNamespace(additional_config=asked)
        vllm.config.get_current_vllm_config_or_none = lambda: config
        for rank, device in enumerate((torch.device("cpu"), torch.device("cuda", 3))):
            given.cpu_group = SimpleNamespace(
                rank=lambda: rank, size=lambda: 2, all_gather_object=lambda mine: [mine] * 2
            )
            told.append(refusal(lambda: communicator.attach(given, device)))
    vllm.config.get_current_vllm_config_or_none, communicator.why_apart = kept
    return [told, warned, given.all2all_manager, sorted(op_registry_oot)]


@scenario
def decomposed():
    # What our class does to the layer's configuration before vLLM chooses experts by it.
    seen = []
    RoutedExperts._get_quant_method = lambda self, prefix, quant, moe: seen.append(vars(moe)) or (
        SimpleNamespace(process_weights_after_loading=None)
    )
    ep = SimpleNamespace(use_all2all_kernels=True, all2all_backend="allgather_reducescatter")
    layer = object.__new__(layers.MoeNvlinkRoutedExperts)
    for asked in (True, False):
        layers.selected_here = lambda: asked
        for known in ({}, {"require_decomposed_backend": False}):
            moe = SimpleNamespace(moe_parallel_config=ep, **known)
            layer._get_quant_method("prefix", None, moe)
    return [moe.get("require_decomposed_backend", "absent") for moe in seen]


@scenario
def classes_by_device():
    made = []
    def of(kind):
        return lambda exchange, *more: made.append([kind, exchange]) or SimpleNamespace()

    method.CudaPrepareAndFinalize, method.CpuPrepareAndFinalize = of("cuda"), of("cpu")
    options = SimpleNamespace(overlap_shared_experts=False)
    for device in ("cpu", "cuda"):
        pool = SimpleNamespace(device=torch.device(device), options=options, audit_of=str)
        method._prepare_finalize(pool, "one", None, None)
    return made


print("RESULTS" + json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    shown = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    lines = [line for line in shown.stdout.splitlines() if line.startswith("RESULTS")]
    assert lines, shown.stderr[-3000:]
    found: dict[str, list[Any]] = json.loads(lines[0].removeprefix("RESULTS"))
    return found


def test_a_communicator_that_was_not_asked_keeps_its_manager(results: dict[str, list[str]]) -> None:
    assert results["not_asked"] == ["theirs", []]


def test_each_platform_has_its_communicator(results: dict[str, list[Any]]) -> None:
    bases, given = results["communicators"]
    assert bases == ["CpuCommunicator", "CpuCommunicator", "CudaCommunicator"]
    assert given == ["group", "unique_name", "cuda:3"]


def test_both_classes_are_replaced_once(results: dict[str, list[str]]) -> None:
    assert results["replaced"] == [
        ["MoERunner", "RoutedExperts"],
        "MoeNvlinkRoutedExperts",
        "MoeNvlinkMoERunner",
    ]


def test_a_models_own_experts_class_is_extended(results: dict[str, list[Any]]) -> None:
    """Whatever its name is: GPT-OSS, DBRX, the Transformers backend."""
    told, one_class = results["models_own"]
    ours = "MoeNvlinkRoutedExperts"
    assert told == [
        ["MoeNvlinkGptOssRoutedExperts", True, True, ours],
        ["MoeNvlinkDbrxExperts", True, True, ours],
        ["MoeNvlinkTransformersRoutedExperts", True, True, ours],
        [ours, True, True, ours],
        ["Theirs", True, False, "GptOssRoutedExperts"],
    ]
    assert one_class


def test_a_models_own_loader_sees_the_method_that_ours_replaced(
    results: dict[str, list[Any]],
) -> None:
    assert results["reloaded"] == [[["Method", "w13", None]], "MoeNvlinkFusedMoEMethod"]


def test_a_layer_is_one_op_with_shared_experts_and_without(results: dict[str, list[str]]) -> None:
    ops = ["vllm.moe_forward", "vllm.moe_forward_shared", "vllm.moe_nvlink_forward"]
    assert results["opaque"] == ops


def test_another_plugins_class_is_not_overwritten(results: dict[str, list[str]]) -> None:
    message, still_theirs = results["taken"]
    assert "Theirs" in message
    assert "VLLM_PLUGINS" in message
    assert still_theirs


def test_the_logits_processor_is_replaced_once_and_not_another_plugins(
    results: dict[str, list[Any]],
) -> None:
    assert results["logits_processor"] == [["LogitsProcessor"], "MoeNvlinkLogitsProcessor"]
    message, still_theirs = results["logits_processor_taken"]
    assert "LogitsProcessor" in message
    assert "Theirs" in message
    assert still_theirs


def test_only_a_shared_lm_head_replaces_more_than_moe_layers(
    results: dict[str, list[Any]],
) -> None:
    layers = ["MoERunner", "RoutedExperts"]
    assert results["attached"] == [
        ["whole", "the ranks"],
        ["whole", 1, layers, "", True],
        ["shared", "cpu"],
        ["shared", "the ranks"],
        ["shared", 2, ["LogitsProcessor", *layers], "", True],
        ["auto", "cpu"],
        ["auto", "the ranks"],
        ["auto", "auto", ["LogitsProcessor", *layers], "", True],
        ["no draft", "the ranks"],
        # A later stage of a pipeline: its counters' files have other names, as its ranks have not.
        ["no draft", 1, layers, "stage1", False],
        ["adapts", "the ranks"],
        ["adapts", 1, layers, "", True, "AdaptersOnExperts"],
        ["balances", "the ranks"],
        ["balances", 1, layers, "", True, "MovableExperts"],
    ]


def test_experts_outside_the_modular_kernel_are_refused(results: dict[str, list[str]]) -> None:
    for message in results["not_modular"]:
        assert "layer 7" in message
        assert "without vLLM's modular kernel" in message


def test_the_naive_path_of_the_manager_is_an_error(results: dict[str, list[str]]) -> None:
    assert len(results["naive_path"]) == 3
    assert all("modular kernel" in message for message in results["naive_path"])


def test_ranks_that_no_transport_connects_stop_or_fall_back(results: dict[str, list[Any]]) -> None:
    (cpu, cuda, *fallen_back), warned, manager, replaced = results["apart"]
    told = "--all2all-backend moe_nvlink: no transport connects the ranks: 2 ranks on"
    assert cpu == f"{told} cpu. Drop the flag."
    assert cuda.startswith(f"{told} cuda:3. Drop the flag, or add --additional-config")
    assert cuda.endswith(
        """{"moe_nvlink": {"fallback": "allgather_reducescatter"}}' on all ranks."""
    )
    assert fallen_back == ["nothing was refused"] * 2
    (warning,) = warned  # rank 0's
    assert "vLLM's own exchange (allgather_reducescatter)" in warning
    assert "2 ranks on cpu" in warning
    assert (manager, replaced) == ("theirs", []), "vLLM is as without us"


def test_experts_that_route_themselves_are_left_out_where_vllm_can(
    results: dict[str, list[Any]],
) -> None:
    assert results["decomposed"] == ["absent", True, "absent", False]


def test_the_device_chooses_the_class(results: dict[str, list[Any]]) -> None:
    assert results["classes_by_device"] == [["cpu", "one"], ["cuda", "one"]]
