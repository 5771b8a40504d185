from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def environment_stays(environment: None) -> None:
    """Whatever vLLM does to it."""


@pytest.fixture
def cuda_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's modular kernel goes as on CUDA."""
    from tests.integration.vllm.moe.vllm_layer import take_cuda_branches

    take_cuda_branches(monkeypatch.setattr)


@pytest.fixture
def cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Layers of vLLM's can be made and run; each thread is a rank (`vllm_experts.join`).

    The `[rows, top_k]` ids of every call of vLLM's kernel.
    """
    from tests.integration.vllm.moe import vllm_experts

    with vllm_experts.ranks_of_vllm(monkeypatch) as calls:
        yield calls


@pytest.fixture
def cpu_layers(cpu_ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their runners too."""
    from tests.integration.vllm import vllm_runner

    with vllm_runner.forwards_of_vllm(monkeypatch):
        yield
