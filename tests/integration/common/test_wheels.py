"""Processes that want the same files of a wheel fetch it once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import platformdirs
import pytest

from tests.support import wheels


def test_it_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def fetch(requirement: str, folder: Path, *_options: object) -> None:
        fetched.append(requirement)
        time.sleep(0.2)  # the others ask meanwhile
        (folder / "file").write_text("as it lies in the wheel")

    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _name: str(tmp_path))
    monkeypatch.setattr(wheels, "_fetch", fetch)
    together = Barrier(3, timeout=60)

    def ask(_number: int) -> Path:
        together.wait()
        return wheels.files_of("framework", "1.0", bool, "all")

    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(ask, range(3)))
    (folder,) = found
    assert (folder / "file").read_text() == "as it lies in the wheel"
    assert fetched == ["framework==1.0"]
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]
