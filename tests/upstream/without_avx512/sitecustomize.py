"""Makes a Python process, and those it starts, one whose CPU seems to have no AVX-512 and no AMX.

vLLM asks torch what the CPU has, and takes its AVX2 library where AVX-512 is missing. With this
folder on PYTHONPATH, Python imports this file at start-up; once `torch.cpu` is imported, it denies
both. What torch's and oneDNN's own kernels use is for variables to say, see `run.py`.

Must import little: it runs before everything in every process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

_MODULE = "torch.cpu"
_DENIED = ("avx512", "amx")


class _Loader(importlib.abc.Loader):
    """Another loader, and then the denial."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        asked = module.get_capabilities  # everything else in the module asks this function

        def get_capabilities() -> Mapping[str, Any]:
            has = asked()
            return types.MappingProxyType(
                {name: False if name.startswith(_DENIED) else value for name, value in has.items()}
            )

        module.get_capabilities = get_capabilities  # type: ignore[attr-defined]


class _Finder:
    """Before all others on sys.meta_path; of one module it answers with what they find."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_the_one_we_shadow() -> None:
    """Runs the sitecustomize that Python would have imported without this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [os.path.abspath(entry) for entry in sys.path]
    later = sys.path[places.index(here) + 1 :]  # one before us has run, and has called us
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", later)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder)
_run_the_one_we_shadow()
