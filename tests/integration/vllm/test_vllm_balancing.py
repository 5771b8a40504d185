"""Expert load balancing: who may ask for it, physical ids of CPU ranks, and experts that move."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config.parallel import EPLBConfig
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.eplb_state import compute_logical_maps
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.models.interfaces import MixtureOfExperts

from moe_nvlink_plugin.errors import PeerError, UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.vllm import backend
from moe_nvlink_plugin.integration.vllm.balancing import cpu_layers, eplb, moves
from moe_nvlink_plugin.integration.vllm.balancing.host_balancer import HostEplbState
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.moe import features, method
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import NUM_EXPERTS, TOP_K, Weights, tokens
from tests.integration.vllm.vllm_config import config_with_us
from tests.support.ranks import run_processes

#: Of a checkpoint and values.
created = functools.partial(config_with_us, enable_eplb=True)


# Who may ask for it.


def test_cpu_ranks_are_served_and_move_experts_between_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(eplb.logger, "warning", told.append)
    made = created(checkpoint, eplb_config={"num_redundant_experts": 2}).parallel_config
    assert made.enable_eplb
    assert not made.eplb_config.use_async
    assert ["--eplb-config.use_async=false" in text for text in told] == [True]
    assert made.eplb_config.communicator == eplb.CPU_COMMUNICATOR


def test_without_our_backend_vllm_refuses_as_before(checkpoint: Path) -> None:
    created(checkpoint)  # what this needs is gone afterwards
    for other in (backend.CARRIER, "deepep_v2"):
        with pytest.raises(ValueError, match="only supported on CUDA"):
            created(checkpoint, all2all_backend=other)


@pytest.mark.parametrize("moe_backend", ["flashinfer_moe_ep_cutedsl", "deep_gemm_mega_moe"])
def test_where_we_stand_aside_vllm_refuses_as_before(moe_backend: str, checkpoint: Path) -> None:
    """Its own balancer would not run on CPU ranks, and ours does not come."""
    for values in ({"moe_backend": moe_backend}, {"kernel_config": {"moe_backend": moe_backend}}):
        with pytest.raises(ValueError, match="only supported on CUDA"):
            created(checkpoint, **values)


def test_a_worker_may_copy_its_configuration(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM checks the copy, and a model with several parts gets one for each."""
    from vllm.config import parallel
    from vllm.config.utils import replace

    made = created(checkpoint)
    with pytest.raises(ValueError, match="only supported on CUDA"):
        replace(made, model_config=made.model_config)
    monkeypatch.setattr(parallel, "current_platform", parallel.current_platform)
    for _ in range(2):
        eplb.allow()
    assert replace(made, model_config=made.model_config).parallel_config.enable_eplb
    assert parallel.current_platform.device_type == "cpu"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"eplb_config": {"num_redundant_experts": 1}}, "num_redundant_experts=2"),
        ({"eplb_config": {"communicator": "torch_nccl", "use_async": False}}, "torch_nccl"),
        ({"worker_cls": "some.where.Worker"}, "--worker-cls some.where.Worker"),
    ],
)
def test_what_cpu_ranks_cannot_do_is_named(
    values: dict[str, Any], words: str, checkpoint: Path
) -> None:
    with pytest.raises(UnsupportedError, match="cannot serve") as caught:
        created(checkpoint, **values)
    assert words in str(caught.value)


def rules(device: str, **values: Any) -> list[str]:
    balancing = SimpleNamespace(communicator="torch_gloo")
    parallel = SimpleNamespace(enable_eplb=True, eplb_config=balancing)
    config = {"parallel_config": parallel, "speculative_config": None, "use_v2_model_runner": False}
    asked = SimpleNamespace(**{**config, **values})
    return list(eplb.problems(asked, device, worker_is_ours=True))


def test_rules_that_this_machine_would_hide() -> None:
    assert rules("cpu") == []
    assert "draft model" in rules("cpu", speculative_config=object())[0]
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in rules("cpu", use_v2_model_runner=True)[0]
    assert rules("cuda", speculative_config=object(), use_v2_model_runner=True) == []


# Physical ids of CPU ranks.


def maps(physical_to_logical: list[int], num_logical: int) -> tuple[torch.Tensor, torch.Tensor]:
    made: tuple[torch.Tensor, torch.Tensor]
    made = compute_logical_maps(torch.tensor(physical_to_logical), num_logical)
    return made


def physical(
    ids: torch.Tensor, load: torch.Tensor, counted: bool = True, unpadded: int | None = None
) -> torch.Tensor:
    """Of eight physical experts for five logical ones."""
    to_physical, replicas = maps([4, 0, 3, 1, 0, 2, 0, 3], 5)
    rows = None if unpadded is None else torch.tensor(unpadded, dtype=torch.int32)
    enabled = torch.tensor(counted)
    return cpu_layers.to_physical(ids, load, to_physical, replicas, enabled, rows)


