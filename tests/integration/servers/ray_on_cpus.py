"""Two plugins of vLLM for tests, a platform (none) and a general one: Ray places CPU ranks.

vLLM's CPU platform names no resource for Ray. Here it names GPUs, of which the Ray of this test
believes to have some. The server's process starts that Ray, without our variables: ranks in Ray's
processes must get these from vLLM.
"""

from __future__ import annotations

import importlib
import os


def register() -> None:
    """Names the resource; in the first process that asks, also starts Ray."""
    from vllm.platforms.cpu import CpuPlatform

    ray = importlib.import_module("ray")  # which type checkers need not have

    CpuPlatform.ray_device_key = "GPU"
    if ray.is_initialized() or "RAY_ADDRESS" in os.environ:
        return
    ours = {name: value for name, value in os.environ.items() if name.startswith("MOE_NVLINK_")}
    for name in ours:
        del os.environ[name]
    started = ray.init(num_cpus=8, num_gpus=2, object_store_memory=1 << 27, include_dashboard=False)
    os.environ.update(ours, RAY_ADDRESS=started.address_info["gcs_address"])
