"""Stand-ins for the hub's models: what vLLM's tests need of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from tests.upstream import models

pytestmark = pytest.mark.long

MOE = "ibm-research/PowerMoE-3b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return models.redirect_file(folder).parent


def _redirects(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / models.REDIRECT_FILE).read_text("utf-8"))
    return found


def test_experts_differ(folder: Path) -> None:
    """Of equal experts, a token sent to the wrong one would come back right."""
    tensors = load_file(str(Path(_redirects(folder)[MOE]) / "model.safetensors"))
    experts = [one for name, one in tensors.items() if "output_linear" in name]
    assert experts
    for weights in experts:
        first, *rest = weights.flatten(1)
        assert all(not torch.equal(first, other) for other in rest)
