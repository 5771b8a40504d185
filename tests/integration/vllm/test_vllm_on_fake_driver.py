"""The whole CUDA path below vLLM's experts, between processes, on the stand-in driver.

vLLM's modular kernel, our prepare and finalize for CUDA ranks, the CUDA executor through unmodified
cuda-python, and the nvlink transport with descriptors between processes; kernels from the host
build, or their PTX. What a GPU would add is the hardware and torch's own kernels. Launches are also
captured and replayed as vLLM's CUDA graphs are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import kernel_texts

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context

from moe_nvlink_plugin.config import local_expert_range
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.recipes import FP8_BLOCK, MXFP8, NVFP4
from tests.integration.vllm.moe.test_vllm_quantised import GLOBAL_SCALES, experts_of, restored
from tests.integration.vllm.moe.vllm_layer import (
    HIDDEN_SIZE,
    NUM_EXPERTS,
    Experts,
    Layer,
    config_of,
    dense,
    ragged,
    take_cuda_branches,
    work_of,
    worst_of,
)
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.transport import OnFakeDriver, capturing, install
from tests.support.ranks import run_processes

NUM_ROUNDS = 6
#: What a round asks the driver beside its launches. None of them waits for a stream or makes one
#: wait, such as the stream of vLLM's shared experts.
QUESTIONS = {"cuCtxGetCurrent", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuStreamIsCapturing"}


#: What travels: the recipe of quantised experts, or of a user who names one, and combine's format.
FORMATS = (
    (None, Options()),
    (FP8_BLOCK, Options()),
    (NVFP4, Options()),
    (MXFP8, Options(dispatch="mxfp8")),
    (NVFP4, Options(combine="fp8_block")),
)


def _experts(recipe: Any, options: Options) -> Experts:
    if recipe is None or options.dispatch != "auto":
        return Experts()
    return experts_of(recipe)


def _format_body(group: Any, recipe: Any, options: Options) -> dict[str, Any]:
    """The largest error of ragged rounds, and how often the driver was asked to launch what."""
    before = fake_cuda.control().last_launch().count
    layer = Layer(
        group,
        experts=_experts(recipe, options),
        options=options,
        transport=OnFakeDriver.name,
    )
    assert layer.exchange._layer.workspace.executor.asynchronous
    errors = []
    for hidden, ids, weights in ragged(group.rank, NUM_ROUNDS):
        fake_cuda.control().fail()  # counts from here on
        got = layer(hidden, ids, weights)
        if recipe:
            hidden = restored(recipe, hidden, GLOBAL_SCALES.get(recipe.name))
        errors.append(worst_of(got, dense(hidden, ids, weights)))
        assert layer.experts.calls[-1].output is layer.exchange.combine_input()
        layer.poison()
    calls, launched = fake_cuda.control().calls(), fake_cuda.control().last_launch()
    layer.close()
    return {
        "worst": max(errors),
        "launches": launched.count - before,
        "last": launched.name.decode(),
        "calls": calls,
    }


#: Tokens of the graphs, in the order in which vLLM captures them. The first travels by the kernels
#: for large batches, and comes back by them.
SIZES = (40, 8)
NUM_REPLAYS = 5
#: The replay before which the memory is given back, and mapped anew.
RELEASED_BEFORE = 2


class Step:
    """A rank's buffers of all steps, as a model runner keeps them, and one layer that reads them.

    Attributes:
        hidden, ids, weights: What the layer gets, of the largest size.
        is_padding: `[largest size]` bool.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.layer = Layer(group, transport=OnFakeDriver.name, max_tokens_per_rank=SIZES[0])
        #: What a graph's memory pool would keep: replays write to it.
        self.kept: list[Any] = []
        dispatch = self.layer.exchange.dispatch

        def keep(*given: Any, **more: Any) -> Any:
            self.kept.append(dispatch(*given, **more))
            return self.kept[-1]

        self.layer.exchange.dispatch = keep  # type: ignore[method-assign]
        self.hidden, self.ids, self.weights = work_of(SIZES[0], group.rank)
        self.is_padding = torch.zeros(SIZES[0], dtype=torch.bool)

    def run(self, size: int) -> torch.Tensor:
        """The layer's output in a step of so many tokens on each rank, padding included."""
        sizes = [size] * self.group.size
        context = ForwardContext(
            no_compile_layers={},
            attn_metadata={},
            slot_mapping={},
            dp_metadata=DPMetadata(torch.tensor(sizes), local_sizes=sizes),
            is_padding=self.is_padding[:size],
        )
        with override_forward_context(context):
            return self.layer(self.hidden[:size], self.ids[:size], self.weights[:size])

    def renew(self, seed: int, filled: int) -> None:
        """Other tokens in the same buffers; those from `filled` on are padding."""
        fresh = work_of(SIZES[0], seed)
        for buffer, content in zip((self.hidden, self.ids, self.weights), fresh, strict=True):
            buffer.copy_(content)
        self.is_padding.copy_(torch.arange(SIZES[0]) >= filled)

    def expected_of_replay(self, size: int, values: list[float]) -> torch.Tensor:
        """A replay has no experts in it: combine adds what lies in the region of each rank."""
        ends = torch.tensor([local_expert_range(NUM_EXPERTS, len(values), r)[1] for r in (0, 1)])
        owners = torch.bucketize(self.ids[:size].long(), ends, right=True)
        goes = [((owners == r) & (self.ids[:size] >= 0)).any(1) for r in (0, 1)]
        sums = sum(value * chosen for value, chosen in zip(values, goes, strict=True))
        rows: torch.Tensor = torch.where(self.is_padding[:size], 0.0, sums)
        return rows[:, None].expand(size, HIDDEN_SIZE)

    def arrived(self, size: int, received: torch.Tensor) -> bool:
        """Whether the rows of all ranks' last round lie where its experts would read them."""
        mine = self.hidden[:size], self.ids[:size], self.is_padding[:size]
        everyones = self.group.all_gather_object(mine)
        first, end = local_expert_range(NUM_EXPERTS, self.group.size, self.group.rank)
        right, blocks = True, received.view(-1, size, HIDDEN_SIZE)
        for block, (hidden, ids, padding) in zip(blocks, everyones, strict=True):
            sent = hidden[((ids >= first) & (ids < end)).any(1) & ~padding]
            right &= _sorted(block[: len(sent)]) == _sorted(sent)
        return right


