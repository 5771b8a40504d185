"""self_check: what a server runs before it loads weights."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, self_check
from moe_nvlink_plugin.choices import TODAY, Choices
from moe_nvlink_plugin.errors import ConfigError, DisagreementError, SelfCheckError
from moe_nvlink_plugin.exchange.sizes import gets_by_tma
from moe_nvlink_plugin.exchange.tuning import Layer, Machine, Tuning, save
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.checks import Rounds, _Ran, run_together
from moe_nvlink_plugin.verify.self_check import _checks
from tests.core.exchange import small_exchange
from tests.core.verify.test_checks import plant

CONFIG = small_exchange.config(
    2,
    num_experts=6,
    hidden_size=128,
    max_tokens_per_rank=4096,
    dtype=torch.bfloat16,
    timeout_s=60.0,
)


def body(group: ThreadGroup, level: str = "quick", **changes: Any) -> None:
    self_check(dataclasses.replace(CONFIG, ep_rank=group.rank, **changes), group, level=level)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_right_ranks_only_log(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="moe_nvlink_plugin"):
        run_ranks(2, functools.partial(body, level=level))
    assert sum("rounds as the reference has them" in line for line in caplog.messages) == 2


def test_off_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoeAllToAll, "create", None)
    run_ranks(2, functools.partial(body, level="off"))


def test_an_unknown_level_is_refused() -> None:
    for outcome in try_ranks(2, functools.partial(body, level="thorough")):
        assert isinstance(outcome, ConfigError)
        assert "level='thorough' is not one of quick, full, off" in str(outcome)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": "fp8_block", "combine": "fp8_block"},
        {"recipe": "bytes_640"},
        {"small_tokens": 8, "dtype": torch.float32},
        {"max_tokens_per_rank": 1, "hidden_size": 7},
        {"num_experts": 2, "top_k": 32},
    ],
    ids=str,
)
def test_geometries(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the formats of the layer are among what is checked."""
    seen: set[tuple[str | None, str]] = set()
    inner = cases.run_round

    def noted(exchange: MoeAllToAll, *given: Any, **named: Any) -> Any:
        seen.add((exchange.config.recipe, str(exchange.config.combine)))
        return inner(exchange, *given, **named)

    monkeypatch.setattr(cases, "run_round", noted)
    run_ranks(2, functools.partial(body, **changes))
    recipe, combine = changes.get("recipe"), changes.get("combine", "bf16")
    assert (None, combine) in seen
    assert (recipe, combine) in seen or recipe == "bytes_640", "no quantiser makes these bytes"


@pytest.mark.parametrize(("small_tokens", "kinds"), [(0, {"large"}), (None, {"large", "small"})])
def test_gpus_check_the_kernels_that_they_use(small_tokens: int | None, kinds: set[str]) -> None:
    config = dataclasses.replace(CONFIG, small_tokens=small_tokens)
    found = _checks(config, torch.device("cuda"), is_full=False)
    assert {check.name.split()[0] for check in found} == kinds


@pytest.mark.parametrize("data_bytes", [14, 12])
def test_gpus_check_the_units_that_they_use(
    monkeypatch: pytest.MonkeyPatch, data_bytes: int
) -> None:
    def units(config: AllToAllConfig, *, is_full: bool) -> set[int | None]:
        checks = _checks(config, torch.device("cuda"), is_full=is_full)
        return {each.case.config(0).unit_data_bytes for each in checks if isinstance(each, Rounds)}

    config = dataclasses.replace(CONFIG, unit_data_bytes=data_bytes)
    assert units(config, is_full=False) == {data_bytes}
    monkeypatch.setenv("MOE_NVLINK_UNIT_DATA_BYTES", str(data_bytes))
    config = dataclasses.replace(CONFIG, unit_data_bytes=None)
    assert units(config, is_full=False) == {data_bytes}
    assert units(config, is_full=True) == {14, 12}


def test_a_fault_is_an_error_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead = "pack_cell(shared.epoch, count, tag)", "pack_cell(shared.epoch, 0, tag)"
    plant(monkeypatch, line, instead)
    outcomes = try_ranks(2, body)
    assert all(isinstance(outcome, SelfCheckError) for outcome in outcomes)
    (told,) = {str(outcome) for outcome in outcomes}
    assert "self-check (large batches) failed: rank 0: MismatchError: round 0" in told
    assert "0 rows instead of" in told


def test_an_exchange_that_is_there_goes_on() -> None:
    """Its memory is another one's."""

    def check(group: ThreadGroup) -> None:
        config = dataclasses.replace(CONFIG, ep_rank=group.rank, max_tokens_per_rank=8)
        case = cases.Case(tokens=(8, 8), num_experts=6, top_k=2, hidden_size=128)
        (mine, *_rest) = cases.make_inputs(dataclasses.replace(case, dtype=torch.bfloat16))
        with MoeAllToAll.create(config, group) as exchange:
            before = cases.run_round(exchange, mine)
            self_check(config, group)
            after = cases.run_round(exchange, mine)
        assert torch.equal(before.combined, after.combined)

    run_ranks(2, check)


