"""The demonstration of a death: a rank is killed, and `moe-nvlink watch` has the others go on.

Three ranks have a vLLM server each, with fault tolerance. The last is killed while clients ask.
Nobody but the watcher tells the others to go on without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

from moe_nvlink_plugin import env

from . import report
from .client import ask, make_requests, wait_for
from .server import Server, ServerError, free_port
from .tiny_checkpoint import MODELS, write_checkpoint

EP_SIZE = 3
#: The rank that is killed. The death of rank 0 would end all.
VICTIM = EP_SIZE - 1
FLAGS: Sequence[str] = (
    *("--data-parallel-size", str(EP_SIZE), "--enable-expert-parallel"),
    *("--all2all-backend", "moe_nvlink", "--enable-fault-tolerance"),
)
#: For how long ranks wait for one another in the exchange, if the variable does not say.
TIMEOUT_VARIABLE, TIMEOUT_S = "MOE_NVLINK_TIMEOUT_S", 2.0
#: As long as vLLM's engines wait to be told what to do.
RECOVERY_S = 120.0
#: The verdict, without replicas and with them.
GOOD = {
    False: "the survivors answer again, each with the same tokens.",
    True: "the survivors answer again, with the tokens of before the death.",
}


class Watcher:
    """`moe-nvlink watch --act` as a child process, which shows what it says; a context manager."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._seen, self._is_watching = threading.Event(), False
        # It ends by itself when rank 0 has gone, so also when this process has been killed.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moe_nvlink_plugin", "watch", "--act", *urls],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._show, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def wait_until_it_watches(self) -> None:
        """Return when it has found all servers healthy; raises ServerError if it has ended."""
        self._seen.wait()
        if not self._is_watching:
            raise ServerError("moe-nvlink watch has ended, for the reason above")

    def _show(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"    watch: {line.rstrip()}", flush=True)
            if line.endswith(f"rank {VICTIM} is healthy\n"):  # the last one that it looks at
                self._is_watching = True
                self._seen.set()
        self._seen.set()


class Client(threading.Thread):
    """Asks a server for one token after the other, whatever happens to the ranks."""

    def __init__(self, server: Server, prompt: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.cut = 0
        self._server, self._prompt = server, prompt
        #: When the newest request that was answered was sent, and when its token came.
        self._newest = (0.0, 0.0)
        self._news = threading.Condition()
        self._ended = False
        self.start()

    def run(self) -> None:
        """Ask until `end` is called."""
        while not self._ended:
            asked = time.monotonic()
            try:
                self._server.complete([self._prompt], max_tokens=1, timeout_s=RECOVERY_S)
            except ServerError:  # vLLM has cut it off, with HTTP 200
                self.cut += 1
                time.sleep(0.1)
                continue
            with self._news:
                self._newest = (asked, time.monotonic())
                self._news.notify_all()

    def first_token(self, since: float) -> float:
        """When the first token came that was asked for since then; raises ServerError."""
        with self._news:
            if not self._news.wait_for(lambda: self._newest[0] >= since, timeout=RECOVERY_S):
                raise ServerError(
                    f"the {self._server.name} server gave no token within {RECOVERY_S:.0f} s"
                )
            return self._newest[1]

    def end(self) -> None:
        """Let it ask no more."""
        self._ended = True


def failures(
    before: Sequence[report.Answers],
    after: Sequence[report.Answers],
    statuses: Sequence[Mapping[str, Any]],
    replicas: bool,
) -> list[str]:
    """Why the demonstration failed, one sentence each; all by rank, and the survivors' statuses."""
    found = []
    tokens = before[0].token_ids
    if any(answers.token_ids != tokens for answers in before):
        found.append("Before the death the ranks gave different tokens.")
    if any(answers.token_ids != after[0].token_ids for answers in after):
        found.append("After the death the survivors gave different tokens.")
    for rank, status in enumerate(statuses):
        if status.get("dead_ranks") != [VICTIM]:
            found.append(f"Rank {rank} does not go on without rank {VICTIM}: {status}.")
        elif replicas and status["lost_experts"]:
            found.append(f"Rank {rank} has lost experts in spite of replicas: {status}.")
    if replicas and after[0].token_ids != tokens:
        found.append("The tokens after the death are not those before it.")
    return found


def run(
    folder: Path,
    architecture: str,
    num_requests: int,
    server: Callable[..., Server],
    always: Sequence[str],
    replicas: bool,
) -> list[str]:
    """Run the demonstration in `folder` and return its failures.

    server, always: how a vLLM server starts, and what each is told.
    replicas: whether the survivors also have the experts of the rank that dies.
    """
    checkpoint = write_checkpoint(folder / architecture, architecture)
    model = MODELS[architecture]
    requests = make_requests(num_requests, model.vocab_size)
    flags = [*FLAGS]
    if replicas:  # The last rank then holds nothing but vLLM's redundant experts.
        redundant = f'{{"num_redundant_experts": {model.num_experts // (EP_SIZE - 1)}}}'
        flags += ["--enable-eplb", "--eplb-config", redundant]
    timeout_s = f"{env.timeout_s(TIMEOUT_S):g}"

    print(f"1. vLLM over {EP_SIZE} ranks, one server each: {' '.join(flags)}", flush=True)
    meeting = (f"--data-parallel-rpc-port={free_port()}", "--data-parallel-address=127.0.0.1")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                server(
                    model=checkpoint,
                    name=f"rank {rank}",
                    folder=folder,
                    arguments=(*flags, *meeting, f"--data-parallel-rank={rank}", *always),
                    environment={TIMEOUT_VARIABLE: timeout_s},
                )
            )
            for rank in range(EP_SIZE)
        ]
        for one in servers:
            wait_for(one)
        before = [ask(one, requests) for one in servers]
        print("2. moe-nvlink watch --act, with the URLs of these servers")
        watcher = stack.enter_context(Watcher([one.url for one in servers]))
        watcher.wait_until_it_watches()
        alive = servers[:VICTIM]
        clients = [Client(one, requests.prompts[0]) for one in alive]
        for client in clients:
            stack.callback(client.end)
            client.first_token(since=0.0)
        print(f"3. kill -9 of rank {VICTIM}, all of its server's processes", flush=True)
        killed = time.monotonic()
        for pid in servers[VICTIM].pids:
            with suppress(ProcessLookupError):  # it ends with its parent
                os.kill(pid, signal.SIGKILL)
        seconds = [client.first_token(since=killed) - killed for client in clients]
        for rank, client in enumerate(clients):
            client.end()
            print(
                f"  rank {rank}: {client.cut} request(s) cut off; the first token came "
                f"{seconds[rank]:.1f} s after the kill ({TIMEOUT_VARIABLE}={timeout_s})"
            )
        statuses = [one.get("/fault_tolerance/status")["engines"][0] for one in alive]
        print(f"  rank 0 says of itself: {statuses[0]}")
        after = [ask(one, requests) for one in alive]

    print(f"\nTokens of {architecture} after the death (random weights, greedy, float32)\n")
    print(report.answers_table(requests.prompts, after[0], after[1], ("rank 0", "rank 1")))
    pairs = zip(after[0].token_ids, before[0].token_ids, strict=True)
    different = sum(one != other for one, other in pairs)
    print(f"\n  {different} of {num_requests} answers differ from those before the death.")
    return failures(before, after, statuses, replicas)
