"""benchmarks/moe_comm/plots.py: what the figures hold, by matplotlib's own account of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moe_comm import plots

BATCHES = (1, 16, 128)
SLOWER = {"moe_nvlink": 1.0, "gloo_gather": 9.0, "all_to_all": 3.0}


def phase(us: float) -> dict[str, float]:
    times = {"median_us": us, "p95_us": 2 * us, "q25_us": 0.9 * us, "q75_us": 1.25 * us}
    return {**times, "copied_gb_s": 1000 / us, "ceiling_gb_s": 7.5}


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
