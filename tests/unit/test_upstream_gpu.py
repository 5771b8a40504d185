"""Of runs of vLLM's tests on GPUs, what can be known without one: seats, groups, names, paths."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import pickle
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.unit.upstream_toys import toy_tree
from tests.upstream import cli, expectations, fetch, settings
from tests.upstream.adapt import drafts, gpu_layers, processes, shared_gpu
from tests.upstream.groups import Device, Group, Plugin
from tests.upstream.outcomes import Outcome, Result
from tests.upstream.run import Job, Part, Ran, environment
from tests.upstream.selection import gpu

PACKAGE = "tests.upstream"


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many GPUs a run has."""

    def set_gpus(count: int) -> None:
        monkeypatch.setenv(settings.DEVICE, Device.GPU.value if count else Device.CPU.value)
        monkeypatch.setenv(settings.GPUS, str(count))

    return set_gpus


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_every_rank_sits_on_a_device_that_exists(world_size: int, gpus: int) -> None:
    seats = [shared_gpu.seat(rank, world_size, gpus) for rank in range(world_size)]
    assert len({(seat.node, seat.device) for seat in seats}) == world_size
    assert [seat.node * seat.devices + seat.device for seat in seats] == list(range(world_size))
    if gpus:
        assert all(seat.device < gpus for seat in seats)
        per_device = [sum(seat.device == one for seat in seats) for one in range(gpus)]
        assert max(per_device) - min(per_device) <= 1
    if gpus == 0 or gpus >= world_size:
        assert {seat.node for seat in seats} == {0}


def prepare() -> None:
    """Of a rank, before its work."""
    CALLS.append("prepared")


def work(*arguments: Any) -> tuple[Any, ...]:
    """A rank's."""
    CALLS.append("worked")
    return arguments


CALLS: list[str] = []


