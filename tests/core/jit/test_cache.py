"""The cache of compiled kernels: one compilation, whole files, nobody else's code."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import multiprocessing
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import pytest

from moe_nvlink_plugin.errors import CompileError
from moe_nvlink_plugin.jit import cache, header, host


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(content: str, target: Path) -> None:
    target.write_text(content)


def text(entry: cache.Entry) -> str:
    return entry.content.decode()


def said(path: Path) -> str:
    """What a file says before its checksum."""
    return path.read_bytes()[: -hashlib.sha256().digest_size].decode()


def test_built_once_then_found(folder: Path) -> None:
    path = cache.get_or_build("key", ".txt", lambda target: write("one", target))
    assert path.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    again = cache.get_or_build("key", ".txt", lambda target: pytest.fail("built twice"))
    assert (again, said(again)) == (path, "one")
    other = cache.get_or_build("another key", ".txt", lambda target: write("two", target))
    assert other != path


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail(target: Path) -> None:
        target.write_text("half")
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        cache.get_or_build("key", ".so", fail)
    assert [p.name for p in folder.iterdir() if p.suffix != ".lock"] == []
    assert said(cache.get_or_build("key", ".so", lambda t: write("whole", t))) == "whole"


def test_a_file_appears_whole(folder: Path) -> None:
    """While it is being written nothing stands under its name."""
    seen: list[Path] = []

    def build(target: Path) -> None:
        target.write_text("half")
        seen.extend(folder.glob("*.so"))
        target.write_text("whole")

    path = cache.get_or_build("key", ".so", build)
    assert seen == []
    assert said(path) == "whole"


def test_a_directory_for_everybody(folder: Path) -> None:
    """/tmp, for one. Whoever owns it must not close it to the others."""
    folder.mkdir()
    folder.chmod(0o1777)
    below = f"{folder}/moe_nvlink-{os.getuid()}"
    with pytest.raises(CompileError, match=f"mode 1777.*; set MOE_NVLINK_CACHE_DIR to {below}, or"):
        cache.directory()
    assert not list(folder.iterdir())


def test_a_directory_below_one_for_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(folder / "mine"))
    path = cache.get_or_build("key", ".txt", lambda target: write("one", target))
    assert cache.load("key", ".txt", text) == "one"
    assert path.parent == folder / "mine"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_folder_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CompileError, match=f"mode {mode:o}.*chmod 700"):
        cache.directory()


def test_somebody_elses_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this user's nor root's: whoever owns it chooses what this process runs."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    owner = give_to_a_stranger(folder, monkeypatch)
    with pytest.raises(CompileError, match=rf"owner {owner}\); give it .* to root .chown -R 0"):
        cache.directory()
    with pytest.raises(CompileError, match=f"owner {owner}"):
        cache.load("key", ".txt", text)


def give_to_a_stranger(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes path, for what cache.py sees, the property of neither this user nor root."""
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
        return 12345
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    return owner


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(CompileError, match="MOE_NVLINK_CACHE_DIR"):
        cache.directory()


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in passwd."""
    monkeypatch.delenv("MOE_NVLINK_CACHE_DIR", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: f"~/.cache/{name}")
    with pytest.raises(CompileError, match="no home directory .*MOE_NVLINK_CACHE_DIR"):
        cache.directory()


def test_a_full_disk(folder: Path) -> None:
    def build(target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CompileError, match="No space left.*make room"):
        cache.get_or_build("key", ".txt", build)
    assert cache.load("key", ".txt", text) is None


def test_a_file_that_is_not_accepted_is_built_anew(folder: Path) -> None:
    path = cache.get_or_build("key", ".txt", lambda target: write("half", target))

    def read(entry: cache.Entry) -> str | None:
        return text(entry) if text(entry) == "whole" else None

    assert cache.load("key", ".txt", read) is None
    assert cache.load_or_build("key", ".txt", lambda t: write("whole", t), read) == "whole"
    assert said(path) == "whole"
    path.unlink()
    with pytest.raises(CompileError, match="just compiled"):
        cache.load_or_build("key", ".txt", lambda target: write("half again", target), read)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
def test_a_file_others_may_write_to_is_built_anew(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.get_or_build("key", ".txt", lambda target: write("one", target))
    path.chmod(mode)
    again = cache.get_or_build("key", ".txt", lambda target: write("two", target))
    assert (said(again), stat.S_IMODE(again.stat().st_mode)) == ("two", 0o644)
    assert f"mode {mode:o}" in caplog.text


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    path = cache.get_or_build("key", ".txt", lambda target: write("one", target))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not what was compiled")
    path.unlink()
    path.symlink_to(elsewhere)
    again = cache.get_or_build("key", ".txt", lambda target: write("two", target))
    assert (said(again), again.is_symlink()) == ("two", False)
    assert elsewhere.read_text() == "not what was compiled"


#: What a host library must have, and a function that tells two of them apart.
_LIBRARY = """
extern "C" void* moe_nvlink_grid_create(int) {{ return nullptr; }}
extern "C" void moe_nvlink_grid_destroy(void*) {{}}
extern "C" int moe_nvlink_sizeof_local_control() {{ return {}; }}
extern "C" int moe_nvlink_sizeof_exchange_counters() {{ return {}; }}
extern "C" int which() {{ return {}; }}
"""


def library_text(which: int) -> str:
    structs = (header.structs()[name] for name in ("LocalControl", "ExchangeCounters"))
    return _LIBRARY.format(*map(ctypes.sizeof, structs), which)


def with_a_page_of_zeros(data: bytes) -> bytes:
    return data[:4096] + bytes(4096) + data[8192:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data[:-32],
        with_a_page_of_zeros,
    ],
    ids=["0", "100", "a byte", "no seal", "a page"],
)
def test_a_damaged_library_is_built_anew(
    folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """By a full disk, a bad copy, a bad disk. To load one may be a bus error."""
    path = host.build(library_text(1))
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    assert host.build(library_text(1)) == path
    assert path.read_bytes() == whole
    assert f"{path} is not used: it is damaged" in caplog.text


def test_a_directory_in_a_files_place(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = cache.get_or_build("key", ".txt", lambda target: write("one", target))
    path.unlink()
    path.mkdir()
    (path / "kept").touch()
    with pytest.raises(CompileError, match=f"cannot write {path}: .*; remove that directory"):
        cache.get_or_build("key", ".txt", lambda target: write("two", target))
    assert f"{path} is not used: it is no regular file" in caplog.text
    assert {left.suffix for left in folder.iterdir()} == {".lock", ".txt"}


def test_a_named_pipe_in_a_files_place(folder: Path) -> None:
    """Nobody writes into it: to open it for reading could wait for ever."""
    path = cache.get_or_build("key", ".txt", lambda target: write("one", target))
    path.unlink()
    os.mkfifo(path)
    assert said(cache.get_or_build("key", ".txt", lambda target: write("two", target))) == "two"


@pytest.fixture
def exchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Has somebody who owns the parent put a directory of his in the cache's place.

    He does so when a function of cache.py, which the argument names, has returned.
    """
    theirs = folder.parent / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)

    def after(name: str) -> Path:
        really = getattr(cache, name)

        def exchange(*arguments: Any) -> Any:
            result = really(*arguments)
            if theirs.exists():
                folder.rename(folder.parent / "ours")
                theirs.rename(folder)
            return result

        monkeypatch.setattr(cache, name, exchange)
        return theirs

    return after


