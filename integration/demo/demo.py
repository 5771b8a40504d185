"""The demonstration: expert parallelism over two ranks through our exchange, against one rank.

It starts a real vLLM or SGLang server with our flag, sends it requests, does the same with an
ordinary one-rank server, and shows the answers side by side with what our exchange moved.
What quantised rows would save is counted afterwards, in exchanges of a large model's width.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from . import formats, report
from .server import Server, ServerError, Vllm33Server, VllmServer, stop_all
from .sglang_server import SglangServer
from .tiny_checkpoint import MODELS, write_checkpoint

EP_SIZE = 2
#: vLLM's flags.
SERVE_FLAGS: Sequence[str] = (
    *("--data-parallel-size", str(EP_SIZE), "--enable-expert-parallel"),
    *("--all2all-backend", "moe_nvlink"),
)
#: Skips torch.compile: the demonstration is about the exchange, and start-up is what one waits for.
EAGER = "--enforce-eager"
#: A rank's engine and its worker are one process. As two, each polls while the other works, and
#: takes time from the other rank where ranks share a few cores. It also starts faster. vLLM's own
#: choice on CPUs is two, so that it can bind the worker's threads; here nothing is bound.
ONE_PROCESS = "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor"
#: SGLang's five processes import for a minute on two idle cores, and other work may share them.
READY_S = 600.0
EXIT_INTERRUPTED = 130


class Framework(NamedTuple):
    """A serving framework, and what the servers of the demonstration are told."""

    name: str
    server: type[VllmServer] | type[SglangServer]
    over_ranks: Sequence[str]
    always: Sequence[str] = ()


FRAMEWORKS: dict[str, Framework] = {
    "vllm": Framework(
        name="vLLM",
        server=VllmServer,
        over_ranks=SERVE_FLAGS,
        always=(EAGER, ONE_PROCESS),
    ),
    "vllm33": Framework(
        name="vLLM 0.33, V2 model runner",
        server=Vllm33Server,
        over_ranks=SERVE_FLAGS,
        always=(EAGER, ONE_PROCESS),
    ),
    "sglang": Framework(
        name="SGLang",
        server=SglangServer,
        over_ranks=("--tp-size", str(EP_SIZE), "--moe-a2a-backend", "moe_nvlink"),
    ),
}


class Requests(NamedTuple):
    """Prompts and the length of each answer, all ragged."""

    prompts: list[list[int]]
    max_tokens: list[int]


def make_requests(count: int, vocab_size: int, seed: int = 0) -> Requests:
    """`count` random requests: prompts of 1..24 tokens, answers of 16..48."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(vocab_size), k=draw.randint(1, 24)) for _ in range(count)]
    return Requests(prompts, [draw.randint(16, 48) for _ in prompts])


class ProgressLine:
    """Shows that a wait goes on: one line rewritten on a terminal, a line every 10 s elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stdout.isatty()
        self._shown_s = -1e9

    def __call__(self, elapsed_s: float, log_line: str) -> None:
        """Show the seconds and what the server said last."""
        text = f"  {self._what}: {elapsed_s:3.0f} s  {_message(log_line)}"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            sys.stdout.write(f"\r\033[K{text[: columns - 1]}")
            sys.stdout.flush()
        elif elapsed_s - self._shown_s >= 10:
            self._shown_s = elapsed_s
            print(text, flush=True)

    def close(self, text: str) -> None:
        """Replace the line by its result."""
        print(f"\r\033[K  {text}" if self._terminal else f"  {text}", flush=True)


def _message(log_line: str) -> str:
    """A line of a server's log without process, time and source line."""
    head, found, message = log_line.partition("] ")
    return message.strip() if found and "[" in head else log_line.strip()


def wait_for(server: Server) -> None:
    """Wait until the server answers, and show that time passes."""
    progress = ProgressLine(f"starting the {server.name} server")
    ready_s = server.wait_until_ready(timeout_s=READY_S, progress=progress)
    progress.close(f"the {server.name} server is ready after {ready_s:.0f} s")


