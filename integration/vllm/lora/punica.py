"""vLLM's punica wrappers, extended: they know the adapter (LoRA) of every token by its number.

vLLM's LoRA manager tells its wrapper before a step which adapter each token has, and which adapter
is in which slot. Our wrappers also keep both as numbers that mean the same on every rank
(`adapters`).

Both of vLLM's wrappers assume that the tokens of a step are those of this rank:

- The GPU's computes for experts only the adapters in this rank's batch, and none at all if that
  batch has none. With data parallelism other ranks' tokens would silently lose their adapters. For
  experts our wrapper names every slot instead.
- The CPU's computes tokens without an adapter with the adapter in the last slot, because it indexes
  slots by -1. In our wrapper such rows stay as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from moe_nvlink_plugin.integration import overrides

from .adapters import AdapterNumbers

#: Class that vLLM's platforms choose -> name of our subclass.
_OURS = {
    "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU": "MoeNvlinkPunicaWrapperCPU",
    "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU": "MoeNvlinkPunicaWrapperGPU",
}

if TYPE_CHECKING:
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase as _Base
else:
    _Base = object


def extended(qualified: str) -> str:
    """Return the name of our subclass of a wrapper, or the name itself if there is none. Local."""
    return f"{__name__}.{_OURS[qualified]}" if qualified in _OURS else qualified


class KnowsNumbers(_Base):
    """Mixin for one of vLLM's wrappers: keeps the numbers of the step's adapters."""

    @overrides
    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        num_slots = kwargs["lora_config"].max_loras
        self.adapter_numbers = AdapterNumbers(max_num_batched_tokens, num_slots, device)

    @overrides
    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Take the next step's adapters, as vLLM does, and note their numbers. Local."""
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        self.adapter_numbers.update(mapping.index_mapping, lora_index_to_id)


class KeepsBaseRows(KnowsNumbers):
    """Mixin for the CPU's wrapper: rows of tokens without an adapter stay as they were."""

    @overrides
    def add_lora_linear(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add what adapters add to a linear layer's output. Local."""
        if not self.no_lora:
            before = y.clone()
            super().add_lora_linear(y, *args, **kwargs)
            _restore(y, before, self.token_lora_indices)

    @overrides
    def add_lora_embedding(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add what adapters add to embeddings. Local."""
        if not self.no_lora:
            before = y.clone()
            super().add_lora_embedding(y, *args, **kwargs)
            _restore(y, before, self.token_lora_indices)

    @overrides
    def add_lora_logits(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add what adapters add to logits. Local."""
        if not self.no_lora:
            before = y.clone()
            super().add_lora_logits(y, *args, **kwargs)
            _restore(y, before, self.sampler_indices)


class NamesEverySlot(KnowsNumbers):
    """Mixin for the GPU's wrapper: for experts, every adapter counts as one of the batch."""

    token_mapping_meta: Any

    @overrides
    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        num_slots = kwargs["lora_config"].max_loras
        self._every_slot = type(self.token_mapping_meta).make(
            num_slots, max_num_batched_tokens, device=device
        )
        ids = [*range(num_slots), -1]
        self._every_slot.active_lora_ids.copy_(torch.tensor(ids, dtype=torch.int32))
        self._every_slot.no_lora_flag_cpu.fill_(False)
        self._every_slot.num_active_loras_cpu.fill_(len(ids))

    @overrides
    def moe_lora_align_block_size(self, *args: Any, **kwargs: Any) -> Any:
        """Sort the experts' rows by adapter, of every slot. Local; capturable."""
        with self._of_every_rank():
            return super().moe_lora_align_block_size(*args, **kwargs)

    @overrides
    def add_lora_fused_moe(self, *args: Any, **kwargs: Any) -> None:
        """Add what adapters add to the experts' rows, of every slot. Local; capturable."""
        with self._of_every_rank():
            super().add_lora_fused_moe(*args, **kwargs)

    @contextlib.contextmanager
    def _of_every_rank(self) -> Iterator[None]:
        of_batch, self.token_mapping_meta = self.token_mapping_meta, self._every_slot
        try:
            yield
        finally:
            self.token_mapping_meta = of_batch


def _restore(y: torch.Tensor, before: torch.Tensor, slots: torch.Tensor) -> None:
    """Give rows of `[..., columns]` y that have no slot the values from before. Local."""
    rows, old = y.view(-1, y.shape[-1]), before.view(-1, y.shape[-1])
    rows.copy_(torch.where((slots < 0).unsqueeze(1), old, rows))


_MIXINS = {"CPU": KeepsBaseRows, "GPU": NamesEverySlot}


def __getattr__(name: str) -> Any:
    """Build our class when vLLM resolves it; not every machine can import its base."""
    for qualified, ours in _OURS.items():
        if name == ours:
            from vllm.utils.import_utils import resolve_obj_by_qualname

            base = resolve_obj_by_qualname(qualified)
            cls = type(name, (_MIXINS[name[-3:]], base), {"__module__": __name__})
            globals()[name] = cls
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
