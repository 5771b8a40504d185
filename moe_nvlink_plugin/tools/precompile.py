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
from moe_nvlink_plugin.jit import cache, header, host, nvrtc
from moe_nvlink_plugin.jit.header import constants


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the kernels of a layer are compiled for.

    Attributes:
        top_k: experts per token.
        dtype: activation type: bf16, fp16 or fp32.
        recipe: by which dispatch quantises: a name of header.quantisers(); "none" does not.
        combine: what comes back: a name of header.combine_formats(); "bf16" is dtype as it is.
    """

    top_k: int
    dtype: str = "bf16"
    recipe: str = "none"
    combine: str = "bf16"

    def __str__(self) -> str:
        words = f"top_k={self.top_k},dtype={self.dtype}"
        words += f",recipe={self.recipe}" if self.recipe != "none" else ""
        return words + (f",combine={self.combine}" if self.combine != "bf16" else "")

    def parts(self) -> tuple[Geometry | HeadGeometry, ...]:
        """What is compiled by itself: rows as they come with the layer's combine, and dispatch with
        the recipe, which is the same for every combine.
        """
        plain = dataclasses.replace(self, recipe="none")
        return (plain,) if plain == self else (plain, dataclasses.replace(self, combine="bf16"))


#: How the command line spells a HeadGeometry.
HEAD = "lm_head"


@dataclasses.dataclass(frozen=True)
class HeadGeometry:
    """What the kernels of a shared LM head are compiled for.

    Attributes:
        dtype: of rows and logits: bf16, fp16 or fp32.
    """

    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{HEAD},dtype={self.dtype}"

    def parts(self) -> tuple[Geometry | HeadGeometry, ...]:
        """All of it: they are compiled together."""
        return (self,)


#: By model: num_experts_per_tok (gpt-oss: experts_per_token) and torch_dtype of the configuration
#: that its authors publish with the weights.
PRESETS = {
    "deepseek-v3": Geometry(8, "bf16"),
    "deepseek-r1": Geometry(8, "bf16"),
    "glm-4.5": Geometry(8, "bf16"),
    "gpt-oss": Geometry(4, "bf16"),
    "kimi-k2": Geometry(8, "bf16"),
    "qwen3": Geometry(8, "bf16"),
}


def kinds() -> list[Geometry | HeadGeometry]:
    """Each kind of kernel in the commonest geometry, DeepSeek-V3's: rows as they come, which is the
    first, each recipe, each format of combine, and a shared LM head.
    """
    common = PRESETS["deepseek-v3"]
    recipes = [dataclasses.replace(common, recipe=name) for name in header.quantisers()]
    formats = [name for name, code in header.combine_formats().items() if code]
    layers = recipes + [dataclasses.replace(common, combine=name) for name in formats]
    return [*layers, HeadGeometry(common.dtype)]


def parse_geometry(text: str) -> Geometry | HeadGeometry:
    """A preset's name, or "top_k=8,dtype=bf16,recipe=fp8_block,combine=nvfp4", where all but top_k
    may be left out; both together as "qwen3,recipe=mxfp8"; or "lm_head,dtype=bf16". Local.

    Raises:
        ConfigError: it is neither; the message has the lists.
    """
    heads = {str(HeadGeometry(dtype)): HeadGeometry(dtype) for dtype in header.elements()}
    if text in heads or text == HEAD:
        return heads.get(text, HeadGeometry())
    first, _comma, rest = text.partition(",")
    base = PRESETS.get(first)
    given = text.split(",") if base is None else rest.split(",") if rest else []
    parts = [part.partition("=") for part in given]
    values = {name.strip(): value.strip() for name, _equals, value in parts}
    if base is not None:
        values = {"top_k": str(base.top_k), "dtype": base.dtype} | values
    if len(values) < len(parts) or not _is_geometry(values):
        raise ConfigError(
            f"geometry {text!r} is neither a model ({', '.join(PRESETS)}) nor top_k=N,dtype=TYPE,"
            f"recipe=RECIPE,combine=FORMAT nor {HEAD},dtype=TYPE with N from 1 to "
            f"{constants()['kMaxTopK']} and one of "
            + "; ".join(", ".join(names) for names in _choices().values())
        )
    return Geometry(**(values | {"top_k": int(values["top_k"])}))  # type: ignore[arg-type]


def _choices() -> dict[str, dict[str, int]]:
    return {
        "dtype": header.elements(),
        "recipe": header.quantisers(),
        "combine": header.combine_formats(),
    }


def _is_geometry(values: dict[str, str]) -> bool:
    others = {name: value for name, value in values.items() if name != "top_k"}
    top_k = values.get("top_k", "")
    return (
        top_k.isdecimal()
        and 1 <= int(top_k) <= constants()["kMaxTopK"]
        and others.keys() <= _choices().keys()
        and all(value in _choices()[name] for name, value in others.items())
    )


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
    """Kernels that are compiled together, for one architecture.

    Attributes:
        pdl: for launches with programmatic dependent launch.
    """

    architecture: str
    geometry: Geometry | HeadGeometry
    pdl: bool

    def is_cached(self) -> bool:
        """Whether kernels() would find them."""
        if isinstance(self.geometry, HeadGeometry):
            return nvrtc.head_is_cached(*self._head_arguments(self.geometry))
        return nvrtc.is_cached(*self._arguments(self.geometry))

    def kernels(self) -> bytes:
        """The cubin, compiled into the cache where it is not there."""
        if isinstance(self.geometry, HeadGeometry):
            return nvrtc.head_kernels_for(*self._head_arguments(self.geometry))
        return nvrtc.kernels_for(*self._arguments(self.geometry))

    def _head_arguments(self, geometry: HeadGeometry) -> tuple[int, str, bool]:
        return header.elements()[geometry.dtype], self.architecture, self.pdl

    def _arguments(self, geometry: Geometry) -> tuple[int, int, str, bool, int, int]:
        return (
            geometry.top_k,
            header.elements()[geometry.dtype],
            self.architecture,
            self.pdl,
            header.quantisers()[geometry.recipe],
            header.combine_formats()[geometry.combine],
        )


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
        cubin = task.kernels()
    except MoeNvlinkError as error:
        return _Outcome(task, error=str(error))
    return _Outcome(task, len(cubin), time.monotonic() - start, was_there)


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
    geometries: Sequence[Geometry | HeadGeometry],
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
    parts = dict.fromkeys(part for geometry in geometries for part in geometry.parts())
    tasks = [Task(name, part, pdl) for name in dict.fromkeys(architectures) for part in parts]
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
        host.load()
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
