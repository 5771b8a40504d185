"""Tiny random checkpoints that vLLM loads like real ones: `config.json` beside `model.safetensors`.

vLLM's own dummy weights are not enough here. They reseed every parameter alike, so the shards of
all ranks hold equal experts, and an exchange that mixes them up would still give the right tokens.
These files draw every tensor from one seeded stream, and their experts decide the next token.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: Routed experts add about as much to the residual stream as it already holds (see `_Weights.mlp`).
EXPERT_GAIN = 3.0
#: Scale of the query and key norms.
ATTENTION_SHARPNESS = 2.0
#: Rows and columns of a block of FP8 weights; it divides an expert's sizes.
FP8_BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The sizes of one tiny model; every count is small enough for a laptop, none is trivial.

    num_mtp_layers: draft (multi-token prediction) layers behind the model's own; glm4_moe only.
    block_gain: what attention and MLPs add to the residual stream, times this. Draft layers read
    the embedding of the last token alone, so the smaller it is, the more drafts are accepted.
    latent_size, rope_head_dim: of multi-head latent attention, whose queries and whose keys and
    values go through so many numbers, and whose heads have so many numbers with a position beside
    `head_dim` without; deepseek_v3 only.
    dtype: of the weights, float32 or bfloat16; also what `config.json` says.
    """

    architecture: str
    num_layers: int
    num_experts: int
    top_k: int
    num_dense_layers: int = 0
    num_shared_experts: int = 0
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    vocab_size: int = 512
    max_position_embeddings: int = 1024
    num_mtp_layers: int = 0
    block_gain: float = 1.0
    latent_size: int = 0
    rope_head_dim: int = 0
    dtype: torch.dtype = torch.float32

    def config(self) -> dict[str, Any]:
        """`config.json` in the words of the architecture."""
        return CONFIGS[self.architecture](self)


def _common_config(model: TinyModel) -> dict[str, Any]:
    return {
        "model_type": model.architecture,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "moe_intermediate_size": model.moe_intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_experts_per_tok": model.top_k,
        "norm_topk_prob": True,
    }


def _qwen3_moe_config(model: TinyModel) -> dict[str, Any]:
    return _common_config(model) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": model.num_experts,
        "mlp_only_layers": list(range(model.num_dense_layers)),
        "decoder_sparse_step": 1,
    }


def _qwen2_moe_config(model: TinyModel) -> dict[str, Any]:
    return _qwen3_moe_config(model) | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": model.num_shared_experts * model.moe_intermediate_size,
    }


def _glm4_moe_config(model: TinyModel) -> dict[str, Any]:
    return _common_config(model) | {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.num_shared_experts,
        "first_k_dense_replace": model.num_dense_layers,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": model.num_mtp_layers,
    }


def _deepseek_v3_config(model: TinyModel) -> dict[str, Any]:
    return _common_config(model) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": model.latent_size,
        "kv_lora_rank": model.latent_size,
        "qk_nope_head_dim": model.head_dim,
        "qk_rope_head_dim": model.rope_head_dim,
        "v_head_dim": model.head_dim,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.num_shared_experts,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_layer_freq": 1,
        "n_group": 4,
        "topk_group": 2,
        # SGLang's CPU engine knows no other angles for latent attention.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": model.max_position_embeddings // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
    }


def _gpt_oss_config(model: TinyModel) -> dict[str, Any]:
    return _common_config(model) | {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": model.num_experts,
        "intermediate_size": model.moe_intermediate_size,
        "attention_bias": True,
        "sliding_window": 16,
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(model.num_layers)
        ],
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": model.max_position_embeddings // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }


CONFIGS: dict[str, Callable[[TinyModel], dict[str, Any]]] = {
    "qwen2_moe": _qwen2_moe_config,
    "qwen3_moe": _qwen3_moe_config,
    "glm4_moe": _glm4_moe_config,
    "deepseek_v3": _deepseek_v3_config,
    "gpt_oss": _gpt_oss_config,
}

