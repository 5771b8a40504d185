"""vLLM's own layers on CPU ranks, behind our method: loaded, run, reloaded, with scales."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.model_loader.reload import layerwise

from moe_nvlink_plugin.errors import PeerError, UnsupportedError
from moe_nvlink_plugin.integration.vllm.moe.cpu_fp8_experts import (
    dequantised_blocks,
    serve_without_amx,
)
from moe_nvlink_plugin.integration.vllm.moe.method import MoeNvlinkFusedMoEMethod, share_scales
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks, try_ranks
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import NUM_EXPERTS, TOP_K, Weights, tokens

EP_SIZE = 2


def loaded(group: ThreadGroup, weights: Weights, dtype: torch.dtype = torch.float32) -> Any:
    """The rank's layer, once vLLM has loaded it."""
    vllm_experts.join(group)
    return vllm_experts.loaded(group.rank, group.size, weights, dtype)


@pytest.mark.usefixtures("cpu_ranks")
def test_a_loaded_layer_has_our_method_around_vllms() -> None:
    weights = Weights(0)

    def rank_main(group: ThreadGroup) -> None:
        layer = loaded(group, weights)
        ours = layer.quant_method
        assert type(ours) is MoeNvlinkFusedMoEMethod
        assert type(ours.old_quant_method) is UnquantizedFusedMoEMethod
        assert "process_weights_after_loading" not in vars(ours.old_quant_method)
        assert ours.experts_cls is ours.old_quant_method.experts_cls  # models read such fields
        with pytest.raises(AttributeError, match="nobody_has_it"):
            _ = ours.nobody_has_it
        assert layer.weight_loader.supports_moe_loading  # Llama 4's model asks
        vllm_experts.check_rows(layer, group.rank, weights)

    run_ranks(EP_SIZE, rank_main)


@pytest.mark.usefixtures("cpu_ranks")
def test_weights_that_are_reloaded_are_packed_again() -> None:
    """As vLLM's reload_weights does it, layer by layer, into the memory of the old weights."""
    before, after = Weights(0), Weights(1)

    def rank_main(group: ThreadGroup) -> None:
        vllm_experts.join(group)
        layer = vllm_experts.make_layer(group.rank, group.size)
        layerwise.record_metadata_for_reloading(layer)
        before.load(layer)
        layer.quant_method.process_weights_after_loading(layer)
        vllm_experts.check_rows(layer, group.rank, before)
        method, memory = layer.quant_method, layer.w13_weight.data_ptr()
        layerwise.initialize_layerwise_reload(layer)
        after.load(layer)
        layerwise.finalize_layerwise_reload(layer, None)
        assert layer.quant_method is method
        assert layer.w13_weight.data_ptr() == memory
        vllm_experts.check_rows(layer, group.rank, after)

    run_ranks(EP_SIZE, rank_main)


@pytest.mark.usefixtures("cpu_ranks")
def test_weights_that_were_processed_while_they_loaded_keep_their_kernel() -> None:
    """vLLM's online quantisation returns at once from its second call."""
    weights = Weights(0)

    def rank_main(group: ThreadGroup) -> None:
        layer = loaded(group, weights)
        old = layer.quant_method.old_quant_method
        kernel = old.moe_kernel
        old.process_weights_after_loading = lambda _layer: None
        layer.quant_method.process_weights_after_loading(layer)
        assert old.moe_kernel is kernel
        vllm_experts.check_rows(layer, group.rank, weights)

    run_ranks(EP_SIZE, rank_main)


def _spoil(layer: Any, step: str) -> None:
    """Let a step of the layer's set-up go wrong once its weights are loaded."""
    vllms = type(layer.quant_method)

    def process(quant_method: Any, layer: Any) -> None:
        if step == "weights":
            raise MemoryError("no room for weights")
        vllms.process_weights_after_loading(quant_method, layer)
        if step == "no experts":
            quant_method.moe_kernel = None
        if step == "monolithic":
            quant_method.moe_kernel = SimpleNamespace(is_monolithic=True)
        if step == "sums":  # the model says it after it has made the layer
            layer.moe_config.skip_final_all_reduce = True
        if step == "placement":
            layer._expert_map = torch.tensor([-1, 0, -1, 1, -1, 2])
        if step == "packed":
            del layer.w2_weight

    layer.quant_method.__class__ = type(
        "Spoilt", (vllms,), {"process_weights_after_loading": process}
    )


@pytest.mark.usefixtures("cpu_ranks")
@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("weights", "MemoryError: no room for weights"),
        ("monolithic", "UnsupportedError: .*without vLLM's modular kernel"),
        ("no experts", "UnsupportedError: .*without vLLM's modular kernel"),
        ("packed", "UnsupportedError: .*reads w2_weight, and Spoilt keeps the weights of"),
        ("sums", r"UnsupportedError: .*\(Inkling is one\) sums the output of layer 3"),
        ("placement", "UnsupportedError: vLLM placed experts"),
    ],
)
def test_no_rank_waits_for_one_that_has_failed(step: str, told: str) -> None:
    """Whatever step of a layer's set-up it was: each rank raises, and names the rank that did."""
    weights = Weights(0)

    def rank_main(group: ThreadGroup) -> None:
        vllm_experts.join(group)
        layer = vllm_experts.make_layer(group.rank, group.size)
        weights.load(layer)
        if group.rank == 1:
            _spoil(layer, step)
        layer.quant_method.process_weights_after_loading(layer)

    others, own = try_ranks(EP_SIZE, rank_main)
    assert re.match(told, f"{type(own).__name__}: {own}")
    assert isinstance(others, PeerError), repr(others)
    assert re.search(f"layer 3 cannot be set up on another rank; rank 1: {told}", str(others))


