"""Amalgamates kernels/ into one translation unit without includes of ours."""

from __future__ import annotations

import functools
import importlib.resources
import posixpath
import re

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^#pragma once\n", re.MULTILINE)

KERNEL_FILES = ("exchange/dispatch.cu", "exchange/combine.cu")
HEAD_FILES = ("lm_head/gather.cu", "lm_head/argmax.cu", "lm_head/collect.cu")
HEAD_KERNELS = ("head_gather", "head_argmax", "head_collect")
HOST_FILES = ("host/grid.h", "host/library.cpp")


@functools.cache
def read_kernel_file(path: str) -> str:
    """Text of a file below kernels/, by its path there."""
    root = importlib.resources.files("moe_nvlink_plugin.kernels")
    return root.joinpath(*path.split("/")).read_text(encoding="utf-8")


def amalgamate(paths: tuple[str, ...]) -> str:
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


def host_source() -> str:
    """The host library: every geometry, every element type, chosen by the arguments."""
    files = (*KERNEL_FILES, *HEAD_FILES)
    return _translation_unit("moe_nvlink::RuntimeConfig", files, HOST_FILES)


def specialised_source(
    top_k: int,
    element: int,
    *,
    pdl: bool = True,
    host: bool = False,
    quantiser: int = 0,
    combine: int = 0,
) -> str:
    """Both kernels for one top_k and element type: what a GPU gets, or the same on the host.

    `pdl`: with the instructions of programmatic dependent launch. A launch with its attribute needs
    them; without the attribute they do nothing. The host build has none either way.
    `quantiser`, `combine`: kQuantiser* of dispatch and kCombine* of combine.
    """
    values = f"{top_k}, {element}, {str(pdl).lower()}, {quantiser}, {combine}"
    config = f"moe_nvlink::StaticConfig<{values}>"
    if not host:
        return _translation_unit(config, KERNEL_FILES, ())
    # The host library has all kernels.
    return _translation_unit(config, (*KERNEL_FILES, *HEAD_FILES), HOST_FILES)


def head_source(element: int, *, pdl: bool = True) -> str:
    """The kernels of the shared LM head for one element type, as a GPU gets them."""
    # Nothing there is unrolled by top_k.
    config = f"moe_nvlink::StaticConfig<1, {element}, {str(pdl).lower()}>"
    return _translation_unit(config, HEAD_FILES, ())


def _translation_unit(config: str, files: tuple[str, ...], host_files: tuple[str, ...]) -> str:
    text = amalgamate(("include/moe_nvlink/config.h", *host_files, *files))
    # The kernels' entry points name Config: it stands behind config.h and before the first of them.
    marker = f"// ---- kernels/{files[0]}\n"
    return text.replace(marker, f"using Config = {config};\n{marker}")
