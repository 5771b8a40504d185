"""What a worker of ours does with adapters (LoRA): it refuses some, and keeps the others.

vLLM loads an adapter on every data-parallel rank. Afterwards it may remove adapters on one rank
alone: when a newer adapter takes the slot, or when the rank, without requests, runs a dummy batch.
Without adapters on experts that costs time at most, because vLLM loads the adapter again for the
next request. Experts need the adapters of other ranks' requests. So our worker lets no adapter take
a slot from another, and dummy batches remove none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.vllm.backend import BACKEND

from . import adapters


def guard(model_runner: Any) -> None:
    """Make the LoRA manager of a model runner refuse adapters that we cannot serve. Local.

    Args:
        model_runner: vLLM's, with its model loaded.
    """
    manager = getattr(model_runner, "lora_manager", None)
    if manager is None:
        return
    load = manager._load_adapter

    @functools.wraps(load)
    def load_served(lora_request: Any) -> Any:
        _refuse_more_than_slots(lora_request, manager)
        adapter = load(lora_request)
        _refuse_left_out_experts(lora_request, adapter, manager.lora_config)
        adapters.remember(lora_request.lora_int_id, lora_request.lora_name)
        return adapter

    manager._load_adapter = load_served


def _refuse_more_than_slots(request: Any, manager: Any) -> None:
    config = manager.lora_config
    loaded = manager.list_adapters()
    if not adapters.on_experts(config) or request.lora_int_id in loaded:
        return
    if len(loaded) >= config.max_loras:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND} cannot load adapter {request.lora_name!r}: --max-loras "
            f"is {config.max_loras}, and that many are loaded. Ranks would remove different ones, "
            "and experts need those of all ranks' requests. Start the server with a larger "
            "--max-loras."
        )


def _refuse_left_out_experts(request: Any, adapter: Any, config: Any) -> None:
    if adapters.on_experts(config):
        return
    of_experts = sorted(filter(adapters.is_of_experts, adapter.loras))
    if of_experts:
        raise UnsupportedError(
            f"--all2all-backend {BACKEND} cannot load adapter {request.lora_name!r}: it has "
            f"weights for experts ({of_experts[0]} and {len(of_experts) - 1} more), which "
            f"--lora-target-modules {' '.join(config.target_modules)} leaves out, so vLLM would "
            "silently serve it without them. Add experts to --lora-target-modules, or drop the "
            "flag."
        )


@contextlib.contextmanager
def keeping(model_runner: Any) -> Iterator[None]:
    """Surround a dummy batch of a rank without requests: its tokens have no adapter. Local.

    vLLM would load dummy adapters before the batch, give them to its tokens (the V2 runner), and
    remove every adapter after it.
    """
    if getattr(model_runner, "lora_config", None) is None:
        yield
        return
    model_runner._set_active_loras((0,), (0,), set())
    model_runner.maybe_dummy_run_with_lora = lambda *_args, **_kwargs: contextlib.nullcontext()
    try:
        yield
    finally:
        del model_runner.maybe_dummy_run_with_lora