def test_every_id_becomes_a_replica_of_its_expert() -> None:
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(40)]).to(torch.int32)
    load = torch.zeros(8, dtype=torch.int32)
    got = physical(ids, load)
    assert got.dtype == torch.int32
    logical = torch.tensor([4, 0, 3, 1, 0, 2, 0, 3])
    assert logical[got.long()].tolist() == ids.tolist()
    assert load.tolist() == torch.bincount(got.flatten(), minlength=8).tolist()
    assert all(load[slot] > 0 for slot in (1, 4, 6)), "tokens take all replicas of an expert"


def test_a_token_takes_the_replica_that_vllms_kernel_would_take() -> None:
    """Worked out by hand from its hash: 2654435769 * row mod 2^32, mod the number of replicas."""
    ids = torch.zeros(6, 1, dtype=torch.int64)
    got = physical(ids, torch.zeros(8, dtype=torch.int32))
    hashed = [0, 2654435769, 1013904242, 3668340011, 2027808484, 387276957]
    assert got.flatten().tolist() == [(1, 4, 6)[h % 3] for h in hashed]


def test_padding_is_not_counted_and_marked_choices_stay_marked() -> None:
    ids = torch.tensor([[1, -1], [2, 1], [4, 2], [7, 0]])
    load = torch.full((8,), 5, dtype=torch.int32)
    got = physical(ids, load, unpadded=2)
    assert got[:3].tolist() == [[3, -1], [5, 3], [0, 5]]
    assert got[3, 0] == -1, "there is no expert 7"
    assert load.tolist() == [5, 5, 5, 7, 5, 6, 5, 5]
    physical(ids, load, counted=False)
    assert load.tolist() == [5, 5, 5, 7, 5, 6, 5, 5]


def test_no_tokens() -> None:
    load = torch.zeros(8, dtype=torch.int32)
    assert physical(torch.zeros(0, 3, dtype=torch.int32), load).shape == (0, 3)
    assert not load.any()


# Weights that can move.


def test_packed_weights_of_unquantised_experts_alone_can_move() -> None:
    cpu_layers.check_movable(object.__new__(cpu_moe.CPUUnquantizedExperts), "layer 3")
    with pytest.raises(UnsupportedError, match="CPUExpertsFp8 of layer 3 packs"):
        cpu_layers.check_movable(object.__new__(cpu_moe.CPUExpertsFp8), "layer 3")


def test_a_layout_that_mixes_experts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixed(cpu_moe.CPUUnquantizedExperts):  # type: ignore[misc]
        isa = "mixed"

    def mixing(weight: torch.Tensor, isa: str) -> torch.Tensor:
        return weight.transpose(0, 1).contiguous().view_as(weight)

    monkeypatch.setattr(cpu_layers, "cpu_prepack_moe_weight", mixing)
    with pytest.raises(UnsupportedError, match="Mixed of layer 3"):
        cpu_layers.check_movable(object.__new__(Mixed), "layer 3")


# Experts that vLLM's balancer moves between CPU ranks, over gloo, with our layers around them. The
# balancer, its policy, its code that moves weights and its communicator are vLLM's. So are the
# experts and their packing. Each rank has two layers and sends most tokens to a few experts.

#: Eight physical experts for six logical ones: as many on each of two and of four ranks.
REDUNDANT, NUM_LAYERS, STEPS = 2, 2, 7
INTERVAL = 3


class Runner:
    """What the balancer asks of vLLM's MoERunner, around our routed experts."""

    def __init__(self, layer: Any) -> None:
        self.routed_experts, self.layer_name = layer, layer.layer_name
        self.eplb_state = eplb_state.EplbLayerState()

    def get_expert_weights(self) -> Any:
        return self.routed_experts.get_expert_weights()

    def set_eplb_state(self, moe_layer_idx: int, **views: torch.Tensor) -> None:
        self.eplb_state.set_layer_state(moe_layer_idx, **views)

    def physical(self, ids: torch.Tensor) -> torch.Tensor:
        """As vLLM's router does."""
        state = self.eplb_state
        return cpu_layers.to_physical(
            ids,
            state.expert_load_view,
            state.logical_to_physical_map,
            state.logical_replica_count,
            state.should_record_tensor,
            state.num_unpadded_tokens_tensors[0],
        )


