"""benchmarks/report.py: README says what the result files say, and a deviation does not pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, PngImagePlugin

from benchmarks import common, report
from benchmarks.moe_comm import options, plots, rows
from benchmarks.moe_comm.accounting import Traffic
from benchmarks.reporting import goals, tables
from benchmarks.reporting.files import Page, ReportError, Result, complaints, load, newest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "date": "2031-01-02",
    "cpu": "abacus",
    "cores": 2,
    "commit": "abc",
    "command": "python x",
}
TRAFFIC = Traffic(4, (3, 3), (1, 1), 14336, 64, 14336)


def picture(png: Path, source: str) -> Path:
    """A PNG that says what it was drawn from, without drawing: matplotlib is slow to come."""
    text = PngImagePlugin.PngInfo()
    text.add_text(plots.SOURCE_KEY, source)
    Image.new("L", (2, 2)).save(png, pnginfo=text)
    return png


def draw_little(path: Path, folder: Path) -> list[Path]:
    """As plots.plot_file."""
    names = {plot.figure for plot in report.PLOTS}
    return [picture(folder / f"{name}.png", plots.source_of(path)) for name in names]


#: Of README.md, after its section of figures.
LAST_HEADING = "\n## Further reading\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the documents and results, in order."""
    monkeypatch.setattr(plots, "plot_file", draw_little)
    (tmp_path / "benchmarks").mkdir()
    for document in report.SECTIONS:
        shutil.copy(ROOT / document, tmp_path / document)
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    write(tmp_path, "2030-01-01-cpu-moe-comm.json", comm(200.0, 900.0))
    assert report.main([], tmp_path) == 0
    return tmp_path


def write(root: Path, name: str, result: dict[str, Any]) -> Path:
    path = root / "benchmarks/results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def comm(
    ours_us: float, theirs_us: float, tokens: int = 128, peer: str = "gloo_gather", **more: Any
) -> dict[str, Any]:
    """A result as bench_moe_comm writes it, of planted times of two ranks."""
    asked = options.Options(backends=("moe_nvlink", peer), batches=(tokens,), iters=4, **more)
    times = zip(asked.backends, (ours_us, theirs_us), strict=True)
    return written(asked, [planted(asked, name, us, tokens) for name, us in times])


def planted(asked: options.Options, backend: str, us: float, tokens: int) -> dict[str, Any]:
    """A row."""
    times = torch.tensor([[1.0], [1.02], [0.98], [1.0]], dtype=torch.float64) * us
    samples = {phase: times.repeat(1, 2) for phase in rows.PHASES}
    ceilings = {phase: torch.full((4, 2), 10.0) for phase in rows.PHASES}
    extra = {"given": f"what {backend} is spared"}
    return rows.make_row(asked, backend, tokens, samples, TRAFFIC, ceilings, extra)


def written(asked: options.Options, made: list[dict[str, Any]], **machine: str) -> dict[str, Any]:
    """The rows' result."""
    rows.add_ratios(made)
    head = rows.head(asked, ceiling="memcpy", machine=MACHINE | machine)
    return rows.Growing(common.Record(None, head), []).finish(made)


# --- this repository ------------------------------------------------------------------------------


def test_this_repository_says_what_its_results_say() -> None:
    assert list(report.Report(ROOT).problems()) == []


# --- a checkout with one thing wrong --------------------------------------------------------------


