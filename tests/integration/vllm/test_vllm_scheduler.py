"""Our schedulers never evict, and otherwise do what vLLM's do: vLLM's real objects, no model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from vllm.config.cache import MambaCacheMode
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import CrossAttentionSpec
from vllm.v1.request import RequestStatus

from moe_nvlink_plugin.errors import ConfigError, UnsupportedError
from moe_nvlink_plugin.integration.vllm import choices, metrics
from moe_nvlink_plugin.integration.vllm.backend import schedules
from moe_nvlink_plugin.integration.vllm.scheduler import (
    AsyncGuaranteedNoEvictScheduler,
    GuaranteedNoEvictScheduler,
    capacity,
    reports,
)
from tests.integration.vllm.vllm_schedulers import (
    BLOCK,
    MAX_MODEL_LEN,
    Runner,
    configuration,
    full,
    local,
    mamba,
    prompt,
    request,
    scheduler,
    window,
)


@pytest.fixture(autouse=True, scope="module")
def _own_runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


def free_blocks(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


# Any load: nobody is evicted, and whoever has started can end.

ASYNC = {"asynchronous": True}
DRAFTS = {"drafts": "draft_model", "num_drafts": 3}
MAMBA = {"specs": (full(), mamba("align")), "mamba_mode": "align"}
TAILS = {
    "specs": (full(block_size=16), mamba("align", block_size=16)),
    "mamba_mode": "align",
}
#: What vLLM is asked to do: the KV cache groups, and arguments of `scheduler`.
WORLDS: dict[str, dict[str, Any]] = {
    "full": {},
    "chunks": {"max_num_batched_tokens": 8},
    "async": ASYNC,
    "priority": {"policy": "priority"},
    "no cache": {"prefix_caching": False},
    "drafts": DRAFTS,
    "ngram": {"drafts": "ngram", "num_drafts": 2},
    "async drafts": {**ASYNC, **DRAFTS},
    "window": {"specs": (window(8),), "max_num_batched_tokens": 16},
    "hybrid": {"specs": (full(), window(8), window(12)), "max_num_batched_tokens": 8},
    "async hybrid": {
        "specs": (full(), window(8)),
        "max_num_batched_tokens": 8,
        **ASYNC,
        **DRAFTS,
    },
    "mamba": MAMBA,
    "chunked local": {"specs": (full(), local(8)), "max_num_batched_tokens": 16},
    "mamba drafts": {
        "specs": (full(), mamba("align", drafts=3)),
        "mamba_mode": "align",
        "drafts": "ngram",
        "num_drafts": 3,
    },
    "partial hits": {
        "specs": (full(block_size=8), mamba("align", block_size=8)),
        "mamba_mode": "align",
    },
    "copied tails": TAILS,
    "async copied tails": {**TAILS, **ASYNC},
    "dcp": {"specs": (full(block_size=BLOCK // 2),), "dcp": 2},
    "adapters": {"max_loras": 1},
    "async mamba": {**MAMBA, **ASYNC, "max_num_batched_tokens": 8},
}
if "all" in typing.get_args(MambaCacheMode):  # up to vLLM 0.32
    WORLDS["mamba of all blocks"] = {"specs": (full(), mamba("all")), "mamba_mode": "all"}


class Arrival:
    """A request of a load: when it comes, what of, how long it says and how long it gets."""

    def __init__(self, draw: Any, number: int) -> None:
        self.name = f"r{number}"
        self.at = draw(st.integers(0, 12))
        shared = prompt(draw(st.integers(0, 1)), draw(st.integers(0, 20)))
        self.prompt = shared + prompt(100 + number, draw(st.integers(1, 16)))
        self.max_tokens = draw(st.integers(1, 27))
        self.length = draw(st.one_of(st.just(10**9), st.integers(1, 27)))
        self.priority = draw(st.integers(0, 2))
        self.aborted_after = draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))

    def request(self, *, adapters: bool = False) -> Any:
        one_of_two = 1 + int(self.name[1:]) % 2
        adapter = LoRARequest(f"a{one_of_two}", one_of_two, "nowhere") if adapters else None
        return request(
            self.name,
            self.prompt,
            self.max_tokens,
            lora_request=adapter,
            priority=self.priority,
            arrival_time=self.at + int(self.name[1:]) / 100,
        )


@st.composite
def loads(draw: Any) -> list[Arrival]:
    return [Arrival(draw, number) for number in range(draw(st.integers(2, 9)))]


def run(
    scheduler: Any, load: list[Arrival], seed: int, check: Any = None
) -> tuple[Runner, list[Any]]:
    """Run a load; return the runner, and what each step scheduled."""
    lengths = {arrival.name: arrival.length for arrival in load}
    runner = Runner(scheduler, lengths.__getitem__, seed)
    steps = []
    for now in range(26):
        for arrival in load:
            if arrival.at == now:
                scheduler.add_request(arrival.request(adapters=bool(scheduler.lora_config)))
            if arrival.aborted_after is not None and now == arrival.at + arrival.aborted_after + 1:
                scheduler.finish_requests(arrival.name, RequestStatus.FINISHED_ABORTED)
        steps.append(dict(runner.step().num_scheduled_tokens))
        if check is not None:
            check()
    return runner, steps + runner.drain()


def assert_all_can_end(scheduler: Any) -> None:
    """Count anew, by another way than the ledger does: blocks that exist, and all ends together.

    In a group that gives nothing back, the missing entries of the tables must be free. In a group
    that does, all requests at their largest must fit into the blocks that the group has and those
    that remain free.
    """
    manager = scheduler.kv_cache_manager
    free = free_blocks(scheduler)
    for group in scheduler._ledger._groups:
        table_of = group.manager.req_to_blocks
        used, largest = set(), 0
        for running in scheduler.running:
            table = table_of.get(running.request_id, [])
            length = group.length(running, scheduler._end_of(running))
            if not group.cap:
                free -= max(length - len(table), 0)
                continue
            gone = sum(block.is_null for block in table)
            largest += min(max(length, len(table)) - gone, group.cap)
            used |= {block.block_id for block in table if not block.is_null}
            assert sum(not block.is_null for block in table) <= group.cap
        free -= max(largest - len(used), 0) if group.cap else 0
    assert free >= 0
    assert manager.block_pool.get_num_free_blocks() >= 0


def assert_first_come_first_served(
    started: list[str], load: list[Arrival], by_priority: bool
) -> None:
    for priority in {arrival.priority for arrival in load}:
        same = [one for one in load if one.priority == priority or not by_priority]
        came = [one.name for one in sorted(same, key=lambda one: (one.at, int(one.name[1:])))]
        assert [name for name in started if name in came] == [
            name for name in came if name in started
        ]


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(load=loads(), spare=st.integers(0, 12), seed=st.integers(0, 3))
def test_no_load_makes_it_evict(world: str, load: list[Arrival], spare: int, seed: int) -> None:
    chosen = WORLDS[world]
    probe = scheduler(num_blocks=1, **chosen)
    enough = max(
        probe._ledger.most(one, probe._end_of(one))
        for one in (arrival.request() for arrival in load)
    )
    under_test = scheduler(num_blocks=enough + spare, **chosen)
    runner, _ = run(under_test, load, seed, lambda: assert_all_can_end(under_test))
    assert runner.evicted == 0
    aborted = {arrival.name for arrival in load if arrival.aborted_after is not None}
    assert set(runner.finished) >= {arrival.name for arrival in load} - aborted
    assert free_blocks(under_test) == enough + spare
    assert under_test._ledger.count() == 0
    if world != "adapters":  # there vLLM itself starts a later request if an adapter has no slot
        assert_first_come_first_served(runner.started, load, chosen.get("policy") == "priority")


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(load=loads(), seed=st.integers(0, 3))
def test_without_pressure_every_step_is_that_of_vllm(
    world: str, load: list[Arrival], seed: int
) -> None:
    both = [scheduler(ours=ours, num_blocks=600, **WORLDS[world]) for ours in (True, False)]
    (_, ours), (_, theirs) = (run(one, load, seed) for one in both)
    assert ours == theirs


@pytest.mark.parametrize("asynchronous", [False, True])
def test_max_utilization_is_vllm_itself(asynchronous: bool) -> None:
    runs = []
    for ours in (True, False):
        chosen = {"policy": "max_utilization"} if ours else None
        one = scheduler(ours=ours, num_blocks=10, capacity=chosen, asynchronous=asynchronous)
        for number in range(4):
            one.add_request(request(f"r{number}", prompt(number, 6), 18))
        runner = Runner(one)
        runs.append((runner.drain(), runner.evicted))
    assert runs[0] == runs[1]
    assert runs[0][1] > 0  # the load that the other policy runs without evictions


# What counts, case by case.


def started_together(scheduler: Any, *requests: Any) -> list[str]:
    """Add requests, step twice, and return the names of those that run."""
    for one in requests:
        scheduler.add_request(one)
    runner = Runner(scheduler)
    runner.step()
    runner.step()
    return [one.request_id for one in scheduler.running]


def test_the_end_of_a_request_counts_and_not_its_beginning() -> None:
    # 6 tokens of prompt and 11 of output need 16 slots: the last token's is never computed.
    fits, larger = (request("b", prompt(2, 6), most) for most in (11, 12))
    for other, expected in ((fits, ["a", "b"]), (larger, ["a"])):
        one = scheduler(num_blocks=8)
        assert started_together(one, request("a", prompt(1, 6), 11), other) == expected


def test_blocks_that_another_request_holds_cost_nothing() -> None:
    shared = prompt(1, 16)
    one = scheduler(num_blocks=4 + 2 + 2)
    runner = Runner(one)
    one.add_request(request("a", [*shared, 2], 8))
    runner.step()
    one.add_request(request("b", [*shared, 3], 8))
    one.add_request(request("c", [*shared, 4], 8))
    runner.step()
    assert [running.request_id for running in one.running] == ["a", "b"]
    runner.drain()
    assert (runner.started, runner.evicted) == (["a", "b", "c"], 0)


def test_cached_blocks_that_nobody_holds_are_free_blocks() -> None:
    one = scheduler(num_blocks=10)
    runner = Runner(one)
    one.add_request(request("first", prompt(1, 17), 1))
    runner.drain()
    # 4 blocks hit and 2 new ones; then 4 of 10 are left, and not 8.
    assert started_together(
        one, request("hits", prompt(1, 17), 8), request("more", prompt(2, 16), 4)
    ) == ["hits"]


def test_a_block_shared_up_to_its_middle_costs_a_copy() -> None:
    one = scheduler(num_blocks=40, **WORLDS["partial hits"])
    runner = Runner(one)
    one.add_request(request("first", prompt(1, 14), 1))
    runner.drain()
    before, asked, taken = free_blocks(one), [], []
    needed, allocate = one._ledger.needed, one._allocate

    def ask(newcomer: Any, end: int, hits: Any) -> Any:
        asked.append(one._ledger._groups[0].at_admission(newcomer, end, hits.blocks[0], hits))
        return needed(newcomer, end, hits)

    def take(*args: Any, **kwargs: Any) -> Any:
        allocated = allocate(*args, **kwargs)
        taken.append(before - free_blocks(one))
        return allocated

    one._ledger.needed, one._allocate = ask, take
    one.add_request(request("second", [*prompt(1, 14), 5, 6, 7], 4))
    runner.step()
    # Full attention: two blocks found, the copy of the second, one new; and a Mamba state.
    assert (asked, taken) == ([4], [4 + 1])


@pytest.mark.parametrize("world", ["copied tails", "async copied tails"])
def test_a_state_kept_for_others_costs_a_block(world: str) -> None:
    one = scheduler(num_blocks=6, **WORLDS[world])
    runner = Runner(one)
    for number in range(4):
        one.add_request(request(f"r{number}", prompt(number, 9), 4))
    runner.step()
    # Two need an attention block, a state and the copy of a state each: so do not three.
    assert [running.request_id for running in one.running] == ["r0", "r1"]
    runner.drain()
    assert (runner.evicted, len(runner.finished)) == (0, 4)


def test_a_shared_block_of_a_window_may_have_to_be_taken_again() -> None:
    """When the first request has left it behind, its end frees nothing: the second has it."""
    one = scheduler(specs=(window(8),), max_num_batched_tokens=8, num_blocks=12)
    runner = Runner(one)
    one.add_request(request("a", prompt(1, 9), 8))
    runner.step()
    runner.step()
    assert one._ledger.count() == 4 - 3
    one.add_request(request("b", prompt(1, 9), 8))
    runner.step()
    assert [running.request_id for running in one.running] == ["a", "b"]
    assert free_blocks(one) == 12 - 3 - 1  # two of b's are a's
    assert one._ledger.count() == (4 - 3) + (4 - 1)


def test_a_better_priority_waits_and_evicts_nobody() -> None:
    one = scheduler(num_blocks=8, policy="priority")
    runner = Runner(one)
    one.add_request(request("a", prompt(1, 8), 17, priority=5))
    runner.step()
    one.add_request(request("b", prompt(2, 8), 17, priority=5))
    one.add_request(request("urgent", prompt(3, 8), 17, priority=0))
    runner.drain()
    assert (runner.started, runner.evicted) == (["a", "urgent", "b"], 0)


def test_a_session_reserves_for_all_the_input_it_may_get() -> None:
    one = scheduler(num_blocks=MAX_MODEL_LEN // BLOCK + 2)
    runner = Runner(one)
    one.add_request(request("session", prompt(1, 8), 4, resumable=True))
    for _ in range(6):
        runner.step()
    assert one.num_waiting_for_streaming_input == 1  # it holds blocks, and does not run
    one.add_request(request("other", prompt(2, 8), 9))
    runner.step()
    assert not one.running
    one.add_request(request("session", prompt(3, 40), 8, resumable=True))
    runner.step()
    assert [running.request_id for running in one.running] == ["session"]
    one.add_request(request("session", [], 1, resumable=False))
    runner.drain()
    assert runner.evicted == 0
    assert {"session", "other"} <= set(runner.finished)


def test_a_request_whose_grammar_compiles_reserves_nothing() -> None:
    one = scheduler(num_blocks=8)
    waits = request("waits", prompt(1, 8), 20, structured="a*")
    assert started_together(one, waits, request("a", prompt(2, 8), 20)) == ["a"]
    waits.structured_output_request._grammar = mock.MagicMock()
    runner = Runner(one)
    runner.step()
    assert waits.status == RequestStatus.WAITING  # not for its grammar, but for blocks
    runner.drain()
    assert (runner.evicted, waits.num_output_tokens) == (0, 20)


def connector() -> mock.MagicMock:
    """Return a KV connector that brings the first 8 tokens of each prompt, some time later."""
    return mock.MagicMock(
        supports_divergent_local_hybrid_hits=False,
        **{
            "get_num_new_matched_tokens.return_value": (8, True),
            "get_loaded_kv_cache_group_ids.return_value": (),
            "get_kv_connector_stats.return_value": None,
            "take_events.return_value": (),
            "has_pending_block_frees.return_value": False,
            "has_pending_push_work.return_value": False,
            "request_finished.return_value": (False, None),
        },
    )


def test_a_request_whose_kv_comes_from_elsewhere_reserves_from_the_first_block() -> None:
    one = scheduler(num_blocks=8)
    one.connector = connector()
    runner = Runner(one)
    for name, seed in (("a", 1), ("b", 2)):
        one.add_request(request(name, prompt(seed, 12), 16))
    runner.step()
    assert not one.running
    assert free_blocks(one) == 6  # two blocks wait for their content
    assert one._ledger.count() == 5
    assert one.requests["b"].status == RequestStatus.WAITING
    one.finished_recving_kv_req_ids.add("a")
    one.connector.get_num_new_matched_tokens.return_value = (0, False)
    runner.drain()
    assert (runner.evicted, set(runner.finished)) == (0, {"a", "b"})


def test_cross_attention_takes_what_the_encoder_inputs_take() -> None:
    spec = CrossAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    one = scheduler(specs=(full(), spec), prefix_caching=False)
    hears = SimpleNamespace(num_encoder_inputs=2, get_num_encoder_embeds=lambda number: 6)
    assert one._ledger.most(hears, 8) == 2 + 3
    assert one._ledger.most(request("a", prompt(1, 4), 5), 8) == 2


def test_a_kind_of_cache_that_it_does_not_know_is_refused() -> None:
    with (
        mock.patch("moe_nvlink_plugin.integration.vllm.scheduler.demand._GROWING", ()),
        pytest.raises(UnsupportedError, match="of a FullAttentionManager"),
    ):
        scheduler()


# Requests that can never fit, options, metrics.


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_can_never_fit_is_refused_with_numbers(asynchronous: bool) -> None:
    one = scheduler(num_blocks=8, asynchronous=asynchronous)
    runner = Runner(one)
    one.add_request(request("large", prompt(1, 20), 14))
    one.add_request(request("small", prompt(2, 8), 8))
    runner.drain()
    large = runner.finished["large"]
    assert str(large.finish_reason) == "error"
    assert large.stop_reason.startswith(
        "needs at least 9 KV cache blocks (20 prompt tokens, max_tokens=14), and the server has 8."
    )
    assert str(runner.finished["small"].finish_reason) != "error"
    assert free_blocks(one) == 8


@pytest.mark.parametrize(
    "world", ["full", "async hybrid", "async mamba", "mamba drafts", "copied tails"]
)
def test_whom_vllm_serves_in_its_smallest_pool_is_served_alone(world: str) -> None:
    """The pool that vLLM itself asks for, and requests of clients that give no max_tokens."""
    probe = scheduler(**WORLDS[world])
    config = probe.vllm_config
    specs = [group.manager.kv_cache_spec for group in probe._ledger._groups]
    smallest = sum(-(-one.max_memory_usage_bytes(config) // one.page_size_bytes) for one in specs)
    one = scheduler(num_blocks=smallest, **WORLDS[world])
    runner = Runner(one)
    names = ["first", "small", "long", "other", "last"]
    for number, name in enumerate(names):
        most = MAX_MODEL_LEN - 6 if name in ("first", "long", "last") else 4
        one.add_request(request(name, prompt(number, 6), most))
    together = set()
    while one.has_unfinished_requests():
        running = set(runner.step().num_scheduled_tokens)
        together |= running if "long" in running else set()
    runner.drain()
    assert (runner.started, runner.evicted) == (names, 0)
    assert {str(output.finish_reason) for output in runner.finished.values()} == {"length"}
    assert together == {"long"}


@pytest.mark.parametrize(("reserve", "together"), [(1.0, 1), (0.5, 2), (0.2, 4)])
def test_a_part_of_the_reserve_admits_more(reserve: float, together: int) -> None:
    one = scheduler(num_blocks=10, capacity={"reserve": reserve})
    requests = [request(f"r{number}", prompt(number, 4), 20) for number in range(4)]
    assert len(started_together(one, *requests)) == together


def test_the_estimate_is_a_quantile_of_the_last_outputs() -> None:
    lengths = capacity.OutputLengths()
    for number in range(capacity.FEWEST - 1):
        lengths.add(10 + number % 2)
    assert lengths.estimate() is None
    lengths.add(500)  # one in 32 is less than one in twenty
    assert lengths.estimate() == 11
    for number in range(capacity.REMEMBERED):
        lengths.add(number)
    assert lengths.estimate() == 972  # of 0 to 1023, 973 are no larger: 95 percent


def test_the_estimate_learns_from_outputs_that_end_by_themselves() -> None:
    one = scheduler(num_blocks=40, capacity={"reserve": "estimate"}, max_num_seqs=4)
    runner = Runner(one, lambda name: 3)
    for number in range(capacity.FEWEST + 4):
        one.add_request(request(f"r{number}", prompt(number, 4), 40))
    one.add_request(request("aborted", prompt(99, 4), 40))
    runner.drain()
    newcomer = request("new", prompt(77, 4), 40)
    assert one._end_of(newcomer) == 4 + 3 - 1
    assert one._end_of(request("short", prompt(77, 4), 2)) == 4 + 2 - 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "fifo"}, "policy='fifo' is not one of"),
        ({"reserve": 0}, "reserve=0 is no number above 0"),
        ({"reserve": 1.5}, "reserve=1.5 is no number"),
        ({"reserve": True}, "reserve=True is no number"),
        ({"reserve": "auto"}, "nor 'estimate'"),
        ({"reserved": 1}, "has no 'reserved'; its keys are policy, reserve"),
        ({"policy": "max_utilization", "reserve": 1.0}, "reserves nothing; remove it"),
        ("all", "is a str, it must be a dict"),
    ],
)
def test_options_that_are_not_allowed_are_refused(given: Any, message: str) -> None:
    config = SimpleNamespace(additional_config={"moe_nvlink": {"capacity": given}})
    with pytest.raises(ConfigError, match=re.escape(message)):
        capacity.read(config)


def test_options_that_nobody_would_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'config\["moe_nvlink"\] is a list'):
        capacity.read(SimpleNamespace(additional_config={"moe_nvlink": ["capacity"]}))
    with pytest.raises(ValueError, match=r"has no effect .* Add --scheduler-cls moe_nvlink_plugin"):
        configuration(additional='{"moe_nvlink": {"capacity": {"polcy": 1}}}', ours=False)


def test_the_backend_takes_the_option_beside_its_own() -> None:
    ours = {"capacity": {"reserve": 0.5}, "combine": "bf16"}
    config = SimpleNamespace(additional_config={"moe_nvlink": ours})
    assert choices.options_of(config).combine == "bf16"
    assert capacity.read(config) == ("guaranteed_no_evict", 0.5)
    assert capacity.read(None) == ("guaranteed_no_evict", 1.0)


def test_one_name_stands_for_either_twin() -> None:
    assert type(scheduler()) is GuaranteedNoEvictScheduler
    assert type(scheduler(asynchronous=True)) is AsyncGuaranteedNoEvictScheduler
    with pytest.raises(ConfigError, match="which fits either"):
        AsyncGuaranteedNoEvictScheduler(configuration())


def test_diffusion_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="diffusion"):
        capacity.check(SimpleNamespace(diffusion_config=object()))


def test_a_configuration_tells_whether_it_names_us() -> None:
    path = f"{GuaranteedNoEvictScheduler.__module__}"
    theirs = type("Theirs", (GuaranteedNoEvictScheduler,), {"__module__": "theirs"})
    for chosen in (GuaranteedNoEvictScheduler, theirs, f"{path}.GuaranteedNoEvictScheduler"):
        assert schedules(SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=chosen)))
    assert not schedules(configuration())
    assert not schedules(None)


def _values(text: bytes) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


def test_metrics_reach_the_process_that_serves_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(reports, "EVERY_S", 0)
    one = scheduler(num_blocks=8)
    collector, registry = reports.Collector(), CollectorRegistry()
    folder = metrics.metrics_folder(one.vllm_config)
    assert folder is not None
    collector.folders.append(folder)
    registry.register(collector)
    runner = Runner(one)
    for name, tokens in (("a", 20), ("b", 20), ("c", 20), ("never", 60)):
        one.add_request(request(name, prompt(ord(name[0]), 4), tokens))
    with caplog.at_level("INFO"):
        runner.step()
        runner.step()
    before = 'moe_nvlink_capacity_{}{{engine="0"}}'
    assert _values(generate_latest(registry)) == {
        before.format("waiting_requests"): 2,
        before.format("reserved_blocks"): 4,
        before.format("refused_requests_total"): 1,
    }
    assert [record.getMessage() for record in caplog.records if " wait" in record.msg] == [
        "Request b and those after it wait: it may take 6 KV cache blocks until its end. "
        "7 are free, of which 5 are reserved for requests that have started."
    ]
    runner.drain()
    assert _values(generate_latest(registry))[before.format("reserved_blocks")] == 0
    assert _values(generate_latest(registry))[before.format("waiting_requests")] == 0


def test_metrics_of_several_servers_are_counted_together(tmp_path: Path) -> None:
    """In a process of its own: prometheus_client reads the variable when it is imported."""
    code = """
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from moe_nvlink_plugin.integration.vllm.scheduler.reports import Report, Reporter
config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=3))
reporter = Reporter(config)
reporter.publish(Report(1, 2, 3))
reporter.publish(Report(4, 5, 6))
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    shown = done.stdout
    assert 'moe_nvlink_capacity_waiting_requests{engine="3"} 4.0' in shown
    assert 'moe_nvlink_capacity_reserved_blocks{engine="3"} 5.0' in shown
    assert 'moe_nvlink_capacity_refused_requests_total{engine="3"} 6.0' in shown
