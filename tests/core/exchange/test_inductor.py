"""Inductor must not take the receive buffers for memory of its own, and keeps no copy of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.exchange.channel import Channel
from moe_nvlink_plugin.exchange.layer import LayerExchange
from tests.core.exchange.small_exchange import alone, inputs_of

HIDDEN = 24


@pytest.fixture
def layer() -> Iterator[MoeAllToAll]:
    torch._dynamo.reset()
    sizes = {"num_experts": 8, "hidden_size": HIDDEN, "max_tokens_per_rank": 16}
    # Code compiled before must not answer for what is compiled now.
    uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    with alone(**sizes, extra_payload_bytes=(HIDDEN * 4,)) as exchange, uncached:
        yield exchange


def test_received_rows_are_not_overwritten(layer: MoeAllToAll) -> None:
    """All that arrived is dead after one pointwise use of its shape: it invites an in-place one."""

    def double(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received = layer.dispatch(hidden, ids, weights, [hidden])
        rows = received.hidden_states * 2.0 + received.extra_payloads[0]
        return layer.combine(rows, received.metadata)

    hidden, ids, weights = inputs_of(layer, 5)
    kept = layer.dispatch(hidden, ids, weights, [hidden])
    layer.combine(kept.hidden_states, kept.metadata)
    torch.compile(double, fullgraph=True)(hidden + 1.0, ids, weights)
    # `kept` looks at the same buffers, which hold what the compiled dispatch received.
    assert torch.equal(kept.hidden_states[:5], hidden + 1.0)
    assert torch.equal(kept.extra_payloads[0][:5], hidden + 1.0)


def test_empty_slots_are_marked_whatever_the_ids_were_overwritten_with(layer: MoeAllToAll) -> None:
    hidden, ids, weights = inputs_of(layer, 9)
    received = layer.dispatch(hidden, ids, weights, [hidden])
    received.topk_ids.zero_()  # as code compiled without our say would do
    layer.combine(received.hidden_states, received.metadata)
    again = layer.dispatch(hidden[:2], ids[:2], weights[:2], [hidden[:2]])
    assert torch.equal(again.topk_ids[:2], ids[:2])
    assert bool((again.topk_ids[2:] == -1).all())
    layer.combine(again.hidden_states, again.metadata)


_seen: list[tuple[int, int]] = []


@torch.library.custom_op("moe_nvlink_tests::experts", mutates_args={"out"})
def experts(hidden: torch.Tensor, out: torch.Tensor) -> None:
    """Experts that Inductor cannot fuse, which say where they read and write."""
    _seen.append((hidden.data_ptr(), out.data_ptr()))
    torch.mul(hidden, 2.0, out=out)


@pytest.mark.parametrize("given", [False, True], ids=["new output", "output given"])
def test_no_row_is_copied(layer: MoeAllToAll, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts read where the peers have written; combine reads where experts wrote, and returns."""

    def block(
        hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, output: torch.Tensor | None
    ) -> torch.Tensor:
        received = layer.dispatch(hidden, ids, weights, [hidden])
        rows = layer.combine_input()
        experts(received.hidden_states, rows)
        return layer.combine(rows, received.metadata, output=output)

    def uncopied(_channel: Channel, _rows: torch.Tensor) -> None:
        raise AssertionError("combine copies the experts' rows")

    results: list[int] = []
    combine = LayerExchange.combine

    def noted(self: LayerExchange, *arguments: Any) -> torch.Tensor:
        result = combine(self, *arguments)
        results.append(result.data_ptr())
        return result

    hidden, ids, weights = inputs_of(layer, 5)
    output = torch.empty_like(hidden) if given else None
    kept = layer.dispatch(hidden, ids, weights, [hidden])
    places = (kept.hidden_states.data_ptr(), layer.combine_input().data_ptr())
    layer.combine(kept.hidden_states, kept.metadata)
    monkeypatch.setattr(Channel, "_copy_rows", uncopied)
    monkeypatch.setattr(LayerExchange, "combine", noted)
    _seen.clear()
    compiled = torch.compile(block, fullgraph=True)
    with torch.no_grad():
        found, (code,) = run_and_get_code(compiled, hidden, ids, weights, output)
        again = compiled(hidden, ids, weights, output)
    torch.testing.assert_close(found, 2.0 * hidden)
    torch.testing.assert_close(again, 2.0 * hidden)
    assert _seen == [places] * 2
    assert results == [found.data_ptr(), again.data_ptr()]
    if output is not None:
        assert found.data_ptr() == again.data_ptr() == output.data_ptr()
    assert "moe_nvlink.combine" in code
    # Without a kernel of its own, nor a copy by torch, no call of this code moves a row.
    for mover in ("copy_", "clone", "cpp_fused", "empty_strided_cpu(("):
        assert mover not in code, code
