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
import pytest
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
    with pytest.MonkeyPatch.context() as patch:
        results[function.__name__] = function(patch)


def refusal(call):
    try:
        call()
    except UnsupportedError as error:
        return str(error)
    return "nothing was refused"


@scenario
def not_asked(patch):
    given = SimpleNamespace(use_all2all=True, all2all_manager="theirs")
    communicator.attach(given, torch.device("cpu"))
    with set_current_vllm_config(VllmConfig()):
        communicator.attach(given, torch.device("cpu"))
    return [given.all2all_manager, sorted(op_registry_oot)]


@scenario
def communicators(patch):
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from moe_nvlink_plugin.integration.vllm.plugin import cuda_communicator, platform

    def init(self, *args, **kwargs):
        self.given = [*args, *kwargs]

    attach = lambda self, device, store: self.given.append(str(device))
    patch.setattr(CudaCommunicator, "__init__", init)
    patch.setattr(torch.cuda, "current_device", lambda: 3)
    patch.setattr(cuda_communicator, "attach", attach)
    ours = [
        resolve_obj_by_qualname(f"{platform.__package__}.{name}")
        for name in platform._COMMUNICATORS.values()
    ]
    made = ours[-1]("group", unique_name="ep")
    return [[cls.__mro__[1].__name__ for cls in ours], made.given]


@scenario
def replaced(patch):
    layers.put_in_place()
    layers.put_in_place()
    made = RoutedExperts.__new__(RoutedExperts), MoERunner.__new__(MoERunner)
    return [sorted(op_registry_oot), *(type(m).__name__ for m in made)]


@scenario
def models_own(patch):
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
def reloaded(patch):
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
def opaque(patch):
    # What a layer calls; also on CPUs, where vLLM's own is traced into.
    runners = [
        SimpleNamespace(_shared_experts=shared, _ends_in_combine=ends)
        for shared, ends in [(None, False), ("some", False), ("some", True)]
    ]
    return [str(layers.MoeNvlinkMoERunner._select_forward(runner)) for runner in runners]


@scenario
def taken(patch):
    class Theirs(RoutedExperts):
        pass

    RoutedExperts.register_oot(Theirs)
    return [refusal(layers.put_in_place), op_registry_oot["RoutedExperts"] is Theirs]


@scenario
def logits_processor(patch):
    draft_logits.put_in_place()
    draft_logits.put_in_place()
    made = LogitsProcessor.__new__(LogitsProcessor)
    return [sorted(op_registry_oot), type(made).__name__]


@scenario
def logits_processor_taken(patch):
    class Theirs(LogitsProcessor):
        pass

    LogitsProcessor.register_oot(Theirs)
    return [refusal(draft_logits.put_in_place), op_registry_oot["LogitsProcessor"] is Theirs]


@scenario
def attached(patch):
    # What a worker puts in place, by what its configuration asks for.
    def manager(group, device, options, **more):
        return SimpleNamespace(ranks="the ranks", options=options, given=more)

    placed, stage_group = [], lambda: SimpleNamespace(rank_in_group=stage)
    place = lambda config, device_or_ranks: placed.append([config.name, device_or_ranks])
    patch.setattr(communicator, "_can_exchange", lambda *_: True)
    patch.setattr(mtp, "put_in_place", place)
    patch.setattr(all2all_manager, "MoeNvlinkAll2AllManager", manager)
    patch.setattr(vllm.distributed, "get_pp_group", stage_group)
    patch.setattr(graphs, "agree", place)
    patch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
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
        given = SimpleNamespace(use_all2all=True, all2all_manager=None, cpu_group=None)
        communicator.attach(given, torch.device("cpu"))
        size = given.all2all_manager.options.mtp_lm_head_tp_size
        more = given.all2all_manager.given
        shown = [more["name"], more["publication"] is not None]
        shown += [type(one).__name__ for one in features._features.values()]
        placed.append([name, size, sorted(op_registry_oot), *shown])
    return placed


@scenario
def not_modular(patch):
    told, (group,) = [], ThreadGroup.ranks(1)
    pool = SimpleNamespace(ranks=Ranks(group, 0, 1, WORDING))
    patch.setattr(method, "_pool", lambda: pool)
    for kernel in (None, SimpleNamespace(is_monolithic=True, fused_experts=None)):
        theirs = SimpleNamespace(moe_kernel=None)
        theirs.process_weights_after_loading = lambda layer: setattr(theirs, "moe_kernel", kernel)
        layer = SimpleNamespace(layer_name="layer 7")
        told.append(refusal(lambda: method.install(theirs, layer)))
    return told


@scenario
def naive_path(patch):
    def init(self, cpu_group, tcp_store_group=None):
        self.world_size, self.rank = 1, 0

    patch.setattr(All2AllManagerBase, "__init__", init)
    manager = MoeNvlinkAll2AllManager(None, device=torch.device("cpu"))
    verbs = "dispatch", "dispatch_router_logits", "combine"
    return [refusal(lambda: getattr(manager, verb)(None)) for verb in verbs]


