"""A rank dies in a forward, where SGLang keeps its record of the ranks that live.

The record, and the step after a forward that looks at it, are SGLang's own. The record is made by
hand: SGLang makes it with mooncake, which no CPU rank has. Experts are stand-ins, and what SGLang
would move is not moved: the lost experts are left out of the sums.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")

from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.errors import ExchangeStateError, ExchangeTimeoutError
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.sglang import worker
from moe_nvlink_plugin.integration.sglang.moe import lost_ranks
from moe_nvlink_plugin.integration.sglang.plugin import hooks
from tests.integration.sglang import sglang_layer
from tests.support.ranks import run_processes

RANKS, DIES = 4, 3


class Model:
    """As much of SGLang's ModelRunner as a forward of two layers needs."""

    def __init__(self, pool: Any, rank: int) -> None:
        from sglang.srt.model_executor.model_runner import ModelRunner

        self.rank, self.rebalanced, self.number, self.dies = rank, 0, 0, False
        self._layers = [sglang_layer.dispatcher_of(pool) for _ in range(2)]
        self._settle = ModelRunner._maybe_rebalance_after_rank_fault
        self.eplb_manager = SimpleNamespace(rebalance=self._rebalance)

    def _rebalance(self) -> Any:
        self.rebalanced += 1
        yield

    def _model(self) -> list[torch.Tensor]:
        outputs = []
        for index, layer in enumerate(self._layers):
            if self.dies and index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            outputs.append(sglang_layer.layer(layer, *self.work()))
        return outputs

    def work(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return sglang_layer.work_of(5, 10 * self.number + self.rank)

    def _forward_raw(self, *_given: Any) -> Any:
        return hooks.forward_raw(lambda _runner: self._model(), self)

    def forward(self) -> list[torch.Tensor]:
        """What SGLang's own forward does with the record."""
        self.number += 1
        outputs: list[torch.Tensor] = self._settle(self, self._forward_raw(), None, None, False, 1)
        return outputs

    def check(self, without: tuple[int, ...] = ()) -> None:
        """A forward, whose layers are the dense one but for the experts of lost ranks."""
        outputs = self.forward()
        hidden, ids, weights = self.work()
        for rank in without:
            first, end = local_expert_range(sglang_layer.NUM_EXPERTS, RANKS, rank)
            ids = torch.where((ids >= first) & (ids < end), -1, ids)
        for output in outputs:
            torch.testing.assert_close(output, sglang_layer.dense(hidden, ids, weights))


def lives(rank: int, size: int) -> list[Any]:
    group = as_group(dist.group.WORLD, 60)
    ranks = Ranks(group, rank, size, sglang_layer.WORDING)
    pool = worker.SurvivingPool(ranks, torch.device("cpu"), Options(), tolerates_faults=True)
    worker._pools[worker.TARGET] = pool
    model = Model(pool, rank)
    for _ in range(2):
        model.check()
    ElasticEPStateManager._instance = record = ElasticEPStateManager._build_state(
        ep_size=size, device=torch.device("cpu")
    )
    record.effective_ep_size = size
    model.check()
    assert model.rebalanced == 0
    model.dies = rank == DIES
    model.check(without=(DIES,))
    assert record.active_ranks.tolist() == record.active_ranks_cpu.tolist() == [1, 1, 1, 0]
    model.check(without=(DIES,))
    assert model.rebalanced == 1
    record.reset()  # as SGLang does when mooncake has taken a rank in again
    with pytest.raises(ExchangeStateError, match=r"rank\(s\) 3 in again") as caught:
        model.forward()
    worker.close()
    return [pool.config(model._layers[0]._geometry).small_tokens, str(caught.value)]


def test_the_forward_runs_again_without_the_dead_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "2")
    outcomes = run_processes(RANKS, lives, tmp_path, killed=(DIES,))
    for small_tokens, told in outcomes[:DIES]:
        assert small_tokens == 0, "one that needs no row of the dead one would not notice it"
        assert "Start all ranks again" in told


class _Pool:
    """A pool in which a verb has failed although all ranks come to the meeting."""

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(rank=0, size=2)
        self.exchanges: list[Any] = []

    def places(self) -> tuple[int, ...]:
        return 0, 1

    def go_on_without_late(self) -> tuple[int, ...]:
        return ()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ElasticEPStateManager._build_state(ep_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(ElasticEPStateManager, "_instance", made)
    return made


def test_a_late_rank_is_no_dead_one(record: Any) -> None:
    """SGLang would not run the forward again, so the error stays one."""
    failure = ExchangeTimeoutError("rank 1 was late", phase="dispatch", ranks=(1,), epoch=1)

    def run() -> None:
        raise failure

    pool: Any = _Pool()
    with pytest.raises(ExchangeTimeoutError) as caught:
        lost_ranks.forward(pool, run)
    assert caught.value is failure
    assert record.is_active_equal_last()


def test_without_a_record_nothing_is_asked() -> None:
    nobody: Any = None
    assert ElasticEPStateManager.instance() is None
    assert lost_ranks.forward(nobody, lambda: "output") == "output"
