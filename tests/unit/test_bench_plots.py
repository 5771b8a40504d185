"""benchmarks/moe_comm/plots.py: what the figures hold, by matplotlib's own account of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.moe_comm import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 16, 128)
SLOWER = {"moe_nvlink": 1.0, "gloo_gather": 9.0, "all_to_all": 3.0}


def phase(us: float) -> dict[str, float]:
    return {
        "median_us": us,
        "p95_us": 2 * us,
        "q25_us": 0.9 * us,
        "q75_us": 1.25 * us,
        "copied_gb_s": 1000 / us,
        "ceiling_gb_s": 7.5,
    }


def row(backend: str, tokens: int, recipe: str = "bf16", combine: str = "bf16") -> dict[str, Any]:
    us = SLOWER[backend] * (50 + tokens)
    return {
        "backend": backend,
        "tokens": tokens,
        "ep_size": 4,
        "hidden_size": 7168,
        "top_k": 8,
        "num_experts": 256,
        "recipe": recipe,
        "combine_format": combine,
        "router": "uniform",
        "dispatch": phase(us),
        "combine": phase(2 * us),
        "both": phase(3 * us),
    }


def result(**changed: Any) -> dict[str, Any]:
    made = {
        "schema": 1,
        "kind": "moe_comm",
        "machine": {"date": "2026-01-02", "cpu": "A CPU", "cores": 3, "commit": "abc1234"},
        "options": {"device": "cpu", "emulate_ranks": False},
        "ceiling": "every rank copies",
        "rows": [row(backend, tokens) for backend in SLOWER for tokens in BATCHES],
    }
    return made | changed


def growth() -> dict[str, Any]:
    points = [[x, 10 + x, 9 + x, 13 + x] for x in (1, 8, 64)]
    fit = {"formula": "10 + tokens", "curve": [[x, 10 + x] for x in (1, 2, 4, 8, 16, 32, 64)]}
    series = [
        {"name": f"{name}: dispatch", "x_label": f"{name} a rank", "points": points, "fit": fit}
        for name in ("tokens", "ranks", "top_k", "bytes")
    ]
    return {"kind": "growth", "device": "cpu", "machine": result()["machine"], "series": series}


@pytest.fixture(scope="module")
def model_result() -> dict[str, Any]:
    """The newest one in results/, so that nothing is fitted here."""
    newest = max((ROOT / "benchmarks/results").glob("*-model.json"))
    found: dict[str, Any] = json.loads(newest.read_text())
    return found


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return plots.figures_of(result())


@pytest.fixture(scope="module")
def model_figures(model_result: dict[str, Any]) -> dict[str, Figure]:
    return plots.figures_of(model_result)


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.axison]


def labels(figure: Figure) -> list[str]:
    return [entry.get_text() for legend in figure.legends for entry in legend.get_texts()]


def points(axes: Axes, label: str) -> list[tuple[float, float]]:
    """Of a line, or of the middle of its error bars."""
    for container in axes.containers:
        if container.get_label() == label:
            return [tuple(point) for point in container[0].get_xydata().tolist()]
    (line,) = (line for line in axes.lines if line.get_label() == label)
    return [tuple(point) for point in line.get_xydata().tolist()]  # type: ignore[union-attr]


# ---- bench_moe_comm.


def test_latency_shows_medians_quartiles_and_tails(figures: dict[str, Figure]) -> None:
    assert set(figures) == {"latency", "bandwidth"}
    figure = figures["latency"]
    assert [axes.get_title() for axes in panels(figure)] == [
        "dispatch",
        "combine",
        "dispatch + combine",
    ]
    for factor, axes in zip((1, 2, 3), panels(figure), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert "us" in axes.get_ylabel()
        assert axes.get_xlabel() == "tokens per rank"
        for backend, slower in SLOWER.items():
            found = points(axes, f"{backend}: median, quartiles")
            assert found == [(n, factor * slower * (50 + n)) for n in BATCHES]
        errorbar: Any = axes.containers[0]
        whiskers = errorbar.lines[2][0].get_segments()
        assert whiskers[0][:, 1].tolist() == pytest.approx([0.9 * factor * 51, 1.25 * factor * 51])
        tails: list[Any] = [line for line in axes.lines if line.get_label() == "_p95"]
        assert len(tails) == 3
        assert list(tails[0].get_ydata()) == [2 * factor * (50 + n) for n in BATCHES]
    assert len(labels(figure)) == 3
    title, ranks, origin = figure.get_suptitle().splitlines()
    assert title.endswith("256 experts, uniform router, bf16 / bf16")
    assert ranks == "CPU ranks: processes on 3 cores"
    assert origin == "A CPU  |  2026-01-02  |  commit abc1234"


def test_bandwidth_stands_beside_the_ceiling(figures: dict[str, Figure]) -> None:
    figure = figures["bandwidth"]
    for axes in panels(figure):
        assert "GB/s" in axes.get_ylabel()
        assert axes.get_ylim()[0] == 0
        ceiling = points(axes, "ceiling: a copy of the same bytes")
        assert ceiling == [(n, 7.5) for n in BATCHES]
        assert len(points(axes, "moe_nvlink")) == len(BATCHES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cpu"}, "CPU ranks: processes on 3 cores"),
        ({"device": "cuda", "emulate_ranks": True}, "ranks emulated on one GPU (A GPU): no NVLink"),
        ({"device": "cuda", "emulate_ranks": False}, "one GPU a rank (A GPU)"),
        ({"device": "rehearsal"}, "REHEARSAL on CPU threads: no GPU, times mean nothing"),
    ],
)
def test_titles_say_what_kind_of_ranks(options: dict[str, Any], said: str) -> None:
    made = result(options=options)
    made["machine"] = made["machine"] | {"gpu": "A GPU"}
    assert plots.ranks_of(made) == said


# ---- The model.


def test_the_model_s_figures_say_predicted(model_figures: dict[str, Figure]) -> None:
    made = model_figures
    assert set(made) == {"model_fit", "model_bandwidth", "model_ours", "model_where"}
    for name, figure in made.items():
        assert "predicted" in figure.get_suptitle().lower(), name
        for label in labels(figure):
            assert re.search("predicted|published|link, one way", label), label
        assert "nothing measured" in figure.get_suptitle()


def test_the_model_stands_beside_the_tables(
    model_result: dict[str, Any], model_figures: dict[str, Figure]
) -> None:
    made = model_figures
    published = model_result["validation"]["fitted"]["rows"]
    for axes, verb in zip(panels(made["model_fit"]), ("dispatch", "combine"), strict=True):
        for ep_size in (8, 16, 32, 64):
            rows = [
                (one["tokens"], one["published_us"])
                for one in published
                if (one["verb"], one["ep_size"]) == (verb, ep_size)
            ]
            assert points(axes, f"EP{ep_size}: published table") == rows
            assert len(points(axes, f"EP{ep_size}: predicted")) == len(rows)
        assert len(points(axes, "EP72: predicted, no table")) == 12
    (dispatch, _) = panels(made["model_bandwidth"])
    # The published figure of 8 ranks and 2048 tokens, by way of its time.
    assert points(dispatch, "EP8: published table")[-1][1] == pytest.approx(753.28, rel=2e-3)


def test_stacks_are_whole(model_figures: dict[str, Figure]) -> None:
    figure = model_figures["model_where"]
    for axes in panels(figure):
        tops: dict[float, float] = {}
        for bars in axes.containers:
            for bar in bars:
                tops[bar.get_x()] = max(tops.get(bar.get_x(), 0.0), bar.get_y() + bar.get_height())
        assert list(tops.values()) == pytest.approx([1.0] * 4)


# ---- growth.


def test_growth_shows_points_and_curves() -> None:
    (figure,) = plots.figures_of(growth()).values()
    assert "measured, and fitted curve" in figure.get_suptitle()
    assert "CPU ranks" in figure.get_suptitle()
    assert len(panels(figure)) == 4
    for axes, one in zip(panels(figure), growth()["series"], strict=True):
        assert axes.get_title() == one["name"]
        assert axes.get_xlabel() == one["x_label"]
        assert points(axes, "measured: median, quartiles") == [(1, 11), (8, 18), (64, 74)]
        assert len(points(axes, "fitted: 10 + tokens")) == 7
    emulated = growth() | {"device": "cuda"}
    (figure,) = plots.figures_of(emulated).values()
    assert "ranks emulated on one GPU" in figure.get_suptitle()


# ---- Files.


def test_a_png_names_its_result_file(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    made = growth()
    path.write_text(json.dumps(made | {"series": made["series"][:1]}))
    (png,) = plots.plot_file(path, tmp_path / "plots")
    assert png == tmp_path / "plots" / "growth.png"
    assert plots.recorded_source(png) == plots.source_of(path)
    assert plots.source_of(path).startswith("made.json sha256:")
    path.write_text(json.dumps(made | {"more": 1}))
    assert plots.recorded_source(png) != plots.source_of(path)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"kind": "serve"}, "no plots of kind 'serve'; needs one of moe_comm, growth, model, "),
        (result(rows=[]), "'rows' is empty"),
        (growth() | {"series": []}, "'series' is empty"),
    ],
)
def test_what_cannot_be_plotted_is_refused(made: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plots.figures_of(made)
