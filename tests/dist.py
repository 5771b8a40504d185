"""Builds the wheel and the sdist, installs each, and uses each from an empty directory.

    python -m tests.dist FOLDER      (`make dist`: FOLDER is dist)

The installations borrow this environment's packages (torch is a download of minutes): a `.pth` file
names its site-packages after their own. Python reads no `.pth` file of a folder that is named so,
and therefore an editable installation of this checkout stays out of them.

`install_alone` borrows torch and what the archive asks for, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
#: What the archives are made of.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "moe_nvlink_plugin", "kernels", "integration")

#: Two ranks, whose experts return every row that they receive.
SMOKE = """
import sys
from pathlib import Path

import torch

import moe_nvlink_plugin
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.testing import run_ranks

assert Path(moe_nvlink_plugin.__file__).is_relative_to(sys.prefix), moe_nvlink_plugin.__file__


def rank_main(group):
    config = AllToAllConfig(ep_size=2, ep_rank=group.rank, num_experts=2, top_k=1, hidden_size=64,
                            max_tokens_per_rank=4, dtype=torch.float32, timeout_s=60)
    with MoeAllToAll.create(config, group) as exchange:
        rows = torch.randn(4, 64)
        other_rank = torch.full((4, 1), 1 - group.rank, dtype=torch.int32)
        received = exchange.dispatch(rows, other_rank, torch.ones(4, 1))
        combined = exchange.combine(received.hidden_states.clone(), received.metadata)
        assert torch.equal(combined, rows)
        return exchange.stats().bytes_dispatched_remote


remote = run_ranks(2, rank_main)
assert all(count > 0 for count in remote), remote
print("two CPU ranks exchanged", remote, "bytes")
"""


class Built(NamedTuple):
    """The archives of one build."""

    wheel: Path
    sdist: Path


def copy_sources(folder: Path) -> Path:
    """Copies the sources alone: no leftover of an earlier build gets into an archive."""
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(path, folder / name)
    return folder


def build(folder: Path) -> Built:
    """Builds the sdist of the sources, and the wheel of the sdist, into `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        source, made = copy_sources(Path(scratch)), Path(scratch) / "made"
        _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(source)])
        folder.mkdir(parents=True, exist_ok=True)
        (wheel,) = (Path(shutil.copy(path, folder)) for path in made.glob("*.whl"))
        (sdist,) = (Path(shutil.copy(path, folder)) for path in made.glob("*.tar.gz"))
    return Built(wheel, sdist)


def install(archive: Path, folder: Path) -> Path:
    """Installs an archive into a new virtual environment; returns the folder of its commands."""
    commands, packages = _new_environment(folder)
    borrowed = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    # `--force-reinstall`: pip also sees the version that this environment has, and leaves that.
    _run(
        [str(commands / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        + ["--no-build-isolation", "--force-reinstall", str(archive)]
    )
    return commands


def install_alone(wheel: Path, folder: Path) -> Path:
    """Installs a wheel beside torch, what the wheel asks for, and what those ask for in turn.

    Links stand for these distributions, which this environment has. Nothing else can be imported,
    as after `pip install torch WHEEL`. Returns the folder of the environment's commands.
    """
    commands, packages = _new_environment(folder)
    python = str(commands / "python")
    _run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
        + ["--no-index", str(wheel)]
    )
    (own,) = metadata.distributions(name="moe-nvlink-plugin", path=[str(packages)])
    for distribution in _closure(["torch", *(own.requires or ())]):
        for part in _parts(distribution):
            (packages / part).parent.mkdir(parents=True, exist_ok=True)
            (packages / part).symlink_to(Path(str(distribution.locate_file(part))))
    return commands


def _new_environment(folder: Path) -> tuple[Path, Path]:
    """Creates one without pip; returns the folders of its commands and of its packages."""
    venv.create(folder, symlinks=True)
    places = {"base": str(folder), "platbase": str(folder)}
    commands, packages = (sysconfig.get_path(name, vars=places) for name in ("scripts", "purelib"))
    return Path(commands), Path(packages)


def _closure(requirements: Iterable[str]) -> Iterator[metadata.Distribution]:
    """What this environment has of the requirements, of theirs, and so on; each once."""
    seen, left = set[tuple[str, str]](), [(Requirement(text), "") for text in requirements]
    while left:
        requirement, asker_extra = left.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": asker_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:  # `make env` takes some away that torch asks for and does without
                found = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            left += [(Requirement(text), extra) for text in found.requires or ()]
            if not extra:
                yield found


def _parts(distribution: metadata.Distribution) -> Iterator[Path]:
    """What is a distribution's own: packages and files. Others may share a folder with it."""
    found: dict[Path, None] = {}
    for path in map(Path, distribution.files or ()):
        if ".." in path.parts or "__pycache__" in path.parts:  # commands, and what Python writes
            continue
        for part in [*reversed(path.parents[:-1]), path]:
            here = Path(str(distribution.locate_file(part)))
            is_own = (here / "__init__.py").exists() or part.suffix == ".dist-info"
            if is_own or part == path:
                found[part] = None
                break
    yield from found


def smoke(commands: Path, folder: Path) -> str:
    """Uses an installation from `folder`, which is empty; returns what it printed."""
    folder.mkdir()
    exchanged = _run([str(commands / "python"), "-c", SMOKE], folder)
    return exchanged + _run([str(commands / "moe-nvlink"), "doctor"], folder)


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=600
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)[:300]} ended with code {done.returncode}:\n"
            f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds, installs and uses both; a line for each archive. Raises what went wrong."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for archive in build(parser.parse_args(arguments).folder.resolve()):
        with tempfile.TemporaryDirectory() as scratch:
            commands = install(archive, Path(scratch) / "venv")
            exchanged, *_, cpu_ranks = smoke(commands, Path(scratch) / "empty").splitlines()
            print(f"{archive.name}: {exchanged}; doctor: {cpu_ranks}", flush=True)


if __name__ == "__main__":
    main()
