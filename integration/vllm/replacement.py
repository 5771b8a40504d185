"""Registers one of our classes instead of one of vLLM's layers."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.custom_op import op_registry_oot

from moe_nvlink_plugin.errors import UnsupportedError

from .backend import BACKEND


def put_in_place(original: Any, ours: type) -> None:
    """Make vLLM create `ours` wherever it would create `original`. Local; idempotent.

    Raises:
        UnsupportedError: another plugin has replaced `original`. vLLM would silently use the class
            registered last, and one of the two plugins would not work.
    """
    name = original.__name__
    present = op_registry_oot.get(name)
    if present is ours:
        return
    if present is not None:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: another plugin has already replaced vLLM's {name} "
            f"by {present.__module__}.{present.__qualname__}. Disable that plugin "
            "(VLLM_PLUGINS lists the plugins to load), or drop the flag."
        )
    original.register_oot(ours)
