"""Elastic expert parallelism without a server: what old ranks and newcomers do together.

Ranks are threads. Their groups are gloo's, beside torch's world, as vLLM makes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from vllm.distributed import stateless_coordinator
from vllm.distributed.eplb import eplb_state
from vllm.distributed.utils import init_gloo_process_group

from moe_nvlink_plugin.errors import PeerError, UnsupportedError
from moe_nvlink_plugin.groups import as_group
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.common.stats import write_whole
from moe_nvlink_plugin.integration.vllm import metrics
from moe_nvlink_plugin.integration.vllm.balancing import moves
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.elastic import cpu_scaling, scaling
from moe_nvlink_plugin.integration.vllm.moe import features, layers, method
from moe_nvlink_plugin.integration.vllm.plugin import cpu_communicator, worker
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import NUM_EXPERTS, Weights, tokens
from tests.integration.vllm.moe.vllm_layer import parallel_of
from tests.integration.vllm.test_vllm_balancing import state_of

T = TypeVar("T")
OLD, NEW = 2, 3
PER_RANK = NUM_EXPERTS // OLD


def with_gloo(size: int, main: Callable[[Any], T], timeout_s: float = 20) -> list[T]:
    """What `main` returns for each rank of a gloo group that torch's world does not know."""
    store = torch._C._distributed_c10d.HashStore()

    def run(group: ThreadGroup) -> T:
        return main(
            init_gloo_process_group(
                torch._C._distributed_c10d.PrefixStore("beside", store),
                group.rank,
                group.size,
                datetime.timedelta(seconds=timeout_s),
            )
        )

    return run_ranks(size, run)


