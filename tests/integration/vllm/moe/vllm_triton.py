"""vLLM's own Triton experts behind our dispatch, on any device, and one rank's without an exchange.

On CPU tensors Triton's interpreter executes the kernels (test_vllm_triton_experts.py); on a GPU
they are compiled (tests/gpu/test_vllm_experts.py). The kernels, the quantisers in Triton, and the
classes around them are vLLM's; stand-ins in plain torch are here for the operators that only vLLM's
CUDA build has. None of them reads a tensor's value on the host of a GPU, so that a CUDA graph can
capture them. Needs vLLM and Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe import config as vllm_config
from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce, utils
from vllm.model_executor.layers.fused_moe.experts import ocp_mx_emulation_moe
from vllm.model_executor.layers.fused_moe.experts.ocp_mx_emulation_moe import (
    OCP_MXQuantizationEmulationTritonExperts,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import (
    TritonExperts,
    TritonWNA16Experts,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoDPEPModular
from vllm.v1.worker.workspace import current_workspace_manager, init_workspace_manager

from moe_nvlink_plugin.config import local_expert_range
from tests.integration.vllm.moe import vllm_layer
from tests.integration.vllm.moe.vllm_layer import (
    CAPACITY,
    HIDDEN_SIZE,
    NUM_EXPERTS,
    TOP_K,
    Layer,
    computed,
    take_cuda_branches,
)
from tests.support.vllm_sizes import GPU_WAIT_S

INTERMEDIATE = 128
#: Of activations; on CPU tensors the sums then differ by their order alone.
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
E4M3_MAX = 448.0
#: Of the activations here, up to about 5.
STATIC_SCALE = torch.tensor(0.0125)


def _draw(*shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    drawn: torch.Tensor = torch.randn(*shape, generator=random) * shape[-1] ** -0.5
    return drawn


#: Gate and up projection, and down projection, of all experts.
W1 = _draw(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN_SIZE)
W2 = _draw(NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE)


def _fp8(
    weights: torch.Tensor, tall: int | None = None, wide: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a scale for each block of so many rows and columns; None: all that a weight has."""
    experts, rows, columns = weights.shape
    tall, wide = tall or rows, wide or columns
    blocks = weights.view(experts, rows // tall, tall, columns // wide, wide)
    scales = blocks.abs().amax((2, 4)) / E4M3_MAX
    scaled = (blocks / scales[:, :, None, :, None]).view_as(weights)
    return scaled.to(torch.float8_e4m3fn), scales


def _by_tensor(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, scales = _fp8(weights)
    return rows, scales.flatten()


def _by_channel_int8(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weights.abs().amax(2, keepdim=True) / 127
    return (weights / scales).round().to(torch.int8), scales


#: Columns of a weight's row that share a scale: of int4, and by definition of MXFP4.
INT4_GROUP, MXFP4_GROUP = 32, 32
#: What the codes of MXFP4 stand for.
E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
E2M1 = torch.cat((E2M1, -E2M1))


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of four bits in a byte, the first in the lower half."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _by_group_int4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weights.view(*weights.shape[:-1], -1, INT4_GROUP)
    scales = groups.abs().amax(-1) / 7
    codes = (groups / scales.unsqueeze(-1)).round() + 8
    return _packed(codes.view_as(weights)), scales


def mxfp4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, two in a byte, and exponents of their scales, biased by 127, one for 32 columns."""
    groups = weights.float().view(*weights.shape[:-1], -1, MXFP4_GROUP)
    most = groups.abs().amax(-1).clamp(min=2.0**-100)
    exponents = (most / E2M1.max()).log2().ceil()
    scaled = groups * torch.exp2(-exponents).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - E2M1.to(weights.device)).abs().argmin(-1)
    return _packed(codes.view_as(weights)), (exponents + 127).to(torch.uint8)


def from_mxfp4(packed: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights that such codes stand for."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    scales = torch.exp2(exponents.float() - 127).repeat_interleave(MXFP4_GROUP, -1)
    return (E2M1.to(packed.device)[codes.long()] * scales).to(dtype)


def _there_and_back(rows: torch.Tensor) -> torch.Tensor:
    return from_mxfp4(*mxfp4(rows), rows.dtype)


def _as_they_are(weights: torch.Tensor) -> tuple[torch.Tensor, None]:
    return weights, None


#: Name -> quantiser of weights, what vLLM's configuration makes of their scales, and the recipe by
#: which rows must travel.
SCHEMES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any, Any], Any], str | None]] = {
    "unquantised": (_as_they_are, lambda _a, _b: vllm_config.FUSED_MOE_UNQUANTIZED_CONFIG, None),
    "fp8 by blocks": (
        lambda weights: _fp8(weights, 128, 128),
        lambda a, b: vllm_config.fp8_w8a8_moe_quant_config(a, b, block_shape=[128, 128]),
        "fp8_block",
    ),
    "fp8 by token": (
        lambda weights: _fp8(weights, 1),
        lambda a, b: vllm_config.fp8_w8a8_moe_quant_config(
            a, b, per_act_token_quant=True, per_out_ch_quant=True
        ),
        "fp8_token",
    ),
    "fp8 by tensor": (
        _by_tensor,
        lambda a, b: vllm_config.fp8_w8a8_moe_quant_config(
            a, b, a1_scale=STATIC_SCALE.to(a.device), a2_scale=STATIC_SCALE.to(a.device)
        ),
        "fp8_tensor",
    ),
    "int8 by token": (
        _by_channel_int8,
        lambda a, b: vllm_config.int8_w8a8_moe_quant_config(
            a, b, a1_scale=None, a2_scale=None, per_act_token_quant=True
        ),
        None,
    ),
    "int4 by groups": (
        _by_group_int4,
        lambda a, b: vllm_config.int4_w4a16_moe_quant_config(a, b, block_shape=[0, INT4_GROUP]),
        None,
    ),
    "MXFP4, emulated": (
        mxfp4,
        lambda a, b: vllm_config.ocp_mx_moe_quant_config("mxfp4", a, b),
        None,
    ),
}
#: Scheme -> vLLM's class, where it is not TritonExperts.
CLASSES: dict[str, type[TritonExperts]] = {
    "int4 by groups": TritonWNA16Experts,
    "MXFP4, emulated": OCP_MXQuantizationEmulationTritonExperts,
}


# Stand-ins for operators that vLLM's CPU build does not have.


def moe_align_block_size(
    ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_padded: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Places of all choices by expert, each expert's padded to whole blocks.

    Raises an error for ids that the CUDA kernel would write out of bounds with (on the CPU, where
    that can be asked).
    """
    assert scatter_idx is None
    flat = ids.flatten().long()
    if flat.device.type == "cpu":
        assert bool((flat < num_experts).all()), "vLLM's kernel counts beyond its array"
    device = flat.device
    every = torch.arange(num_experts, device=device)
    local = every if expert_map is None else expert_map.long()
    is_kept = (flat >= 0) & (local[flat.clamp(min=0)] >= 0)
    expert = torch.where(is_kept, flat, num_experts)  # those of no expert here come last
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    blocks = (counts[:num_experts] + block_size - 1) // block_size
    ends = blocks.cumsum(0)
    # One element more than is handed out, for those that go nowhere.
    places = torch.full((sorted_ids.numel() + 1,), flat.numel(), dtype=torch.int32, device=device)
    begins = torch.cat(((ends - blocks) * block_size, ends.new_full((1,), sorted_ids.numel())))
    in_order, order = expert.sort(stable=True)
    number = torch.arange(flat.numel(), device=device) - (counts.cumsum(0) - counts)[in_order]
    at = (begins[in_order] + torch.where(in_order < num_experts, number, 0)).long()
    places.scatter_(0, at, order.to(torch.int32))
    sorted_ids.copy_(places[:-1])
    block = torch.arange(expert_ids.numel(), device=device)
    of_block = torch.searchsorted(ends, block, right=True)
    none = local.new_full((1,), -1)
    expert_ids.copy_(torch.cat((local, none))[of_block])
    num_padded.copy_(ends[-1:] * block_size)


def _moe_sum(
    rows: torch.Tensor,
    output: torch.Tensor,
    ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    if ids is not None:
        is_computed = ids >= 0
        if expert_map is not None:
            is_computed &= expert_map[ids.clamp(min=0).long()] >= 0
        rows = torch.where(is_computed.unsqueeze(-1), rows, 0)
    output.copy_(rows.sum(1))


def _silu_and_mul_per_block_quant(
    rows: torch.Tensor, group_size: int, quant_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = rows.float().chunk(2, dim=-1)
    return _quantise_by_group(torch.nn.functional.silu(gate) * up, group_size)


def _divided(most: torch.Tensor, largest: float) -> torch.Tensor:
    """Scales. On CUDA torch divides by a number by its reciprocal, which moves codes at ties."""
    return most / torch.full_like(most, largest)


def _quantise_by_group(
    rows: torch.Tensor, group_size: int, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = rows.float().view(rows.shape[0], -1, group_size)
    scales = _divided(groups.abs().amax(-1).clamp(min=1e-10), E4M3_MAX)
    quantised = (groups / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return quantised.view_as(rows).to(torch.float8_e4m3fn), scales


def _scaled_fp8_quant(
    rows: torch.Tensor, scale: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if scale is None:
        by_token = options["use_per_token_if_dynamic"]
        most = rows.float().abs().amax(1, keepdim=True) if by_token else rows.float().abs().max()
        scale = _divided(most.clamp(min=1e-10), E4M3_MAX)
    quantised = (rows.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return quantised.to(torch.float8_e4m3fn), scale


def _per_token_quant_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's Triton kernel rounds by a function of CUDA's libdevice, which is not interpreted."""
    scales = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 127
    return (rows.float() / scales).round().to(torch.int8), scales


_IN_TURN = threading.Lock()


def recording(experts_class: type[Any], moe: Any, quant_config: Any) -> Any:
    """Experts of vLLM's that keep in ``calls`` what each call was handed.

    Triton's interpreter takes one thread at a time.
    """

    class Recording(experts_class):  # type: ignore[misc]
        def apply(self, *args: Any, **given: Any) -> None:
            self.calls.append(SimpleNamespace(**given))
            with _IN_TURN:
                super().apply(*args, **given)

    experts = Recording(moe, quant_config)
    experts.calls = []
    return experts


def moe_config_of(ep_size: int, ep_rank: int, device: str, **other: Any) -> Any:
    """vLLM's description of such a layer on a rank. other: replaces values of it."""
    first, end = local_expert_range(NUM_EXPERTS, ep_size, ep_rank)
    usual = {
        "num_experts": NUM_EXPERTS,
        "experts_per_token": TOP_K,
        "hidden_dim": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE,
        "device": device,
        "in_dtype": DTYPES[device],
        "max_num_tokens": CAPACITY,
    }
    return vllm_layer.moe_config_of(ep_size, ep_rank, end - first, **{**usual, **other})


def _experts(
    scheme: str, ep_size: int, ep_rank: int, device: str
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """One rank's experts, of all of a layer's, and their weights."""
    quantise, config_of_scales, _recipe = SCHEMES[scheme]
    first, end = local_expert_range(NUM_EXPERTS, ep_size, ep_rank)
    (w1, scales1), (w2, scales2) = (quantise(weights[first:end].to(device)) for weights in (W1, W2))
    if w1.dtype == torch.float32:
        w1, w2 = w1.to(DTYPES[device]), w2.to(DTYPES[device])
    experts = recording(
        CLASSES.get(scheme, TritonExperts),
        moe_config_of(ep_size, ep_rank, device),
        config_of_scales(scales1, scales2),
    )
    return experts, w1, w2


class TritonLayer(Layer):
    """A rank's layer with vLLM's Triton experts."""

    def __init__(self, group: Any, scheme: str, device: str = "cpu") -> None:
        experts, self.w1, self.w2 = _experts(scheme, group.size, group.rank, device)
        values: dict[str, Any] = {} if device == "cpu" else {"timeout_s": GPU_WAIT_S}
        super().__init__(group, experts=experts, device=device, dtype=DTYPES[device], **values)

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return computed(self.kernel, self.w1, self.w2, (hidden, ids, weights), self.expert_map)


def on_one_rank(
    scheme: str, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer of one rank with all experts, without an exchange."""
    experts, w1, w2 = _experts(scheme, 1, 0, hidden.device.type)
    kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
    # Without expert_map the kernels take no -1.
    ids, weights = ids.clamp(min=0), torch.where(ids < 0, 0.0, weights)
    # As many rows every time: Triton compiles anew for some numbers of them.
    missing = CAPACITY - len(hidden)
    hidden_rows, id_rows, weight_rows = (
        torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (hidden, ids, weights)
    )
    return computed(kernel, w1, w2, (hidden_rows, id_rows, weight_rows), None)[: len(hidden)]


def _silu_and_mul(output: torch.Tensor, rows: torch.Tensor) -> None:
    gate, up = rows.float().chunk(2, dim=-1)
    output.copy_(torch.nn.functional.silu(gate) * up)


#: Keeps the operators that this module has defined.
_defined: list[Any] = []


def _define_activation() -> None:
    if not hasattr(torch.ops._C, "silu_and_mul"):
        library: Any = cast(Any, torch.library).Library("_C", "FRAGMENT")
        library.define("silu_and_mul(Tensor(a!) result, Tensor input) -> ()")
        library.impl("silu_and_mul", _silu_and_mul, "CompositeExplicitAutograd")
        _defined.append(library)


def stand_in(replace: Callable[[Any, str, Any], None], device: str = "cpu") -> None:
    """Let vLLM's experts run on this device without vLLM's CUDA build. replace: setattr."""
    if device == "cpu":
        take_cuda_branches(replace)
        replace(utils, "per_token_quant_int8", _per_token_quant_int8)
    else:
        replace(topk_weight_and_reduce, "ops", SimpleNamespace(moe_sum=_moe_sum))
        init_workspace_manager(torch.device(device))
    _define_activation()
    # Of amd-quark, which is for AMD's GPUs.
    replace(ocp_mx_emulation_moe, "dequant_mxfp4", from_mxfp4)
    replace(utils, "quant_dequant_mxfp4", _there_and_back)
    replace(ops, "moe_align_block_size", moe_align_block_size)
    replace(ops, "moe_sum", _moe_sum)
    replace(ops, "scaled_fp8_quant", _scaled_fp8_quant)
    replace(ops, "silu_and_mul_per_block_quant", _silu_and_mul_per_block_quant)
    replace(utils, "per_token_group_quant_fp8", _quantise_by_group)


def spoil_workspace(device: str) -> None:
    """Fill what vLLM keeps for its experts' scratch with NaN, and let it be large enough."""
    if device != "cpu":  # where a stand-in makes it anew, of NaN
        (workspace,) = current_workspace_manager().get_simultaneous(((1 << 20,), torch.uint8))
        workspace.fill_(0xFF)
