"""Whether a vLLM configuration asks for our backend, and the names by which it does.

``ParallelConfig.all2all_backend`` takes a closed list of names. Our choice therefore travels in
``additional_config["all2all_backend"]``, which vLLM hands to every process and hashes into its
compile cache, while ``parallel_config`` keeps ``allgather_reducescatter``: the value under which
vLLM picks the experts classes and the sequence-parallel MoE that we can serve.

Imports nothing: vLLM's command line needs this module also where the rest cannot be imported.
"""

from __future__ import annotations

from typing import Any

BACKEND = "moe_nvlink"
CARRIER = "allgather_reducescatter"
KEY = "all2all_backend"


class OurPlatform:
    """Marks platforms of ours, so that one can be told without importing what they need."""


def additional(vllm_config: Any) -> dict[str, Any]:
    """``additional_config`` where it is a dict, {} otherwise. Local; any object, None included."""
    found = getattr(vllm_config, "additional_config", None)
    return found if isinstance(found, dict) else {}


def is_selected(vllm_config: Any) -> bool:
    """Whether this configuration asks for our backend. Local; any object, None included."""
    return additional(vllm_config).get(KEY) == BACKEND


def selected_here() -> bool:
    """Whether vLLM's current configuration (the one set around worker start-up) asks for us."""
    from vllm.config import get_current_vllm_config_or_none

    return is_selected(get_current_vllm_config_or_none())
