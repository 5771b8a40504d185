"""FlashInfer from its wheel, imported for a while and never installed.

vLLM, SGLang and our benchmarks choose their kernels by whether Python finds FlashInfer. An
environment that had it would test other choices than those of a machine without it.

Its requirements are for GPUs. What it imports without one is in the extra `test`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

#: The newest release, from which our adapters and benchmarks were read.
VERSION = "0.7.2.post1"
#: CUDA sources that benchmarks/moe_comm/peer_source.py compiles.
CAKE = "flashinfer/data/csrc/generated/mnnvl_moe_alltoall_sm100.cu"
_CUDA = ("flashinfer/data/csrc/nv_internal/", "flashinfer/data/include/flashinfer/", CAKE)
_LEFT_OUT = "flashinfer/data/"
_PACKAGE = "flashinfer"

#: What this process has imported of it: a second import would make every class a second time.
_imported: dict[str, ModuleType] = {}


def folder() -> Path:
    """Return a folder with its Python files, its metadata, and the CUDA sources named above.

    Raises:
        FetchError: the wheel could not be fetched.
    """
    from tests.support import wheels  # a machine with a GPU may lack what this imports

    chosen = "".join(("python", *_CUDA, _LEFT_OUT))
    return wheels.files_of("flashinfer-python", VERSION, _is_wanted, chosen)


def _is_wanted(name: str) -> bool:
    if name.startswith(_CUDA):
        return name.endswith((".h", ".cuh", ".cu"))
    if name.startswith(_LEFT_OUT):
        return False
    return name.endswith((".py", ".json", ".dist-info/METADATA"))


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Let this process import `flashinfer` until the context ends; then Python finds it no more.

    Raises:
        FetchError: the wheel could not be fetched.
    """
    path, writes_nothing = str(folder()), sys.dont_write_bytecode
    sys.modules.update(_imported)
    sys.path.insert(0, path)
    sys.dont_write_bytecode = False  # its import compiles for seconds
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_nothing
        sys.path.remove(path)
        found = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
        _imported.update({name: sys.modules.pop(name) for name in found})
