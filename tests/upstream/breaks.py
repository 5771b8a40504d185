"""Deliberate breaks of our backend, which vLLM's tests must catch.

`--break NAME` of the runner puts NAME into the environment of a group's tests and loads this module
as a pytest plugin. `adapt.ranks` then installs the break in every rank that it starts. It changes
our classes there and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from . import settings


def install_chosen() -> None:
    """Installs the break that the environment names. Local."""
    BREAKS[settings.chosen_break()]()


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests() -> None:
    """Before any rank is started."""
    from .adapt import ranks

    ranks.in_every_rank(install_chosen)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    """Replaces a method of both our device classes by `around(original, self, ...)`."""
    from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize
    from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize

    for cls in (CpuPrepareAndFinalize, CudaPrepareAndFinalize):
        original = getattr(cls, name)

        def method(self: Any, *args: Any, _original: Any = original, **named: Any) -> Any:
            return around(functools.partial(_original, self), self, *args, **named)

        setattr(cls, name, method)


def _dropped_row() -> None:
    """The last rank loses the largest row that its experts computed."""

    def finalize(
        original: Any, self: Any, output: torch.Tensor, done: torch.Tensor, *rest: Any, **named: Any
    ) -> None:
        config = self._exchange.config
        if config.ep_rank == config.ep_size - 1 and done.shape[0]:
            done[done.float().norm(dim=1).argmax()] = 0
        original(output, done, *rest, **named)

    _wrap("finalize", finalize)


def _double_reduce() -> None:
    """The ranks sum their complete outputs once more over the expert-parallel group."""

    def finalize(original: Any, _self: Any, output: torch.Tensor, *rest: Any, **named: Any) -> None:
        from vllm.distributed import get_ep_group

        original(output, *rest, **named)
        torch.distributed.all_reduce(output, group=get_ep_group().device_group)

    _wrap("finalize", finalize)


def _wrong_owner() -> None:
    """Tokens go to the experts of the next rank."""

    def prepare(
        original: Any,
        self: Any,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        config = self._exchange.config
        moved = (topk_ids + config.num_experts // config.ep_size) % config.num_experts
        ids = torch.where(topk_ids < 0, topk_ids, moved)
        return original(a1, topk_weights, ids, *rest, **named)

    _wrap("prepare", prepare)


def _weights_twice() -> None:
    """Router weights are applied twice."""

    def prepare(original: Any, _self: Any, *args: Any, **named: Any) -> Any:
        *others, weights = original(*args, **named)
        return (*others, weights * weights)

    _wrap("prepare", prepare)


def _stale_rows() -> None:
    """Experts see the rows of the previous round, if it had equally many."""
    last: list[torch.Tensor] = []

    def prepare(original: Any, _self: Any, *args: Any, **named: Any) -> Any:
        rows, *others = original(*args, **named)
        stale = last[0] if last and last[0].shape == rows.shape else rows
        last[:] = [rows.clone()]
        return (stale if stale.dtype == rows.dtype else rows, *others)

    _wrap("prepare", prepare)


def _swapped_ranks() -> None:
    """Each rank gets the outputs of the next rank: correct only if all ranks have equal tokens."""

    def finalize(original: Any, self: Any, output: torch.Tensor, *rest: Any, **named: Any) -> None:
        from vllm.distributed import get_ep_group

        original(output, *rest, **named)
        config = self._exchange.config
        all_ranks = [torch.empty_like(output) for _ in range(config.ep_size)]
        torch.distributed.all_gather(
            all_ranks, output.contiguous(), group=get_ep_group().device_group
        )
        output.copy_(all_ranks[(config.ep_rank + 1) % config.ep_size])

    _wrap("finalize", finalize)


BREAKS: dict[str, Callable[[], None]] = {
    "dropped-row": _dropped_row,
    "double-reduce": _double_reduce,
    "wrong-owner": _wrong_owner,
    "weights-twice": _weights_twice,
    "stale-rows": _stale_rows,
    "swapped-ranks": _swapped_ranks,
}
