"""CUDA graphs and torch.compile in vLLM's own code: what holds our op, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.attention.attention  # noqa: F401  (registers ops)
from vllm.compilation.backends import split_graph
from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig

from moe_nvlink_plugin.errors import DisagreementError
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.pool import bound_of_step
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.moe import layers
from moe_nvlink_plugin.integration.vllm.plugin import graphs
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks

ATTENTION = torch.ops.vllm.unified_attention_with_output.default
OURS = f"vllm::{layers.OP_NAME}"


def _traced(op: Any) -> torch.fx.GraphModule:
    """Two layers of attention and one of experts, as far as vLLM's splitter looks at them."""
    graph = torch.fx.Graph()
    value = graph.placeholder("hidden_states")
    for target in (torch.relu, ATTENTION, torch.neg, op, torch.relu, ATTENTION, torch.neg):
        value = graph.call_function(target, (value,))
    graph.output((value,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _pieces(op: Any, splitting_ops: list[str]) -> list[tuple[bool, list[Any]]]:
    """For each piece of the model: whether it runs outside of graphs, and what it calls."""
    _, items = split_graph(_traced(op), splitting_ops)
    return [
        (
            item.is_splitting_graph,
            [node.target for node in item.graph.graph.nodes if node.op == "call_function"],
        )
        for item in items
    ]


@pytest.mark.parametrize("name", sorted(graphs.LAYER_OPS))
def test_a_layer_lies_inside_a_piece(name: str) -> None:
    op = getattr(torch.ops.vllm, name.removeprefix("vllm::")).default
    neighbours = [torch.neg, op, torch.relu]
    assert _pieces(op, CompilationConfig._attention_ops) == [
        (False, [torch.relu]),
        (True, [ATTENTION]),
        (False, neighbours),
        (True, [ATTENTION]),
        (False, [torch.neg]),
    ]
    # What validation refuses: the layer would stand alone between two graphs.
    for named in (name, f"{name}.default"):
        assert (True, [op]) in _pieces(op, [*CompilationConfig._attention_ops, named])


def test_inductor_does_not_cut_at_our_op_either() -> None:
    op = getattr(torch.ops.vllm, layers.OP_NAME).default
    assert OURS in graphs.LAYER_OPS
    assert torch.Tag.cudagraph_unsafe not in op.tags


def _compilation(**values: Any) -> SimpleNamespace:
    usual = {
        "mode": 3,
        "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE,
        "cudagraph_capture_sizes": [1, 2, 4, 8],
        "compile_sizes": [],
        "compile_ranges_endpoints": [2048],
        "splitting_ops": None,
    }
    return SimpleNamespace(**{**usual, **values})


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("named", [OURS, "vllm::moe_forward.default"])
def test_pieces_that_end_at_a_layer_are_refused(mode: CUDAGraphMode, named: str) -> None:
    split = [*CompilationConfig._attention_ops, named]
    compilation = _compilation(cudagraph_mode=mode, splitting_ops=split)
    found = list(graphs.problems(SimpleNamespace(compilation_config=compilation)))
    assert bool(found) == ("PIECEWISE" in mode.name)
    for message in found:
        assert named in message
        assert f"cudagraph_mode is {mode.name}" in message
    compilation.splitting_ops = CompilationConfig._attention_ops
    assert list(graphs.problems(SimpleNamespace(compilation_config=compilation))) == []


CAPACITY = 2048


def _sizes(**compiled: Any) -> list[int]:
    """The sizes that vLLM captures."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=CAPACITY, max_num_seqs=4096),
        compilation_config=CompilationConfig(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **compiled
        ),
        speculative_config=None,
        uniform_decode_query_len=1,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    sizes: list[int] = config.compilation_config.cudagraph_capture_sizes
    return sizes


@pytest.mark.parametrize(
    ("compiled", "largest"),
    [
        ({}, 512),
        ({"max_cudagraph_capture_size": 10 * CAPACITY}, CAPACITY),
        ({"cudagraph_capture_sizes": [12, CAPACITY - 1, CAPACITY + 1]}, CAPACITY - 1),
    ],
)
def test_no_graph_is_larger_than_the_exchange(compiled: dict[str, Any], largest: int) -> None:
    """vLLM drops larger sizes; a step's slots then hold its tokens, also those of a rounded one."""
    sizes = _sizes(**compiled)
    assert max(sizes) == largest
    assert all(size <= bound_of_step(size, CAPACITY) <= CAPACITY for size in sizes)


def _agree(*configured: SimpleNamespace) -> list[str]:
    """What each rank is told; "" if nothing."""

    def body(group: ThreadGroup) -> str:
        config = configured[group.rank]
        try:
            graphs.agree(config, Ranks(group, group.rank, group.size, WORDING))
        except DisagreementError as error:
            return str(error)
        return ""

    return run_ranks(len(configured), body)


def _worker(v2: bool = True, **compiled: Any) -> SimpleNamespace:
    return SimpleNamespace(compilation_config=_compilation(**compiled), use_v2_model_runner=v2)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"mode": 0}, "mode"),
        ({"cudagraph_mode": CUDAGraphMode.NONE}, "cudagraph_mode"),
        ({"cudagraph_capture_sizes": [1, 2, 4]}, "cudagraph_capture_sizes"),
        ({"compile_sizes": [16]}, "compile_sizes"),
        ({"compile_ranges_endpoints": [64, 2048]}, "compile_ranges_endpoints"),
        ({"v2": False}, "use_v2_model_runner"),
    ],
)
def test_ranks_that_capture_different_sizes_are_refused(other: dict[str, Any], named: str) -> None:
    messages = _agree(_worker(), _worker(**other))
    assert len(set(messages)) == 1
    assert f"({named}: rank 0 has " in messages[0]
    assert ", rank 1 has " in messages[0]
    assert "--compilation-config" in messages[0]


def test_ranks_that_capture_equal_sizes_go_on() -> None:
    assert _agree(_worker(), _worker()) == ["", ""]
