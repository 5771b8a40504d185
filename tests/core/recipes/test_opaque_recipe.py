"""Recipe bytes_N: rows of any bytes; tests/flashinfer sends them."""

from __future__ import annotations

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, QuantisingRecipe
from moe_nvlink_plugin.config import ACTIVATION_DTYPES
from moe_nvlink_plugin.errors import ConfigError, InputError
from moe_nvlink_plugin.testing import ThreadGroup
from tests.core.exchange.small_exchange import config


def config_of(recipe: str, dtype: torch.dtype = torch.bfloat16) -> AllToAllConfig:
    return config(top_k=1, dtype=dtype, recipe=recipe)


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES)
@pytest.mark.parametrize("row_bytes", [1, 7, 4096, 2**24])
def test_rows_are_as_wide_as_the_name_says(row_bytes: int, dtype: torch.dtype) -> None:
    recipe = MoeAllToAll.check(config_of(f"bytes_{row_bytes}", dtype))
    row = recipe.hidden_row(8)
    assert (row.dtype, row.row_bytes) == (torch.uint8, row_bytes)
    assert recipe.scales_row(8) is None
    assert recipe.name == f"bytes_{row_bytes}"
    assert not isinstance(recipe, QuantisingRecipe)


@pytest.mark.parametrize("name", ["bytes_0", "bytes_", "bytes_07", "bytes_16777217", "bytes_4 "])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is unknown; installed are .*and bytes_N for rows of N"):
        MoeAllToAll.check(config_of(name))


def test_rows_of_other_bytes_are_refused_and_its_own_arrive() -> None:
    (group,) = ThreadGroup.ranks(1)
    ids, weights = torch.ones(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with MoeAllToAll.create(config_of("bytes_5"), group) as exchange:
        with pytest.raises(InputError, match=r"has shape \[2, 6\], expected \[2, 5\]"):
            exchange.dispatch(torch.zeros(2, 6, dtype=torch.uint8), ids, weights)
        with pytest.raises(InputError, match="hidden_states has dtype torch.bfloat16, expected"):
            exchange.dispatch(torch.zeros(2, 5, dtype=torch.bfloat16), ids, weights)
        rows = torch.arange(10, dtype=torch.uint8).view(2, 5)
        received = exchange.dispatch(rows, ids, weights)
        assert torch.equal(received.hidden_states[:2].sort(dim=0).values, rows)
        expert_output = torch.ones(4, 8, dtype=torch.bfloat16)
        assert torch.equal(exchange.combine(expert_output, received.metadata), expert_output[:2])
