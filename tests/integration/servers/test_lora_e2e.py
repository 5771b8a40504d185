"""Adapters (LoRA) on real vLLM servers of two ranks: two of them and base requests, mixed.

One rank of vLLM's CPU build cannot serve adapters of a MoE model. So the expected tokens of an
adapter are those of one rank that serves the model with the adapter merged into its weights.
"""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_nvlink_plugin.integration.demo.server import SERVED_NAME, ServerError
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import TinyModel, write_checkpoint
from tests.integration.servers.servers import TIMEOUT_S, ForkedServer

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = TinyModel(architecture="qwen3_moe", num_layers=2, num_experts=8, top_k=3)
RANK, ALPHA = 4, 8
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
NAMES = (SERVED_NAME, "poems", "code")
#: Requests of each name.
NUM_REQUESTS = 6


class Asked(NamedTuple):
    """A request, and the tokens of one rank."""

    name: str
    prompt: list[int]
    length: int
    expected: list[int]


def _write_adapter(
    folder: Path, weights: dict[str, Any], targets: tuple[str, ...], seed: int
) -> None:
    """An adapter as PEFT writes it, for all layers of these names; changes the weights by it."""
    random_numbers = torch.Generator().manual_seed(seed)
    factors: dict[str, Any] = {}
    for name in list(weights):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets:
            continue
        rows, columns = weights[name].shape
        a = torch.randn(RANK, columns, generator=random_numbers) * columns**-0.5
        b = torch.randn(rows, RANK, generator=random_numbers) * RANK**-0.5
        factors[f"base_model.model.{module}.lora_A.weight"] = a
        factors[f"base_model.model.{module}.lora_B.weight"] = b
        weights[name] = weights[name] + ALPHA / RANK * b @ a
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")


def _one_rank(checkpoint: Path, name: str, asked: list[tuple[list[int], int]]) -> list[Asked]:
    server = ForkedServer(
        model=checkpoint,
        name=f"one rank {name} {checkpoint.name}",
        folder=checkpoint.parent,
        arguments=["--enforce-eager"],
        with_plugins=False,
    )
    with server:
        server.wait_until_ready()
        prompts, lengths = [prompt for prompt, _ in asked], [length for _, length in asked]
        answers = server.complete(prompts, max_tokens=lengths, concurrency=6)
    answered = zip(asked, answers, strict=True)
    return [Asked(name, *request, answer.token_ids) for request, answer in answered]


class Served(NamedTuple):
    """A base model and its adapters, by name, and requests with the tokens of one rank."""

    base: Path
    adapters: dict[str, Path]
    asked: list[Asked]

    @classmethod
    def made(cls, folder: Path, targets: tuple[str, ...]) -> Served:
        """Writes them, and asks one rank for each."""
        base = write_checkpoint(folder / SERVED_NAME, MODEL)
        draw = random.Random(3)
        adapters, asked = {}, []
        for seed, name in enumerate(NAMES):
            checkpoint = base
            if name != SERVED_NAME:
                weights = load_file(base / "model.safetensors")
                adapters[name] = folder / name
                _write_adapter(adapters[name], weights, targets, seed)
                checkpoint = folder / f"merged {name}"
                shutil.copytree(base, checkpoint)
                save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
            requests = [
                (draw.choices(range(MODEL.vocab_size), k=draw.randint(1, 40)), draw.randint(4, 16))
                for _ in range(NUM_REQUESTS)
            ]
            asked += _one_rank(checkpoint, name, requests)
        draw.shuffle(asked)
        return cls(base, adapters, asked)


class LoraServer(ForkedServer):
    """Two data-parallel ranks with our backend and adapters."""

    def __init__(self, served: Served, folder: Path, name: str, *arguments: str) -> None:
        super().__init__(
            model=served.base,
            name=name,
            folder=folder,
            arguments=[
                *("--data-parallel-size=2", "--enable-expert-parallel", "--enforce-eager"),
                *("--all2all-backend=moe_nvlink", "--enable-lora", "--max-lora-rank=8"),
                *("--max-loras=2", *arguments),
            ],
            environment={
                "MOE_NVLINK_TIMEOUT_S": str(TIMEOUT_S),
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            },
        )

    def load(self, name: str, path: Path) -> None:
        """Loads an adapter on all ranks; raises ServerError with the server's answer."""
        body = json.dumps({"lora_name": name, "lora_path": str(path)})
        status, text = self._request("POST", "/v1/load_lora_adapter", body, 120.0)
        if status != 200:
            raise ServerError(text)

    def answer(self, asked: Asked, rank: int | None = None) -> list[int]:
        """The tokens that follow a prompt."""
        body = {
            "model": asked.name,
            "prompt": asked.prompt,
            "max_tokens": asked.length,
            "temperature": 0.0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        reply = self._post("/v1/completions", body, 120.0, headers)
        tokens: list[int] = reply["choices"][0]["token_ids"]
        return tokens

    def differing(self, asked: list[Asked]) -> list[Asked]:
        """Requests, all at once, whose tokens are not those of one rank."""
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(self.answer, asked))
        return [one for one, tokens in zip(asked, answers, strict=True) if tokens != one.expected]


def _check(server: LoraServer, served: Served) -> None:
    """Two of each name one at a time, so that the other rank is idle; then all at once."""
    of_names = ([one for one in served.asked if one.name == name] for name in NAMES)
    for one in (one for asked in of_names for one in asked[:2]):
        for rank in range(2):
            assert server.answer(one, rank) == one.expected, (rank, one)
    assert server.differing(served.asked) == []


def test_adapters_on_experts(folder: Path) -> None:
    """And on attention. Loaded before and after the first requests; a third has no slot."""
    work = folder / "experts"
    served = Served.made(work, ATTENTION + EXPERTS)
    first, second = NAMES[1:]
    static = f"--lora-modules={first}={served.adapters[first]}"
    with LoraServer(served, work, "lora on experts", static) as server:
        server.wait_until_ready()
        of_first = [one for one in served.asked if one.name in (SERVED_NAME, first)]
        assert server.differing(of_first) == []
        server.load(second, served.adapters[second])
        _check(server, served)
        with pytest.raises(ServerError, match="--max-loras is 2, and that many are loaded"):
            server.load("third", served.adapters[first])
        _check(server, served)


def test_adapters_on_attention_only(folder: Path) -> None:
    """Experts are left out by the flag; adapters that have weights for them are refused."""
    work = folder / "attention"
    served = Served.made(work, ATTENTION)
    weights = load_file(served.base / "model.safetensors")
    with_experts = work / "with experts"
    _write_adapter(with_experts, weights, ("q_proj", "up_proj"), 7)
    flags = ["--lora-target-modules", *ATTENTION]
    with LoraServer(served, work, "lora on attention", *flags) as server:
        server.wait_until_ready()
        for name, path in served.adapters.items():
            server.load(name, path)
        _check(server, served)
        with pytest.raises(ServerError, match="weights for experts.*leaves out"):
            server.load("fourth", with_experts)
        _check(server, served)