#: Expert counts divide by 2 and 4, because vLLM wants equal shards; the second model's counts are
#: no powers of two.
MODELS: dict[str, TinyModel] = {
    "qwen3_moe": TinyModel(architecture="qwen3_moe", num_layers=3, num_experts=16, top_k=4),
    "glm4_moe": TinyModel(
        architecture="glm4_moe",
        num_layers=3,
        num_experts=12,
        top_k=3,
        num_dense_layers=1,
        num_shared_experts=1,
    ),
    "gpt_oss": TinyModel(architecture="gpt_oss", num_layers=3, num_experts=8, top_k=2),
}

#: Latent attention, and experts in four groups, of which a token takes two. On CPU, vLLM's latent
#: attention of a row depends on the batch; with VLLM_MLA_DISABLE=1 vLLM computes the same by heads.
DEEPSEEK_V3 = TinyModel(
    architecture="deepseek_v3",
    num_layers=3,
    num_experts=12,
    top_k=3,
    num_dense_layers=1,
    num_shared_experts=1,
    latent_size=64,
    rope_head_dim=16,
)

#: A shared expert with a gate. SGLang adds it by a kernel of Triton's, on CPUs as well.
QWEN2 = TinyModel(
    architecture="qwen2_moe", num_layers=2, num_experts=8, top_k=2, num_shared_experts=1
)

#: A model with a draft layer. Its vocabulary is no multiple of 16 and its last shard of 4 is short.
MTP_MODEL = TinyModel(
    architecture="glm4_moe",
    num_layers=3,
    num_experts=12,
    top_k=3,
    num_dense_layers=1,
    num_shared_experts=1,
    vocab_size=500,
    num_mtp_layers=1,
    block_gain=0.05,
)


