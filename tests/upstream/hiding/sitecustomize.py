"""Hides our package, or AVX-512 and AMX, from a Python process and from those it starts.

If this folder is first on PYTHONPATH, Python imports this file at start-up; the variable
MOE_NVLINK_UPSTREAM_HIDE names what is hidden, separated by commas:

* `plugin`: importlib.metadata knows no distribution of ours, so vLLM finds no entry points, and
  every import of our package fails. An outcome of such a process owes nothing to our plugin.
* `avx512`: torch, which vLLM asks what the CPU has, denies AVX-512 and AMX; vLLM then takes its
  AVX2 library. What torch's and oneDNN's own kernels use is for variables to say, see `run.py`.

Imports nothing of ours, and little else: it runs before everything in every process.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PACKAGE = "moe_nvlink_plugin"
_TORCH_CPU = "torch.cpu"
_DENIED = ("avx512", "amx")


class _RefuseOurs:
    """First on sys.meta_path, so that no other finder, an editable install's say, is asked."""

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


def _hide_plugin() -> None:
    discover = importlib.metadata.Distribution.discover  # everything else asks this one

    def discover_others(**kwargs: Any) -> Iterator[importlib.metadata.Distribution]:
        return (found for found in discover(**kwargs) if not _is_ours(found))

    importlib.metadata.Distribution.discover = staticmethod(discover_others)  # type: ignore[method-assign]
    sys.meta_path.insert(0, _RefuseOurs)


class _WithoutAvx512:
    """Finds torch.cpu as others do; once that is imported, its answers are without AVX-512."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TORCH_CPU:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = functools.partial(_deny_avx512, loader.exec_module)
        return spec


def _deny_avx512(execute: Callable[[Any], None], module: Any) -> None:
    execute(module)
    asked = module.get_capabilities  # everything else in the module asks this function
    module.get_capabilities = lambda: types.MappingProxyType(
        {name: not name.startswith(_DENIED) and has for name, has in asked().items()}
    )


def _hide_avx512() -> None:
    sys.meta_path.insert(0, _WithoutAvx512)


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


_hides = {"plugin": _hide_plugin, "avx512": _hide_avx512}
for _name in filter(None, os.environ.get("MOE_NVLINK_UPSTREAM_HIDE", "").split(",")):
    _hides[_name]()
_run_the_one_we_shadow()
