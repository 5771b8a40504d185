"""Audits of rows in vLLM's MoE layers, on CPU ranks and by the classes of CUDA ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.integration.common import audit as audit_module
from moe_nvlink_plugin.integration.common.audit import AUDIT_BYTES, Audit
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.common.pool import ExchangePool
from moe_nvlink_plugin.integration.vllm import metrics
from moe_nvlink_plugin.integration.vllm.lora.adapters import AdapterNumbers
from moe_nvlink_plugin.integration.vllm.moe import method
from moe_nvlink_plugin.integration.vllm.moe.features import NUMBER_BYTES
from moe_nvlink_plugin.integration.vllm.moe.prepare_finalize import UNQUANTISED
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe.test_vllm_prepare_finalize import _layer
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    GEOMETRY,
    Layer,
    dense,
    expert_map_of,
    ragged,
    ranks_of,
    work_of,
    worst_of,
)

ROUNDS = 20


@pytest.fixture(autouse=True)
def turns_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens are audited does not depend on the clock."""
    monkeypatch.setattr(audit_module, "time", SimpleNamespace(time_ns=lambda: 2**23))


class Spoils:
    """The exchange of a rank to which a link brings one wrong bit in each row of rank 0."""

    def __init__(self, exchange: MoeAllToAll) -> None:
        self._dispatch = exchange.dispatch

    def __call__(self, *given: Any, **named: Any) -> Any:
        received = self._dispatch(*given, **named)
        count = int(received.recv_counts[0])
        received.hidden_states.view(torch.uint8)[:count, 5] ^= 1
        return received


class Kept(metrics.RankFile):
    """A rank's metrics, which the test reads after the worker's end."""

    def close(self) -> None:
        pass


def served(group: ThreadGroup, folder: Path, *, every: int, spoilt: bool = False) -> float:
    """The largest error of a rank's rounds, in a layer as `method` makes it."""
    kept, options = Kept(folder / "metrics"), Options(audit_every=every)
    pool = ExchangePool(ranks_of(group), torch.device("cpu"), options, publication=kept)
    try:
        exchange = pool.exchange(GEOMETRY)
        subject = method._prepare_finalize(
            pool, exchange, expert_map_of(exchange.config), UNQUANTISED
        )
        if spoilt and group.rank == 1:
            exchange.dispatch = Spoils(exchange)  # type: ignore[method-assign]
        works = ragged(group.rank, ROUNDS)
        return max(worst_of(_layer(subject, work), dense(*work)) for work in works)
    finally:
        pool.close()


def stats_of(folder: Path, rank: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text("utf-8"))
    return content


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_NVLINK_STATS_DIR", str(tmp_path))
    return tmp_path


def test_a_wrong_bit_is_counted_and_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        _, error = run_ranks(2, lambda group: served(group, folder, every=2, spoilt=True))
    assert error < 1e-5, "of rank 1's own tokens"
    healthy, spoilt = stats_of(folder, 0), stats_of(folder, 1)
    assert 0 < min(healthy["audited"]) <= max(healthy["audited"]) <= ROUNDS // 2
    assert healthy["audit_faults"] == [0, 0]
    assert spoilt["audit_faults"] == [spoilt["audited"][0], 0]
    assert spoilt["audited"][0] > 2
    (record,) = caplog.records
    assert "of rank 1 found wrong rows" in record.getMessage()
    assert "rows from rank 0" in record.getMessage()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(metrics.RanksCollector([folder / "metrics"]))
    text = generate_latest(registry).decode()
    count = float(spoilt["audit_faults"][0])
    assert f'moe_nvlink_audit_faults_total{{ep_rank="1",source="0"}} {count}' in text
    assert 'moe_nvlink_audit_faults_total{ep_rank="0",source="0"} 0.0' in text


def test_without_the_option_a_layer_has_no_audit(folder: Path) -> None:
    assert max(run_ranks(2, lambda group: served(group, folder, every=0))) < 1e-5
    assert "audited" not in stats_of(folder, 0)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_classes_of_cuda_ranks(adapters: bool) -> None:
    """With ids of "elsewhere", and beside the numbers of adapters (LoRA)."""

    def body(group: ThreadGroup) -> Any:
        payloads = (NUMBER_BYTES, AUDIT_BYTES) if adapters else (AUDIT_BYTES,)
        layer = Layer(group, extra_payload_bytes=payloads)
        layer.subject.audit = audit = Audit(layer.exchange, 2, torch.device("cpu"))
        numbers = AdapterNumbers(CAPACITY, 2, torch.device("cpu"))
        context = SimpleNamespace(punica_wrapper=SimpleNamespace(adapter_numbers=numbers))
        if adapters:
            layer.subject.set_lora_context(context)
        for number in range(ROUNDS):
            work = work_of(CAPACITY, 100 * number + group.rank)
            if adapters:
                numbers.update([7] * CAPACITY, [None, 7])
            torch.testing.assert_close(layer(*work), dense(*work))
            if adapters:
                assert set(context.local_token_lora_mapping.tolist()) <= {-1, 1}
        layer.close()
        return audit.found()

    for found in run_ranks(2, body):
        assert min(found.rows) > ROUNDS // 4
        assert found.wrong == found.stale == [0, 0]