def _sorted(rows: torch.Tensor) -> list[list[float]]:
    return sorted(rows.tolist())


def _graphs_body(group: Any) -> dict[str, Any]:
    """Captures as vLLM does: a warm-up, then the graph; eager steps between the replays.

    The graph of the smaller size holds two layers, as a full graph does, or a piece whose attention
    is captured.
    """
    control, step = fake_cuda.control(), Step(group)
    outputs: list[tuple[int, torch.Tensor]] = []
    for size in SIZES:
        step.run(size)
        num_layers = 1 if size == SIZES[0] else 2
        with capturing():
            outputs += [(size, step.run(size)) for _ in range(num_layers)]
    last_size, received = outputs[-1][0], step.layer.experts.calls[-1].hidden_states
    right, errors = [control.captured() == 2 * len(outputs)], []
    for number in range(NUM_REPLAYS):
        step.renew(10 * number + group.rank, (5 * number + 3 * group.rank) % (SIZES[0] + 1))
        values = [float(number + 1), 10.0 * (number + 1)]
        group.all_gather_object(None)  # the other rank has read what lay there
        if number == RELEASED_BEFORE:
            step.layer.exchange.release()
            step.layer.exchange.renew(group, range(group.size))
            workspace = step.layer.exchange._layer.workspace
            for offset, size_bytes in workspace.extents:
                workspace.memory.local(offset, size_bytes)  # lets torch's CPU kernels touch it
        step.layer.exchange.combine_input().fill_(values[group.rank])
        group.all_gather_object(None)
        control.replay()
        for size, output in outputs:
            right.append(torch.equal(output, step.expected_of_replay(size, values)))
        right.append(step.arrived(last_size, received))
        # A step without a graph: other sizes, no padding.
        step.renew(10 * number + 5 + group.rank, SIZES[0])
        got = step.run(3 + number)
        wanted = dense(step.hidden[: len(got)], step.ids[: len(got)], step.weights[: len(got)])
        errors.append(worst_of(got, wanted))
    rounds = step.layer.exchange.stats().rounds
    step.layer.close()
    return {"right": right, "worst": max(errors), "rounds": rounds}


def layer_body(rank: int, size: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One result for each of FORMATS, and that of the captures."""
    install()
    take_cuda_branches(setattr)
    group = as_group(torch.distributed.group.WORLD, 60)
    return [_format_body(group, *one) for one in FORMATS], _graphs_body(group)


def _units() -> list[ptx.Unit]:
    """What the layers of FORMATS load."""
    named = [(None if recipe is None else recipe.name, one.combine) for recipe, one in FORMATS]
    return ptx.of_configs(*(config_of(2, 0, recipe=name, combine=to) for name, to in named))


@pytest.mark.parametrize("on", ["host", ptx.LONG])
def test_the_layer_between_processes_on_the_stand_in_driver(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, Path] = (
        {"ptx": ptx.prepare(tmp_path / "ptx", _units())}
        if on == "ptx"
        else {"kernels": host.build(kernel_texts.host_source())}
    )
    variables = fake_cuda.environment(fake_cuda.build(tmp_path), **runs)
    # Both verbs' kernels for small batches, however few SMs the stand-in has.
    variables["MOE_NVLINK_SMALL_TOKENS"] = "32"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for results, captured in run_processes(2, layer_body, tmp_path):
        assert all(captured["right"]), captured
        assert captured["worst"] < 1e-5
        # Warm-ups, three layers in each replay, and an eager step after it.
        assert captured["rounds"] == len(SIZES) + (3 + 1) * NUM_REPLAYS
        for result, (_, options) in zip(results, FORMATS, strict=True):
            # Sums of at most top_k rows of experts that give at most 1, in e4m3: 3 * 1 / 28.
            assert result["worst"] < (1e-5 if options.combine == "bf16" else 0.11)
            # Units carry unquantised rows, so only these come back by the kernel for small batches.
            last = "small_combine" if options.combine == "bf16" else "combine"
            assert result["launches"] == 2 * NUM_ROUNDS
            assert result["last"] == f"moe_nvlink_{last}"
            assert result["calls"].pop("cuLaunchKernelEx") == 2
            assert result["calls"].keys() <= QUESTIONS
