"""moe-nvlink precompile: fills a cache, for images that have neither a compiler nor a network.

This module imports no torch, because every compiling process would pay for it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from moe_nvlink_plugin import driver, env
from moe_nvlink_plugin.errors import CompileError, ConfigError, MoeNvlinkError, UnsupportedError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import cache, nvrtc
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.launch.kernel import Axis, Build, Variant

from . import terminal
from .shipped import FAMILIES, load_host_libraries

#: Model -> geometry. The numbers are num_experts_per_tok (gpt-oss: experts_per_token) and
#: torch_dtype of the configuration that the model's authors publish with the weights.
PRESETS = {
    "deepseek-v3": LAYER.variant(top_k=8, dtype="bf16"),
    "deepseek-r1": LAYER.variant(top_k=8, dtype="bf16"),
    "glm-4.5": LAYER.variant(top_k=8, dtype="bf16"),
    "gpt-oss": LAYER.variant(top_k=4, dtype="bf16"),
    "kimi-k2": LAYER.variant(top_k=8, dtype="bf16"),
    "qwen3": LAYER.variant(top_k=8, dtype="bf16"),
}


def families_without_model() -> list[Variant]:
    """Return each family whose axes all have a default, with these defaults."""
    return [
        family.variant()
        for family in FAMILIES
        if all(axis.default is not None for axis in family.axes)
    ]


def default_geometries() -> list[Variant]:
    """Return what is compiled if the user names no geometry."""
    return [*PRESETS.values(), *families_without_model()]


def kinds(architecture: str) -> list[Variant]:
    """Return each kind of kernel, layers in DeepSeek-V3's geometry, the commonest one.

    The first kind sends rows as they are. Then follow one kind for each recipe, one for each format
    of combine, and the families that need no model.

    Args:
        architecture: on which the code of each kind is another one.
    """
    common = PRESETS["deepseek-v3"]
    found = {common: None}
    for axis in common.family.axes:
        if axis.is_silent and (not axis.only_on or architecture in axis.only_on):
            found |= {common.instead(**{axis.name: name}): None for name in axis.choices()}
    return [*found, *families_without_model()]


def parse_geometry(text: str) -> Variant:
    """Return what a user names: a model, or a family with values. Local.

    Args:
        text: one of these, where values that have a default may be left out:
            a model: "qwen3";
            a model and other values: "qwen3,recipe=mxfp8";
            values: "top_k=8,dtype=bf16,recipe=fp8_block,combine=nvfp4";
            the word of a family and values: "lm_head,dtype=bf16".

    Raises:
        ConfigError: the text is none of these. The message lists models, names and values.
    """
    first, comma, rest = text.partition(",")
    base = PRESETS.get(first)
    by_word = {family.word: family for family in FAMILIES}
    family = base.family if base else by_word.get(first, by_word[""])
    has_word = base is not None or bool(family.word)
    try:
        values = values_of((rest.split(",") if comma else []) if has_word else text.split(","))
        return base.instead(**values) if base is not None else family.variant(**values)
    except ConfigError as error:
        raise ConfigError(f"geometry {text!r} is neither {_known()}: {error}") from error


def values_of(parts: Sequence[str]) -> dict[str, int | str]:
    """Return name -> value of texts `name=value`. Local.

    Raises:
        ConfigError: a text is not of this form, or a name is given twice.
    """
    found: dict[str, int | str] = {}
    for part in parts:
        name, equals, value = (word.strip() for word in part.partition("="))
        if not part.strip():
            raise ConfigError("nothing stands beside a comma; remove the comma, or add name=value")
        if not (name and equals and value):
            raise ConfigError(f"{part!r} is not name=value")
        if name in found:
            raise ConfigError(f"{name} is given twice")
        found[name] = value
    return found


def _known() -> str:
    """Return what parse_geometry takes, as an error says it."""
    usages = " nor ".join(family.usage for family in FAMILIES)
    axes = dict.fromkeys(axis for family in FAMILIES for axis in family.axes)
    choices = [f"{axis.placeholder} {choices_of(axis)}" for axis in axes]
    return f"a model ({', '.join(PRESETS)}) nor {usages} with {'; '.join(choices)}"


def choices_of(axis: Axis) -> str:
    """Return which values an axis has, as an error says it. Local."""
    names = list(axis.choices())
    numbers = [int(name) for name in names if name.isdecimal()]
    is_range = len(numbers) == len(names) and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"from {min(numbers)} to {max(numbers)}" if is_range else f"of {', '.join(names)}"


def default_architectures() -> list[str]:
    """Return the architectures of the GPUs that this process sees; all if it sees none. Local.

    Raises:
        UnsupportedError: the kernels are not built for a GPU of this machine.
    """
    if driver.unavailable() is not None:
        return list(nvrtc.ARCHITECTURES)
    return sorted({driver.device(index).architecture for index in range(driver.num_devices())})


class Compilation(NamedTuple):
    """One build for one architecture.

    Geometries share builds. Whoever compiles for several geometries compiles each build once:
    otherwise one process would compile it, and others would wait for its lock.
    """

    architecture: str
    build: Build


class Compiled(NamedTuple):
    """Result of one compilation.

    Attributes:
        size_bytes: bytes of the cubin.
        seconds: time that it took.
        was_there: whether the cache had the cubin.
        error: why there is no cubin; None if there is one.
    """

    size_bytes: int = 0
    seconds: float = 0.0
    was_there: bool = False
    error: MoeNvlinkError | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """What a caller with this geometry loads, for one architecture.

    Attributes:
        pdl: whether launches have programmatic dependent launch.
    """

    architecture: str
    geometry: Variant
    pdl: bool

    def compilations(self) -> list[Compilation]:
        """Return one compilation for each build that the caller loads."""
        return [Compilation(self.architecture, one) for one in self.geometry.builds(pdl=self.pdl)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A task and the results of its compilations, in their order."""

    task: Task
    results: tuple[Compiled, ...]

    @property
    def was_there(self) -> bool:
        """Whether the cache had every build."""
        return all(result.was_there for result in self.results)

    @property
    def error(self) -> str:
        """The first error; "" if there is none."""
        for (architecture, build), result in zip(
            self.task.compilations(), self.results, strict=True
        ):
            if isinstance(result.error, UnsupportedError):
                wanted = self.task.geometry
                return machine_code.missing(build, architecture, wanted, result.error)
            if result.error is not None:
                return str(result.error)
        return ""

    def __str__(self) -> str:
        """The line that the command prints. Builds that tasks share count in each of them."""
        what = f"{self.task.architecture:8} {self.task.geometry}"
        if self.error:
            return f"  FAILED {what}: {self.error}"
        size_bytes = sum(result.size_bytes for result in self.results)
        seconds = sum(result.seconds for result in self.results)
        how = "was there" if self.was_there else f"compiled in {seconds:.1f} s"
        return f"  {what:32} {size_bytes:7} bytes, {how}"


