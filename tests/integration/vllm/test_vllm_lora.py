"""Adapters (LoRA): they follow their tokens, and adapters that we cannot serve are refused.

Ranks are threads. The LoRA layer, its weights and its context are vLLM's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import get_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoEWithLoRA, LoRAMapping
from vllm.lora.punica_wrapper import punica_gpu
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from moe_nvlink_plugin.errors import DisagreementError, UnsupportedError
from moe_nvlink_plugin.integration.vllm.lora import adapters, cpu_experts, loading, punica
from moe_nvlink_plugin.integration.vllm.lora.adapters import AdapterNumbers
from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput
from moe_nvlink_plugin.integration.vllm.moe.features import BASE, NUMBER_BYTES
from moe_nvlink_plugin.integration.vllm.moe.method import _experts_input
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm import vllm_runner
from tests.integration.vllm.moe import vllm_experts, vllm_layer
from tests.integration.vllm.moe.vllm_experts import (
    CAPACITY,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    Weights,
    tokens,
)
from tests.integration.vllm.moe.vllm_layer import (
    Experts,
    Layer,
    dense,
    take_cuda_branches,
    work_of,
)

#: Experts that 2 and 4 ranks share evenly, slots of a rank, and the rank of the adapters' factors.
NUM_EXPERTS, NUM_SLOTS, FACTORS = 8, 3, 8
#: vLLM's ids of two adapters; 0 stands for none.
FIRST, SECOND = 5, 9
CONFIG = LoRAConfig(max_loras=NUM_SLOTS, max_lora_rank=FACTORS, lora_dtype=torch.float32)


class Factors:
    """An adapter of all experts: factors of each of the three products."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.randn(NUM_EXPERTS, *shape, generator=random)
            scaled: torch.Tensor = drawn * shape[-1] ** -0.5
            return scaled

        self.w1 = draw(FACTORS, HIDDEN_SIZE), draw(INTERMEDIATE_SIZE, FACTORS)
        self.w3 = draw(FACTORS, HIDDEN_SIZE), draw(INTERMEDIATE_SIZE, FACTORS)
        self.w2 = draw(FACTORS, INTERMEDIATE_SIZE), draw(HIDDEN_SIZE, FACTORS)

    def merged(self, base: Weights) -> Weights:
        """The base model's weights with this adapter in them."""
        merged = Weights(0)
        for name in ("w1", "w2", "w3"):
            a, b = getattr(self, name)
            setattr(merged, name, getattr(base, name) + b @ a)
        return merged

    def put(self, layer: Any, slot: int, first: int) -> None:
        """Into a slot of vLLM's LoRA layer, as its manager does for the rank's experts."""
        mine = slice(first, first + layer.local_num_experts)
        pairs = [getattr(self, name) for name in ("w1", "w2", "w3")]
        layer.set_lora(slot, [a[mine] for a, _ in pairs], [b[mine] for _, b in pairs])


@pytest.fixture
def with_adapters(cpu_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_experts, "NUM_EXPERTS", NUM_EXPERTS)
    get_current_vllm_config().lora_config = CONFIG


def _wrapper(kind: str = "CPU", slots: int = NUM_SLOTS) -> Any:
    cls = resolve_obj_by_qualname(
        punica.extended(f"vllm.lora.punica_wrapper.punica_{kind.lower()}.PunicaWrapper{kind}")
    )
    config = LoRAConfig(max_loras=slots, max_lora_rank=FACTORS)
    return cls(CAPACITY, CAPACITY, torch.device("cpu"), lora_config=config)


class RankWithAdapters:
    """A rank's MoE layer of vLLM, with adapters in the slots that this rank has them in."""

    def __init__(self, group: ThreadGroup, base: Weights, known: dict[int, Factors]) -> None:
        adapters.put_in_place()
        layer = vllm_experts.make_layer(group.rank, group.size)
        name = f"layer of rank {group.rank}"
        vllm_experts.join(group)
        self.runner = vllm_runner.make_runner(layer, name)
        base.load(layer)
        layer.quant_method.process_weights_after_loading(layer)
        self.slots: list[int | None] = [None] * NUM_SLOTS
        with_lora = FusedMoEWithLoRA(self.runner)
        with_lora.create_lora_weights(NUM_SLOTS, CONFIG)
        for place, (adapter, factors) in enumerate(known.items()):
            slot = (place + group.rank) % NUM_SLOTS
            self.slots[slot] = adapter
            factors.put(with_lora, slot, group.rank * with_lora.local_num_experts)
        self.wrapper = _wrapper()
        with_lora.set_mapping(self.wrapper)

    def step(self, of_tokens: list[int], work: Any) -> torch.Tensor:
        """One forward of tokens with these adapters. Collective."""
        mapping = LoRAMapping(tuple(of_tokens), tuple(of_tokens), is_prefill=True)
        self.wrapper.update_metadata(mapping, self.slots, NUM_SLOTS + 1, 100)
        return vllm_runner.forward(self.runner, *work)