@scenario
def apart(patch):
    # What becomes of ranks that no transport connects; rank 0 speaks for all of them.
    warned, told = [], []
    apart = lambda ranks, device: f"{ranks.size} ranks on {device}"
    patch.setattr(communicator, "why_apart", apart)
    patch.setattr(start.logger, "warning", lambda text, *values: warned.append(text % values))
    patch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
    given = SimpleNamespace(use_all2all=True, all2all_manager="theirs")
    for options in ({}, {"fallback": "allgather_reducescatter"}):
        asked = {"all2all_backend": "moe_nvlink", "moe_nvlink": options}
        config = SimpleNamespace(additional_config=asked)
        for rank, device in enumerate((torch.device("cpu"), torch.device("cuda", 3))):
            given.cpu_group = SimpleNamespace(
                rank=lambda: rank, size=lambda: 2, all_gather_object=lambda mine: [mine] * 2
            )
            told.append(refusal(lambda: communicator.attach(given, device)))
    return [told, warned, given.all2all_manager, sorted(op_registry_oot)]


@scenario
def decomposed(patch):
    # What our class does to the layer's configuration before vLLM chooses experts by it.
    seen = []
    theirs = SimpleNamespace(process_weights_after_loading=None)
    get = lambda self, prefix, quant, moe: seen.append(vars(moe)) or theirs
    patch.setattr(RoutedExperts, "_get_quant_method", get)
    ep = SimpleNamespace(use_all2all_kernels=True, all2all_backend="allgather_reducescatter")
    layer = object.__new__(layers.MoeNvlinkRoutedExperts)
    for asked in (True, False):
        patch.setattr(layers, "selected_here", lambda: asked)
        for known in ({}, {"require_decomposed_backend": False}):
            moe = SimpleNamespace(moe_parallel_config=ep, **known)
            layer._get_quant_method("prefix", None, moe)
    return [moe.get("require_decomposed_backend", "absent") for moe in seen]


@scenario
def classes_by_device(patch):
    made = []
    def of(kind):
        return lambda exchange, *more: made.append([kind, exchange]) or SimpleNamespace()

    patch.setattr(method, "CudaPrepareAndFinalize", of("cuda"))
    patch.setattr(method, "CpuPrepareAndFinalize", of("cpu"))
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
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in shown.stdout.splitlines() if line.startswith("RESULTS")]
    assert lines, shown.stderr[-3000:]
    found: dict[str, list[Any]] = json.loads(lines[0].removeprefix("RESULTS"))
    return found


LAYERS = ["MoERunner", "RoutedExperts"]
OURS = "MoeNvlinkRoutedExperts"
#: Scenario -> what is left; each shows that
EXPECTED = {
    # a communicator that was not asked keeps its manager,
    "not_asked": ["theirs", []],
    # each platform has its communicator,
    "communicators": [
        ["CpuCommunicator", "CpuCommunicator", "CudaCommunicator"],
        ["group", "unique_name", "cuda:3"],
    ],
    # both classes are replaced once,
    "replaced": [LAYERS, OURS, "MoeNvlinkMoERunner"],
    # a model's own class of experts is extended, once, whatever its name is: GPT-OSS, DBRX, the
    # Transformers backend,
    "models_own": [
        [
            ["MoeNvlinkGptOssRoutedExperts", True, True, OURS],
            ["MoeNvlinkDbrxExperts", True, True, OURS],
            ["MoeNvlinkTransformersRoutedExperts", True, True, OURS],
            [OURS, True, True, OURS],
            ["Theirs", True, False, "GptOssRoutedExperts"],
        ],
        True,
    ],
    # its loader sees the method that ours replaced,
    "reloaded": [[["Method", "w13", None]], "MoeNvlinkFusedMoEMethod"],
    # a layer is one op with shared experts and without,
    "opaque": ["vllm.moe_forward", "vllm.moe_forward_shared", "vllm.moe_nvlink_forward"],
    # the logits processor is replaced once,
    "logits_processor": [["LogitsProcessor"], "MoeNvlinkLogitsProcessor"],
    # only a shared LM head replaces more than MoE layers,
    "attached": [
        ["whole", "the ranks"],
        ["whole", 1, LAYERS, "", True],
        ["shared", "cpu"],
        ["shared", "the ranks"],
        ["shared", 2, ["LogitsProcessor", *LAYERS], "", True],
        ["auto", "cpu"],
        ["auto", "the ranks"],
        ["auto", "auto", ["LogitsProcessor", *LAYERS], "", True],
        ["no draft", "the ranks"],
        # A later stage of a pipeline: its counters' files have other names, as its ranks have not.
        ["no draft", 1, LAYERS, "stage1", False],
        ["adapts", "the ranks"],
        ["adapts", 1, LAYERS, "", True, "AdaptersOnExperts"],
        ["balances", "the ranks"],
        ["balances", 1, LAYERS, "", True, "MovableExperts"],
    ],
    # experts that route themselves are left out where vLLM can,
    "decomposed": ["absent", True, "absent", False],
    # the device chooses the class.
    "classes_by_device": [["cpu", "one"], ["cuda", "one"]],
}


@pytest.mark.parametrize("scenario", EXPECTED)
def test_what_is_in_place(scenario: str, results: dict[str, list[Any]]) -> None:
    assert results[scenario] == EXPECTED[scenario]


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("taken", "RoutedExperts"), ("logits_processor_taken", "LogitsProcessor")],
)
def test_another_plugins_class_is_not_overwritten(
    scenario: str, name: str, results: dict[str, list[Any]]
) -> None:
    message, still_theirs = results[scenario]
    assert [word for word in (name, "Theirs", "VLLM_PLUGINS") if word not in message] == []
    assert still_theirs


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
