"""Expert load balancing: who may ask for it, physical ids of CPU ranks, and experts that move.

servers/test_eplb_e2e.py has vLLM's balancer move experts between our layers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.eplb.eplb_state import compute_logical_maps
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from moe_nvlink_plugin.errors import PeerError, UnsupportedError
from moe_nvlink_plugin.integration.common.agreement import Ranks
from moe_nvlink_plugin.integration.vllm import backend
from moe_nvlink_plugin.integration.vllm.balancing import cpu_layers, eplb, moves
from moe_nvlink_plugin.integration.vllm.choices import WORDING
from moe_nvlink_plugin.integration.vllm.moe import method
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import Weights
from tests.integration.vllm.vllm_config import config_with_us

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


@pytest.mark.usefixtures("cpu_ranks")
def test_experts_that_have_moved_are_not_loaded_again() -> None:
    """vLLM's loader puts weights where the experts were at the start; servers/test_eplb_e2e.py."""

    def rank_main(group: ThreadGroup) -> None:
        pool, weights = vllm_experts.join(group), Weights(0)
        layer = vllm_experts.loaded(group.rank, group.size, weights, redundant=2, name="layer 0")
        state = state_of(torch.tensor([[0, 1]]), torch.nn.Sequential(layer))
        watch = moves.Moves(pool.ranks)
        watch.follow(state)
        weights.load(layer)
        state.model_states["m"].physical_to_logical_map[0, 0] = 1
        state.expert_rearrangement_step = 0
        state.step()
        with pytest.raises(UnsupportedError, match="layer 0 cannot be loaded again"):
            weights.load(layer)

    run_ranks(2, rank_main)


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
