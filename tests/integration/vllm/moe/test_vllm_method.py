"""Our fused MoE method in vLLM's own layers, on CPU ranks: loaded, run, reloaded, refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload import layerwise

from moe_nvlink_plugin.integration.vllm.moe.method import MoeNvlinkFusedMoEMethod
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.integration.vllm.moe import vllm_experts
from tests.integration.vllm.moe.vllm_experts import Weights, tokens

EP_SIZE = 2
pytestmark = pytest.mark.usefixtures("cpu_ranks")


def loaded(group: ThreadGroup, weights: Weights) -> Any:
    """The rank's layer, once vLLM has loaded it."""
    vllm_experts.join(group)
    layer = vllm_experts.make_layer(group.rank, group.size)
    layerwise.record_metadata_for_reloading(layer)
    weights.load(layer)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def check_rows(layer: Any, rank: int, weights: Weights) -> None:
    """A round with tokens of this rank's own."""
    mine = tokens(5 - 2 * rank, seed=rank)
    torch.testing.assert_close(vllm_experts.run(layer, *mine), weights.dense(*mine))


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
        check_rows(layer, group.rank, weights)

    run_ranks(EP_SIZE, rank_main)


def test_weights_that_are_reloaded_are_packed_again() -> None:
    """As vLLM's reload_weights does it, layer by layer, into the memory of the old weights."""
    before, after = Weights(0), Weights(1)

    def rank_main(group: ThreadGroup) -> None:
        layer = loaded(group, before)
        check_rows(layer, group.rank, before)
        method, memory = layer.quant_method, layer.w13_weight.data_ptr()
        layerwise.initialize_layerwise_reload(layer)
        after.load(layer)
        layerwise.finalize_layerwise_reload(layer, None)
        assert layer.quant_method is method
        assert layer.w13_weight.data_ptr() == memory
        check_rows(layer, group.rank, after)

    run_ranks(EP_SIZE, rank_main)


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
        check_rows(layer, group.rank, weights)

    run_ranks(EP_SIZE, rank_main)
