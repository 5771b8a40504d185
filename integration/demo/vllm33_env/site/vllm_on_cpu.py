"""What vLLM 0.33 and Triton need on a machine without a GPU.

The environment of `make vllm33-env` imports this module when an interpreter starts, so it imports
nothing that takes time.

With TRITON_INTERPRET=1 Triton executes kernels on CPU tensors, without compiling them. vLLM asks it
for a back end first; the one here says that it is active, and compiles nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class _Driver:
    """As much of a driver as is asked for."""

    @staticmethod
    def is_active() -> bool:
        """Whether it can be used."""
        return True


class _Backend:
    """As much of a back end as is asked for."""

    driver = _Driver
    compiler = None


def _add_backend(backends: ModuleType) -> None:
    backends.backends["cpu"] = _Backend


def _sample_in_torch(sampler: ModuleType) -> None:
    """The interpreter gives _topk_topp_kernel the numbers of a tl.range without their methods."""
    vars(sampler)["HAS_TRITON"] = False


#: Module -> what completes it.
COMPLETED: Mapping[str, Callable[[ModuleType], None]] = {
    "triton.backends": _add_backend,
    "vllm.v1.sample.ops.topk_topp_sampler": _sample_in_torch,
}


class _Completing(SourceFileLoader):
    """Loads one of COMPLETED."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then complete it."""
        super().exec_module(module)
        COMPLETED[self.name](module)


class _Finder(MetaPathFinder):
    """Finds those of COMPLETED; everything else is left to the finders after this one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of them, or None."""
        if fullname not in COMPLETED:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Completing(fullname, spec.origin)
        return spec


def install() -> None:
    """Prepare this interpreter and those that it starts."""
    # Without it 0.33 looks for a NUMA node for each data-parallel rank of a host, and with "1" it
    # wants to bind threads. The second rank of a host with one node does not start.
    os.environ.setdefault("VLLM_CPU_SIM_MULTI_NUMA", "0")
    if os.environ.get("TRITON_INTERPRET") == "1":
        # What torch compiles is for the CPU; it would ask this back end for its compiler.
        os.environ.setdefault("TORCHINDUCTOR_TRITON_DISABLE_DEVICE_DETECTION", "1")
        sys.meta_path.insert(0, _Finder())
