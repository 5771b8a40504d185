"""What the kernels counted against what the reference counts."""

from __future__ import annotations

import pytest
import torch

from moe_nvlink_plugin import ExchangeStats, MoeAllToAll, reference
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case, Inputs

FIRST = Case(
    name="first",
    tokens=(5, 0, 8),
    num_experts=10,
    top_k=4,
    hidden_size=31,
    dtype=torch.bfloat16,
    routing="invalid",
    extras=((torch.uint8, (3,)),),
    num_channels=2,
    num_threads=2,
)
SECOND = Case(name="second", tokens=(3, 7, 1), num_experts=5, top_k=3, hidden_size=64, capacity=9)


def expected_stats(case: Case, inputs: Inputs, ep_rank: int) -> ExchangeStats:
    table = reference.target_ranks(inputs.topk_ids, case.num_experts, case.ep_size)
    targets = [target for row in table for target in row if target is not None]
    remote = sum(target != ep_rank for target in targets)
    hidden_bytes = case.hidden_size * case.dtype.itemsize
    token_bytes = 8 * case.top_k + hidden_bytes + sum(cases.row_bytes(e) for e in case.extras)
    tokens, peers = len(table), case.ep_size - 1
    return ExchangeStats(
        rounds=1,
        tokens=tokens,
        destinations=len(targets),
        remote_destinations=remote,
        bytes_dispatched=len(targets) * token_bytes,
        bytes_dispatched_remote=remote * token_bytes,
        bytes_combined=len(targets) * hidden_bytes,
        bytes_combined_remote=remote * hidden_bytes,
        bytes_allgather=tokens * peers * token_bytes,
        bytes_reducescatter=tokens * peers * hidden_bytes,
    )


def test_counted_over_layers_channels_and_growth() -> None:
    """Two rounds on each channel of one layer, one of a layer that makes the workspace grow."""
    inputs = {case: cases.make_inputs(case) for case in (FIRST, SECOND)}

    def rank_main(group: ThreadGroup) -> list[ExchangeStats]:
        rank = group.rank
        with MoeAllToAll.create(FIRST.config(rank), group) as first:
            seen = [first.stats(wait=False)]
            for number in range(4):
                cases.run_round(first, inputs[FIRST][rank], channel=number % 2)
            seen.append(first.stats())
            size = first.workspace_bytes
            with MoeAllToAll.create(SECOND.config(rank), group, share_with=first) as second:
                assert first.workspace_bytes > size
                cases.run_round(second, inputs[SECOND][rank])
                assert second.stats() == first.stats(), "the totals are the workspace's"
            cases.run_round(first, inputs[FIRST][rank])
        return [*seen, first.stats()]

    for rank, (new, four, all_six) in enumerate(run_ranks(3, rank_main)):
        one = expected_stats(FIRST, inputs[FIRST][rank], rank)
        other = expected_stats(SECOND, inputs[SECOND][rank], rank)
        assert new == ExchangeStats(waited_ns=(0, 0, 0))
        four_counted = one.plus(one).plus(one).plus(one)
        assert four._replace(waited_ns=()) == four_counted
        assert all_six._replace(waited_ns=()) == four_counted.plus(one).plus(other)
        pairs = zip(four.waited_ns, all_six.waited_ns, strict=True)
        assert all(0 <= before <= after for before, after in pairs)


def created(case: Case) -> MoeAllToAll:
    return MoeAllToAll.create(case.config(0), ThreadGroup.ranks(1)[0])


def test_the_size_is_told_before_it_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="moe_nvlink_plugin")
    case = Case(name="large", tokens=(1,), hidden_size=4096, capacity=256)
    with created(case) as layer:
        size = layer.workspace_bytes
    (line,) = [r.getMessage() for r in caplog.records if "allocates a workspace" in r.getMessage()]
    assert f"{size / 2**20:.1f} MiB" in line
    assert "recv_hidden_states 4194304" in line
    assert "combine 4194304" in line