def test_a_rank_that_joins_pairs_with_those_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads its layers while the others make exchanges for theirs, which go on to serve."""
    pair = ThreadGroup.ranks(OLD)
    weights = [Weights(seed) for seed in range(2)]

    def loaded(rank: int, size: int) -> list[Any]:
        redundant = PER_RANK * size - NUM_EXPERTS
        return [
            vllm_experts.loaded(rank, size, one, redundant=redundant, name=f"layer {number}")
            for number, one in enumerate(weights)
        ]

    def check(mine: list[Any], rank: int, size: int) -> None:
        """A round of each layer; every physical expert is a copy of a logical one."""
        for layer, one in zip(mine, weights, strict=True):
            hidden, ids, router = tokens(5, rank)
            spread = ids + NUM_EXPERTS * (ids + NUM_EXPERTS < PER_RANK * size).int()
            got = vllm_experts.run(layer, hidden, spread, router)
            torch.testing.assert_close(got, one.dense(hidden, ids, router), rtol=1e-5, atol=1e-5)
            assert size == OLD or int(spread.max()) >= NUM_EXPERTS, "the newcomer's"

    def main(group: ThreadGroup) -> list[int]:
        if group.rank >= OLD:
            pool = vllm_experts.join(group)
            mine = loaded(group.rank, NEW)
        else:
            before = vllm_experts.join(pair[group.rank])
            mine = loaded(group.rank, OLD)
            check(mine, group.rank, OLD)
            pool = vllm_experts.join(group)
            staged = []
            for layer in mine:
                moe = dataclasses.replace(
                    layer.moe_config,
                    num_experts=PER_RANK * NEW,
                    moe_parallel_config=parallel_of(NEW, group.rank, balances=True),
                )
                replaced = layer.quant_method.old_quant_method
                experts = layer.quant_method.moe_kernel.fused_experts
                staged.append(method.install_for(pool, layer, moe, replaced, experts))
            check(mine, group.rank, OLD)  # until vLLM changes to the new groups
            for layer, one in zip(mine, staged, strict=True):
                layer._replace_quant_method(one)
            before.close()
        check(mine, group.rank, NEW)
        sizes = [exchange.config.ep_size for exchange in pool.exchanges]
        pool.close()
        return sizes

    with vllm_experts.ranks_of_vllm(monkeypatch):
        assert run_ranks(NEW, main) == [[NEW]] * NEW, "one exchange for both layers"


def test_steps_of_start_up_work_beside_torchs_world() -> None:
    def main(group: Any) -> list[Any]:
        return as_group(group, 20.0).all_gather_object({"rank": group.rank()})

    assert with_gloo(2, main) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    def main(group: Any) -> str:
        if group.rank() == 1:
            return ""
        with pytest.raises(PeerError, match="not all ranks of the group arrived.*1") as caught:
            as_group(group, 1.0).all_gather_object(None)
        return str(caught.value)

    first, _second = with_gloo(2, main)
    assert first


def test_a_communicator_of_such_a_group() -> None:
    def main(group: Any) -> tuple[Any, ...]:
        made = cpu_communicator.MoeNvlinkCpuCommunicator(
            cpu_group=group,
            device=torch.device("cpu"),
            device_group=group,
            unique_name="dp:0",
            global_ranks=[4, 7],
            global_world_size=8,
            tcp_store_group=object(),
            use_all2all=False,
        )
        total = made.all_reduce(torch.tensor([1 + group.rank()]))
        return made.ranks, made.rank_in_group, made.all2all_manager, int(total)

    assert with_gloo(2, main) == [([4, 7], rank, None, 3) for rank in range(2)]


def test_weights_move_by_gloo() -> None:
    """Two tensors to the other rank, in order, and a second time."""

    def main(group: Any) -> list[list[float]]:
        coordinator, other = SimpleNamespace(cpu_group=group), 1 - group.rank()
        moving = cpu_scaling.by_gloo(coordinator, "torch_gloo", expert_weights=[])
        got = [torch.zeros(3) for _ in range(4)]
        for start in (0, 2):
            mine = [torch.full((3,), 10.0 * group.rank() + start + n) for n in range(2)]
            moving.add_send(mine, other, 0)
            moving.add_recv(got[start : start + 2], other, 0)
            moving.execute()
        return [sorted(set(one.tolist())) for one in got]

    first, second = with_gloo(2, main)
    assert first == [[10.0], [11.0], [12.0], [13.0]]
    assert second == [[0.0], [1.0], [2.0], [3.0]]


def test_vllms_groups_get_our_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compares the platform's class with this name, and makes an object of it."""
    for module, name in (
        (stateless_coordinator, "CudaCommunicator"),
        (eplb_state, "create_eplb_communicator"),
    ):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(features, "_features", {})
    from vllm.platforms import current_platform

    ours = f"{cpu_communicator.__name__}.MoeNvlinkCpuCommunicator"
    answer = classmethod(lambda _cls: ours)
    monkeypatch.setattr(type(current_platform), "get_device_communicator_cls", answer)
    cpu_scaling.put_in_place()
    assert stateless_coordinator.CudaCommunicator is cpu_communicator.MoeNvlinkCpuCommunicator
    assert eplb_state.create_eplb_communicator is cpu_scaling.by_gloo
    elastic = SimpleNamespace(parallel_config=SimpleNamespace(enable_elastic_ep=True))
    assert [type(one) for one in features.features_of(elastic, None)] == [scaling.DynamicScales]
    elastic.parallel_config.enable_elastic_ep = False
    assert features.features_of(elastic, None) == ()


@pytest.mark.parametrize("scale", [None, torch.ones(1)])
def test_static_scales_are_refused(scale: torch.Tensor | None) -> None:
    config = SimpleNamespace(quant_dtype=torch.float8_e4m3fn, a1_scale=scale)
    experts = SimpleNamespace(quant_config=config, expects_unquantized_inputs=False)
    layer = SimpleNamespace(layer_name="layer 3")
    if scale is None:
        scaling.DynamicScales().check(experts, layer)
        return
    with pytest.raises(UnsupportedError, match=r"layer 3 have a static scale.*dynamic scales"):
        scaling.DynamicScales().check(experts, layer)


