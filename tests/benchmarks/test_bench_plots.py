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


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return plots.figures_of(result())


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


# ---- Files.


def test_a_png_names_its_result_file(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    made = result()
    path.write_text(json.dumps(made))
    png, other = plots.plot_file(path, tmp_path / "plots")
    assert {png.name, other.name} == {"latency.png", "bandwidth.png"}
    assert plots.recorded_source(png) == plots.source_of(path)
    assert plots.source_of(path).startswith("made.json sha256:")
    path.write_text(json.dumps(made | {"more": 1}))
    assert plots.recorded_source(png) != plots.source_of(path)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"kind": "serve"}, "no plots of kind 'serve'; needs one of moe_comm, scheduler"),
        (result(rows=[]), "'rows' is empty"),
    ],
)
def test_what_cannot_be_plotted_is_refused(made: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plots.figures_of(made)
