"""benchmarks/report.py: README says what the result files say, and a deviation does not pass."""

from __future__ import annotations

import json
import re
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
from benchmarks.reporting.files import ReportError, Result, lacks, load, newest

ROOT = Path(__file__).resolve().parents[2]
MACHINE: dict[str, Any] = {"date": "2031-01-02", "cpu": "abacus", "cores": 2}
MACHINE |= {"commit": "abc", "command": "python x"}
TRAFFIC = Traffic(4, (3, 3), (1, 1), 14336, 64, 14336)


def picture(png: Path, source: str) -> Path:
    """A PNG that says what it was drawn from, without drawing: matplotlib is slow to come."""
    text = PngImagePlugin.PngInfo()
    text.add_text(plots.SOURCE_KEY, source)
    Image.new("L", (2, 2)).save(png, pnginfo=text)
    return png


def draw_little(path: Path, folder: Path) -> list[Path]:
    """As plots.plot_file."""
    names = {plot.figure for plot in report.PLOTS.values()}
    return [picture(folder / f"{name}.png", plots.source_of(path)) for name in names]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the documents and results, in order; the current directory."""
    monkeypatch.setattr(plots, "plot_file", draw_little)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    for document in report.DOCUMENTS:
        shutil.copy(ROOT / document, tmp_path / document)
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    write(tmp_path, "2030-01-01-cpu-moe-comm.json", comm(200.0, 900.0))
    assert report.main([]) == 0
    return tmp_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of nothing but the result files that a test writes."""
    monkeypatch.chdir(tmp_path)
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


def test_this_repository_says_what_its_results_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert report.main(["--check"]) == 0, capsys.readouterr()


#: A measured number with its unit, in prose; a table's cell that is a number.
MEASURED = re.compile(
    r"\b\d[\d.,]*\s?(?:us|ms|microseconds|milliseconds|GB/s|tokens/s|tokens per second)\b"
    r"|\b\d[\d.,]*(?:x\b|\s?times (?:as |faster|slower|more|less))"
)
NUMBER = re.compile(r"\|\W*\d[\d.,]*\s?(?:x|%|us|ms|GB/s)?(?:\s?\([^|]*\))?\W*\|")


def strays(text: str) -> list[str]:
    """Lines with measurements outside any block. Indented lines and backticks hold commands."""
    text = re.sub(
        r"<!-- \[\[\[cog .*?\[\[\[end\]\]\] -->|^```.*?^```$", "", text, flags=re.S | re.M
    )
    lines = (line for line in text.splitlines() if not line.startswith("    "))
    bare = (re.sub(r"`[^`]*`", "", line) for line in lines)
    return [line for line in bare if (NUMBER if line.startswith("|") else MEASURED).search(line)]


def test_measurements_stand_in_blocks_only() -> None:
    """In README's section of figures, and in benchmarks/README.md."""
    readme, methods = ((ROOT / document).read_text() for document in report.DOCUMENTS)
    (figures,) = re.findall(r"^## First run on your GPUs\n.*?(?=^## )", readme, re.S | re.M)
    assert strays(figures) == []
    assert strays(methods) == []
    for line in ("| 128 | ours | 1.0x |", "It takes 12.5 us.", "8.6x as fast.", "2 times faster."):
        assert strays(line) == [line]
    assert strays("Hidden size 7168, 256 MiB, `12 us`.\n| `x -n 12` | 4 ranks |\n    12 us") == []


# --- a checkout with one thing wrong --------------------------------------------------------------


