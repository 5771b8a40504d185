"""Measure decode throughput of the demonstration's server over two ranks: ours against gloo.

    python benchmarks/bench_serve.py --output_file benchmarks/results/DATE-cpu-serve.json
    python benchmarks/bench_serve.py --hidden_size 1024 --num_experts 16

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
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, TinyModel, write_checkpoint

#: The demonstration's default. Other sizes are multiples of its hidden size.
TINY = MODELS["qwen3_moe"]
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
    hidden_size: int = TINY.hidden_size
    layers: int = TINY.num_layers
    top_k: int = TINY.top_k
    num_experts: int = TINY.num_experts

    @property
    def model(self) -> TinyModel:
        """The demonstration's model in these sizes; heads and experts grow with hidden_size."""
        times = self.hidden_size // TINY.hidden_size
        return dataclasses.replace(
            TINY,
            hidden_size=self.hidden_size,
            num_layers=self.layers,
            top_k=self.top_k,
            num_experts=self.num_experts,
            num_heads=TINY.num_heads * times,
            num_kv_heads=TINY.num_kv_heads * times,
            intermediate_size=TINY.intermediate_size * times,
            moe_intermediate_size=TINY.moe_intermediate_size * times,
        )

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be measured."""
        limits = {"tokens": MOST_TOKENS - PROMPT_TOKENS, "rounds": 1000}
        for name, limit in limits.items():
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(f"--{name} {getattr(self, name)} is not between 1 and {limit}")
        if not all(1 <= count <= 256 for count in self.concurrency):
            raise ValueError(f"--concurrency {self.concurrency} is not between 1 and 256")
        if self.hidden_size < 1 or self.hidden_size % TINY.hidden_size:
            raise ValueError(
                f"--hidden_size {self.hidden_size} is no multiple of {TINY.hidden_size}; choose one"
            )
        if self.layers < 1:
            raise ValueError(f"--layers {self.layers} is less than 1; choose 1 or more")
        if self.num_experts % EP_SIZE or not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"--num_experts {self.num_experts} with --top_k {self.top_k}: choose a multiple of "
                f"{EP_SIZE} ranks for the experts, and a top_k between 1 and their number"
            )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    add("--tokens", type=int, default=96, help="of each answer")
    add("--rounds", type=int, default=9, help="waves per server and concurrency")
    add("--seed", type=int, default=0)
    add("--hidden_size", type=int, default=TINY.hidden_size)
    add("--layers", type=int, default=TINY.num_layers)
    add("--top_k", type=int, default=TINY.top_k)
    add("--num_experts", type=int, default=TINY.num_experts)
    add("--output_file", type=Path, help="JSON file for the result")
    return made


def run(options: Options, folder: Path) -> dict[str, Any]:
    """Return the result, from servers started in `folder`.

    Raises WrongTokensError, NotExchangedError or ServerError instead of a result.
    """
    checkpoint = write_checkpoint(folder / "model", options.model)
    draw = random.Random(options.seed)
    prompts = [
        draw.choices(range(TINY.vocab_size), k=PROMPT_TOKENS)
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
        "options": dataclasses.asdict(options),
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
    per_request = (PROMPT_TOKENS + options.tokens - 1) * options.layers
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