@pytest.mark.parametrize("moment", ["_problem", "_whole"])
def test_what_was_checked_is_what_is_loaded(
    folder: Path, exchanged: Callable[[str], Path], moment: str
) -> None:
    mine = host.build(library_text(1))
    theirs = host.build(library_text(2))
    theirs.rename(exchanged(moment) / mine.name)
    assert host.load.__wrapped__(library_text(1))._library.which() == 1


@pytest.mark.parametrize("moment", ["_check", "_built"])
def test_nothing_is_written_to_a_directory_that_was_not_checked(
    folder: Path, exchanged: Callable[[str], Path], moment: str
) -> None:
    folder.mkdir(mode=0o700)
    exchanged(moment)
    told = pytest.raises(CompileError, match="others may write to it .mode 777")
    with told if moment == "_check" else contextlib.nullcontext():
        cache.get_or_build("key", ".txt", lambda target: write("one", target))
    assert list(folder.iterdir()) == []


def test_a_loose_umask_makes_no_file_that_is_refused_later(folder: Path) -> None:
    before = os.umask(0o002)
    try:
        cache.get_or_build("key", ".txt", lambda target: write("one", target))
    finally:
        os.umask(before)
    assert cache.load("key", ".txt", text) == "one"


# A directory that came with an image: filled by one user (root), read by another.


@pytest.fixture
def shipped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`folder`, holding "key" and only readable from now on; the user's own directory is apart."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(tmp_path / "home" / name))
    cache.get_or_build("key", ".txt", lambda target: write("shipped", target))
    folder.chmod(0o555)
    # Root may write everywhere; that a file system is read-only it learns from access() as well.
    really = os.access

    def access(path: Path, mode: int) -> bool:
        return really(path, mode) and not (path == folder and mode & os.W_OK)

    monkeypatch.setattr(os, "access", access)
    return folder


def test_a_shipped_file_is_found(shipped: Path, tmp_path: Path) -> None:
    path = cache.get_or_build("key", ".txt", lambda target: pytest.fail("built"))
    assert path.parent == shipped
    assert not list((tmp_path / "home").rglob("*.txt"))


def test_what_the_image_lacks_goes_to_the_user(shipped: Path, tmp_path: Path) -> None:
    before = set(shipped.iterdir())
    path = cache.get_or_build("another", ".txt", lambda target: write("mine", target))
    assert path.parent == tmp_path / "home" / "moe_nvlink"
    assert cache.load("another", ".txt", text) == "mine"
    assert set(shipped.iterdir()) == before


