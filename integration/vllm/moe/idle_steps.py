"""Dummy batches of CPU ranks: the MoE layers, without the rest of the model.

A rank without requests runs the whole model for a dummy token, so that it takes part in the rounds
of its MoE layers. On CPUs the other ranks then lack the cores. Of the dummy token nobody reads
anything, and of the model only the MoE layers concern other ranks. So the first dummy batch runs
the model and notes the calls of the MoE layers; later ones repeat these calls, with zeros.

GPUs run the whole model: its graph is one launch, and their cores have nobody who waits for them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

#: The calls of MoE layers in the forward that is being noted; None outside of one.
_noted: list[Call] | None = None


class Call(NamedTuple):
    """One call of a MoE layer."""

    function: Callable[..., Any]
    given: tuple[Any, ...]


class Noted(NamedTuple):
    """A dummy batch of so many tokens: what its MoE layers got, and what the model returned."""

    num_tokens: int
    calls: list[Call]
    output: Any


def note(function: Callable[..., Any], *given: Any) -> None:
    """Note a call of a MoE layer, if its forward is being noted. Local."""
    if _noted is not None:
        _noted.append(Call(function, tuple(map(_zeros, given))))


class IdleSteps:
    """The dummy batches of one worker."""

    def __init__(self) -> None:
        self._last: Noted | None = None

    @contextlib.contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """Surround a dummy batch, whose forward of the model leaves out what it can. Local.

        Args:
            model: the worker's model. One that is compiled as a whole is left as it is: a call of
                it does not reach its forward.
        """
        if type(model).__call__ is not torch.nn.Module.__call__ or model._compiled_call_impl:
            yield
            return
        forward, own = model.forward, vars(model).get("forward")

        def shortened(*args: Any, **kwargs: Any) -> Any:
            if "positions" not in kwargs:
                return forward(*args, **kwargs)
            num_tokens = kwargs["positions"].shape[-1]
            if self._last is None or self._last.num_tokens != num_tokens:
                self._last, output = _noting(forward, num_tokens, *args, **kwargs)
                return output
            for call in self._last.calls:
                call.function(*call.given)
            return self._last.output

        model.forward = shortened
        try:
            yield
        finally:
            del model.forward
            if own is not None:  # somebody else's, which the class does not have
                model.forward = own


def _noting(
    forward: Callable[..., Any], num_tokens: int, *args: Any, **kwargs: Any
) -> tuple[Noted | None, Any]:
    """Run a forward; return it, unless no MoE layer told of its calls, and its output."""
    global _noted
    _noted = []
    try:
        output = forward(*args, **kwargs)
        if not _noted:
            return None, output
        _tell(len(_noted))
        return Noted(num_tokens, _noted, output), output
    finally:
        _noted = None


@functools.cache
def _tell(num_calls: int) -> None:
    """Log once per process. Local."""
    logger.info("without requests, this rank runs its %d MoE layers alone", num_calls)


def _zeros(given: Any) -> Any:
    return torch.zeros_like(given) if isinstance(given, torch.Tensor) else given
