"""What a workspace needs of the executor that launches kernels on its memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class FaultWords(Protocol):
    """One word per channel: a kernel writes a fault into it, and the host reads it at any time.

    Attributes:
        words: channel -> word (pack_fault of epoch_flags.h); 0: no fault.
    """

    words: Any

    def connect(self, channel: int, local_control: torch.Tensor) -> None:
        """Write the address of a channel's word into the channel's LocalControl. Local.

        Args:
            channel: number of the channel.
            local_control: bytes of the channel's struct LocalControl of args.h.
        """
        ...

    def clear(self, channel: int) -> None:
        """Set the word to 0. Local; no verb of the channel runs."""
        ...

    def leak(self) -> None:
        """Keep the words until the process ends. Local."""
        ...


class WordReader(Protocol):
    """Reads words of mapped memory at any time, also while kernels write them."""

    def read(self, address: int, count: int) -> list[int]:
        """Return `count` words of 8 bytes. Local; any thread.

        It waits for no launch and breaks no capture of a CUDA graph.
        """
        ...


class WorkspaceExecutor(Protocol):
    """The part of an executor that a workspace uses."""

    @property
    def captured(self) -> bool:
        """Whether a launch has been captured into a CUDA graph."""
        ...

    def is_capturing(self) -> bool:
        """Whether launches of this thread now go into a CUDA graph."""
        ...

    def is_in_handler(self) -> bool:
        """Whether a signal handler of Python's runs in this thread while a launch of it waits."""
        ...

    def synchronize(self) -> None:
        """Wait for this thread's stream. Local; not capturable."""
        ...

    def fault_words(self, count: int) -> FaultWords:
        """Allocate `count` words, all 0. Local."""
        ...

    def word_reader(self, most: int) -> WordReader:
        """Make a reader of up to `most` words at a time. Local."""
        ...
