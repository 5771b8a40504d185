"""Fault tolerance without a server: what `retry` takes, agrees on, and leaves behind."""

from __future__ import annotations

import datetime
import json
import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.distributed import utils as distributed
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.engine import EngineStatusType
from vllm.v1.fault_tolerance import engine_core_sentinel

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm import faults
from moe_nvlink_plugin.integration.vllm.backend import BACKEND, KEY
from moe_nvlink_plugin.integration.vllm.balancing import deaths
from moe_nvlink_plugin.integration.vllm.faults import engine as engines
from moe_nvlink_plugin.integration.vllm.faults.engine import MoeNvlinkEngineSentinel
from moe_nvlink_plugin.integration.vllm.faults.worker import bound_waits, ranges

#: The number of a call.
RETRY = 5


def store_of_ranks() -> Any:
    """torch's, which waits 20 s at most."""
    store: Any = torch._C._distributed_c10d.HashStore()
    store.set_timeout(datetime.timedelta(seconds=20))
    return store


class Engine(SimpleNamespace):
    """What the sentinel asks of vLLM's engine; its worker says that it has lost experts 4 and 5."""

    def __init__(self, rank: int, store: Any = None, *, running: bool, size: int = 3) -> None:
        parallel = SimpleNamespace(
            data_parallel_size=size,
            data_parallel_rank=rank,
            data_parallel_master_ip="127.0.0.1",
            world_size=1,
            cpu_distributed_timeout=None,
            fault_tolerance_config=SimpleNamespace(engine_recovery_timeout_sec=1),
        )
        asked: list[dict[str, Any]] = []

        def collective_rpc(method: str, args: tuple[Any, ...]) -> list[list[str]]:
            assert method == "handle_ft_command"
            asked.append(dict(args[0].params))
            return [["4-5"] if args[0].params["alive"] != list(range(size)) else []]

        super().__init__(
            engine_index=rank,
            vllm_config=SimpleNamespace(parallel_config=parallel, additional_config={KEY: BACKEND}),
            dp_group=f"group of {rank}",
            dp_store=store,
            engines_running=running,
            step_counter=7,
            scheduler=SimpleNamespace(has_requests=lambda: running),
            model_executor=SimpleNamespace(collective_rpc=collective_rpc),
            input_queue=queue.Queue(),
            output_queue=queue.Queue(),
            batch_queue=None,
        )
        self.asked = asked


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(port, rank, size) of each data-parallel group that an engine has made."""
    made: list[tuple[int, int, int]] = []

    def init(_host: str, port: int, rank: int, size: int, **_named: Any) -> tuple[str, None]:
        made.append((port, rank, size))
        return f"new group of {size}", None

    monkeypatch.setattr(engines, "stateless_init_torch_distributed_process_group", init)
    monkeypatch.setattr(
        engines, "stateless_destroy_torch_distributed_process_group", lambda _group: None
    )
    return made


@pytest.fixture(autouse=True)
def no_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups here are names."""
    monkeypatch.setattr(engines, "bound_waits", lambda _group, _passes_on: None)


def sentinels(*running: bool) -> list[MoeNvlinkEngineSentinel]:
    """Of ranks 0, 1, ... of three; an engine that runs is in its fault."""
    store, found = store_of_ranks(), []
    for rank, runs in enumerate(running):
        engine = Engine(rank, store, running=runs)
        sentinel = MoeNvlinkEngineSentinel(engine, engine.vllm_config.parallel_config)
        if runs:
            sentinel.status_type = EngineStatusType.UNHEALTHY
            sentinel.resumed.clear()
        found.append(sentinel)
    return found