def test_the_worker_has_our_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From before it makes groups, and only with the flag."""
    placed: list[str] = []
    monkeypatch.setattr(cpu_scaling, "put_in_place", lambda: placed.append("hooks"))

    class VllmsWorker:
        elastic_ep_executor: Any = "vLLM's"

        def __init__(self, vllm_config: Any) -> None:
            assert placed == []

    made: Any = type("Made", (worker.TellsOurExchange, VllmsWorker), {})
    parallel = SimpleNamespace(enable_elastic_ep=False)
    config = SimpleNamespace(parallel_config=parallel)
    assert made(vllm_config=config).elastic_ep_executor == "vLLM's"
    parallel.enable_elastic_ep = True
    found = made(vllm_config=config)
    assert type(found.elastic_ep_executor) is cpu_scaling.CpuScaling
    assert found.elastic_ep_executor.worker is found
    assert placed == ["hooks"]


class Worker(SimpleNamespace):
    """As much of a worker as its steps use."""


def test_layers_are_staged_in_order_and_vllms_methods_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Runner(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            kernel = SimpleNamespace(fused_experts=f"experts of {name}")
            self.routed_experts = name
            self._quant_method = SimpleNamespace(old_quant_method="vLLM's", moe_kernel=kernel)

    model = torch.nn.Sequential(Runner("a"), torch.nn.Identity(), Runner("b"))
    monkeypatch.setattr(scaling, "is_moe_layer", lambda module: isinstance(module, Runner))
    monkeypatch.setattr(scaling, "install_for", lambda *given: given)
    monkeypatch.setattr(cpu_scaling.CpuScaling, "_make_eep_moe_config", lambda *_given: "config")
    runner = SimpleNamespace(get_model=lambda: model)
    one = Worker(model_runner=runner, vllm_config=SimpleNamespace())
    nothing = contextlib.nullcontext()
    monkeypatch.setattr(scaling, "set_current_vllm_config", lambda _config: nothing)
    steps = cpu_scaling.CpuScaling(one)
    steps._staged_moe_quant_methods["left by a failure"] = None
    steps.stage_standby_moe_quant_methods(SimpleNamespace(pool="pool"))
    assert list(steps._staged_moe_quant_methods.values()) == [
        ("pool", name, "config", "vLLM's", f"experts of {name}") for name in "ab"
    ]
    assert list(steps._staged_moe_quant_methods) == [model[0], model[2]]
    steps.shutdown()


def test_moves_are_followed_with_more_ranks() -> None:
    """The placement has more columns then, and weights are not where vLLM's loader puts them."""
    layer = layers.MoeNvlinkRoutedExperts.__new__(layers.MoeNvlinkRoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.__dict__["quant_method"] = None
    model = torch.nn.Sequential(layer)
    state = state_of(torch.tensor([[0, 1]]), model)
    watch = moves.Moves(Ranks(None, 0, 2, WORDING))
    watch.follow(state)
    has_moved = layer.have_moved
    state.model_states["m"].physical_to_logical_map = placed = torch.tensor([[1, 0, 1]])
    watch.go_on(state, Ranks(None, 0, 3, WORDING))
    assert (has_moved, layer.have_moved) == (False, True)
    state.expert_rearrangement_step = 1
    state.step()
    assert watch.stats()["eplb"] == {"rearrangements": 0, "moved": 0}
    placed[0, 2], state.expert_rearrangement_step = 0, 0
    state.step()
    assert watch.stats()["eplb"] == {"rearrangements": 1, "moved": 1}


def test_two_pools_of_a_worker_write_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has written its draft before one of them takes the place of the file."""
    replace, both = Path.replace, threading.Barrier(2, timeout=20)

    def replace_together(draft: Path, target: Path) -> Path:
        both.wait()
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", replace_together)
    path = tmp_path / "rank0.json"
    with ThreadPoolExecutor(2) as pool:
        for written in [pool.submit(write_whole, path, {"pool": n}) for n in range(2)]:
            written.result()
    assert [one.name for one in tmp_path.iterdir()] == ["rank0.json"]


def test_counters_stay_when_the_retired_pool_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_files", {})
    monkeypatch.setattr(metrics, "metrics_folder", lambda _config: tmp_path / "metrics")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    retired, new = (metrics.publication(None) for _ in range(2))
    assert retired is not None
    assert new is not None
    path = tmp_path / "metrics" / "rank0.json"
    retired.publish({"ep_rank": 0, "ep_size": 2})
    new.publish({"ep_rank": 0, "ep_size": 3})
    retired.close()
    assert json.loads(path.read_text("utf-8"))["ep_size"] == 3
    new.close()
    assert not path.parent.exists()
    again = metrics.publication(None)
    assert again is not None
    again.publish({"ep_rank": 0, "ep_size": 2})
    again.close()
    assert not path.parent.exists()
