"""vLLM's door to the exchange: two entry points, and nothing done at import.

* ``platform_plugin`` (group ``vllm.platform_plugins``) offers vLLM a subclass of the platform it
  would have chosen itself. That subclass adds the ``moe_nvlink`` choice to ``--all2all-backend``,
  checks the configuration and names our communicator.
* ``register`` (group ``vllm.general_plugins``) makes ``LLM(all2all_backend="moe_nvlink")`` work.

Where things are (``plugin`` imports all of it; ``moe`` and ``draft`` do not import each other):

* ``backend`` and ``choices`` say what a configuration asks of us, ``all2all_manager`` holds what a
  worker has of ours, ``replacement`` puts a class of ours in the place of one of vLLM's. ``compat``
  lists every name of vLLM that we touch.
* ``moe``: our classes in the place of two of vLLM's (``layers``), one ``prepare_finalize`` per MoE
  layer (``cpu_prepare_finalize``, ``cuda_prepare_finalize``), and what its experts take
  (``experts_input``, ``cpu_fp8_experts``).
* ``draft``: if ranks share the LM head of an MTP draft, ``drafts`` (what a configuration says of
  it), ``logits_processor`` and ``mtp`` (vLLM's drafts, extended).
* ``plugin``: the way of the flag. ``flag`` (command line or Python -> ``additional_config``) ->
  ``platform`` -> ``validation``, ``worker`` -> ``communicator`` (one per worker;
  ``cpu_communicator``, ``cuda_communicator``), which puts the rest in place.

Without the flag only ``backend``, ``flag``, ``platform`` and ``common.logs`` are ever loaded. All
of it stands on ``integration.common``, which knows no framework.
"""

from __future__ import annotations

import logging

__all__ = ["platform_plugin", "register"]

logger = logging.getLogger(__name__)

_FAILED = (
    "moe_nvlink is installed, and its plugin cannot be loaded: --all2all-backend moe_nvlink is not "
    "available. Mend what the exception names, or uninstall moe-nvlink-plugin."
)


def platform_plugin() -> str | None:
    """Qualified name of our subclass of the platform vLLM chooses here; None to stay out.

    Local. Asks vLLM's own probes, so it initialises no CUDA context. None when vLLM's choice is
    neither CPU nor CUDA, is ambiguous, or belongs to another out-of-tree platform plugin (vLLM
    allows one such plugin at a time, and a server runs without ours). If our platform cannot be
    imported, logs an error with the traceback; vLLM itself would log it at debug level only.
    """
    try:
        _show_logs()
        from .plugin.platform import choose

        return choose()
    except Exception:
        logger.exception(_FAILED)
        return None


def register() -> None:
    """Lets ``LLM`` and ``EngineArgs`` take ``all2all_backend="moe_nvlink"``. Local, idempotent.

    If our module cannot be imported, logs an error with the traceback: an exception would end vLLM,
    also for users who have not chosen our backend.
    """
    try:
        _show_logs()
        from .plugin.flag import patch_engine_args

        patch_engine_args()
    except Exception:
        logger.exception(_FAILED)


def _show_logs() -> None:
    from moe_nvlink_plugin.integration.common.logs import show_through

    show_through(logging.getLogger("vllm"))
