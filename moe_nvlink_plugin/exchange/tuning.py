"""Files of `moe-nvlink tune`: which choices were faster, on which machine, for which layers.

A file holds for one machine (`Machine`) and the layers that are named in it (`Layer`). Another
machine's file, or one without the layer, is refused, because a rank cannot know what its values
would do here. Ranks compare what they have read when they create an exchange.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.choices import Choices, table
from moe_nvlink_plugin.config import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.launch.executors import with_index
from moe_nvlink_plugin.version import own_version

_FORMAT = "moe-nvlink tuning 1"
#: No file is larger: a layer takes some hundred bytes.
_MOST_BYTES = 2**20
_CPU_INFO, _KERNEL_MODULE = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")
_UNKNOWN = "unknown"
_MOST_LINKS = 36


class Machine(NamedTuple):
    """Where a file holds.

    Attributes:
        device: name of the GPU; or model of the CPU, and cores.
        driver: release of the GPU's driver; "none" for CPU ranks.
        ranks: of the group.
        nvlink: active links of the GPU and their version, as NVML numbers it; "unknown" fits all.
        package: version of this package.
    """

    device: str
    driver: str
    ranks: int
    nvlink: str
    package: str

    @classmethod
    def here(cls, device: torch.device, ranks: int) -> Machine:
        """Return the machine of this rank. Local.

        Raises:
            UnsupportedError, DriverError: the driver does not tell its facts.
        """
        if device.type != "cuda":
            return cls(_cpu(), "none", ranks, "none", own_version())
        gpu = driver.device(device.index or 0)
        return cls(gpu.name, _driver(), ranks, _nvlink(gpu.uuid), own_version())


class Layer(NamedTuple):
    """What a file's values were measured for, beside the machine."""

    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: str
    recipe: str
    combine: str

    @classmethod
    def of(cls, config: AllToAllConfig, recipe: str) -> Layer:
        """Return the layer of a configuration whose recipe has this name. Local."""
        dtype = str(config.dtype).removeprefix("torch.")
        sizes = (config.num_experts, config.top_k, config.hidden_size, config.max_tokens_per_rank)
        return cls(*sizes, dtype, recipe, config.combine or "bf16")


class Tuning(NamedTuple):
    """The content of a file."""

    machine: Machine
    layers: dict[Layer, Choices]


def load(path: str) -> Tuning:
    """Return what a file says. Local.

    Raises:
        ConfigError: it cannot be read, is torn, or has fields or values that it may not have.
    """
    told = _named(path)
    try:
        with Path(path).open("rb") as reader:
            text = reader.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{told} cannot be read: {reason}; {_WRITE}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{told} has more than {_MOST_BYTES} bytes, so it is no such file")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{told} is torn, or no file of moe-nvlink tune: {str(error)[:100]}; {_WRITE}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{told} has format {found!r}, and this package reads {_FORMAT!r}")
    try:
        machine = _record(Machine, content.get("machine"), "machine")
        layers = {}
        for place, entry in enumerate(_list(content.get("layers"))):
            name = f"layers[{place}]"
            layer = _record(Layer, entry.get("layer"), f"{name}.layer")
            layers[layer] = _choices(entry.get("choices"), f"{name}.choices")
    except _WrongError as error:
        raise ConfigError(f"{told}: {error}; {_WRITE}") from None
    return Tuning(machine, layers)


def resolved(config: AllToAllConfig, recipe: str, device: torch.device | None) -> AllToAllConfig:
    """Return the configuration with the choices of its file, if it names one. Local.

    Args and errors are those of `choices_for`.
    """
    if not (isinstance(config.tuning, str) and config.tuning):
        return config
    where = None if device is None else with_index(device)
    return dataclasses.replace(config, tuning=choices_for(config.tuning, config, recipe, where))


def choices_for(
    path: str, config: AllToAllConfig, recipe: str, device: torch.device | None
) -> Choices:
    """Return what a file says about a layer on this machine. Local.

    Args:
        path: the file.
        config: the layer's configuration.
        recipe: name of what travels.
        device: of the tensors; None: of whatever machine.

    Raises:
        ConfigError: as `load`; or the file belongs to another machine, or lacks the layer.
    """
    found = load(path)
    if device is not None:
        check_machine(path, found.machine, Machine.here(device, config.ep_size))
    layer = Layer.of(config, recipe)
    if layer in found.layers:
        return found.layers[layer]
    if not found.layers:
        raise ConfigError(f"{_named(path)} has no layer; {_WRITE}")
    nearest = min(found.layers, key=lambda other: len(_differences(other, layer)))
    raise ConfigError(
        f"{_named(path)} lacks this layer; the nearest of its {len(found.layers)} has "
        f"{'; '.join(_differences(nearest, layer))}; add it with `moe-nvlink tune "
        f"{arguments(layer)} --output {path}`, or leave the file out"
    )