# What the experts compute: each choice once, on one rank.


#: Roundings to the type between the two products, of each choice and of each rank's sum.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_choice_is_computed_once(dtype: torch.dtype, cpu_ranks: list[torch.Tensor]) -> None:
    weights = Weights(0, dtype)
    mine = [tokens(5 - 2 * rank, rank, dtype) for rank in range(EP_SIZE)]

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        return vllm_experts.run(loaded(group, weights, dtype), *mine[group.rank])

    for outputs, work in zip(run_ranks(EP_SIZE, rank_main), mine, strict=True):
        assert outputs.dtype == dtype
        expected, limit = weights.dense(*work), TOLERANCE[dtype]
        torch.testing.assert_close(outputs.float(), expected, rtol=limit, atol=limit)
    assert all(ids.shape[1] == 1 for ids in cpu_ranks)
    asked = torch.cat([ids.flatten() for _hidden, ids, _weights in mine])
    first_half = int((asked < NUM_EXPERTS // EP_SIZE).sum())
    assert sorted(map(len, cpu_ranks)) == sorted([first_half, len(asked) - first_half])


def test_choices_that_a_router_marked_are_not_computed(cpu_ranks: list[torch.Tensor]) -> None:
    """Of one token all three choices are padding, which is -1, and of another the first one."""
    hidden, ids, router = tokens(4, seed=0)
    expected = router.clone()
    for marked in ((0,), (2, 0)):
        ids[marked], expected[marked] = -1, 0.0
    weights = Weights(0)

    def rank_main(group: ThreadGroup) -> torch.Tensor:
        return vllm_experts.run(loaded(group, weights), hidden, ids, router)

    for outputs in run_ranks(EP_SIZE, rank_main):
        torch.testing.assert_close(outputs, weights.dense(hidden, ids.clamp(min=0), expected))
    assert sum(map(len, cpu_ranks)) == EP_SIZE * (3 * TOP_K - 1)


def test_tokens_of_an_idle_rank_go_to_no_expert(cpu_ranks: list[torch.Tensor]) -> None:
    """The other rank's tokens are served meanwhile, and in the next round the idle rank's too."""
    weights = Weights(0)
    mine = [tokens(3, rank) for rank in range(EP_SIZE)]

    def rank_main(group: ThreadGroup) -> list[torch.Tensor]:
        pool = vllm_experts.join(group)
        layer = vllm_experts.loaded(group.rank, EP_SIZE, weights)
        work = mine[group.rank]
        if group.rank == 0:
            return [vllm_experts.run(layer, *work), vllm_experts.run(layer, *work)]
        with pool.idling():
            idle = vllm_experts.run(layer, *work)
        return [idle, vllm_experts.run(layer, *work)]

    (first, again), (idle, served) = run_ranks(EP_SIZE, rank_main)
    for outputs in (first, again):
        torch.testing.assert_close(outputs, weights.dense(*mine[0]))
    assert not idle.any()
    torch.testing.assert_close(served, weights.dense(*mine[1]))
    assert sum(map(len, cpu_ranks)) == 3 * mine[0][1].numel()


# FP8 weights on a CPU without vLLM experts for them; tests/integration/servers serves such a model.


def fp8_method(*, block_quant: bool, experts_cls: Any = None) -> Any:
    made = object.__new__(Fp8MoEMethod)
    made.block_quant, made.experts_cls = block_quant, experts_cls
    return made


def test_one_scale_per_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="one scale per tensor.*weight_block_size"):
        serve_without_amx(fp8_method(block_quant=False))


def test_experts_of_vllm_are_left_alone() -> None:
    chosen = fp8_method(block_quant=True, experts_cls=object)
    before = dict(vars(chosen))
    serve_without_amx(chosen)
    serve_without_amx(object())
    assert vars(chosen) == before


def test_every_element_gets_the_scale_of_its_block() -> None:
    weight = torch.ones(1, 6, 8).to(torch.float8_e4m3fn)
    scales = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    restored = dequantised_blocks(weight, scales, [4, 4])  # the last rows fill half a block
    assert restored.dtype == torch.float32
    assert restored[0, :4, :4].eq(1).all()
    assert restored[0, :4, 4:].eq(2).all()
    assert restored[0, 4:, :4].eq(3).all()
    assert restored[0, 4:, 4:].eq(4).all()


# Static activation scales become one for all ranks, before vLLM looks at them.


def with_scales(rank: int) -> Any:
    return SimpleNamespace(
        w13_input_scale=torch.nn.Parameter(torch.tensor([0.25, 0.5]) * (rank + 1), False),
        w13_input_global_scale=torch.nn.Parameter(torch.tensor([[8.0, 6.0]]) / (rank + 1), False),
        w2_input_scale=torch.nn.Parameter(torch.tensor([1.0 + rank]), False),
    )


def test_ranks_share_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an all-reduce over the group, which threads stand for here."""
    kinds: dict[Any, Any] = {dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin}

    def all_reduce(value: torch.Tensor, op: Any, group: ThreadGroup) -> None:
        value.copy_(kinds[op](torch.stack(group.all_gather_object(value.clone())), 0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def rank_main(group: ThreadGroup) -> None:
        layer = with_scales(group.rank)
        share_scales(layer, lambda: group)
        assert layer.w13_input_scale.tolist() == [1.0, 1.0]  # the largest divisor
        assert layer.w13_input_global_scale.tolist() == [[3.0, 3.0]]  # the smallest factor
        assert layer.w2_input_scale.tolist() == [1.0 + group.rank]  # of what never leaves its rank
        share_scales(SimpleNamespace(w13_input_scale=None), pytest.fail)

    run_ranks(EP_SIZE, rank_main)
