"""vLLM's worker, which tells our exchange when it has warmed up.

Between a worker's first rounds and its first request lie compilations, autotuning and CUDA graphs,
which take minutes, and not the same on every rank. Until they are over, ranks wait longer for one
another (MOE_NVLINK_FIRST_TIMEOUT_S).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

#: What vLLM's platforms write for `worker_cls="auto"`, and our name for it.
_OURS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "MoeNvlinkCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "MoeNvlinkGPUWorker",
}

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object


class EndsStartup(_Base):
    """Mixin in front of one of vLLM's workers; everything else is inherited."""

    def compile_or_warm_up_model(self) -> Any:
        """Warms up as vLLM does, and then ends start-up."""
        times = super().compile_or_warm_up_model()
        from vllm.distributed import get_ep_group

        get_ep_group().device_communicator.all2all_manager.end_startup()
        return times


def put_in_place(vllm_config: Any) -> None:
    """Has vLLM start our worker where it would start its own. Local; idempotent.

    A worker class that the user has chosen stays. Start-up then lasts until the first complete
    round, as it does without vLLM.
    """
    parallel = vllm_config.parallel_config
    if parallel.worker_cls in _OURS:
        parallel.worker_cls = f"{__name__}.{_OURS[parallel.worker_cls]}"


def is_in_place(vllm_config: Any) -> bool:
    """Whether the workers are ours. Local."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return str(getattr(parallel, "worker_cls", "")).startswith(f"{__name__}.")


def __getattr__(name: str) -> Any:
    """Builds our class when vLLM resolves it: its base cannot be imported on every machine."""
    for qualified, ours in _OURS.items():
        if name == ours:
            from vllm.utils.import_utils import resolve_obj_by_qualname

            base = resolve_obj_by_qualname(qualified)
            cls = type(name, (EndsStartup, base), {"__module__": __name__})
            globals()[name] = cls
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
