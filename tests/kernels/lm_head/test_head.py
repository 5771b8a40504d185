"""The shared LM head's kernels, executed on the CPU with what only a GPU does with them too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moe_nvlink_plugin import HeadConfig
from moe_nvlink_plugin.jit.header import constants
from tests.kernels import test_specialised
from tests.support.head_ranks import (
    Call,
    HeadRanks,
    Round,
    awake,
    build,
    check,
    head_ranks,
    make_calls,
)
from tests.support.ranks import run_threads
from tests.support.sanitizers import Bugs, instead

MOST_SPLITS = constants()["kMaxHeadSplits"]


def config_of(
    tp_size: int,
    vocab_size: int,
    hidden_size: int = 19,
    capacity: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    timeout_s: float = 250.0,  # the machine may be busy
) -> HeadConfig:
    return HeadConfig(
        tp_size=tp_size,
        tp_rank=0,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_rows_per_rank=capacity,
        dtype=dtype,
        full_logits=True,
        timeout_s=timeout_s,
    )


#: As the product has it, with several threads in a CTA, and with the GPU's vectors and warps.
LIBRARIES = {
    "host": (1, False),
    "four threads": (4, False),
    "as on the GPU": (test_specialised.LANE_THREADS, True),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Path:
    cta_threads, as_on_the_gpu = LIBRARIES[request.param]
    return build(cta_threads, as_on_the_gpu=as_on_the_gpu)


@pytest.fixture
def on_host() -> Path:
    return build()


#: (config, CTAs). Shards 16, 16, 8 and none; of one rank; of odd widths; wider than a CTA's step.
GEOMETRIES = (
    (config_of(4, 40), 1),
    (config_of(1, 1, hidden_size=1), 2),
    (config_of(3, 1001, hidden_size=64, dtype=torch.float16), 3),
    (config_of(2, 4099, hidden_size=1024, dtype=torch.float32), 2),
    (config_of(2, 8192, hidden_size=520), 4),
)


@pytest.mark.parametrize(("config", "ctas"), GEOMETRIES)
def test_against_torch(config: HeadConfig, ctas: int, library: Path) -> None:
    """Every number of parts, on every rank another one; filled rows, and slots as on a GPU."""
    check_against_torch(config, ctas, library)


def check_against_torch(config: HeadConfig, ctas: int, library: Path) -> None:
    generator = torch.Generator().manual_seed(config.vocab_size)
    choose = random.Random(config.vocab_size)
    with head_ranks(config, library, ctas) as ranks:
        for splits in range(1, MOST_SPLITS + 1):
            bound = choose.randint(1, config.max_rows_per_rank)
            of_round = Round(
                bound,
                soft_cap=choose.choice((0.0, 0.0, 4.0)),
                scale=choose.choice((1.0, -0.25)),
                compact=splits % 2 == 0,
            )
            rows = [choose.randint(0, bound) for _ in ranks.configs]
            calls = make_calls(config, rows, generator, splits)
            check(calls, of_round, ranks.run(calls, of_round))
        assert [ranks.fault(rank) for rank in range(config.tp_size)] == [None] * config.tp_size


def test_many_ranks(on_host: Path) -> None:
    """As many as there may be, most of them without vocabulary."""
    config = config_of(constants()["kMaxRanks"], 600, capacity=2)
    generator = torch.Generator().manual_seed(7)
    calls = make_calls(config, [rank % 3 for rank in range(config.tp_size)], generator)
    with head_ranks(config, on_host) as ranks:
        check(calls, Round(2), ranks.run(calls, Round(2)))


def test_rounds_with_sleeps() -> None:
    """Ranks run apart by as much as the protocol lets them; what has been read is poisoned."""
    config = config_of(3, 100, capacity=5)
    generator = torch.Generator().manual_seed(1)
    choose = random.Random(1)
    rounds = []
    for number in range(150):
        bound = choose.randint(1, 5)
        rows = [choose.randint(0, bound) for _ in range(3)]
        calls = make_calls(config, rows, generator, number % MOST_SPLITS + 1)
        rounds.append((calls, Round(bound, compact=number % 2 == 0)))
    with head_ranks(config, build(sleeps=True), ctas=2) as ranks:
        results = run_all(ranks, rounds)
    for (calls, of_round), result in zip(rounds, results, strict=True):
        check(calls, of_round, result)


def run_all(
    ranks: HeadRanks, rounds: list[tuple[list[Call], Round]]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """All rounds; between two of them a rank waits for nobody."""

    def rank_main(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [ranks.run_rank(rank, calls, of_round) for calls, of_round in rounds]

    by_rank = run_threads(len(ranks.configs), rank_main)
    return [list(of_round) for of_round in zip(*by_rank, strict=True)]


def test_epochs_wrap(on_host: Path) -> None:
    config = config_of(2, 40)
    generator = torch.Generator().manual_seed(3)
    with head_ranks(config, on_host) as ranks:
        for rank in range(2):
            ranks.control(rank).epoch = 2**32 - 3
            for cells in ("dispatch_cells", "combine_cells"):
                ranks.view(rank, cells, torch.int64).fill_(2**32 - 3)
        for _ in range(5):
            calls = make_calls(config, [2, 3], generator)
            check(calls, Round(3), ranks.run(calls, Round(3)))
        assert ranks.control(0).epoch == 2


# Faults. ids are 0 and logits NaN; what a failed rank would have put, it does not.


def two_ranks(timeout_s: float = 0.3) -> tuple[HeadConfig, list[Call]]:
    config = config_of(2, 40, timeout_s=timeout_s)
    return config, make_calls(config, [3, 2], torch.Generator().manual_seed(5))


def assert_failed(result: tuple[torch.Tensor, torch.Tensor]) -> None:
    ids, logits = result
    assert not ids.any()
    assert bool(logits.isnan().all())


def test_a_rank_that_does_not_come(library: Path) -> None:
    config, calls = two_ranks()
    with head_ranks(config, library, ctas=2) as ranks:
        (result,) = ranks.run(calls, Round(3), [0])
        assert_failed(result)
        assert ranks.fault(0) == ("kFaultTimeout", "kPhaseHeadGather", 1, 1)
        before = ranks.memory[1].clone()
        for _ in range(2):
            (result,) = ranks.run(calls, Round(3), [0])
            assert_failed(result)
        assert torch.equal(ranks.memory[1], before), "a failed rank has put or signalled something"
        assert ranks.control(0).epoch == 1
        assert ranks.control(0).arrivals == ranks.control(0).combine_arrivals == 0
        # Late, it finds the rows of the round it comes to, and nobody in argmax.
        (result,) = ranks.run(calls, Round(3), [1])
        assert_failed(result)
        assert ranks.fault(1) == ("kFaultTimeout", "kPhaseHeadArgmax", 0, 1)


def test_a_rank_that_leaves_after_gather(on_host: Path) -> None:
    config, calls = two_ranks()
    with head_ranks(config, on_host) as ranks:
        # Alone, rank 1 waits in vain, but its rows and its cell have gone out.
        ranks.launch("head_gather", 1, ranks.arguments(1, calls[1], Round(3)))
        (result,) = ranks.run(calls, Round(3), [0])
        assert_failed(result)
        assert ranks.fault(0) == ("kFaultTimeout", "kPhaseHeadArgmax", 1, 1)


def test_ranks_with_other_row_bounds(on_host: Path) -> None:
    config, calls = two_ranks(timeout_s=20.0)
    with head_ranks(config, on_host) as ranks:
        gathers = [ranks.arguments(rank, calls[rank], Round(3 + rank)) for rank in range(2)]
        run_threads(2, lambda rank: ranks.launch("head_gather", rank, gathers[rank]))
        assert ranks.fault(0) == ("kFaultGeometry", "kPhaseHeadGather", 1, 1)
        assert ranks.fault(1) == ("kFaultGeometry", "kPhaseHeadGather", 0, 1)
        assert ranks.view(0, "recv_counts", torch.int32).tolist() == [3, 0]


def test_more_rows_than_a_slice_has(on_host: Path) -> None:
    config, calls = two_ranks()
    with head_ranks(config, on_host) as ranks:
        ranks.launch("head_gather", 0, ranks.arguments(0, calls[0], Round(2)))
        assert ranks.fault(0) == ("kFaultBadCount", "kPhaseHeadGather", 0, 1)


def test_a_rank_that_is_ahead(on_host: Path) -> None:
    config, calls = two_ranks()
    with head_ranks(config, on_host) as ranks:
        ranks.control(1).epoch = 1
        ranks.launch("head_gather", 1, ranks.arguments(1, calls[1], Round(3)))
        assert ranks.fault(1) == ("kFaultTimeout", "kPhaseHeadGather", 0, 2)
        (result,) = ranks.run(calls, Round(3), [0])
        assert_failed(result)
        assert ranks.fault(0) == ("kFaultAhead", "kPhaseHeadGather", 1, 1)


# These checks can fail. One library has all the mistakes, and each test wakes one.

MISTAKES: Bugs = {
    "the last of equal values": instead("largest_of_thread", "most <= best", "most < best"),
    "zeros of two values": instead(
        "order_of_value", "magnitude == 0 ? 0x80000000u : order", "order"
    ),
    "a NaN below all": instead(
        "order_of_value", "magnitude > 0x7f800000u ? 0xffffffffu : number", "number"
    ),
    "vectors on no boundary": instead(
        "put_words", "vector_bytes_for(args.logits, row_bytes) == kVectorBytes", "true"
    ),
    "slots as filled rows": instead(
        "put_words", "source.rank * geometry.row_bound + row", "number"
    ),
    "one word of a row": instead("largest_of_peers", "split < shared.splits[peer]", "split < 1"),
    "rows at the first slice": instead(
        "put_head_rows",
        "region_of(args, peer, args.rows_region) + slice",
        "region_of(args, peer, args.rows_region)",
    ),
}
#: The geometry that shows each mistake.
SHOWN_BY = dict(zip(MISTAKES, (4, 3, 3, 2, 0, 4, 0), strict=True))
SHOWING = sorted(set(SHOWN_BY.values()))


@pytest.fixture(scope="module")
def with_mistakes() -> Path:
    return build(test_specialised.LANE_THREADS, as_on_the_gpu=True, bugs=MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str, with_mistakes: Path) -> None:
    geometry = GEOMETRIES[SHOWN_BY[mistake]]
    with (
        awake(with_mistakes, MISTAKES, mistake),
        pytest.raises(AssertionError, match="rank|Tensor"),
    ):
        check_against_torch(*geometry, with_mistakes)


@pytest.mark.parametrize(("config", "ctas"), [GEOMETRIES[n] for n in SHOWING])
def test_a_sleeping_mistake_does_nothing(
    config: HeadConfig, ctas: int, with_mistakes: Path
) -> None:
    check_against_torch(config, ctas, with_mistakes)
