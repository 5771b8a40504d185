"""moe-nvlink precompile: fills a cache, for images that have neither a compiler nor a network.

Imports no torch: every compiling process would pay for it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from moe_nvlink_plugin import driver, env
from moe_nvlink_plugin.errors import CompileError, ConfigError, MoeNvlinkError
from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import cache, host, nvrtc
from moe_nvlink_plugin.launch import machine_code
from moe_nvlink_plugin.launch.kernel import Variant

from .shipped import FAMILIES

#: By model: num_experts_per_tok (gpt-oss: experts_per_token) and torch_dtype of the configuration
#: that its authors publish with the weights.
PRESETS = {
    "deepseek-v3": LAYER.variant(top_k=8, dtype="bf16"),
    "deepseek-r1": LAYER.variant(top_k=8, dtype="bf16"),
    "glm-4.5": LAYER.variant(top_k=8, dtype="bf16"),
    "gpt-oss": LAYER.variant(top_k=4, dtype="bf16"),
    "kimi-k2": LAYER.variant(top_k=8, dtype="bf16"),
    "qwen3": LAYER.variant(top_k=8, dtype="bf16"),
}


def families_without_model() -> list[Variant]:
    """The families whose every axis has a default, with their defaults."""
    return [
        family.variant()
        for family in FAMILIES
        if all(axis.default is not None for axis in family.axes)
    ]


def default_geometries() -> list[Variant]:
    """What is compiled where nobody says what for."""
    return [*PRESETS.values(), *families_without_model()]


def kinds() -> list[Variant]:
    """Each kind of kernel in the commonest geometry, DeepSeek-V3's: rows as they come, which is the
    first, each recipe, each format of combine, and the families that know no model.
    """
    common = PRESETS["deepseek-v3"]
    found = {common: None}
    for axis in common.family.axes:
        if axis.is_silent:
            found |= {common.instead(**{axis.name: name}): None for name in axis.choices()}
    return [*found, *families_without_model()]


def parse_geometry(text: str) -> Variant:
    """A preset's name, or a family's values as "top_k=8,dtype=bf16,recipe=fp8_block,combine=nvfp4",
    where those with a default may be left out; both together as "qwen3,recipe=mxfp8"; of a family
    with a word, the word and its values, as "lm_head,dtype=bf16". Local.

    Raises:
        ConfigError: it is neither; the message has the lists.
    """
    first, comma, rest = text.partition(",")
    base = PRESETS.get(first)
    by_word = {family.word: family for family in FAMILIES}
    family = base.family if base else by_word.get(first if first else " ", by_word[""])
    has_word = base is not None or bool(family.word)
    given = (rest.split(",") if comma else []) if has_word else text.split(",")
    parts = [part.partition("=") for part in given]
    values: dict[str, int | str] = {name.strip(): value.strip() for name, _equals, value in parts}
    try:
        if len(values) < len(parts):
            raise ConfigError("a value is given twice")
        return base.instead(**values) if base is not None else family.variant(**values)
    except ConfigError as error:
        raise ConfigError(f"geometry {text!r} is neither {_known()}: {error}") from error


def _known() -> str:
    """What parse_geometry takes."""
    usages = " nor ".join(family.usage for family in FAMILIES)
    axes = dict.fromkeys(axis for family in FAMILIES for axis in family.axes)
    choices = []
    for axis in axes:
        names = list(axis.choices())
        numbers = [int(name) for name in names if name.isdecimal()]
        is_range = len(numbers) == len(names)
        which = f"from {min(numbers)} to {max(numbers)}" if is_range else f"of {', '.join(names)}"
        choices.append(f"{axis.placeholder} {which}")
    return f"a model ({', '.join(PRESETS)}) nor {usages} with {'; '.join(choices)}"


def default_architectures() -> list[str]:
    """Those of the GPUs this process sees, all of them where it sees none. Local.

    Raises:
        UnsupportedError: the kernels are not built for a GPU of this machine.
    """
    if driver.unavailable() is not None:
        return list(nvrtc.ARCHITECTURES)
    return sorted({driver.device(index).architecture for index in range(driver.num_devices())})


@dataclasses.dataclass(frozen=True)
class Task:
    """What a caller with this geometry loads, for one architecture.

    Attributes:
        pdl: for launches with programmatic dependent launch.
    """

    architecture: str
    geometry: Variant
    pdl: bool

    def is_cached(self) -> bool:
        """Whether kernels() would find all of it."""
        builds = self.geometry.builds(pdl=self.pdl)
        return all(machine_code.is_cached(build, self.architecture) for build in builds)

    def kernels(self) -> list[bytes]:
        """The cubins, compiled into the cache where they are not there."""
        builds = self.geometry.builds(pdl=self.pdl)
        return [machine_code.cubin_for(each, self.architecture, self.geometry) for each in builds]


@dataclasses.dataclass(frozen=True)
class _Outcome:
    task: Task
    size_bytes: int = 0
    seconds: float = 0.0
    was_there: bool = False
    error: str = ""

    def __str__(self) -> str:
        what = f"{self.task.architecture:8} {self.task.geometry}"
        if self.error:
            return f"  FAILED {what}: {self.error}"
        how = "was there" if self.was_there else f"compiled in {self.seconds:.1f} s"
        return f"  {what:32} {self.size_bytes:7} bytes, {how}"


def _work(task: Task) -> _Outcome:
    start = time.monotonic()
    try:
        was_there = task.is_cached()
        cubins = task.kernels()
    except MoeNvlinkError as error:
        return _Outcome(task, error=str(error))
    return _Outcome(task, sum(map(len, cubins)), time.monotonic() - start, was_there)


def _outcomes(tasks: list[Task], jobs: int) -> Iterator[_Outcome]:
    if jobs == 1:
        yield from map(_work, tasks)
        return
    # Processes: in how many threads of one process NVRTC gains is not measured.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        try:
            yield from pool.map(_work, tasks)
        except BrokenProcessPool as error:
            raise CompileError(
                "a compiling process was ended from outside, for want of memory perhaps; "
                "try --jobs 1"
            ) from error


def precompile(
    architectures: Sequence[str],
    geometries: Sequence[Variant],
    *,
    pdl: bool = True,
    folder: Path | None = None,
    jobs: int | None = None,
) -> int:
    """Compiles the kernels of all pairs into a cache, and prints what it made. Local.

    Args:
        folder: the cache; None takes MOE_NVLINK_CACHE_DIR or the user's directory. Otherwise it
            becomes MOE_NVLINK_CACHE_DIR of this process.
        jobs: processes that compile; None takes one per CPU.

    Returns:
        0, or 1 when something could not be compiled for a GPU.

    Raises:
        CompileError: the directory cannot be used.
    """
    start = time.monotonic()
    target = _open_cache(folder)
    wanted = dict.fromkeys(geometries)
    tasks = [Task(name, each, pdl) for name in dict.fromkeys(architectures) for each in wanted]
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(tasks))
    print(f"kernels for GPUs, {'with' if pdl else 'without'} programmatic dependent launch:")
    failed = 0
    for outcome in _outcomes(tasks, jobs):
        print(outcome, flush=True)
        failed += bool(outcome.error)
    print(_host_kernels(), flush=True)
    print(f"{len(tasks) - failed} of {len(tasks)} in {time.monotonic() - start:.1f} s")
    print(_how_to_use(target))
    return 1 if failed else 0


def _open_cache(folder: Path | None) -> Path:
    if folder is not None:
        env.use_cache_dir(folder.expanduser().absolute())
    given = env.cache_dir()
    if given is None:
        return cache.directory()
    if not given.exists():
        try:
            given.mkdir(parents=True)
            given.chmod(0o755)  # an image's users are others than who builds it
        except OSError as error:
            raise CompileError(f"cannot make {given}: {error}; name another directory") from error
    if cache.shipped_directory() is not None:
        raise CompileError(
            f"{given} is only readable for user {os.getuid()}; run this as its owner "
            f"({given.stat().st_uid}), or name another directory with --cache-dir"
        )
    return cache.directory()


def _host_kernels() -> str:
    try:
        for family in FAMILIES:
            host.load(family.host_source())
    except MoeNvlinkError as error:
        first = str(error).splitlines()[0]
        return f"kernels for CPU ranks: not compiled, GPU ranks do without ({first})"
    return "kernels for CPU ranks: there, for this CPU model; another one compiles its own"


def _how_to_use(target: Path) -> str:
    readable = target.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH) == stat.S_IROTH | stat.S_IXOTH
    who = "any user may read it" if readable else f"readable by user {target.stat().st_uid} only"
    if env.cache_dir() is None:
        return f"in {target}, which is where this user's processes look ({who})"
    return f"set MOE_NVLINK_CACHE_DIR={target} where they are to be used ({who})"
