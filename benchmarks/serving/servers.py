"""Start servers with the same vLLM, flags, model and experts, and each its own exchange."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_nvlink_plugin.integration.demo.demo import EAGER, ONE_PROCESS, SERVE_FLAGS
from moe_nvlink_plugin.integration.demo.server import VllmServer

from . import gloo_plugin, plugins

OURS = "moe_nvlink"
#: A server without expert parallelism and without any plugin.
ONE_RANK = "one_rank"
#: Between two MoE layers a rank may wait for a machine that is busy starting another server.
TIMEOUT_S = 60
#: A start takes half a minute on an idle machine; other work may share the cores.
READY_S = 1200.0
#: Workers write their counters twice a second.
COUNTERS_PAUSE_S = 1.2
COUNTERS_LIMIT_S = 20.0


class NotExchangedError(Exception):
    """A server's MoE layers did not go through the exchange that it was started with."""


class ExpertParallelServer:
    """Data-parallel ranks whose experts are shared; our flag, and the exchange of `backend`.

    backend: OURS, as it is installed; the peer; ONE_RANK; or the folder of another checkout.
    """

    def __init__(
        self, backend: str, checkpoint: Path, folder: Path, max_num_seqs: int, ep_size: int
    ) -> None:
        """Start the server, without waiting. folder: for logs and counters."""
        self.name = backend
        self.ep_size = 1 if backend == ONE_RANK else ep_size
        stem = backend.strip("/").replace("/", "-")
        self._stats_folder = folder / f"stats-{stem}"
        environment = {
            "MOE_NVLINK_STATS_DIR": str(self._stats_folder),
            "MOE_NVLINK_TIMEOUT_S": str(TIMEOUT_S),
        }
        if backend == gloo_plugin.NAME:
            source = Path(gloo_plugin.__file__)
            plugin = plugins.install(source, "vllm.general_plugins", "register", folder / "plugin")
            environment["PYTHONPATH"] = str(plugin.resolve())
        elif backend not in (OURS, ONE_RANK):
            # Without PYTHONSAFEPATH, the folder in which the benchmark was started would precede.
            environment |= {"PYTHONPATH": str(Path(backend).resolve()), "PYTHONSAFEPATH": "1"}
        flags = (*SERVE_FLAGS, f"--data-parallel-size={ep_size}") if self.ep_size > 1 else ()
        self.server = VllmServer(
            model=checkpoint,
            name=stem,
            folder=folder,
            arguments=(*flags, EAGER, ONE_PROCESS, f"--max-num-seqs={max_num_seqs}"),
            environment=environment,
            with_plugins=self.ep_size > 1,
        )

    @property
    def pids(self) -> list[int]:
        return self.server.pids

    def wait_until_ready(self) -> float:
        """Return seconds since the start; raise ServerError as VllmServer does."""
        return self.server.wait_until_ready(timeout_s=READY_S)

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """Return greedy tokens for prompts that are sent at once, prompt i to rank i % ep_size."""

        def complete(rank: int) -> list[list[int]]:
            share = prompts[rank :: self.ep_size]
            answers = self.server.complete(share, max_tokens=length, rank=rank)
            return [answer.token_ids for answer in answers]

        found: list[list[int]] = [[] for _ in prompts]
        ranks = range(min(self.ep_size, len(prompts)))
        with ThreadPoolExecutor(self.ep_size) as pool:
            for rank, answers in zip(ranks, pool.map(complete, ranks), strict=True):
                found[rank :: self.ep_size] = answers
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
        """Return the counters; none of one rank.

        Raises:
            NotExchangedError: they are of another exchange, or of fewer than `tokens` tokens times
                layers.
        """
        if self.name == ONE_RANK:
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


def one_rank_tokens(
    checkpoint: Path, folder: Path, prompts: Sequence[Sequence[int]], length: int
) -> list[list[int]]:
    """Start an ordinary one-rank server without any plugin, return its answers, stop it."""
    server = VllmServer(
        model=checkpoint,
        name="one-rank",
        folder=folder,
        arguments=(EAGER, ONE_PROCESS),
        with_plugins=False,
    )
    with server:
        server.wait_until_ready(timeout_s=READY_S)
        answers = server.complete(prompts, max_tokens=length)
    return [answer.token_ids for answer in answers]
