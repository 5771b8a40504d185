"""benchmarks/growth.py: curves find what times were planted with, and points that are off them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import growth, growth_fit
from benchmarks.growth_fit import Point, Term
from benchmarks.moe_comm import accounting
from benchmarks.moe_comm.backends import WrongResult
from benchmarks.moe_comm.options import OptionError, Options
from benchmarks.moe_comm.processes import RunError
from benchmarks.reporting import goals, tables
from benchmarks.reporting.files import Result

LINE = (Term("a", "", lambda _x: 1.0), Term("b", "n", lambda x: x))
CORES, CACHE = 2, 2**25


def points(law: Callable[[float], float], noise: float = 0.01, spread: float = 0.05) -> list[Point]:
    """Of a law, with noise that one seed makes, and quartiles of `spread` to either side."""
    random_ = random.Random(1)
    made = []
    for x in (2.0**n for n in range(14)):
        us = law(x) * (1 + random_.uniform(-noise, noise))
        made.append(Point(x, us, us * (1 - spread), us * (1 + spread)))
    return made


# --- fits


def test_a_line_is_found_over_four_decades() -> None:
    found = growth_fit.fit(points(lambda n: 300 + 12 * n), LINE)
    assert found.values == pytest.approx((300, 12), rel=0.02)
    assert max(abs(off) for off in found.off) < 0.02
    assert found.knees() == []
    described = found.described("key")
    assert described["fit"]["formula"] == "a + b*n"
    assert described["fit"]["printed"] == f"{found.values[0]:.3g} + {found.values[1]:.3g}*n"
    curve = described["fit"]["curve"]
    assert (curve[0][0], curve[-1][0]) == pytest.approx((1, 8192))
    assert curve[-1][1] == pytest.approx(300 + 12 * 8192, rel=0.02)


def test_two_rates_are_found_on_their_sides_of_the_cache() -> None:
    terms = growth._two_rates("n", 136)
    law = lambda n: 300 + 12 * min(n, 136) + 20 * max(0, n - 136)  # noqa: E731
    assert growth_fit.fit(points(law), terms).values == pytest.approx((300, 12, 20), rel=0.05)


def test_a_planted_knee_is_named_and_bends_nothing() -> None:
    law = lambda n: (300 + 12 * n) * (1.4 if n == 256 else 1)  # noqa: E731
    found = growth_fit.fit(points(law), LINE)
    assert found.values == pytest.approx((300, 12), rel=0.03)
    (knee,) = found.knees()
    assert knee["x"] == 256
    assert knee["off"] == pytest.approx(0.4, abs=0.03)
    assert knee["fit_us"] == pytest.approx(300 + 12 * 256, rel=0.03)


def test_a_change_of_rate_that_no_term_explains_is_a_knee() -> None:
    law = lambda n: 300 + 12 * n + 60 * max(0, n - 2048)  # noqa: E731
    assert {knee["x"] for knee in growth_fit.fit(points(law), LINE).knees()} >= {8192}


def test_what_a_points_own_spread_covers_is_no_knee() -> None:
    law = lambda n: (300 + 12 * n) * (1.4 if n == 256 else 1)  # noqa: E731
    assert growth_fit.fit(points(law, spread=0.5), LINE).knees() == []
    assert len(growth_fit.fit(points(law, spread=0.2), LINE).knees()) == 1
    assert growth_fit.fit(points(law), LINE).knees(least_off=0.6) == []


def test_a_term_that_takes_no_time_is_zero() -> None:
    terms = (*LINE, Term("c", "sqrt(n)", lambda n: n**0.5))
    found = growth_fit.fit(points(lambda n: 300 + 12 * n, noise=0), terms)
    assert found.values == pytest.approx((300, 12, 0), rel=1e-3)
    assert "sqrt" not in found.described("key")["fit"]["printed"]
    assert "sqrt" in found.described("key")["fit"]["formula"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Point(1, 1, 1, 1)], "1 points cannot give 2"),
        ([Point(2, 1, 1, 1), Point(1, 1, 1, 1)], "order of x"),
        ([Point(1, 0, 1, 1), Point(2, 1, 1, 1)], "must be positive"),
        ([Point(1, float("nan"), 1, 1), Point(2, 1, 1, 1)], "must be positive"),
    ],
)
def test_points_that_give_no_curve(given: list[Point], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        growth_fit.fit(given, LINE)


# --- what the terms are made of


@pytest.mark.parametrize(("ranks", "top_k"), [(1, 8), (4, 1), (4, 8), (16, 8), (64, 8), (4, 32)])
def test_expected_ranks_are_those_of_the_router(ranks: int, top_k: int) -> None:
    options = Options(backends=("moe_nvlink",), ep_size=ranks, top_k=top_k, batches=(256,))
    put = accounting.traffic(options, 256).put_rows
    found = sum(put) / len(put) / 256
    assert growth.expected_ranks(ranks, top_k, 256) == pytest.approx(found, rel=0.03)


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for index, text in enumerate(("32K", "512K", "32M", "bogus")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}/size").write_text(f"{text}\n")
    assert growth.last_cache_bytes(tmp_path) == 2**25
    with pytest.raises(OptionError, match="names no cache"):
        growth.last_cache_bytes(tmp_path / "index0")


# --- sweeps of a machine whose law is known


class Machine:
    """In the place of a measurement: 100 us, 0.1 us a row, 10 us a rank, in turns on the cores."""

    def __init__(self, off: dict[tuple[str, float], float] | None = None) -> None:
        self.off = off or {}
        self.asked: list[Options] = []

    def __call__(self, options: Options) -> list[dict[str, Any]]:
        self.asked.append(options)
        return [self._row(options, tokens) for tokens in options.batches]

    def _row(self, options: Options, tokens: int) -> dict[str, Any]:
        kilobytes = growth.row_bytes(options) / 1024
        rows = tokens * growth.expected_ranks(options.ep_size, options.top_k, options.num_experts)
        us = 100 + 0.01 * rows * kilobytes + 10 * options.ep_size
        us *= max(1, options.ep_size / CORES)
        for (field, value), factor in self.off.items():
            us *= factor if {"tokens": tokens, "top_k": options.top_k}[field] == value else 1
        times = {"median_us": us, "q25_us": us * 0.97, "q75_us": us * 1.03}
        return {"backend": "moe_nvlink", "tokens": tokens, "dispatch": times, "combine": times}


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "place_of", lambda _device: growth.Place(CORES, CACHE, True))


def measure(folder: Path, machine: Machine, *arguments: str) -> dict[str, Any]:
    path = folder / "growth.json"
    growth.main(["--output_file", str(path), *arguments], machine)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_dimension_has_its_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(tmp_path, Machine())
    assert result["kind"] == "growth"
    assert result["not_measured"] == []
    assert {one["dimension"] for one in result["series"]} == set(growth.DIMENSIONS)
    assert set(goals.DIMENSIONS) <= set(growth.DIMENSIONS)
    for series in result["series"]:
        assert series["knees"] == [], series["name"]
        assert max(map(abs, series["fit"]["off"])) < 0.03, series["name"]
        assert len(series["points"]) == len(growth.DIMENSIONS[series["dimension"]].values)
    by_name = {one["name"]: one for one in result["series"]}
    ranks = by_name["ranks: dispatch"]
    assert [point[0] for point in ranks["points"]] == [1, 2, 4, 8, 16, 32, 64]
    rate_us = 0.01 * 7168 * 2 / 1024  # of a row
    assert ranks["fit"]["values"] == pytest.approx({"a": 100, "b": rate_us, "c": 10}, rel=0.05)
    # 64 ranks take turns on 2 cores: of a core each has a 32nd of the time.
    assert ranks["core_us"][-1] == pytest.approx([64, ranks["points"][-1][1] / 32])
    assert [point[0] for point in by_name["tokens: combine"]["points"]][-1] == 8192
    assert by_name["payload: combine"]["points"][0][0] == 1024
    assert "payload_nvfp4: combine" not in by_name
    printed = capsys.readouterr().out
    assert "us of a core" in printed
    assert "KNEE" not in printed


def test_a_planted_knee_is_printed_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine({("tokens", 256): 1.5})
    result = measure(tmp_path, machine, "--dimensions", "tokens")
    ids = [knee["id"] for one in result["series"] for knee in one["knees"]]
    assert ids == ["cpu-tokens-dispatch-256", "cpu-tokens-combine-256"]
    assert "KNEE cpu-tokens-dispatch-256" in capsys.readouterr().out
    shown = Result(tmp_path / "growth.json", result)
    text = tables.growth(shown)
    assert "`cpu-tokens-dispatch-256`" in text
    assert "+48%" in text  # the curve gives way by a little
    assert goals.unexplained(shown, "`cpu-tokens-dispatch-256`: a reason") == ids[1:]


def test_a_run_that_fails_ends_the_sweep_and_keeps_what_was_measured(tmp_path: Path) -> None:
    class Failing(Machine):
        def __call__(self, options: Options) -> list[dict[str, Any]]:
            if options.top_k == 16:
                raise RunError("interrupted; no result was written")
            return super().__call__(options)

    machine = Failing()
    result = measure(tmp_path, machine, "--dimensions", "top_k", "payload")
    assert [point[0] for point in result["series"][0]["points"]] == [1, 2, 4, 8]
    assert [options.top_k for options in machine.asked] == [1, 2, 4, 8]
    assert result["not_measured"][0] == "top_k 16: interrupted; no result was written"
    assert {one["dimension"] for one in result["series"]} == {"top_k"}


def test_a_point_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    class Small(Machine):
        def __call__(self, options: Options) -> list[dict[str, Any]]:
            if options.top_k == 4:
                raise OptionError("4 take more than there is")
            return [] if options.top_k == 16 else super().__call__(options)

    result = measure(tmp_path, Small(), "--dimensions", "top_k")
    assert [point[0] for point in result["series"][0]["points"]] == [1, 2, 8, 32]
    assert result["not_measured"] == [
        "top_k 4: 4 take more than there is",
        "top_k 16: more than the GPU's memory",
    ]


def test_a_wrong_result_is_no_number(tmp_path: Path) -> None:
    def wrong(_options: Options) -> list[dict[str, Any]]:
        raise WrongResult("rank 1: another row")

    path = tmp_path / "growth.json"
    with pytest.raises(WrongResult):
        growth.main(["--output_file", str(path), "--dimensions", "top_k"], wrong)
    assert not path.exists()


def test_passes_go_up_and_down_and_widen_the_spread(tmp_path: Path) -> None:
    class Drifting(Machine):
        def _row(self, options: Options, tokens: int) -> dict[str, Any]:
            row = super()._row(options, tokens)
            slow = 1.5 if len(self.asked) > 6 else 1.0  # the machine in the second pass
            row["dispatch"] = {name: slow * us for name, us in row["dispatch"].items()}
            return row

    machine = Drifting()
    result = measure(tmp_path, machine, "--dimensions", "top_k", "--passes", "2")
    asked = [options.top_k for options in machine.asked]
    assert asked == [1, 2, 4, 8, 16, 32, 32, 16, 8, 4, 2, 1]
    point = Point(*result["series"][0]["points"][0])
    assert point.q75_us / point.q25_us == pytest.approx(1.5 * 1.03 / 0.97)
    assert point.us == pytest.approx(1.25 / 1.03 * point.q75_us / 1.5)


def test_dear_points_have_fewer_iterations() -> None:
    base = Options(backends=("moe_nvlink",), iters=40, batches=(64,))
    by_tokens = {options.batches[-1]: options.iters for options in growth.runs(base, "tokens")}
    assert by_tokens == {512: 40, 1024: 20, 2048: 10, 4096: 8, 8192: 8}
    by_ranks = {options.ep_size: options.iters for options in growth.runs(base, "ranks")}
    assert (by_ranks[1], by_ranks[8], by_ranks[64]) == (40, 20, 8)


def test_what_was_measured_before_a_crash_is_left(tmp_path: Path) -> None:
    class Crashing(Machine):
        def __call__(self, options: Options) -> list[dict[str, Any]]:
            if options.hidden_size != 7168:
                raise WrongResult("rank 1: another row")
            return super().__call__(options)

    with pytest.raises(WrongResult):
        measure(tmp_path, Crashing(), "--dimensions", "top_k", "payload")
    left = json.loads((tmp_path / "growth.json").read_text())
    assert {one["dimension"] for one in left["series"]} == {"top_k"}
    assert "incomplete" in left


def test_too_few_points_for_a_curve(tmp_path: Path) -> None:
    class Small(Machine):
        def __call__(self, options: Options) -> list[dict[str, Any]]:
            return super().__call__(options) if options.top_k < 4 else []

    few = measure(tmp_path, Small(), "--dimensions", "top_k")
    assert few["series"] == []
    assert any("cannot give 3 coefficients" in text for text in few["not_measured"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--passes", "0"], "--passes 0 must be at least 1"),
        (["--dimensions", "weather"], "invalid choice: 'weather'"),
        (["--hidden_size", "-1"], "hidden_size"),
        (["--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_bad_options(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        growth.main(arguments, Machine())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_times_are_bench_moe_comms_own() -> None:
    from benchmarks.moe_comm import emulated, processes

    assert growth.measure_on("cpu") is processes.run
    assert growth.measure_on("cuda") is emulated.run
    assert growth.measure_on("rehearsal") is emulated.run
