"""Install a module of ours for the servers of a benchmark alone."""

from __future__ import annotations

import shutil
from pathlib import Path


def install(source: Path, group: str, attribute: str, folder: Path) -> Path:
    """Copy one file beside a dist-info of its own into `folder`; return the folder.

    vLLM finds the plugin in servers that have the folder in PYTHONPATH, and in no other.

    Args:
        source: the module. It imports nothing of this folder: servers do not have it.
        group: of vLLM's entry points.
        attribute: what vLLM takes from the module.
    """
    name = f"moe_nvlink_bench_{source.stem}"
    about = folder / f"{name}-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:{attribute}\n")
    shutil.copy(source, folder / f"{name}.py")
    return folder
