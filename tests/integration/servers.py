"""Servers of the end-to-end tests: one rank, and several with our backend."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from moe_nvlink_plugin.integration.vllm.demo import processes
from moe_nvlink_plugin.integration.vllm.demo.server import VllmServer

#: vLLM's server, started in a third of the time.
FAST_SERVER = [str(Path(__file__).parent / "fast_server.py")]
#: Long enough for a slow machine between two MoE layers. Ranks that compile need more than others.
TIMEOUT_S = 20


class Requests(NamedTuple):
    """Ragged prompts, ragged answers, and the tokens of the one-rank server."""

    checkpoint: Path
    prompts: list[list[int]]
    lengths: list[int]
    expected: list[list[int]]

    def num_tokens(self, count: int) -> int:
        """Tokens that pass every layer in the first `count` requests: all but the last answered."""
        return sum(map(len, self.prompts[:count])) + sum(self.lengths[:count]) - count


class EpServer:
    """A server with our backend, its workers' counters, and comparisons with the one-rank one."""

    def __init__(
        self,
        requests: Requests,
        folder: Path,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.requests = requests
        self.stats_folder = folder / f"stats {name}"
        self.server = VllmServer(
            model=requests.checkpoint,
            name=name,
            folder=folder,
            arguments=["--enable-expert-parallel", "--all2all-backend=moe_nvlink", *arguments],
            environment={
                "MOE_NVLINK_STATS_DIR": str(self.stats_folder),
                "MOE_NVLINK_TIMEOUT_S": str(TIMEOUT_S),
                **(environment or {}),
            },
            program=FAST_SERVER,
        )

    def __enter__(self) -> EpServer:
        try:
            self.server.wait_until_ready()
        except BaseException:
            self.server.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    def differing(self, numbers: range, concurrency: int) -> list[int]:
        """The requests among `numbers` whose tokens are not the one-rank server's."""
        answers = self.server.complete(
            [self.requests.prompts[n] for n in numbers],
            max_tokens=[self.requests.lengths[n] for n in numbers],
            concurrency=concurrency,
        )
        expected = [self.requests.expected[n] for n in numbers]
        pairs = zip(numbers, answers, expected, strict=True)
        return [number for number, answer, tokens in pairs if answer.token_ids != tokens]

    def stats(self, ep_size: int) -> list[dict[str, Any]]:
        """The counters of all workers, once they have come to rest."""
        paths = [self.stats_folder / f"rank{rank}.json" for rank in range(ep_size)]
        deadline = time.monotonic() + 60
        before: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            now = [json.loads(p.read_text("utf-8")) for p in paths if p.exists()]
            if len(now) == ep_size and now == before and len({s["rounds"] for s in now}) == 1:
                return now
            before = now
            time.sleep(1.5)
        raise AssertionError(f"the counters of {ep_size} workers did not settle: {before}")

    def check_traffic(self, ep_size: int, num_sequences: int, num_moe_layers: int) -> None:
        """Every token of the requests went through the exchange, in every MoE layer."""
        stats = self.stats(ep_size)
        assert [s["ep_rank"] for s in stats] == list(range(ep_size))
        assert stats[0]["rounds"] % num_moe_layers == 0
        tokens = sum(s["tokens"] for s in stats)
        assert tokens >= num_moe_layers * self.requests.num_tokens(num_sequences)
        for counters in stats:
            assert counters["rounds"] > 0
            assert 0 < counters["bytes_dispatched_remote"] < counters["bytes_dispatched"]
            assert 0 < counters["bytes_combined_remote"] < counters["bytes_combined"]


def our_files(stats: list[dict[str, Any]]) -> list[Path]:
    """Shared memory of these workers that still has a name; other tests may run beside this one."""
    patterns = [f"moe_nvlink-*-{counters['pid']}-*" for counters in stats]
    return [path for pattern in patterns for path in processes.SHARED_MEMORY.glob(pattern)]


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process that may be gone: vLLM ends workers when one of them fails."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_for_text(path: Path, text: str, timeout_s: float) -> bool:
    """Whether a server's log has the text, or gets it in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if text in path.read_text("utf-8", errors="replace"):
            return True
        time.sleep(0.5)
    return False


def write_plugin(folder: Path, name: str, module: ModuleType) -> Path:
    """An installed distribution, as far as vLLM looks for one: `register` of a module of ours."""
    about = folder / f"{name}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    shutil.copy(str(module.__file__), folder / f"{name}.py")
    return folder
