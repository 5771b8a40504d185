"""vLLM's adapter: two entry points. The import of this module does nothing.

* ``platform_plugin`` (group ``vllm.platform_plugins``) offers vLLM a subclass of the platform it
  would choose itself. The subclass adds the ``moe_nvlink`` choice to ``--all2all-backend``, checks
  the configuration and names our communicator.
* ``register`` (group ``vllm.general_plugins``) makes ``LLM(all2all_backend="moe_nvlink")`` work,
  and gives our sentinel to engines that ask for us and for fault tolerance.

The rooms, from the one that knows no other to the one that imports all (a test reads these arrows
off the source): the modules beside this one <- ``moe`` <- ``balancing``, ``lora`` <- ``plugin``.
``faults`` comes after ``balancing``, ``elastic`` after ``moe``; ``draft`` and ``scheduler`` need
only the modules beside this one.

* ``backend`` and ``choices`` say what a configuration asks of us. ``all2all_manager`` holds the
  exchanges and shared heads of a worker. ``metrics`` shows its counters. ``compat`` knows
  every name of vLLM that we touch, and registers our classes instead of vLLM's.
* ``moe``: two of our classes instead of vLLM's (``layers``), and per MoE layer a fused MoE method
  (``method``), a ``prepare_finalize`` (``cpu_prepare_finalize``, ``cuda_prepare_finalize``), and
  what its experts take (``experts_input``, ``cpu_fp8_experts``). ``factory`` makes a
  ``prepare_finalize`` by name, if vLLM has a registry of them. By ``features`` the next two rooms
  add to a layer.
* ``balancing`` (``--enable-eplb``): what is refused and begun (``eplb``), what vLLM lacks on CPU
  ranks (``host_balancer``, ``cpu_layers``), and what follows a move of experts (``moves``) or a
  death (``deaths``).
* ``lora`` (``--enable-lora``): what is refused, and how a rank knows the adapters of other
  ranks' tokens (``adapters``), which adapters a rank loads (``loading``), and what computes them
  (``punica``, ``cpu_experts``).
* ``faults`` (``--enable-fault-tolerance``): ``retry`` after a fault or a death, in an engine
  (``engine``) and in its workers (``worker``).
* ``elastic`` (``--enable-elastic-ep``): exchanges for groups that ranks join and leave
  (``scaling``), and what vLLM lacks for that on CPU ranks (``cpu_scaling``).
* ``draft``: the LM head of an MTP draft, if ranks share it. ``drafts`` says what a configuration
  asks; ``logits_processor`` and ``mtp`` extend vLLM's classes.
* ``plugin``: what the flag starts, in this order: ``flag`` (command line or Python ->
  ``additional_config``), ``platform``, ``validation``, ``worker``, ``communicator``, which puts the
  rest in place (one per worker; ``cpu_communicator``, ``cuda_communicator``). ``graphs`` checks
  sizes of CUDA graphs.
* ``scheduler``: schedulers that never evict, which ``--scheduler-cls`` names, with the flag or not.

Without the flag and ``--scheduler-cls``, vLLM loads only ``backend``, ``faults``, ``flag``,
``platform`` and ``logs`` of ours. All modules use ``integration.common``, which knows no framework.
"""

from __future__ import annotations

import logging

__all__ = ["platform_plugin", "register"]

logger = logging.getLogger(__name__)

_FAILED = (
    "moe_nvlink is installed, and its plugin cannot be loaded: --all2all-backend moe_nvlink is not "
    "available. Fix what the exception names, or uninstall moe-nvlink-plugin."
)


def platform_plugin() -> str | None:
    """Return the qualified name of our subclass of the platform that vLLM chooses here, or None.

    Local. It asks vLLM's own probes, so it creates no CUDA context. The result is None if vLLM's
    choice is neither CPU nor CUDA, is ambiguous, or belongs to another out-of-tree platform plugin
    (vLLM allows one such plugin at a time, and a server runs without ours). If our platform cannot
    be imported, this function logs an error with the traceback, because vLLM would log it only at
    debug level.
    """
    try:
        _show_logs()
        from .plugin.platform import choose

        return choose()
    except Exception:
        logger.exception(_FAILED)
        return None


def register() -> None:
    """Let ``LLM`` and ``EngineArgs`` take ``all2all_backend="moe_nvlink"``. Local; idempotent.

    Engines that ask for us get our sentinel, if they ask for fault tolerance.

    If our module cannot be imported, this function logs an error with the traceback. An exception
    would end vLLM, also for users who have not chosen our backend.
    """
    try:
        _show_logs()
        from . import faults
        from .plugin.flag import patch_engine_args

        patch_engine_args()
        faults.put_in_place()
    except Exception:
        logger.exception(_FAILED)


def _show_logs() -> None:
    from .logs import show_through

    show_through(logging.getLogger("vllm"))
