"""``torch.ops.vllm.moe_nvlink_forward``: a MoE layer that combine ends, as one op.

vLLM has two ops for its layers. ``moe_forward_shared`` returns the routed output and that of the
shared experts. ``moe_forward`` returns one output, but by its schema it writes its input: for that,
torch.compile copies the rows that the same call gives to the router and to the shared experts.
This op returns one output and writes nothing else. Its function and its fake are vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import (
    _moe_forward,
    _moe_forward_fake,
)
from vllm.utils.torch_utils import direct_register_custom_op

NAME = "moe_nvlink_forward"

direct_register_custom_op(
    op_name=NAME,
    op_func=_moe_forward,
    fake_impl=_moe_forward_fake,
    tags=tuple(torch.ops.vllm.moe_forward.default.tags),
)


def layer_op() -> Any:
    """Return the op. Local."""
    return getattr(torch.ops.vllm, NAME)
