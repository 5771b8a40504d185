"""Puts our MoeAlltoAll in the place of FlashInfer's, in one process."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

import flashinfer.comm
import flashinfer.comm.trtllm_moe_alltoall

from moe_nvlink_plugin.errors import ExchangeStateError

from .moe_alltoall import MoeAlltoAll, moe_a2a_get_workspace_size_per_rank, refuse


def _functional(name: str) -> Any:
    """Return a function that raises: the functional API works on a workspace of FlashInfer's."""

    def refused(*_args: object, **_kwargs: object) -> NoReturn:
        refuse(f"{name} on a caller's workspace", "the methods of MoeAlltoAll")

    refused.__name__ = name
    return refused


#: What `install` puts into FlashInfer's modules. Sizes of workspaces would not fit its functions,
#: so these raise.
_INSTALLED: dict[str, Any] = {
    "MoeAlltoAll": MoeAlltoAll,
    "moe_a2a_get_workspace_size_per_rank": moe_a2a_get_workspace_size_per_rank,
    **{
        name: _functional(name)
        for name in (
            "moe_a2a_initialize",
            "moe_a2a_dispatch",
            "moe_a2a_combine",
            "moe_a2a_sanitize_expert_ids",
            "moe_a2a_wrap_payload_tensor_in_workspace",
        )
    },
}
_MODULES: tuple[ModuleType, ...] = (flashinfer.comm, flashinfer.comm.trtllm_moe_alltoall)
_originals: dict[str, Any] = {}


def install() -> None:
    """Put our MoeAlltoAll in the place of `flashinfer.comm`'s, in this process. Local; idempotent.

    Raises:
        ExchangeStateError: a module has imported FlashInfer's class; it would keep that.
    """
    if _originals:
        return
    theirs = flashinfer.comm.MoeAlltoAll
    late = sorted(
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__dict__", {}).get("MoeAlltoAll") is theirs and module not in _MODULES
    )
    if late:
        raise ExchangeStateError(
            f"{', '.join(late)} imported MoeAlltoAll from FlashInfer before; call install() first"
        )
    # Before the first is replaced: a release that lacks one keeps all of its own.
    _originals.update({name: getattr(flashinfer.comm, name) for name in _INSTALLED})
    for name, ours in _INSTALLED.items():
        for module in _MODULES:
            setattr(module, name, ours)


def uninstall() -> None:
    """Undo `install`. Objects made meanwhile stay ours. Local; idempotent."""
    for name, original in _originals.items():
        for module in _MODULES:
            setattr(module, name, original)
    _originals.clear()
