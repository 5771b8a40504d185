"""A small exchange for compute-sanitizer to watch: python -m tests.gpu.sanitized [--break TOOL]

`--break` puts a bug in that the tool must find: memcheck a combine that writes behind its output,
racecheck CTA barriers that do nothing.
"""

from __future__ import annotations

import argparse
import contextlib

import torch

from tests.kernels import cases, emulated, emulated_text
from tests.kernels.cases import Case
from tests.kernels.delays import replace_once

CASE = Case(
    name="sanitized",
    tokens=(3, 0, 4),
    num_experts=7,
    top_k=2,
    hidden_size=40,
    capacity=4,
    dtype=torch.bfloat16,
    routing="invalid",
)
BARRIER = "HD void sync() const { __syncthreads(); }"


def without_barriers(text: str) -> str:
    """The kernel text with a CTA barrier that does nothing."""
    return replace_once(text, BARRIER, "HD void sync() const {}")


def run(ranks: emulated.EmulatedRanks, *, check: bool) -> None:
    inputs = cases.make_inputs(CASE)
    for _ in range(2):
        if not check:
            ranks.dispatch([mine.to(ranks.backend.device) for mine in inputs])
            torch.cuda.synchronize()
            return
        emulated.check_round(
            emulated.with_ctas(CASE, ranks.backend.ctas), inputs, ranks.run_round(inputs)
        )


def write_behind_the_output(ranks: emulated.EmulatedRanks) -> None:
    """One row of memory, four to write."""
    device = ranks.backend.device
    received = ranks.dispatch([mine.to(device) for mine in cases.make_inputs(CASE)])
    arguments = []
    for rank, mine in enumerate(received):
        args = ranks.combine_arguments(rank)
        args.geometry.num_tokens = CASE.tokens[rank]
        args.send_slots = mine.send_slots.data_ptr()
        output = torch.empty((1, CASE.hidden_size), dtype=CASE.dtype, device=device)
        args.output = output.data_ptr()
        arguments.append((args, output))
    ranks.backend.prepare("combine", [args for args, _output in arguments])()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--break", dest="broken", choices=["memcheck", "racecheck"])
    broken = parser.parse_args().broken
    if broken == "racecheck":
        intact = emulated_text.device_source
        emulated_text.device_source = (  # type: ignore[assignment]
            lambda *args, **kwargs: without_barriers(intact(*args, **kwargs))
        )
    with contextlib.closing(emulated.make_backend("cuda", CASE, ctas=2)) as backend:
        ranks = emulated.EmulatedRanks.of_case(CASE, backend, hidden_splits=2)
        if broken == "memcheck":
            write_behind_the_output(ranks)
        else:
            run(ranks, check=broken is None)
    print("all rounds verified")


if __name__ == "__main__":
    main()