def tell(those: list[MoeNvlinkEngineSentinel], *params: dict[str, Any]) -> list[Any]:
    """`retry` to all at once; what each answers. What they have said before is forgotten."""

    def tell_one(one: MoeNvlinkEngineSentinel, given: dict[str, Any]) -> Any:
        one.engine.output_queue.queue.clear()
        asked = {"instruction": "retry", "params": given, "request_id": "r"}
        one.handle_command(0, RETRY, asked)
        return answers(one, is_ours=True)[0]

    with ThreadPoolExecutor(len(those)) as pool:
        return list(pool.map(tell_one, those, params, timeout=60))


def answers(sentinel: MoeNvlinkEngineSentinel, *, is_ours: bool = False) -> list[dict[str, Any]]:
    """What the sentinel has said to our call, or else: its statuses."""
    those = [outputs.utility_output for _client, outputs in sentinel.engine.output_queue.queue]
    return [one.result.result for one in those if (one.call_id == RETRY) == is_ours]


def test_two_go_on_without_the_third(groups: list[tuple[int, int, int]]) -> None:
    """One of them is idle and has noticed nothing: it takes part until all know of no work."""
    those = sentinels(True, False)
    told = tell(those, {"dead_ranks": [2]}, {"dead_ranks": [2]})
    assert [one["success"] for one in told] == [True, True]
    ports = {port for port, _rank, _size in groups}
    assert sorted((rank, size) for _port, rank, size in groups) == [(0, 2), (1, 2)]
    assert len(ports) == 1
    for one in those:
        assert one.engine.dp_group == "new group of 2"
        assert one.engine.step_counter == 0
        assert one.engine.engines_running
        assert one.resumed.is_set()
        assert one.engine.asked[0]["alive"] == [0, 1]
        last = answers(one)[-1]
        assert last["status"] == "healthy"
        assert last["dead_ranks"] == [2]
        assert last["lost_experts"] == ["4-5"]
    assert those[1].engine.input_queue.qsize() == 1, "the idle engine must wake"
    assert (
        those[0].engine.asked[0]["new_stateless_dp_group_ports"]
        == (those[1].engine.asked[0]["new_stateless_dp_group_ports"])
    )


def test_a_fault_that_passes_needs_all(groups: list[tuple[int, int, int]]) -> None:
    those = sentinels(True, True, True)
    told = tell(those, {}, {}, {})
    assert [one["success"] for one in told] == [True] * 3
    assert sorted(rank for _port, rank, size in groups if size == 3) == [0, 1, 2]
    assert "dead_ranks" not in answers(those[0])[-1]


def test_a_second_death_leaves_out_both(groups: list[tuple[int, int, int]]) -> None:
    those = sentinels(True, True)
    tell(those, {"dead_ranks": [2]}, {"dead_ranks": [2]})
    those[0].status_type = EngineStatusType.UNHEALTHY
    (told,) = tell(those[:1], {"dead_ranks": [1]})
    assert told["success"]
    assert answers(those[0])[-1]["dead_ranks"] == [1, 2]
    assert groups[-1][1:] == (0, 1)


@pytest.mark.parametrize(
    ("dead", "words"),
    [
        ([0], "no rank can go on without it"),
        ([1], "names rank 1, which is this one"),
        ([3], "from 0 to 2"),
        ([True], "from 0 to 2"),
        ("2", "from 0 to 2"),
        (2, "from 0 to 2"),
        ([-1], "from 0 to 2"),
    ],
)
def test_what_cannot_be_retried(dead: Any, words: str) -> None:
    """The engine stays as it was, and waits for another instruction."""
    _zero, one = sentinels(True, True)
    (told,) = tell([one], {"dead_ranks": dead})
    assert not told["success"]
    assert words in told["reason"]
    assert one.status_type == EngineStatusType.UNHEALTHY
    assert one.engine.asked == []


