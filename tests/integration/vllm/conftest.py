from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch


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


@pytest.fixture
def in_context() -> Iterator[Callable[..., None]]:
    """Sets vLLM's forward context: sizes of all ranks, a mask of padding rows, ranks of a batch."""
    import torch
    from vllm import forward_context

    before, contexts = forward_context._forward_context, contextlib.ExitStack()

    def enter(
        sizes: list[int] | None = None, is_padding: torch.Tensor | None = None, slices: int = 1
    ) -> None:
        metadata = None
        if sizes is not None:
            metadata = forward_context.DPMetadata(torch.tensor(sizes))
            contexts.enter_context(metadata.sp_local_sizes(slices))  # as vLLM's runner does
        forward_context._forward_context = forward_context.ForwardContext(
            no_compile_layers={},
            attn_metadata={},
            slot_mapping={},
            dp_metadata=metadata,
            is_padding=is_padding,
        )

    with contexts:
        yield enter
    forward_context._forward_context = before
