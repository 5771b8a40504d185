"""Exceptions of this package. A message says what is wrong, what is allowed and what to do."""

from __future__ import annotations


class MoeNvlinkError(Exception):
    """Base class of all errors of this package."""


class ConfigError(MoeNvlinkError, ValueError):
    """A configuration value is out of range. Nothing was allocated."""


class InputError(MoeNvlinkError, ValueError):
    """A tensor that a verb got has a wrong shape, dtype, device or layout.

    The verb raises it before it touches memory. The exchange stays usable if every rank then calls
    the same verb with valid tensors. One case differs: if only the kernel sees that a mask of
    active ranks leaves out its own rank, nothing was sent, but the exchange cannot be used
    afterwards.
    """


class DisagreementError(MoeNvlinkError):
    """The ranks' configurations differ.

    From `create`: every rank raises it, with every rank's value of each field that differs. From a
    verb: each rank that notices another geometry, or other rows, in the same round raises it, and
    names both ranks.
    """


class PeerError(MoeNvlinkError):
    """Another rank failed in a collective step or in a verb. Names that rank and its cause."""


class TransportError(MoeNvlinkError):
    """A rank could not create or map symmetric memory. What it had created is freed again."""


class DriverError(MoeNvlinkError):
    """A call of the CUDA driver failed.

    Attributes:
        call: name of the driver's function.
        status: name of the driver's status, such as "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, message: str, *, call: str, status: str) -> None:
        super().__init__(message)
        self.call = call
        self.status = status


class CompileError(MoeNvlinkError):
    """A kernel did not compile. The message contains the compiler's log."""


class MismatchError(MoeNvlinkError, AssertionError):
    """What a rank received or combined differs from the reference.

    The message names the case, the ranks, and the place of the first difference with both values.
    """


class SelfCheckError(MoeNvlinkError):
    """Rounds on these ranks failed, or differ from the reference. Raised alike on every rank.

    The message names the check, the ranks, and what each of them found.
    """


class UnsupportedError(MoeNvlinkError):
    """A valid request is not available here. The message says what to use instead."""


class ExchangeStateError(MoeNvlinkError, RuntimeError):
    """A verb was called out of order: after close, combine before dispatch, or dispatch twice.

    The exchange stays usable unless the message says otherwise. It cannot be used after a signal
    has interrupted a verb; in a forked child; after a layer was closed between its verbs; and if
    only the kernel sees that a CUDA graph runs a dispatch of a small batch again without its
    combine.
    """


class ExchangeTimeoutError(MoeNvlinkError, TimeoutError):
    """Another rank did not arrive in time. This rank cannot use the exchange afterwards.

    If the other rank has died, the ranks that live call MoeAllToAll.mask and go on without it.

    Attributes:
        phase: "dispatch", "combine" or "mask"; for a shared LM head "head gather" or "head argmax".
        ranks: numbers of all ranks that are late.
        epoch: number of the round.
    """

    def __init__(self, message: str, *, phase: str, ranks: tuple[int, ...], epoch: int) -> None:
        super().__init__(message)
        self.phase = phase
        self.ranks = ranks
        self.epoch = epoch
