"""Compare capacity policies of real vLLM servers: who runs in each iteration, and what users wait.

    python benchmarks/bench_scheduler.py --output_file benchmarks/results/DATE-cpu-scheduler.json
    python benchmarks/bench_scheduler.py --rates 2 4 --seconds 4 --rounds 1     # a minute or two

The servers differ in `--scheduler-cls` and in the options of our scheduler. One rank each: a
scheduler has nothing to do with expert parallelism. Nothing is reported unless all servers give the
same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.reporting import tables
from benchmarks.reporting.files import Result
from benchmarks.serving import measure, plugins, steps_plugin, streams
from benchmarks.serving.servers import READY_S
from moe_nvlink_plugin.integration.demo.demo import EAGER, ONE_PROCESS
from moe_nvlink_plugin.integration.demo.server import ServerError, VllmServer
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, write_checkpoint

TINY = MODELS["qwen3_moe"]
OURS = "--scheduler-cls=moe_nvlink_plugin.integration.vllm.scheduler.GuaranteedNoEvictScheduler"
#: Between the two: a request is admitted if half of its max_tokens fits.
HALF = '--additional-config={"moe_nvlink": {"capacity": {"reserve": 0.5}}}'
#: Policy -> vLLM's flags. The first is vLLM's own scheduler.
POLICIES: Mapping[str, Sequence[str]] = {
    "max_utilization": (),
    "guaranteed_no_evict": (OURS,),
    "reserve 0.5": (OURS, HALF),
}
BLOCK_SIZE = 32
#: More than any workload has at once: the KV cache is the only limit.
MAX_NUM_SEQS = 64
LIMIT_S = 300.0
SHOWS = (
    "streaming HTTP requests to vLLM servers of one rank; workers, API server and client share the "
    "cores of one machine; times by the client's clock"
)


class Workload(NamedTuple):
    """Requests that arrive at once. Lengths are drawn evenly between two limits."""

    title: str
    requests: int
    max_tokens: tuple[int, int]
    #: Tokens that end an answer: the scheduler cannot know how long it will be.
    stop_token_ids: tuple[int, ...] = ()
    prompt_tokens: tuple[int, int] = (16, 48)

    def draw(self, seed: str, arrivals: Sequence[float] | None = None) -> list[streams.Request]:
        """Return requests, equal for equal seeds; `arrivals` replace their number."""
        draw, vocab = random.Random(seed), range(TINY.vocab_size)
        return [
            streams.Request(
                draw.choices(vocab, k=draw.randint(*self.prompt_tokens)),
                draw.randint(*self.max_tokens),
                after_s,
                {"stop_token_ids": self.stop_token_ids},
            )
            for after_s in arrivals or [0.0] * self.requests
        ]


WORKLOADS = {
    "long": Workload("long answers", 24, (256, 400)),
    "early": Workload("answers that end early", 24, (400, 400), stop_token_ids=(0, 1)),
    # By --kv_blocks, all of them fit whatever they may still need.
    "light": Workload("no pressure", 4, (256, 400)),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a measurement; see parser()."""

    rates: tuple[float, ...]
    seconds: float
    rounds: int
    kv_blocks: int
    seed: int

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be measured."""
        if not all(0 < rate <= 1000 for rate in self.rates):
            raise ValueError(f"--rates {self.rates}: choose rates above 0 and up to 1000")
        for name, least in {"seconds": 1, "rounds": 1, "kv_blocks": 56}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} {getattr(self, name)} is less than {least}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--rates", type=float, nargs="+", default=[2, 4, 6, 8], help="requests per second")
    add("--seconds", type=float, default=5, help="for which requests arrive, at each rate")
    add("--rounds", type=int, default=3, help="of each wave and rate, the policies taking turns")
    add("--kv_blocks", type=int, default=64, help=f"of the KV cache, of {BLOCK_SIZE} tokens each")
    add("--seed", type=int, default=0)
    add("--output_file", type=Path, help="JSON file for the result")
    return made


class ScheduledServer:
    """A server of one rank, whose iterations are recorded."""

    def __init__(self, policy: str, checkpoint: Path, folder: Path, kv_blocks: int) -> None:
        """Start the server, without waiting."""
        self.name = policy
        self._steps = folder / f"{policy}.steps"
        plugin = plugins.install(
            Path(steps_plugin.__file__), "vllm.general_plugins", "register", folder / "plugin"
        )
        self.server = VllmServer(
            model=checkpoint,
            name=policy,
            folder=folder,
            arguments=(
                *(EAGER, ONE_PROCESS, "--enable-prefix-caching", f"--block-size={BLOCK_SIZE}"),
                # One more: vLLM keeps a block for itself.
                f"--num-gpu-blocks-override={kv_blocks + 1}",
                f"--max-num-seqs={MAX_NUM_SEQS}",
                *POLICIES[policy],
            ),
            environment={
                "PYTHONPATH": str(plugin.resolve()),
                steps_plugin.FILE_VARIABLE: str(self._steps),
                "VLLM_SERVER_DEV_MODE": "1",  # for /pause and /resume
            },
        )

    @property
    def pids(self) -> list[int]:
        return self.server.pids

    def run(self, requests: Sequence[streams.Request], *, at_once: bool) -> Run:
        """Answer requests, as a wave or as they arrive. The server must be idle.

        Raises:
            StreamError, TimeoutError: as streams.arriving.
            ServerError: the schedule of a wave did not begin with all of it.
        """
        before = len(self._read_steps())
        send = streams.wave if at_once else streams.arriving
        answers = send(self.server.port, requests, LIMIT_S)
        steps = self._read_steps()[before:]
        if at_once and steps[0]["known"] != len(requests):
            raise ServerError(
                f"{self.name}: {steps[0]['known']} of {len(requests)} requests were there in the "
                "first iteration; run again"
            )
        return Run(answers, steps)

    def _read_steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._steps.read_text("utf-8").splitlines()]


class Run(NamedTuple):
    """Answers of a server, and its iterations meanwhile."""

    answers: list[streams.Answer]
    steps: list[dict[str, Any]]

    def figures(self) -> dict[str, float]:
        """Return what is reported of one run; each is summarised over the rounds."""
        answers = self.answers
        gaps = pd.Series([1e3 * gap for answer in answers for gap in answer.gaps_s])
        largest = pd.Series([1e3 * max(answer.gaps_s, default=0.0) for answer in answers])
        first = pd.Series([1e3 * answer.first_s for answer in answers])
        whole = pd.Series([1e3 * (answer.arrived_s[-1] - answer.sent_s) for answer in answers])
        seconds = max(a.arrived_s[-1] for a in answers) - min(a.sent_s for a in answers)
        found = {"seconds": seconds, "iterations": len(self.steps)}
        found["preemptions"] = sum(len(step["evicted"]) for step in self.steps)
        pauses = [b[0] - a[1] - 1 for of in self.spans() for a, b in itertools.pairwise(of)]
        found["longest_pause"] = max(pauses, default=0)
        found["tokens_per_s"] = sum(len(answer.token_ids) for answer in answers) / seconds
        for name, each in (("first", first), ("gap", gaps), ("largest_gap", largest)):
            found |= {f"{name}_p50_ms": each.median(), f"{name}_p99_ms": each.quantile(0.99)}
        return found | {"whole_p50_ms": whole.median(), "largest_gap_max_ms": largest.max()}

    def spans(self) -> list[list[list[int]]]:
        """Return, for each request, the first and last iterations between which it always ran."""
        spans: list[list[list[int]]] = [[] for _ in self.answers]
        for iteration, step in enumerate(self.steps):
            for number in step["running"]:
                if not spans[number] or spans[number][-1][1] < iteration - 1:
                    spans[number].append([iteration, iteration])
                spans[number][-1][1] = iteration
        return spans


def run(options: Options, folder: Path) -> dict[str, Any]:
    """Return the result, from servers started in `folder`.

    Raises WrongTokensError, ServerError, StreamError or TimeoutError instead of a result.
    """
    machine = common.describe_run() | {"load_before": os.getloadavg()}
    checkpoint = write_checkpoint(folder / "model", TINY)
    with contextlib.ExitStack() as stop:
        servers = []
        for policy in POLICIES:
            servers.append(ScheduledServer(policy, checkpoint, folder, options.kv_blocks))
            stop.callback(servers[-1].server.stop)
        for server in servers:
            seconds = server.server.wait_until_ready(timeout_s=READY_S)
            say(f"{server.name}: ready after {seconds:.0f} s")
        began = time.perf_counter()
        waves, drawn = _waves(servers, options)
        rows = _loads(servers, options)
        seconds = time.perf_counter() - began
    return {
        "schema": 1,
        "kind": "scheduler",
        "machine": machine | {"load_after": os.getloadavg()},
        "shows": SHOWS,
        "options": dataclasses.asdict(options)
        | {"block_size": BLOCK_SIZE, "model": TINY.architecture},
        "workloads": {name: one._asdict() for name, one in WORKLOADS.items()},
        "measured_s": seconds,
        "waves": waves,
        "drawn": drawn,
        "rows": rows,
    }


def _waves(
    servers: Sequence[ScheduledServer], options: Options
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for each workload and policy, and what plots draw of the last round."""
    rows, drawn = [], dict[str, Any]()
    for name, workload in WORKLOADS.items():
        requests = workload.draw(f"{options.seed} {name}")
        rounds = range(-1, options.rounds)  # the first for warmth alone
        asked = functools.partial(_whole, requests)
        runs = _in_turns(servers, rounds, name, asked)
        drawn[name] = {}
        for policy, of in runs.items():
            same = all(one.steps == of[0].steps for one in of)
            last = of[-1]
            rows.append({"workload": name, "policy": policy, "schedule_repeats": same, **_row(of)})
            drawn[name][policy] = {
                "running": [len(step["running"]) for step in last.steps],
                "kv_share": [round(step["kv_share"], 4) for step in last.steps],
                "spans": last.spans(),
            }
    return rows, drawn