def compiled(compilation: Compilation) -> Compiled:
    """Take a build from the cache, or compile it into the cache. Local; its error is a result."""
    start = time.monotonic()
    text = compilation.build.text()
    try:
        was_there = nvrtc.is_cached(text, compilation.architecture)
        cubin = nvrtc.load_or_compile(text, compilation.architecture)
    except MoeNvlinkError as error:
        return Compiled(error=error)
    return Compiled(len(cubin), time.monotonic() - start, was_there)


def outcomes(
    tasks: Sequence[Task], compile_all: Callable[[Sequence[Compilation]], Iterable[Compiled]]
) -> Iterator[Outcome]:
    """Yield the outcome of each task, in their order, as soon as its builds are there. Local.

    Args:
        compile_all: yields the result of each compilation, in their order: a map of `compiled`.
    """
    needed = list(dict.fromkeys(one for task in tasks for one in task.compilations()))
    results = zip(needed, compile_all(needed), strict=True)
    done: dict[Compilation, Compiled] = {}
    for task in tasks:
        mine = task.compilations()
        while not done.keys() >= set(mine):
            done.update([next(results)])
        yield Outcome(task, tuple(done[one] for one in mine))


def _compile_all(needed: Sequence[Compilation], jobs: int) -> Iterator[Compiled]:
    jobs = min(jobs, len(needed))
    if jobs == 1:
        yield from map(compiled, needed)
        return
    # Processes: nobody has measured up to how many threads of one process NVRTC gains.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        try:
            with terminal.interrupts_are_ours():  # all of them start here
                results = pool.map(compiled, needed)
            yield from results
        except BrokenProcessPool as error:
            raise CompileError(
                "a compiling process ended without a result: it crashed or was killed, perhaps "
                "because memory ran out; try --jobs 1"
            ) from error
        except BaseException:  # of a Ctrl-C, say, which they do not hear
            for process in list(pool._processes.values()):
                process.kill()
            raise


