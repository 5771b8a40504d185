"""Static activation scales of a checkpoint: one for all ranks, as one rank with all experts has it.

A checkpoint calibrates each expert's input by itself, and a framework quantises a layer's
activations by the largest scale of the experts that a rank holds. Here a token is quantised once,
by the rank it comes from, for experts of any rank: the scale must be the same on all of them. So
before the framework folds the scales into its kernels' arguments, each rank's become the largest of
all, which is what the framework computes on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Which value of a scale serves every expert: the largest, of a scale that activations are divided
#: by; the smallest, of one that they are multiplied by.
DIVIDES, MULTIPLIES = torch.distributed.ReduceOp.MAX, torch.distributed.ReduceOp.MIN


def share(layer: Any, scales: Mapping[str, Any], cpu_group: Callable[[], Any]) -> None:
    """Makes the layer's static input scales one for the group. Collective; nothing without them.

    layer: before the framework works with its weights. scales: names of its parameters, and
    `DIVIDES` or `MULTIPLIES`. cpu_group: asked for the gloo group of the expert-parallel ranks
    where there is such a scale.
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