def _whole(requests: list[streams.Request], _round: int) -> tuple[list[streams.Request], bool]:
    return requests, True


def _loads(servers: Sequence[ScheduledServer], options: Options) -> list[dict[str, Any]]:
    """Return a row for each rate and policy: long answers, which arrive independently."""
    rows = []
    for rate in options.rates:

        def asked(number: int, rate: float = rate) -> tuple[list[streams.Request], bool]:
            seed = f"{options.seed} {rate} {number}"
            arrivals = poisson(random.Random(seed), rate, options.seconds)
            return WORKLOADS["long"].draw(seed, arrivals), False

        runs = _in_turns(servers, range(options.rounds), f"{rate:g} requests/s", asked)
        rows += [{"rate": rate, "policy": policy, **_row(of)} for policy, of in runs.items()]
    return rows


def poisson(draw: random.Random, rate: float, seconds: float) -> list[float]:
    """Return arrival times of independent users; the first comes at 0."""
    times = [0.0]
    while (at := times[-1] + draw.expovariate(rate)) < seconds:
        times.append(at)
    return times


def _row(runs: Sequence[Run]) -> dict[str, Any]:
    figures = pd.DataFrame([one.figures() for one in runs])
    return {
        "requests": sum(len(one.answers) for one in runs),
        "most_running": max(len(step["running"]) for one in runs for step in one.steps),
        "kv_share": statistics.fmean(step["kv_share"] for one in runs for step in one.steps),
        **{name: measure.spread(figures[name]) for name in figures},
    }


