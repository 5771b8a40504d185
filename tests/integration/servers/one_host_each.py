"""A plugin of vLLM: each data-parallel rank believes that it is on a host of its own."""

from __future__ import annotations


def register() -> None:
    """Replaces the boot id, as a rank sees it."""
    from vllm.config import get_current_vllm_config_or_none

    from moe_nvlink_plugin.transport import hosts

    def boot_id() -> str:
        config = get_current_vllm_config_or_none()
        return f"of rank {config.parallel_config.data_parallel_rank}"

    hosts.boot_id = boot_id
