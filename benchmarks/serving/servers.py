"""Start servers with the same vLLM, model and experts, each over its ranks in its own way."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from moe_nvlink_plugin.integration.demo.demo import EAGER, ONE_PROCESS, SERVE_FLAGS
from moe_nvlink_plugin.integration.demo.server import ServerError, VllmServer

from . import gloo_plugin, plugins

OURS = "moe_nvlink"
#: Ours with pairs of ranks that divide attention, and half as many that divide requests.
OURS_IN_PAIRS = "moe_nvlink_tp2"
#: A server without expert parallelism and without any plugin.
ONE_RANK = "one_rank"
#: vLLM's --tensor-parallel-size, without any plugin: each rank has a part of every expert.
TENSOR_PARALLEL = "tensor_parallel"
#: Servers without our flag.
PLAIN = (ONE_RANK, TENSOR_PARALLEL)
#: Of all ranks of a server together, so that every server holds as many tokens.
KV_CACHE_BYTES = 256 << 20
#: Between two MoE layers a rank may wait for a machine that is busy starting another server.
TIMEOUT_S = 60
#: A start takes half a minute on an idle machine; other work may share the cores.
READY_S = 1200.0
#: A wave of the largest model on few cores takes minutes.
ANSWER_S = 900.0
#: Workers write their counters twice a second.
COUNTERS_PAUSE_S = 1.2
COUNTERS_LIMIT_S = 20.0


class NotExchangedError(Exception):
    """A server's MoE layers did not go through the exchange that it was started with."""


def tp_size_of(backend: str, num_ranks: int) -> int:
    """Return how many of a server's ranks have the same requests, and a part of each product."""
    return {TENSOR_PARALLEL: num_ranks, OURS_IN_PAIRS: 2}.get(backend, 1)


