"""What a shared LM head refuses; what its ranks hear of one that disagrees, stays away or dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import HeadConfig, HeadGroup, sharded_argmax, sharded_logits
from moe_nvlink_plugin.errors import (
    CompileError,
    ConfigError,
    DisagreementError,
    ExchangeStateError,
    ExchangeTimeoutError,
    InputError,
    MoeNvlinkError,
    PeerError,
)
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.lm_head import exchange
from moe_nvlink_plugin.lm_head.config import MAX_VOCAB_SIZE
from moe_nvlink_plugin.lm_head.launches import HeadLaunches
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.core.exchange.small_exchange import freed
from tests.core.transport.test_other_ranks import check_timeout
from tests.support.ranks import run_processes
from tests.support.small_head import HIDDEN, VOCAB, check_argmax, check_logits, config, problem

INF, NAN = float("inf"), float("nan")


# Configurations.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp_size": 0}, "tp_size=0 must be an integer from 1 to 128"),
        ({"tp_size": 129}, "tp_size=129 must be an integer from 1 to 128"),
        ({"tp_rank": 1}, "tp_rank=1 must be an integer from 0 to 0"),
        ({"vocab_size": 0}, "vocab_size=0 must be an integer from 1 to 2147481600"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 must be"),
        ({"vocab_size": 2**28 + 1, "full_logits": True}, "vocab_size with full_logits=26843"),
        ({"hidden_size": 0}, "hidden_size=0 must be an integer from 1 to 1048576"),
        ({"max_rows_per_rank": 0}, "max_rows_per_rank=0 must be an integer from 1 to 16777216"),
        ({"tp_size": 4, "max_rows_per_rank": 2**22 + 1}, "from 1 to 4194304"),
        ({"num_threads": 0}, "num_threads=0 must be an integer from 1 to 1024"),
        ({"max_sms": 0}, "max_sms=0 must be an integer from 1 to 1024"),
        ({"timeout_s": 0}, "timeout_s=0 must be between 0 and 1e6 seconds"),
        (
            {"dtype": torch.float64},
            "dtype=torch.float64 is no type of .*torch.bfloat16",
        ),
    ],
)
def test_limits_of_a_configuration(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**values)


def test_the_largest_configuration() -> None:
    """Its ids, and a shard rounded up, stay within 31 bits."""
    for tp_size in (1, 3, 127, 128):
        mine = config(tp_size, vocab_size=MAX_VOCAB_SIZE)
        assert mine.shard_size * tp_size < 2**31
    assert config(vocab_size=2**28, full_logits=True).shard_size * 4 <= 2**30
    most = config(128, max_rows_per_rank=2**17)
    assert most.max_rows_per_rank * 128 < 1 << constants()["kCountBits"]
    (group,) = ThreadGroup.ranks(1)
    wide = config(max_rows_per_rank=2**24, hidden_size=2**20)
    with pytest.raises(ConfigError, match="of a shared LM head: max_rows_per_rank"):
        HeadGroup.create(wide, group)


def test_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "12.5")
    monkeypatch.setenv("MOE_NVLINK_HOST_THREADS", "3")
    monkeypatch.setenv("MOE_NVLINK_MAX_SMS", "7")
    mine = HeadConfig(tp_size=1, tp_rank=0, vocab_size=9, hidden_size=2, max_rows_per_rank=1)
    assert (mine.timeout_s, mine.num_threads, mine.max_sms) == (12.5, 3, 7)
    assert (mine.dtype, mine.full_logits) == (torch.bfloat16, False)


# Groups.


def segments(pids: list[int]) -> list[str]:
    """Shared memory of these processes' ranks that has a name."""
    found = (Path("/dev/shm").glob(f"moe_nvlink-{os.getuid()}-{pid}-*") for pid in pids)
    return [path.name for paths in found for path in paths]


