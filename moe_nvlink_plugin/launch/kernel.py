"""Kernel: everything that the launch machinery knows of one kernel. The module imports no torch.

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

#: What a kernel's launch shape depends on, beside the GPU and the call; each kernel has its type.
S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Axis:
    """A value that a kernel's code depends on. A GPU gets one build for each value.

    Attributes:
        name: name that a user writes: `name=value`.
        constants: declarations in the C++ struct Config that get the value.
        choices: returns name that a user writes -> value.
        default: name of the value if the user writes none; None: the user must write one.
        is_silent: whether a variant in words leaves out the default.
        always: values that every caller also loads, whatever value it asks for.
        placeholder: what help and errors write instead of a value.
        only_on: architectures on which the code depends on it; (): all.
    """

    name: str
    constants: tuple[str, ...]
    choices: Callable[[], Mapping[str, int]]
    default: str | None = None
    is_silent: bool = False
    always: tuple[int, ...] = ()
    placeholder: str = "N"
    only_on: tuple[str, ...] = ()

    def code(self, value: int | str) -> int:
        """Return the value for its code or for the name that a user writes; "08" is "8". Local.

        Raises:
            ConfigError: the axis has no such value; the message lists its values.
        """
        choices = self.choices()
        code = choices.get(_as_number(value)) if isinstance(value, str) else value
        if code is None or code not in choices.values():
            raise ConfigError(
                f"{self.name}={value} is none of the values that kernels are built for; use one "
                f"of {', '.join(choices)}"
            )
        return code

    def word(self, code: int) -> str:
        """Return the name that a user writes for a code."""
        return next(name for name, value in self.choices().items() if value == code)

    @property
    def usage(self) -> str:
        """`name=PLACEHOLDER`."""
        return f"{self.name}={self.placeholder}"


def _as_number(text: str) -> str:
    """Return a number as choices write it, "8" for "08"; any other text unchanged."""
    try:
        return str(int(text))
    except ValueError:
        return text


def no_yes() -> dict[str, int]:
    """Return the choices of an axis that is a question."""
    return {"no": 0, "yes": 1}


#: Activation type; its codes are kElement* of config.h.
ELEMENT = Axis("dtype", ("int kElement",), header.elements, default="bf16", placeholder="TYPE")
#: Whether a build has the instructions of programmatic dependent launch. The executor chooses. A
#: launch with the attribute needs the instructions; without the attribute they have no effect.
PDL = Axis("pdl", ("bool kPdl",), no_yes, default="yes")


@dataclasses.dataclass(frozen=True)
class Kernel(Generic[S]):
    """One `__global__` function.

    Attributes:
        name: the entry point is `moe_nvlink_<name>`.
        source: path of its file below kernels/.
        struct: name of its packed struct of arguments.
        axes: values in which its builds for one architecture differ. The host has one build, which
            reads every value from the arguments.
        count: reads from the arguments how many items a call has.
        shape: returns the launch shape for so many items.
        splits: field of the arguments that gets Shape.splits; "": none.
        phase: what the kernel waits for; None: nothing that a fault word names.
        header: path of the file below kernels/ that declares the struct.
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
        """The kernel's symbol in a cubin or a host library."""
        return f"moe_nvlink_{self.name}"

    def args_type(self) -> type[ctypes.Structure]:
        """Return the ctypes mirror of the kernel's argument struct."""
        return header.struct(self.struct, self.header)


class Build(NamedTuple):
    """One kernel as a GPU gets it, for any architecture.

    Attributes:
        values: one code for each axis of the kernel, in the order of the axes.
    """

    kernel: Kernel[Any]
    values: tuple[int, ...]

    def text(self) -> str:
        """Return the build's translation unit."""
        values = dict(zip(self.kernel.axes, self.values, strict=True))
        return gpu_source((self.kernel,), values)


@dataclasses.dataclass(frozen=True)
class Family:
    """Kernels that a caller loads together: one host library, one choice on the command line.

    Attributes:
        word: first word of a choice on the command line; "" for the one family without a word.
        kernels: the kernels in the order of a round.
    """

    word: str
    kernels: tuple[Kernel[Any], ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that a caller chooses values for: all axes of the kernels but PDL."""
        every = (axis for kernel in self.kernels for axis in kernel.axes)
        return tuple(axis for axis in dict.fromkeys(every) if axis != PDL)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What the kernels wait for."""
        found = (kernel.phase for kernel in self.kernels if kernel.phase is not None)
        return tuple(dict.fromkeys(found))

    @property
    def usage(self) -> str:
        """Form of a choice on the command line; a part in brackets may be left out."""
        parts = [self.word] if self.word else []
        for axis in self.axes:
            text = axis.usage if not parts else f",{axis.usage}"
            parts.append(text if axis.default is None else f"[{text}]")
        return "".join(parts)

    def variant(self, **values: int | str) -> Variant:
        """Return the family with these values; an axis that is not named gets its default. Local.

        Args:
            values: code or name of the value, by the name of the axis.

        Raises:
            ConfigError: an axis without a default is not named, or an axis is unknown, or it has no
                such value.
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
        """Return the text of the family's host library, which reads all values from arguments."""
        return host_source((self,))


class Variant(NamedTuple):
    """A family with a value for each of its axes: what a caller needs compiled.

    Attributes:
        values: one code for each axis of the family, in the order of the axes.
    """

    family: Family
    values: tuple[int, ...]

    def __str__(self) -> str:
        """The form that the command line takes."""
        return ",".join(self.words())

    def words(self) -> list[str]:
        """Return the family's word and `name=value` of its axes.

        A silent axis is left out if it has its default.
        """
        found = [self.family.word] if self.family.word else []
        for axis, code in zip(self.family.axes, self.values, strict=True):
            word = axis.word(code)
            if not axis.is_silent or word != axis.default:
                found.append(f"{axis.name}={word}")
        return found

    def codes(self) -> dict[str, int]:
        """Return name of the axis -> code."""
        return {axis.name: code for axis, code in zip(self.family.axes, self.values, strict=True)}

    def instead(self, **values: int | str) -> Variant:
        """Return this variant with other values for some axes; raises as Family.variant."""
        return self.family.variant(**(self.codes() | values))

    def build(self, kernel: Kernel[Any], *, pdl: bool, **instead: int) -> Build:
        """Return the build of one kernel of the family. Local.

        Args:
            kernel: the kernel.
            pdl: whether the build has the instructions of programmatic dependent launch.
            instead: codes that replace values of this variant, by the names of the axes.

        Raises:
            ConfigError: no axis has that name, or it has no such code.
        """
        codes = self.instead(**instead).codes() | {PDL.name: int(pdl)}
        return Build(kernel, tuple(codes[axis.name] for axis in kernel.axes))

    def builds(self, *, pdl: bool) -> list[Build]:
        """Return every build that a caller with these values loads, each once."""
        found: dict[Build, None] = {}
        for kernel in self.family.kernels:
            always = [(axis.name, value) for axis in kernel.axes for value in axis.always]
            for name, value in always:
                found[self.build(kernel, pdl=pdl, **{name: value})] = None
            found[self.build(kernel, pdl=pdl)] = None
        return list(found)


def gpu_source(kernels: tuple[Kernel[Any], ...], values: Mapping[Axis, int]) -> str:
    """Return the text of these kernels for these values, without the files of the host."""
    config = source.config_text(dict(_constants(values)))
    return source.translation_unit(config, _files(kernels))


def host_source(families: tuple[Family, ...], values: Mapping[Axis, int] | None = None) -> str:
    """Return the text of a host library of these families.

    The kernels read every value that `values` lacks from their arguments.
    """
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
