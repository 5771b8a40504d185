"""vLLM's experts of MXFP4 weights in Triton behind our dispatch, executed by Triton's interpreter.

What several ranks compute, with expert_map, ids of experts elsewhere, padding, and empty slots that
hold NaN, must be the dense product with dequantised weights. interpreted_kernels.py names the
stand-ins.

Triton is in the environment of `make vllm33-env`, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from vllm.triton_utils import HAS_TRITON
from vllm.utils.import_utils import get_triton_kernels_version

if not HAS_TRITON:
    pytest.skip(
        "Triton does not run here: make vllm33-env, TRITON_INTERPRET=1", allow_module_level=True
    )
if (found := get_triton_kernels_version()) != "3.5.1":
    pytest.skip(
        f"the stand-ins are for the triton_kernels 3.5.1 in vLLM 0.33's wheel; here: {found}",
        allow_module_level=True,
    )

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe import interpreted_kernels, vllm_triton
from tests.integration.vllm.moe.vllm_layer import ragged, way_of, worst_of
from tests.integration.vllm.moe.vllm_mxfp4 import (
    HIDDEN,
    KINDS,
    LAYOUTS,
    Mxfp4Layer,
    dense,
    rows_and_choices,
)

#: Of the largest number. Rounded to BF16, and not by `dense`: the output for each choice, a rank's
#: sum and the sum of ranks, and before the gate the rows of the class that is not fused.
MOST_ERROR = 2**-6


@pytest.fixture(params=LAYOUTS, ids=lambda capability: f"sm_{capability}", autouse=True)
def on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = functools.partial(monkeypatch.setattr, raising=False)
    vllm_triton.stand_in(replace)
    interpreted_kernels.stand_in(replace, request.param)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("ep_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_layer_is_a_dense_product(kind: type[Any], ep_size: int) -> None:
    """Ragged rounds, of no token and of many."""

    def rank_main(group: ThreadGroup) -> tuple[list[float], str | None, bool]:
        with set_current_vllm_config(VllmConfig()), Mxfp4Layer(group, kind) as layer:
            errors = []
            for number, (narrow, _ids, _weights) in enumerate(ragged(group.rank, 4)):
                work = rows_and_choices(len(narrow), 100 * number + group.rank)
                got = layer(*work)
                assert got.shape == (len(narrow), HIDDEN)
                assert got.dtype == torch.bfloat16
                if len(narrow):
                    expected = dense(kind, *work)
                    errors.append(worst_of(got.float(), expected) / float(expected.abs().max()))
                layer.poison()
            return errors, *way_of(layer)

    for errors, recipe, is_in_place in run_ranks(ep_size, rank_main):
        print("largest errors of the rounds", errors)
        assert errors
        assert all(error < MOST_ERROR for error in errors), errors
        assert recipe is None
        assert is_in_place
