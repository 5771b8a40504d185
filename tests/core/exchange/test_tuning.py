"""Files of moe-nvlink tune: what they say reaches the launches, and wrong files are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.choices import TODAY, Choices, table
from moe_nvlink_plugin.errors import ConfigError, DisagreementError, PeerError
from moe_nvlink_plugin.exchange import tuning
from moe_nvlink_plugin.exchange.tuning import Layer, Machine, Tuning
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks

CPU = torch.device("cpu")
TUNED = Choices(small_tokens=4, small_combine_tokens=2, host_threads=2, full_link_sms=48, pdl=False)
SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "max_tokens_per_rank": 8}


@pytest.fixture(autouse=True)
def nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TUNING", "SMALL_TOKENS", "HOST_THREADS"):
        monkeypatch.delenv(f"MOE_NVLINK_{name}", raising=False)


def config(rank: int = 0, size: int = 1, **values: Any) -> AllToAllConfig:
    return AllToAllConfig(ep_size=size, ep_rank=rank, **{**SIZES, **values})


def choices_of(*paths: str) -> list[Any]:
    """The choices of ranks with these files, or the error of a rank."""

    def create(group: ThreadGroup) -> Choices:
        mine = config(group.rank, group.size, tuning=paths[group.rank])
        with MoeAllToAll.create(mine, group) as layer:
            return layer.config.choices

    return try_ranks(len(paths), create)


def written(folder: Path, choices: Choices = TUNED, ranks: int = 1, name: str = "tuned") -> str:
    """A file for this machine and `config`."""
    path = str(folder / f"{name}.json")
    layers = {Layer.of(config(), "bf16"): choices}
    tuning.save(path, Tuning(Machine.here(CPU, ranks), layers))
    return path


def alone(**values: Any) -> MoeAllToAll:
    (group,) = ThreadGroup.ranks(1)
    return MoeAllToAll.create(config(**values), group)


def refusal(path: str, **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        alone(tuning=path, **values).close()
    return str(caught.value)


# The table.


@pytest.mark.parametrize(
    "values", [{"host_threads": 0}, {"small_tokens": 70}, {"pdl": 1}, {"sent_weight": "1"}]
)
def test_choices_that_are_none(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"{name}={values[name]!r} is none of "):
        Choices(**values)


def test_todays_values_are_candidates_and_no_choice_is_nameless() -> None:
    for one in table():
        assert one.today in one.candidates, one.name
        assert len(set(map(repr, one.candidates))) == len(one.candidates), one.name
        assert not one.is_tuned or len(one.candidates) > 1, one.name
        assert set(one.devices) <= {"cpu", "cuda"}, one.name
        assert one.text, one.name
    assert not TODAY.changed()
    assert str(TODAY) == "today's"
    assert str(Choices(small_tokens=0, pdl=False)) == "small_tokens=0, pdl=False"


# What a file says.


def test_what_a_file_says_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    with alone(tuning=path) as layer:
        assert layer.config.choices == TUNED
        assert (layer.config.small_tokens, layer.config.small_combine_tokens) == (4, 2)
        assert layer.config.num_threads == 2
        again = dataclasses.replace(layer.config, timeout_s=1.0)
        assert again.choices == TUNED
    monkeypatch.setenv("MOE_NVLINK_TUNING", path)
    with alone() as layer:
        assert layer.config.choices == TUNED
    with alone(tuning="") as layer:
        assert layer.config.choices == TODAY
        assert (layer.config.small_tokens, layer.config.num_threads) == (0, 1)


def test_what_a_user_says_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    with alone(tuning=path, small_tokens=8, num_threads=1) as layer:
        assert (layer.config.small_tokens, layer.config.small_combine_tokens) == (8, 8)
        assert layer.config.num_threads == 1
    monkeypatch.setenv("MOE_NVLINK_SMALL_TOKENS", "0")
    monkeypatch.setenv("MOE_NVLINK_HOST_THREADS", "3")
    with alone(tuning=path) as layer:
        assert (layer.config.small_tokens, layer.config.num_threads) == (0, 3)


def test_a_round_with_tuned_values(tmp_path: Path) -> None:
    path = written(tmp_path, ranks=2)

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        mine = config(group.rank, 2, tuning=path)
        with MoeAllToAll.create(mine, group) as layer:
            hidden = torch.ones(3, 64, dtype=torch.bfloat16)
            ids = torch.tensor([[0, 7]] * 3, dtype=torch.int32)
            got = layer.dispatch(hidden, ids, torch.ones(3, 2), max_tokens=4)
            rows = layer.combine_input(metadata=got.metadata)
            rows.copy_(got.hidden_states)
            assert layer._layer._channels[0]._launches._most_small == 4
            return layer.combine(rows, got.metadata)

    for output in run_ranks(2, rank_main):
        assert torch.equal(output, torch.full_like(output, 2.0))


# Wrong files.


def changed(path: str, change: Callable[[Any], Any]) -> str:
    content = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(change(content) or content))
    return path


def of_layer(**values: Any) -> Callable[[Any], Any]:
    return lambda file: file["layers"][0].update(values)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.json")
    said = f"tuning='{missing}' (MOE_NVLINK_TUNING) cannot be read: No such file"
    assert said in refusal(missing)
    assert "cannot be read: Is a directory" in refusal(str(tmp_path))
    assert "leave the file out" in refusal(str(tmp_path))
    large = tmp_path / "large"
    large.write_bytes(b" " * (2**20 + 1))
    assert "has more than 1048576 bytes" in refusal(str(large))


def test_torn_files(tmp_path: Path) -> None:
    """At any place, but for the last line's end."""
    path = written(tmp_path)
    text = Path(path).read_bytes()
    torn = [text[:end] for end in range(0, len(text) - 2, 7)]
    for content in (*torn, b"\xff\xfe" + text, b"[" * 100000):
        Path(path).write_bytes(content)
        assert "is torn, or no file of moe-nvlink tune" in refusal(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: [file], "has format 'list', and this package reads 'moe-nvlink tuning 1'"),
        (lambda file: file.update(format="tuning 2"), "has format 'tuning 2'"),
        (
            lambda file: file.update(machine=None),
            "machine has the fields NoneType, not device, ",
        ),
        (lambda file: file["machine"].update(ranks="1"), "machine.ranks='1' is no int"),
        (lambda file: file["machine"].update(ranks=True), "machine.ranks=True is no int"),
        (lambda file: file.update(layers={}), "layers is no list of objects"),
        (lambda file: file.update(layers=[]), "has no layer; write it anew"),
        (of_layer(layer=None), "layers[0].layer has the fields NoneType"),
        (of_layer(choices=1), "layers[0].choices is no object but int"),
        (
            of_layer(choices={"speed": 9}),
            "].choices has 'speed', which is none of small_tokens",
        ),
        (of_layer(choices={"marking_ctas": 64}), "].choices.marking_ctas=64 is none of 8, 16, 32"),
        (of_layer(choices={"pdl": 1}), "layers[0].choices.pdl=1 is none of True, False"),
    ],
)
def test_what_a_file_may_not_say(change: Callable[[Any], Any], said: str, tmp_path: Path) -> None:
    path = changed(written(tmp_path), change)
    refused = refusal(path)
    assert refused.startswith(f"tuning={path!r} (MOE_NVLINK_TUNING)")
    assert said in refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "NVIDIA H200"),
        ("driver", "580.95.05"),
        ("ranks", 8),
        ("nvlink", "18 links, version 5"),
        ("package", "0.0.1"),
    ],
)
def test_a_file_of_another_machine(field: str, value: Any, tmp_path: Path) -> None:
    path = changed(written(tmp_path), lambda file: file["machine"].update({field: value}))
    here = getattr(Machine.here(CPU, 1), field)
    said = f"was written elsewhere: it has {field} {value!r}, and here it is {here!r}; write it"
    assert said in refusal(path)


