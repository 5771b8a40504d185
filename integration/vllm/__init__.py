"""vLLM's door to the exchange: two entry points, and nothing done at import.

* ``platform_plugin`` (group ``vllm.platform_plugins``) offers vLLM a subclass of the platform it
  would have chosen itself. That subclass adds the ``moe_nvlink`` choice to ``--all2all-backend``,
  checks the configuration and names our communicator.
* ``register`` (group ``vllm.general_plugins``) makes ``LLM(all2all_backend="moe_nvlink")`` work.

The way a flag goes: ``flag`` (command line or Python -> ``additional_config``) -> ``platform`` ->
``validation`` -> ``communicator`` (one per worker; ``cpu_communicator``, ``cuda_communicator``) ->
``all2all_manager`` (owns the exchanges) and ``layers`` (our classes in the place of two of vLLM's)
-> ``prepare_finalize`` (one per MoE layer; ``cpu_prepare_finalize``, ``cuda_prepare_finalize``).
``options`` says what else a user chose, ``formats`` in which format a layer's rows travel. Where
ranks share the LM head of an MTP draft, ``drafts`` (what a configuration says of it) leads to
``lm_head`` (one worker's part, our logits processor) and ``mtp`` (vLLM's drafts, extended).
Without the flag only ``flag`` and ``platform`` are ever loaded. ``compat`` lists what we touch.
"""

from __future__ import annotations

__all__ = ["platform_plugin", "register"]


def platform_plugin() -> str | None:
    """Qualified name of our subclass of the platform vLLM chooses here; None to stay out.

    Local. Asks vLLM's own probes, so it initialises no CUDA context. None when vLLM's choice is
    neither CPU nor CUDA, is ambiguous, or belongs to another out-of-tree platform plugin (vLLM
    allows one of those at a time, and ours is the one that can do without).
    """
    from .plugin.platform import choose

    return choose()


def register() -> None:
    """Lets ``LLM`` and ``EngineArgs`` take ``all2all_backend="moe_nvlink"``. Local, idempotent."""
    from .plugin.flag import patch_engine_args

    patch_engine_args()