@pytest.mark.parametrize("ep_size", [2, 4])
def test_tokens_get_their_adapters_on_every_rank(ep_size: int, with_adapters: None) -> None:
    """The ranks have them in different slots; base tokens are among them, and steps differ."""
    base = Weights(1)
    known = {FIRST: Factors(2), SECOND: Factors(3)}
    merged = {0: base, **{adapter: factors.merged(base) for adapter, factors in known.items()}}
    steps = [[FIRST, 0, SECOND, FIRST], [0, 0], [SECOND], [FIRST, SECOND, 0, 0, SECOND, FIRST]]

    def rank_main(group: ThreadGroup) -> None:
        rank = RankWithAdapters(group, base, known)
        for number in range(len(steps)):
            mine = steps[(number + group.rank) % len(steps)]
            hidden, ids, weights = work = tokens(len(mine), seed=10 * number + group.rank)
            got = rank.step(mine, work)
            for row, adapter in enumerate(mine):
                one = slice(row, row + 1)
                wanted = merged[adapter].dense(hidden[one], ids[one], weights[one])
                torch.testing.assert_close(got[one], wanted, rtol=1e-4, atol=1e-5)
                if adapter:  # the comparison would notice a lost adapter
                    lost = base.dense(hidden[one], ids[one], weights[one])
                    assert (got[one] - lost).abs().max() > 0.01

    run_ranks(ep_size, rank_main)


