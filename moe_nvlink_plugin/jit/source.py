"""Makes one translation unit of files below kernels/; their includes of each other are resolved."""

from __future__ import annotations

import functools
import importlib.resources
import posixpath
import re
from collections.abc import Sequence

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^#pragma once\n", re.MULTILINE)

#: Limits, codes, and the struct RuntimeConfig, from which every Config derives.
CONFIG_HEADER = "include/moe_nvlink/config.h"
#: Argument structs of the kernels.
ARGS_HEADER = "include/moe_nvlink/args.h"
#: Files that every host library has beside its kernels.
HOST_FILES = ("host/grid.h", "host/library.cpp")


@functools.cache
def read_kernel_file(path: str) -> str:
    """Return the text of a file; `path` is relative to kernels/."""
    root = importlib.resources.files("moe_nvlink_plugin.kernels")
    return root.joinpath(*path.split("/")).read_text(encoding="utf-8")


def amalgamate(paths: Sequence[str]) -> str:
    """Return the files' text, in which each file of ours stands where it is first included."""
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
    """Return one translation unit: the kernels of these files for one Config.

    Args:
        config: C++ that declares `Config`, which the entry points of the kernels use.
        kernel_files: paths below kernels/.
        host_files: paths of files that precede the kernels.
    """
    text = amalgamate((CONFIG_HEADER, *host_files, *kernel_files))
    # `config` uses RuntimeConfig and constants of config.h, so it follows config.h. The entry
    # points use Config, so `config` precedes the first kernel file.
    marker = f"// ---- kernels/{kernel_files[0]}\n"
    return text.replace(marker, f"{config}\n{marker}")


def config_text(constants: dict[str, str]) -> str:
    """Return C++ that declares a `Config` with these constants (`int kTopK` -> `8`).

    Every other constant comes from RuntimeConfig; then the kernel reads the value from its
    arguments.
    """
    lines = (f"  static constexpr {name} = {value};\n" for name, value in constants.items())
    return f"struct Config : moe_nvlink::RuntimeConfig {{\n{''.join(lines)}}};\n"


def sizes_text(structs: dict[str, str]) -> str:
    """Return C++ that exports, for each kernel, a function that returns its struct's bytes.

    Args:
        structs: name of the kernel -> name of its struct.
    """
    return "".join(
        f'extern "C" int moe_nvlink_sizeof_{kernel}_args() {{\n'
        f"  return sizeof(moe_nvlink::{struct});\n}}\n"
        for kernel, struct in structs.items()
    )
