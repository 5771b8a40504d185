"""The machine code of a build for a GPU, from the cache or compiled into it."""

from __future__ import annotations

from moe_nvlink_plugin.errors import MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.jit import cache, nvrtc

from .kernel import PDL, Build, Variant


def cubin_for(build: Build, architecture: str, wanted: Variant) -> bytes:
    """Return the cubin that a GPU of `architecture` gets; it holds one kernel. Local.

    Args:
        build: the kernel with its values.
        architecture: as in nvrtc.ARCHITECTURES.
        wanted: what the caller loads the build for. Errors name all of it.

    Raises:
        UnsupportedError: the cubin is not in the cache and cannot be compiled here. The message has
            the command that fills a cache elsewhere.
        CompileError: NVRTC refused the text, or the cache directory cannot be used.
    """
    try:
        return nvrtc.load_or_compile(build.text(), architecture)
    except UnsupportedError as error:
        raise UnsupportedError(missing(build, architecture, wanted, error)) from error


def missing(build: Build, architecture: str, wanted: Variant, error: UnsupportedError) -> str:
    """Return what cubin_for says if the cache lacks the build and NVRTC raised `error`. Local."""
    pdl = PDL not in build.kernel.axes or bool(build.values[build.kernel.axes.index(PDL)])
    return (
        f"no compiled kernels for {', '.join(wanted.words())} on {architecture} in "
        f"{_searched()}: {error}; or run, where NVRTC is,\n"
        f"  {precompile_line(wanted, architecture, pdl=pdl)} --cache-dir DIR\n"
        "and set MOE_NVLINK_CACHE_DIR=DIR here"
    )


def precompile_line(wanted: Variant, architecture: str, *, pdl: bool) -> str:
    """Return the command that puts every build of a variant into a cache."""
    line = f"moe-nvlink precompile --arch {architecture} --geometry {wanted}"
    return line if pdl else f"{line} --no-pdl"


def _searched() -> str:
    try:
        found = {cache.shipped_directory(), cache.directory()} - {None}
    except MoeNvlinkError as error:
        return f"the cache ({error})"
    return " or ".join(sorted(map(str, found)))
