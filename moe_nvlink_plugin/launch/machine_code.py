"""Machine code of a build for a GPU, through the cache."""

from __future__ import annotations

from moe_nvlink_plugin.errors import MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.jit import cache, nvrtc

from .kernel import PDL, Build, Variant


def cubin_for(build: Build, architecture: str, wanted: Variant) -> bytes:
    """The cubin with the one kernel that a GPU of `architecture` gets. Local.

    Args:
        wanted: what the caller loads the build for; errors name it whole.

    Raises:
        UnsupportedError: it is not in the cache and cannot be compiled here; the message has the
            line that fills a cache elsewhere.
        CompileError: NVRTC refused it, or the cache directory cannot be used.
    """
    try:
        return nvrtc.load_or_compile(build.text(), architecture)
    except UnsupportedError as error:
        pdl = PDL not in build.kernel.axes or bool(build.values[build.kernel.axes.index(PDL)])
        raise UnsupportedError(
            f"no compiled kernels for {', '.join(wanted.words())} on {architecture} in "
            f"{_searched()}: {error}; or run, where NVRTC is,\n"
            f"  {precompile_line(wanted, architecture, pdl=pdl)} --cache-dir DIR\n"
            "and set MOE_NVLINK_CACHE_DIR=DIR here"
        ) from error


def is_cached(build: Build, architecture: str) -> bool:
    """Whether cubin_for would find it compiled. Local; compiles nothing.

    Raises:
        CompileError: the cache directory cannot be used.
    """
    return nvrtc.is_cached(build.text(), architecture)


def precompile_line(wanted: Variant, architecture: str, *, pdl: bool) -> str:
    """The command that puts every build of a variant into a cache."""
    line = f"moe-nvlink precompile --arch {architecture} --geometry {wanted}"
    return line if pdl else f"{line} --no-pdl"


def _searched() -> str:
    try:
        found = {cache.shipped_directory(), cache.directory()} - {None}
    except MoeNvlinkError as error:
        return f"the cache ({error})"
    return " or ".join(sorted(map(str, found)))