def test_nowhere_to_build_what_the_image_lacks(shipped: Path, tmp_path: Path) -> None:
    """A read-only container: what was shipped is used, the rest is an error that names both."""
    (tmp_path / "home").write_text("no directory can be made here")
    assert cache.load("key", ".txt", text) == "shipped"
    assert cache.load("another", ".txt", text) is None
    with pytest.raises(CompileError, match=f"{shipped} lacks .*precompile.*{tmp_path / 'home'}"):
        cache.get_or_build("another", ".txt", lambda target: pytest.fail("built"))


@pytest.mark.parametrize("mode", [0o575, 0o557])
def test_a_shipped_directory_others_may_write_to(shipped: Path, mode: int) -> None:
    shipped.chmod(mode)
    with pytest.raises(CompileError, match=f"mode {mode:o}"):
        cache.load("key", ".txt", text)


def test_a_shipped_file_others_may_write_to(shipped: Path) -> None:
    (path,) = shipped.glob("*.txt")
    path.chmod(0o666)
    again = cache.get_or_build("key", ".txt", lambda target: write("mine", target))
    assert again.parent != shipped


_NOBODY = 65534


def _as_nobody(given: Path, home: Path) -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    # The interpreter's own directory may be closed to this user: what follows imports nothing.
    shipped = cache.get_or_build("key", ".txt", lambda target: pytest.fail("built"))
    mine = cache.get_or_build("another", ".txt", lambda target: write("mine", target))
    assert (shipped.parent, mine.parent) == (given, home / "moe_nvlink")
    assert (said(shipped), said(mine)) == ("shipped", "mine")
    with pytest.raises(PermissionError):
        (given / "planted.txt").write_text("x")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_filled_by_root_and_used_by_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pretence: directory of root, process of another user."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to other users
        base = Path(folder)
        base.chmod(0o755)
        given, home = base / "shipped", base / "home"
        home.mkdir()
        os.chown(home, _NOBODY, _NOBODY)
        monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", str(given))
        monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: str(home / name))
        cache.get_or_build("key", ".txt", lambda target: write("shipped", target))
        given.chmod(0o700)
        assert _outcome(_not_readable, given) == 0
        given.chmod(0o755)
        assert _outcome(_as_nobody, given, home) == 0


def _not_readable(given: Path) -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
    with pytest.raises(CompileError, match=f"{given} is not readable by user {_NOBODY}.*chmod 755"):
        cache.load("key", ".txt", text)


def _outcome(target: Callable[..., None], *arguments: Path) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


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

    assert said(cache.get_or_build("key", ".so", build)) == "whole"


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
    with pytest.raises(CompileError, match="'no-such-compiler' not found .*unset it for g..$"):
        host.build("int main() {}")
    monkeypatch.delenv("MOE_NVLINK_CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompileError, match=r"'g\+\+' not found; install g.. 11 or newer"):
        host.build("int main() {}")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("/tmp", "cannot start '/tmp': Permission denied; set MOE_NVLINK_CXX to a C++ compiler"),
        ("true", "MOE_NVLINK_CXX='true' wrote no file: it must be a C++ compiler"),
        ("false", "no message, exit code 1\nMOE_NVLINK_CXX='false' must be g++ 11 or newer"),
        ("g++ -fsyntax-only", "MOE_NVLINK_CXX='g++ -fsyntax-only' wrote no file"),
        ("g\udcff++", r"'g\udcff++' not found"),  # a byte that is no UTF-8
        (r"sh -c 'printf \\374 >&2; exit 1'", "failed:\n\ufffd"),
    ],
)
def test_what_is_no_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, told: str
) -> None:
    monkeypatch.setenv("MOE_NVLINK_CXX", command)
    with pytest.raises(CompileError) as caught:
        host.build("int f();")
    assert told in str(caught.value)
    assert "make room" not in str(caught.value)
    assert not list(folder.glob("*.so"))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, which may write there, says the system")
def test_a_directory_that_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody holds a lock that cannot be created."""
    monkeypatch.setenv("MOE_NVLINK_CACHE_DIR", "/proc")
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_S", 2)
    with pytest.raises(CompileError, match="/proc") as caught:
        host.build("int f();")
    assert "another process" not in str(caught.value)


@pytest.mark.parametrize(
    "log",
    [
        "cc1plus: out of memory allocating 65536 bytes after a total of 0 bytes",
        "virtual memory exhausted: Cannot allocate memory",
        "g++: fatal error: Killed signal terminated program cc1plus",
    ],
)
def test_a_compiler_without_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, log: str) -> None:
    script = folder.parent / "small"
    script.write_text(f"#!/bin/sh\necho '{log}' >&2\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setenv("MOE_NVLINK_CXX", str(script))
    with pytest.raises(CompileError, match=r"too little memory: raise the limit \(ulimit -v\)"):
        host.build("int f();")


def test_a_library_that_cannot_be_loaded(folder: Path) -> None:
    path = host.build(library_text(4))
    path.write_bytes(b"\x7fELF")
    with pytest.raises(CompileError, match=f"cannot load {path}: .*noexec.*ulimit -v"):
        host.HostLibrary(path)


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
