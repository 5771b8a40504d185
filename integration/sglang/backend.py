"""Says whether a SGLang configuration asks for our backend, and the names by which it does.

SGLang's enum of all-to-all backends is closed, and has one member for backends of plugins:
``customized``. What the user wrote stays in the raw ``ServerArgs``. Resolution declares the
carrier, which SGLang's layers read.

This module imports nothing, because every process of SGLang needs it even if our other modules
cannot be imported.
"""

from __future__ import annotations

from typing import Any

BACKEND = "moe_nvlink"
CARRIER = "customized"
#: Fields of ServerArgs that take our name: of the target model, and of a speculative draft.
TARGET_FIELD = "moe_a2a_backend"
DRAFT_FIELD = "speculative_moe_a2a_backend"
FLAG = f"--moe-a2a-backend {BACKEND}"
DRAFT_FLAG = f"--speculative-moe-a2a-backend {BACKEND}"


def serves_target(server_args: Any) -> bool:
    """Return whether the raw arguments name us for the target model. Local; takes any object."""
    return getattr(server_args, TARGET_FIELD, None) == BACKEND


def names_draft(server_args: Any) -> bool:
    """Return whether the raw arguments name us for the draft. Local; takes any object."""
    return getattr(server_args, DRAFT_FIELD, None) == BACKEND


def keeps_record(server_args: Any) -> bool:
    """Return whether SGLang keeps a record of the ranks that live. Local; takes any object."""
    return getattr(server_args, "elastic_ep_backend", None) not in (None, "none")


def is_selected(server_args: Any) -> bool:
    """Return whether the raw arguments name us anywhere. Local; takes any object."""
    return serves_target(server_args) or names_draft(server_args)
