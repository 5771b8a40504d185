"""Stand-ins that let SGLang's CPU engine import on a machine without GPU and GPU packages.

The environment of `make sglang-env` imports this module when an interpreter starts, so it imports
nothing that takes time. `install` puts a finder before all others; the finder acts when a module
that it stands in for is imported. No stand-in computes anything: SGLang fails if it calls one.

With TRITON_INTERPRET=1 Triton has no stand-in: the one on the path executes kernels on CPU tensors.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

#: torchvision's library defines these operators, and its Python part registers their shapes when it
#: is imported. The library needs a CUDA build of torch.
TORCHVISION_OPERATORS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)


class _Made(Loader):
    """Loads what a function makes of a name."""

    def __init__(self, make: Callable[[str], ModuleType]) -> None:
        self._make = make

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module."""
        return self._make(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""


class _KernelLibrary(ModuleType):
    """A module of functions, whatever their names, that raise when they are called."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_arguments: object, **_options: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has a stand-in without contents")

        return refuse


class StandIns(MetaPathFinder):
    """Finds the stand-ins; everything else is left to the finders after this one.

    Args:
        interprets: whether Triton is there to execute kernels, and has no stand-in.
    """

    def __init__(self, interprets: bool) -> None:
        self._interprets = interprets

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a stand-in, or None."""
        package = fullname.partition(".")[0]
        if package == "vllm":
            # The environment borrows the packages of one that has vLLM, which SGLang would import.
            raise ModuleNotFoundError("vLLM is hidden in the environment of SGLang", name="vllm")
        if fullname == "sgl_kernel":
            return ModuleSpec(fullname, _Made(_KernelLibrary), is_package=True)
        if package == "triton" and not self._interprets:
            return ModuleSpec(fullname, _Made(_triton), is_package=True)
        if fullname == "torchvision":
            _define_torchvision_operators()
        if fullname in COMPLETED:
            return _completed(PathFinder.find_spec(fullname, path))
        return None


@functools.cache
def _define_torchvision_operators() -> object:
    import torch

    if torch.version.cuda is not None:
        return None
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in TORCHVISION_OPERATORS:
        library.define(operator)
    return library  # the operators go when the library does


def _pad_batches(attention: ModuleType) -> None:
    """Attention DP asks for this method; the value is that of SGLang's other CPU attention."""
    attention.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _self: 1


def _stay_latent(handlers: ModuleType) -> None:
    """This attention reads keys from the cache alone, where latent attention keeps latent ones."""
    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)


#: Modules of SGLang, and what each lacks to run with its only attention that needs no kernel
#: library, torch_native.
COMPLETED: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.layers.attention.torch_native_backend": _pad_batches,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _stay_latent,
}


class _Completing(SourceFileLoader):
    """Loads one of COMPLETED and adds what it lacks."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then complete it."""
        super().exec_module(module)
        COMPLETED[self.name](module)


def _completed(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is not None and spec.origin is not None:
        spec.loader = _Completing(spec.name, spec.origin)
    return spec


def _triton(name: str) -> ModuleType:
    """SGLang's own stand-in for Triton, made for Apple's processors. Triton itself has 1 GB."""
    stubs = _sglang_stubs()
    module: ModuleType = stubs._MockModule(name)
    if name == "triton":
        vars(module).update(
            __version__="3.0.0",
            Config=stubs._Config,
            cdiv=stubs._cdiv,
            next_power_of_2=stubs._next_power_of_2,
        )
    return module


@functools.cache
def _sglang_stubs() -> ModuleType:
    """The module of SGLang that holds the stand-in; SGLang itself cannot be imported before."""
    sglang = PathFinder.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        raise ModuleNotFoundError("SGLang is not installed here: run `make sglang-env`")
    path = f"{sglang.submodule_search_locations[0]}/_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def install() -> None:
    """Put the finder before all others."""
    sys.meta_path.insert(0, StandIns(os.environ.get("TRITON_INTERPRET") == "1"))
