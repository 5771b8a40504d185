"""The table of moe-nvlink verify: on two CPU ranks, and with planted faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError
from moe_nvlink_plugin.testing import random_inputs
from moe_nvlink_plugin.verify import table, turns, ways
from tests.support.ranks import run_processes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(rank: int, size: int, **values: Any) -> AllToAllConfig:
    """A geometry whose experts do not divide evenly, and whose packed rows are no whole words."""
    given: dict[str, Any] = {"num_experts": 5, "top_k": 3, "hidden_size": 63, "timeout_s": 60.0}
    given |= values
    return AllToAllConfig(ep_size=size, ep_rank=rank, max_tokens_per_rank=1, **given)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def measured(rank: int, size: int, seconds: float, **values: Any) -> list[table.Line]:
    given = config(rank, size, **values)
    return table.measure(world(), CPU, given, [19], seconds=seconds)


# Two ranks.


def all_measured(rank: int, size: int) -> list[list[table.Line]]:
    """Lines of bf16, of float32 with what is not used, and of a limit."""
    told: list[str] = []
    # Ranks that decided alone would run more rounds on rank 0 than on rank 1.
    plain = table.measure(
        world(),
        CPU,
        config(rank, size),
        [19, 1],
        seconds=0.0 if rank else 1.0,
        progress=told.append,
    )
    assert told == ["19 tokens a rank (1 of 2)", "1 tokens a rank (2 of 2)"]
    longer = measured(rank, size, 0.5, dtype=torch.float32, received_ids="local")
    limited = table.measure(
        world(),
        CPU,
        config(rank, size, hidden_size=128, recipe="fp8_block", combine="fp8_block"),
        [1, 10**6, 2 * 10**6],
        seconds=0.0,
        most_bytes=2**27,
    )
    return [plain, longer, limited]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[list[table.Line]]:
    """What all_measured returns on both ranks, which must be the same."""
    first, second = run_processes(2, all_measured, tmp_path_factory.mktemp("ranks"))
    assert first == second
    lines: list[list[table.Line]] = first
    return lines


def test_lines(of_two: list[list[table.Line]]) -> None:
    plain, longer, _limited = of_two
    assert [line.tokens for line in plain] == [19, 1]
    assert [line.iterations for line in plain] == [turns.LEAST_ITERATIONS] * 2
    assert longer[0].iterations >= turns.LEAST_ITERATIONS
    for line in plain + longer:
        assert list(line.times_us) == [table.OURS, table.GATHER, table.ALL_TO_ALL]
        for times in line.times_us.values():
            assert list(times) == ["dispatch", "combine"]
            assert all(0 < us < math.inf for us in times.values())
        assert line.ratio is not None
        assert 0 < line.ratio < math.inf
        assert 0 < line.bandwidth < math.inf
        assert line.notes == ()


def test_sent_bytes(of_two: list[list[table.Line]]) -> None:
    """Of 5 experts a rank has 3 or 2, so of 3 different ones most tokens need both ranks."""
    most = []
    for rank in range(2):
        generator = torch.Generator().manual_seed(1000 + rank)
        _hidden, ids, _weights = random_inputs(config(rank, 2), 19, generator)
        most.append(int(((ids >= 3) == (rank == 0)).any(dim=1).sum()))
    assert of_two[0][0].sent_bytes == max(most) * (63 * 2 + 3 * 8)


def test_lines_that_do_not_fit(of_two: list[list[table.Line]]) -> None:
    (line,) = of_two[2]
    assert line.tokens == 1
    (note,) = line.notes
    assert note.startswith("1000000, 2000000 tokens a rank left out: the workspace would take ")
    assert note.endswith(" MiB or more, the limit is 128 MiB")
    assert note in " ".join(table.render([line], CPU).split())


def faults(rank: int, size: int) -> dict[str, tuple[str, str]]:
    """Way -> class and text of the error, while rank 1 has a fault in it."""

    def zeroed(self: ways.Ours) -> torch.Tensor:
        return torch.zeros_like(combine(self))

    def rows_lost(into: torch.Tensor, of: torch.Tensor, group: Any) -> None:
        """Those that rank 1 has from itself."""
        gather(into, of, group=group)
        into[len(of) :] = 0

    def one_element_off(self: ways.AllToAll) -> torch.Tensor:
        combined = come_back(self)
        combined[-1, -1] *= 1.1
        return combined

    combine, gather, come_back = ways.Ours.combine, ways._all_gather, ways.AllToAll.combine
    planted: dict[str, tuple[Any, str, Any]] = {
        table.OURS: (ways.Ours, "combine", zeroed),
        table.GATHER: (ways, "_all_gather", rows_lost),
        table.ALL_TO_ALL: (ways.AllToAll, "combine", one_element_off),
    }
    found = {}
    for way, (place, name, wrong) in planted.items():
        original = getattr(place, name)
        with mock.patch.object(place, name, wrong if rank else original):
            try:
                measured(rank, size, 0.0)
            except MoeNvlinkError as error:
                found[way] = type(error).__name__, str(error)
    return found


def test_a_wrong_result_is_named_on_every_rank(tmp_path: Path) -> None:
    healthy, faulty = run_processes(2, faults, tmp_path)
    for way in (table.OURS, table.GATHER, table.ALL_TO_ALL):
        assert faulty[way][0] == "WrongResultError"
        assert healthy[way][0] == "PeerError"
        for _kind, text in (healthy[way], faulty[way]):
            assert f"{way} returned wrong sums on rank 1 at 19 tokens a rank" in text


def without_nccl(rank: int, size: int) -> tuple[bool, str]:
    """NCCL fails on both ranks, which agree on the reason."""
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:gloo"),
        mock.patch.object(dist, "new_group", side_effect=RuntimeError(f"GPU {rank}\nmore")),
    ):
        found, reason = ways.peer_group(world(), CUDA, config(rank, size))
    return found is world(), reason


def test_nccl_that_fails_is_left_out(tmp_path: Path) -> None:
    assert run_processes(2, without_nccl, tmp_path) == [(True, "NCCL failed on rank 0: GPU 0")] * 2


# One rank, and no rank.


def test_a_rank_alone_has_no_peers(tmp_path: Path) -> None:
    ((line,),) = run_processes(1, measured, tmp_path, 0.0)
    assert list(line.times_us) == [table.OURS]
    assert (line.sent_bytes, line.bandwidth, line.ratio) == (0, 0.0, None)
    (note,) = line.notes
    assert note == (
        "all-gather + reduce-scatter and all-to-all left out: they need two ranks, and this group "
        "has one"
    )
    assert note in " ".join(table.render([line], CPU).split())


def test_a_torch_without_nccl() -> None:
    group: Any = object()
    with mock.patch.object(dist, "is_nccl_available", return_value=False):
        found, reason = ways.peer_group(group, CUDA, config(0, 2))
    assert found is group
    assert reason.endswith("is built without NCCL; install a CUDA build")


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ([], "tokens is empty; name at least one"),
        ([4, 16], r"none of \[4, 16\] .* most_bytes=100; raise most_bytes or name fewer tokens"),
        ([0, 1], "max_tokens_per_rank=0"),
    ],
)
def test_no_line(tokens: list[int], told: str) -> None:
    group: Any = None
    with pytest.raises(ConfigError, match=told):
        table.measure(group, CPU, config(0, 2), tokens, seconds=1.0, most_bytes=100)
