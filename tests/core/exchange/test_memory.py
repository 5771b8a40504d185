"""MoeAllToAll.memory and `moe-nvlink doctor --memory`: what a workspace will take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.testing import ThreadGroup
from moe_nvlink_plugin.tools import cli

CONFIG = AllToAllConfig(
    ep_size=1, ep_rank=0, num_experts=8, top_k=2, hidden_size=256, max_tokens_per_rank=40
)
LAYER = "ep_size=64,max_tokens_per_rank=8192,hidden_size=7168,top_k=8"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"small_tokens": 8, "num_channels": 3},
        {"recipe": "mxfp8", "combine": "nvfp4", "scales_layout": "interleaved"},
        {"num_expert_counts": 8, "extra_payload_bytes": (6, 12)},
    ],
    ids=str,
)
def test_what_is_foretold_is_what_a_layer_takes(given: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **given)
    (group,) = ThreadGroup.ranks(1)
    foretold = MoeAllToAll.memory(config)
    with MoeAllToAll.create(config, group) as layer:
        assert sum(foretold.values()) == layer.workspace_bytes
    assert ("small batches" in foretold) == ("small_tokens" in given)
    assert ("experts' quantised output" in foretold) == ("combine" in given)
    assert ("counts per expert" in foretold) == ("num_expert_counts" in given)


def test_rows_are_what_takes_memory() -> None:
    ranks, tokens, hidden = 64, 8192, 7168
    config = dataclasses.replace(
        CONFIG, ep_size=ranks, num_experts=256, max_tokens_per_rank=tokens, hidden_size=hidden
    )
    foretold = MoeAllToAll.memory(config, "cuda")
    assert foretold["experts' output"] == ranks * tokens * hidden * 2
    quantised = MoeAllToAll.memory(dataclasses.replace(config, recipe="fp8_block"), "cuda")
    assert quantised["received rows"] < 0.6 * foretold["received rows"]
    with pytest.raises(ConfigError, match="unknown"):
        MoeAllToAll.memory(dataclasses.replace(config, recipe="none of ours"))


def test_the_command_says_what_takes_most_and_what_halves_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--memory", LAYER]) == 0
    total, *_parts, half, quantised = capsys.readouterr().out.splitlines()
    assert total.strip().startswith("14.1 GiB on each of 64 ranks")
    assert half.strip() == "7.1 GiB with max_tokens_per_rank=4096"
    assert float(quantised.split()[0]) < 11


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing stands beside a comma"),
        ("ep_size=8,top_k=8", "missing: max_tokens_per_rank, hidden_size"),
        (f"{LAYER},ranks=8", "not so: ranks"),
        (LAYER.replace("64", "-64"), "not so: ep_size"),
        (LAYER.replace("64", "640"), "ep_size=640"),
        (f"{LAYER},num_channels=64", "exceeds the limit"),
    ],
)
def test_what_is_no_layer_is_refused(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--memory", text]) == 1
    assert said in capsys.readouterr().err