def test_an_adapter_that_the_receiving_rank_lacks_is_told(with_adapters: None) -> None:
    def rank_main(group: ThreadGroup) -> None:
        mine = (FIRST, SECOND)[group.rank]
        rank = RankWithAdapters(group, Weights(1), {mine: Factors(2)})
        work = tokens(6, seed=group.rank)
        assert bool((work[1] // (NUM_EXPERTS // 2) != group.rank).any()), "no token travels"
        with pytest.raises(DisagreementError, match="not loaded.*--lora-modules"):
            rank.step([mine] * 6, work)

    run_ranks(2, rank_main)


# CUDA ranks.


def test_rows_on_cuda_ranks_get_slots_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty slots of the receive buffer hold numbers of adapters that are gone since."""
    take_cuda_branches(monkeypatch.setattr)
    gains = {0: 1.0, FIRST: -2.0, SECOND: 3.0}

    def rank_main(group: ThreadGroup) -> None:
        numbers = AdapterNumbers(vllm_layer.CAPACITY, NUM_SLOTS, torch.device("cpu"))
        context = SimpleNamespace(punica_wrapper=SimpleNamespace(adapter_numbers=numbers))
        slots: list[int | None] = []

        def with_gains(rows: torch.Tensor, _scales: Any) -> torch.Tensor:
            of_slots = torch.tensor([gains[slot or 0] for slot in [*slots, 0]])
            found = context.local_token_lora_mapping
            assert found.dtype == torch.int32
            return rows * of_slots[found.long()].unsqueeze(1)

        experts = Experts(floats_of=with_gains)
        layer = Layer(group, experts=experts, extra_payload_bytes=(NUMBER_BYTES,))
        layer.subject.set_lora_context(context)
        # The second step has fewer tokens, and the second adapter is gone.
        for count, loaded in ((6, (FIRST, SECOND)), (2, (FIRST,))):
            slots[:] = [None] * NUM_SLOTS
            for place, adapter in enumerate(loaded):
                slots[(place + group.rank) % NUM_SLOTS] = adapter
            mine = [(0, *loaded)[number % (1 + len(loaded))] for number in range(count)]
            numbers.update(mine, slots)
            hidden, ids, weights = work_of(count, seed=group.rank)
            wanted = dense(hidden * torch.tensor([[gains[one]] for one in mine]), ids, weights)
            torch.testing.assert_close(layer(hidden, ids, weights), wanted)
        layer.close()

    run_ranks(2, rank_main)


def test_the_gpu_wrapper_names_every_slot_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own names the adapters of the rank's batch only, and returns early without any."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    calls: list[Any] = []
    monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)
    monkeypatch.setattr(
        punica_gpu, "fused_moe_lora", lambda *given: calls.append(given), raising=False
    )
    wrapper = _wrapper("GPU")
    mapping = LoRAMapping((0, 0), (0, 0), is_prefill=True)
    wrapper.update_metadata(mapping, [None, FIRST, None], NUM_SLOTS + 1, 100)
    of_batch = wrapper.token_mapping_meta
    assert of_batch.no_lora_flag_cpu.item()
    rows, arrived = torch.zeros(4, HIDDEN_SIZE), torch.tensor([1, -1, 1, -1], dtype=torch.int32)
    given: tuple[Any, ...] = (rows, rows, (), (), None, None, None, None, FACTORS, 1, {}, {}, None)
    wrapper.add_lora_fused_moe(*given, token_lora_mapping=arrived)
    (call,) = calls
    assert call[8] is arrived
    assert call[11].tolist() == [0, 1, 2, -1]
    assert call[12].item() == NUM_SLOTS + 1
    assert wrapper.token_mapping_meta is of_batch
    assert wrapper.adapter_numbers.of_tokens(3).tolist() == [-1, -1, -1]


# The CPU's wrapper.


def test_tokens_without_an_adapter_stay_as_they_are() -> None:
    """The last slot holds an adapter, which vLLM's own wrapper gives them."""
    wrapper = _wrapper(slots=1)
    mapping = LoRAMapping((0, FIRST, 0), (0, FIRST, 0), is_prefill=True)
    wrapper.update_metadata(mapping, [FIRST], 2, 100)
    a, b = torch.ones(1, 1, FACTORS, 4), torch.ones(1, 1, 6, FACTORS)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
        "linear": lambda y, x: wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (6,)),
        "embedding": lambda y, x: wrapper.add_lora_embedding(
            y, torch.ones(3, FACTORS), b, add_inputs=True
        ),
        "logits": lambda y, x: wrapper.add_lora_logits(y, x, a, b, 1.0),
    }
    for name, call in calls.items():
        y = torch.full((3, 6), 7.0)
        call(y, torch.ones(3, 4))
        assert (y[[0, 2]] == 7.0).all(), name
        assert (y[1] > 7.0).all(), name


# Numbers.


def test_a_number_says_which_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_names", {})
    assert adapters.number_of(0) == BASE
    before = adapters.number_of(FIRST)
    assert before != adapters.number_of(SECOND)
    adapters.remember(FIRST, "poems")
    assert adapters.number_of(FIRST) not in (before, adapters.number_of(SECOND))
    assert 0 <= adapters.number_of(FIRST) < 2**31


# What is refused.


@pytest.mark.parametrize(
    ("targets", "experts_too"),
    [
        (None, True),
        (["q_proj", "experts"], True),
        (["model.layers.0.mlp.experts"], True),
        (["experts.0.gate_proj"], True),
        (["q_proj", "o_proj"], False),
        (["shared_experts.gate_proj", "gate"], False),
    ],
)
def test_whether_experts_can_have_adapters(targets: list[str] | None, experts_too: bool) -> None:
    assert adapters.on_experts(LoRAConfig(target_modules=targets)) == experts_too
    assert not adapters.on_experts(None)


def _manager(loaded: set[int], weights: list[str], **config: Any) -> SimpleNamespace:
    return SimpleNamespace(
        lora_config=LoRAConfig(**config),
        list_adapters=lambda: loaded,
        _load_adapter=lambda request: SimpleNamespace(loras=dict.fromkeys(weights)),
    )


