"""Many rounds on a GPU: random skew, poison, CUDA graphs, a rank that does not come."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case
from tests.support import emulated

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

SMALL = Case(
    name="small",
    tokens=(0, 0, 0, 0),
    num_experts=10,
    top_k=3,
    hidden_size=19,
    capacity=6,
    routing="invalid",
)
BF16 = dataclasses.replace(SMALL, name="bf16", dtype=torch.bfloat16, hidden_size=264, top_k=8)
#: The one recipe that the experts of rounds without the host can read, and rows back in a format.
QUANTISED = dataclasses.replace(
    cases.with_formats(BF16, "fp8_block", "fp8_block"), name="quantised", hidden_size=384
)

#: In the order of slots that the kernels for small batches promise, and 4-byte words in rows.
UNITS = dataclasses.replace(BF16, name="small batches", small=True)

#: A verb that does not wait for its peers: what stands in the kernels, and what instead.
LEFT_OUT = {
    "combine": (
        "const bool faulted = combine_barrier(args, cta, shared);",
        "const bool faulted = false;",
    ),
    "dispatch": (
        "const int fault = wait_for_peer(args, awaited, peer, expected, patience, &cell);\n"
        "      if (fault == 0) count",
        "cell = load_acquire_sys("
        "cell_of(args, geometry.ep_rank, args.control.dispatch_cells, peer));\n"
        "      const int fault = 0;\n      if (fault == 0) count",
    ),
}


either_kind = pytest.mark.parametrize("case", [SMALL, UNITS], ids=["bulk", "small"])


@either_kind
def test_thousand_rounds(case: Case) -> None:
    """One launch a verb; sleeps before every release and arrival, after every wait.

    A unit left over from a round before would be taken for one of this round.
    """
    emulated.check_rounds("cuda", case, rounds=1000, ctas=3, delays=True)


@pytest.mark.parametrize("case", [SMALL, BF16, QUANTISED], ids=lambda case: case.name)
def test_ranks_run_apart(case: Case) -> None:
    """1500 rounds in one launch: a rank is ahead of another by as much as the protocol lets it."""
    emulated.check_fused("cuda", case, rounds=1500, ctas=3)


def test_many_ranks_run_apart() -> None:
    """As many as one launch takes."""
    ranks = emulated.most_ranks_for(1 + 8, ("rounds",))
    case = dataclasses.replace(
        SMALL, name="many ranks", tokens=(0,) * ranks, num_experts=130, capacity=2, top_k=8
    )
    emulated.check_fused("cuda", case, rounds=15, ctas=2)


@pytest.mark.parametrize(("line", "instead"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_wait_that_is_left_out_is_noticed(
    line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "cubin", emulated.broken_cubin(line, instead))
    with pytest.raises(AssertionError):
        emulated.check_fused("cuda", SMALL, rounds=300, ctas=3, timeout_s=2.0)


@either_kind
@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
def test_thousand_replays(case: Case, pdl: bool) -> None:
    """Captured before anything has run; other tokens and other counts in every replay."""
    emulated.check_static_rounds("cuda", case, rounds=1000, pdl=pdl)


def test_rounds_with_pdl() -> None:
    emulated.check_rounds("cuda", BF16, rounds=200, ctas=3, pdl=True, delays=True)


def test_replays_of_quantised_rows() -> None:
    case = cases.with_formats(BF16, "fp8_token", "fp8_block")
    emulated.check_static_rounds("cuda", case, rounds=200)


def test_quantising_rounds_with_delays() -> None:
    """The largest magnitude of a row goes through shared memory: warps come to it out of step."""
    case = cases.with_formats(BF16, "fp8_token", "nvfp4")
    emulated.check_rounds("cuda", case, rounds=200, ctas=3, delays=True)


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_a_missing_rank_is_named(small: bool) -> None:
    emulated.check_missing_rank("cuda", small=small)
