"""Static activation scales of a checkpoint: one for all ranks, as one rank with all experts has it.

A checkpoint calibrates each expert's input by itself, and vLLM quantises a layer's activations by
the largest scale of the experts it holds; over all ranks it looks only with expert load balancing.
Here a token is quantised once, by the rank it comes from, for experts of any rank: the scale must
be the same on all of them. So before vLLM folds the scales into its kernels' arguments each rank's
become the largest of all, which is what vLLM computes on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Parameters of vLLM's quant methods, and which of their values serves every expert: a scale that
#: activations are divided by, the largest; one they are multiplied by, the smallest.
SCALES = {
    "w13_input_scale": torch.distributed.ReduceOp.MAX,
    "w13_input_global_scale": torch.distributed.ReduceOp.MIN,
}


def share(layer: Any, cpu_group: Callable[[], Any]) -> None:
    """Makes the layer's static input scales one for the group. Collective; nothing without them.

    layer: before its quant method's process_weights_after_loading. cpu_group: asked for the gloo
    group of the expert-parallel ranks where there is such a scale.
    """
    for name, operation in SCALES.items():
        scale = getattr(layer, name, None)
        if not isinstance(scale, torch.Tensor) or scale.numel() == 0:
            continue
        largest = operation is torch.distributed.ReduceOp.MAX
        mine = scale.detach().float().max() if largest else scale.detach().float().min()
        value = mine.reshape(1).cpu()
        torch.distributed.all_reduce(value, op=operation, group=cpu_group())
        with torch.no_grad():
            scale.fill_(value.item())
