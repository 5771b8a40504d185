"""Stand-ins for the hub's models: what vLLM's tests need of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from tests.upstream import models
from tests.upstream.adapt import drafts, engines

MOE = "ibm-research/PowerMoE-3b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return models.redirect_file(folder).parent


def _redirects(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / models.REDIRECT_FILE).read_text("utf-8"))
    return found


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def test_vllm_takes_the_folder_for_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.transformers_utils import utils

    monkeypatch.setenv("VLLM_MODEL_REDIRECT_PATH", str(folder / models.REDIRECT_FILE))
    utils.maybe_model_redirect.cache_clear()
    try:
        found = {name: utils.maybe_model_redirect(name) for name in models.STAND_INS}
        assert utils.maybe_model_redirect("nobody/knows") == "nobody/knows"
    finally:
        utils.maybe_model_redirect.cache_clear()
    assert found == _redirects(folder)


def test_classes_and_tokenizers_fit_and_experts_are_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _redirects(folder)
    monkeypatch.setattr("vllm.transformers_utils.utils.maybe_model_redirect", found.get)
    for name, stand_in in models.STAND_INS.items():
        config = json.loads((Path(found[name]) / "config.json").read_text("utf-8"))
        tokenizer = _tokenizer(found[name])
        if stand_in.pictures:
            assert config["image_token_index"] == tokenizer.convert_tokens_to_ids("<image>")
            config = config["text_config"]
        assert config["model_type"] == stand_in.model_type
        assert config["vocab_size"] == len(tokenizer)
        assert config["eos_token_id"] == tokenizer.eos_token_id
        if not stand_in.pictures:
            tensors = load_file(str(Path(found[name]) / "model.safetensors"))
            assert {one.dtype for one in tensors.values()} == {getattr(torch, stand_in.dtype)}
        assert engines.has_experts(name) is ("moe" in stand_in.model_type)


def test_every_token_is_text_and_prompts_come_back(folder: Path) -> None:
    tokenizer = _tokenizer(_redirects(folder)[MOE])
    others = set(range(len(tokenizer))) - {tokenizer.eos_token_id}
    assert all(tokenizer.decode([token]).isascii() for token in others)
    assert all(tokenizer.decode([token]) for token in others)
    prompt = "This is a test of data parallel (0)!\n"
    tokens = tokenizer(prompt)["input_ids"]
    assert tokenizer.eos_token_id not in tokens
    assert tokenizer.decode(tokens) == prompt


def test_experts_differ(folder: Path) -> None:
    """Of equal experts, a token sent to the wrong one would come back right."""
    tensors = load_file(str(Path(_redirects(folder)[MOE]) / "model.safetensors"))
    experts = [one for name, one in tensors.items() if "output_linear" in name]
    assert experts
    for weights in experts:
        first, *rest = weights.flatten(1)
        assert all(not torch.equal(first, other) for other in rest)


def test_requests_end_by_their_length(folder: Path) -> None:
    """One that ends with its first token fails tests that want text."""
    from transformers import AutoModelForCausalLM

    path = _redirects(folder)[MOE]
    tokenizer = _tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = tokenizer("Hello, my name is nobody in particular", return_tensors="pt")
    with torch.no_grad():
        odds = model(**prompt).logits.float().softmax(dim=-1)
    assert odds[..., tokenizer.eos_token_id].max() < 1e-3
    # Neither is every position the same token's, whatever was read.
    assert len(odds.argmax(dim=-1).unique()) > 3


def test_models_are_written_once_and_anew_when_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "hmellor/tiny-random-LlamaForCausalLM"
    monkeypatch.setattr(models, "STAND_INS", {name: models.STAND_INS[name]})
    first = models.redirect_file(tmp_path).parent
    weights = first / name / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert models.redirect_file(tmp_path).parent == first
    assert weights.stat().st_mtime_ns == before
    changed = tmp_path / "models.py"
    changed.write_text("another text")
    monkeypatch.setattr(models, "__file__", str(changed))
    assert models.redirect_file(tmp_path).parent != first


def test_an_eagle_head_shares_what_its_target_has(folder: Path) -> None:
    names = _redirects(folder)
    draft = names["yuhuili/EAGLE-LLaMA3.1-Instruct-8B"]
    target = names["meta-llama/Llama-3.1-8B-Instruct"]
    tensors = load_file(str(Path(draft) / "model.safetensors"))
    sizes = [
        json.loads((Path(path) / "config.json").read_text("utf-8"))["hidden_size"]
        for path in (draft, target)
    ]
    assert sizes[0] == sizes[1]
    assert tensors["fc.weight"].shape == (sizes[0], 2 * sizes[0])
    assert {name.split(".")[0] for name in tensors} == {"fc", "layers"}
    assert "layers.0.input_layernorm.weight" not in tensors


def test_the_toy_with_drafts_can_be_read(tmp_path: Path) -> None:
    """By those who will: a tokenizer whose every token the model has."""
    folder = drafts.write(tmp_path / "toy", "bfloat16")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["torch_dtype"] == "bfloat16"
    assert config["max_position_embeddings"] > 2048
    assert config["num_nextn_predict_layers"] == 1
    tokenizer = _tokenizer(str(folder))
    ids = tokenizer("The capital of France is")["input_ids"]
    assert ids
    assert max(ids) < len(tokenizer) <= config["vocab_size"]
