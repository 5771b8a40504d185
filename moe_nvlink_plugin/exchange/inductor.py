"""Tells Inductor that what dispatch returns is not its memory to reuse.

Inductor takes an op's output for a fresh allocation: it writes later results in place over it, and
may hand it to other tensors of that size once it is dead. What dispatch returns is the receive
buffer: the peers put the next round into it as soon as this rank has combined. So its outputs are
entered in the graph's list of buffers never to be reused. torch has no public way to say this.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)

_LOWERING = "torch._inductor.lowering"
_done: set[Any] = set()


def keep_outputs(op: Any) -> None:
    """Makes Inductor leave the outputs of `op` alone. Local, idempotent.

    Called while a graph is traced: Inductor is imported by then if it is the one compiling, and
    a process that never compiles does not pay for importing it.
    """
    if op in _done or _LOWERING not in sys.modules:
        return
    _done.add(op)
    try:
        _register(op)
    except (ImportError, AttributeError) as error:
        logger.warning(
            "this torch's Inductor cannot be told to leave the receive buffers alone (%s): call "
            "dispatch and combine outside compiled regions, or set "
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
