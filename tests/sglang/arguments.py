"""Arguments of SGLang servers that are resolved on a machine without a GPU, and never started."""

from __future__ import annotations

import json
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GROUP = "sglang.srt.plugins"

#: A model that SGLang takes by its configuration alone.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder with the configuration of the model."""
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}), encoding="utf-8")
    return folder


def entry_point() -> str:
    """What pyproject.toml says of the group that SGLang reads."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'entry-points\."{re.escape(GROUP)}"\]\nmoe_nvlink = "([^"]+)"', text)
    assert found is not None, f"pyproject.toml has no entry point in {GROUP}"
    return found[1]


def write_entry_points(folder: Path) -> Path:
    """A folder for sys.path in which `importlib.metadata` finds the plugin of this checkout.

    What is installed beside SGLang may be another checkout's.
    """
    info = folder / "moe_nvlink_tests-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-nvlink-tests\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nmoe_nvlink = {entry_point()}\n")
    return folder


def cpu_environment(environ: MutableMapping[str, str]) -> None:
    """What SGLang asks for to serve on two CPU ranks."""
    environ["SGLANG_USE_CPU_ENGINE"] = "1"
    environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"


def server_args(**values: Any) -> Any:
    """ServerArgs of two CPU ranks, not resolved; ours is the backend if none is named."""
    from sglang.srt.server_args import ServerArgs

    chosen = {
        "tp_size": 2,
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "moe_a2a_backend": "moe_nvlink",
        **values,
    }
    return ServerArgs(**chosen)
