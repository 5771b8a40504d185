"""The product's own path on a GPU, one rank: what `moe-nvlink verify --ranks 1` does not show.

test_real_processes.py has several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.errors import ExchangeStateError
from moe_nvlink_plugin.testing import ThreadGroup
from moe_nvlink_plugin.verify import cases
from moe_nvlink_plugin.verify.cases import Case
from tests.support import emulated, real_path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

each_kind = pytest.mark.parametrize(
    "case", [real_path.ONE_RANK, real_path.SMALL], ids=["any size", "small"]
)
with_and_without_pdl = pytest.mark.parametrize("pdl", ["0", "1"], ids=["plain", "pdl"])


@each_kind
@with_and_without_pdl
def test_capture_from_the_first_call(case: Case, pdl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_PDL", pdl)
    real_path.check_replays("cuda", 1000, case)


def test_capture_of_rows_that_must_be_copied() -> None:
    real_path.check_replays("cuda", rounds=100, zero_copy=False)


QUANTISED = cases.with_formats(real_path.ONE_RANK, "fp8_token", "fp8_block")


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_quantisers(recipe: str) -> None:
    real_path.check_quantiser("cuda", recipe)


def test_capture_of_quantised_rounds() -> None:
    """The scale that fp8_tensor is given stays where it is, and is read by every replay."""
    real_path.check_replays("cuda", 200, QUANTISED)
    given = cases.with_formats(real_path.ONE_RANK, "fp8_tensor", "fp8_block")
    real_path.check_replays("cuda", 200, given)


def test_code_of_inductor() -> None:
    real_path.check_compiled("cuda", 50)


@pytest.mark.parametrize("max_sms", [1, 5, None])
def test_more_tokens_than_fit(max_sms: int | None) -> None:
    real_path.check_sm_budget("cuda", tokens=3000, max_sms=max_sms)


@each_kind
def test_two_channels_on_two_streams(case: Case) -> None:
    real_path.check_two_channels("cuda", 100, case)


def test_bad_input() -> None:
    real_path.check_bad_input("cuda", elsewhere="cpu")


def test_growth_is_refused_during_capture() -> None:
    larger = real_path.of_processes(1).config(0)
    with real_path.create(real_path.ONE_RANK, "cuda") as layer:
        static = real_path.StaticLayer(layer, "cuda")
        static.warm_up()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.run()
            with pytest.raises(ExchangeStateError, match="capturing a CUDA graph"):
                MoeAllToAll.create(larger, ThreadGroup.ranks(1)[0], "cuda", share_with=layer)
        (inputs,) = emulated.varying_inputs(real_path.ONE_RANK, 1)[0]
        static.fill(inputs.to("cuda"))
        graph.replay()
        real_path.check_output(real_path.ONE_RANK, inputs, 0, static.output.cpu())


def test_a_graph_outlives_its_workspace() -> None:
    """Closed while a graph still holds its addresses: a replay writes to no stranger's memory."""
    layer = real_path.create(real_path.ONE_RANK, "cuda")
    static = real_path.StaticLayer(layer, "cuda")
    replay = real_path.replayable(static, "cuda")
    layer.close()
    for (inputs,) in emulated.varying_inputs(real_path.ONE_RANK, 3):
        static.fill(inputs.to("cuda"))
        replay()
        real_path.check_output(real_path.ONE_RANK, inputs, 0, static.output.cpu())


def test_another_stream() -> None:
    """A launch goes to torch's current stream: behind work of that stream, not beside it."""
    cuda: Any = torch.cuda  # torch ships no types for what is used here
    stream = cuda.Stream()
    (inputs,) = emulated.varying_inputs(real_path.ONE_RANK, 2)[1]
    with real_path.create(real_path.ONE_RANK, "cuda") as layer:
        static = real_path.StaticLayer(layer, "cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            cuda._sleep(20_000_000)  # about 10 ms of the GPU's clock
            static.fill(inputs.to("cuda"))
            static.run()
        stream.synchronize()
        real_path.check_output(real_path.ONE_RANK, inputs, 0, static.output.cpu())