class _Weights:
    """Collects named tensors, all drawn in order from one seeded stream."""

    def __init__(self, model: TinyModel, seed: int) -> None:
        self._model = model
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int, std: float) -> None:
        """A tensor of independent normal values."""
        drawn = torch.randn(*shape, generator=self._generator) * std
        # Cast at once: all of a large model in float32 would need twice the memory.
        self.tensors[name] = drawn.to(self._model.dtype)

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """A `[rows, columns]` projection: the variance of its input goes out times gain squared."""
        self.normal(f"{name}.weight", rows, columns, std=gain * columns**-0.5)

    def norm(self, name: str, size: int, scale: float = 1.0) -> None:
        """An RMS norm whose weights lie around `scale`, not all alike."""
        noise = torch.randn(size, generator=self._generator)
        self.tensors[f"{name}.weight"] = (scale * (1.0 + 0.1 * noise)).to(self._model.dtype)

    def attention(self, name: str) -> None:
        """Projections and the per-head norms of query and key, or the latent ones."""
        model = self._model
        if model.latent_size:
            self.latent_attention(name)
            return
        queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.linear(f"{name}.q_proj", queries, model.hidden_size)
        self.linear(f"{name}.k_proj", keys, model.hidden_size)
        self.linear(f"{name}.v_proj", keys, model.hidden_size, gain=2.0)
        self.linear(f"{name}.o_proj", model.hidden_size, queries, gain=2.0 * model.block_gain)
        if model.architecture == "gpt_oss":
            for one, size in (("q", queries), ("k", keys), ("v", keys), ("o", model.hidden_size)):
                self.normal(f"{name}.{one}_proj.bias", size, std=0.1)
            self.normal(f"{name}.sinks", model.num_heads, std=1.0)
            return
        if model.architecture == "qwen2_moe":
            # Sharp as below, without norms.
            for one, size in (("q", queries), ("k", keys), ("v", keys)):
                self.normal(f"{name}.{one}_proj.bias", size, std=ATTENTION_SHARPNESS)
            return
        # Sharp attention: diffuse heads average the past away, and outputs fall into short cycles.
        self.norm(f"{name}.q_norm", model.head_dim, scale=ATTENTION_SHARPNESS)
        self.norm(f"{name}.k_norm", model.head_dim, scale=ATTENTION_SHARPNESS)

    def latent_attention(self, name: str) -> None:
        """Two projections in a row for queries, and for keys and values, a norm in between."""
        model = self._model
        latent, width = model.latent_size, model.head_dim + model.rope_head_dim
        self.linear(f"{name}.q_a_proj", latent, model.hidden_size)
        self.norm(f"{name}.q_a_layernorm", latent, scale=ATTENTION_SHARPNESS)
        self.linear(f"{name}.q_b_proj", model.num_heads * width, latent)
        self.linear(f"{name}.kv_a_proj_with_mqa", latent + model.rope_head_dim, model.hidden_size)
        self.norm(f"{name}.kv_a_layernorm", latent, scale=ATTENTION_SHARPNESS)
        self.linear(f"{name}.kv_b_proj", model.num_heads * 2 * model.head_dim, latent)
        values = model.num_heads * model.head_dim
        self.linear(f"{name}.o_proj", model.hidden_size, values, gain=2.0 * model.block_gain)

    def mlp(self, name: str, intermediate_size: int, gain: float = 1.0) -> None:
        """One gated MLP: a dense layer, a shared expert or a routed expert."""
        hidden_size = self._model.hidden_size
        gain *= self._model.block_gain
        self.linear(f"{name}.gate_proj", intermediate_size, hidden_size)
        self.linear(f"{name}.up_proj", intermediate_size, hidden_size)
        self.linear(f"{name}.down_proj", hidden_size, intermediate_size, gain=gain)

    def moe(self, name: str) -> None:
        """Router, routed experts, and the shared expert where the architecture has one."""
        model = self._model
        if model.architecture == "gpt_oss":
            self.fused_moe(name)
            return
        self.linear(f"{name}.gate", model.num_experts, model.hidden_size, gain=2.0)
        for expert in range(model.num_experts):
            self.mlp(f"{name}.experts.{expert}", model.moe_intermediate_size, gain=EXPERT_GAIN)
        if model.architecture in ("glm4_moe", "deepseek_v3"):
            self.normal(f"{name}.gate.e_score_correction_bias", model.num_experts, std=0.1)
        if model.num_shared_experts:
            size = model.moe_intermediate_size * model.num_shared_experts
            gated = model.architecture == "qwen2_moe"
            self.mlp(f"{name}.shared_expert" if gated else f"{name}.shared_experts", size)
            if gated:
                self.linear(f"{name}.shared_expert_gate", 1, model.hidden_size)

    def fused_moe(self, name: str) -> None:
        """Router and experts of GPT-OSS: one tensor for all experts, transposed, with biases."""
        model = self._model
        experts, width, inner = model.num_experts, model.hidden_size, model.moe_intermediate_size
        self.linear(f"{name}.router", experts, width, gain=2.0)
        self.normal(f"{name}.router.bias", experts, std=0.1)
        down_std = EXPERT_GAIN * model.block_gain * inner**-0.5
        for projection, rows, columns, std in (
            ("gate_up_proj", width, 2 * inner, width**-0.5),
            ("down_proj", inner, width, down_std),
        ):
            self.normal(f"{name}.experts.{projection}", experts, rows, columns, std=std)
            self.normal(f"{name}.experts.{projection}_bias", experts, columns, std=0.1)

    def whole_model(self) -> dict[str, torch.Tensor]:
        """Every tensor of the model under its Hugging Face name."""
        model = self._model
        self.normal("model.embed_tokens.weight", model.vocab_size, model.hidden_size, std=1.0)
        for layer in range(model.num_layers):
            self.layer(f"model.layers.{layer}", is_dense=layer < model.num_dense_layers)
        self.norm("model.norm", model.hidden_size)
        self.linear("lm_head", model.vocab_size, model.hidden_size, gain=4.0)
        for layer in range(model.num_layers, model.num_layers + model.num_mtp_layers):
            self.mtp_layer(f"model.layers.{layer}")
        return self.tensors

    def layer(self, name: str, *, is_dense: bool) -> None:
        """Norms, attention, and a dense MLP or the experts."""
        size = self._model.hidden_size
        self.norm(f"{name}.input_layernorm", size)
        self.attention(f"{name}.self_attn")
        self.norm(f"{name}.post_attention_layernorm", size)
        if is_dense:
            self.mlp(f"{name}.mlp", self._model.intermediate_size)
        else:
            self.moe(f"{name}.mlp")

    def mtp_layer(self, name: str) -> None:
        """A draft layer: the last token's embedding passes, the target's hidden state does not."""
        size = self._model.hidden_size
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            self.norm(f"{name}.{norm}", size)
        self.tensors[f"{name}.eh_proj.weight"] = torch.eye(size, 2 * size, dtype=self._model.dtype)
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        for own, original in copies.items():
            self.tensors[f"{name}.{own}.weight"] = self.tensors[f"{original}.weight"].clone()
        self.layer(name, is_dense=False)


