"""Hides our package from a Python process and from those it starts.

If this folder is first on PYTHONPATH, Python imports this file at start-up. If the variable
MOE_NVLINK_UPSTREAM_HIDE is set, importlib.metadata then knows no distribution of ours, so that vLLM
finds no entry points, and every import of our package fails: an outcome of such a process owes
nothing to our plugin. Imports nothing of ours, and little else.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

_PACKAGE = "moe_nvlink_plugin"


class _RefuseOurs:
    """First on sys.meta_path, before the finder of an editable install."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == _PACKAGE:
            raise ModuleNotFoundError(
                f"{name} is hidden from this process by {__file__}; take that folder out of "
                "PYTHONPATH to import it.",
                name=name,
            )


def _is_ours(distribution: importlib.metadata.Distribution) -> bool:
    # Reading each distribution's METADATA costs 0.1 s per question; the folder's name says it too.
    name = getattr(distribution, "_normalized_name", None) or distribution.metadata["Name"]
    return str(name).replace("-", "_").lower() == _PACKAGE


def _hide() -> None:
    discover = importlib.metadata.Distribution.discover  # everything else asks this one

    def discover_others(**kwargs: Any) -> Iterator[importlib.metadata.Distribution]:
        return (found for found in discover(**kwargs) if not _is_ours(found))

    importlib.metadata.Distribution.discover = staticmethod(discover_others)  # type: ignore[method-assign]
    sys.meta_path.insert(0, _RefuseOurs)


def _run_the_one_we_shadow() -> None:
    """Runs the sitecustomize that Python would have imported without this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("MOE_NVLINK_UPSTREAM_HIDE"):
    _hide()
_run_the_one_we_shadow()
