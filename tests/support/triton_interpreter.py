"""Operations of Triton 3.7's interpreter that are not those of a GPU, as a GPU has them.

The interpreter keeps BF16 as its bits: ``tl.dot`` and products multiply these bits as integers, and
conversions to BF16 and FP8 cut off what they should round. Needs Triton, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

#: Triton's name of a type -> torch's.
FLOATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
}


def convert_float(values: Any, source: Any, target: Any, _rounding: Any) -> Any:
    """The bits of numbers of another type, rounded to the nearest."""
    bits = np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}")
    given = torch.from_numpy(bits.reshape(-1)).view(FLOATS[source.name])
    made = given.to(FLOATS[target.name]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
    return made.numpy().view(f"uint{target.primitive_bitwidth}").reshape(bits.shape)


def dot_of(builder: Any, language: Any) -> Callable[..., Any]:
    """The interpreter's product of matrices, which takes BF16 as float32."""
    own = builder.create_dot

    def widened(self: Any, one: Any) -> Any:
        return self.cast_impl(one, language.float32) if one.dtype == language.bfloat16 else one

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return own(self, widened(self, a), widened(self, b), *others)

    return create_dot


def product_of(builder: Any, language: Any) -> Callable[..., Any]:
    """The interpreter's product of numbers, rounded to BF16 where they are BF16."""
    own = builder.create_fmul

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != language.bfloat16:
            return own(self, a, b)
        wide = own(self, *(self.cast_impl(each, language.float32) for each in (a, b)))
        return self.cast_impl(wide, language.bfloat16)

    return create_fmul


def count_bfloat16(replace: Callable[..., Any]) -> None:
    """Let the interpreter multiply BF16, and round to it. replace: ``setattr``, or pytest's."""
    import triton.language
    from triton.runtime import interpreter

    replace(interpreter, "_convert_float", convert_float)
    builder = interpreter.InterpreterBuilder
    replace(builder, "create_dot", dot_of(builder, triton.language))
    replace(builder, "create_fmul", product_of(builder, triton.language))