class Model(torch.nn.Module, MixtureOfExperts):  # type: ignore[misc]
    """As many fields as the balancer reads."""

    num_moe_layers, num_expert_groups, num_shared_experts = NUM_LAYERS, 1, 0
    num_logical_experts = num_routed_experts = NUM_EXPERTS
    num_physical_experts, num_redundant_experts = NUM_EXPERTS + REDUNDANT, REDUNDANT

    def __init__(self, runners: list[Runner], ep_size: int) -> None:
        torch.nn.Module.__init__(self)
        self.moe_layers = runners
        self.layers = torch.nn.ModuleList(runner.routed_experts for runner in runners)
        self.num_local_physical_experts = self.num_physical_experts // ep_size


def balancer(runners: list[Runner], ep_size: int) -> HostEplbState:
    """vLLM's, in a process without the rest of a worker."""
    config = SimpleNamespace(
        eplb_config=EPLBConfig(
            window_size=INTERVAL, step_interval=INTERVAL, use_async=False, communicator="torch_gloo"
        ),
        enable_elastic_ep=False,
        num_ubatches=0,
    )
    state = HostEplbState(config, torch.device("cpu"))
    state.add_model(Model(runners, ep_size), SimpleNamespace(compute_hash=lambda: "m", model="m"))
    return state