def test_kernels_that_one_rank_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on both ranks, nothing left behind, and the next attempt works."""

    class Failing(HeadLaunches):
        def __init__(self, executor: Any, mine: HeadConfig, ranks_on_device: int) -> None:
            if mine.tp_rank == 1:
                raise CompileError("no host compiler")
            super().__init__(executor, mine, ranks_on_device)

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(2, group.rank), group) as head:
            check_argmax(head, problem(config(2), [1, 2]))

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "HeadLaunches", Failing)
        first, second = try_ranks(2, rank_main)
    assert isinstance(first, PeerError)
    assert "loading the kernels failed on another rank; rank 1: CompileError" in str(first)
    assert isinstance(second, CompileError)
    assert segments([os.getpid()]) == []
    run_ranks(2, rank_main)


# Calls.


@pytest.fixture
def head() -> Iterator[HeadGroup]:
    (group,) = ThreadGroup.ranks(1)
    with HeadGroup.create(config(full_logits=True), group) as mine:
        yield mine


#: A good value of each tensor of a verb, of two rows.
TENSORS = {
    "hidden": torch.ones(2, HIDDEN),
    "head_weight": torch.ones(VOCAB, HIDDEN),
    "bias": torch.ones(VOCAB),
}

BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{name} {wrong}": ({name: bad}, f"{name}{said}")
        for name, good in TENSORS.items()
        for wrong, bad, said in (
            ("shape", good[..., 1:], rf" has shape .*, expected \{[*good.shape]}"),
            ("dtype", good.double(), " has dtype torch.float64, expected torch.float32"),
            ("strides", torch.stack([good] * 2, -1)[..., 0], r" is not contiguous \(strides"),
            ("device", good.to("meta"), " is on meta, this exchange works on cpu"),
            ("memory", freed(good), " of shape .* has no memory"),
            ("layout", good.to_sparse(), rf" has layout torch.sparse_coo, .*{name}.to_dense\(\)"),
            ("type", [1.0], r"=\[1.0\] is a list, not a tensor"),
        )
    },
    "one row": ({"hidden": torch.ones(8)}, r"hidden has shape \[8\]"),
    "scalar": ({"hidden": torch.tensor(1.0)}, r"hidden has shape \[\]"),
    "too many rows": (
        {"hidden": torch.ones(5, HIDDEN)},
        r"5 rows exceed row_bound=4 \(max_rows_per_rank=4\); call in parts, on all ranks",
    ),
    "more rows than bound": (
        {"hidden": torch.ones(3, HIDDEN), "row_bound": 2},
        r"3 rows exceed row_bound=2 \(max_rows_per_rank=4\)",
    ),
    "bound above the capacity": (
        {"row_bound": 5},
        "row_bound=5 must be from 1 to max_rows_per_rank=4; create the group with a larger",
    ),
    "bound of nothing": ({"row_bound": 0}, "row_bound=0 must be from 1"),
    "negative bound": ({"row_bound": -1}, "row_bound=-1 must be from 1"),
    "too few vocabulary rows": (
        {"head_weight": torch.ones(VOCAB - 1, HIDDEN)},
        r"head_weight has shape \[49, 8\], expected \[50, 8\]",
    ),
    "head of one dimension": ({"head_weight": torch.ones(VOCAB)}, r"head_weight has shape \[50\]"),
    "wide bias": ({"bias": torch.ones(1, VOCAB)}, r"bias has shape \[1, 50\]"),
    # 1e-50 is 0 to float32.
    **{
        f"soft_cap={cap}": ({"soft_cap": cap}, f"soft_cap={cap} must be from 1.17")
        for cap in (0.0, -30.0, INF, NAN, 1e-50)
    },
    **{
        f"scale={scale}": ({"scale": scale}, f"scale={said} must be from -3.4")
        for scale, said in ((INF, "inf"), (NAN, "nan"), (-1e39, "-1e.39"))
    },
    "no rows": (
        {"hidden": None},
        "hidden=None is a NoneType, not a tensor; pass one of torch.float32",
    ),
    "no head": ({"head_weight": None}, "head_weight=None is a NoneType, not a tensor"),
}


@pytest.mark.parametrize("verb", [sharded_argmax, sharded_logits])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str, verb: Callable[..., torch.Tensor], head: HeadGroup) -> None:
    changes, message = BAD_CALLS[name]
    usual = {"hidden": torch.ones(2, HIDDEN), "head_weight": torch.ones(VOCAB, HIDDEN)}
    with pytest.raises(InputError, match=message):
        verb(**usual | changes, group=head)
    check_argmax(head, problem(config(), [3]))
    assert head.stats().rounds == 1, "a refused call exchanges nothing"


@pytest.mark.parametrize("verb", [sharded_argmax, sharded_logits])
def test_what_is_no_group(verb: Callable[..., torch.Tensor]) -> None:
    rows, head = torch.ones(2, HIDDEN), torch.ones(VOCAB, HIDDEN)
    with pytest.raises(InputError, match="group=None is a NoneType, not a HeadGroup; pass what"):
        verb(rows, head, group=None)


def test_all_logits_where_there_is_no_room() -> None:
    (group,) = ThreadGroup.ranks(1)
    one = problem(config(), [2])
    with HeadGroup.create(config(), group) as head:
        with pytest.raises(InputError, match="needs a group created with full_logits=True"):
            check_logits(head, one)
        check_argmax(head, one)


def test_a_call_refused_on_one_rank() -> None:
    """The others wait for it; it may call again, as it should have, while they do."""
    one = problem(config(2), [2, 3])

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(2, group.rank), group) as head:
            if group.rank == 1:
                with pytest.raises(InputError):
                    sharded_argmax(torch.ones(5, HIDDEN), one.weight, group=head)
            check_argmax(head, one)

    run_ranks(2, rank_main)


# Ranks that do not come.


@pytest.mark.parametrize("verb", [check_argmax, check_logits])
def test_a_rank_that_never_arrives_is_named(verb: Callable[..., None]) -> None:
    """In the third round ranks 1 and 3 stay away; the others say so, and go no further."""
    one = problem(config(4), [1, 2, 0, 4])

    def rank_main(group: ThreadGroup) -> tuple[BaseException | None, MoeNvlinkError | None]:
        mine = config(4, group.rank, timeout_s=0.6, full_logits=True)
        with HeadGroup.create(mine, group) as head:
            for _ in range(2):
                verb(head, one)
            caught = None
            if group.rank in (0, 2):
                with pytest.raises(ExchangeTimeoutError) as info:
                    verb(head, one)
                caught = info.value
                for again in (check_argmax, check_logits):
                    with pytest.raises(ExchangeStateError, match="unusable since"):
                        again(head, one)
            group.all_gather_object(None)  # the absent ranks' memory stays until the end
            return caught, head.failure()

    for rank, (caught, failure) in enumerate(run_ranks(4, rank_main)):
        if rank in (0, 2):
            check_timeout(caught, "head gather", 3, (1, 3))
            assert failure is caught
        else:
            assert caught is failure is None


def test_a_rank_that_is_lost_between_the_two_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has put its rows, and never says what it found. Nor may it bring other rows then."""
    one = problem(config(3), [2, 2, 2])

    def rank_main(group: ThreadGroup) -> tuple[BaseException | None]:
        with HeadGroup.create(config(3, group.rank, timeout_s=0.5), group) as head:
            if group.rank == 1:
                fail = mock.Mock(side_effect=RuntimeError("out of memory, say"))
                monkeypatch.setattr(head._head, "_product", fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    check_argmax(head, one)
                with pytest.raises(ExchangeStateError, match="unusable since.* a product failed"):
                    check_argmax(head, one)
                caught = None
            else:
                with pytest.raises(ExchangeTimeoutError) as info:
                    check_argmax(head, one)
                caught = info.value
            group.all_gather_object(None)
            return (caught,)  # run_ranks raises an error that is returned

    first, _lost, last = run_ranks(3, rank_main)
    for (error,) in (first, last):
        check_timeout(error, "head argmax", 1, (1,))


def killed(rank: int, size: int) -> tuple[list[tuple[str, tuple[int, ...]]], list[int]]:
    """Rank 1 dies by SIGKILL in the middle of a step: it has put its rows, and finds no ids."""
    one = problem(config(size), [2, 3])
    mine = config(size, rank, timeout_s=4)
    groups = [HeadGroup.create(mine, dist.group.WORLD) for _ in range(2)]
    for head in groups:
        check_argmax(head, one)
    pids: list[Any] = [0] * size
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        die: Any = lambda _call: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        groups[0]._head._product = die  # type: ignore[method-assign]
    told = []
    for head in groups:
        with pytest.raises(ExchangeTimeoutError) as caught:
            check_argmax(head, one)
        told.append((caught.value.phase, caught.value.ranks))
    assert segments(pids) == [], "shared memory outlived its rank"
    return told, pids


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """Told in the step that it died in, and in the next one of another group."""
    (told, pids), _ = run_processes(2, killed, tmp_path, killed=(1,))
    assert told == [("head argmax", (1,)), ("head gather", (1,))]
    assert len(pids) == 2
    assert segments(pids) == []


# Ranks that do different things.


@pytest.mark.parametrize("num_threads", [1, 3])
def test_different_bounds(num_threads: int) -> None:
    """Rows would be put where they are not looked for. Every rank is told, and goes no further."""
    one = problem(config(2), [1, 1])

    def rank_main(group: ThreadGroup) -> str:
        with HeadGroup.create(config(2, group.rank, num_threads=num_threads), group) as head:
            check_argmax(head, one)
            with pytest.raises(DisagreementError) as caught:
                check_argmax(head, one, row_bound=2 - group.rank)
            with pytest.raises(ExchangeStateError, match="unusable since"):
                check_argmax(head, one)
            group.all_gather_object(None)
            return str(caught.value)

    first, second = run_ranks(2, rank_main)
    told = "in head gather of epoch 2 rank 1 called with another row_bound, or a group of another"
    assert told in first
    assert "than rank 0 (vocab_size=50, hidden_size=8, max_rows_per_rank=4, row_bound=2" in first
    assert "rank 0 called with another row_bound" in second
    assert "row_bound=1, dtype=torch.float32); all ranks must make the same calls" in second


@pytest.mark.parametrize("row_bounds", [(1, 2), (2, 4), (1, 4), (3, 4), (2, 3)])
def test_any_two_bounds_of_a_small_capacity(row_bounds: tuple[int, int]) -> None:
    one = problem(config(2), [1, 1])

    def rank_main(group: ThreadGroup) -> None:
        with HeadGroup.create(config(2, group.rank), group) as head:
            with pytest.raises(DisagreementError):
                check_argmax(head, one, row_bound=row_bounds[group.rank])
            group.all_gather_object(None)

    run_ranks(2, rank_main)
