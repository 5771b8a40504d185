"""How a class of ours takes the place of one of vLLM's layers."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.custom_op import op_registry_oot

from moe_nvlink_plugin.errors import UnsupportedError

from .backend import BACKEND


def put_in_place(original: Any, ours: type) -> None:
    """Registers `ours` for every later instance of `original`. Local, idempotent.

    Raises UnsupportedError when another plugin has replaced it: the last to register would win in
    silence, and one of the two plugins would not work.
    """
    name = original.__name__
    present = op_registry_oot.get(name)
    if present is ours:
        return
    if present is not None:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND}: another plugin has already replaced vLLM's {name} "
            f"by {present.__module__}.{present.__qualname__}. Disable that plugin "
            "(VLLM_PLUGINS lists those to load), or drop the flag."
        )
    original.register_oot(ours)
