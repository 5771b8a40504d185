"""Starts vLLM's engine on one GPU: one rank, or data-parallel ranks that share it.

vllm_engine.py is what a rank runs. Every rank has a log, and ends within the time it is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.vllm_engine import Task

ROOT = Path(__file__).resolve().parents[2]
#: Of every rank. What vLLM would need of its library, of FlashInfer or of a network is off.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK": "0",
    # Attention by heads also for models with latent attention.
    "VLLM_MLA_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    # Products of float32 without TF32: ranks then differ from one rank by their order alone.
    "TRITON_F32_DEFAULT": "ieee",
    "MOE_NVLINK_ALLOW_SHARED_GPU": "1",
    # Ranks of several engines compile on the same cores, and take turns on the GPU.
    "MOE_NVLINK_TIMEOUT_S": "40",
    "MOE_NVLINK_FIRST_TIMEOUT_S": "90",
    "OMP_NUM_THREADS": "1",
}
#: The program of a rank; its argument is the file of its task.
PROGRAM = ("-m", "tests.support.vllm_engine")
#: Between the rank that prints its stacks and the signal that ends it.
GRACE_S = 5.0


@dataclasses.dataclass(frozen=True)
class Requests:
    """Prompts as token ids, and how many tokens each is answered."""

    prompts: list[list[int]]
    lengths: list[int]

    def of(self, numbers: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Those of these numbers."""
        return [self.prompts[n] for n in numbers], [self.lengths[n] for n in numbers]


class Engine:
    """The ranks of one engine, which start when this object is made.

    Args:
        name: what it is called, and its files' folder in `folder`.
        shares: for each rank the numbers of its requests; one rank takes no part in an exchange.
        graphs, compiled, options, fault, limit_s: as Task has them.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        checkpoint: Path,
        requests: Requests,
        shares: Sequence[Sequence[int]],
        *,
        graphs: str = "",
        compiled: bool = False,
        options: Mapping[str, Any] | None = None,
        fault: str = "",
        limit_s: float = 75.0,
    ) -> None:
        self.name, self.shares, self.graphs = name, shares, graphs
        # Inductor's command lines take no folder with a space.
        self.folder = folder / re.sub(r"\W+", "-", name)
        self.folder.mkdir(parents=True)
        self._began, self._limit_s = time.monotonic(), limit_s
        size = len(shares)
        port = _free_port()
        self._ranks = []
        for rank, share in enumerate(shares):
            prompts, lengths = requests.of(share)
            task = Task(
                checkpoint=str(checkpoint),
                prompts=prompts,
                lengths=lengths,
                with_ours=size > 1,
                graphs=graphs,
                compiled=compiled,
                options=dict(options or {}),
                fault=fault,
                limit_s=limit_s,
                answers=str(self.folder / f"answers{rank}.json"),
            )
            self._ranks.append(self._start(rank, size, port, task))

    def _start(self, rank: int, size: int, port: int, task: Task) -> subprocess.Popen[bytes]:
        path = self.folder / f"task{rank}.json"
        path.write_text(json.dumps(dataclasses.asdict(task)), "utf-8")
        variables = {**os.environ, **ENVIRONMENT}
        variables["VLLM_CACHE_ROOT"] = str(self.folder / f"cache{rank}")
        variables["MOE_NVLINK_STATS_DIR"] = str(self.folder / "stats")
        if size == 1:
            variables["VLLM_PLUGINS"] = ""
        else:
            variables |= {
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": "0",
                "VLLM_DP_SIZE": str(size),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
            }
            variables["PYTHONPATH"] = os.pathsep.join(
                [str(installed(self.folder / "site")), variables.get("PYTHONPATH", "")]
            )
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *PROGRAM, str(path)],
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _log(self, rank: int) -> Path:
        return self.folder / f"log{rank}"

    def log(self, rank: int) -> str:
        """What a rank has said."""
        return self._log(rank).read_text("utf-8", errors="replace")

    def join(self) -> list[str]:
        """Wait for all ranks, end those that take too long; return what was wrong with each."""
        wrong = []
        for rank, process in enumerate(self._ranks):
            left = self._began + self._limit_s + GRACE_S - time.monotonic()
            try:
                status = process.wait(timeout=max(left, 0.1))
                wrong.append(f"exit status {status}" if status else "")
            except subprocess.TimeoutExpired:
                wrong.append("took too long")
            finally:
                _end_session(process)
            print(f"{self.name}, rank {rank}: {wrong[-1] or 'all well'}", flush=True)
        return wrong

    def close(self) -> None:
        """End all ranks."""
        for process in self._ranks:
            _end_session(process)

    def answers(self) -> dict[int, list[int]]:
        """Number of a request -> its tokens, of those ranks that have answered."""
        found: dict[int, list[int]] = {}
        for rank, share in enumerate(self.shares):
            path = self.folder / f"answers{rank}.json"
            if path.exists():
                found.update(zip(share, json.loads(path.read_text("utf-8")), strict=True))
        return found

    def stats(self, rank: int) -> dict[str, Any]:
        """The counters of a rank's exchange."""
        path = self.folder / "stats" / f"rank{rank}.json"
        read: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return read

    def tell(self, lines: int = 60) -> None:
        """Print each rank's phases, what our package and vLLM's choices said, and its end."""
        words = ("PHASE", "moe_nvlink", "Self-check", "Runner", "backend", "graph")
        for rank in range(len(self.shares)):
            text = self.log(rank).splitlines()
            chosen = [line[:300] for line in text if any(word in line for word in words)]
            print(f"--- {self.name}, rank {rank}", *chosen[:80], sep="\n")
            if not (self.folder / f"answers{rank}.json").exists():
                print(f"--- its last {lines} lines", *text[-lines:], sep="\n", flush=True)


def installed(folder: Path) -> Path:
    """A folder of PYTHONPATH by which vLLM finds our plugin; empty if the package is installed."""
    about = folder / "moe_nvlink_plugin-0.dist-info"
    if about.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        importlib.metadata.version("moe-nvlink-plugin")
    except importlib.metadata.PackageNotFoundError:
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        about.mkdir()
        named = f"Name: {project['name']}\nVersion: {project['version']}\n"
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in project["entry-points"].items()
        )
        (about / "entry_points.txt").write_text(text)
    return folder


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _end_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
