"""Start servers with the same vLLM, flags, model and experts, and each its own exchange."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_nvlink_plugin.integration.demo.demo import EAGER, EP_SIZE, SERVE_FLAGS
from moe_nvlink_plugin.integration.demo.server import VllmServer

from . import gloo_plugin

OURS = "moe_nvlink"
BACKENDS = (OURS, gloo_plugin.NAME)
#: Between two MoE layers a rank may wait for a machine that is busy starting another server.
TIMEOUT_S = 60
#: Workers write their counters twice a second.
COUNTERS_PAUSE_S = 1.2
COUNTERS_LIMIT_S = 20.0


class NotExchangedError(Exception):
    """A server's MoE layers did not go through the exchange that it was started with."""


class ExpertParallelServer:
    """Two data-parallel ranks whose experts are shared; our flag, and the exchange of `backend`."""

    def __init__(self, backend: str, checkpoint: Path, folder: Path, max_num_seqs: int) -> None:
        """Start the server, without waiting. folder: for logs and counters."""
        self.name = backend
        self._stats_folder = folder / f"stats-{backend}"
        environment = {
            "MOE_NVLINK_STATS_DIR": str(self._stats_folder),
            "MOE_NVLINK_TIMEOUT_S": str(TIMEOUT_S),
        }
        if backend != OURS:  # ours is measured as it is installed
            environment["PYTHONPATH"] = str(gloo_plugin.install(folder / "plugin").resolve())
        self.server = VllmServer(
            model=checkpoint,
            name=backend,
            folder=folder,
            arguments=(*SERVE_FLAGS, EAGER, f"--max-num-seqs={max_num_seqs}"),
            environment=environment,
        )

    @property
    def pids(self) -> list[int]:
        return self.server.pids

    def wait_until_ready(self) -> float:
        """Return seconds since the start; raise ServerError as VllmServer does."""
        return self.server.wait_until_ready()

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """Return greedy tokens for prompts that are sent at once, prompt i to rank i % EP_SIZE."""

        def complete(rank: int) -> list[list[int]]:
            answers = self.server.complete(prompts[rank::EP_SIZE], max_tokens=length, rank=rank)
            return [answer.token_ids for answer in answers]

        found: list[list[int]] = [[] for _ in prompts]
        ranks = range(min(EP_SIZE, len(prompts)))
        with ThreadPoolExecutor(EP_SIZE) as pool:
            for rank, answers in zip(ranks, pool.map(complete, ranks), strict=True):
                found[rank::EP_SIZE] = answers
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
            if len(found) == EP_SIZE and found == before:
                return found
            before = found
            time.sleep(COUNTERS_PAUSE_S)
        raise NotExchangedError(f"{self.name}: {len(before)} of {EP_SIZE} ranks count rounds")

    def check_exchanged(self, tokens: int) -> list[dict[str, Any]]:
        """Return the counters.

        Raises:
            NotExchangedError: they are of another exchange, or of fewer than `tokens` tokens times
                layers.
        """
        ranks = self.counters()
        expected = None if self.name == OURS else self.name
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
        arguments=(EAGER,),
        with_plugins=False,
    )
    with server:
        server.wait_until_ready()
        answers = server.complete(prompts, max_tokens=length)
    return [answer.token_ids for answer in answers]
