"""vLLM's worker, extended: it tells our exchange of the end of start-up, dummy batches, and waking.

On CPU ranks it also tells of checkpoints, for which vLLM's own worker needs an accelerator.

Between its first rounds and its first request, a worker compiles, tunes and captures CUDA graphs.
That takes minutes, and differs from rank to rank. Until it is over, ranks wait longer for one
another (MOE_NVLINK_FIRST_TIMEOUT_S).

A rank without requests runs dummy batches while other ranks work. On CPU ranks the tokens of a
dummy batch go to no expert, and only its MoE layers run. Dummy batches remove no adapters (LoRA).

vLLM's sleep mode frees what a worker has allocated while it loaded weights. Level 2 loses the
content, of tensors of ours too.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from moe_nvlink_plugin.integration import overrides
from moe_nvlink_plugin.integration.vllm.backend import OurManager
from moe_nvlink_plugin.integration.vllm.lora import loading
from moe_nvlink_plugin.integration.vllm.moe.idle_steps import IdleSteps

#: Class that vLLM's platforms choose for `worker_cls="auto"` -> name of our subclass.
_OURS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "MoeNvlinkCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "MoeNvlinkGPUWorker",
}

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object


class TellsOurExchange(_Base):
    """Mixin for one of vLLM's workers, which does everything else."""

    #: What follows the load balancer (`balancing.moves.Moves`), if there is one.
    moves: Any = None

    @functools.cached_property
    def idle_steps(self) -> IdleSteps:
        """Dummy batches of this worker on CPUs."""
        return IdleSteps()

    @overrides
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("vllm_config", args[0] if args else None)
        parallel: Any = getattr(asked, "parallel_config", None)
        if not getattr(parallel, "enable_fault_tolerance", False):
            super().__init__(*args, **kwargs)
            if getattr(parallel, "enable_elastic_ep", False):
                self._let_ranks_join_and_leave()
            return
        from moe_nvlink_plugin.integration.vllm.faults.worker import MoeNvlinkWorkerSentinel

        # vLLM's sentinel would refuse our backend; ours comes in its place.
        parallel.enable_fault_tolerance = False
        try:
            super().__init__(*args, **kwargs)
        finally:
            parallel.enable_fault_tolerance = True
        self.worker_sentinel = MoeNvlinkWorkerSentinel(self)

    def _let_ranks_join_and_leave(self) -> None:
        """Put our steps in the place of vLLM's, before the worker makes groups. Local."""
        from vllm.platforms import current_platform

        from moe_nvlink_plugin.integration.vllm import compat

        is_cpu = current_platform.is_cpu()
        compat.check_elastic_names("cpu" if is_cpu else "cuda")
        if is_cpu:
            from moe_nvlink_plugin.integration.vllm.elastic import cpu_scaling

            cpu_scaling.put_in_place()
            self.elastic_ep_executor = cpu_scaling.CpuScaling(self)
        else:
            from moe_nvlink_plugin.integration.vllm.elastic import scaling

            scaling.put_in_place()
            self.elastic_ep_executor = scaling.MoeNvlinkScaling(self)

    @overrides
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model as vLLM does; then follow its load balancer, if there is one."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        manager = _manager()
        if self.vllm_config.parallel_config.enable_eplb and manager is not None:
            from moe_nvlink_plugin.integration.vllm.balancing import eplb

            self.moves = eplb.begin(self, manager)

    @overrides
    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does; then end start-up, and refuse adapters that we cannot serve."""
        times = super().compile_or_warm_up_model()
        loading.guard(self.model_runner)
        if (manager := _manager()) is not None:
            manager.end_startup()
            if getattr(manager, "support_fault_tolerance", False):
                from moe_nvlink_plugin.integration.vllm.faults import worker as faults

                faults.bound_waits_of_steps()
        return times

    @overrides
    def execute_dummy_batch(self) -> None:
        """Run the model as vLLM does for a rank without requests."""
        manager = _manager()
        with contextlib.ExitStack() as stack:
            if manager is not None:
                stack.enter_context(manager.pool.idling())
                if manager.pool.device.type == "cpu":
                    stack.enter_context(self.idle_steps.of(self.model_runner.model))
            stack.enter_context(loading.keeping(self.model_runner))
            super().execute_dummy_batch()
        if getattr(manager, "support_fault_tolerance", False):
            # vLLM asks for a fault of a graph's replay only after steps with outputs.
            manager.pool.raise_failure()

    @overrides
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake up as vLLM does; then write what sleep has lost."""
        super().wake_up(tags)
        manager = _manager()
        if manager is not None and (tags is None or "weights" in tags):
            manager.pool.restore()

    @overrides
    def checkpoint_prepare(self) -> None:
        """Do as vLLM does, which asks for an accelerator: on CPU ranks, tell our manager alone."""
        if (manager := _manager_of_cpu_ranks()) is None:
            super().checkpoint_prepare()
        else:
            manager.checkpoint_prepare()

    @overrides
    def checkpoint_restore(self) -> None:
        """As `checkpoint_prepare`."""
        if (manager := _manager_of_cpu_ranks()) is None:
            super().checkpoint_restore()
        else:
            manager.checkpoint_restore()


def _manager_of_cpu_ranks() -> Any:
    found = _manager()
    return found if found is not None and found.pool.device.type == "cpu" else None


def _manager() -> Any:
    """Return our manager; None if the ranks have fallen back to vLLM's. Local."""
    from vllm.distributed import get_ep_group

    found = get_ep_group().device_communicator.all2all_manager
    return found if isinstance(found, OurManager) else None


def put_in_place(vllm_config: Any) -> None:
    """Make vLLM start our worker wherever it would start its own. Local; idempotent.

    It does not replace a worker class that the user has chosen. Start-up then lasts until the first
    complete round, as it does without vLLM.
    """
    parallel = vllm_config.parallel_config
    if parallel.worker_cls in _OURS:
        parallel.worker_cls = f"{__name__}.{_OURS[parallel.worker_cls]}"


def extends(worker_cls: str) -> bool:
    """Return whether `put_in_place` makes such a worker ours, or has done so. Local."""
    return worker_cls == "auto" or worker_cls in _OURS or worker_cls.startswith(f"{__name__}.")


def is_in_place(vllm_config: Any) -> bool:
    """Return whether the workers are ours. Local."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return str(getattr(parallel, "worker_cls", "")).startswith(f"{__name__}.")


def __getattr__(name: str) -> Any:
    """Build our class when vLLM resolves it; not every machine can import its base."""
    for qualified, ours in _OURS.items():
        if name == ours:
            from vllm.utils.import_utils import resolve_obj_by_qualname

            base = resolve_obj_by_qualname(qualified)
            cls = type(name, (TellsOurExchange, base), {"__module__": __name__})
            globals()[name] = cls
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
