"""How a layer ends: with what combine does beside the sum.

After the routed experts vLLM multiplies their sum by the routed scaling factor and adds the output
of the shared experts: two more launches, and two more roundings. Combine does both while it sums.

Between the runner and finalize, vLLM's modular kernel has no argument for this. So the runner says
in a context variable how the layer ends that it is running. Each thread has its own value, and the
value is gone when the call returns or raises.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class Ending(NamedTuple):
    """What combine does with the sum of a layer.

    Attributes:
        scale: factor of the sum.
        take_added: returns rows `[num_tokens, hidden_size]` that combine adds, or None. Finalize
            calls it directly before combine, so the rows may still be computed on another stream
            until then.
    """

    scale: float = 1.0
    take_added: Callable[[], torch.Tensor | None] = lambda: None


#: Of layers that vLLM ends itself.
SUM_ONLY = Ending()
_current = contextvars.ContextVar("ending of the layer", default=SUM_ONLY)


def current() -> Ending:
    """Return how the layer ends that this thread runs. Local."""
    return _current.get()


@contextlib.contextmanager
def ending_with(ending: Ending) -> Iterator[None]:
    """Surround one call of a layer that ends so. Local."""
    token = _current.set(ending)
    try:
        yield
    finally:
        _current.reset(token)
