"""e4m3 activations with fp32 scales: one per block of 128, one per token, or a global scale.

The scales of blocks come in two kinds: as they are, or rounded up to powers of two.

The arithmetic follows the CUDA kernels that vLLM 0.32's `moe_kernel_quantize_input` calls:
`per_token_group_fp8_quant` (blocks), `dynamic_per_token_scaled_fp8_quant` (tokens) and
`static_scaled_fp8_quant` (global scale). By their source, rows of finite numbers get the same bits.
vLLM's torch reference, `QuantFP8.forward_native`, differs from these kernels in three ways; here
the kernels count:

- Blocks: the kernel's least amax is 1e-10, which gives a scale of 2.2e-13. The reference's least
  scale is 1/(448 * 512) = 4.4e-6. So blocks with an amax below 1/512 differ.
- Tokens: the kernel divides by the scale. The reference multiplies by the rounded reciprocal, so a
  value near a tie may round to the other side.
- Sizes: the kernel refuses a hidden size that is no multiple of 128. The reference pads it.

If vLLM uses DeepGEMM (`is_deep_gemm_e8m0_used`), it rounds its block scales up to powers of two,
by exp2f(ceilf(log2f(max(scale, 1e-10)))). That is the format fp8_block_pow2, which rounds exactly.
For bf16 and fp16 activations the bits are the same: no amax / 448 is closer above a power of two
than a factor of 1.0005, which log2f does not round away. Scales of fp32 activations closer above it
differ: vLLM's may be half of ours.

NaN and infinity differ from vLLM's kernels on purpose. A NaN makes the scale of its block (or
token) NaN, and so every value in it, as in the reference; vLLM's kernels drop it, because fmaxf
does, and send +-448. An infinity makes the scale infinite: finite values of its block become 0, and
the infinity becomes NaN (inf / inf). With a global scale, NaN stays NaN and infinity becomes 448.

Every NaN is stored as 0x7f, whatever its sign, so that all devices store the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from moe_nvlink_plugin.errors import ConfigError, InputError

from .base import PayloadRow, QuantisedRows, check_global_scale

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

#: Activation types that every quantising recipe takes and returns.
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 to e4m3, to nearest even and at most +-448; every NaN becomes 0x7f.

    The clamp does not rely on torch: the cast of torch 2.13 saturates, and the cast of older
    versions gives NaN for values that round beyond 448. Local; capturable.
    """
    return torch.where(values.isnan(), float("nan"), values.clamp(-E4M3_MAX, E4M3_MAX)).to(E4M3)


