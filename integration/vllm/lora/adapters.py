"""Adapters (LoRA): what is refused, and how a rank knows the adapter of another rank's token.

Each rank of vLLM keeps adapters in slots of its own. With data parallelism one slot can hold
different adapters on two ranks. So the slot does not travel with a token, as it does in vLLM's own
all-gather. What travels is a number that every rank computes from the adapter's id and name. The
receiving rank looks up its own slot of the adapter with that number.

The numbers lie on the device. vLLM updates them before a step, and a CUDA graph that reads them
takes what they hold at each replay.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from moe_nvlink_plugin.errors import DisagreementError, UnsupportedError
from moe_nvlink_plugin.integration.vllm.backend import BACKEND
from moe_nvlink_plugin.integration.vllm.moe import features
from moe_nvlink_plugin.integration.vllm.moe.features import BASE, NUMBER_BYTES

#: What the table has for a slot without an adapter. No token has this number.
_EMPTY = -2

#: vLLM's id of an adapter -> its name, for all adapters that this process has loaded.
_names: dict[int, str] = {}


def on_experts(lora_config: Any) -> bool:
    """Return whether vLLM gives adapters to experts with this configuration. Local.

    Args:
        lora_config: vLLM's LoRAConfig, or None.
    """
    if lora_config is None:
        return False
    targets = lora_config.target_modules
    return targets is None or any(is_of_experts(target) for target in targets)


def is_of_experts(module: str) -> bool:
    """Return whether a module of a model, by its dotted name, is or belongs to routed experts."""
    return "experts" in module.split(".")


def problems(vllm_config: Any, *, worker_is_ours: bool) -> Iterator[str]:
    """Yield what LoRA cannot serve; nothing if it is off. Local.

    Args:
        vllm_config: vLLM's VllmConfig, which asks for our backend.
        worker_is_ours: whether workers will be of our class.
    """
    lora, parallel = vllm_config.lora_config, vllm_config.parallel_config
    if lora is not None and vllm_config.speculative_config is not None:
        yield "LoRA with drafts: remove --enable-lora or --speculative-config."
    if not on_experts(lora):
        return
    slices, others = parallel.tensor_parallel_size, "name other layers with --lora-target-modules"
    if slices > 1:
        yield (
            f"LoRA on experts with --tensor-parallel-size {slices}: experts get slices of the "
            f"batch, and vLLM does not slice the adapters. Set it to 1, or {others}."
        )
    if lora.fully_sharded_loras:
        yield f"LoRA on experts with --fully-sharded-loras: remove the flag, or {others}."
    if parallel.enable_eplb:
        yield (
            "LoRA on experts with --enable-eplb: experts move, and vLLM leaves their adapters "
            f"behind. Remove the flag, or {others}."
        )
    model = vllm_config.model_config
    if model is not None and model.enable_sleep_mode:
        yield (
            "LoRA on experts with --enable-sleep-mode: sleep at level 2 loses which adapter is in "
            f"which slot. Remove the flag, or {others}."
        )
    if not worker_is_ours:
        yield (
            f"LoRA on experts with --worker-cls {parallel.worker_cls}: its ranks would lose "
            f"adapters while they have no requests. Remove the flag, or {others}."
        )


def remember(adapter_id: int, name: str) -> None:
    """Note the name of an adapter that this process loads. Local."""
    _names[adapter_id] = name


def number_of(adapter_id: int) -> int:
    """Return the number of an adapter, of 31 bits; BASE for id 0, which vLLM gives base tokens."""
    if adapter_id <= 0:
        return BASE
    return zlib.crc32(f"{adapter_id} {_names.get(adapter_id, '')}".encode()) & 0x7FFF_FFFF


class AdapterNumbers:
    """The numbers of a step's tokens, and those of the adapters in this rank's slots.

    Args:
        max_tokens: most tokens of a step.
        num_slots: number of adapters that can be active (--max-loras).
        device: where the rank's layers work.
    """

    def __init__(self, max_tokens: int, num_slots: int, device: torch.device | str) -> None:
        self._of_tokens = torch.full((max_tokens,), BASE, dtype=torch.int32, device=device)
        self._of_slots = torch.full((num_slots,), _EMPTY, dtype=torch.int32, device=device)

    def update(self, of_tokens: Sequence[int], of_slots: Sequence[int | None]) -> None:
        """Take the next step's adapters. Local.

        Args:
            of_tokens: id of each token's adapter, 0 for none. Tokens beyond them have none.
            of_slots: id of the adapter in each slot, or None.
        """
        known = {adapter: number_of(adapter) for adapter in set(of_tokens)}
        numbers = torch.tensor([known[adapter] for adapter in of_tokens], dtype=torch.int32)
        self._of_tokens.fill_(BASE)[: len(numbers)].copy_(numbers)
        slots = [_EMPTY if adapter is None else number_of(adapter) for adapter in of_slots]
        self._of_slots.copy_(torch.tensor(slots, dtype=torch.int32))

    def of_tokens(self, count: int) -> torch.Tensor:
        """Return `[count]` int32: the numbers of the step's first tokens. Local."""
        return self._of_tokens[:count]

    def slots_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return `[rows]` int32: this rank's slots of adapters. Local; capturable.

        Args:
            numbers: `[rows]` int32, numbers that travelled with tokens.

        Raises:
            DisagreementError: this rank has no adapter with one of the numbers. A CUDA rank stops
                with a device-side assertion instead, because it may not wait for the device.
        """
        matches = numbers.unsqueeze(1) == self._of_slots
        slots = torch.where(matches.any(1), matches.int().argmax(1), BASE).to(torch.int32)
        known = ((slots != BASE) | (numbers == BASE)).all()
        if known.device.type == "cuda":
            torch._assert_async(known, "moe_nvlink: tokens of an adapter this rank has not loaded")
        elif not known:
            raise DisagreementError(
                "tokens arrived with an adapter (LoRA) that this rank has not loaded. This process "
                f"has loaded: {', '.join(_names.values()) or 'none'}. Load each adapter on all "
                "data-parallel ranks, in the same order, before a request names it: by "
                "--lora-modules, or by /v1/load_lora_adapter at every API server."
            )
        return slots


class AdaptersOnExperts(features.Feature):
    """Lets the numbers of adapters travel to the experts of a layer."""

    payload_bytes = (NUMBER_BYTES,)

    def is_on(self, vllm_config: Any, moe_config: Any) -> bool:
        """Return whether the layer's experts get adapters. Local."""
        return on_experts(getattr(vllm_config, "lora_config", None))

    def choose_experts(self, quant_method: Any) -> None:
        """Give CPU ranks experts that compute adapters. Local; raises as `take_adapters`."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from .cpu_experts import take_adapters

            take_adapters(quant_method)

    def check(self, experts: Any, layer: Any) -> None:
        """Raise UnsupportedError for experts that take no adapters. Local."""
        if not experts.supports_lora():
            raise UnsupportedError(
                f"--all2all-backend {BACKEND}: {type(experts).__name__} of {layer.layer_name} "
                "takes no adapters (LoRA). Choose other experts with --moe-backend (triton is "
                "one), or name other layers, such as q_proj, with --lora-target-modules."
            )

    @contextlib.contextmanager
    def in_use(self, experts: Any) -> Iterator[None]:
        """Surround a look at experts with a context of LoRA, as vLLM's layer gives one. Local."""
        experts.set_lora_context(object())
        try:
            yield
        finally:
            experts.set_lora_context(None)


def put_in_place() -> None:
    """Let layers have adapters on their experts. Local; idempotent."""
    features.add(AdaptersOnExperts())
