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

from . import driver, env
from .errors import CompileError, ConfigError, MoeNvlinkError
from .jit import cache, host, nvrtc
from .jit.header import constants


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the kernels of a layer are compiled for.

    Attributes:
        top_k: experts per token.
        dtype: activation type: bf16, fp16 or fp32.
    """

    top_k: int
    dtype: str

    def __str__(self) -> str:
        return f"top_k={self.top_k},dtype={self.dtype}"


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


def parse_geometry(text: str) -> Geometry:
    """A preset's name, or "top_k=8,dtype=bf16". Local.

    Raises:
        ConfigError: it is neither; the message has both lists.
    """
    if text in PRESETS:
        return PRESETS[text]
    parts = [part.partition("=") for part in text.split(",")]
    values = {name.strip(): value.strip() for name, _equals, value in parts}
    top_k, dtype = values.get("top_k", ""), values.get("dtype", "bf16")
    most = constants()["kMaxTopK"]
    if (
        len(values) != len(parts)
        or not values.keys() <= {"top_k", "dtype"}
        or not top_k.isdecimal()
        or not 1 <= int(top_k) <= most
        or dtype not in nvrtc.elements()
    ):
        raise ConfigError(
            f"geometry {text!r} is neither a model ({', '.join(PRESETS)}) nor top_k=N,dtype=TYPE "
            f"with N from 1 to {most} and one of {', '.join(nvrtc.elements())}"
        )
    return Geometry(int(top_k), dtype)


def default_architectures() -> list[str]:
    """Those of the GPUs this process sees, all of them where it sees none. Local.

    Raises:
        UnsupportedError: the kernels are not built for a GPU of this machine.
    """
    if driver.unavailable() is not None:
        return list(nvrtc.ARCHITECTURES)
    return sorted({driver.device(index).architecture for index in range(driver.num_devices())})


@dataclasses.dataclass(frozen=True)
class _Task:
    architecture: str
    geometry: Geometry
    pdl: bool

    def arguments(self) -> tuple[int, int, str, bool]:
        element = nvrtc.elements()[self.geometry.dtype]
        return self.geometry.top_k, element, self.architecture, self.pdl


@dataclasses.dataclass(frozen=True)
class _Outcome:
    task: _Task
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


def _work(task: _Task) -> _Outcome:
    start = time.monotonic()
    try:
        was_there = nvrtc.is_cached(*task.arguments())
        cubin = nvrtc.kernels_for(*task.arguments())
    except MoeNvlinkError as error:
        return _Outcome(task, error=str(error))
    return _Outcome(task, len(cubin), time.monotonic() - start, was_there)


def _outcomes(tasks: list[_Task], jobs: int) -> Iterator[_Outcome]:
    if jobs == 1:
        yield from map(_work, tasks)
        return
    # Processes: NVRTC compiles one program at a time in each.
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
    geometries: Sequence[Geometry],
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
    pairs = dict.fromkeys((a, g) for a in architectures for g in geometries)
    tasks = [_Task(architecture, geometry, pdl) for architecture, geometry in pairs]
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
