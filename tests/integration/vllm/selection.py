"""Which experts vLLM 0.33 chooses for well-known models behind our exchange, and what then travels.

    .venv-vllm33/bin/python -m tests.integration.vllm.selection           # the page
    .venv-vllm33/bin/python -m tests.integration.vllm.selection 9.0 with  # a machine, as JSON

vLLM's own oracles choose, and our own code decides about the rows. vLLM believes that it runs on a
GPU: our platform for CUDA with that compute capability, its compiled libraries without contents,
and every optional package said to be there. FlashInfer is there or not; vLLM sees it only if its
compiled kernels or a compiler are installed too.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

PAGE = Path(__file__).resolve().parents[3] / "integration/vllm/SELECTION.md"
#: Compute capability -> the GPUs that have it.
MACHINES = {"9.0": "H100, H200", "10.0": "B200", "10.3": "GB300"}
EP_SIZE = 8


class Model(NamedTuple):
    """Sizes of a model's MoE layer. has_bias: of the experts."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: str = "SILU"
    routing: str = "DeepSeekV3"
    has_bias: bool = False
    unpadded: int | None = None


MODELS = {
    "DeepSeek-V3, R1": Model(7168, 2048, 256, 8),
    "DeepSeek-V4": Model(7168, 3072, 384, 6),
    "Qwen3-235B": Model(4096, 1536, 128, 8, routing="Renormalize"),
    "Qwen3-Next": Model(2048, 512, 512, 10, routing="Renormalize"),
    "GPT-OSS-120B": Model(3072, 2944, 128, 4, "SWIGLUOAI", "Renormalize", True, 2880),
    "Llama 4 Maverick": Model(5120, 8192, 128, 1, routing="Llama4"),
    "Nemotron 3 Nano": Model(2688, 1856, 128, 6, "RELU2_NO_MUL"),
    "Kimi-K2": Model(7168, 2048, 384, 8),
    "GLM-4.5": Model(5120, 1536, 160, 8),
    "MiniMax-M2": Model(3072, 1536, 256, 8, routing="MiniMax2"),
}
#: Model, format of its weights and activations, and what else the server is asked for.
LAYERS = (
    ("DeepSeek-V3, R1", "FP8 blocks", ""),
    ("DeepSeek-V3, R1", "FP8 blocks", "EPLB"),
    ("DeepSeek-V3, R1", "NVFP4", ""),
    ("DeepSeek-V3, R1", "WNA16", ""),
    ("DeepSeek-V4", "MXFP4", ""),
    ("Qwen3-235B", "BF16", ""),
    ("Qwen3-235B", "BF16", "LoRA"),
    ("Qwen3-235B", "FP8 blocks", ""),
    ("Qwen3-235B", "FP8 blocks", "LoRA"),
    ("Qwen3-235B", "NVFP4", ""),
    ("Qwen3-235B", "MXFP8", ""),
    ("Qwen3-235B", "INT8", ""),
    ("Qwen3-Next", "FP8 blocks", ""),
    ("GPT-OSS-120B", "MXFP4", ""),
    ("GPT-OSS-120B", "MXFP4", "EPLB"),
    ("Llama 4 Maverick", "BF16", ""),
    ("Llama 4 Maverick", "FP8 tensor, static", ""),
    ("Llama 4 Maverick", "FP8 tensor, dynamic", ""),
    ("Nemotron 3 Nano", "BF16", ""),
    ("Nemotron 3 Nano", "FP8 tensor, static", ""),
    ("Nemotron 3 Nano", "NVFP4", ""),
    ("Kimi-K2", "NVFP4", ""),
    ("Kimi-K2", "WNA16", ""),
    ("GLM-4.5", "BF16", ""),
    ("GLM-4.5", "FP8 channel", ""),
    ("MiniMax-M2", "FP8 blocks", ""),
)


# A machine that is not there.


def _without_contents(name: str) -> None:
    module: Any = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__, module.__file__ = [], f"{name}.py"
    module.__getattr__ = _nothing
    sys.modules[name] = module