def test_a_changed_digit(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = checkout / report.METHODS
    block = readme.read_text().split("<!-- report: recipes-all -->")[1].split(report.END)[0]
    marked = next(line for line in block.splitlines() if "| nvfp4 |" in line)
    change(readme, marked, marked.replace("| nvfp4 | 1", "| nvfp4 | 9"))
    before = readme.read_text()
    assert report.main(["--check"], checkout) == 1
    said = capsys.readouterr().err
    assert f"+{marked}" in said
    assert "| nvfp4 | 9" in said
    assert "python benchmarks/report.py" in said
    assert readme.read_text() == before  # --check changes nothing
    assert report.main([], checkout) == 0
    assert readme.read_text() != before
    assert report.main(["--check"], checkout) == 0


def test_a_result_file_that_is_gone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (checkout / "benchmarks/results").glob("*-cpu-*.json"):
        path.unlink()
    assert report.main(["--check"], checkout) == 1
    said = capsys.readouterr().err
    assert "+**Not measured yet**: `python benchmarks/bench_recipes.py" in said
    assert "latency.png: no result file is there" in said


def test_a_newer_result_file(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(checkout, "2031-01-02-cpu-moe-comm.json", comm(777.0, 900.0))
    assert report.main(["--check"], checkout) == 1
    said = capsys.readouterr().err
    assert "| 777 (765..789) |" in said
    assert "latency.png: drawn from" in said
    assert report.main([], checkout) == 0
    assert report.main(["--check"], checkout) == 0


def test_plots_that_are_missing_outdated_or_nobodys(checkout: Path) -> None:
    def problems() -> str:
        return "\n".join(report.Report(checkout).problems())

    png = checkout / report.PLOTS_FOLDER / "latency.png"
    assert problems() == ""
    result = newest(load(checkout / "benchmarks/results"), report.CPU_TABLE)
    assert result is not None
    result.path.write_text(result.path.read_text() + "\n")  # another file of that name
    assert "latency.png: drawn from" in problems()
    report.main([], checkout)
    assert problems() == ""
    Image.new("L", (2, 2)).save(png)
    assert "latency.png: drawn from ''" in problems()
    png.unlink()
    assert "latency.png: missing" in problems()
    report.main([], checkout)
    shutil.copy(png, png.with_name("other.png"))
    assert "other.png: no plot of benchmarks/report.py" in problems()
    png.write_bytes(b"no picture")
    with pytest.raises(ReportError, match=r"latency\.png.*delete it"):
        problems()


def test_a_plot_is_drawn_of_its_own_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "plot_file", draw_little)
    path = write(tmp_path, "2031-01-02-cpu-moe-comm.json", comm(200.0, 1800.0))
    result = Result(path, json.loads(path.read_text()))
    known = next(plot for plot in report.PLOTS if plot.figure == "latency")
    assert known.draw(tmp_path, [result]) == "latency.png"
    assert plots.recorded_source(known.file(tmp_path)) == plots.source_of(path)
    assert known.stale(tmp_path, [result]) is None
    with pytest.raises(ReportError, match="no figure 'fantasy'"):
        known._replace(name="plot-fantasy", figure="fantasy").draw(tmp_path, [result])


@pytest.mark.parametrize("field", ["date", "cpu", "commit", "command"])
def test_a_result_that_does_not_say_where_it_is_from(checkout: Path, field: str) -> None:
    path = next((checkout / "benchmarks/results").glob("*-cpu-recipes.json"))
    data = json.loads(path.read_text())
    assert complaints(Result(path, data)) == []
    del data["machine"][field]
    path.write_text(json.dumps(data))
    lacking = [said for said in report.Report(checkout).problems() if "lacks" in said]
    assert len(lacking) == 1
    assert field in lacking[0]
    assert path.name in lacking[0]


def test_an_unknown_commit_is_none() -> None:
    assert (
        "commit"
        in complaints(Result(Path("x.json"), {"machine": MACHINE | {"commit": "unknown"}}))[0]
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("| 128 | ours | 2136 | 1.0x |", "a table's row"),
        ("| groups of 4 | 0.68 (0.6..0.7) |", "a table's row"),
        ("It takes 12.5 us here.", "'12.5 us' in prose"),
        ("That is 8.6x as fast.", "'8.6x' in prose"),
        ("It moves 12 GB/s.", "'12 GB/s' in prose"),
        ("Twice as fast, 2 times faster.", "'2 times faster' in prose"),
        ("With hidden size 7168 and 256 MiB, `12 us`, top_k 8, 4 ranks.", None),
        ("| `python x.py -n 12` | what it measures, 4 ranks |", None),
        ("    python x.py  # 12 us", None),
    ],
)
def test_numbers_outside_blocks(checkout: Path, line: str, found: str | None) -> None:
    readme = checkout / "README.md"
    change(readme, "\n## Benchmarks\n", f"\n## Benchmarks\n\n{line}\n")
    strays = list(report.Report(checkout).problems())
    if found is None:
        assert strays == []
    else:
        assert [found in stray for stray in strays] == [True]
        assert f"{line}" in strays[0]
    before = readme.read_text()
    report.main([], checkout)
    assert readme.read_text() == before  # no remedy for a hand's work


