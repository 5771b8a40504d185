"""The source distribution: only the right file is believed."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.vllm import compat
from tests.upstream import fetch
from tests.upstream.fetch import FetchError, UnreachableError

pytestmark = pytest.mark.long

VERSION = "9.8.7"
TOP = f"vllm-{VERSION}"
FILES = {
    f"{TOP}/PKG-INFO": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n",
    f"{TOP}/pyproject.toml": "[tool.pytest.ini_options]\n",
    f"{TOP}/tests/conftest.py": "",
    f"{TOP}/tests/deep/test_one.py": "def test_one(): pass\n",
    f"{TOP}/vllm/__init__.py": "raise AssertionError('not the installed vLLM')\n",
}


def sdist(folder: Path) -> Path:
    """An archive with FILES."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{TOP}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def index_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """A simple index in a folder, whose archive is the known one; `listed` is what it says."""

    def make(archive: Path, listed: str = "") -> dict[str, str]:
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
        monkeypatch.setitem(fetch.SHA256, VERSION, sha256)
        folder = archive.parent / "simple" / "vllm"
        folder.mkdir(parents=True)
        href = f"{archive.as_uri()}#sha256={listed or sha256}"
        (folder / "index.html").write_text(f'<html><a href="{href}">{archive.name}</a></html>')
        return {"index-url": folder.parent.as_uri()}

    return make


def test_what_tests_need_is_unpacked_once_and_vllm_is_not(
    tmp_path: Path, index_of: Callable[..., dict[str, str]]
) -> None:
    index = index_of(sdist(tmp_path / "source"))
    tree = fetch.tree(VERSION, tmp_path / "cache", index)
    assert (tree / "tests" / "deep" / "test_one.py").read_text() == "def test_one(): pass\n"
    assert not (tree / "vllm").exists()
    assert len(list(tree.parent.iterdir())) == 2, "the tree and its lock, no archive"
    assert fetch.tree(VERSION, tmp_path / "cache", {"index-url": "file:///nowhere"}) == tree


def test_an_archive_with_another_hash_is_refused(
    tmp_path: Path, index_of: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the index says so, or says what is expected and gives another file."""
    archive = sdist(tmp_path / "source")
    index = index_of(archive, "0" * 64)
    with pytest.raises(FetchError, match=f"with sha256 {fetch.SHA256[VERSION]}"):
        fetch.tree(VERSION, tmp_path / "cache", index)
    monkeypatch.setitem(fetch.SHA256, VERSION, "0" * 64)
    with pytest.raises(FetchError, match="not the source distribution"):
        fetch.tree(VERSION, tmp_path / "cache", index)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_every_version_has_a_known_hash() -> None:
    assert set(fetch.SHA256) == set(compat.READ)
    assert all(len(bytes.fromhex(sha256)) == 32 for sha256 in fetch.SHA256.values())


def test_without_a_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.SHA256, VERSION, "0" * 64)
    index = {"index-url": "http://user:secret@127.0.0.1:9/simple/"}
    with pytest.raises(
        UnreachableError, match=r"from http://127\.0\.0\.1:9/.*or copy the folder"
    ) as caught:
        fetch.tree(VERSION, tmp_path / "cache", index)
    assert "secret" not in str(caught.value)
