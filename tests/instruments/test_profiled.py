"""tests/gpu/profiled.py and watched.py without a GPU: scripts in the place of NVIDIA's tools."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_nvlink_plugin.jit import cache, nvrtc
from tests.gpu import profiled, watched
from tests.gpu.day.steps import STEPS
from tests.gpu.watched import CANNOT_RUN, ROOT
from tests.support import emulated

#: Notes its arguments.
TOOL = """#!/bin/sh
echo "$*" >>'{calls}'
{does}
"""
#: Does to a report what ncu would, without starting the program that it is to watch. The text of a
#: report names the sources that are there already.
NCU = """
leave() { echo x >"$2" && echo "// kernels" >"$MOE_NVLINK_CACHE_DIR/$MOE_NVLINK_LINEINFO.cu"; }
case "$*" in
--import*) echo "$4 of $2" && (cd "$(dirname "$2")" && ls -- *.cu) ;;
*"--batches 16 2048") FIRST ;;
*"--batches 1 64") SECOND ;;
esac
"""
LEAVES = 'leave "$@"'
REFUSAL = "==ERROR== ERR_NVGPUCTRPERM - no permission"
REFUSES = f"echo '{REFUSAL}'; echo more; exit 1"

Put = Callable[[str, str], Path]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts a tool on the PATH that does as a text says. Returns the file that has its calls."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(watched, "PLACES", ())
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "cache"))

    def written(name: str, does: str) -> Path:
        (folder / name).write_text(TOOL.format(calls=calls, does=does))
        (folder / name).chmod(0o755)
        return calls

    return written


def put_ncu(put: Put, first: str = LEAVES, second: str = LEAVES) -> Path:
    return put("ncu", NCU.replace("FIRST", first).replace("SECOND", second))


def profile(folder: Path, limit_s: float = 100) -> tuple[int, set[str]]:
    """Run the step. Return its exit status, and which batches a report is there of."""
    command = STEPS["ncu"].command.replace("{results}", str(folder / "h100"))
    given = command.replace("{limit_s}", str(limit_s)).split()
    status = profiled.main(given[given.index("tests.gpu.profiled") + 1 :])
    reports = folder.glob("h100-ncu-*.ncu-rep")
    return status, {path.stem.removeprefix("h100-ncu-") for path in reports}


BOTH = {"16-2048", "1-64"}


def test_reports_text_and_source_stay(tmp_path: Path, put: Put) -> None:
    calls = put_ncu(put)
    assert profile(tmp_path) == (0, BOTH)
    for call in (line for line in calls.read_text().splitlines() if "--export" in line):
        assert " --kernel-name regex:moe_nvlink " in call
        assert " --clock-control none " in call
        assert " --profile-from-start off " in call, "a round that is checked comes before"
        assert " --import-source yes " in call
    groups = {f"h100-ncu-{each}.ncu-rep" for each in BOTH}
    texts = {f"{group}.{kind}" for group in groups for kind in profiled.TEXTS}
    assert {path.name for path in tmp_path.glob("h100*")} == texts | {"h100-ncu-1.cu", *groups}
    report = tmp_path / "h100-ncu-16-2048.ncu-rep"
    raw = Path(f"{report}.raw.csv").read_text()
    assert raw == f"raw of {report}\nh100-ncu-1.cu\n", "a cut would leave the source at least"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("exit 3", LEAVES, (1, {"1-64"})),
        (f"{LEAVES}; exit 3", "exit 3", (1, {"16-2048"})),
        ("exit 0", LEAVES, (1, {"1-64"})),
        ("exit 0", "exit 0", (1, set())),
        (REFUSES, LEAVES, (1, {"1-64"})),
        (f"{LEAVES}; {REFUSES}", REFUSES, (1, {"16-2048"})),
        ("exit 3", REFUSES, (1, set())),
        (REFUSES, REFUSES, (CANNOT_RUN, set())),
    ],
)
def test_a_group_that_fails_does_not_take_the_other(
    first: str, second: str, expected: tuple[int, set[str]], tmp_path: Path, put: Put
) -> None:
    """ "Not run" is only where there is no report, and nothing else has gone wrong."""
    put_ncu(put, first, second)
    assert profile(tmp_path) == expected
    texts = {path.name.split(".")[0] for path in tmp_path.glob("*.csv")}
    assert texts == {f"h100-ncu-{each}" for each in expected[1]}


def test_ncu_may_not_count(put: Put, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line is the reason, which the summary shows."""
    put_ncu(put, REFUSES, REFUSES)
    profile(tmp_path)
    assert capsys.readouterr().out.endswith(f"\n{REFUSAL}\n")


def test_without_ncu(put: Put, tmp_path: Path) -> None:
    assert profile(tmp_path) == (CANNOT_RUN, set())


def test_a_group_that_hangs(put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut in time: what it has counted is there, as text too, and the next group."""
    monkeypatch.setattr(profiled, "TEXTS_S", 5.0)
    put_ncu(put, f"trap '{LEAVES}; exit 2' INT; sleep 300")
    assert profile(tmp_path, limit_s=40) == (1, BOTH)
    assert (tmp_path / "h100-ncu-16-2048.ncu-rep.source.csv").exists()


def test_nothing_is_left_of_a_tool(put: Put, tmp_path: Path) -> None:
    """It is in a process group of its own, and the runner of the steps does not know it."""
    noted = tmp_path / "noted"
    put_ncu(put, f"echo $$ >{noted}.new; mv {noted}.new {noted}; exec sleep 300")
    command = [sys.executable, "-m", "tests.gpu.profiled", "--reports", str(tmp_path / "h100")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_until(noted.exists)
        process.send_signal(signal.SIGINT)
    wait_until(lambda: not Path(f"/proc/{noted.read_text().strip()}").exists())


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.parametrize("tool", watched.TOOLS)
def test_what_a_sanitizer_is_asked(tool: str, put: Put, capsys: pytest.CaptureFixture[str]) -> None:
    calls = put("compute-sanitizer", "echo found one; exit 99")
    given = STEPS[tool].command.replace("{limit_s}", "20").split()
    assert watched.main(given[given.index("tests.gpu.watched") + 1 :]) == watched.FOUND
    assert "found one" in capsys.readouterr().out
    call = calls.read_text()
    assert call.startswith(f"--tool {tool} ")
    assert call.endswith(f"{sys.executable} -m tests.support.sanitized\n")
    ours = " --kernel-name kernel_substring=moe_nvlink " in call
    assert ours == (tool != "initcheck"), "torch's kernels write what ours read"


def test_a_sanitizer_that_hangs(put: Put, capsys: pytest.CaptureFixture[str]) -> None:
    """What it had to say is there before the step's time is over."""
    put("compute-sanitizer", "echo so far; sleep 300")
    assert watched.main(["memcheck", "--limit", "5"]) not in (0, CANNOT_RUN)
    assert "so far" in capsys.readouterr().out


def test_a_sanitizer_that_refuses(put: Put, capsys: pytest.CaptureFixture[str]) -> None:
    put("compute-sanitizer", "echo '==ERROR== Device not supported'; echo more; exit 1")
    assert watched.main(["memcheck"]) == CANNOT_RUN
    assert capsys.readouterr().out.endswith("\n==ERROR== Device not supported\n")


def test_emulated_kernels_name_their_lines(
    tmp_path: Path, put: Put, monkeypatch: pytest.MonkeyPatch
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
