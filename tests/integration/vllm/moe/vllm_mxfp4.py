"""vLLM's experts of MXFP4 weights in Triton, behind our dispatch on CPU tensors: GPT-OSS on H100.

The classes, the layouts of weights and scales for Hopper, the routing and the products are those of
vLLM and of the `triton_kernels` in its wheel; Triton's interpreter executes the kernels. Stand-ins:

- on the host: an H100's name and properties; the maker of specialised kernels, which rewrites the
  source of compiled ones;
- in kernels: the two pieces of PTX that widen codes and exponents to BF16; the number of warps;
  products of BF16 (`tests.support.triton_interpreter`); constants and names that the interpreter
  does not find, because it takes a kernel's text out of the function around it.

Needs vLLM 0.33 and Triton, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe import config as vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as oai
from vllm.model_executor.layers.quantization.utils import mxfp4_utils

from moe_nvlink_plugin.config import local_expert_range
from tests.integration.vllm.moe import vllm_triton
from tests.integration.vllm.moe.vllm_layer import NUM_EXPERTS, Layer, work_of
from tests.integration.vllm.moe.vllm_triton import INTERMEDIATE, from_mxfp4, moe_config_of, mxfp4
from tests.support import triton_interpreter

#: The fewest for which vLLM's kernel for Hopper has scales: a block of 256 columns.
HIDDEN = 256
#: By which vLLM's kernel for GPT-OSS bounds and bends the gate; part of the model.
ALPHA, LIMIT = 1.702, 7.0


def _draw(*shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    drawn: torch.Tensor = torch.randn(*shape, generator=random)
    return drawn


#: Of all experts: codes and exponents of gate and up projection, of down projection, and biases.
W1, E1 = mxfp4(_draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5)
W2, E2 = mxfp4(_draw(NUM_EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5)
B1, B2 = _draw(NUM_EXPERTS, 2 * INTERMEDIATE), _draw(NUM_EXPERTS, HIDDEN)


def rows_and_choices(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden states in BF16, ids, weights."""
    _narrow, ids, weights = work_of(num_tokens, seed)
    random = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, HIDDEN, generator=random).bfloat16(), ids, weights