def check_machine(path: str, theirs: Machine, here: Machine) -> None:
    """Check that a file's machine is this one. Local.

    Raises:
        ConfigError: it is another; names each field that differs, and both values.
    """
    if _UNKNOWN in (theirs.nvlink, here.nvlink):
        theirs = theirs._replace(nvlink=here.nvlink)
    if theirs != here:
        raise ConfigError(
            f"{_named(path)} was written elsewhere: it has {'; '.join(_differences(theirs, here))};"
            f" {_WRITE}"
        )


def add(path: str, tuning: Tuning) -> None:
    """Add layers to a file of this machine, or begin one. Local; other processes may do the same.

    Raises:
        ConfigError: the file is there and cannot be read, or is another machine's.
        OSError: it cannot be written.
    """
    target = Path(path).resolve()  # of a link, not the link
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if target.exists():
            before = load(str(target))
            check_machine(path, before.machine, tuning.machine)
            tuning = tuning._replace(layers=before.layers | tuning.layers)
        save(str(target), tuning)
    finally:
        os.close(folder)


def save(path: str, tuning: Tuning) -> None:
    """Write a file, whole or not at all. Local.

    Raises:
        OSError: it cannot be written.
    """
    layers = [
        {"layer": layer._asdict(), "choices": choices.changed()}
        for layer, choices in tuning.layers.items()
    ]
    content = {"format": _FORMAT, "machine": tuning.machine._asdict(), "layers": layers}
    target = Path(path)
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as writer:
            writer.write(json.dumps(content, indent=1) + "\n")
            writer.flush()
            os.fsync(writer.fileno())
        Path(beside).chmod(0o644)  # a server may run as another user
        Path(beside).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(beside).unlink()
        raise


def arguments(layer: Layer) -> str:
    """Return how a user asks `moe-nvlink tune` for a layer."""
    sizes = (
        f"--num-experts {layer.num_experts} --top-k {layer.top_k} --hidden-size "
        f"{layer.hidden_size} --max-tokens {layer.max_tokens_per_rank}"
    )
    return f"{sizes} --dtype {layer.dtype} --recipe {layer.recipe} --combine {layer.combine}"


_WRITE = (
    "write it anew with `moe-nvlink tune --output FILE`, or leave the file out (AllToAllConfig."
    "tuning, MOE_NVLINK_TUNING)"
)


def _named(path: str) -> str:
    return f"tuning={path!r} (MOE_NVLINK_TUNING)"


def _differences(theirs: Any, here: Any) -> list[str]:
    return [
        f"{name} {getattr(theirs, name)!r}, and here it is {getattr(here, name)!r}"
        for name in here._fields
        if getattr(theirs, name) != getattr(here, name)
    ]


class _WrongError(Exception):
    """A part of a file is not what it should be."""


def _list(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _WrongError("layers is no list of objects")
    return value


def _record(kind: Any, value: Any, name: str) -> Any:
    """Return a NamedTuple of an object that has its fields, each of its type."""
    if not isinstance(value, dict) or set(value) != set(kind._fields):
        found = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise _WrongError(f"{name} has the fields {found}, not {', '.join(kind._fields)}")
    for field, wanted in get_type_hints(kind).items():
        if type(value[field]) is not wanted:
            raise _WrongError(f"{name}.{field}={value[field]!r} is no {wanted.__name__}")
    return kind(**value)


def _choices(value: Any, name: str) -> Choices:
    if not isinstance(value, dict):
        raise _WrongError(f"{name} is no object but {type(value).__name__}")
    known = {one.name: one for one in table() if one.is_tuned}
    for field in value:
        if field not in known:
            raise _WrongError(f"{name} has {field!r}, which is none of {', '.join(known)}")
    try:
        return Choices(**value)
    except ConfigError as error:
        raise _WrongError(f"{name}.{error}") from None


def _cpu() -> str:
    try:
        text = _CPU_INFO.read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    name = match[1].strip() if match else platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _driver() -> str:
    """Return the driver's release, or the CUDA version that it supports."""
    try:
        match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", _KERNEL_MODULE.read_text())
    except OSError:
        match = None
    return match[0] if match else "CUDA {}.{}".format(*driver.driver_version())


def _nvlink(uuid: str) -> str:
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        handle = nvml.device_get_handle_by_uuid(driver.nvml_uuid(uuid))
        active = []
        for link in range(_MOST_LINKS):
            with contextlib.suppress(nvml.NvmlError):  # it has no such link
                if nvml.device_get_nvlink_state(handle, link):
                    active.append(int(nvml.device_get_nvlink_version(handle, link)))
    except Exception:  # whatever NVML cannot say is unknown
        return _UNKNOWN
    return f"{len(active)} links, version {max(active)}" if active else "none"
