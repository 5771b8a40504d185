"""Reads kernels/include/moe_nvlink/{config,args}.h: constants, and ctypes mirrors of the structs.

The headers are the only place where a field or a limit is written; this module keeps Python from
having its own copy. It understands what those two files contain and refuses anything else. A struct
or a constant may also stand in another file below kernels/, such as the file of its kernel.
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

from . import source

_CONSTANT = re.compile(r"^(?:constexpr int |  )(k\w+) =\s*(-?\d+)[;,]", re.MULTILINE)
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
def constants(path: str = source.CONFIG_HEADER) -> dict[str, int]:
    """Each `constexpr int` and each enumerator of a file below kernels/, by name."""
    text = source.read_kernel_file(path)
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
    for name, body in _STRUCT.findall(source.read_kernel_file(source.ARGS_HEADER)):
        found[name] = _mirror(name, body, found)
    return found


@functools.cache
def struct(name: str, path: str = source.ARGS_HEADER) -> type[ctypes.Structure]:
    """One struct of a file below kernels/; its fields may be structs of args.h.

    Raises:
        ValueError: the file has no such struct, or a line of the struct is not one field.
    """
    if path == source.ARGS_HEADER and name in structs():
        return structs()[name]
    bodies = dict(_STRUCT.findall(source.read_kernel_file(path)))
    if name not in bodies:
        raise ValueError(f"{path}: no struct {name}; a Kernel names the file of its struct")
    return _mirror(name, bodies[name], structs())


def _mirror(
    name: str, body: str, known: dict[str, type[ctypes.Structure]]
) -> type[ctypes.Structure]:
    fields = [_field(line, known) for line in body.splitlines() if line.strip()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _field(line: str, known: dict[str, type[ctypes.Structure]]) -> tuple[str, Any]:
    match = _FIELD.match(line)
    if match is None:
        raise ValueError(f"args.h: not one field: {line!r}")
    type_name, name, count = match.groups()
    kind = _SCALARS.get(type_name) or known[type_name]
    return name, kind * constants()[count] if count else kind
