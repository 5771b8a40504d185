"""The host library as g++ makes it for other x86-64 processors than this one.

The product compiles for the processor it runs on (`-march=native`), so that one machine shows one
of these builds. Any machine compiles them all; `needs` says which of them it can execute.
"""

from __future__ import annotations

import functools
import platform
import shutil
from pathlib import Path

import pytest

from moe_nvlink_plugin.jit import host
from tests.support import kernel_texts

#: -march -> what /proc/cpuinfo lists of a processor that executes it, beyond the one before.
LEVELS = {
    "x86-64": (),
    "x86-64-v3": ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}

#: The oldest host compiler that README.md names.
OLDEST = "g++-11"
HAS_OLDEST = pytest.mark.skipif(
    shutil.which(OLDEST) is None, reason=f"not installed: {OLDEST} (Debian's package)"
)

ON_X86 = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "AMD64"},
    reason=f"builds for x86-64, this is {platform.machine()}",
)


def flags(level: str, of: tuple[str, ...] = host.FLAGS) -> tuple[str, ...]:
    """The product's, for another processor; "native" leaves them."""
    assert "-march=native" in of
    return tuple(f"-march={level}" if flag == "-march=native" else flag for flag in of)


@functools.cache
def _has() -> frozenset[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next(line for line in lines if line.startswith("flags")).split())


def missing(level: str) -> list[str]:
    """What this processor lacks to execute a level. Local."""
    names = list(LEVELS)
    wanted = [flag for name in names[: names.index(level) + 1] for flag in LEVELS[name]]
    return [flag for flag in wanted if flag not in _has()]


def library(level: str, compiler: str | None = None) -> Path:
    """The whole library of a level, by a compiler that may be another than usually."""
    with pytest.MonkeyPatch.context() as patch:
        if compiler is not None:
            patch.setenv("MOE_NVLINK_CXX", compiler)
        return host.build(kernel_texts.host_source(), flags(level))
