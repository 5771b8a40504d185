"""`moe-nvlink tune`: on CPU ranks, on ranks whose times are planted, and with what cannot be."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, driver
from moe_nvlink_plugin.choices import TODAY, Choices, Value
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError
from moe_nvlink_plugin.exchange import tuning
from moe_nvlink_plugin.exchange.tuning import Layer, Machine, Tuning
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.tools import cli, tune
from moe_nvlink_plugin.verify import trial
from moe_nvlink_plugin.verify.plan import plan
from moe_nvlink_plugin.verify.search import Found
from moe_nvlink_plugin.verify.ways import Batch
from tests.core.verify.test_checks import GEOMETRY
from tests.support.programs import python
from tests.support.ranks import run_processes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIMIT_S = 300
SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden_size": 128}
FEW = ("--hidden-size", "128", "--num-experts", "8", "--top-k", "2", "--max-tokens", "8")


@pytest.fixture(autouse=True)
def nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TUNING", "SMALL_TOKENS", "HOST_THREADS", "PDL"):
        monkeypatch.delenv(f"MOE_NVLINK_{name}", raising=False)


def run(*arguments: str, command: str = "tune") -> subprocess.CompletedProcess[str]:
    return python("-m", "moe_nvlink_plugin", command, *FEW, *arguments, timeout_s=LIMIT_S)


def options(folder: Path, **values: Any) -> tune.Options:
    given = {"device": "cpu", "max_tokens": 8, "budget_s": 0.1, "output": folder / "tuned.json"}
    return tune.Options(**{**SIZES, **given, **values})


@pytest.mark.long
def test_two_ranks_end_with_a_verdict(tmp_path: Path) -> None:
    """Whichever: the machine is busy."""
    output = tmp_path / "tuned.json"
    done = run("--device", "cpu", "--budget", "1", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_lines, verdict = done.stdout.splitlines()
    assert "at 1, 8 tokens a rank, about 1 s" in first
    if output.exists():
        assert "tuned values take 0." in verdict
        assert verdict.endswith(f"MOE_NVLINK_TUNING={output}")
        assert tuning.load(str(output)).machine == Machine.here(CPU, 2)
    else:
        assert verdict.startswith("tune: no gain: nothing is clearly faster here")
        assert verdict.endswith("wrote no file")


# Planted times.


def planted(self: trial.Trials, first: Choices, second: Choices, batch: Batch) -> list[float]:
    """With 4 small tokens a batch of at most 4 takes half the time, and nothing else matters."""

    def cost(choices: Choices) -> float:
        return 0.5 if choices.small_tokens == 4 and len(batch.hidden) <= 4 else 1.0

    return [cost(second) / cost(first)] * 5


def tuned(rank: int, _size: int, folder: Path, values: dict[str, Any]) -> int | str:
    group = dist.group.WORLD
    assert group is not None
    given = options(folder, **values)
    with mock.patch.object(trial.Trials, "_ratios", planted):
        try:
            return tune._tuned(given, as_group(group, 60.0), CPU)
        except MoeNvlinkError as error:
            return f"{type(error).__name__}: {error}"


def two_ranks(folder: Path, body: Callable[..., Any], *args: Any) -> list[Any]:
    meeting = folder / f"ranks{len(list(folder.glob('ranks*')))}"
    meeting.mkdir()
    return run_processes(2, body, meeting, *args)


def ranks_tune(folder: Path, **values: Any) -> list[int | str]:
    return two_ranks(folder, tuned, folder, values)


def rounds_of_a_layer(rank: int, size: int, path: str) -> tuple[Choices, int | None]:
    config = AllToAllConfig(ep_size=size, ep_rank=rank, max_tokens_per_rank=8, tuning=path, **SIZES)
    with MoeAllToAll.create(config, dist.group.WORLD) as layer:
        return layer.config.choices, layer.config.small_tokens


def test_the_planted_optimum_is_written_and_holds(tmp_path: Path) -> None:
    # Enough for all candidates: planted times take none.
    assert ranks_tune(tmp_path, budget_s=600.0) == [0, 0]
    path = str(tmp_path / "tuned.json")
    found = Choices(small_tokens=4)
    layer = Layer(**SIZES, max_tokens_per_rank=8, dtype="bfloat16", recipe="bf16", combine="bf16")
    assert tuning.load(path) == Tuning(Machine.here(CPU, 2), {layer: found})
    seen = two_ranks(tmp_path, rounds_of_a_layer, path)
    assert seen == [(found, 4)] * 2
    # A second layer is added, and the first one stays.
    assert ranks_tune(tmp_path, budget_s=600.0, recipe="fp8_block") == [0, 0]
    layers = tuning.load(path).layers
    assert layers == {layer: found, layer._replace(recipe="fp8_block"): found}
    assert next(iter(layers)) == layer


def test_no_time_is_no_gain(tmp_path: Path) -> None:
    assert ranks_tune(tmp_path, budget_s=0.0) == [0, 0]
    assert not (tmp_path / "tuned.json").exists()
    said = tune._no_gain(Found(TODAY, (), is_complete=False, total=None), options(tmp_path))
    assert "0.1 s did not suffice for all candidates: a larger --budget does; wrote no file" in said


def test_another_machines_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    machine = Machine.here(CPU, 8)
    tuning.save(str(path), Tuning(machine, {}))
    first, second = ranks_tune(tmp_path)
    assert str(first).startswith(
        f"ConfigError: --output {path} is there and cannot be added to; rem"
    )
    assert "it has ranks 8, and here it is 2" in str(first)
    assert "rank 0: ConfigError: --output" in str(second)
    assert tuning.load(str(path)).machine == machine


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    first, _second = ranks_tune(tmp_path, output=tmp_path / "none" / "tuned.json")
    assert f"{tmp_path / 'none'} is no directory; name a file elsewhere" in str(first)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    first, _second = ranks_tune(tmp_path, output=Path(""))
    assert first == "ConfigError: --output . is a directory; name a file"


def other_bits(rank: int, _size: int, folder: Path) -> str:
    def round_of(self: trial._Round) -> torch.Tensor:
        output = whole(self)
        is_planted = rank == 1 and self._exchange.config.choices.small_tokens == 2
        return output + 1 if is_planted else output

    whole = trial._Round.round
    with mock.patch.object(trial._Round, "round", round_of):
        return str(tuned(rank, 2, folder, {"budget_s": 600.0}))


def test_a_choice_that_changes_a_bit_ends_it_on_every_rank(tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path, other_bits, tmp_path)
    assert second.startswith("MismatchError: with small_tokens=2 combine returned other bits than")
    assert "trying small_tokens=2 failed on another rank; rank 1: MismatchError" in first


# What is tried.


def names(config: AllToAllConfig, device: torch.device) -> dict[str, tuple[Value, ...]]:
    return {one.name: one.candidates for one in tune.space(config, device)}


def config(**values: Any) -> AllToAllConfig:
    sizes = {**SIZES, "max_tokens_per_rank": 8, "tuning": ""}
    return AllToAllConfig(ep_size=2, ep_rank=0, **{**sizes, **values})


def test_candidates_are_those_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    limits = (None, 1, 2, 4, 8)
    assert names(config(), CPU) == {
        "small_tokens": limits,
        "small_combine_tokens": limits,
        "host_threads": (None, 2, 4),
    }
    on_gpus = names(config(), CUDA)
    assert on_gpus["small_tokens"] == (None, 0, 1, 2, 4, 8)
    assert on_gpus["pdl"] == (True, False)
    assert {"full_link_sms", "marking_ctas", "most_splits", "sent_weight"} < set(on_gpus)
    assert not {"host_threads", "laid_out_weight", "head_threads"} & set(on_gpus)
    assert "small_combine_tokens" not in names(config(combine="fp8_block"), CPU)
    assert "tma_sms" not in names(config(max_sms=33), CUDA)
    assert "tma_sms" not in names(config(max_sms=16, combine="fp8_block"), CUDA)
    assert names(config(max_sms=16), CUDA)["tma_sms"] == (0, 32)
    assert "async_release" not in on_gpus
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert "host_threads" not in names(config(), CPU)


@pytest.mark.parametrize(
    ("capability", "has_it"), [((9, 0), False), ((10, 3), True), ((12, 0), False)]
)
def test_gpus_without_the_asynchronous_release_have_no_such_choice(
    capability: tuple[int, int], has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "unavailable", lambda: None)
    monkeypatch.setattr(driver, "device", lambda index: mock.Mock(capability=capability))
    assert ("async_release" in names(config(), CUDA)) == has_it
    checks = {check.name for check in plan(GEOMETRY, CUDA, quick=False)}
    assert ("small batches, asynchronous signals" in checks) == has_it


def test_what_a_variable_says_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_SMALL_TOKENS", "8")
    monkeypatch.setenv("MOE_NVLINK_HOST_THREADS", "1")
    monkeypatch.setenv("MOE_NVLINK_PDL", "0")
    assert names(config(), CPU) == {}
    assert not {"small_tokens", "small_combine_tokens", "pdl"} & set(names(config(), CUDA))


# What cannot be.


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"recipe": "fp7"}, "recipe='fp7' is unknown; installed are"),
        ({"recipe": "bytes_64"}, "recipe='bytes_64' takes rows that the caller has made"),
        ({"combine": "fp7"}, "combine='fp7' (MOE_NVLINK_COMBINE) is no format of combine"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_layers_that_cannot_be(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    for outcome in ranks_tune(tmp_path, **values):
        assert str(outcome).startswith(f"ConfigError: {said}")


# verify.


@pytest.mark.long
def test_verify_says_what_a_file_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = tmp_path / "tuned.json", tmp_path / "report.json"
    layer = Layer.of(config(), "bf16")
    tuning.save(str(path), Tuning(Machine.here(CPU, 2), {layer: Choices(small_tokens=4)}))
    monkeypatch.setenv("MOE_NVLINK_TUNING", str(path))
    done = run("--device", "cpu", "--output", str(output), command="verify")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = json.loads(output.read_text())["tuning"]
    assert f"tuning: {line}" in done.stdout.splitlines()
    assert line.startswith(f"{path}, {tuning.arguments(layer)}: tuned values take ")
    assert line.endswith(" at 8 tokens a rank)")


def compared(rank: int, _size: int, path: str) -> list[str] | str:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(trial.Trials, "_ratios", planted):
        try:
            return tune.compared(path, as_group(group, 60.0), CPU, seconds=0.1, timeout_s=20.0)
        except ConfigError as error:
            return str(error)


def test_planted_gains_are_said(tmp_path: Path) -> None:
    path = str(tmp_path / "tuned.json")
    layer = Layer.of(config(), "bf16")
    tuning.save(path, Tuning(Machine.here(CPU, 2), {layer: Choices(small_tokens=4)}))
    for (line,) in two_ranks(tmp_path, compared, path):
        assert line.endswith(
            "tuned values take 0.71 of today's time (0.50 at 1, 1.00 at 8 tokens a rank)"
        )
    tuning.save(path, Tuning(Machine.here(CPU, 3), {layer: TODAY}))
    for said in two_ranks(tmp_path, compared, path):
        assert "it has ranks 3, and here it is 2" in said


def test_options_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "--help"])
    told = capsys.readouterr().out
    for field in dataclasses.fields(tune.Options):
        assert f"--{field.name.removesuffix('_s').replace('_', '-')}" in told
