"""Keeps Inductor from reusing the memory that dispatch returns.

Inductor takes every output of an op for a new allocation. It writes later results over the output
in place, and after the last use of the output it gives the memory to other tensors of that size.
But dispatch returns the receive buffer, into which the peers put the next round as soon as this
rank has combined. Therefore this module enters the outputs of dispatch in the graph's list of
buffers that are never reused. torch has no public way to do that.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

_LOWERING = "torch._inductor.lowering"
_done: set[Any] = set()


def keep_outputs(op: Any) -> None:
    """Keep Inductor from reusing the outputs of `op`. Local; idempotent.

    The fake of an op calls this while torch traces a graph. If Inductor compiles the graph, it has
    been imported by then; a process that never compiles does not import it.
    """
    if op in _done or _LOWERING not in sys.modules:
        return
    _done.add(op)
    try:
        _register(op)
    except (ImportError, AttributeError) as error:
        logger.warning(
            "moe_nvlink cannot keep this torch's Inductor from reusing the receive buffers (%s): "
            "call dispatch and combine outside compiled regions, or set "
            "torch._inductor.config.allow_buffer_reuse = inplace_buffers = False",
            error,
        )


def _register(op: Any) -> None:
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V
    from torch.utils import _pytree as pytree

    fallback: Any = fallback_handler(op)  # type: ignore[no-untyped-call]

    def lower(*args: Any, **kwargs: Any) -> Any:
        outputs = fallback(*args, **kwargs)
        for output in pytree.tree_leaves(outputs):
            V.graph.never_reuse_buffers.add(output.get_name())
        return outputs

    register_lowering(op, type_promotion_kind=None)(lower)