def _in_turns(
    servers: Sequence[ScheduledServer],
    rounds: range,
    what: str,
    asked: Callable[[int], tuple[list[streams.Request], bool]],
) -> dict[str, list[Run]]:
    """Return the runs of each policy, without those of rounds below 0.

    Raises:
        WrongTokensError: a policy changes a token.
    """
    runs: dict[str, list[Run]] = {server.name: [] for server in servers}
    for number in rounds:
        requests, at_once = asked(number)
        expected: list[list[int]] = []
        for server in common.order_of(list(servers), number):
            for other in servers:
                measure.wait_until_idle(other)
            done = server.run(requests, at_once=at_once)
            tokens = [answer.token_ids for answer in done.answers]
            measure.check(server.name, tokens, expected or tokens)
            expected = tokens
            runs[server.name] += [done] if number >= 0 else []
            shown = done.figures()
            say(
                f"{what}, {server.name}: {shown['seconds']:.1f} s, {shown['preemptions']:.0f} "
                f"preemptions, largest gap {shown['largest_gap_max_ms']:.0f} ms"
            )
    return runs


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    made = parser()
    given = made.parse_args(arguments)
    try:
        options = common.options_from(Options, given)
    except ValueError as error:
        made.error(str(error))
    with tempfile.TemporaryDirectory(prefix="bench-scheduler-") as folder:
        try:
            result = run(options, Path(folder))
        except (measure.WrongTokensError, ServerError, streams.StreamError, TimeoutError) as error:
            print(f"nothing was measured: {error}", file=sys.stderr)
            return 1
    print(tables.scheduler(Result(given.output_file or Path("scheduler"), result)))
    if given.output_file is not None:
        common.write_json(given.output_file, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
