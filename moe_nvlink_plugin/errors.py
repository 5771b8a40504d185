"""The exceptions of this package. A message says what was wrong, what is allowed and what to do."""

from __future__ import annotations


class MoeNvlinkError(Exception):
    """Base of all errors of this package."""


class ConfigError(MoeNvlinkError, ValueError):
    """A configuration value is out of range; nothing was allocated."""


class InputError(MoeNvlinkError, ValueError):
    """A tensor handed to a verb has a wrong shape, dtype, device or layout.

    Raised before any memory is touched; the exchange stays usable once all ranks agree again.
    """


class DisagreementError(MoeNvlinkError):
    """The ranks were given different configurations; raised on every rank, naming both values."""


class PeerError(MoeNvlinkError):
    """Another rank failed during a collective step; names that rank and its cause."""


class TransportError(MoeNvlinkError):
    """Symmetric memory could not be created or mapped; what was built has been rolled back."""


class DriverError(MoeNvlinkError):
    """A call of the CUDA driver failed. Attributes: call, status (the driver's name for it)."""

    def __init__(self, message: str, *, call: str, status: str) -> None:
        super().__init__(message)
        self.call = call
        self.status = status


class CompileError(MoeNvlinkError):
    """A kernel did not compile; carries the compiler's log."""


class UnsupportedError(MoeNvlinkError):
    """The request is valid but not available here; the message says what to use instead."""


class ExchangeStateError(MoeNvlinkError, RuntimeError):
    """A verb was called out of order: after close, combine without dispatch, dispatch twice."""


class ExchangeTimeoutError(MoeNvlinkError, TimeoutError):
    """A rank did not arrive in time. The exchange is unusable afterwards on this rank.

    Attributes: phase ("dispatch" or "combine"; of a shared LM head "head gather" or "head argmax"),
    ranks (all that are late), epoch.
    """

    def __init__(self, message: str, *, phase: str, ranks: tuple[int, ...], epoch: int) -> None:
        super().__init__(message)
        self.phase = phase
        self.ranks = ranks
        self.epoch = epoch
