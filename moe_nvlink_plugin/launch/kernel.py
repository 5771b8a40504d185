"""Kernel: everything that the launch machinery knows of one kernel. Imports no torch.

A new kernel is one `.cu` file, one argument struct, one `Kernel` in a `Family`, and its caller:

    executor.launcher(FAMILY.variant(dtype="bf16"), Budget(...)).load(KERNEL, sizes)(args)
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.jit import header, source
from moe_nvlink_plugin.jit.source import ARGS_HEADER
from moe_nvlink_plugin.memory.phases import Phase

from .shape import Limits, Shape

#: What a kernel's launch shape depends on beside the GPU and the call; the kernel's own type.
S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Axis:
    """A value that the code of a kernel depends on, so that a GPU gets a build for each value.

    Attributes:
        name: as a user writes it: `name=value`.
        constants: the declarations in Config that get the value.
        choices: the values by the name that a user writes.
        default: the choice where a user makes none; None: a user must make one.
        is_silent: the default is not written out.
        always: values that a caller loads beside the one it asks for.
        placeholder: what help and errors write for a value.
    """

    name: str
    constants: tuple[str, ...]
    choices: Callable[[], Mapping[str, int]]
    default: str | None = None
    is_silent: bool = False
    always: tuple[int, ...] = ()
    placeholder: str = "N"

    def code(self, value: int | str) -> int:
        """The value, given as a code or as the name that a user writes.

        Raises:
            ConfigError: the axis has no such value; the message lists those it has.
        """
        choices = self.choices()
        code = choices.get(value) if isinstance(value, str) else value
        if code is None or code not in choices.values():
            raise ConfigError(
                f"{self.name}={value} is none of the values that kernels are built for; use one "
                f"of {', '.join(choices)}"
            )
        return code

    def word(self, code: int) -> str:
        """The name that a user writes for a code."""
        return next(name for name, value in self.choices().items() if value == code)

    @property
    def usage(self) -> str:
        """`name=PLACEHOLDER`."""
        return f"{self.name}={self.placeholder}"


def _no_yes() -> dict[str, int]:
    return {"no": 0, "yes": 1}


#: Activation type: kElement* of config.h.
ELEMENT = Axis("dtype", ("int kElement",), header.elements, default="bf16", placeholder="TYPE")
#: Whether a build has the instructions of programmatic dependent launch: the executor chooses. A
#: launch with the attribute needs them; without the attribute they do nothing.
PDL = Axis("pdl", ("bool kPdl",), _no_yes, default="yes")


@dataclasses.dataclass(frozen=True)
class Kernel(Generic[S]):
    """One `__global__` function.

    Attributes:
        name: the entry point is `moe_nvlink_<name>`.
        source: its file below kernels/.
        struct: its arguments, one packed struct.
        axes: what its builds for a GPU differ in, the architecture apart. The host has one build,
            which reads every value from the arguments.
        count: how many items a call has, read from the arguments: the launch shape depends on it.
        shape: the launch shape for so many items.
        splits: the field of the arguments that gets the CTAs which share an item; "" for none.
        phase: what the kernel waits for; None: for nothing that a fault word names.
        header: the file below kernels/ that declares the struct.
    """

    name: str
    source: str
    struct: str
    axes: tuple[Axis, ...]
    count: Callable[[Any], int]
    shape: Callable[[int, S, Limits], Shape]
    splits: str = ""
    phase: Phase | None = None
    header: str = ARGS_HEADER

    @property
    def entry(self) -> str:
        """Its symbol in a cubin or a host library."""
        return f"moe_nvlink_{self.name}"

    def args_type(self) -> type[ctypes.Structure]:
        """The mirror of its argument struct."""
        return header.struct(self.struct, self.header)


class Build(NamedTuple):
    """One kernel as a GPU gets it, for any architecture.

    Attributes:
        values: a code for every axis of the kernel, in their order.
    """

    kernel: Kernel[Any]
    values: tuple[int, ...]

    def text(self) -> str:
        """Its translation unit."""
        values = dict(zip(self.kernel.axes, self.values, strict=True))
        return gpu_source((self.kernel,), values)


@dataclasses.dataclass(frozen=True)
class Family:
    """Kernels that a caller loads together: one host library, one choice on the command line.

    Attributes:
        word: what a choice begins with on the command line; "" for the one family without.
        kernels: in the order of a round.
    """

    word: str
    kernels: tuple[Kernel[Any], ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """What a caller chooses: every axis of a kernel, PDL apart."""
        every = (axis for kernel in self.kernels for axis in kernel.axes)
        return tuple(axis for axis in dict.fromkeys(every) if axis != PDL)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What its kernels wait for."""
        return tuple(kernel.phase for kernel in self.kernels if kernel.phase is not None)

    @property
    def usage(self) -> str:
        """How a choice is written, with every part that may be left out in brackets."""
        parts = [self.word] if self.word else []
        for axis in self.axes:
            text = axis.usage if not parts else f",{axis.usage}"
            parts.append(text if axis.default is None else f"[{text}]")
        return "".join(parts)

    def variant(self, **values: int | str) -> Variant:
        """The family for these values, by the names of its axes; defaults for the others.

        Raises:
            ConfigError: an axis is missing or unknown, or has no such value.
        """
        codes = []
        for axis in self.axes:
            value = values.pop(axis.name, axis.default)
            if value is None:
                raise ConfigError(f"{axis.usage} is missing; {self.usage} is what is needed")
            codes.append(axis.code(value))
        if values:
            raise ConfigError(f"unknown: {', '.join(values)}; {self.usage} is what is known")
        return Variant(self, tuple(codes))

    @functools.cache  # noqa: B019 - families live as long as the process
    def host_source(self) -> str:
        """Its host library: every build in one, chosen by the arguments."""
        return host_source((self,))