def test_numbers_of_other_sections_are_their_own(checkout: Path) -> None:
    change(checkout / "README.md", "\n## Benchmarks\n", "\n| 12 | 1.0x |\n\n## Benchmarks\n")
    assert list(report.Report(checkout).problems()) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- report: goals -->", "<!-- report: goal -->", "nowhere stands.*goals"),
        ("<!-- report: goals -->\n", "", "are not pairs"),
        (LAST_HEADING, f"\n<!-- report: goals -->{LAST_HEADING}", "are not pairs"),
        (
            LAST_HEADING,
            f"\n<!-- report: fantasy -->\n<!-- end report -->{LAST_HEADING}",
            "no block 'fantasy'; those of this document: goals",
        ),
        (
            LAST_HEADING,
            f"\n<!-- report: goals -->\n<!-- end report -->{LAST_HEADING}",
            "goals stands twice",
        ),
    ],
)
def test_marks_that_do_not_fit(
    checkout: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    change(checkout / "README.md", old, new)
    assert report.main(["--check"], checkout) == 1
    assert report.main([], checkout) == 1
    with pytest.raises(ReportError, match=message):
        report.Report(checkout).wanted("README.md")
    assert "README.md" in capsys.readouterr().err


def test_a_file_of_another_shape_is_named(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(checkout, "2031-01-02-cpu-recipes.json", {"machine": MACHINE, "rows": [{"verb": 1}]})
    assert report.main(["--check"], checkout) == 1
    assert "block recipes-all: 2031-01-02-cpu-recipes.json is not as" in capsys.readouterr().err
    (checkout / "benchmarks/results/2031-01-02-cpu-recipes.json").write_text("{")
    assert report.main(["--check"], checkout) == 1
    assert "not JSON" in capsys.readouterr().err


# --- tables and goals of planted figures ----------------------------------------------------------


def test_table_of_bench_moe_comm(checkout: Path) -> None:
    path = write(checkout, "2031-01-02-cpu-moe-comm.json", comm(200.0, 1800.0))
    page = Page("README.md", checkout)
    result = Result(path, json.loads(path.read_text()))
    text = tables.moe_comm(page, result)
    assert "4 ranks, hidden size 7168, top_k 8, 256 experts, bfloat16" in text
    assert "one rank a process" in text
    assert "commit abc ([result file](benchmarks/results/2031-01-02-cpu-moe-comm.json))" in text
    ours, theirs = text.splitlines()[-2:]
    cells = [cell.strip() for cell in ours.strip("|").split("|")]
    assert cells[:2] == ["128", "**moe_nvlink**"]
    assert cells[2] == "200 (197..203)"
    # 4 rows of 2 x 14336 bytes in 200 us; on the wire 1 row of 2 x 14336 + 64.
    assert cells[5:] == ["1", "0.57 / 0.14", "5%"]
    assert "| 1800 (1773..1827) |" in theirs
    assert "| 9.00 (9.00..9.00) |" in theirs
    assert "| 128 |" not in tables.moe_comm(page, result, (1, 16))
    notes = tables.moe_comm_whole(page, result)
    assert "Ceiling: memcpy." in notes
    assert "what gloo_gather is spared" in notes
    # The newer kind takes the place of the old table.
    assert "moe-comm.json" in report.Report(checkout).render(report.METHODS, "exchange-all")


def verdicts(root: Path) -> list[tuple[str, str]]:
    text = goals.goals_table(Page("README.md", root), load(root / "benchmarks/results"))
    cells = [line.strip("|").split(" | ") for line in text.splitlines()[2:]]
    return [(row[3].strip(), row[2].strip()) for row in cells]


def test_goals_of_nothing_are_not_measured(tmp_path: Path) -> None:
    assert {verdict for verdict, _value in verdicts(tmp_path)} == {"not measured"}


@pytest.mark.parametrize(
    ("ours_us", "verdict"), [(200.0, "met"), (225.0, "met"), (226.0, "**not met**")]
)
def test_goal_against_gloo_is_computed(tmp_path: Path, ours_us: float, verdict: str) -> None:
    write(tmp_path, "2031-01-02-cpu-moe-comm.json", comm(ours_us, 1800.0))
    ratio = f"{1800.0 / ours_us:.2f}x"
    assert verdicts(tmp_path)[0] == (verdict, f"{ratio} ({ratio}..{ratio}); 128 tokens")
    assert verdicts(tmp_path)[1][0] == "not measured"  # another peer's


def test_goals_look_at_their_own_configuration_and_the_newest_file(tmp_path: Path) -> None:
    write(tmp_path, "2031-01-02-cpu-moe-comm.json", comm(200.0, 1800.0))
    write(tmp_path, "2031-01-03-cpu-moe-comm.json", comm(200.0, 400.0))
    write(tmp_path, "2031-01-04-cpu-moe-comm.json", comm(200.0, 1800.0, tokens=64))
    write(tmp_path, "2031-01-05-cpu-moe-comm.json", comm(200.0, 1800.0, hidden_size=4096))
    write(tmp_path, "2031-01-06-cpu-moe-comm.json", comm(200.0, 1800.0, ep_size=2))
    write(tmp_path, "2031-01-07-cpu-moe-comm.json", comm(200.0, 1800.0, router="local"))
    write(tmp_path, "2031-01-08-cpu-moe-comm.json", comm(200.0, 1800.0, combine="nvfp4"))
    assert verdicts(tmp_path)[0] == ("**not met**", "2.00x (2.00x..2.00x); 128 tokens")


def test_goals_of_a_gpu_are_of_that_gpu(tmp_path: Path) -> None:
    result = comm(5.0, 10.0, tokens=64, peer="flashinfer", **EMULATED)
    result["machine"]["gpu"] = "NVIDIA H100"
    write(tmp_path, "2031-01-02-gpu-moe-comm.json", result)
    assert verdicts(tmp_path)[4][0] == "not measured"
    result["machine"]["gpu"] = "NVIDIA H200"
    write(tmp_path, "2031-01-02-gpu-moe-comm.json", result)
    assert verdicts(tmp_path)[4] == ("met", "0.50x (0.50x..0.50x); 64 tokens")
    assert verdicts(tmp_path)[5][0] == "**not met**"  # combine: 0.4 is asked
    assert verdicts(tmp_path)[6][0] == "not measured"


EMULATED: dict[str, Any] = {
    "device": "cuda",
    "emulate_ranks": True,
    "ep_size": 8,
    "cuda_graph": True,
}


def emulated_on_gpu(ours_launch: str, theirs_launch: str) -> dict[str, Any]:
    """A result of an H200 on which ours and FlashInfer were launched so."""
    asked = options.Options(batches=(64,), iters=4, **EMULATED)
    ours, theirs = planted(asked, "moe_nvlink", 5.0, 64), planted(asked, "flashinfer", 10.0, 64)
    ours["launch"], theirs["launch"] = ours_launch, theirs_launch
    return written(asked, [ours, theirs], gpu="NVIDIA H200")


def test_a_goal_is_judged_where_both_were_launched_alike(tmp_path: Path) -> None:
    name = "2031-01-02-gpu-moe-comm.json"
    write(tmp_path, name, emulated_on_gpu("branches", "branches"))
    assert verdicts(tmp_path)[4] == ("met", "0.50x (0.50x..0.50x); 64 tokens, branches")
    write(tmp_path, name, emulated_on_gpu("one launch", "branches"))
    assert verdicts(tmp_path)[4] == ("not measured", "")
    (result,) = load(tmp_path / "benchmarks/results")
    page = Page("README.md", tmp_path)
    assert tables.moe_comm(page, result).splitlines()[-1].count("| not comparable |") == 1
    said = "FlashInfer moe_a2a, 64 tokens: no ratio, because it is launched as branches; ours: one"
    assert said in tables.moe_comm_whole(page, result)


def test_ours_in_one_launch_stands_beside_what_is_compared(tmp_path: Path) -> None:
    result = emulated_on_gpu("branches", "branches")
    alone = {phase: result["rows"][0][phase] | {"median_us": 4.0} for phase in rows.PHASES}
    result["rows"][0]["one_launch"] = {"launch": "one launch", **alone}
    path = write(tmp_path, "2031-01-02-gpu-moe-comm.json", result)
    text = tables.moe_comm(Page("README.md", tmp_path), Result(path, result))
    ours, one, theirs = (line.strip("| ").split(" | ") for line in text.splitlines()[-3:])
    assert (ours[1], ours[2], ours[5]) == ("**moe_nvlink**, branches", "5 (4.93..5.07)", "1")
    assert (one[1], one[2]) == ("**moe_nvlink**, one launch", "4 (4.93..5.07)")
    assert one[5] == "not comparable"
    assert theirs[5] == "2.00 (2.00..2.00)"


def test_a_result_of_a_run_that_did_not_end_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options.Options(iters=4)
    record = common.Record(
        checkout / "benchmarks/results/2031-01-02-cpu-moe-comm.json", rows.head(asked)
    )
    growing = rows.Growing(record, [])
    growing([planted(asked, "moe_nvlink", 5.0, 1)])
    assert report.main([], checkout) == 1
    said = capsys.readouterr().err
    assert "2031-01-02-cpu-moe-comm.json: incomplete" in said
    assert "measure again, or keep it elsewhere" in said


def test_a_knee_needs_its_explanation(tmp_path: Path) -> None:
    knee = {"id": "tokens-both-256", "x": 256, "us": 2.0, "fit_us": 1.0, "off": 1.0}
    names = [f"{dimension}: both" for dimension in goals.DIMENSIONS]
    series = [{"name": name, "knees": [knee] if "tokens" in name else []} for name in names]
    result = Result(tmp_path / "x.json", {"kind": "growth", "device": "cpu", "series": series})
    look = goals.knees_left(tmp_path)
    found = look([result])
    assert found is not None
    assert found.value == 1
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/NOTES.md").write_text("`tokens-both-256`: the cache ends there.")
    explained = look([result])
    assert explained is not None
    assert explained.value == 0
    del series[1]
    lacking = look([result])
    assert lacking is not None
    assert (lacking.value, "ranks on cpu" in lacking.remark) == (1, True)
    assert look([]) is None
