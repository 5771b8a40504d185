"""Fault tolerance (``--enable-fault-tolerance``): vLLM's instruction ``retry``, also after a death.

vLLM stops an engine whose step has failed, and waits until ``POST /fault_tolerance/apply`` tells
every engine to ``retry``. Its own ``retry`` serves faults that pass: all ranks must come. Ours also
takes ``"params": {"dead_ranks": [2]}``: the data-parallel ranks named do not come back, and the
others go on without them and their experts. An engine that is idle takes it too.
"""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin.integration.vllm.backend import is_selected

#: Module of vLLM that makes an engine's sentinel, by the class's name in it.
CORE = "vllm.v1.engine.core"


def put_in_place() -> None:
    """Let an engine that asks for us have our sentinel. Local; idempotent.

    It imports nothing of vLLM's, and of ours nothing before such an engine is made.
    """
    import sys

    core: Any = sys.modules.get(CORE)
    theirs = getattr(core, "EngineCoreSentinel", None)
    if theirs is None or getattr(theirs, "is_moe_nvlinks", False):
        return

    def make(engine: Any, parallel_config: Any) -> Any:
        if not is_selected(engine.vllm_config):
            return theirs(engine=engine, parallel_config=parallel_config)
        from .engine import MoeNvlinkEngineSentinel

        return MoeNvlinkEngineSentinel(engine=engine, parallel_config=parallel_config)

    make.is_moe_nvlinks = True  # type: ignore[attr-defined]
    core.EngineCoreSentinel = make