def arguments_of(backend: str, num_ranks: int, num_requests: int, dtype: str) -> tuple[str, ...]:
    """Return vLLM's flags of a server of so many ranks, to which so many requests are sent at once.

    Data-parallel ranks divide the requests, tensor-parallel ones have all of them.
    """
    tp_size = tp_size_of(backend, num_ranks)
    dp_size = num_ranks // tp_size
    each = -(-num_requests // dp_size)
    common = (
        *(f"--dtype={dtype}", EAGER, f"--max-num-seqs={each}"),
        f"--kv-cache-memory-bytes={KV_CACHE_BYTES // num_ranks}",
    )
    exchange = () if backend in PLAIN else (*SERVE_FLAGS, f"--data-parallel-size={dp_size}")
    # vLLM has no tensor-parallel ranks in one process.
    ranks = (ONE_PROCESS,) if tp_size == 1 else (f"--tensor-parallel-size={tp_size}",)
    return (*exchange, *common, *ranks)


def threads_of(num_ranks: int) -> int:
    """Return the compute threads of each rank: ranks divide the cores of this process."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


class ExpertParallelServer:
    """Data-parallel ranks whose experts are shared, with the exchange of `backend`; or a PLAIN one.

    backend: OURS or OURS_IN_PAIRS, as it is installed; the peer; one of PLAIN; or the folder of
    another checkout.
    """

    def __init__(
        self,
        backend: str,
        checkpoint: Path,
        folder: Path,
        num_requests: int,
        num_ranks: int,
        dtype: str = "float32",
    ) -> None:
        """Start the server, without waiting. folder: for logs and counters.

        num_requests: that are sent at once. num_ranks: ignored for ONE_RANK.
        """
        self.name = backend
        self.num_ranks = 1 if backend == ONE_RANK else num_ranks
        self.ep_size = 1 if backend in PLAIN else num_ranks
        self.dp_size = self.num_ranks // tp_size_of(backend, self.num_ranks)
        self.threads = threads_of(self.num_ranks)
        stem = backend.strip("/").replace("/", "-")
        self._stats_folder = folder / f"stats-{stem}"
        environment = {
            "MOE_NVLINK_STATS_DIR": str(self._stats_folder),
            "MOE_NVLINK_TIMEOUT_S": str(TIMEOUT_S),
            "OMP_NUM_THREADS": str(self.threads),
        }
        if backend == gloo_plugin.NAME:
            source = Path(gloo_plugin.__file__)
            plugin = plugins.install(source, "vllm.general_plugins", "register", folder / "plugin")
            environment["PYTHONPATH"] = str(plugin.resolve())
        elif backend not in (OURS, OURS_IN_PAIRS, *PLAIN):
            # Without PYTHONSAFEPATH, the folder in which the benchmark was started would precede.
            environment |= {"PYTHONPATH": str(Path(backend).resolve()), "PYTHONSAFEPATH": "1"}
        self.server = VllmServer(
            model=checkpoint,
            name=stem,
            folder=folder,
            arguments=arguments_of(backend, self.num_ranks, num_requests, dtype),
            environment=environment,
            with_plugins=backend not in PLAIN,
        )

    @property
    def pids(self) -> list[int]:
        return self.server.pids

    def wait_until_ready(self) -> float:
        """Return seconds since the start; raise ServerError as VllmServer does."""
        return self.server.wait_until_ready(timeout_s=READY_S)

    def memory_bytes(self) -> list[int]:
        """Return the memory of each rank's worker: its PSS, which counts shared pages in parts.

        Raises:
            ServerError: not every rank has a worker.
        """
        found = workers_among(self.pids)
        if len(found) != self.num_ranks:
            raise ServerError(f"{self.name}: {len(found)} of {self.num_ranks} workers are there")
        return [int(worker.memory_full_info().pss) for worker in found]

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """Return greedy tokens for prompts that are sent at once, prompt i to share i % dp_size."""

        def complete(rank: int) -> list[list[int]]:
            share = prompts[rank :: self.dp_size]
            answers = self.server.complete(share, max_tokens=length, rank=rank, timeout_s=ANSWER_S)
            return [answer.token_ids for answer in answers]

        found: list[list[int]] = [[] for _ in prompts]
        ranks = range(min(self.dp_size, len(prompts)))
        with ThreadPoolExecutor(self.dp_size) as pool:
            for rank, answers in zip(ranks, pool.map(complete, ranks), strict=True):
                found[rank :: self.dp_size] = answers
        return found

    def counters(self) -> list[dict[str, Any]]:
        """Return what each rank's exchange has counted, once the counts have come to rest.

        Raises:
            NotExchangedError: ranks write no counters.
        """
        deadline = time.monotonic() + COUNTERS_LIMIT_S
        before: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            paths = sorted(self._stats_folder.glob("rank*.json"))
            found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            if len(found) == self.ep_size and found == before:
                return found
            before = found
            time.sleep(COUNTERS_PAUSE_S)
        raise NotExchangedError(f"{self.name}: {len(before)} of {self.ep_size} ranks count rounds")

    def check_exchanged(self, tokens: int) -> list[dict[str, Any]]:
        """Return the counters; none of a server without our flag.

        Raises:
            NotExchangedError: they are of another exchange, or of fewer than `tokens` tokens times
                layers.
        """
        if self.name in PLAIN:
            return []
        ranks = self.counters()
        expected = self.name if self.name == gloo_plugin.NAME else None
        seen = {rank.get("exchange") for rank in ranks}
        if seen != {expected}:
            raise NotExchangedError(f"{self.name}: the workers' exchange was {seen}")
        exchanged = sum(rank["tokens"] for rank in ranks)
        if exchanged < tokens:
            raise NotExchangedError(
                f"{self.name}: its exchange saw {exchanged} tokens, its MoE layers {tokens}"
            )
        return ranks

    def stop(self) -> None:
        """End the server's processes; idempotent."""
        self.server.stop()


def workers_among(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the processes that compute, in the order of their titles: workers, or lone engines."""
    titles: dict[str, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            titles[" ".join(process.cmdline())] = process
    workers = sorted(title for title in titles if "::Worker" in title)
    engines = sorted(title for title in titles if "::EngineCore" in title)
    return [titles[title] for title in workers or engines]


def one_rank_tokens(
    checkpoint: Path,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    length: int,
    dtype: str = "float32",
) -> list[list[int]]:
    """Start an ordinary one-rank server without any plugin, return its answers, stop it."""
    server = ExpertParallelServer(ONE_RANK, checkpoint, folder, len(prompts), 1, dtype)
    try:
        server.wait_until_ready()
        return server.answer(prompts, length)
    finally:
        server.stop()