def precompile(
    architectures: Sequence[str],
    geometries: Sequence[Variant],
    *,
    pdl: bool = True,
    folder: Path | None = None,
    jobs: int | None = None,
) -> int:
    """Compile the kernels of every pair into a cache, and print what was made. Local.

    Args:
        architectures: as in nvrtc.ARCHITECTURES.
        geometries: as parse_geometry returns them.
        pdl: whether launches have programmatic dependent launch.
        folder: the cache; it becomes MOE_NVLINK_CACHE_DIR of this process. None takes
            MOE_NVLINK_CACHE_DIR, or the user's directory.
        jobs: number of compiling processes; None takes one per CPU.

    Returns:
        0; 1 if a kernel could not be compiled for a GPU.

    Raises:
        CompileError: the directory cannot be used.
    """
    start = time.monotonic()
    target = _open_cache(folder)
    wanted = dict.fromkeys(geometries)
    tasks = [Task(name, each, pdl) for name in dict.fromkeys(architectures) for each in wanted]
    jobs = jobs or len(os.sched_getaffinity(0))
    print(f"kernels for GPUs, {'with' if pdl else 'without'} programmatic dependent launch:")
    failed = 0
    if not _has_nvrtc():
        jobs = 1  # nothing compiles; to start processes would take longer than to look
    for outcome in outcomes(tasks, functools.partial(_compile_all, jobs=jobs)):
        print(outcome, flush=True)
        failed += bool(outcome.error)
    print(_host_kernels(), flush=True)
    print(f"{len(tasks) - failed} of {len(tasks)} in {time.monotonic() - start:.1f} s")
    print(_how_to_use(target))
    return 1 if failed else 0


def _has_nvrtc() -> bool:
    try:
        nvrtc.version()
    except UnsupportedError as error:
        print(f"  only those that are there already: {error}", flush=True)
        return False
    return True


def _open_cache(folder: Path | None) -> Path:
    if folder is not None:
        env.use_cache_dir(folder)
    given = env.cache_dir()
    if given is None:
        return cache.directory()
    try:
        given = given.absolute()  # fails in a directory that is deleted
        env.use_cache_dir(given)
        if not given.exists():
            given.mkdir(parents=True)
            given.chmod(0o755)  # other users than the builder of an image use it
    except OSError as error:
        raise CompileError(f"cannot make {given}: {error}; name another directory") from error
    if cache.shipped_directory() is not None:
        raise CompileError(
            f"{given} is only readable for user {os.getuid()}; run this command as its owner "
            f"({given.stat().st_uid}), or name another directory with --cache-dir"
        )
    return cache.directory()


def _host_kernels() -> str:
    try:
        load_host_libraries()
    except MoeNvlinkError as error:
        first = str(error).splitlines()[0]
        return f"kernels for CPU ranks: not compiled; GPU ranks do not need them ({first})"
    return "kernels for CPU ranks: there, for this CPU model; another CPU model compiles its own"


def _how_to_use(target: Path) -> str:
    readable = target.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH) == stat.S_IROTH | stat.S_IXOTH
    who = "any user may read it" if readable else f"readable by user {target.stat().st_uid} only"
    if env.cache_dir() is None:
        return f"in {target}, which is where this user's processes look ({who})"
    return f"set MOE_NVLINK_CACHE_DIR={target} for the processes that use them ({who})"
