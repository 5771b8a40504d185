"""Fetches a framework's wheel for its source: by pip, without its dependencies, kept on disk."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import platformdirs
import pytest

from tests.unit.framework_source import Source

#: What pip says when it cannot reach a registry, whatever registry it was told to use.
UNREACHABLE = re.compile(
    "connection broken|NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|"
    "Name or service not known|name resolution|ProxyError|No route to host|SSLError",
    re.IGNORECASE,
)


class Wheels(NamedTuple):
    """Wheels of one distribution, which has one package of the same name.

    python: the version whose wheels are asked for. platforms: tags they are published under; pip
    matches them one by one. left_out: folders that hold nothing we touch but what `kept` names.
    """

    name: str
    python: str
    platforms: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()

    def source(self, version: str) -> Source:
        """The Python files of one release. Skips the test where no registry can be reached."""
        # Another selection of files is no substitute.
        chosen = hashlib.sha256("".join([*self.left_out, *sorted(self.kept)]).encode()).hexdigest()
        cache = Path(platformdirs.user_cache_dir("moe_nvlink")) / f"{self.name}-source"
        kept = cache / f"{version}-{chosen[:8]}"
        if not (kept / self.name).is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f"{version}.", dir=cache))
            try:
                self._fetch(version, scratch)
                if not kept.exists():  # another process may have been quicker
                    scratch.rename(kept)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        return Source(kept, version, self.name)

    def _fetch(self, version: str, folder: Path) -> None:
        """Downloads the wheel and leaves its Python files under `folder`."""
        tags = [word for platform in self.platforms for word in ("--platform", platform)]
        command = [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
            *("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--retries", "2"),
            *("--timeout", "20", "--python-version", self.python, *tags),
            *("--dest", str(folder), f"{self.name}=={version}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        if done.returncode != 0:
            message = f"pip could not fetch {self.name} {version}: {done.stderr.strip()[-600:]}"
            # Where tests run for others to rely on, this one is not left out in silence.
            if UNREACHABLE.search(done.stderr) and not os.environ.get("CI"):
                pytest.skip(f"no registry can be reached; {message}")
            pytest.fail(message)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            wanted = [n for n in names if n in self.kept or not n.startswith(self.left_out)]
            archive.extractall(folder, wanted)
        wheel.unlink()