def test_links_that_nobody_knows_are_not_compared(tmp_path: Path) -> None:
    path = changed(written(tmp_path), lambda file: file["machine"].update(nvlink="unknown"))
    assert choices_of(path) == [TUNED]


def test_a_file_of_another_layer(tmp_path: Path) -> None:
    path = written(tmp_path)
    said = refusal(path, hidden_size=128, recipe="fp8_block")
    assert "the nearest of its 1 has hidden_size 64, and here it is 128; recipe 'bf16', and" in said
    assert (
        "add it with `moe-nvlink tune --num-experts 8 --top-k 2 --hidden-size 128 --max-tokens 8 "
        f"--dtype bfloat16 --recipe fp8_block --combine bf16 --output {path}`"
    ) in said


def test_a_torn_file_is_refused_before_ranks_start(tmp_path: Path) -> None:
    path = tmp_path / "torn"
    path.write_text("{")
    with pytest.raises(ConfigError, match="is torn"):
        MoeAllToAll.check(config(tuning=str(path)))


def test_no_path() -> None:
    with pytest.raises(ConfigError, match="tuning=7 is a int; pass the path of a file"):
        config(tuning=7)


# Ranks.


def test_ranks_with_different_files(tmp_path: Path) -> None:
    for outcome in choices_of(written(tmp_path, ranks=2), written(tmp_path, TODAY, 2, "other")):
        assert isinstance(outcome, DisagreementError)
        assert f"tuning: rank 0 has {TUNED}, rank 1 has today's" in str(outcome)


def test_files_in_other_places_that_say_the_same(tmp_path: Path) -> None:
    paths = written(tmp_path, ranks=2), written(tmp_path, TUNED, 2, "other")
    assert choices_of(*paths) == [TUNED, TUNED]


def test_a_rank_whose_file_is_torn_keeps_nobody_waiting(tmp_path: Path) -> None:
    first, second = choices_of(written(tmp_path, ranks=2), str(tmp_path / "none.json"))
    assert isinstance(first, PeerError)
    assert "rank 1: ConfigError: tuning=" in str(first)
    assert isinstance(second, ConfigError)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    before = Path(path).read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, TODAY)
    assert Path(path).read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]


def test_what_two_processes_add_is_there(tmp_path: Path) -> None:
    """Each has begun its search before the other one's end; through a link, which stays one."""
    file, link = tmp_path / "file.json", tmp_path / "link.json"
    link.symlink_to(file)
    machine = Machine.here(CPU, 1)
    layers = [Layer.of(config(max_tokens_per_rank=most), "bf16") for most in (64, 128)]
    for layer in layers:
        tuning.add(str(link), Tuning(machine, {layer: TUNED}))
    assert tuning.load(str(file)).layers == dict.fromkeys(layers, TUNED)
    assert link.is_symlink()


def test_memory_is_foretold_with_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, Choices(small_tokens=4))
    with alone(tuning=path) as layer:
        assert sum(MoeAllToAll.memory(config(tuning=path)).values()) == layer.workspace_bytes
    with alone() as layer:
        assert sum(MoeAllToAll.memory(config(tuning=path)).values()) > layer.workspace_bytes