def test_a_rank_begins_with_what_adapters_prepare(
    on_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled, as a process's target is; sharing asks for a seat and for an environment."""
    module = types.ModuleType("a_launcher_of_tests")
    module.begin = work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(shared_gpu, "_setups", [])
    monkeypatch.setattr(shared_gpu, "gloo_for_nccl", lambda: CALLS.append("gloo"))
    monkeypatch.setattr(shared_gpu, "_without_custom_all_reduce", lambda: CALLS.append("plain"))
    for name in shared_gpu.SHARING_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    CALLS.clear()
    on_gpus(1)
    shared_gpu.begin_ranks_here(module.__name__, "begin", seated=True)
    shared_gpu.in_every_rank(prepare)
    monkeypatch.setenv("OF_THE_TEST", "set before the rank was started")
    pickled = pickle.dumps(module.begin)

    module.begin = work  # type: ignore[attr-defined]  # a rank imports it afresh
    environment = dict(os.environ)
    monkeypatch.delenv("OF_THE_TEST")
    try:
        assert pickle.loads(pickled)(1, 2, 2, 0, "init") == (0, 2, 1, 1, "init")
        now = dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    assert CALLS == ["gloo", "plain", "prepared", "worked"]
    assert now == environment | shared_gpu.SHARING_ENVIRONMENT


def test_nccl_becomes_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def group(*arguments: Any, **named: Any) -> None:
        asked.append((arguments, named))

    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(torch.distributed, name, group)
    shared_gpu.gloo_for_nccl()
    shared_gpu.gloo_for_nccl()  # once more changes nothing
    torch.distributed.init_process_group("nccl", rank=1)
    torch.distributed.init_process_group(backend="cpu:gloo,cuda:nccl", device_id="cuda:0")  # type: ignore[arg-type]
    torch.distributed.new_group([0, 1], backend="gloo")
    torch.distributed.new_group([0, 1])
    assert asked == [
        (("gloo",), {"rank": 1}),
        ((), {"backend": "gloo"}),
        (([0, 1],), {"backend": "gloo"}),
        (([0, 1],), {}),
    ]


def test_groups_are_ready_to_be_run() -> None:
    """Their adapters can be imported, and each says on how many GPUs."""
    for group in gpu.GROUPS:
        for name in group.adapters:
            importlib.import_module(f"{PACKAGE}.adapt.{name}")
        assert group.gpus >= 1
        assert group.arguments
    names = {group.name for group in gpu.GROUPS if group.devices == {Device.GPU}}
    assert all(name.startswith("gpu-") for name in names)
    assert len(names) >= 8


def test_nothing_is_claimed_of_gpus_that_nobody_has_run() -> None:
    path = expectations.file_of("0.32.0", Device.GPU)
    assert expectations.read(path) == {}, "then remove NEVER RUN from the file, and this test"
    assert "NEVER RUN" in path.read_text("utf-8")
    for module in (gpu, gpu_layers, shared_gpu):
        assert "never" in (module.__doc__ or "").lower(), module.__name__


def test_skip_marks_for_another_library_alone_are_dropped() -> None:
    def mark(reason: str) -> pytest.Mark:
        return pytest.mark.skipif(True, reason=reason).mark

    assert gpu_layers._asks_for_another(mark("FlashInfer NVLink one-sided not available"))
    assert gpu_layers._asks_for_another(mark("Requires deep_ep kernels"))
    assert not gpu_layers._asks_for_another(mark("Need >= 2 GPUs"))
    assert not gpu_layers._asks_for_another(pytest.mark.parametrize("a", [1]).mark)


SLEEP, EXIT, DIE = (time.sleep, (600,)), (os._exit, (0,)), (os.abort, ())
FAIL = (os._exit, (3,))


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize(
    ("work", "told"),
    [
        ([EXIT, EXIT], ""),
        ([EXIT, DIE], "process 1 terminated with signal SIGABRT"),
        ([SLEEP, FAIL], "process 1 terminated with exit code 3"),
        ([], "no rank"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_others_are_not_waited_for(
    work: list[Any], told: str, *, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that die without a word too. Launchers of vLLM's tests join rank after rank."""
    monkeypatch.setattr(processes, "GRACE_S", 0.1)
    module = types.SimpleNamespace(Process=multiprocessing.get_context("spawn").Process)
    started: list[Any] = []

    def spawn_workers() -> None:
        for target, arguments in work:
            started.append(module.Process(target=target, args=arguments))
            started[-1].start()
        for one in started if joins else ():
            one.join()

    original = module.Process
    with pytest.raises(Exception, match=told) if told else contextlib.nullcontext():
        gpu_layers.ending_well(module, spawn_workers)
    assert module.Process is original
    assert not any(one.is_alive() for one in started)


def test_a_configuration_of_a_test_asks_for_us() -> None:
    from moe_nvlink_plugin.integration.vllm import backend

    made = types.SimpleNamespace(parallel_config=types.SimpleNamespace(all2all_backend="other"))
    assert not backend.is_selected(made)
    assert gpu_layers._naming_us(lambda: made)() is made
    assert backend.is_selected(made)
    assert made.parallel_config.all2all_backend == backend.CARRIER


def test_without_expectations_tests_fail_or_pass(tmp_path: Path) -> None:
    """And of a group that is compared with a run without us, only what differs counts."""
    passed, failed = Result(Outcome.PASSED), Result(Outcome.FAILED, "E  no")
    skipped, lost = Result(Outcome.SKIPPED, "no FlashInfer"), Result(Outcome.NOT_RUN)
    ours = Ran({"a": passed, "b": failed, "c": skipped, "d": lost}, 1.0, tmp_path)
    part = Part(Group("gpu-toy", "a toy", ("tests",)), ("tests",))
    found = cli.differences_of(part, None, {True: ours}, whole=True, places=False)
    assert [line.split(":")[0] for line in found] == ["b", "d"]
    without = Ran({**ours.results, "a": failed}, 1.0, tmp_path)
    both = Part(replace(part.group, plugin=Plugin.COMPARED), ("tests",))
    runs = {True: ours, False: without}
    (line,) = cli.differences_of(both, None, runs, whole=True, places=False)
    assert line.startswith("a: with the plugin passed")
    for plugin, ran in runs.items():
        rest = {node: result for node, result in ran.results.items() if node != "a"}
        runs[plugin] = replace(ran, results=rest)
    (line,) = cli.differences_of(both, None, runs, whole=True, places=False)
    assert "no test passed" in line


def test_engines_find_the_users_models_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/models/of/the/user")
    assert cli._hub(2) == Path("/models/of/the/user")
    assert cli._hub(0) == fetch.CACHE / "hub"


def test_engines_of_one_gpu_have_the_hubs_models_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Toys in the place of some would make target and draft misfit, and both sides fail alike."""
    from vllm.transformers_utils import utils

    where = toy_tree(tmp_path, {})
    where.redirects.write_text(json.dumps({"Qwen/Qwen3-0.6B": "a toy"}), "utf-8")
    found = {}
    for group in gpu.GROUPS:
        variables = environment(where, Job(Part(group, ())), tmp_path)
        monkeypatch.setenv("VLLM_MODEL_REDIRECT_PATH", variables["VLLM_MODEL_REDIRECT_PATH"])
        utils.maybe_model_redirect.cache_clear()
        found[group.name] = utils.maybe_model_redirect("Qwen/Qwen3-0.6B")
    utils.maybe_model_redirect.cache_clear()
    assert found["drafts"] == "a toy"
    assert found["gpu-graphs"] == found["gpu-speculation"] == "Qwen/Qwen3-0.6B"


def test_the_toy_with_drafts_can_be_read(tmp_path: Path) -> None:
    """By those who will: a tokenizer whose every token the model has."""
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    folder = drafts.write(tmp_path / "toy", "bfloat16")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] > 2048
    assert config["num_nextn_predict_layers"] == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is")["input_ids"]
    assert ids
    assert max(ids) < len(tokenizer) <= config["vocab_size"]


def tell_port(told: dict[str, str]) -> str:
    """What a launcher's rank does with its variables."""
    return told["MASTER_PORT"]


def test_ranks_meet_at_a_port_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's launcher says 12345 to all, also to those of another run on the same machine."""
    monkeypatch.setattr(shared_gpu, "_settle", lambda _world_size: None)
    monkeypatch.setattr(os, "environ", {})  # which a rank replaces
    asked = []

    def begin() -> None:
        begun = shared_gpu.Beginning(__name__, "tell_port", seated=False)
        asked.append(pickle.loads(pickle.dumps(begun))({"MASTER_PORT": "12345"}))

    begin()
    gpu_layers._at_a_free_port(begin)
    assert asked[0] == "12345"
    assert asked[1] == os.environ["MOE_NVLINK_UPSTREAM_PORT"] != "12345"
