"""Makes static activation scales of a checkpoint equal on all ranks.

A checkpoint has one scale for each expert's input, and a framework quantises a layer's activations
by the largest scale of a rank's experts. With dispatch, the rank of a token quantises it once for
experts of any rank, so the scale must be equal on all ranks. Therefore, before the framework uses
the scales for its kernels' arguments, `share` sets the scales of each rank to the largest of all
ranks. The framework computes the same on one rank that has all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

#: How to find the scale that serves every expert. If activations are divided by the scale, it is
#: the largest of all scales; if they are multiplied by it, the smallest.
DIVIDES, MULTIPLIES = torch.distributed.ReduceOp.MAX, torch.distributed.ReduceOp.MIN


def share(layer: Any, scales: Mapping[str, Any], cpu_group: Callable[[], Any]) -> None:
    """Make the layer's static input scales equal on the group's ranks. Collective if it has any.

    Args:
        layer: a layer whose weights the framework has not processed yet.
        scales: name of the layer's parameter -> `DIVIDES` or `MULTIPLIES`.
        cpu_group: returns the gloo group of the expert-parallel ranks; called only if the layer has
            such a scale.
    """
    for name, operation in scales.items():
        scale = getattr(layer, name, None)
        if not isinstance(scale, torch.Tensor) or scale.numel() == 0:
            continue
        largest = operation is DIVIDES
        mine = scale.detach().float().max() if largest else scale.detach().float().min()
        value = mine.reshape(1).cpu()
        torch.distributed.all_reduce(value, op=operation, group=cpu_group())
        with torch.no_grad():
            scale.fill_(value.item())
