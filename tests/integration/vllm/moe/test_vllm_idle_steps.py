"""Dummy batches of CPU ranks: the calls of the MoE layers, without the rest of the model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.integration.vllm.moe import idle_steps
from moe_nvlink_plugin.integration.vllm.moe.idle_steps import IdleSteps


class Model(torch.nn.Module):
    """Two MoE layers, the second of which gets no shared input; `seen` is what each one got."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.seen: list[tuple[str, Any, Any]] = []
        self.fails_in = ""

    def moe(self, name: str, rows: torch.Tensor, shared: torch.Tensor | None) -> None:
        idle_steps.note(self.layer, name, rows, shared)
        self.layer(name, rows, shared)

    def layer(self, name: str, rows: torch.Tensor, shared: torch.Tensor | None) -> None:
        if name == self.fails_in:
            raise RuntimeError("a rank has died")
        self.seen.append((name, rows.clone(), shared))
        rows.fill_(7)  # vLLM's op may write its input

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        rows = torch.full((len(positions), 4), 3.0)
        self.moe("first", rows, rows + 1)
        self.moe("second", rows, None)
        return rows


def dummy_batch(steps: IdleSteps, model: torch.nn.Module, num_tokens: int = 1) -> Any:
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    with steps.of(model):
        return model(input_ids=tokens, positions=tokens)


def test_later_batches_repeat_the_calls_alone() -> None:
    steps, model = IdleSteps(), Model()
    whole = dummy_batch(steps, model)
    assert dummy_batch(steps, model) is whole
    assert dummy_batch(steps, model) is whole
    assert model.runs == 1
    assert [name for name, _, _ in model.seen] == ["first", "second"] * 3
    for name, rows, shared in model.seen[2:]:
        assert rows.shape == (1, 4)
        assert (shared is None) == (name == "second")
    first_repeated = model.seen[2]
    assert not first_repeated[1].any(), "no request's rows"
    assert first_repeated[2] is not None
    assert not first_repeated[2].any()


def test_the_model_is_itself_between_dummy_batches() -> None:
    steps, model = IdleSteps(), Model()
    for _ in range(2):
        dummy_batch(steps, model)
    assert "forward" not in vars(model)
    positions = torch.arange(3)
    assert model(input_ids=positions, positions=positions).shape == (3, 4)
    assert model.runs == 2
    another = functools.partial(Model.forward, model)
    model.forward = another  # type: ignore[method-assign]
    for _ in range(2):
        dummy_batch(steps, model)
    assert model.forward is another
    assert model.runs == 2


def test_a_batch_of_another_size_runs_the_model() -> None:
    steps, model = IdleSteps(), Model()
    for size, runs in ((1, 1), (2, 2), (2, 2), (1, 3)):
        dummy_batch(steps, model, size)
        assert model.runs == runs
        assert len(model.seen[-1][1]) == size


def test_a_model_whose_layers_tell_nothing_always_runs() -> None:
    class Dense(torch.nn.Module):
        runs = 0

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return positions

    steps, model = IdleSteps(), Dense()
    for _ in range(3):
        dummy_batch(steps, model)
    assert model.runs == 3


def test_without_positions_the_model_runs() -> None:
    class NoPositions(Model):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(input_ids, input_ids)

    steps, model = IdleSteps(), NoPositions()
    for _ in range(2):
        with steps.of(model):
            model(torch.zeros(1, dtype=torch.int64))
    assert model.runs == 2


def test_a_model_that_is_compiled_as_a_whole_is_left_alone() -> None:
    class Compiled(Model):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return Model.forward(self, *args, **kwargs)

    steps, model = IdleSteps(), Compiled()
    for _ in range(2):
        dummy_batch(steps, model)
    assert model.runs == 2

    other = Model()
    other.compile(backend="eager")
    with IdleSteps().of(other):
        assert "forward" not in vars(other)


@pytest.mark.parametrize("batch", [1, 2], ids=["noting", "repeating"])
def test_a_batch_that_fails_tells_and_leaves_the_model(batch: int) -> None:
    steps, model = IdleSteps(), Model()
    for _ in range(batch - 1):
        dummy_batch(steps, model)
    model.fails_in = "second"
    with pytest.raises(RuntimeError, match="a rank has died"):
        dummy_batch(steps, model)
    model.fails_in = ""
    assert "forward" not in vars(model)
    assert idle_steps._noted is None
    model.seen.clear()
    dummy_batch(steps, model)
    assert [name for name, _, _ in model.seen] == ["first", "second"]
