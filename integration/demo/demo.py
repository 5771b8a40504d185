"""The demonstration: expert parallelism over two ranks through our exchange, against one rank.

It starts a real vLLM or SGLang server with our flag, sends it requests, does the same with an
ordinary one-rank server, and shows the answers side by side with what our exchange moved.
What quantised rows would save is counted afterwards, in exchanges of a large model's width.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from . import death, formats, report
from .client import ask, make_requests, wait_for
from .server import ServerError, Vllm33Server, VllmServer, stop_all
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
GOOD = "every answer equals the one-rank server's, and every MoE layer used our exchange."
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


def run(folder: Path, architecture: str, num_requests: int, framework: str = "vllm") -> list[str]:
    """Run the demonstration in `folder` and return its failures, one sentence each."""
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
    return [*found, *report.formats_failures(by_recipe)]


def conclude(failures: Sequence[str], folder: Path, good: str) -> int:
    """Print the verdict and return the exit code."""
    if failures:
        print("\nFAILED: " + " ".join(failures))
        print(f"The servers' logs are in {folder}.")
        return 1
    print(f"\nOK: {good}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=main.__doc__)
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), default="vllm")
    parser.add_argument("--architecture", choices=sorted(MODELS), default="qwen3_moe")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="logs and checkpoint")
    parser.add_argument(
        "--kill",
        action="store_true",
        help="kill a rank of three; vllm only. Ranks wait 2 s for one another, "
        "which may be too few on a busy machine: MOE_NVLINK_TIMEOUT_S sets another limit",
    )
    parser.add_argument(
        "--replicas", action="store_true", help="with --kill: the others have its experts too"
    )
    options = parser.parse_args(arguments)
    if options.kill and options.framework != "vllm":
        parser.error(f"--kill needs --framework vllm, not {options.framework}: no other is tried")
    if options.replicas and not options.kill:
        parser.error("--replicas needs --kill: it is about the experts of the rank that dies")
    _interrupt_on_signals()
    started = time.monotonic()
    given = (options.folder, options.architecture, options.requests)
    try:
        if options.kill:
            vllm = FRAMEWORKS["vllm"]
            found = death.run(*given, vllm.server, vllm.always, options.replicas)
            good = death.GOOD[options.replicas]
        else:
            found, good = run(*given, options.framework), GOOD
        code = conclude(found, options.folder, good)
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
