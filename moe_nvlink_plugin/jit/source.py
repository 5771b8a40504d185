"""Amalgamates kernels/ into one translation unit without includes of ours."""

from __future__ import annotations

import functools
import importlib.resources
import posixpath
import re
from collections.abc import Sequence

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^#pragma once\n", re.MULTILINE)

#: Limits, codes, and RuntimeConfig, from which every Config is derived.
CONFIG_HEADER = "include/moe_nvlink/config.h"
#: The argument structs of the kernels.
ARGS_HEADER = "include/moe_nvlink/args.h"
#: What every host library has beside its kernels.
HOST_FILES = ("host/grid.h", "host/library.cpp")


@functools.cache
def read_kernel_file(path: str) -> str:
    """Text of a file below kernels/, by its path there."""
    root = importlib.resources.files("moe_nvlink_plugin.kernels")
    return root.joinpath(*path.split("/")).read_text(encoding="utf-8")


def amalgamate(paths: Sequence[str]) -> str:
    """The files' text with every `#include "..."` replaced, once each, by what it names."""
    seen: set[str] = set()

    def inline(path: str) -> str:
        if path in seen:
            return ""
        seen.add(path)

        def replace(match: re.Match[str]) -> str:
            return inline(posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1])))

        text = _PRAGMA_ONCE.sub("", read_kernel_file(path))
        return f"// ---- kernels/{path}\n" + _INCLUDE.sub(replace, text)

    return "".join(inline(path) for path in paths)


def translation_unit(
    config: str, kernel_files: Sequence[str], host_files: Sequence[str] = ()
) -> str:
    """The kernels of these files, compiled for one Config.

    Args:
        config: C++ that declares `Config`, for which the entry points of the kernels are compiled.
        kernel_files: below kernels/.
        host_files: what stands before them.
    """
    text = amalgamate((CONFIG_HEADER, *host_files, *kernel_files))
    # `config` names RuntimeConfig and constants of config.h, so it follows config.h; the entry
    # points name Config, so it precedes the first of them.
    marker = f"// ---- kernels/{kernel_files[0]}\n"
    return text.replace(marker, f"{config}\n{marker}")


def config_text(constants: dict[str, str]) -> str:
    """C++ that declares a `Config` whose constants (`int kTopK` -> `8`) have these values.

    Every other constant comes from RuntimeConfig: the kernel then reads its arguments.
    """
    lines = (f"  static constexpr {name} = {value};\n" for name, value in constants.items())
    return f"struct Config : moe_nvlink::RuntimeConfig {{\n{''.join(lines)}}};\n"


def sizes_text(structs: dict[str, str]) -> str:
    """C++ with one exported function a kernel: the bytes of the kernel's argument struct.

    Args:
        structs: kernel -> struct.
    """
    return "".join(
        f'extern "C" int moe_nvlink_sizeof_{kernel}_args() {{\n'
        f"  return sizeof(moe_nvlink::{struct});\n}}\n"
        for kernel, struct in structs.items()
    )
