"""moe-nvlink precompile: what it puts where, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import platformdirs
import pytest

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.errors import CompileError, ConfigError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.exchange.kernels import COMBINE, DISPATCH, LAYER, MEET
from moe_nvlink_plugin.jit import header, host, nvrtc
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.launch.kernel import Kernel
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.tools import cli, precompile, shipped
from tests.support.programs import python


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not yet there; the command makes it. What the command sets is undone afterwards."""
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "not this one"))
    monkeypatch.setattr(precompile, "load_host_libraries", lambda: None)  # seconds of g++
    return tmp_path / "kernels"


def run(folder: Path, *arguments: str) -> int:
    return cli.main(["precompile", "--cache-dir", str(folder), "--jobs", "1", *arguments])


def test_geometries() -> None:
    formats = LAYER.variant(top_k=8, dtype="bf16", recipe="fp8_block", combine="nvfp4")
    for text, geometry in {
        "deepseek-v3": LAYER.variant(top_k=8, dtype="bf16"),
        "gpt-oss": LAYER.variant(top_k=4, dtype="bf16"),
        "top_k=6,dtype=fp16": LAYER.variant(top_k=6, dtype="fp16"),
        "top_k=6": LAYER.variant(top_k=6, dtype="bf16"),
        "top_k=8,recipe=none,combine=bf16": LAYER.variant(top_k=8),
        "gpt-oss,recipe=mxfp8": LAYER.variant(top_k=4, recipe="mxfp8"),
        "top_k=8,dtype=bf16,recipe=fp8_block,combine=nvfp4": formats,
        "lm_head": HEAD.variant(dtype="bf16"),
        **{f"lm_head,dtype={name}": HEAD.variant(dtype=name) for name in header.elements()},
        **{str(geometry): geometry for geometry in (*precompile.PRESETS.values(), formats)},
    }.items():
        assert precompile.parse_geometry(text) == geometry
        assert precompile.parse_geometry(str(geometry)) == geometry


