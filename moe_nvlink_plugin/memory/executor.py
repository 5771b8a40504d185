"""What a workspace asks of the executor that launches kernels on its memory."""

from __future__ import annotations

from typing import Protocol

import torch


class FaultWords(Protocol):
    """One word per channel that a kernel writes a fault into and the host reads at any time."""

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        """Tells the kernels of a channel, by its LocalControl bytes, where its word is."""
        ...

    def read(self, channel: int) -> int:
        """The word (epoch_flags.h, pack_fault), or 0. Waits for nothing."""
        ...

    def leak(self) -> None:
        """Keeps the words until the process ends."""
        ...


class Executor(Protocol):
    """What one workspace's kernels are launched with."""

    @property
    def captured(self) -> bool:
        """Whether a launch has been captured into a CUDA graph."""
        ...

    def is_capturing(self) -> bool:
        """Whether launches of this thread now go into a CUDA graph."""
        ...

    def fault_words(self, count: int) -> FaultWords:
        """Words that are 0."""
        ...