def _gated_gpt_oss(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows[:, 0::2].clamp(max=LIMIT), rows[:, 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def _gated_silu(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


#: vLLM's class -> its activation, and that in torch.
KINDS: dict[type[Any], tuple[MoEActivation, Callable[[torch.Tensor], torch.Tensor]]] = {
    oai.OAITritonExperts: (MoEActivation.SWIGLUOAI, _gated_gpt_oss),
    oai.UnfusedOAITritonExperts: (MoEActivation.SILU, _gated_silu),
}


def dense(
    kind: type[Any], hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer with dequantised weights, one expert after the other, in float32.

    Rounded to BF16 are only gated rows and the routers' weights, as vLLM rounds them.
    """
    w1, w2 = (from_mxfp4(*each, torch.float32) for each in ((W1, E1), (W2, E2)))
    summed, weights = torch.zeros(hidden.shape), weights.bfloat16().float()
    for expert in range(NUM_EXPERTS):
        gated = KINDS[kind][1](hidden.float() @ w1[expert].T + B1[expert])
        of_rows = gated.bfloat16().float() @ w2[expert].T + B2[expert]
        summed += torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True) * of_rows
    return summed


def _laid_out(packed: torch.Tensor, exponents: torch.Tensor) -> tuple[Any, Any]:
    """As vLLM lays out a layer's weights for Triton when it has loaded them."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

    weights, of_rows, scales = mxfp4_utils._swizzle_mxfp4(packed, exponents)
    assert [weights.storage.layout.name, scales.storage.layout.name] == [
        "HOPPER_VALUE",
        "HOPPER_SCALE",
    ]
    return weights, PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=of_rows))


class Mxfp4Layer(Layer):
    """A rank's layer with such experts."""

    def __init__(self, group: Any, kind: type[Any]) -> None:
        own = slice(*local_expert_range(NUM_EXPERTS, group.size, group.rank))
        self.w1, scales1 = _laid_out(W1[own], E1[own])
        self.w2, scales2 = _laid_out(W2[own], E2[own])
        self.activation = KINDS[kind][0]
        moe = moe_config_of(
            group.size,
            group.rank,
            "cpu",
            hidden_dim=HIDDEN,
            in_dtype=torch.bfloat16,
            activation=self.activation,
        )
        quant_config = vllm_config.mxfp4_w4a16_moe_quant_config(
            w1_scale=scales1, w2_scale=scales2, w1_bias=B1[own], w2_bias=B2[own]
        )
        super().__init__(
            group,
            experts=vllm_triton.recording(kind, moe, quant_config),
            dtype=torch.bfloat16,
            hidden_size=HIDDEN,
        )

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = self.kernel.impl.apply(
            hidden_states=hidden,
            w1=self.w1,
            w2=self.w2,
            topk_ids=ids,
            topk_weights=weights,
            activation=self.activation,
            global_num_experts=NUM_EXPERTS,
            expert_map=self.expert_map,
        )
        return result


# Stand-ins.

_H100 = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
_PLATFORM = SimpleNamespace(
    is_cuda=lambda: True,
    is_rocm=lambda: False,
    is_device_capability=lambda capability: capability == 90,
    is_device_capability_family=lambda capability: capability == 90,
)


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
            for name in ("_matmul_ogs", "_reduce_grouped")
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


def _create_inline_asm(
    _builder: Any, text: str, _constraints: Any, given: Any, _types: Any, _pure: Any, pack: int
) -> Any:
    import triton.language
    from triton.runtime.interpreter import TensorHandle

    (codes,) = given
    if pack != 4 or codes.data.dtype != np.uint8:
        raise NotImplementedError(f"PTX that no stand-in is for: {text}")
    if "mul.bf16x2" in text:
        made: tuple[Any, ...] = _widen_codes(codes.data)
    elif "prmt.b32" in text:  # exponents, moved to where BF16 has them
        made = (codes.data.astype(np.uint16) << 7,)
    else:
        raise NotImplementedError(f"PTX that no stand-in is for: {text}")
    handles = [TensorHandle(each, triton.language.bfloat16) for each in made]
    return SimpleNamespace(get_result=handles.__getitem__)


def _stand_in_for_a_gpu(replace: Callable[..., None]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.language.extra import cuda

    active = type(triton.runtime.driver.active)
    replace(active, "get_current_target", lambda _driver: GPUTarget("cuda", 90, 32))
    replace(torch.cuda, "get_device_properties", lambda _device: _H100)
    replace(torch.cuda, "get_device_capability", lambda: (9, 0))
    replace(mxfp4_utils, "current_platform", _PLATFORM)
    replace(cuda, "num_warps", lambda: _Specialised.num_warps)


def _show_names_around(kernel: Any, replace: Callable[..., None]) -> None:
    """Names of the functions around a function, to it as global ones."""
    for name, value in inspect.getclosurevars(kernel).nonlocals.items():
        if getattr(value, "fn", None) is not None:
            _show_names_around(value.fn, replace)
        module = sys.modules[kernel.__module__]
        if not hasattr(module, name):
            replace(module, name, value)


def stand_in(replace: Callable[..., None]) -> None:
    """replace: as ``setattr``, and it adds names that are not there; all can be taken back."""
    vllm_triton.stand_in(replace)
    triton_interpreter.count_bfloat16(replace)
    _stand_in_for_a_gpu(replace)
    from triton.runtime.interpreter import InterpreterBuilder
    from triton_kernels import matmul_ogs, routing

    replace(InterpreterBuilder, "create_inline_asm", _create_inline_asm)
    replace(matmul_ogs, "get_kernels", _kernels)
    product = sys.modules[matmul_ogs._matmul_ogs.fn.__module__]
    replace(product, "MXFP_BLOCK_SIZE", int(product.MXFP_BLOCK_SIZE))
    _show_names_around(routing.sort_tokens, replace)
