"""What a worker does with our exchange when ranks join or leave."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.elastic_ep.elastic_execute import ElasticEPScalingExecutor
from vllm.distributed.elastic_ep.standby_state import get_standby_dp_group, get_standby_ep_group
from vllm.platforms import current_platform
from vllm.utils import is_moe_layer
from vllm.utils.import_utils import resolve_obj_by_qualname

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.vllm.all2all_manager import manager_of_ep_group
from moe_nvlink_plugin.integration.vllm.moe import features
from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput
from moe_nvlink_plugin.integration.vllm.moe.method import install_for

_FLAG = "elastic expert parallelism (--enable-elastic-ep)"


def put_in_place() -> None:
    """Let vLLM's groups beside torch's world have our communicator. Local; idempotent.

    vLLM makes a `CudaCommunicator` for each, and asserts that the platform wants just this class.
    """
    groups: Any = importlib.import_module("vllm.distributed.stateless_coordinator")
    groups.CudaCommunicator = resolve_obj_by_qualname(
        current_platform.get_device_communicator_cls()
    )
    features.add(DynamicScales())


class DynamicScales(features.Feature):
    """Refuses static activation scales: a rank that joins has none that it could share."""

    def is_on(self, vllm_config: Any, moe_config: Any) -> bool:
        """Return whether ranks may join or leave. Local."""
        return vllm_config is not None and vllm_config.parallel_config.enable_elastic_ep

    def check(self, experts: Any, layer: Any) -> None:
        """Raise UnsupportedError for experts whose input has a static scale. Local."""
        if VllmExpertsInput.of(experts).static_scale is not None:
            raise UnsupportedError(
                f"{_FLAG}: the activations of {layer.layer_name} have a static scale, which the "
                "ranks share when they load the model, and a rank that joins loads dummy weights. "
                "Use a checkpoint with dynamic scales, or remove the flag."
            )


class MoeNvlinkScaling(ElasticEPScalingExecutor):
    """vLLM's steps of a worker, with exchanges of ours in the groups to come."""

    @overrides
    def stage_standby_moe_quant_methods(self, all2all_manager: Any) -> None:
        """Create the exchanges of the groups to come. Collective over them, as `install_for`.

        It runs in a thread beside the steps of the groups that serve.
        """
        runner, pool = self.worker.model_runner, all2all_manager.pool
        dp_group, ep_group = get_standby_dp_group(), get_standby_ep_group()
        staged = self._staged_moe_quant_methods
        staged.clear()
        with set_current_vllm_config(self.worker.vllm_config):
            for module in filter(is_moe_layer, runner.get_model().modules()):
                moe = self._make_eep_moe_config(module, dp_group, ep_group)
                method = module._quant_method
                experts = self._experts(module, moe, all2all_manager)
                staged[module] = install_for(
                    pool, module.routed_experts, moe, method.old_quant_method, experts
                )

    def _experts(self, module: Any, moe: Any, all2all_manager: Any) -> Any:
        """Return a layer's experts for the groups to come, as vLLM makes them. Local."""
        from vllm.model_executor.layers.fused_moe.eep_reconfigure import (
            make_eep_staged_quant_method,
        )

        made: Any = make_eep_staged_quant_method(module, moe, all2all_manager=all2all_manager)
        return made.moe_kernel.fused_experts

    @overrides
    def commit_scale_up(self, is_existing_worker: bool) -> None:
        """Change to the new groups as vLLM does. Collective over them."""
        super().commit_scale_up(is_existing_worker)
        self._follow()

    @overrides
    def commit_scale_down(self, new_dp_size: int, removing: bool) -> None:
        """Change to the new groups as vLLM does, or leave. Collective over the old ranks."""
        super().commit_scale_down(new_dp_size, removing)
        if not removing:
            self._follow()

    def _follow(self) -> None:
        """Let what follows the load balancer know the new ranks. Local."""
        worker = self.worker
        manager = manager_of_ep_group(_FLAG)
        worker.moves.go_on(worker.model_runner.eplb_state, manager.ranks)
        if worker.moves.stats not in manager.sections:  # a rank that joins has begun here
            manager.sections.append(worker.moves.stats)
