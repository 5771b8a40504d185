"""moe-nvlink dump-source: the text of one kernel as one GPU compiles it, for whoever debugs it."""

from __future__ import annotations

from collections.abc import Sequence

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.jit import folded, nvrtc
from moe_nvlink_plugin.launch.kernel import Axis, Build

from .precompile import choices_of, values_of
from .shipped import FAMILIES


def parse_build(name: str, values: Sequence[str]) -> Build:
    """Return the build that a user names. Local.

    Args:
        name: of a kernel, such as "small_dispatch".
        values: `name=value` of its axes; those that have a default may be left out.

    Raises:
        ConfigError: there is no such kernel, axis or value, or a value is missing. The message
            lists those that there are.
    """
    kernels = {kernel.name: kernel for family in FAMILIES for kernel in family.kernels}
    kernel = kernels.get(name)
    if kernel is None:
        raise ConfigError(f"kernel {name!r} is unknown; use one of {', '.join(kernels)}")
    usage = f"{name} takes {'; '.join(map(_usage, kernel.axes))}"
    given = values_of(values)
    codes = []
    for axis in kernel.axes:
        value = given.pop(axis.name, axis.default)
        if value is None:
            raise ConfigError(f"{axis.name} is missing; {usage}")
        codes.append(axis.code(value))
    if given:
        raise ConfigError(f"unknown: {', '.join(given)}; {usage}")
    return Build(kernel, tuple(codes))


def _usage(axis: Axis) -> str:
    otherwise = "" if axis.default is None else f" ({axis.default} if left out)"
    return f"{axis.name} {choices_of(axis)}{otherwise}"


def text(build: Build, architecture: str) -> str:
    """Return a build's text as this architecture compiles it. Local."""
    return _heading(build, architecture) + folded.as_compiled(build.text(), architecture)


def ptx(build: Build, architecture: str) -> str:
    """Return the PTX that NVRTC makes of a build; raises as nvrtc.compile_ptx. Local; seconds."""
    return _heading(build, architecture) + nvrtc.compile_ptx(build.text(), architecture)


def main(build: Build, architecture: str, *, as_ptx: bool) -> int:
    """Print a build's text, or its PTX; return 0."""
    print(ptx(build, architecture) if as_ptx else text(build, architecture), end="")
    return 0


def _heading(build: Build, architecture: str) -> str:
    axes = zip(build.kernel.axes, build.values, strict=True)
    values = " ".join(f"{axis.name}={axis.word(code)}" for axis, code in axes)
    return (
        f"// {build.kernel.name} {values} for {architecture}\n"
        f"// NVRTC's options: {' '.join(nvrtc.OPTIONS)}\n"
    )