def ask(server: Server, requests: Requests) -> report.Answers:
    """Send every request at once."""
    # The first request of a server pays for what later ones do not; keep it out of the timing.
    server.complete([[1]], max_tokens=2)
    started = time.monotonic()
    completions = server.complete(requests.prompts, max_tokens=requests.max_tokens)
    seconds = time.monotonic() - started
    answers = report.Answers([completion.token_ids for completion in completions], seconds)
    rate = f"{answers.tokens_per_s:.0f} tokens/s"
    print(f"  {server.name} answered {len(completions)} concurrent requests, {rate}", flush=True)
    return answers


def run(folder: Path, architecture: str, num_requests: int, framework: str = "vllm") -> int:
    """Run the demonstration in `folder` and return the exit code: 0 if all is as it should be."""
    checkpoint = write_checkpoint(folder / architecture, architecture)
    model, serving = MODELS[architecture], FRAMEWORKS[framework]
    requests = make_requests(num_requests, model.vocab_size)
    stats_folder = folder / "stats"
    shutil.rmtree(stats_folder, ignore_errors=True)
    stats_folder.mkdir(parents=True)

    print(f"1. {serving.name} over {EP_SIZE} ranks: {' '.join(serving.over_ranks)}")
    print(f"2. {serving.name} on one rank, without any plugin", flush=True)
    # Both start at once, for starting is imports and waiting; nobody is asked before both are up.
    with (
        serving.server(
            model=checkpoint,
            name="moe_nvlink",
            folder=folder,
            arguments=(*serving.over_ranks, *serving.always),
            environment={"MOE_NVLINK_STATS_DIR": str(stats_folder.resolve())},
        ) as server,
        serving.server(
            model=checkpoint,
            name="one-rank",
            folder=folder,
            arguments=serving.always,
            with_plugins=False,
        ) as other,
    ):
        for one in (other, server):
            wait_for(one)
        ours = ask(server, requests)
        ranks = report.wait_for_stats(stats_folder)
        theirs = ask(other, requests)

    print(f"\nTokens of {architecture} (random weights, greedy, float32)\n")
    print(report.answers_table(requests.prompts, ours, theirs))
    print("\nWhat the exchange moved between ranks, and what collectives would have moved\n")
    print(report.exchange_table(ranks))
    print(
        "\n  A unique destination is one token put to one rank, however many experts it has there."
    )
    by_recipe = formats.measure()
    print(f"\nWhat dispatch moves by recipe, at hidden size {formats.HIDDEN_SIZE}\n")
    print(report.formats_table(by_recipe))
    print(
        f"\n  Bytes per token: a row with its scales; its ids and weights, {by_recipe[0].choices} "
        "bytes, are in the last column."
    )
    found = report.failures(
        requests.prompts,
        ours,
        theirs,
        ranks,
        ep_size=EP_SIZE,
        num_moe_layers=model.num_layers - model.num_dense_layers,
    )
    return conclude([*found, *report.formats_failures(by_recipe)], folder)


def conclude(failures: Sequence[str], folder: Path) -> int:
    """Print the verdict and return the exit code."""
    if failures:
        print("\nFAILED: " + " ".join(failures))
        print(f"The servers' logs are in {folder}.")
        return 1
    print("\nOK: every answer equals the one-rank server's, and every MoE layer used our exchange.")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=main.__doc__)
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), default="vllm")
    parser.add_argument("--architecture", choices=sorted(MODELS), default="qwen3_moe")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="logs and checkpoint")
    options = parser.parse_args(arguments)
    _interrupt_on_signals()
    started = time.monotonic()
    try:
        code = run(options.folder, options.architecture, options.requests, options.framework)
    except ServerError as error:
        print(f"\nFAILED: {error}")
        code = 1
    except KeyboardInterrupt:
        # It may have hit between a server's start and the block that stops it.
        stop_all()
        print("\ninterrupted; the servers are stopped and left nothing behind")
        code = EXIT_INTERRUPTED
    print(f"({time.monotonic() - started:.0f} s)")
    return code


def _interrupt_on_signals() -> None:
    # SIGINT too: a program started in a script's background inherits it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    # nohup means what it says.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
