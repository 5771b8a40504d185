"""Reads kernels/include/moe_nvlink/{config,args}.h: constants, and ctypes mirrors of the structs.

The headers are the only place where a field or a limit is written; this module keeps Python from
having its own copy. It understands what those two files contain and refuses anything else.
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

from .source import read_kernel_file

#: `constexpr int kName = 1;`, and `kName = 1,` in an enumeration.
_CONSTANT = re.compile(r"^(?:constexpr int|[ ]) (k\w+) =\s*(-?\d+)[;,]", re.MULTILINE)
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^\s*(\w+) (\w+)(?:\[(\w+)\])?;")

_SCALARS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}


@functools.cache
def constants() -> dict[str, int]:
    """Each `constexpr int` and each code of config.h, by name."""
    text = read_kernel_file("include/moe_nvlink/config.h")
    return {name: int(value) for name, value in _CONSTANT.findall(text)}


def elements() -> dict[str, int]:
    """Activation types by the name a user writes: bf16, fp16, fp32."""
    return _named("kElement")


def quantisers() -> dict[str, int]:
    """What dispatch can be made for, by the recipe's name: fp8_block, ...; none for as it comes."""
    return _named("kQuantiser")


def combine_formats() -> dict[str, int]:
    """What combine can be made for, by the name a user writes: fp8_block, nvfp4; bf16 for none."""
    formats = _named("kCombine")
    return {"bf16": formats.pop("unquantised"), **formats}


def _named(prefix: str) -> dict[str, int]:
    """The constants of config.h with that prefix: kQuantiserFp8Block as fp8_block."""
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix(prefix)).lower(): value
        for name, value in constants().items()
        if name.startswith(prefix)
    }


@functools.cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """Structs of args.h as ctypes.Structure classes, by name."""
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(read_kernel_file("include/moe_nvlink/args.h")):
        fields = [_field(line, found) for line in body.splitlines() if line.strip()]
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def _field(line: str, known: dict[str, type[ctypes.Structure]]) -> tuple[str, Any]:
    match = _FIELD.match(line)
    if match is None:
        raise ValueError(f"args.h: not one field: {line!r}")
    type_name, name, count = match.groups()
    kind = _SCALARS.get(type_name) or known[type_name]
    return name, kind * constants()[count] if count else kind
