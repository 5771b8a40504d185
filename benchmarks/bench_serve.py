"""Measure decode throughput of the demonstration's server over some ranks: ours against others.

    python benchmarks/bench_serve.py --output_file benchmarks/results/DATE-cpu-serve.json
    python benchmarks/bench_serve.py --hidden_size 1024 --num_experts 16
    python benchmarks/bench_serve.py --size 1.7B --against tensor_parallel one_rank
    python benchmarks/bench_serve.py --size 1.7B --ep_size 4 --against moe_nvlink_tp2
    python benchmarks/bench_serve.py --against one_rank ../another_checkout

The others are gloo's collectives behind our seams, vLLM's tensor parallelism over as many ranks, a
server of one rank, ours with tensor parallelism of two, and ours as another checkout has it. The
servers have the same vLLM, model and flags, and the ranks of each divide all cores among their
threads.

In float32, the demo's type, nothing is reported unless every token equals the one-rank server's. In
bf16, that of the larger models, a sum in another order may choose another token. So there an answer
is compared up to the first token that differs, the result says how many did, and nothing is
reported if more than a tenth of those compared do.
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
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.reporting import tables
from benchmarks.reporting.files import Result
from benchmarks.serving import gloo_plugin, measure
from benchmarks.serving.servers import (
    OURS,
    OURS_IN_PAIRS,
    PLAIN,
    ExpertParallelServer,
    NotExchangedError,
    one_rank_tokens,
)
from benchmarks.serving.sizes import DEMO, SHAPE, SIZES, TINY, dtype_of, name_of
from moe_nvlink_plugin.integration.demo.demo import EP_SIZE
from moe_nvlink_plugin.integration.demo.server import ServerError
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import TinyModel, write_checkpoint

#: Of a prompt. Short: the first token's step reads it, and decoding is what is measured.
PROMPT_TOKENS = 4
#: VllmServer's --max-model-len.
MOST_TOKENS = 512
#: Servers by name, for --against.
PEERS = (gloo_plugin.NAME, OURS_IN_PAIRS, *PLAIN)
SHOWS = (
    "HTTP requests to vLLM servers whose workers, API server and client share the cores of "
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
    ep_size: int = EP_SIZE
    against: tuple[str, ...] = (gloo_plugin.NAME,)
    size: str = DEMO

    @property
    def model(self) -> TinyModel:
        """The model of the size; the demo's in these sizes, its heads and experts in proportion."""
        if self.size != DEMO:
            return SIZES[self.size]
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
        if self.ep_size < 2:
            raise ValueError(f"--ep_size {self.ep_size} is less than 2; choose 2 or more")
        if self.num_experts % self.ep_size or not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"--num_experts {self.num_experts} with --top_k {self.top_k}: choose a multiple of "
                f"{self.ep_size} ranks for the experts, and a top_k between 1 and their number"
            )
        for name in self.against:
            _check_peer(name)
        if OURS_IN_PAIRS in self.against and self.ep_size % 2:
            raise ValueError(
                f"--against {OURS_IN_PAIRS} with --ep_size {self.ep_size}: choose an even number"
            )


def _check_peer(name: str) -> None:
    """Raise ValueError if no server can be started by this name."""
    if name in PEERS:
        return
    if not (Path(name) / "moe_nvlink_plugin" / "__init__.py").is_file():
        raise ValueError(
            f"--against {name}: choose {', '.join(PEERS)}, or the folder of a checkout"
        )
    if sys.version_info < (3, 11):
        raise ValueError(
            f"--against {name}: before Python 3.11, servers import modules from the folder in "
            "which they are started; use Python 3.11 or newer"
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = made.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    add("--tokens", type=int, default=96, help="of each answer")
    add("--rounds", type=int, default=9, help="waves per server and concurrency")
    add("--seed", type=int, default=0)
    add("--size", choices=list(SIZES), default=DEMO, help="of the model")
    for name in SHAPE:
        add(f"--{name}", type=int, help="of the demo's model")
    add("--ep_size", type=int, default=EP_SIZE, help="ranks of every server but one_rank")
    add(
        "--against",
        nargs="+",
        default=[gloo_plugin.NAME],
        metavar="SERVER",
        help=f"{', '.join(PEERS)}, or the folder of another checkout",
    )
    add("--output_file", type=Path, help="JSON file for the result")
    return made


def options_of(given: argparse.Namespace) -> Options:
    """Return the options, with what was not given as the size has it. Raises ValueError."""
    for name, field in SHAPE.items():
        if getattr(given, name) is None:
            setattr(given, name, getattr(SIZES[given.size], field))
        elif given.size != DEMO:
            raise ValueError(f"--{name} changes the demo's model: leave out it or --size")
    return common.options_from(Options, given)


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
    expected = one_rank_tokens(checkpoint, folder, prompts, options.tokens, dtype_of(options.model))
    asked = measure.Asked(prompts, expected, is_exact=options.model.dtype == torch.float32)
    with contextlib.ExitStack() as stop:
        names = (OURS, *options.against)
        servers = [_start(name, options, checkpoint, folder, stop) for name in names]
        began = time.perf_counter()
        waves = measure.interleave(servers, asked, options.concurrency, options.rounds, say)
        seconds = time.perf_counter() - began
        moved = {server.name: _check_exchanged(server, waves, options) for server in servers}
        held = {server.name: server.memory_bytes() for server in servers}
    return {
        "schema": 1,
        "kind": "serve",
        "machine": common.describe_run(),
        "shows": SHOWS,
        "options": dataclasses.asdict(options),
        "ep_size": options.ep_size,
        "size": name_of(options.model),
        "dtype": dtype_of(options.model),
        "threads_per_rank": {server.name: server.threads for server in servers},
        "memory_bytes": held,
        "measured_s": seconds,
        "rows": measure.rows_of(waves),
        "ratio": measure.ratios_of(waves, OURS),
        "exchanged": moved,
    }


def _start(
    name: str, options: Options, checkpoint: Path, folder: Path, stop: contextlib.ExitStack
) -> ExpertParallelServer:
    most = max(options.concurrency)
    server = ExpertParallelServer(
        name, checkpoint, folder, most, options.ep_size, dtype_of(options.model)
    )
    stop.callback(server.stop)
    say(f"{name}: ready after {server.wait_until_ready():.0f} s")
    return server


def _check_exchanged(
    server: ExpertParallelServer, waves: pd.DataFrame, options: Options
) -> list[dict[str, Any]]:
    """Return the ranks' counters; each generated token but the last has passed every MoE layer."""
    per_request = (PROMPT_TOKENS + options.tokens - 1) * options.model.num_layers
    requests = int(waves.concurrency[waves.backend == server.name].sum())
    return server.check_exchanged(requests * per_request)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    made = parser()
    given = made.parse_args(arguments)
    try:
        options = options_of(given)
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