def test_ranks_that_were_told_of_other_deaths(
    groups: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them hear so; told the same, they go on, whoever is told first."""
    those = sentinels(True, True, True)
    monkeypatch.setattr(engines, "RETRY_S", 1.0)
    told = tell(those, {"dead_ranks": []}, {"dead_ranks": []}, {"dead_ranks": [1]})
    assert not any(one["success"] for one in told)
    assert "post the same dead_ranks" in told[2]["reason"]
    assert groups == []
    monkeypatch.setattr(engines, "RETRY_S", 30)
    told = tell(those[:2], {"dead_ranks": [2]}, {"dead_ranks": [2]})
    assert [one["success"] for one in told] == [True, True]
    assert sorted((rank, size) for _port, rank, size in groups) == [(0, 2), (1, 2)]


def test_a_retry_that_the_others_do_not_hear_of(
    groups: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, and both can be told again."""
    monkeypatch.setattr(engines, "RETRY_S", 0.1)
    those = sentinels(False, True)
    (told,) = tell(those[:1], {"dead_ranks": [2]})
    assert "not all of ranks [0, 1] were told" in told["reason"]
    assert those[0].status_type == EngineStatusType.HEALTHY
    assert groups == []
    monkeypatch.setattr(engines, "RETRY_S", 30)
    again = tell(those, {"dead_ranks": [2]}, {"dead_ranks": [2]})
    assert [one["success"] for one in again] == [True, True]


def test_a_busy_engine_that_is_well_refuses(groups: list[tuple[int, int, int]]) -> None:
    (one,) = sentinels(True)
    one.status_type = EngineStatusType.HEALTHY
    (told,) = tell([one], {"dead_ranks": [1, 2]})
    assert "HEALTHY" in told["reason"]
    assert groups == []


def test_only_engines_with_our_flag_get_our_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core

    monkeypatch.setattr(core, "EngineCoreSentinel", engine_core_sentinel.EngineCoreSentinel)
    faults.put_in_place()
    faults.put_in_place()
    make: Any = core.EngineCoreSentinel
    engine = Engine(0, running=False)
    parallel = engine.vllm_config.parallel_config
    assert type(make(engine=engine, parallel_config=parallel)) is MoeNvlinkEngineSentinel
    engine.vllm_config.additional_config = {}
    theirs = make(engine=engine, parallel_config=parallel)
    assert type(theirs) is engine_core_sentinel.EngineCoreSentinel


# Experts.


def _state() -> Any:
    """Two layers of 4 experts on 3 ranks with 2 places each; the last rank has replicas."""
    physical = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 2, 1, 3, 0, 3]])
    logical = torch.full((2, 4, 3), -1)
    counts = torch.zeros(2, 4, dtype=torch.long)
    for layer, placed in enumerate(physical.tolist()):
        for place, expert in enumerate(placed):
            logical[layer, expert, counts[layer, expert]] = place
            counts[layer, expert] += 1
    one = SimpleNamespace(
        physical_to_logical_map=physical,
        logical_to_physical_map=logical,
        logical_replica_count=counts,
    )
    return SimpleNamespace(model_states={"m": one}, step=lambda: 1, rearrange=lambda: 1)


def test_tokens_go_to_replicas() -> None:
    state = _state()
    (one,) = state.model_states.values()
    places, counts = one.logical_to_physical_map, one.logical_replica_count
    assert deaths.leave_out(state, [2], 3) == {0}, "of layer 1"
    assert places[0].tolist() == [[0, -1, -1], [1, -1, -1], [2, -1, -1], [3, -1, -1]]
    assert counts[0].tolist() == [1, 1, 1, 1]
    # Expert 0 was on the dead rank only, and keeps its place, where no token arrives.
    assert places[1].tolist() == [[4, -1, -1], [2, -1, -1], [1, -1, -1], [0, 3, -1]]
    assert counts[1].tolist() == [1, 1, 1, 2]
    assert state.step() is None, "the balancer stands still"


def test_a_replica_in_front_of_others_dies() -> None:
    state = _state()
    (one,) = state.model_states.values()
    assert deaths.leave_out(state, [0], 3) == {2}
    assert one.logical_to_physical_map[0, 0].tolist() == [4, -1, -1]
    assert one.logical_to_physical_map[1, 3].tolist() == [3, 5, -1]


