"""Triton's interpreter for the `triton_kernels` in vLLM's wheel, on CPU tensors. Stand-ins:

- on the host: the capability of an H100 or a B200, the SMs and the shared memory of an H100; the
  maker of specialised kernels, which rewrites the source of compiled ones;
- PTX in kernels: what widens codes and exponents to BF16 (Hopper), and the larger of two magnitudes
  (Blackwell, for scales of outputs, which a BF16 output does not use);
- in the language: ``tl.dot_scaled`` (Blackwell), the numbers of warps and threads, products of BF16
  (`tests.support.triton_interpreter`), a list before a tensor's shape, and constants and names that
  the interpreter does not find, because it takes a kernel's text out of the function around it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from vllm.model_executor.layers.quantization.utils import mxfp4_utils

from tests.integration.vllm.moe.vllm_triton import from_mxfp4
from tests.support import triton_interpreter

_PROPERTIES = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)


class _Specialised:
    """A kernel of `triton_kernels` with its functions given, in the place of a rewritten one."""

    #: Of the launch in progress.
    num_warps = 0

    def __init__(self, kernel: Any, constants: dict[str, Any], tuples: dict[str, Any]) -> None:
        self.kernel, self.constants, self.tuples = kernel, constants, tuples

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            _Specialised.num_warps = named["num_warps"]
            self.kernel[grid](**self._bound(given), **self.constants, **named)

        return launch

    def _bound(self, given: tuple[Any, ...]) -> dict[str, Any]:
        """Arguments by name; where the kernel has a tuple, the launch has its members."""
        # The interpreter takes torch's tensors only.
        left = iter([each.data if isinstance(each, _tensor_class()) else each for each in given])
        bound = {}
        for name in self.kernel.arg_names:
            if name in self.tuples:
                bound[name] = tuple(next(left) for _member in self.tuples[name])
            elif name not in self.constants:
                try:
                    bound[name] = next(left)
                except StopIteration:
                    break
        return bound


def _tensor_class() -> type[Any]:
    from triton_kernels.tensor import Tensor

    found: type[Any] = Tensor
    return found


def _kernels(epilogue: Any, fused_activation: Any) -> SimpleNamespace:
    from triton_kernels import matmul_ogs

    constants = {"ACTIVATION_FN": fused_activation.fn, "EPILOGUE_FN": epilogue.fn}
    tuples = {
        "activation_fn_args": fused_activation.fn_arg_names,
        "epilogue_fn_args": epilogue.fn_arg_names,
    }
    return SimpleNamespace(
        **{
            name: _Specialised(getattr(matmul_ogs, name), constants, tuples)
            for name in ("_matmul_ogs", "_p_matmul_ogs", "_reduce_grouped")
        }
    )


def _widen_codes(words: Any) -> tuple[Any, Any]:
    """What the first piece of PTX makes of each four bytes: four BF16 twice, as bits.

    It masks the sign, the exponent and the first bit of the mantissa of BF16 out of each half word,
    shifted, and multiplies by 2**126.
    """
    halves = np.ascontiguousarray(words).view(np.uint16)
    last = ((halves << 1) & 0x8000) | ((halves >> 3) & 0x0180) | ((halves >> 7) & 0x0040)
    registers = [halves & 0x81C0, (halves << 3) & 0x81C0, (halves << 6) & 0x81C0, last]
    wide = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in registers]
    made = [((each * np.float32(2**126)).view(np.uint32) >> 16).astype(np.uint16) for each in wide]
    pairs = [each.reshape(*each.shape[:-1], -1, 2) for each in made]
    first, second = (np.stack(pairs[at : at + 2], -2).reshape(words.shape) for at in (0, 2))
    return first, second


def _larger_magnitude(one: Any, other: Any) -> Any:
    """The larger of two magnitudes, with the product of the signs; NaN stays."""
    larger = np.maximum(np.abs(one), np.abs(other))
    return np.where(np.signbit(one) != np.signbit(other), -larger, larger)


def _create_inline_asm(
    _builder: Any, text: str, _constraints: Any, given: Any, _types: Any, _pure: Any, pack: int
) -> Any:
    values = [each.data for each in given]
    takes_codes = pack == 4 and values[0].dtype == np.uint8
    made: tuple[Any, ...]
    if "mul.bf16x2" in text and takes_codes:
        made, kind = _widen_codes(values[0]), tl.bfloat16
    elif "prmt.b32" in text and takes_codes:  # exponents, moved to where BF16 has them
        made, kind = (values[0].astype(np.uint16) << 7,), tl.bfloat16
    elif "max.NaN.xorsign.abs.f32" in text:
        made, kind = (_larger_magnitude(*values),), tl.float32
    else:
        raise NotImplementedError(f"PTX that no stand-in is for: {text}")
    handles = [TensorHandle(each, kind) for each in made]
    return SimpleNamespace(get_result=handles.__getitem__)


def _factor(values: Any, scales: Any, kind: Any, k_axis: int) -> torch.Tensor:
    """A factor of a scaled product in float32. Codes of E2M1 are two in a byte along K."""
    name = getattr(kind, "value", kind)
    if name == "bf16":
        wide = values.handle.data.astype(np.uint32) << 16
        return torch.from_numpy(wide.view(np.float32))
    assert name == "e2m1", name
    codes = torch.from_numpy(np.ascontiguousarray(np.moveaxis(values.handle.data, k_axis, -1)))
    exponents = torch.from_numpy(np.ascontiguousarray(scales.handle.data))
    return from_mxfp4(codes, exponents, torch.float32).movedim(-1, k_axis)


def _dot_scaled(
    _semantic: Any,
    a: Any,
    a_scales: Any,
    a_kind: Any,
    b: Any,
    b_scales: Any,
    b_kind: Any,
    acc: Any,
    *_others: Any,
) -> Any:
    product = _factor(a, a_scales, a_kind, 1) @ _factor(b, b_scales, b_kind, 0)
    return tl.tensor(TensorHandle(acc.handle.data + product.numpy(), tl.float32), acc.type)


def _stand_in_for_a_gpu(replace: Callable[..., None], capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.language.extra import cuda

    active = type(triton.runtime.driver.active)
    replace(active, "get_current_target", lambda _driver: GPUTarget("cuda", capability, 32))
    replace(torch.cuda, "get_device_properties", lambda _device: _PROPERTIES)
    replace(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_rocm=lambda: False,
        is_device_capability=lambda asked: asked == capability,
        is_device_capability_family=lambda asked: asked == capability,
    )
    replace(mxfp4_utils, "current_platform", platform)
    replace(cuda, "num_warps", lambda: _Specialised.num_warps)
    replace(cuda, "num_threads", lambda: 32 * _Specialised.num_warps)


def _show_names_around(kernel: Any, replace: Callable[..., None]) -> None:
    """Names of the functions around a function, to it as global ones."""
    for name, value in inspect.getclosurevars(kernel).nonlocals.items():
        if getattr(value, "fn", None) is not None:
            _show_names_around(value.fn, replace)
        module = sys.modules[kernel.__module__]
        if not hasattr(module, name):
            replace(module, name, value)


def _stand_in_for_the_language(replace: Callable[..., None]) -> None:
    from triton.language.semantic import TritonSemantic

    triton_interpreter.count_bfloat16(replace)
    replace(InterpreterBuilder, "create_inline_asm", _create_inline_asm)
    replace(TritonSemantic, "dot_scaled", _dot_scaled)
    shape: Any = tl.core.tuple
    replace(shape, "__radd__", lambda self, before: shape([*before, *self.values]))


def stand_in(replace: Callable[..., None], capability: int) -> None:
    """Let vLLM and its triton_kernels find a GPU, and the interpreter execute its kernels.

    capability: 90 or 100. replace: as ``setattr``, and it adds names that are not there.
    """
    _stand_in_for_a_gpu(replace, capability)
    _stand_in_for_the_language(replace)
    from triton_kernels import matmul_ogs, routing
    from triton_kernels.matmul_ogs_details import opt_flags

    replace(matmul_ogs, "get_kernels", _kernels)
    replace(opt_flags, "_opt_flags_constraints", {})  # to which vLLM adds those of a capability
    for kernel in (matmul_ogs._matmul_ogs, matmul_ogs._p_matmul_ogs):
        module = sys.modules[kernel.fn.__module__]
        replace(module, "MXFP_BLOCK_SIZE", getattr(module.MXFP_BLOCK_SIZE, "value", 32))
    _show_names_around(routing.sort_tokens, replace)
