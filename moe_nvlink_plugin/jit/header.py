"""Reads kernels/include/moe_nvlink/{config,args}.h: constants, and ctypes mirrors of the structs.

Fields and limits stand in the headers only; Python has no copy of them. This module understands
what those two files contain, and raises ValueError for anything else. A struct or a constant may
also stand in another file below kernels/, such as the file of its kernel.
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
    """Return name -> value of each `constexpr int` and each enumerator of a file below kernels/."""
    text = source.read_kernel_file(path)
    return {name: int(value) for name, value in _CONSTANT.findall(text)}


def elements() -> dict[str, int]:
    """Return the codes of the activation types: bf16, fp16, fp32 -> kElement*."""
    return _named("kElement")


def quantisers() -> dict[str, int]:
    """Return the codes of what dispatch does with activations: none, fp8_block, ... -> kQuantiser*.

    The names are those of recipes; none sends rows as they are.
    """
    return _named("kQuantiser")


def combine_formats() -> dict[str, int]:
    """Return the codes of combine's formats: bf16, fp8_block, ... -> kCombine*.

    bf16 sends rows in the layer's own type.
    """
    formats = _named("kCombine")
    return {"bf16": formats.pop("unquantised"), **formats}


def received_ids() -> dict[str, int]:
    """Return the codes of what received rows have as ids: global, given, ... -> kReceivedIds*."""
    return _named("kReceivedIds")


def scales_layouts() -> dict[str, int]:
    """Return the codes of the layouts of received scales: linear, ... -> kScalesLayout*."""
    return _named("kScalesLayout")


def _named(prefix: str) -> dict[str, int]:
    """Return the constants of config.h with a prefix; kQuantiserFp8Block is fp8_block."""
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix(prefix)).lower(): value
        for name, value in constants().items()
        if name.startswith(prefix)
    }


@functools.cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """Return the structs of args.h as ctypes.Structure classes, by name.

    Raises:
        ValueError: args.h has a field that this module does not understand.
    """
    path = source.ARGS_HEADER
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(source.read_kernel_file(path)):
        found[name] = _mirror(name, body, path, found)
    return found


@functools.cache
def struct(name: str, path: str = source.ARGS_HEADER) -> type[ctypes.Structure]:
    """Return one struct of a file below kernels/ as a ctypes.Structure class.

    Its fields may be scalars, structs of args.h and structs of the same file. The length of an
    array is a constant of config.h or of the same file.

    Raises:
        ValueError: the file has no such struct, or the struct has a field that this module does not
            understand. The message names struct, field and file.
    """
    if path == source.ARGS_HEADER and name in structs():
        return structs()[name]
    bodies = dict(_STRUCT.findall(source.read_kernel_file(path)))
    if name not in bodies:
        raise ValueError(f"{path}: no struct {name}; a Kernel names the file of its struct")
    fields = (_FIELD.match(line) for line in bodies[name].splitlines())
    mine = {field[1] for field in fields if field and field[1] in bodies}
    known = structs() | {each: struct(each, path) for each in mine}
    return _mirror(name, bodies[name], path, known)


def _mirror(
    name: str, body: str, path: str, known: dict[str, type[ctypes.Structure]]
) -> type[ctypes.Structure]:
    kinds = _SCALARS | known
    lengths = constants() | constants(path)
    try:
        fields = [_field(line, kinds, lengths) for line in body.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path}, struct {name}: {error}") from error
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _field(line: str, kinds: dict[str, Any], lengths: dict[str, int]) -> tuple[str, Any]:
    match = _FIELD.match(line)
    if match is None:
        raise ValueError(f"{line.strip()!r} is not one field; write one field per line")
    type_name, name, length = match.groups()
    if type_name not in kinds:
        raise ValueError(
            f"field {name} has type {type_name}; use one of {', '.join(_SCALARS)}, a struct of "
            "args.h, or a struct of the same file"
        )
    if length is not None and length not in lengths:
        raise ValueError(
            f"field {name} has length {length}; use a constant of config.h or of the same file"
        )
    return name, kinds[type_name] * lengths[length] if length else kinds[type_name]
