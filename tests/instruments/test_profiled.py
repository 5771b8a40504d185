"""tests/gpu/profiled.py without a GPU: a script in the place of ncu."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_nvlink_plugin.jit import cache, nvrtc
from tests.gpu import profiled, watched
from tests.gpu.watched import CANNOT_RUN
from tests.support import emulated

#: Leaves what ncu would, without starting the program that it is to watch.
NCU = """#!/bin/sh
case "$1" in
--import) echo "$4 of $2" ;;
--export) echo x >"$2" && echo "// the kernels" >"$MOE_NVLINK_CACHE_DIR/$MOE_NVLINK_LINEINFO.cu" ;;
esac
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script, in a folder of the PATH."""
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin/ncu"
    path.write_text(NCU)
    path.chmod(0o755)
    monkeypatch.setattr(watched, "PLACES", ())
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "cache"))
    return path


def test_reports_text_and_source_stay(tmp_path: Path, ncu: Path) -> None:
    assert profiled.main(["--reports", str(tmp_path / "h100-ncu")]) == 0
    groups = ("h100-ncu-16-2048.ncu-rep", "h100-ncu-1-64.ncu-rep")
    texts = {f"{group}.{kind}" for group in groups for kind in profiled.TEXTS}
    assert {path.name for path in tmp_path.glob("h100*")} == texts | {"h100-ncu-1.cu", *groups}
    raw = (tmp_path / f"{groups[0]}.raw.csv").read_text()
    assert raw == f"raw of {tmp_path / groups[0]}\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [("==ERROR== ERR_NVGPUCTRPERM - no permission", CANNOT_RUN), ("Traceback of the program", 3)],
)
def test_where_ncu_fails(
    said: str, status: int, tmp_path: Path, ncu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu.write_text(f"#!/bin/sh\necho '{said}'\necho more\nexit 3\n")
    assert profiled.main(["--reports", str(tmp_path / "ncu")]) == status
    assert status != CANNOT_RUN or capsys.readouterr().out.endswith(f"{said}\n")


def test_without_ncu(ncu: Path) -> None:
    ncu.unlink()
    assert profiled.main(["--reports", "ncu"]) == CANNOT_RUN


def test_emulated_kernels_name_their_lines(
    tmp_path: Path, ncu: Path, monkeypatch: pytest.MonkeyPatch
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
