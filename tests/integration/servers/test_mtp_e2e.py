"""Real servers whose MTP drafts share one LM head, against drafts that have it whole.

The one-rank server of this module speculates without any plugin. Greedy tokens of servers with a
shared head must be its tokens, and vLLM must have drafted and accepted as many: the two best logits
of this checkpoint are never so close that float32 sums in another order change a draft. Counters of
the workers show that the head was shared in every step, by the ranks without requests too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_nvlink_plugin.integration.demo.server import Server
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MTP_MODEL, write_checkpoint
from tests.integration.servers import stop_on_order
from tests.integration.servers.servers import (
    Asking,
    EpServer,
    ForkedServer,
    Requests,
    Stops,
    check_stopped_rank_is_named,
    metrics,
    our_files,
    send_signal,
)
from tests.support.long_tests import first_of

pytestmark = pytest.mark.e2e

#: Draft tokens of one proposal: as many forwards of the draft, and looks at its head.
STEPS = 3
#: MoE layers in one step of the target model, and in one of the draft.
TARGET_LAYERS = MTP_MODEL.num_layers - MTP_MODEL.num_dense_layers
#: Requests are counted in blocks of so many.
BLOCK = 4
NUM_SEQUENCES = 24
#: The last request: one rank answers it, alone for hundreds of steps.
LONG = NUM_SEQUENCES
LONG_LENGTH = 160
#: Whether the servers have vLLM's V2 model runner (test_vllm33.py).
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
#: Of the servers with a rank that never comes; the tests wait as long.
SHORT_TIMEOUT_S = 6


class Drafts(NamedTuple):
    """What vLLM says of its speculation, over all ranks."""

    proposals: int
    drafted: int
    accepted: int

    @classmethod
    def before(cls, server: Server) -> Drafts:
        """The totals of a server that was asked nothing since `of` looked last."""
        return _LAST_SEEN.get(server, cls(0, 0, 0))

    @classmethod
    def of(cls, server: Server) -> Drafts:
        """The totals of a server, once they have come to rest."""
        seen: list[Drafts] = []
        deadline = time.monotonic() + 60
        # Engines send their counters with each step's outputs, so behind the last answer little is
        # still to come; four equal looks also cover a machine that is busy elsewhere.
        while len(set(seen[-4:])) != 1 or len(seen) < 4:
            assert time.monotonic() < deadline, f"the counters do not come to rest: {seen[-4:]}"
            names = ("drafts", "draft_tokens", "accepted_tokens")
            found = metrics(server)
            seen.append(cls(*(int(found[f"vllm:spec_decode_num_{one}_total"]) for one in names)))
            time.sleep(0.15)
        _LAST_SEEN[server] = seen[-1]
        return seen[-1]

    def __sub__(self, other: Drafts) -> Drafts:
        return Drafts(*(one - two for one, two in zip(self, other, strict=True)))


_LAST_SEEN: weakref.WeakKeyDictionary[Server, Drafts] = weakref.WeakKeyDictionary()


class Reference(NamedTuple):
    """Requests, the tokens of drafts with a whole head, and what each block of requests drafted."""

    requests: Requests
    blocks: list[Drafts]

    def drafts(self, numbers: Sequence[int]) -> Drafts:
        """Of requests that are whole blocks, or the long one."""
        firsts = [number for number in numbers if number % BLOCK == 0]
        return Drafts(*map(sum, zip(*(self.blocks[n // BLOCK] for n in firsts), strict=True)))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    checkpoint = write_checkpoint(folder / "mtp", MTP_MODEL)
    longest = (60, 30)
    requests = Requests.drawn(checkpoint, MTP_MODEL.vocab_size, NUM_SEQUENCES + 1, longest=longest)
    requests.lengths[LONG] = LONG_LENGTH
    server = ForkedServer(
        model=checkpoint,
        name="one rank",
        folder=folder,
        arguments=["--enforce-eager", *speculating()],
        with_plugins=False,
    )
    blocks = []
    with server:
        server.wait_until_ready()
        for first in range(0, NUM_SEQUENCES + 1, BLOCK):
            block = slice(first, first + BLOCK)
            before = Drafts.before(server)
            asked = requests._replace(
                prompts=requests.prompts[block], lengths=requests.lengths[block]
            )
            requests.expected.extend(asked.ask(server))
            blocks.append(Drafts.of(server) - before)
    return Reference(requests, blocks)


def speculating(**config: str) -> list[str]:
    """vLLM's flag for drafts of the model's own draft layer."""
    return [
        "--speculative-config",
        json.dumps({"method": "mtp", "num_speculative_tokens": STEPS} | config),
    ]


def sharing(size: int | str) -> list[str]:
    """Our option for drafts."""
    return ["--additional-config", json.dumps({"moe_nvlink": {"mtp_lm_head_tp_size": size}})]


def ep_server(
    reference: Reference,
    folder: Path,
    name: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
) -> EpServer:
    """An eager server with our backend and a plugin that stops a rank in a draft step."""
    return EpServer(
        reference.requests,
        folder,
        name,
        "--enforce-eager",
        *arguments,
        environment={
            **Stops(folder, name).install(),
            "MOE_NVLINK_TIMEOUT_S": str(SHORT_TIMEOUT_S),
            **(environment or {}),
        },
    )


def check_same(
    server: EpServer,
    reference: Reference,
    numbers: range,
    concurrency: int,
    rank: int | None = None,
) -> Drafts:
    """The tokens and the counts of whole heads, for blocks of requests; returns the counts."""
    before = Drafts.before(server.server)
    assert server.differing(numbers, concurrency, rank) == []
    drafts = Drafts.of(server.server) - before
    assert drafts == reference.drafts(numbers)
    return drafts


def check_shared(stats: list[dict[str, Any]], size: int, drafted: int) -> None:
    """The counters of ranks that shared every draft step since they started.

    drafted: tokens that vLLM counted since; each needed one row of a draft step.
    """
    heads = [counters["mtp_lm_head"] for counters in stats]
    row_bytes = MTP_MODEL.hidden_size * 4
    for counters, head in zip(stats, heads, strict=True):
        assert counters["remote_destinations"] > 0  # the experts' rows, through our exchange
        assert head["tp_size"] == size
        assert head["steps_whole"] == 0
        # Every forward of the draft, those for company included, went with a round of the head.
        forwards = counters["rounds"] * STEPS / (TARGET_LAYERS + STEPS)
        assert head["rounds"] == forwards
        assert head["bytes_gathered_remote"] == head["rows"] * row_bytes * (size - 1)
        assert head["bytes_returned_remote"] > 0
    assert sum(head["rows"] for head in heads) >= drafted


@pytest.mark.long
def test_the_drafts_are_worth_counting(reference: Reference) -> None:
    """Some are accepted and some are not, else equal counts would say nothing."""
    for drafts in reference.blocks:
        assert drafts.drafted == STEPS * drafts.proposals
        assert 0.1 < drafts.accepted / drafts.drafted < 0.6


@pytest.fixture(scope="class")
def server(reference: Reference, folder: Path) -> Iterator[EpServer]:
    arguments = ("--data-parallel-size=2", *speculating(), *sharing(2))
    with ep_server(reference, folder, "dp2", *arguments) as server:
        yield server


class TestTwoRanks:
    """One server of two data-parallel ranks that share the head; the last test breaks it."""

    @pytest.mark.parametrize("concurrency", first_of([1, 5, 16, 2, 3, 4, *range(6, 16)], 3))
    def test_concurrent_requests(
        self, server: EpServer, reference: Reference, concurrency: int
    ) -> None:
        count = BLOCK * -(-concurrency // BLOCK)
        first = BLOCK * (concurrency % (1 + (NUM_SEQUENCES - count) // BLOCK))
        check_same(server, reference, range(first, first + count), concurrency)

    def test_a_rank_that_is_idle_for_a_long_time(
        self, server: EpServer, reference: Reference
    ) -> None:
        before = [counters["mtp_lm_head"] for counters in server.stats(2)]
        drafts = check_same(server, reference, range(LONG, LONG + 1), 1, rank=1)
        after = [counters["mtp_lm_head"] for counters in server.stats(2)]
        rounds, rows = (
            [new[field] - old[field] for old, new in zip(before, after, strict=True)]
            for field in ("rounds", "rows")
        )
        assert rounds[0] == rounds[1] >= drafts.drafted
        # For company, V1 calls the draft alone, and V2 lets a made-up request draft.
        assert rows[0] == (rounds[0] if V2 else 0)
        assert rows[1] >= drafts.drafted

    def test_every_step_was_shared(self, server: EpServer) -> None:
        stats = server.stats(2)
        check_shared(stats, 2, Drafts.of(server.server).drafted)
        assert our_files(stats) == []

    def test_a_rank_that_stops_in_a_draft_step_is_named(
        self, server: EpServer, folder: Path
    ) -> None:
        told = f"rank 0 waited {SHORT_TIMEOUT_S} s in head gather"
        check_stopped_rank_is_named(server, Stops(folder, "dp2"), stop_on_order.HEAD, told)


@pytest.mark.long
def test_four_ranks_then_kill_9_in_a_draft_step(reference: Reference, folder: Path) -> None:
    arguments = ("--data-parallel-size=4", *speculating())
    environment = {"MOE_NVLINK_MTP_LM_HEAD_TP": "4"}
    with ep_server(reference, folder, "dp4", *arguments, environment=environment) as server:
        check_same(server, reference, range(4), 1)
        check_same(server, reference, range(NUM_SEQUENCES), 16)
        check_same(server, reference, range(8), 3, rank=2)
        stats = server.stats(4)
        check_shared(stats, 4, Drafts.of(server.server).drafted)

        asking = Asking(server)
        Stops(folder, "dp4").tell(stop_on_order.HEAD, 2, signal.SIGKILL)
        asking.check_refused()
        log = server.server.log_path.read_text("utf-8", errors="replace")
        assert re.search(r"EngineCore_DP2 .* died unexpectedly \(exit code: -9\)", log)
        assert stats[2]["pid"] not in server.server.pids
        # Nobody gets to clean up: what is left in memory then was never going to be removed.
        for pid in server.server.pids:
            send_signal(pid, signal.SIGKILL)
        assert our_files(stats) == []


@pytest.mark.long
def test_two_groups_of_two_ranks_with_logits(reference: Reference, folder: Path) -> None:
    """Drafts that may be sampled need all logits, and none of the argmax's shortcuts."""
    arguments = (
        "--data-parallel-size=4",
        *speculating(draft_sample_method="probabilistic"),
        *sharing(2),
    )
    with ep_server(reference, folder, "dp4 in twos", *arguments) as server:
        check_same(server, reference, range(4), 1)
        check_same(server, reference, range(NUM_SEQUENCES), 16)
        # Of one group both ranks idle, of the other one.
        check_same(server, reference, range(8), 3, rank=3)
        stats = server.stats(4)
        check_shared(stats, 2, Drafts.of(server.server).drafted)
        words = MTP_MODEL.vocab_size * 4
        rows = sum(counters["mtp_lm_head"]["rows"] for counters in stats)
        returned = sum(counters["mtp_lm_head"]["bytes_returned_remote"] for counters in stats)
        assert returned > rows * words / 3  # pairs alone would be some bytes a row