def _nothing(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_given, **_named: None


def pretend(major: int, minor: int, *, flashinfer: bool) -> None:
    """Let vLLM, which nobody has imported yet, take this process for one with such a GPU."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_qutlass_C", "vllm_flash_attn"):
        _without_contents(f"vllm.{name}")
    _without_contents("vllm.vllm_flash_attn.flash_attn_interface")
    import vllm.platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    from moe_nvlink_plugin.integration.vllm.plugin import platform

    of_device: dict[str, Any] = {
        "get_device_capability": DeviceCapability(major, minor),
        "get_device_name": f"pretended {major}.{minor}",
        "get_device_total_memory": 180 << 30,
        "num_compute_units": 132,
    }
    for of in (cuda.CudaPlatformBase, cuda.CudaPlatform):
        for name, value in of_device.items():
            setattr(of, name, classmethod(lambda _cls, device_id=0, value=value: value))
    vllm.platforms._current_platform = platform.MoeNvlinkCudaPlatform()
    _pretend_packages(flashinfer=flashinfer)
    replaced: Any = torch
    replaced.accelerator.current_device_index = lambda: "cpu"
    replaced.cuda.current_device = lambda: 0
    replaced.cuda.get_device_capability = lambda *_: (major, minor)


def _pretend_packages(*, flashinfer: bool) -> None:
    import vllm.utils.deep_gemm as deep_gemm
    import vllm.utils.flashinfer as of_flashinfer
    import vllm.utils.import_utils as import_utils
    from vllm import _custom_ops

    def always(answer: Any) -> Any:
        return functools.cache(lambda *_given, **_named: answer)

    for name in dir(_custom_ops):
        if "supports" in name or name.endswith("_supported"):
            setattr(_custom_ops, name, always(True))
    for name in dir(of_flashinfer):
        if name.startswith("has_flashinfer") or name == "has_nvidia_artifactory":
            setattr(of_flashinfer, name, always(flashinfer))
    for module in (import_utils, deep_gemm):
        module.has_deep_gemm = always(True)
    deep_gemm.is_deep_gemm_supported = deep_gemm.is_deep_gemm_e8m0_used = always(True)
    deep_gemm.get_mk_alignment_for_contiguous_layout = always([128, 128])


# The layers, and what vLLM and we decide about them.


def _config(model: Model, more: str) -> Any:
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from tests.integration.vllm.moe.vllm_layer import moe_config_of, parallel_of

    physical = model.num_experts + (32 if more == "EPLB" else 0)
    made = moe_config_of(
        EP_SIZE,
        0,
        physical // EP_SIZE,
        num_experts=physical,
        num_logical_experts=model.num_experts,
        experts_per_token=model.top_k,
        hidden_dim=model.hidden_size,
        intermediate_size=model.intermediate_size,
        activation=MoEActivation[model.activation],
        routing_method=config.RoutingMethodType[model.routing],
        moe_parallel_config=parallel_of(EP_SIZE, 0, balances=more == "EPLB"),
        in_dtype=torch.bfloat16,
        max_num_tokens=8192,
        has_bias=model.has_bias,
        is_lora_enabled=more == "LoRA",
    )
    made.require_decomposed_backend = True
    if model.unpadded is not None:
        made.hidden_dim_unpadded = model.unpadded
    return made


def _select(layer: str, form: str, moe: Any) -> tuple[Any, type[Any]]:
    """vLLM's back end and class of experts."""
    from vllm.model_executor.layers.fused_moe import oracle
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    def of(name: str) -> Any:
        return importlib.import_module(f"{oracle.__name__}.{name}")

    fp8_tensor = keys.kFp8StaticTensorSym
    chosen: dict[str, Callable[[], Any]] = {
        "BF16": lambda: of("unquantized").select_unquantized_moe_backend(moe),
        "FP8 blocks": lambda: of("fp8").select_fp8_moe_backend(
            moe, keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
        ),
        "FP8 channel": lambda: of("fp8").select_fp8_moe_backend(
            moe, keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym, allow_vllm_cutlass=True
        ),
        "FP8 tensor, static": lambda: of("fp8").select_fp8_moe_backend(moe, fp8_tensor, fp8_tensor),
        "FP8 tensor, dynamic": lambda: of("fp8").select_fp8_moe_backend(
            moe, fp8_tensor, keys.kFp8DynamicTensorSym
        ),
        "NVFP4": lambda: of("nvfp4").select_nvfp4_moe_backend(
            moe, keys.kNvfp4Static, keys.kNvfp4Dynamic
        ),
        "MXFP4": lambda: (
            of("mxfp4").select_deepseek_v4_mxfp4_moe_backend(moe)
            if layer == "DeepSeek-V4"
            else of("mxfp4").select_mxfp4_moe_backend(moe)
        ),
        "MXFP8": lambda: of("mxfp8").select_mxfp8_moe_backend(moe),
        "INT8": lambda: of("int8").select_int8_moe_backend(
            moe, keys.kInt8StaticChannelSym, keys.kInt8DynamicTokenSym
        ),
        "WNA16": lambda: of("int_wna16").select_wna16_moe_backend(
            moe, keys.kInt4Static, _by_groups(), may_have_zp=False, may_have_bias=False,
            allow_tile_padding=True,
        ),
    }  # fmt: skip
    backend, experts = chosen[form]()
    return backend, experts


def _by_groups() -> Any:
    """Of weights in groups of 128, as compressed-tensors describes them."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    return quantization.QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=128)


def _quant_config(form: str, moe: Any, backend: Any) -> Any:
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.oracle import fp8, int_wna16, mxfp4, nvfp4

    of_experts = torch.ones(moe.num_local_experts)
    blocks, one = of_experts.view(-1, 1, 1), torch.ones(())

    def of_fp8(scales: torch.Tensor, a_scale: torch.Tensor | None = None, **more: Any) -> Any:
        return fp8.make_fp8_moe_quant_config(
            backend, w1_scale=scales, w2_scale=scales, a1_scale=a_scale, a2_scale=a_scale, **more
        )

    by_token: dict[str, Any] = {"per_act_token_quant": True}
    made: dict[str, Callable[[], Any]] = {
        "BF16": lambda: config.FUSED_MOE_UNQUANTIZED_CONFIG,
        "FP8 blocks": lambda: of_fp8(blocks, block_shape=[128, 128]),
        "FP8 channel": lambda: of_fp8(blocks, **by_token, per_out_ch_quant=True),
        "FP8 tensor, static": lambda: of_fp8(of_experts, one),
        "FP8 tensor, dynamic": lambda: of_fp8(of_experts),
        "MXFP8": lambda: of_fp8(blocks, block_shape=[1, 32]),
        "NVFP4": lambda: nvfp4.make_nvfp4_moe_quant_config(
            backend=backend,
            **dict.fromkeys(("w13_scale", "w2_scale"), blocks),
            **dict.fromkeys(("w13_scale_2", "w2_scale_2", "a13_scale", "a2_scale"), of_experts),
        ),
        "MXFP4": lambda: mxfp4.make_mxfp4_moe_quant_config(
            backend, w1_scale=blocks, w2_scale=blocks, w1_bias=None, w2_bias=None,
            gemm1_alpha=1.702, gemm1_beta=1.0, swiglu_limit=7.0,
        ),
        "INT8": lambda: config.int8_w8a8_moe_quant_config(
            w1_scale=blocks, w2_scale=blocks, a1_scale=None, a2_scale=None, **by_token
        ),
        "WNA16": lambda: int_wna16.make_wna16_moe_quant_config(
            w1_scale=blocks, w2_scale=blocks, group_size=128, num_bits=4
        ),
    }  # fmt: skip
    return made[form]()


def _travels(moe: Any, experts: Any) -> str:
    """What `method.install` decides for such experts; raises what it raises."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
    from moe_nvlink_plugin.integration.common.formats import choose
    from moe_nvlink_plugin.integration.common.options import Options
    from moe_nvlink_plugin.integration.vllm.moe.cuda_prepare_finalize import CudaPrepareAndFinalize
    from moe_nvlink_plugin.integration.vllm.moe.experts_input import VllmExpertsInput

    def config_of(**more: Any) -> AllToAllConfig:
        config = AllToAllConfig(
            ep_size=EP_SIZE, ep_rank=0, num_experts=moe.num_experts, top_k=moe.experts_per_token,
            hidden_size=moe.hidden_dim, max_tokens_per_rank=moe.max_num_tokens,
            dtype=moe.in_dtype, combine="bf16", received_ids="elsewhere", **more,
        )  # fmt: skip
        MoeAllToAll.check(config)
        return config

    chosen = choose(
        VllmExpertsInput.of(experts), moe.hidden_dim, moe.in_dtype, torch.device("cuda"),
        Options(), lambda name: MoeAllToAll.check(config_of(recipe=name)),
    )  # fmt: skip
    recipe = chosen.recipe
    config = config_of() if recipe is None else config_of(
        recipe=recipe.name, scales_layout=chosen.scales_layout
    )  # fmt: skip
    placed = torch.full((moe.num_experts,), -1, dtype=torch.int32)
    placed[: moe.num_local_experts] = torch.arange(moe.num_local_experts, dtype=torch.int32)
    exchange: Any = SimpleNamespace(
        config=config, combine_input=functools.partial(_combine_input, config)
    )
    ours = CudaPrepareAndFinalize(exchange, placed, chosen)
    mk.FusedMoEKernel(ours, experts)  # which asks ours and the experts whether they fit
    if recipe is None:
        return "unquantised"
    layout = "" if chosen.scales_layout == "linear" else f", {chosen.scales_layout} scales"
    return f"`{recipe.name}`{layout}"


def _combine_input(config: Any, hidden_size: int) -> None:
    """Raise where MoeAllToAll.combine_input does, for rows of this width."""
    if hidden_size > config.hidden_size:
        raise ValueError(f"rows of {hidden_size} elements, but room for {config.hidden_size}")


def decided(layer: str, form: str, more: str) -> str:
    """Experts and what travels to them, or who refuses the layer and why."""
    moe = _config(MODELS[layer], more)
    try:
        backend, kind = _select(layer, form, moe)
    except (NotImplementedError, ValueError) as error:
        return f"vLLM refuses: {_first_line(error)}"
    try:
        experts = kind(moe, _quant_config(form, moe, backend))
        if more == "LoRA":
            experts.set_lora_context(SimpleNamespace())
        return f"{kind.__name__}: {_travels(moe, experts)}"
    except Exception as error:
        return f"{kind.__name__}: **{type(error).__name__}**: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:160]


def on_machine(capability: str, *, flashinfer: bool) -> dict[str, str]:
    """Decide about all layers; the process has to be a new one."""
    logging.disable(logging.WARNING)
    major, minor = map(int, capability.split("."))
    pretend(major, minor, flashinfer=flashinfer)
    from vllm.config import VllmConfig, set_current_vllm_config

    asked = VllmConfig()
    text = SimpleNamespace(model_type="any")
    model = SimpleNamespace(quantization_config=None, hf_text_config=text, hf_config=text)
    object.__setattr__(asked, "model_config", model)
    with set_current_vllm_config(asked):
        return {" | ".join(one): decided(*one) for one in LAYERS}


# The page.

_HEAD = """# Which experts vLLM 0.33 chooses behind this exchange, and what travels to them

Made by `.venv-vllm33/bin/python -m tests.integration.vllm.selection`, after `make vllm33-env`.
vLLM chooses with `--moe-backend auto` and 8 expert-parallel ranks, on a GPU and with packages that
it is made to believe in. No GPU has run any of it. vLLM finds FlashInfer only if
`flashinfer-cubin`, or `nvcc` and `ninja`, are installed too.
"""


def page() -> str:
    """The page, from a new process for each machine with and without FlashInfer."""
    columns: dict[str, list[dict[str, str]]] = {}
    for capability, gpus in MACHINES.items():
        for has in ("with", "without"):
            command = [sys.executable, "-m", __spec__.name, capability, has]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[-4000:])
            columns.setdefault(gpus, []).append(json.loads(done.stdout.splitlines()[-1]))
    return page_of(columns)


def page_of(columns: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """Write the page of what was decided; machines that decide alike share a table.

    Args:
        columns: of each machine, the decisions with FlashInfer and without it.
    """
    tables: dict[str, list[str]] = {}
    for gpus, (with_it, without) in columns.items():
        lines = ["| model | format | with | FlashInfer | no FlashInfer |", "|---|---|---|---|---|"]
        for layer, one in with_it.items():
            other = "the same" if without[layer] == one else without[layer]
            lines.append(f"| {layer} | {one} | {other} |".replace("|  |", "| |"))
        tables.setdefault("\n".join(lines), []).append(gpus)
    parts = [f"## {', '.join(gpus)}\n\n{table}\n" for table, gpus in tables.items()]
    return "\n".join([_HEAD, *parts])


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(page(), end="")
    else:
        print(json.dumps(on_machine(sys.argv[1], flashinfer=sys.argv[2] == "with")))
