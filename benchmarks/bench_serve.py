"""Measure decode throughput of the demonstration's server over two ranks: ours against gloo.

    python benchmarks/bench_serve.py --output_file benchmarks/results/DATE-cpu-serve.json

Both servers have the same vLLM, flags, model and experts, and enter by the same seams of ours; only
the exchange differs. Nothing is reported unless every token equals the one-rank server's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.reporting import tables
from benchmarks.reporting.files import Result
from benchmarks.serving import measure
from benchmarks.serving.servers import (
    BACKENDS,
    OURS,
    ExpertParallelServer,
    NotExchangedError,
    one_rank_tokens,
)
from moe_nvlink_plugin.integration.demo.demo import EP_SIZE
from moe_nvlink_plugin.integration.demo.server import ServerError
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, write_checkpoint

#: The demonstration's default.
MODEL = MODELS["qwen3_moe"]
#: Of a prompt. Short: the first token's step reads it, and decoding is what is measured.
PROMPT_TOKENS = 4
#: VllmServer's --max-model-len.
MOST_TOKENS = 512
SHOWS = (
    "HTTP requests to vLLM servers whose two workers, API server and client share the cores of "
    "one machine; tokens per second from sending a wave of requests to its last answer, the first "
    "token's step included"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a measurement; see parser()."""

    concurrency: tuple[int, ...]
    tokens: int
    rounds: int
    seed: int

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be measured."""
        limits = {"tokens": MOST_TOKENS - PROMPT_TOKENS, "rounds": 1000}
        for name, limit in limits.items():
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(f"--{name} {getattr(self, name)} is not between 1 and {limit}")
        if not all(1 <= count <= 256 for count in self.concurrency):
            raise ValueError(f"--concurrency {self.concurrency} is not between 1 and 256")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    add("--tokens", type=int, default=96, help="of each answer")
    add("--rounds", type=int, default=9, help="waves per server and concurrency")
    add("--seed", type=int, default=0)
    add("--output_file", type=Path, help="JSON file for the result")
    return made


def run(options: Options, folder: Path) -> dict[str, Any]:
    """Return the result, from servers started in `folder`.

    Raises WrongTokensError, NotExchangedError or ServerError instead of a result.
    """
    checkpoint = write_checkpoint(folder / "model", MODEL)
    draw = random.Random(options.seed)
    prompts = [
        draw.choices(range(MODEL.vocab_size), k=PROMPT_TOKENS)
        for _ in range(max(options.concurrency))
    ]
    say("one rank, for the tokens to expect")
    expected = one_rank_tokens(checkpoint, folder, prompts, options.tokens)
    with contextlib.ExitStack() as stop:
        servers = [_start(name, options, checkpoint, folder, stop) for name in BACKENDS]
        began = time.perf_counter()
        waves = measure.interleave(
            servers, measure.Asked(prompts, expected), options.concurrency, options.rounds, say
        )
        seconds = time.perf_counter() - began
        moved = {server.name: _check_exchanged(server, waves, options) for server in servers}
    return {
        "schema": 1,
        "kind": "serve",
        "machine": common.describe_run(),
        "shows": SHOWS,
        "options": dataclasses.asdict(options)
        | {"layers": MODEL.num_layers, "hidden_size": MODEL.hidden_size}
        | {"top_k": MODEL.top_k, "num_experts": MODEL.num_experts},
        "ep_size": EP_SIZE,
        "measured_s": seconds,
        "rows": measure.rows_of(waves),
        "ratio": measure.ratios_of(waves, OURS),
        "exchanged": moved,
    }


def _start(
    name: str, options: Options, checkpoint: Path, folder: Path, stop: contextlib.ExitStack
) -> ExpertParallelServer:
    max_num_seqs = -(-max(options.concurrency) // EP_SIZE)
    server = ExpertParallelServer(name, checkpoint, folder, max_num_seqs)
    stop.callback(server.stop)
    say(f"{name}: ready after {server.wait_until_ready():.0f} s")
    return server


def _check_exchanged(
    server: ExpertParallelServer, waves: pd.DataFrame, options: Options
) -> list[dict[str, Any]]:
    """Return the ranks' counters; each generated token but the last has passed every MoE layer."""
    per_request = (PROMPT_TOKENS + options.tokens - 1) * MODEL.num_layers
    requests = int(waves.concurrency[waves.backend == server.name].sum())
    return server.check_exchanged(requests * per_request)


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
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        try:
            result = run(options, Path(folder))
        except (measure.WrongTokensError, NotExchangedError, ServerError) as error:
            print(f"nothing was measured: {error}", file=sys.stderr)
            return 1
    print(tables.serve(Result(given.output_file or Path("serve"), result)))
    if given.output_file is not None:
        common.write_json(given.output_file, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
