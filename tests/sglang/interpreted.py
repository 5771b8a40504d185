"""What SGLang's Triton runner asks of a CUDA build and its CPU engine has not, in plain torch.

Triton's interpreter executes SGLang's kernels on CPU tensors. These are the operators around them:

- ``moe_align_block_size``, which sorts choices by expert;
- ``per_tensor_quant_fp8`` and ``per_token_quant_fp8``, which quantise rows without blocks;
- ``inplace_fused_experts`` and ``outplace_fused_experts``: SGLang's own functions, which it makes
  operators for CUDA alone. Here they are called as functions.

The activation, the quantisation in blocks and the sum over a token's experts are SGLang's own for
devices without CUDA.

`tests.support.triton_interpreter` replaces operations of the interpreter that are wrong in BF16.
Where SGLang would round float32 rows to FP16, float32 stays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.support import triton_interpreter

E4M3_MAX = 448.0
#: Expert of the blocks that the kernel must not reach.
UNUSED_BLOCK = 1 << 20
#: Triton's interpreter takes one thread at a time.
IN_TURN = threading.Lock()


def moe_align_block_size(
    ids: torch.Tensor,
    num_buckets: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_padded: torch.Tensor,
    _sums: torch.Tensor,
    pad: bool = False,
    ignore_invalid: bool = False,
) -> None:
    """Places of all choices by expert, each expert's padded to whole blocks; -1 has the first ones.

    Raises an error for ids that the CUDA kernel would count out of bounds.
    """
    assert pad
    assert not ignore_invalid
    flat = ids.flatten().long() + 1
    assert bool(((flat >= 0) & (flat < num_buckets)).all()), "SGLang's kernel counts out of bounds"
    blocks = -(-torch.bincount(flat, minlength=num_buckets) // block_size)
    experts = torch.repeat_interleave(torch.arange(num_buckets) - 1, blocks)
    sorted_ids.fill_(flat.numel())
    for bucket, start in enumerate((blocks.cumsum(0) - blocks).tolist()):
        places = (flat == bucket).nonzero().flatten()
        first = start * block_size
        sorted_ids[first : first + len(places)] = places.int()
    expert_ids.fill_(UNUSED_BLOCK)
    expert_ids[: len(experts)] = experts.int()
    num_padded.fill_(len(experts) * block_size)


def per_tensor_quant_fp8(
    rows: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, is_static: bool
) -> None:
    """One scale for all rows; if it is not given, of the largest of all of them."""
    if not is_static:
        scale.copy_(rows.float().abs().max() / E4M3_MAX)
    output.copy_((rows.float() / scale).clamp(-E4M3_MAX, E4M3_MAX))


def per_token_quant_fp8(rows: torch.Tensor, output: torch.Tensor, scales: torch.Tensor) -> None:
    """A scale for each row."""
    scales.copy_(rows.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / E4M3_MAX)
    output.copy_((rows.float() / scales).clamp(-E4M3_MAX, E4M3_MAX))


def install_in_servers() -> None:
    """Let servers on CPU ranks take SGLang's and our own branches for CUDA, and these operators."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    from moe_nvlink_plugin.integration.sglang.moe import forms, fused

    def put(holder: Any, name: str, value: Any) -> None:
        setattr(holder, name, value)

    install(put)
    for name in ("forward_cpu", "forward_native"):  # with AMX, and without
        put(UnquantizedFusedMoEMethod, name, UnquantizedFusedMoEMethod.forward_cuda)
    own = forms.runner_for
    put(
        forms,
        "runner_for",
        lambda config, method, _device, flag: own(config, method, torch.device("cuda"), flag),
    )
    put(fused, "register", lambda: fused.alias(fused.FUSED[0]))


def install(replace: Callable[..., Any]) -> None:
    """Put these where SGLang and Triton look for them.

    replace: ``setattr``, or pytest's with ``raising=False``; names that are not there are added.
    """
    import triton.language
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    triton_interpreter.count_bfloat16(replace)
    # The package has a function of the module's name.
    align = sys.modules[f"{fused_moe.__package__}.moe_align_block_size"]
    replace(align, "sgl_moe_align_block_size", moe_align_block_size)
    replace(fp8_kernel, "sgl_per_tensor_quant_fp8", per_tensor_quant_fp8)
    replace(fp8_kernel, "sgl_per_token_quant_fp8", per_token_quant_fp8)
    # Where rows are float32 SGLang's kernels would round to FP16.
    kinds = {"bfloat16": triton.language.bfloat16, "float16": triton.language.float32}
    replace(fused_moe, "tl", SimpleNamespace(**kinds))
    # For which there is no file of tuned block sizes.
    replace(fused_moe_triton_config, "get_device_name", lambda: "interpreter")
    for name in ("inplace_fused_experts", "outplace_fused_experts"):
        replace(fused_moe, name, getattr(fused_moe, name).__wrapped__)
