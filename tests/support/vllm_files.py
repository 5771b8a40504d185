"""vLLM's Python files on a machine that has neither its compiled libraries nor all its packages.

    vllm_files.complete()       # before the first import of vLLM

`benchmarks/carry.sh --vllm` packs the files for a lent GPU. Modules without contents stand for the
libraries, and names without meaning for packages that vLLM imports and MoE kernels do not use. What
is installed stays. Operators that only the libraries have stand in vllm_triton.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

#: vLLM takes its CUDA platform only if it can import the first of them.
LIBRARIES = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")
#: Raises an error when it is imported without a library of its own; attention is not needed here.
ATTENTION = "vllm.vllm_flash_attn"
#: Of the first library: what vLLM asks it when it is imported, of a number and with the answer no.
QUESTIONS = (
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
#: Imported on the way to vLLM's MoE kernels, for servers, tokenizers and structured output.
NOT_USED = frozenset(
    {
        *("anthropic", "blake3", "cbor2", "compressed_tensors", "depyf", "fastapi", "httpx2"),
        *("ijson", "lark", "llguidance", "lmformatenforcer", "mcp", "mistral_common", "openai"),
        *("openai_harmony", "outlines_core", "partial_json_parser", "setproctitle"),
        *("sniffio", "starlette", "uvicorn", "watchfiles", "xgrammar", "zmq", "gguf", "PIL"),
    }
)


#: Used before a request comes; Python's own module does the same.
ALIASES = {"pybase64": "base64"}


class _Meaningless(type):
    """Class of classes whose every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __getitem__(cls, _item: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Nothing(metaclass=_Meaningless):
    """What stands for a class, a function or a constant: it takes everything and does nothing."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __init_subclass__(cls, **_options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __call__(self, *args: Any, **_options: Any) -> Any:
        return args[0] if len(args) == 1 else None  # a decorator's function stays

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def nothing(name: str) -> Any:
    """A class of this name that means nothing."""
    return _Meaningless(name, (Nothing,), {})


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = nothing(name)
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finds NOT_USED after all other finders have not."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in NOT_USED:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def wheel(release: str) -> Path:
    """Return a folder with what of vLLM's wheel can travel: its Python files and its metadata.

    Raises:
        FetchError: the wheel could not be fetched.
    """
    from tests.support import wheels  # a machine with a GPU may lack what this imports

    def wanted(name: str) -> bool:
        return name.endswith((".py", ".dist-info/METADATA"))

    tags = ("--python-version", "3.12", "--platform", "manylinux_2_28_x86_64")
    return wheels.files_of("vllm", release, wanted, "python files, metadata", tags)


def why_not() -> str:
    """Why vLLM cannot run on a GPU here, or nothing. Imports nothing."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM is not here: benchmarks/carry.sh --vllm packs it"
    return "this vLLM is a build for CPUs" if "cpu" in version else ""


def make_empty(name: str) -> None:
    """Let a module, before it is imported, have names without meaning."""
    sys.modules[name] = _Empty(name)


#: Keeps what `complete` has defined.
_defined: list[Any] = []


def complete() -> None:
    """Let vLLM be imported in this process."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_Finder())
    for name, other in ALIASES.items():
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = importlib.import_module(other)
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    sys.modules.update((name, ModuleType(name)) for name in missing)
    if LIBRARIES[0] in missing:
        import torch

        make_empty(ATTENTION)

        library: Any = cast(Any, torch.library).Library("_C", "FRAGMENT")
        for question in QUESTIONS:
            library.define(f"{question}(int capability) -> bool")
            library.impl(question, lambda _capability: False, "CompositeImplicitAutograd")
        _defined.append(library)
