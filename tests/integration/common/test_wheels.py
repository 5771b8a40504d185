"""Processes that want the same files of a wheel fetch it once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import filelock
import platformdirs
import pytest

from tests.support import wheels


def test_it_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    together = Barrier(3, timeout=60)

    def fetch(requirement: str, folder: Path, *_options: object) -> None:
        fetched.append(requirement)
        (folder / "file").write_text("as it lies in the wheel")

    class Lock(filelock.FileLock):
        def acquire(self, *given: Any, **named: Any) -> Any:
            together.wait()  # by now none has found the folder
            return super().acquire(*given, **named)

    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _name: str(tmp_path))
    monkeypatch.setattr(wheels, "_fetch", fetch)
    monkeypatch.setattr(filelock, "FileLock", Lock)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(wheels.files_of, "framework", "1.0", bool, "all") for _ in range(3)]
        found = {each.result() for each in asked}
    (folder,) = found
    assert (folder / "file").read_text() == "as it lies in the wheel"
    assert fetched == ["framework==1.0"]
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]
