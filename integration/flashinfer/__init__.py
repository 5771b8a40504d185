"""FlashInfer's doors to our exchange.

* ``moe_ep``: the backend ``moe_nvlink`` of ``flashinfer.moe_ep``. To import this package registers
  it in FlashInfer's registry, if FlashInfer can be imported; nothing uses it until a program names
  it.
* ``moe_alltoall``: a class with the methods of ``flashinfer.comm.MoeAlltoAll``, for code that has
  not moved to ``flashinfer.moe_ep``. ``install`` puts it in the place of FlashInfer's.
* ``opaque_rows``: lists of payloads through exchanges on one workspace, which both stand on.
* ``communicators``: FlashInfer's communicators as groups of ours.
* ``experts``: FlashInfer's fused experts between our dispatch and combine.
* ``compat``: every name of FlashInfer that these modules touch.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from moe_nvlink_plugin.errors import UnsupportedError

if TYPE_CHECKING:
    from .moe_alltoall import MoeAlltoAll
    from .moe_ep import MoeNvlinkCommunication, MoeNvlinkConfig
    from .replacement import install, uninstall

logger = logging.getLogger(__name__)

_HOMES = {
    "MoeAlltoAll": "moe_alltoall",
    "MoeNvlinkCommunication": "moe_ep",
    "MoeNvlinkConfig": "moe_ep",
    "install": "replacement",
    "uninstall": "replacement",
}

__all__ = ["MoeAlltoAll", "MoeNvlinkCommunication", "MoeNvlinkConfig", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("flashinfer") is None:
        raise UnsupportedError(
            f"{name} needs FlashInfer; pip install 'moe-nvlink-plugin[flashinfer]'"
        )
    try:
        home = importlib.import_module(f".{_HOMES[name]}", __name__)
    except ImportError as error:
        raise UnsupportedError(
            f"{name} needs FlashInfer 0.7.2 or newer, whose import failed: {error}; pip install "
            "'moe-nvlink-plugin[flashinfer]'"
        ) from error
    return getattr(home, name)


if importlib.util.find_spec("flashinfer") is not None:
    try:
        importlib.import_module(".moe_ep", __name__)
    except ImportError as error:
        # An older release, or one without its requirements. Nobody may have asked for the backend.
        logger.warning(
            "backend moe_nvlink of flashinfer.moe_ep is not registered, because FlashInfer's "
            "import failed: %s",
            error,
        )
