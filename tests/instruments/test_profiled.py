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


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that says what the stand-in for ncu does."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "ncu").write_text(NCU)
    (folder / "ncu").chmod(0o755)
    for name in ("raw", "details", "source"):
        (folder / name).write_text(f"{name} of {folder}")
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


def test_reports_text_and_source_stay(tmp_path: Path, fake: Path) -> None:
    status, found = measure(tmp_path)
    assert status == 0
    calls = [json.loads(line) for line in (fake / "calls").read_text().splitlines()]
    for call, batches in zip(calls, profiled.GROUPS, strict=True):
        text = " ".join(call)
        assert "--kernel-name regex:moe_nvlink --launch-count 4 " in text
        assert "--clock-control none --import-source yes --profile-from-start off " in text
        assert text.endswith(f"--batches {batches[0]} {batches[1]}")
    assert found["machine"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert [row["batches"] for row in found["rows"]] == [[16, 2048], [1, 64]]
    left = {path.name.removeprefix("2026-h100-ncu") for path in tmp_path.glob("2026*")}
    groups = ("-16-2048.ncu-rep", "-1-64.ncu-rep")
    texts = {f"{group}.{kind}.gz" for group in groups for kind in profiled.TEXTS}
    assert left == texts | {".json", ".facts", "-0123.cu.gz", *groups}
    for name, text in (("0123.cu", "// the kernels"), ("1-64.ncu-rep.raw.csv", f"raw of {fake}\n")):
        kept = tmp_path / f"2026-h100-ncu-{name}.gz"
        assert gzip.decompress(kept.read_bytes()).decode() == text


def test_a_group_that_fails_does_not_take_the_other(tmp_path: Path, fake: Path) -> None:
    (fake / "cut").write_text("--batches 16 2048")
    status, found = measure(tmp_path)
    assert status == 124
    assert [row["batches"] for row in found["rows"]] == [[1, 64]]


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