class Variant(NamedTuple):
    """A family with a value for each of its axes: what a caller needs compiled.

    Attributes:
        values: codes in the order of the axes.
    """

    family: Family
    values: tuple[int, ...]

    def __str__(self) -> str:
        """As the command line takes it."""
        return ",".join(self.words())

    def words(self) -> list[str]:
        """The family's word, and the values that are written out."""
        found = [self.family.word] if self.family.word else []
        for axis, code in zip(self.family.axes, self.values, strict=True):
            word = axis.word(code)
            if not axis.is_silent or word != axis.default:
                found.append(f"{axis.name}={word}")
        return found

    def codes(self) -> dict[str, int]:
        """The values by the names of their axes."""
        return {axis.name: code for axis, code in zip(self.family.axes, self.values, strict=True)}

    def instead(self, **values: int | str) -> Variant:
        """The same with other values for some axes; raises as Family.variant."""
        return self.family.variant(**(self.codes() | values))

    def build(self, kernel: Kernel[Any], *, pdl: bool, **instead: int) -> Build:
        """One kernel of the family; `instead` of some values, by the names of their axes.

        Raises:
            ConfigError: no axis has that name, or it has no such code.
        """
        codes = self.instead(**instead).codes() | {PDL.name: int(pdl)}
        return Build(kernel, tuple(codes[axis.name] for axis in kernel.axes))

    def builds(self, *, pdl: bool) -> list[Build]:
        """Every build that a caller with these values loads, each once."""
        found: dict[Build, None] = {}
        for kernel in self.family.kernels:
            always = [(axis.name, value) for axis in kernel.axes for value in axis.always]
            for name, value in always:
                found[self.build(kernel, pdl=pdl, **{name: value})] = None
            found[self.build(kernel, pdl=pdl)] = None
        return list(found)


def gpu_source(kernels: tuple[Kernel[Any], ...], values: Mapping[Axis, int]) -> str:
    """A translation unit of these kernels for these values, without anything of the host's."""
    config = source.config_text(dict(_constants(values)))
    return source.translation_unit(config, _files(kernels))


def host_source(families: tuple[Family, ...], values: Mapping[Axis, int] | None = None) -> str:
    """A host library of these families; every value that `values` lacks is read from arguments."""
    kernels = tuple(itertools.chain.from_iterable(family.kernels for family in families))
    config = source.config_text(dict(_constants(values or {})))
    text = source.translation_unit(config, _files(kernels), source.HOST_FILES)
    return text + source.sizes_text({kernel.name: kernel.struct for kernel in kernels})


def _files(kernels: tuple[Kernel[Any], ...]) -> list[str]:
    return list(dict.fromkeys(kernel.source for kernel in kernels))


def _constants(values: Mapping[Axis, int]) -> Iterator[tuple[str, str]]:
    for axis, code in values.items():
        for constant in axis.constants:
            is_bool = constant.startswith("bool ")
            yield constant, str(bool(code)).lower() if is_bool else str(code)
