"""A small exchange for compute-sanitizer to watch: python -m tests.support.sanitized [--break TOOL]

`--break` puts a bug in that the tool must find: memcheck a combine that writes behind its output,
racecheck a barrier of dispatch that is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
from typing import Any

import torch

from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case
from tests.support import emulated, emulated_text, real_head

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
#: One scale for a row, which the CTA's warps find together; and rows back in a format that does so.
QUANTISED = dataclasses.replace(
    cases.with_formats(CASE, "fp8_token", "nvfp4"), name="quantised", hidden_size=528
)
#: Each with the kernels for batches of any size, and with those for small ones.
CASES = tuple(
    dataclasses.replace(case, small=small) for small in (False, True) for case in (CASE, QUANTISED)
)


def without_barrier(text: str) -> str:
    """The kernel text without one CTA barrier of dispatch.

    After it threads read what other warps wrote; without it they are only late or early, they touch
    nothing they should not.
    """
    # By re: a machine with a GPU has no tree-sitter.
    text, found = re.subn(
        r"cta\.sync\(\);.*\n\s*(?=mark_empty_slots\(args, cta, shared\);)", "", text
    )
    assert found == 1, f"{found} barriers before mark_empty_slots in the kernel text"
    return text


def run(case: Case, ranks: emulated.EmulatedRanks, *, check: bool) -> None:
    """Two rounds held to the oracle, or one dispatch that is not."""
    inputs = cases.make_inputs(case)
    if not check:
        ranks.dispatch([mine.to(ranks.backend.device) for mine in inputs])
        ranks.check_faults()
        return
    case = emulated.with_ctas(case, ranks.backend.ctas)
    near = ranks.backend.device.type == "cuda"
    for _ in range(2):
        emulated.check_round(case, inputs, ranks.run_round(inputs), near=near)


def run_head(device: str) -> None:
    """A shared LM head's kernels, in every element type."""
    for dtype in real_head.DTYPES:
        rank = real_head.LoneRank(device, dtype)
        for one in real_head.problems(rank.config, 3):
            rank.check(one)


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


def break_barrier() -> None:
    """From now on what is compiled lacks BARRIER."""
    intact = emulated_text.device_source

    def broken(top_k: int, element: int, count: int, **options: Any) -> str:
        return without_barrier(intact(top_k, element, count, **options))

    emulated_text.device_source = broken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--break", dest="broken", choices=["memcheck", "racecheck"])
    parser.add_argument("--backend", default="cuda", choices=["cuda", "stand-in"])
    arguments = parser.parse_args()
    if arguments.broken == "racecheck":
        break_barrier()
    for case in (CASE,) if arguments.broken else CASES:
        with contextlib.closing(emulated.make_backend(arguments.backend, case, ctas=2)) as backend:
            ranks = emulated.EmulatedRanks.of_case(case, backend, hidden_splits=2)
            if arguments.broken == "memcheck":
                write_behind_the_output(ranks)
            else:
                run(case, ranks, check=arguments.broken is None)
    if not arguments.broken:
        run_head("cuda" if arguments.backend == "cuda" else "cpu")
    print("all rounds verified")


if __name__ == "__main__":
    main()
