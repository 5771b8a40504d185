"""The cache of compiled kernels: one compilation, whole files, nobody else's code."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import filelock
import pytest

from moe_nvlink_plugin.errors import CompileError
from moe_nvlink_plugin.jit import cache, host

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(text: str, target: Path) -> None:
    target.write_text(text)


def test_built_once_then_found(folder: Path) -> None:
    path = cache.get_or_build("key", ".txt", lambda target: write("one", target))
    assert path.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    again = cache.get_or_build("key", ".txt", lambda target: pytest.fail("built twice"))
    assert (again, again.read_text()) == (path, "one")
    other = cache.get_or_build("another key", ".txt", lambda target: write("two", target))
    assert other != path


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail(target: Path) -> None:
        target.write_text("half")
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        cache.get_or_build("key", ".so", fail)
    assert [p.name for p in folder.iterdir() if p.suffix != ".lock"] == []
    assert cache.get_or_build("key", ".so", lambda t: write("whole", t)).read_text() == "whole"


def test_a_file_appears_whole(folder: Path) -> None:
    """While it is being written nothing stands under its name."""
    seen: list[Path] = []

    def build(target: Path) -> None:
        target.write_text("half")
        seen.extend(folder.glob("*.so"))
        target.write_text("whole")

    path = cache.get_or_build("key", ".so", build)
    assert seen == []
    assert path.read_text() == "whole"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_folder_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CompileError, match=f"mode {mode:o}.*chmod 700"):
        cache.directory()


def test_somebody_elses_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(CompileError, match=f"owner {folder.stat().st_uid}"):
        cache.directory()


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(CompileError, match="MOE_NVLINK_CACHE_DIR"):
        cache.directory()


def test_a_lock_that_is_never_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_S", 0.2)
    cache.get_or_build("key", ".so", lambda target: write("", target)).unlink()
    (lock,) = folder.glob("*.lock")
    with filelock.FileLock(lock), pytest.raises(CompileError, match=r"another process .*0\.2 s"):
        cache.get_or_build("key", ".so", lambda target: pytest.fail("built"))


def _build_slowly(log: str) -> None:
    def build(target: Path) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        target.write_text("whole")

    assert cache.get_or_build("key", ".so", build).read_text() == "whole"


def test_processes_at_once_compile_once(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=_build_slowly, args=(str(log),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(log.read_text().splitlines()) == 1


# The host compiler.


def test_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_CXX", "no-such-compiler -v")
    with pytest.raises(CompileError, match="'no-such-compiler' not found; install"):
        host.build("int main() {}")


def test_a_failing_compiler_shows_its_log(folder: Path) -> None:
    with pytest.raises(CompileError, match="'no_such_name' was not declared|no_such_name"):
        host.build("int f() { return no_such_name; }")
    assert not list(folder.glob("*.so"))


def test_a_compiler_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder.parent / "slow"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setenv("MOE_NVLINK_CXX", str(script))
    monkeypatch.setattr(host, "_COMPILE_TIMEOUT_S", 0.3)
    with pytest.raises(CompileError, match=r"took over 0\.3 s"):
        host.build("int f();")


def test_flags_and_compiler_are_part_of_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'extern "C" int f() { return 1; }'
    flags = ("-shared", "-fPIC")
    paths = {host.build(text, flags), host.build(text, (*flags, "-O1"))}
    monkeypatch.setenv("MOE_NVLINK_CXX", "g++ -g")
    paths.add(host.build(text, flags))
    monkeypatch.setattr(host, "_machine", lambda: "another CPU")
    paths.add(host.build(text, flags))
    assert len(paths) == 4