class Experts(enum.Enum):
    """In which form a checkpoint holds the weights of its routed experts."""

    FLOAT = enum.auto()
    #: e4m3 in blocks of 128 x 128, each with an fp32 scale: `quant_method` fp8 of Hugging Face.
    FP8 = enum.auto()
    #: The numbers that FP8 stands for, as floats.
    FP8_RESTORED = enum.auto()


def write_checkpoint(
    folder: Path,
    model: str | TinyModel = "qwen3_moe",
    *,
    seed: int = 0,
    experts: Experts = Experts.FLOAT,
) -> Path:
    """Write the tiny checkpoint of `model` (a key of MODELS, or sizes) into `folder`; return it.

    The same seed gives the same bytes. Each file is replaced in one step, so that a process reading
    the folder meanwhile never sees half a file. Raises ValueError for an unknown architecture.
    """
    if isinstance(model, str):
        if model not in MODELS:
            raise ValueError(f"no tiny model {model!r}; choose one of {sorted(MODELS)}")
        model = MODELS[model]
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = _Weights(model, seed).whole_model(), model.config()
    if experts is not Experts.FLOAT:
        tensors = _with_fp8_experts(tensors, restored=experts is Experts.FP8_RESTORED)
    if experts is Experts.FP8:
        config["quantization_config"] = _fp8_config(tensors)
    _replace(
        folder / "model.safetensors",
        lambda path: save_file(tensors, path, metadata={"format": "pt"}),
    )
    text = json.dumps(config, indent=2) + "\n"
    _replace(folder / "config.json", lambda path: Path(path).write_text(text, encoding="utf-8"))
    return folder


def _is_routed_expert(name: str) -> bool:
    return ".mlp.experts." in name


def _with_fp8_experts(
    tensors: dict[str, torch.Tensor], *, restored: bool
) -> dict[str, torch.Tensor]:
    """The tensors with every routed expert's weight `[rows, columns]` cast in blocks."""
    made = {name: one for name, one in tensors.items() if not _is_routed_expert(name)}
    for name in tensors.keys() - made.keys():
        weight = tensors[name]
        rows, columns = (size // FP8_BLOCK for size in weight.shape)
        blocks = weight.float().view(rows, FP8_BLOCK, columns, FP8_BLOCK)
        scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        cast = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        if restored:
            made[name] = (cast.float() * scales[:, None, :, None]).view_as(weight).to(weight.dtype)
        else:
            made[name] = cast.view_as(weight)
            made[f"{name}_scale_inv"] = scales
    return made


def _fp8_config(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`quantization_config`, with every layer but the routed experts left as it is."""
    others = (name for name in tensors if not _is_routed_expert(name))
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in others),
    }


def _replace(target: Path, write: Callable[[str], object]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        path = os.path.join(scratch, target.name)
        write(path)
        os.replace(path, target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: write one checkpoint."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", choices=sorted(MODELS), default="qwen3_moe")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(write_checkpoint(options.folder, options.architecture, seed=options.seed))


if __name__ == "__main__":
    main()
