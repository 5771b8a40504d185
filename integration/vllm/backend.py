"""Says whether a vLLM configuration asks for our backend, and the names by which it does.

``ParallelConfig.all2all_backend`` takes a closed list of names. Therefore our choice travels in
``additional_config["all2all_backend"]``, which vLLM passes to every process and hashes into its
compile cache. ``parallel_config`` keeps ``allgather_reducescatter``. With this value vLLM chooses
the experts classes and the sequence-parallel MoE that we can serve. It stays so where vLLM takes
any name (`moe.factory` says why).

This module imports nothing at its top, because vLLM's command line needs it even if our other
modules cannot be imported.
"""

from __future__ import annotations

from typing import Any

BACKEND = "moe_nvlink"
CARRIER = "allgather_reducescatter"
KEY = "all2all_backend"
#: Where ``additional_config`` says which version of this package serves.
VERSION_KEY = "moe_nvlink_version"


class OurPlatform:
    """Base class of our platforms, so code can recognise one without importing its module."""


class OurManager:
    """Base class of our all-to-all manager, so code can recognise it without importing it."""


def additional(vllm_config: Any) -> dict[str, Any]:
    """Return ``additional_config`` if it is a dict, else {}. Local; takes any object and None."""
    found = getattr(vllm_config, "additional_config", None)
    return found if isinstance(found, dict) else {}


def is_selected(vllm_config: Any) -> bool:
    """Return whether a configuration asks for our backend. Local; takes any object and None."""
    return additional(vllm_config).get(KEY) == BACKEND


def schedules(vllm_config: Any) -> bool:
    """Return whether a configuration names one of our schedulers. Local; takes any object.

    A class may also be a subclass of ours. Of a string only the name counts, because an import of a
    user's module here could come too early.
    """
    chosen = getattr(getattr(vllm_config, "scheduler_config", None), "scheduler_cls", None)
    if isinstance(chosen, str):
        modules = [chosen]
    else:
        modules = [base.__module__ for base in getattr(chosen, "__mro__", ())]
    return any(name.startswith(f"{__package__}.scheduler.") for name in modules)


def selected_here() -> bool:
    """Return whether vLLM's current configuration asks for our backend. Local.

    vLLM sets the current configuration while a worker starts.
    """
    from vllm.config import get_current_vllm_config_or_none

    return is_selected(get_current_vllm_config_or_none())