@pytest.mark.parametrize(
    ("recipe", "level"),
    [(None, "quick"), ("fp8_block", "quick"), ("nvfp4", "quick"), (None, "full")],
)
def test_while_a_framework_builds_its_model(recipe: str | None, level: str) -> None:
    """SGLang then has the model's type and the device of its weights as torch's defaults."""
    (group,) = ThreadGroup.ranks(1)
    config = dataclasses.replace(CONFIG, ep_size=1, recipe=recipe)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            self_check(config, group, level=level)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tma_sms", [0, 32])
@pytest.mark.parametrize("is_file", [False, True], ids=["choices", "file"])
def test_its_exchanges_have_the_builds_of_the_layer(
    is_file: bool, tma_sms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_NVLINK_MAX_SMS", "16")
    choices = Choices(tma_sms=tma_sms, async_release=True, combine_threads=128)
    chosen: str | Choices = choices
    if is_file:
        layer = Layer.of(CONFIG, MoeAllToAll.check(CONFIG).name)
        machine = Machine.here(torch.device("cpu"), CONFIG.ep_size)
        save(str(tmp_path / "tuned.json"), Tuning(machine, {layer: choices}))
        chosen = str(tmp_path / "tuned.json")
    made = mock.Mock(wraps=MoeAllToAll.create)
    monkeypatch.setattr(MoeAllToAll, "create", made)
    run_ranks(2, functools.partial(body, tuning=chosen))
    by_tma = [gets_by_tma(call.args[0]) for call in made.call_args_list]
    assert len(by_tma) >= 2
    assert set(by_tma) == {tma_sms == 32}
    expected = dataclasses.replace(choices, combine_threads=TODAY.combine_threads)
    assert {call.args[0].choices for call in made.call_args_list} == {expected}


def test_every_round_of_a_full_check_has_the_builds_of_the_layer() -> None:
    chosen = Choices(async_release=True, pdl=False)
    config = dataclasses.replace(CONFIG, tuning=chosen.but("combine_threads", 128))
    checks = _checks(config, torch.device("cpu"), is_full=True)
    assert {each.case.choices for each in checks if isinstance(each, Rounds)} == {chosen}


@pytest.mark.parametrize("leaving", [(), (1,), (0, 1)])
def test_it_has_the_verbs_of_a_layer_that_leaves_sms(
    leaving: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank alone may leave SMs, and then all of them check."""
    combine_async, begun = MoeAllToAll.combine_async, mock.Mock()

    def noted(layer: MoeAllToAll, *given: Any, **options: Any) -> Any:
        begun(layer.config.ep_rank)
        assert layer.config.leave_sms
        return combine_async(layer, *given, **options)

    monkeypatch.setattr(MoeAllToAll, "combine_async", noted)

    def rank_main(group: ThreadGroup) -> None:
        body(group, leave_sms=group.rank in leaving)

    run_ranks(2, rank_main)
    assert {call.args[0] for call in begun.call_args_list} == ({0, 1} if leaving else set())


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("level", "off", "rank 0 has quick, rank 1 has off"),
        ("level", "thorough", "rank 0 has quick, rank 1 has thorough"),
        ("recipe", "fp8_block", "rank 0 has None, rank 1 has fp8_block"),
        ("small_tokens", 8, "rank 0 has None, rank 1 has 8"),
        ("tuning", "tuned.json", "rank 0 has none, rank 1 has given"),
    ],
)
def test_what_one_rank_alone_was_told_is_named(field: str, given: Any, said: str) -> None:
    def one(group: ThreadGroup) -> None:
        body(group, **({field: given} if group.rank else {}))

    for outcome in try_ranks(2, one):
        assert isinstance(outcome, DisagreementError)
        assert f"{field}: {said}" in str(outcome)


@pytest.mark.parametrize("error", [ValueError, TypeError, MemoryError, OSError, IndexError])
def test_an_error_of_any_kind_is_told(error: type[Exception]) -> None:
    """The other rank does not wait."""

    def in_rounds(group: ThreadGroup) -> list[str]:
        def batches() -> Iterator[_Ran]:
            yield _Ran([], [], [])
            if group.rank == 1:
                raise error("planted")
            yield _Ran([], [], [])

        return run_together(group, batches(), lambda _ran, _shared: None)

    def when_comparing(group: ThreadGroup) -> list[str]:
        def compared(_ran: Any, _shared: Any) -> None:
            if group.rank == 1:
                raise error("planted")

        return run_together(group, iter([_Ran([], [], [])]), compared)

    for called in (in_rounds, when_comparing):
        assert run_ranks(2, called) == [["", f"{error.__name__}: planted"]] * 2


def test_places_without_a_rank() -> None:
    run_ranks(2, functools.partial(body, ep_size=4, places=(0, 1)))