def test_no_death_changes_nothing() -> None:
    state = _state()
    before = state.model_states["m"].logical_to_physical_map.clone()
    assert deaths.leave_out(state, [], 3) == set()
    assert torch.equal(before, state.model_states["m"].logical_to_physical_map)
    assert state.step() == 1


def test_a_death_while_weights_move_is_the_end() -> None:
    state = _state()

    def interrupted() -> None:
        raise RuntimeError("Connection closed by peer")

    state.rearrange = interrupted
    deaths.watch_moves(state)
    with pytest.raises(RuntimeError):
        state.rearrange()
    with pytest.raises(UnsupportedError, match="has not ended its last move"):
        deaths.leave_out(state, [2], 3)
    state = _state()
    deaths.watch_moves(state)
    assert state.rearrange() == 1
    deaths.leave_out(state, [2], 3)


def test_an_engine_waits_less_long_from_its_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then vLLM compares the configurations of all engines, of which the limit is a part."""
    bounded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(engines, "bound_waits", lambda *given: bounded.append(given))

    class Stepping(Engine):
        def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
            return not local_unfinished

    engine = Stepping(0, running=True)
    parallel = engine.vllm_config.parallel_config
    MoeNvlinkEngineSentinel(engine, parallel)
    assert bounded == []
    assert [engine._has_global_unfinished_reqs(local) for local in (True, False)] == [False, True]
    assert bounded == [("group of 0", parallel)]


def test_ranks_wait_less_long_in_vllms_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "2")
    limits: list[datetime.timedelta] = []
    backend = SimpleNamespace(_set_default_timeout=limits.append)
    group = SimpleNamespace(_get_backend=lambda _device: backend)
    bound_waits(group, None)
    monkeypatch.delenv("MOE_NVLINK_TIMEOUT_S")
    bound_waits(group, None)
    assert [limit.total_seconds() for limit in limits] == [6, 30]


@pytest.mark.parametrize(("asked", "expected"), [(None, 7), (5, 5), (900, 7)])
def test_a_limit_that_vllm_passes_to_each_wait_is_bounded(
    asked: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 does, in engines and in its second model runner; the group's own then says nothing.

    Without the option --cpu-distributed-timeout-seconds it passes that there is no limit.
    """
    if not hasattr(distributed, "cpu_all_reduce_"):
        pytest.skip("this vLLM passes no limit")
    passed: list[Any] = []

    def all_reduce(tensor: Any, _group: Any, timeout: Any = None) -> Any:
        passed.append(timeout.total_seconds())
        return tensor

    monkeypatch.setenv("MOE_NVLINK_TIMEOUT_S", "2.1")
    monkeypatch.setattr("vllm.config.parallel.cpu_all_reduce_", all_reduce)
    monkeypatch.setattr("vllm.distributed.parallel_state.cpu_all_reduce_", all_reduce)
    backend = SimpleNamespace(_set_default_timeout=lambda _limit: None)
    group: Any = SimpleNamespace(_get_backend=lambda _device: backend, size=lambda: 2)
    config: Any = ParallelConfig(cpu_distributed_timeout_seconds=asked)
    coordinator: Any = GroupCoordinator.__new__(GroupCoordinator)
    coordinator.cpu_group, coordinator.cpu_timeout = group, config.cpu_distributed_timeout
    bound_waits(group, config)
    bound_waits(group, coordinator)
    config.sync_dp_state(group, has_unfinished=True, pending_pause=False)
    coordinator.cpu_all_reduce_(torch.ones(1))
    assert passed[0] == expected
    assert passed[1] == pytest.approx(min(expected, 6.3))


def test_ranges() -> None:
    assert ranges([]) == []
    assert ranges([3]) == ["3"]
    assert ranges([0, 1, 2, 5, 7, 8]) == ["0-2", "5", "7-8"]
    assert json.dumps(ranges([1, 2]))