def skewed(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of which each chooses expert 5, and most expert 3: in another step others."""
    hidden, _ids, weights = tokens(9, 10 * step + rank)
    scores = torch.rand(9, NUM_EXPERTS, generator=torch.Generator().manual_seed(step + rank))
    scores[:, (5 + step // INTERVAL) % NUM_EXPERTS] += 2
    scores[:7, 3] += 1
    return hidden, scores.topk(TOP_K, dim=1).indices.to(torch.int32), weights


def rank_main(rank: int, world_size: int) -> list[dict[str, Any]]:
    """All ranks in one group, and then the first half and the second half in two."""
    half = world_size // 2
    halves = [dist.new_group(list(range(first, first + half))) for first in (0, half)]
    groups = [dist.group.WORLD, halves[rank // half]]
    return [in_group(group, dist.get_rank(group), dist.get_world_size(group)) for group in groups]


def in_group(group: Any, rank: int, ep_size: int) -> dict[str, Any]:
    of_vllm = SimpleNamespace(device_group=group, cpu_group=group, world_size=ep_size)
    with pytest.MonkeyPatch.context() as patch, vllm_experts.ranks_of_vllm(patch):
        for name in ("get_ep_group", "get_eplb_group"):
            patch.setattr(eplb_state, name, lambda: of_vllm)
        patch.setattr(eplb_state, "get_node_count", lambda: 1)
        patch.setattr("vllm.distributed.eplb.eplb_communicator.is_local_first_rank", lambda: False)
        patch.setattr(method, "get_ep_group", lambda: of_vllm)
        return served(rank, ep_size, Ranks(group, rank, ep_size, WORDING))


def served(rank: int, ep_size: int, ranks: Ranks) -> dict[str, Any]:
    """Rounds of both layers, of which each must be right, with moves between them."""
    features.add(cpu_layers.MovableExperts())
    pool = vllm_experts.join_as(ranks)
    weights = [Weights(layer) for layer in range(NUM_LAYERS)]
    layers = [
        vllm_experts.loaded(rank, ep_size, one, redundant=REDUNDANT, name=f"layer {number}")
        for number, one in enumerate(weights)
    ]
    runners = [Runner(layer) for layer in layers]
    state = balancer(runners, ep_size)
    (model_state,) = state.model_states.values()
    watch = moves.Moves(ranks)
    watch.follow(state)
    placed = [model_state.physical_to_logical_map.clone()]
    for step in range(STEPS):
        hidden, ids, router = skewed(rank, step)
        model_state.num_unpadded_tokens_tensors[0].fill_(len(ids))
        for runner, one in zip(runners, weights, strict=True):
            got = vllm_experts.run(runner.routed_experts, hidden, runner.physical(ids), router)
            torch.testing.assert_close(got, one.dense(hidden, ids, router), rtol=1e-5, atol=1e-5)
        counted = int(model_state.expert_load_pass.sum())
        state.step(is_dummy=False)
        assert counted == NUM_LAYERS * ids.numel(), "in each step of so short an interval"
        if state.expert_rearrangement_step == 0:
            placed.append(model_state.physical_to_logical_map.clone())
    check_rows(rank, runners, weights, placed[-1])
    check_reload_is_refused(runners[0].routed_experts, weights[0])
    pool.close()
    return {"placed": [one.tolist() for one in placed], "eplb": watch.stats()["eplb"]}


def check_rows(rank: int, runners: list[Runner], weights: list[Weights], placed: Any) -> None:
    """Every row of the packed weights is, to the bit, that of the expert placed there."""
    for runner, one, experts in zip(runners, weights, placed, strict=True):
        layer = runner.routed_experts
        local = layer.local_num_experts
        mine = experts[rank * local : (rank + 1) * local]
        w13 = torch.cat([one.w1, one.w3], dim=1)
        for name, whole in (("w13_weight", w13), ("w2_weight", one.w2)):
            expected = cpu_prepack_moe_weight(whole[mine].contiguous(), "vec")
            assert torch.equal(getattr(layer, name), expected), (layer.layer_name, name)


def check_reload_is_refused(layer: Any, weights: Weights) -> None:
    with pytest.raises(UnsupportedError, match="layer 0 cannot be loaded again"):
        weights.load(layer)


def test_the_layer_computes_the_same_before_and_after_moves(tmp_path: Path) -> None:
    """Of four ranks, and of two: a process that has imported vLLM serves both."""
    of_four, of_two = zip(*run_processes(4, rank_main, tmp_path), strict=True)
    check_moves(of_four, 4)
    check_moves(of_two, 2)


def check_moves(results: Sequence[dict[str, Any]], ep_size: int) -> None:
    assert all(result == results[0] for result in results), "all ranks have one placement"
    placed = [torch.tensor(one) for one in results[0]["placed"]]
    moved = [int((new != old).sum()) for old, new in itertools.pairwise(placed)]
    assert len(moved) == results[0]["eplb"]["rearrangements"] >= 2
    assert sum(moved) == results[0]["eplb"]["moved"]
    local = (NUM_EXPERTS + REDUNDANT) // ep_size
    owners = [
        [sorted(one[0, n : n + local].tolist()) for n in range(0, 8, local)] for one in placed
    ]
    assert any(old != new for old, new in itertools.pairwise(owners)), "between ranks"


# Static scales after a move.


class StaticMethod(method.MoeNvlinkFusedMoEMethod):
    """Our method with a scale, and without a layer."""

    def __init__(self, scale: float | Exception | None) -> None:
        torch.nn.Module.__init__(self)
        self._scale = scale

    @property
    def has_static_scale(self) -> bool:
        return self._scale is not None

    def static_scale(self) -> float | None:
        if isinstance(self._scale, Exception):
            raise self._scale
        return self._scale


def agreed(group: ThreadGroup) -> list[str]:
    """What this rank sees of four layers, one after the other."""
    ranks = Ranks(group, group.rank, group.size, WORDING)
    told = []
    unusable = UnsupportedError("0.5 and 0.25") if group.rank else 0.5
    for number, scale in enumerate((None, 0.5, 0.5 + group.rank, unusable)):
        layer = SimpleNamespace(layer_name=f"layer {number}", quant_method=StaticMethod(scale))
        try:
            moves.agree_again([layer], ranks)
            told.append("")
        except (UnsupportedError, PeerError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_ranks_agree_on_static_scales_again() -> None:
    first, second = run_ranks(2, agreed)
    for told in (first, second):
        assert told[:2] == ["", ""]
        assert "static activation scale of layer 2 differs" in told[2]
        assert "rank 0 has 0.5, rank 1 has 1.5" in told[2]
    assert first[3].startswith("PeerError: layer 3")
    assert "0.5 and 0.25" in first[3]
    assert second[3] == "UnsupportedError: 0.5 and 0.25"


def state_of(placed: torch.Tensor, model: torch.nn.Module) -> Any:
    """As much of the balancer's as is watched."""
    one = SimpleNamespace(physical_to_logical_map=placed, rebalanced=False, model=model)
    return SimpleNamespace(
        model_states={"m": one},
        expert_rearrangement_step=5,
        step=lambda: None,
        rearrange=lambda: None,
    )


def test_a_move_beside_the_steps_ends_with_its_last_layer() -> None:
    """What vLLM's asynchronous balancer leaves after each step."""
    placed = torch.tensor([[0, 1], [0, 1]])
    state = state_of(placed, torch.nn.Module())
    one = state.model_states["m"]
    watch = moves.Moves(Ranks(None, 0, 1, WORDING))
    watch.follow(state)
    seen = []
    for step, is_moving, layer in (
        *((6, False, None), (0, True, None), (1, True, 0)),
        *((2, False, 1), (3, False, None)),
    ):
        state.expert_rearrangement_step, one.rebalanced = step, is_moving
        if layer is not None:
            placed[layer] = torch.tensor([1, 0])
        state.step()
        seen.append(watch.stats()["eplb"])
    nothing, moved = ({"rearrangements": n, "moved": 4 * n} for n in (0, 1))
    assert seen == [nothing, nothing, nothing, moved, moved]