def test_adapters_that_would_be_served_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_names", {})
    request = SimpleNamespace(lora_int_id=3, lora_name="poems")
    attention, expert = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.7.up_proj"

    def load(manager: Any) -> Any:
        loading.guard(SimpleNamespace(lora_manager=manager))
        return manager._load_adapter(request)

    only_attention = {"target_modules": ["q_proj", "v_proj"], "max_loras": 2}
    with pytest.raises(UnsupportedError, match=r"'poems'.*experts.7.up_proj.*q_proj v_proj"):
        load(_manager(set(), [attention, expert], **only_attention))
    with pytest.raises(UnsupportedError, match=r"'poems': --max-loras is 2.*larger --max-loras"):
        load(_manager({1, 2}, [attention, expert], max_loras=2))
    assert adapters._names == {}
    load(_manager({1, 2}, [attention], **only_attention))  # another rank's experts lack nothing
    load(_manager({1, 3}, [expert], max_loras=2))  # the same one again, with other weights
    load(_manager({1}, [expert], max_loras=2))
    assert adapters._names == {3: "poems"}
    loading.guard(SimpleNamespace())  # without --enable-lora


@pytest.mark.parametrize("active", [0, 2], ids=["V1 runner", "V2 runner"])
def test_a_dummy_batch_loads_and_removes_no_adapters(active: int) -> None:
    """vLLM's own code around a dummy batch, with what each of its runners passes."""
    events: list[Any] = []
    runner: Any = LoRAModelRunnerMixin()
    runner.lora_config = SimpleNamespace(max_loras=2, max_lora_rank=8)
    runner.lora_manager = SimpleNamespace(
        set_active_adapters=lambda requests, mapping: events.append(
            (len(requests), mapping.index_mapping)
        ),
        add_dummy_lora=lambda *_given, **_more: events.append("dummy"),
        remove_all_adapters=lambda: events.append("removed"),
        get_dummy_lora_warmup_rank=lambda rank: rank,
        dummy_lora_cache=contextlib.nullcontext,
    )

    def dummy_run() -> None:
        config, one = runner.lora_config, np.array([1])
        with runner.maybe_dummy_run_with_lora(config, one, one, True, active):
            events.append("run")

    with loading.keeping(runner):
        dummy_run()
    assert events == [(0, (0,)), "run"]
    events.clear()
    dummy_run()
    assert (events[0], events[-1]) == ("dummy", "removed"), "vLLM's own again"
    runner.lora_config = None
    with loading.keeping(runner):
        assert "maybe_dummy_run_with_lora" not in vars(runner)


def test_experts_without_adapters_are_refused() -> None:
    layer = SimpleNamespace(layer_name="layer 3")
    with pytest.raises(UnsupportedError, match="Experts of layer 3 takes no adapters"):
        _experts_input(Experts(), layer, [adapters.AdaptersOnExperts()])


def test_what_experts_take_is_asked_as_with_adapters() -> None:
    """vLLM's Triton experts quantise for themselves once they have a context."""

    class Triton:
        quant_config = SimpleNamespace(quant_dtype=torch.float8_e4m3fn)
        context: Any = None

        def supports_lora(self) -> bool:
            return True

        def set_lora_context(self, context: Any) -> None:
            self.context = context

        @property
        def expects_unquantized_inputs(self) -> bool:
            return self.context is not None

    experts = Triton()
    assert VllmExpertsInput.of(experts).quant_dtype == torch.float8_e4m3fn
    assert _experts_input(experts, None, [adapters.AdaptersOnExperts()]).quant_dtype is None
    assert experts.context is None


def test_a_layer_that_was_set_up_without_adapters_gets_none() -> None:
    def rank_main(group: ThreadGroup) -> None:
        numbers = AdapterNumbers(4, NUM_SLOTS, "cpu")
        context = SimpleNamespace(punica_wrapper=SimpleNamespace(adapter_numbers=numbers))
        refused = pytest.raises(UnsupportedError, match="set up without them")
        with Layer(group) as layer, refused:
            layer.subject.set_lora_context(context)

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (SimpleNamespace(), "SimpleNamespace has quantised weights"),
        ({"activation": MoEActivation.RELU2}, "activation is relu2"),
        ({"has_bias": True}, "experts have biases"),
    ],
)
def test_cpu_layers_whose_adapters_are_not_served(method: Any, words: str) -> None:
    if isinstance(method, dict):
        silu = MoEActivation.SILU
        moe = SimpleNamespace(**{"activation": silu, "has_bias": False, **method})
        method = object.__new__(UnquantizedFusedMoEMethod)
        method.__dict__["moe"] = moe
    with pytest.raises(UnsupportedError, match=words):
        cpu_experts.take_adapters(method)