def test_a_changed_digit(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = checkout / "benchmarks/README.md"
    block = readme.read_text().split('cog block("recipes-all")')[1].split("[[[end]]]")[0]
    marked = next(line for line in block.splitlines() if "| nvfp4 |" in line)
    change(readme, marked, marked.replace("| nvfp4 | 1", "| nvfp4 | 9"))
    before = readme.read_text()
    assert report.main(["--check"]) == 5
    said = capsys.readouterr()
    assert f"+{marked}" in said.out
    assert "| nvfp4 | 9" in said.out
    assert "python benchmarks/report.py" in said.err
    assert readme.read_text() == before  # --check changes nothing
    assert report.main([]) == 0
    assert readme.read_text() != before
    assert report.main(["--check"]) == 0


def test_a_result_file_that_is_gone(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (checkout / "benchmarks/results").glob("*-cpu-*.json"):
        path.unlink()
    assert report.main(["--check"]) != 0
    said = capsys.readouterr()
    assert "+**Not measured yet**: no result file is called `*-cpu-recipes.json`" in said.out
    assert "latency.png: no result file is there" in said.err


def test_plots_that_are_missing_outdated_or_nobodys(checkout: Path) -> None:
    def problems() -> str:
        return "\n".join(report.problems(load()))

    png = checkout / report.PLOTS_FOLDER / "latency.png"
    assert problems() == ""
    result = newest(load(), report.CPU_TABLE)
    assert result is not None
    result.path.write_text(result.path.read_text() + "\n")  # another file of that name
    assert "latency.png: drawn from" in problems()
    report.main([])
    assert problems() == ""
    assert plots.recorded_source(png) == plots.source_of(result.path)
    png.unlink()
    assert "latency.png: missing" in problems()
    report.main([])
    shutil.copy(png, png.with_name("other.png"))
    assert "other.png: no plot of benchmarks/report.py" in problems()
    png.write_bytes(b"no picture")
    with pytest.raises(ReportError, match=r"latency\.png.*delete it"):
        problems()
    unknown = report.PLOTS["plot-latency"]._replace(figure="fantasy")
    with pytest.raises(ReportError, match="no figure 'fantasy'"):
        unknown.draw(png, result)


@pytest.mark.parametrize("field", ["date", "cpu", "commit", "command"])
def test_a_result_that_does_not_say_where_it_is_from(checkout: Path, field: str) -> None:
    path = next((checkout / "benchmarks/results").glob("*-cpu-recipes.json"))
    data = json.loads(path.read_text())
    assert lacks(Result(path, data)) == ""
    data["machine"][field] = "unknown"
    path.write_text(json.dumps(data))
    (lacking,) = [said for said in report.problems(load()) if "lacks" in said]
    assert field in lacking
    assert path.name in lacking


# --- tables and goals of planted figures ----------------------------------------------------------


#: The goals of FlashInfer's dispatch; those of its combine and of its bandwidth come next.
DISPATCH = next(n for n, goal in enumerate(goals.GOALS) if "FlashInfer moe_a2a" in goal.work)


def verdicts() -> list[tuple[str, str]]:
    text = goals.table(load())
    cells = [line.strip("|").split(" | ") for line in text.splitlines()[2:]]
    return [(row[3].strip(), row[2].strip()) for row in cells]


@pytest.mark.parametrize(
    ("ours_us", "verdict"), [(200.0, "met"), (225.0, "met"), (226.0, "**not met**")]
)
def test_goal_against_gloo_is_computed(here: Path, ours_us: float, verdict: str) -> None:
    write(here, "2031-01-02-cpu-moe-comm.json", comm(ours_us, 1800.0))
    ratio = f"{1800.0 / ours_us:.2f}x"
    assert verdicts()[0] == (verdict, f"{ratio} ({ratio}..{ratio}); 128 tokens")
    assert verdicts()[1][0] == "not measured"  # another peer's, of which there is no result


def test_goals_look_at_their_own_configuration_and_the_newest_file(here: Path) -> None:
    write(here, "2031-01-02-cpu-moe-comm.json", comm(200.0, 1800.0))
    write(here, "2031-01-03-cpu-moe-comm.json", comm(200.0, 400.0))
    others: list[dict[str, Any]] = [{"tokens": 64}, {"hidden_size": 4096}, {"ep_size": 2}]
    others += [{"router": "local"}, {"combine": "nvfp4"}, {"bind": True}]
    for day, other in enumerate(others, 4):
        write(here, f"2031-01-0{day}-cpu-moe-comm.json", comm(200.0, 1800.0, **other))
    assert verdicts()[0] == ("**not met**", "2.00x (2.00x..2.00x); 128 tokens")


def test_goals_of_formats_are_judged_by_their_slowest_batch(here: Path) -> None:
    def row(name: str, tokens: int, share: float) -> dict[str, Any]:
        rate = {"ratio": 1 / share, "q25": 1 / share, "q75": 1 / share}
        return {"verb": "dispatch", "name": name, "tokens": tokens, "times_bf16": rate}

    rows = [row("nvfp4 fused", 16, 9.0), row("nvfp4 fused", 128, 1.25), row("nvfp4 fused", 512, 2)]
    rows += [row("nvfp4 two steps", 512, 8.0), row("mxfp8 fused", 512, 1.25)]
    write(here, "2031-01-02-cpu-recipes.json", {"machine": MACHINE, "rows": rows})
    named = {goal.work.rpartition(": ")[2]: n for n, goal in enumerate(goals.GOALS)}
    slow, fast = (verdicts()[named[f"dispatch in {name}"]] for name in ("nvfp4", "fp8 and mxfp8"))
    assert slow == ("**not met**", "2.00x (2.00x..2.00x); nvfp4, 512 tokens")
    assert fast == ("met", "1.25x (1.25x..1.25x); mxfp8, 512 tokens")
    assert verdicts()[named["combine in nvfp4"]] == ("not measured", "")


def test_one_token_of_four_ranks_is_compared_with_two(here: Path) -> None:
    for ranks, took in ((2, 50.0), (4, 250.0)):
        name = f"2031-01-02-cpu-{'moe-comm' if ranks == 4 else 'ep2'}.json"
        write(here, name, comm(took, 900.0, tokens=1, ep_size=ranks))
    found = {goal.work: verdict for goal, verdict in zip(goals.GOALS, verdicts(), strict=True)}
    (alone,) = [each for work, each in found.items() if "1 token per rank: dispatch" in work]
    (crowded,) = [each for work, each in found.items() if "four ranks against two" in work]
    assert alone[0] == "met"
    assert alone[1].startswith("50 us")
    assert crowded == ("**not met**", "5.00x")


def served(ratio: float, **more: Any) -> dict[str, Any]:
    """A result as bench_serve writes it, of a planted ratio."""
    spread = {"median": ratio, "q25": ratio, "q75": ratio}
    of_each = {"4": spread, "8": spread}
    both = {"tensor_parallel": of_each, "one_rank": of_each}
    return {"kind": "serve", "machine": MACHINE, "ep_size": 2, "ratio": both} | more


def test_goals_of_servers_are_of_one_size_and_load(here: Path) -> None:
    write(here, "2031-01-02-cpu-serve.json", served(0.5))  # from before there were sizes
    write(here, "2031-01-03-cpu-serve-1.7B.json", served(1.5, size="1.7B"))
    write(here, "2031-01-04-cpu-serve-1.7B.json", served(9.0, size="1.7B", ep_size=4))
    write(here, "2031-01-05-cpu-serve-own.json", served(9.0, size="own"))
    about = zip(goals.GOALS, verdicts(), strict=True)
    assert [found for goal, found in about if "decode tokens/s" in goal.work] == [
        ("not measured", ""),  # against gloo
        ("**not met**", "0.50x (0.50x..0.50x); 4 requests at once"),
        ("not measured", ""),  # one request
        ("met", "1.50x (1.50x..1.50x); 8 requests at once"),
        ("not measured", ""),  # 32
        ("met", "1.50x (1.50x..1.50x); 8 requests at once"),
        ("not measured", ""),
    ]


def test_goals_of_a_gpu_are_of_that_gpu(here: Path) -> None:
    result = comm(5.0, 10.0, tokens=64, peer="flashinfer", **EMULATED)
    result["machine"]["gpu"] = "NVIDIA A100-SXM4-80GB"
    write(here, "2031-01-02-a100-moe-comm.json", result)
    assert verdicts()[DISPATCH][0] == "not measured"
    for name, full in (("H100", "NVIDIA H100 80GB HBM3"), ("H200", "NVIDIA H200")):
        result["machine"]["gpu"] = full
        write(here, f"2031-01-02-{name.lower()}-moe-comm.json", result)
        assert verdicts()[DISPATCH] == ("met", f"0.50x (0.50x..0.50x); 64 tokens, {name}")
    assert verdicts()[DISPATCH + 1][0] == "**not met**"  # combine: 0.4 is asked
    assert verdicts()[DISPATCH + 2][0] == "not measured"


def test_a_second_set_of_one_day_is_newer(here: Path) -> None:
    for name in ("h200", "h200-2", "h200-10", "cpu-3"):
        write(here, f"2031-01-02-{name}-moe-comm.json", comm(5.0, 10.0))
    write(here, "2031-01-01-h200-11-moe-comm.json", comm(5.0, 10.0))
    found = newest(load(), report.GPU_TABLE)
    assert found is not None
    assert found.path.name == "2031-01-02-h200-10-moe-comm.json"


def test_what_is_no_whole_result_lies_in_a_folder(here: Path) -> None:
    folder = here / "benchmarks/results/2031-01-02-h200"
    folder.mkdir(parents=True)
    (folder / "2031-01-02-h200-recipes.json").write_text('{"incomplete": "cut"}')
    assert load() == []


EMULATED: dict[str, Any] = {"device": "cuda", "emulate_ranks": True, "ep_size": 8}
EMULATED |= {"cuda_graph": True}


def emulated_on_gpu(ours_launch: str, theirs_launch: str) -> dict[str, Any]:
    """A result of an H200 on which ours and FlashInfer were launched so."""
    asked = options.Options(batches=(64,), iters=4, **EMULATED)
    ours, theirs = planted(asked, "moe_nvlink", 5.0, 64), planted(asked, "flashinfer", 10.0, 64)
    ours["launch"], theirs["launch"] = ours_launch, theirs_launch
    return written(asked, [ours, theirs], gpu="NVIDIA H200")


def test_a_goal_is_judged_where_both_were_launched_alike(here: Path) -> None:
    name = "2031-01-02-h200-moe-comm.json"
    write(here, name, emulated_on_gpu("branches", "branches"))
    assert verdicts()[DISPATCH] == ("met", "0.50x (0.50x..0.50x); 64 tokens, branches, H200")
    write(here, name, emulated_on_gpu("one launch", "branches"))
    assert verdicts()[DISPATCH] == ("not measured", "")
    (result,) = load()
    assert tables.moe_comm(result).count("| not comparable |") == 1


def test_a_result_of_a_run_that_did_not_end_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options.Options(iters=4)
    record = common.Record(
        checkout / "benchmarks/results/2031-01-02-cpu-moe-comm.json", rows.head(asked)
    )
    growing = rows.Growing(record, [])
    growing([planted(asked, "moe_nvlink", 5.0, 1)])
    assert report.main([]) == 1
    said = capsys.readouterr().err
    assert "2031-01-02-cpu-moe-comm.json: incomplete" in said
    assert "measure again, or keep it elsewhere" in said
