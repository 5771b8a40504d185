"""tests/gpu/profiled.py without a GPU: a script in the place of ncu."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.jit import cache, nvrtc
from tests.gpu import profiled
from tests.gpu.watched import CANNOT_RUN
from tests.support import emulated

#: Does to a report what ncu would, without starting the program that it is to watch.
NCU = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
given = sys.argv[1:]
folder = Path(os.environ["FAKE_NCU"])
def after(name):
    return given[given.index(name) + 1]
if "--import" not in given:
    with open(folder / "calls", "a") as calls:
        calls.write(json.dumps(given) + "\\n")
    if (folder / "error").exists():
        print((folder / "error").read_text())
        raise SystemExit(1)
    if (folder / "cut").exists() and (folder / "cut").read_text() in " ".join(given):
        raise SystemExit(124)
    assert os.environ["MOE_NVLINK_LINEINFO"] == "1"
    Path(os.environ["MOE_NVLINK_CACHE_DIR"], "0123.cu").write_text("// the kernels")
    Path(after("--export")).write_bytes(b"x")
    facts = {{"machine": {{"gpu": "NVIDIA H100 80GB HBM3", "date": "2026-01-01"}}}}
    Path(after("--facts")).write_text(json.dumps(facts))
else:
    print((folder / after("--page")).read_text())
"""

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
HEADS = (
    *("ID", "Kernel Name", "gpu__time_duration.sum", "launch__registers_per_thread"),
    *("sm__warps_active.avg.pct_of_peak_sustained_active", "lts__throughput.nothing"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    *(STALL.format(name) for name in ("barrier", "long_scoreboard", "wait", "math", "lg_throttle")),
    "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio",
)


def quoted(*cells: Any) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def raw(kernels: int) -> str:
    names = ("moe_nvlink_emulated_dispatch(Emulated)", "moe_nvlink_emulated_combine(Emulated)")
    rows = [
        quoted(n, names[n % 2], "12,500", 64, 49.5, 1, 30, 1.5, 9.25, "n/a", 2, 0.5, 77)
        for n in range(kernels)
    ]
    return "\n".join(["==PROF== of what", quoted(*HEADS), quoted(*[""] * len(HEADS)), *rows])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that says what the stand-in for ncu does."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "ncu").write_text(NCU)
    (folder / "ncu").chmod(0o755)
    for name, text in (("raw", raw(4)), ("details", "text"), ("source", "lines")):
        (folder / name).write_text(text)
    cached = tmp_path / "cache"
    cached.mkdir(mode=0o700)
    monkeypatch.setattr(profiled, "PLACES", ())
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_NCU", str(folder))
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(cached))
    return folder


def measure(tmp_path: Path) -> tuple[int, dict[str, Any]]:
    output = tmp_path / "2026-h100-ncu.json"
    status = profiled.main(["--output_file", str(output), "--limit", "300"])
    return status, json.loads(output.read_text()) if output.exists() else {}


def test_reports_text_and_source_stay(
    tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = measure(tmp_path)
    assert status == 0
    calls = [json.loads(line) for line in (fake / "calls").read_text().splitlines()]
    for call, batches in zip(calls, profiled.GROUPS, strict=True):
        text = " ".join(call)
        assert "--kernel-name regex:moe_nvlink --launch-count 4 " in text
        assert "--clock-control none --import-source yes --profile-from-start off " in text
        assert text.endswith(f"--batches {batches[0]} {batches[1]}")
    assert found["machine"]["gpu"] == "NVIDIA H100 80GB HBM3"
    measured = [row["tokens"] for row in found["rows"]]
    assert measured == [16, 16, 2048, 2048, 1, 1, 64, 64]
    first = found["rows"][0]
    assert first["kernel"] == "moe_nvlink_emulated_dispatch"
    assert (first["duration_us"], first["registers"], first["l2_percent"]) == (12.5, 64, None)
    assert first["stalls"] == {"long_scoreboard": 9.25, "math": 2.0, "barrier": 1.5}
    assert "'tokens': 2048, 'duration_us': 12.5" in capsys.readouterr().out
    left = {path.name.removeprefix("2026-h100-ncu") for path in tmp_path.glob("2026*")}
    texts = {
        f"-{group}.ncu-rep.{kind}.gz" for group in ("16-2048", "1-64") for kind in profiled.TEXTS
    }
    assert left == texts | {".json", "-0123.cu.gz", "-16-2048.ncu-rep", "-1-64.ncu-rep"}
    assert (
        gzip.decompress((tmp_path / "2026-h100-ncu-0123.cu.gz").read_bytes()) == b"// the kernels"
    )


@pytest.mark.parametrize("text", ["", "an error", quoted(*HEADS), raw(5)])
def test_a_report_stays_whatever_its_text_is(tmp_path: Path, fake: Path, text: str) -> None:
    (fake / "raw").write_text(text)
    status, found = measure(tmp_path)
    assert status == 0
    assert len(list(tmp_path.glob("*.ncu-rep"))) == len(profiled.GROUPS)
    assert found["rows"], "the step counts them"
    assert all("not_summarised" in row or row["tokens"] is None for row in found["rows"])


def test_a_group_that_was_cut_keeps_what_there_is(tmp_path: Path, fake: Path) -> None:
    (fake / "raw").write_text(raw(3))
    _status, found = measure(tmp_path)
    assert [row.get("tokens") for row in found["rows"][:4]] == [16, 16, 2048, None]
    assert found["rows"][3]["not_summarised"] == "ValueError: it was cut: 3 of 4 kernels"


def test_kernels_in_another_order(tmp_path: Path, fake: Path) -> None:
    (fake / "raw").write_text(raw(4).replace("_combine", "_dispatch"))
    _status, found = measure(tmp_path)
    assert {row["tokens"] for row in found["rows"]} == {None}


def test_a_report_of_an_h200() -> None:
    """What ncu 2025.3 said."""
    text = (Path(__file__).with_name("of_ncu") / "raw.csv").read_text()
    rows = profiled.rows_of(text, (16, 2048))
    assert [row["tokens"] for row in rows] == [16, 16, 2048, 2048]
    assert [row["duration_us"] for row in rows] == [46.656, 27.328, 588.064, 495.456]


def test_a_group_that_fails_does_not_take_the_other(tmp_path: Path, fake: Path) -> None:
    (fake / "cut").write_text("--batches 16 2048")
    status, found = measure(tmp_path)
    assert status == 124
    assert {row["tokens"] for row in found["rows"]} == {1, 64}


def test_where_ncu_may_not_count(
    tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    (fake / "error").write_text(f"{refused}\nmore")
    assert measure(tmp_path) == (CANNOT_RUN, {})
    assert capsys.readouterr().out.strip().splitlines()[-1] == refused
    (fake / "error").write_text("Traceback of the program")
    assert measure(tmp_path) == (1, {})


def test_without_ncu(tmp_path: Path, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "ncu").unlink()
    assert measure(tmp_path) == (CANNOT_RUN, {})
    assert capsys.readouterr().out == "ncu is not installed\n"


def test_emulated_kernels_name_their_lines(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the emulated kernels as of the product's; and a cubin without lines is not taken."""
    sources: list[Path | None] = []

    def compile_cubin(text: str, architecture: str, *, strict: bool, source: Path | None) -> bytes:
        sources.append(source)
        return b"code"

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    for switch in ("0", "1"):
        monkeypatch.setenv("MOE_NVLINK_LINEINFO", switch)
        assert emulated.load_or_compile("// text", "sm_90a") == b"code"
    without, named = sources
    assert without is None
    assert named is not None
    assert named.parent == cache.directory()
    assert named.read_text() == "// text"