def divide(numerator: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide fp32 by a number, rounding once. On a GPU, `tensor / 448.0` multiplies by 1/448."""
    return numerator / numerator.new_full((), divisor)


def in_blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return `[n, H]` values as fp32 `[n, H / block, block]`."""
    return values.float().reshape(values.shape[0], values.shape[1] // block, block)


def check_block(recipe: str, hidden_size: int, block: int, instead: str) -> None:
    """Raise ConfigError if hidden_size is no multiple of `block`; it recommends `instead`."""
    if hidden_size % block:
        raise ConfigError(
            f"hidden_size={hidden_size} is not a multiple of {block}, the scale block of recipe "
            f"{recipe}; the frameworks' quantisers refuse it too. Use {instead}"
        )


def check_activations(recipe: str, hidden_states: torch.Tensor) -> None:
    """Raise InputError if the tensor is not `[num_tokens, hidden_size]` of an activation type."""
    if hidden_states.dim() != 2:
        raise InputError(
            f"recipe {recipe} quantises [num_tokens, hidden_size], not a tensor of shape "
            f"{list(hidden_states.shape)}; reshape it first"
        )
    if hidden_states.dtype not in ACTIVATION_DTYPES:
        raise InputError(
            f"recipe {recipe} quantises bf16, fp16 or fp32, not {hidden_states.dtype}; rows that "
            "are quantised already go to dispatch with scales="
        )


def scales_given(recipe: str, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the scales; raise InputError if they are missing."""
    if scales is None:
        raise InputError(f"rows of recipe {recipe} mean nothing without scales; pass Dispatched's")
    return scales


@dataclasses.dataclass(frozen=True)
class Fp8BlockRecipe:
    """Recipe fp8_block: e4m3 `[n, H]`, one fp32 scale per 128 elements; H is a multiple of 128.

    scale = max(amax, 1e-10) / 448; value = e4m3(clamp(x / scale, -448, 448)). Both divisions round
    as IEEE 754 says.
    """

    name: ClassVar[str] = "fp8_block"
    quantiser: ClassVar[str] = "Fp8Block"
    needs_global_scale: ClassVar[bool] = False
    activation_dtypes: ClassVar[tuple[torch.dtype, ...]] = ACTIVATION_DTYPES

    block: ClassVar[int] = 128

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        check_block(self.name, hidden_size, self.block, "fp8_token")
        return PayloadRow(E4M3, hidden_size)

    def scales_row(self, hidden_size: int) -> PayloadRow:
        check_block(self.name, hidden_size, self.block, "fp8_token")
        return PayloadRow(torch.float32, hidden_size // self.block)

    def quantise(
        self, hidden_states: torch.Tensor, global_scale: torch.Tensor | None = None
    ) -> QuantisedRows:
        """Return rows e4m3 `[n, H]` and scales fp32 `[n, H/128]`. Local; capturable.

        Raises:
            ConfigError: H is no multiple of 128.
            InputError: hidden_states is not two-dimensional, or not of an activation type.
        """
        check_activations(self.name, hidden_states)
        check_block(self.name, hidden_states.shape[1], self.block, "fp8_token")
        blocks = in_blocks(hidden_states, self.block)
        scales = self._scales(blocks.abs().amax(dim=2))
        return QuantisedRows(to_e4m3(blocks / scales[:, :, None]).flatten(1), scales)

    def dequantise(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return value * scale, rounded to `dtype`. Local; capturable."""
        blocks = in_blocks(rows, self.block)
        return (blocks * scales_given(self.name, scales)[:, :, None]).flatten(1).to(dtype)

    def _scales(self, amax: torch.Tensor) -> torch.Tensor:
        return divide(amax.clamp(min=1e-10), E4M3_MAX)


@dataclasses.dataclass(frozen=True)
class Fp8BlockPow2Recipe(Fp8BlockRecipe):
    """Recipe fp8_block_pow2: as fp8_block, with scales that are powers of two.

    scale = the least power of two that is at least max(amax / 448, 1e-10). An infinite or NaN
    scale stays.
    """

    name: ClassVar[str] = "fp8_block_pow2"
    quantiser: ClassVar[str] = "Fp8BlockPow2"

    def _scales(self, amax: torch.Tensor) -> torch.Tensor:
        scales = divide(amax, E4M3_MAX).clamp(min=1e-10)
        up = (scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        return torch.where(scales.isfinite(), up.view(torch.float32), scales)


@dataclasses.dataclass(frozen=True)
class Fp8TokenRecipe:
    """Recipe fp8_token: e4m3 `[n, H]`, one fp32 scale per token; any H.

    scale = max(amax / 448, 1/(448 * 512)); value = e4m3(clamp(x / scale, -448, 448)). Divisions
    round as IEEE 754 says.
    """

    name: ClassVar[str] = "fp8_token"
    quantiser: ClassVar[str] = "Fp8Token"
    needs_global_scale: ClassVar[bool] = False
    activation_dtypes: ClassVar[tuple[torch.dtype, ...]] = ACTIVATION_DTYPES

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        return PayloadRow(E4M3, hidden_size)

    def scales_row(self, hidden_size: int) -> PayloadRow:
        return PayloadRow(torch.float32, 1)

    def quantise(
        self, hidden_states: torch.Tensor, global_scale: torch.Tensor | None = None
    ) -> QuantisedRows:
        """Return rows e4m3 `[n, H]` and scales fp32 `[n, 1]`. Local; capturable.

        Raises:
            InputError: hidden_states is not two-dimensional, or not of an activation type.
        """
        check_activations(self.name, hidden_states)
        values = hidden_states.float()
        amax = values.abs().amax(dim=1, keepdim=True)
        scales = divide(amax, E4M3_MAX).clamp(min=1.0 / (E4M3_MAX * 512.0))
        return QuantisedRows(to_e4m3(values / scales), scales)

    def dequantise(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return value * scale, rounded to `dtype`. Local; capturable."""
        return (rows.float() * scales_given(self.name, scales)).to(dtype)


@dataclasses.dataclass(frozen=True)
class Fp8TensorRecipe:
    """Recipe fp8_tensor: e4m3 `[n, H]` under a global_scale that does not travel; any H.

    value = e4m3(clamp(x * (1 / global_scale), -448, 448)); the reciprocal is rounded first.
    """

    name: ClassVar[str] = "fp8_tensor"
    quantiser: ClassVar[str] = "Fp8Tensor"
    needs_global_scale: ClassVar[bool] = True
    activation_dtypes: ClassVar[tuple[torch.dtype, ...]] = ACTIVATION_DTYPES

    def hidden_row(self, hidden_size: int) -> PayloadRow:
        return PayloadRow(E4M3, hidden_size)

    def scales_row(self, hidden_size: int) -> None:
        return None

    def quantise(
        self, hidden_states: torch.Tensor, global_scale: torch.Tensor | None = None
    ) -> QuantisedRows:
        """Return rows e4m3 `[n, H]` without scales. Local; capturable.

        vLLM's name for global_scale is a1_scale.

        Raises:
            InputError: hidden_states is not two-dimensional, or not of an activation type; or
                global_scale is missing, not fp32, or not one element. Dispatch checks its value.
        """
        check_activations(self.name, hidden_states)
        scale = check_global_scale(self.name, global_scale, read_value=False)
        reciprocal = torch.ones_like(scale) / scale
        return QuantisedRows(to_e4m3(hidden_states.float() * reciprocal), None)

    def dequantise(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        global_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return value * global_scale, rounded to `dtype`. Local; capturable."""
        scale = check_global_scale(self.name, global_scale, read_value=False)
        return (rows.float() * scale).to(dtype)


FP8_BLOCK = Fp8BlockRecipe()
FP8_BLOCK_POW2 = Fp8BlockPow2Recipe()
FP8_TOKEN = Fp8TokenRecipe()
FP8_TENSOR = Fp8TensorRecipe()
