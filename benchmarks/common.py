"""Share what every benchmark needs: options, summaries, result files, and the facts beside figures.

The facts are date, machine, versions, commit and command.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from moe_nvlink_plugin import driver

T = TypeVar("T")

VECTOR_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16")


def add_geometry(
    parser: argparse.ArgumentParser,
    *,
    ep_size: int,
    tokens: list[int],
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
) -> None:
    """Add the options that say what a layer looks like, DeepSeek-V3's by default."""
    parser.add_argument("--ep-size", type=int, default=ep_size)
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help="per rank")
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--dtype", default=dtypes[0], choices=dtypes)


def options_from(kind: type[T], arguments: argparse.Namespace) -> T:
    """Make a dataclass of options of the arguments of the same names; lists become tuples."""
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in fields}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def summary(samples_us: Iterable[float]) -> dict[str, float]:
    """Return median, quartiles, least and 95th percentile of times in microseconds."""
    ordered = sorted(samples_us)
    low, _middle, high = statistics.quantiles(ordered, n=4)
    return {
        "median_us": statistics.median(ordered),
        "q25_us": low,
        "q75_us": high,
        "min_us": ordered[0],
        "p95_us": ordered[int(0.95 * (len(ordered) - 1))],
    }


def order_of(names: Sequence[T], iteration: int) -> list[T]:
    """Say who is timed when: another one first every second iteration, and backwards in between.

    What a body leaves behind, in caches and in threads that go on, falls on the next one. So nobody
    always follows the same one.
    """
    first = iteration // 2 % len(names)
    turned = [*names[first:], *names[:first]]
    return turned if iteration % 2 == 0 else turned[::-1]


def describe_run() -> dict[str, Any]:
    """Describe this process: date, machine, versions, commit and command."""
    cpu = _cpu()
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parents[1]
    called = script.relative_to(root) if script.is_relative_to(root) else script.name
    return {
        "date": time.strftime("%Y-%m-%d"),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpu": cpu.get("model name", platform.processor()),
        # A name such as "AMD EPYC" means several processors; the flags decide what loops become.
        "cpu_flags": " ".join(f for f in VECTOR_FLAGS if f in cpu.get("flags", "").split()),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "commit": _COMMIT,
        "command": " ".join(["python", str(called), *sys.argv[1:]]),
    }


def describe_gpu(index: int = 0) -> dict[str, Any]:
    """Describe the GPU and its driver.

    Raises:
        UnsupportedError: there is no driver.
    """
    gpu = driver.device(index)
    return {
        "gpu": gpu.name,
        "architecture": gpu.architecture,
        "sms": gpu.num_sms,
        "memory_bytes": gpu.total_bytes,
        "driver": _nvidia_smi("driver_version"),
        "driver_cuda": "{}.{}".format(*driver.driver_version()),
        "nvrtc": _nvrtc(),
        "sm_clock_now": _nvidia_smi("clocks.sm"),
    }


def commit() -> str:
    """Return the short hash of the checkout, or BENCH_COMMIT if it came without its history."""
    given = os.environ.get("BENCH_COMMIT", "unknown")
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=False,
        )
    except OSError:  # a bare machine has no git, and the figures are worth more than their commit
        return given
    return done.stdout.strip() or given


#: Of the code that runs: a checkout may move on while something is measured.
_COMMIT = commit()


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write one benchmark's result. The file is whole, whenever this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(_one_row_a_line(result) + "\n")
    os.replace(unfinished, path)


def _one_row_a_line(value: Any) -> str:
    """Write JSON with a line for each row of a table, and for each field of what holds a table."""
    if _is_table(value):
        return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
    if not _holds_table(value):
        return json.dumps(value)
    fields = (f"{json.dumps(name)}: {_one_row_a_line(each)}" for name, each in value.items())
    return "{\n" + ",\n".join(fields) + "\n}"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(row, dict) for row in value)


def _holds_table(value: Any) -> bool:
    return isinstance(value, dict) and any(
        _is_table(each) or _holds_table(each) for each in value.values()
    )


@dataclasses.dataclass(frozen=True)
class Record:
    """A result file that is written after every batch, so that a killed run leaves what was done.

    Until the last batch it has the field `incomplete`, and report.py refuses it.

    Attributes:
        path: of the file; None: nothing is written.
        head: what the result says before anything is measured.
    """

    path: Path | None
    head: dict[str, Any]

    def write(self, measured: dict[str, Any], *, complete: bool = False) -> dict[str, Any]:
        """Write and return the result with what has been measured so far."""
        result = self.head | measured
        if not complete:
            result["incomplete"] = "the run had not ended when this was written"
        if self.path is not None:
            write_json(self.path, result)
        return result


def is_installed(module: str) -> bool:
    """Say whether `import module` would find something; import nothing."""
    return importlib.util.find_spec(module) is not None


def _cpu() -> dict[str, str]:
    """Read what Linux says of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _colon, value in pairs}


def _nvidia_smi(field: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.stdout else "unknown"


def _nvrtc() -> str:
    from cuda.bindings import nvrtc

    _status, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"