def test_builds_of_a_geometry() -> None:
    geometry = precompile.parse_geometry("top_k=8,dtype=bf16,recipe=fp8_block,combine=nvfp4")
    assert str(geometry) == "top_k=8,dtype=bf16,recipe=fp8_block,combine=nvfp4"
    # As a layer asks for them: rows as they come, rows by its recipe, and its combine.
    codes = [(build.kernel.name, *build.values) for build in geometry.builds(pdl=True)]
    assert codes == [
        ("dispatch", 8, 0, 0, 0, 0, 0, 1),
        ("dispatch", 8, 0, 1, 0, 0, 0, 1),
        ("combine", 8, 0, 2, 0, 0, 1),
        ("small_dispatch", 8, 0, 0, 0, 14, 0, 1),
        ("small_dispatch", 8, 0, 1, 0, 14, 0, 1),
        ("small_combine", 8, 0, 14, 0, 1),
        ("meet", 1),
    ]
    of_head = precompile.parse_geometry("lm_head,dtype=fp32").builds(pdl=True)
    names = [build.kernel.name for build in of_head]
    assert names == ["head_gather", "head_argmax", "head_collect"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("qwen3,", "nothing stands beside a comma; remove the comma, or add name=value"),
        ("lm_head,", "nothing stands beside a comma"),
        ("top_k=8,,dtype=bf16", "nothing stands beside a comma"),
        ("top_k", "'top_k' is not name=value"),
        ("top_k=", "'top_k=' is not name=value"),
        ("top_k=8,top_k=6", "top_k is given twice"),
        ("gpt-oss,lm_head", "'lm_head' is not name=value"),
        ("top_k=08.0", "top_k=08.0 is none of the values"),
        *((text, "") for text in ("", "deepseek", "top_k=0", "top_k=33", "top_k=8,dtype=fp8")),
        *((text, "") for text in ("dtype=bf16", "top_k=x", "top_k=8,hidden=7168", "top_k=-1", "8")),
        *((text, "") for text in ("top_k=8,recipe=fp8", "top_k=8,combine=mxfp8", "gpt-oss,recipe")),
        *((text, "") for text in ("gpt-oss,hidden=1", "lm_head,dtype=fp8", "lm_head,top_k=8")),
        ("lm_head=bf16", ""),
    ],
)
def test_malformed_geometries(text: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    why = f"(?s)neither a model .deepseek-v3.*from 1 to 32.*bf16.*: {re.escape(reason)}"
    with pytest.raises(ConfigError, match=why):
        precompile.parse_geometry(text)
    with pytest.raises(SystemExit) as caught:
        cli.main(["precompile", "--geometry", text])
    assert caught.value.code == 2
    assert f"geometry {text!r} is neither" in capsys.readouterr().err


@pytest.mark.long
def test_what_it_makes_is_what_ranks_ask_for(
    gpu_compiler: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--arch", "sm_90a", "sm_100a", "--geometry", "top_k=2", "top_k=1,dtype=fp32"]
    assert run(folder, *arguments) == 0
    assert len(list(folder.glob("*.cubin"))) == 18
    lines = capsys.readouterr().out.splitlines()
    pattern = re.compile(r"  sm_\d+a +top_k=\d,dtype=\w+ +(\d+) bytes, compiled in \d+\.\d s")
    sizes = [int(match[1]) for match in map(pattern.fullmatch, lines) if match]
    assert len(sizes) == 4
    # Both geometries count the build that they share.
    shared = LAYER.variant(top_k=2).build(MEET, pdl=True).text()
    twice = sum(len(nvrtc.load_or_compile(shared, each)) for each in ("sm_90a", "sm_100a"))
    # On disk each kernel has a checksum of 32 bytes behind it.
    on_disk = [path.stat().st_size - 32 for path in folder.glob("*.cubin")]
    assert sum(sizes) == sum(on_disk) + twice
    assert lines[-1].startswith(f"set MOE_NVLINK_CACHE_DIR={folder} ")
    assert "any user may read it" in lines[-1]
    assert folder.stat().st_mode & 0o777 == 0o755
    # A rank of another process, which could not compile.
    code = (
        "from moe_nvlink_plugin.jit import nvrtc; nvrtc.compile_cubin = None;"
        "from moe_nvlink_plugin.exchange.kernels import LAYER;"
        "from moe_nvlink_plugin.launch.machine_code import cubin_for;"
        "wanted = LAYER.variant(top_k=1, dtype='fp32');"
        "[cubin_for(each, 'sm_100a', wanted) for each in wanted.builds(pdl=True)]"
    )
    done = python("-c", code, variables={"MOE_NVLINK_CACHE_DIR": str(folder)})
    assert done.returncode == 0, done.stderr
    # Without PDL it is other code.
    assert run(folder, "--arch", "sm_90a", "--geometry", "top_k=2", "--no-pdl") == 0
    assert len(list(folder.glob("*.cubin"))) == 18 + 5
    assert "was there" not in capsys.readouterr().out
    assert run(folder, *arguments) == 0
    assert capsys.readouterr().out.count("was there") == 4


def test_formats_are_compiled_by_themselves(
    gpu_compiler: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = "top_k=2,recipe=fp8_tensor,combine=fp8_block"
    assert run(folder, "--arch", "sm_90a", "--geometry", geometry) == 0
    assert len(list(folder.glob("*.cubin"))) == 7
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(folder))
    wanted = precompile.parse_geometry(geometry)

    def is_there(kernel: Kernel[Any], **values: str) -> bool:
        build = LAYER.variant(top_k=2, **values).build(kernel, pdl=True)
        return nvrtc.is_cached(build.text(), "sm_90a")

    assert is_there(DISPATCH)
    assert is_there(DISPATCH, recipe="fp8_tensor", combine="nvfp4")
    assert is_there(COMBINE, combine="fp8_block", recipe="nvfp4")
    assert not is_there(COMBINE)
    line = machine_code.precompile_line(wanted, "sm_90a", pdl=True)
    assert line.endswith(" --geometry top_k=2,dtype=bf16,recipe=fp8_tensor,combine=fp8_block")


def test_kernels_of_a_shared_head(
    gpu_compiler: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank without NVRTC says which line fills a cache for it; it does, and the rank finds it."""
    really = nvrtc.compile_cubin

    def missing(*_arguments: object, **_options: object) -> bytes:
        raise UnsupportedError("no NVRTC library")

    def of_rank(dtype: str, pdl: bool) -> list[bytes]:
        monkeypatch.setattr(nvrtc, "compile_cubin", missing)
        monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(folder))
        try:
            wanted = HEAD.variant(dtype=dtype)
            return [machine_code.cubin_for(b, "sm_90a", wanted) for b in wanted.builds(pdl=pdl)]
        finally:
            monkeypatch.setattr(nvrtc, "compile_cubin", really)

    for dtype, pdl in (("bf16", True), ("fp32", False)):
        with pytest.raises(
            UnsupportedError, match=f"kernels for lm_head, dtype={dtype} on"
        ) as caught:
            of_rank(dtype, pdl)
        (line,) = re.findall(r"moe-nvlink precompile (.*) --cache-dir DIR\n", str(caught.value))
        assert run(folder, *line.split()) == 0
        out = capsys.readouterr().out
        assert re.search(rf"sm_90a +lm_head,dtype={dtype} +\d+ bytes, compiled in", out)
        assert all(len(cubin) > 1000 for cubin in of_rank(dtype, pdl))
        assert run(folder, *line.split()) == 0
        assert "was there" in capsys.readouterr().out
    assert len(list(folder.glob("*.cubin"))) == 6


def asked_of(stub: mock.Mock) -> list[precompile.Compilation]:
    return [call.args[0] for call in stub.call_args_list]


def test_the_default_has_the_shared_head_too(folder: Path, stub: mock.Mock) -> None:
    assert run(folder, "--arch", "sm_90a") == 0
    geometries = [*precompile.PRESETS.values(), HEAD.variant(dtype="bf16")]
    wanted = {build for geometry in geometries for build in geometry.builds(pdl=True)}
    assert set(asked_of(stub)) == {precompile.Compilation("sm_90a", build) for build in wanted}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """A compiler that makes ten bytes of each build in no time."""
    compiled = mock.Mock(return_value=precompile.Compiled(10, 1.0))
    monkeypatch.setattr(precompile, "compiled", compiled)
    return compiled


def test_geometries_that_share_a_build_compile_it_once(
    folder: Path, stub: mock.Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that were given the same build would wait for the one that compiles it."""
    geometries = ["top_k=2", "top_k=2,recipe=mxfp8", "top_k=2,combine=nvfp4", "lm_head"]
    assert run(folder, "--arch", "sm_90a", "sm_100a", "--geometry", *geometries) == 0
    # dispatch as it comes and by mxfp8, combine in bf16 and in nvfp4, the same of small batches but
    # for combine in nvfp4, meet, three kernels of the head.
    asked = asked_of(stub)
    assert len(asked) == len(set(asked)) == 2 * 11
    out = capsys.readouterr().out
    sizes = re.findall(r"(\d+) bytes, compiled in (\d+)\.0 s", out)
    assert sizes == 2 * [("50", "5"), ("70", "7"), ("50", "5"), ("30", "3")]
    assert "8 of 8" in out


def test_several_processes(
    gpu_compiler: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--arch", "sm_90a", "sm_120a", "--geometry", "lm_head", "--jobs", "2") == 0
    assert len(list(folder.glob("*.cubin"))) == 6
    assert "2 of 2" in capsys.readouterr().out


def _end(compilation: object) -> None:
    os._exit(9)


def test_a_process_that_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precompile, "compiled", _end)
    assert run(folder, "--arch", "sm_90a", "sm_120a", "--geometry", "top_k=2", "--jobs", "2") == 1
    assert "a compiling process ended without a result" in capsys.readouterr().err


def _leaves_interrupts(compilation: object) -> precompile.Compiled:
    """Or each would print where an interrupt has met it."""
    is_left = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return precompile.Compiled(error=None if is_left else CompileError("it hears Ctrl-C"))


def test_an_interrupt_is_the_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(precompile, "compiled", _leaves_interrupts)
    monkeypatch.setattr(precompile, "_has_nvrtc", lambda: True)
    assert run(folder, "--arch", "sm_90a", "--geometry", "top_k=2", "--jobs", "2") == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_deleted_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run(Path("rel")) == 1
    assert "cannot make rel: [Errno 2]" in capsys.readouterr().err


def test_compiling_processes_import_no_torch() -> None:
    code = "import sys, moe_nvlink_plugin.tools.precompile; sys.exit('torch' in sys.modules)"
    assert python("-c", code).returncode == 0


@pytest.mark.parametrize("arguments", [["precompile", "--help"], ["--version"]])
def test_the_command_asks_no_plugin(arguments: list[str]) -> None:
    """A plugin may import torch, whose NVRTC may be too old for the kernels."""
    code = (
        "import sys; from moe_nvlink_plugin import frameworks\n"
        "from moe_nvlink_plugin.tools import cli\n"
        "frameworks.installed = None\n"
        f"try: cli.main({arguments})\n"
        "except SystemExit: pass\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_default_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "unavailable", lambda: "no driver")
    assert precompile.default_architectures() == list(nvrtc.ARCHITECTURES)
    found = ["sm_90a", "sm_100a", "sm_90a"]
    monkeypatch.setattr(driver, "unavailable", lambda: None)
    monkeypatch.setattr(driver, "num_devices", lambda: len(found))
    monkeypatch.setattr(driver, "device", lambda index: SimpleNamespace(architecture=found[index]))
    assert precompile.default_architectures() == ["sm_100a", "sm_90a"]


def test_a_host_library_with_other_structs_is_named(
    folder: Path,
    stub: mock.Mock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """CPU ranks would refuse that library: an image must not be believed to have kernels."""

    def refuse(_name: str, struct: type) -> None:
        raise CompileError(f"{struct.__name__} has 8 bytes in the library, 16 in Python")

    monkeypatch.setattr(precompile, "load_host_libraries", shipped.load_host_libraries)
    monkeypatch.setattr(host, "load", lambda _text: SimpleNamespace(kernel=refuse))
    assert run(folder, "--arch", "sm_90a", "--geometry", "top_k=2") == 0
    told = "kernels for CPU ranks: not compiled; GPU ranks do not need them (DispatchArgs has 8"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [CompileError("NVRTC 13.0 failed for sm_90a:\nits log"), UnsupportedError("no NVRTC library")],
)
def test_one_failure_leaves_the_others(
    gpu_compiler: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: MoeNvlinkError,
) -> None:
    really = nvrtc.compile_cubin

    def compile_cubin(text: str, architecture: str, **options: Any) -> bytes:
        if architecture == "sm_90a":
            raise error
        return really(text, architecture, **options)

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    assert run(folder, "--arch", "sm_90a", "sm_100a", "--geometry", "lm_head") == 1
    out = capsys.readouterr().out
    assert re.search(r"FAILED sm_90a +lm_head,dtype=bf16: ", out)
    assert str(error) in out
    assert "1 of 2" in out
    assert len(list(folder.glob("*.cubin"))) == 3


def test_a_directory_that_is_only_readable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels must not silently go to the user's own directory instead."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o555)
    really = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: really(path, mode) and not mode & os.W_OK)
    assert run(folder, "--arch", "sm_90a") == 1
    assert f"{folder} is only readable for user" in capsys.readouterr().err


def test_without_a_directory_it_is_the_users(
    gpu_compiler: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MOE_NVLINK_CACHE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / name))
    monkeypatch.setattr(precompile, "load_host_libraries", lambda: None)
    arguments = ["--arch", "sm_90a", "--geometry", "lm_head", "--jobs", "1"]
    assert cli.main(["precompile", *arguments]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"in {tmp_path / 'moe_nvlink'}, which is where")
    assert "MOE_NVLINK_CACHE_DIR" not in last
