"""A server whose experts change their ranks while it answers.

Greedy tokens in float32 must be those of a one-rank server, and the counters must show that experts
have moved meanwhile, again and again. The balancer, its policy, its code that moves weights and its
communicator are vLLM's, and so are the experts and their packing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.servers.servers import EpServer, Requests
from tests.integration.servers.test_vllm_e2e import QWEN3, _num_moe_layers

pytestmark = pytest.mark.e2e

#: Of a few hundred steps; requests are on their way in most of them.
INTERVAL = 12
SERVED = ["--data-parallel-size=2", "--enforce-eager", "--enable-eplb"]
BALANCING = {"num_redundant_experts": 2, "step_interval": INTERVAL, "window_size": INTERVAL}


def test_tokens_stay_those_of_one_rank(requests: Requests, folder: Path) -> None:
    chosen = f"--eplb-config={json.dumps(BALANCING)}"
    with EpServer(requests, folder, "eplb", *SERVED, chosen) as server:
        assert server.differing(range(4), concurrency=1) == [], "one rank is idle"
        first = server.stats(2)
        assert server.differing(range(4, 24), concurrency=6) == []
        then = server.stats(2)
        server.check_traffic(2, 24, _num_moe_layers(QWEN3))
    for before, after in zip(first, then, strict=True):
        assert before["eplb"]["rearrangements"] >= 2
        assert after["eplb"]["rearrangements"] >= before["eplb"]["rearrangements"] + 2
        assert after["eplb"]["moved"] > before["eplb"]["moved"] > 0
    assert len({json.dumps(one["eplb"]) for one in then}) == 1
