"""What a test may leave changed in its process, and so break tests that run after it.

pytest-xdist gives files to processes in an order that depends on timing. A test that another test
breaks therefore fails only now and then.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

#: pytest changes this variable itself between the phases of a test.
_OF_PYTEST = "PYTEST_CURRENT_TEST"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Handler = Any  # what signal.signal takes and returns


class ProcessState(NamedTuple):
    """The state of this process at one moment.

    Attributes:
        environment: os.environ.
        folder: The current working directory.
        disabled_loggers: Names of loggers that drop every message.
        disabled_level: What logging.disable has set.
        handlers: The handler of each of SIGINT, SIGTERM and SIGHUP.
        torch: Default dtype, default device and number of threads; None before torch is imported.
    """

    environment: Mapping[str, str]
    folder: str
    disabled_loggers: frozenset[str]
    disabled_level: int
    handlers: tuple[Handler, ...]
    torch: tuple[Any, ...] | None

    @classmethod
    def now(cls) -> ProcessState:
        return cls(
            {name: value for name, value in os.environ.items() if name != _OF_PYTEST},
            os.getcwd(),
            frozenset(name for name, logger in _loggers().items() if logger.disabled),
            logging.root.manager.disable,
            tuple(map(signal.getsignal, _SIGNALS)),
            _torch_defaults(),
        )

    def restore(self) -> list[str]:
        """Puts this state back; returns a sentence for each thing that had changed."""
        now = ProcessState.now()
        told = []
        if now.environment != self.environment:
            told.append(_differences(self.environment, now.environment))
            _set_environment(self.environment)
        if now.folder != self.folder:
            told.append(f"the working directory was {self.folder} and is {now.folder}")
            os.chdir(self.folder)
        if more := now.disabled_loggers - self.disabled_loggers:
            told.append(f"these loggers are disabled: {', '.join(sorted(more))}")
            for name in more:
                _loggers()[name].disabled = False
        if now.disabled_level != self.disabled_level:
            told.append(f"logging.disable was {self.disabled_level} and is {now.disabled_level}")
            logging.disable(self.disabled_level)
        for number, before, after in zip(_SIGNALS, self.handlers, now.handlers, strict=True):
            if before is not after:
                told.append(f"the handler of {number.name} was {before!r} and is {after!r}")
                signal.signal(number, before)
        if self.torch is not None and now.torch != self.torch:
            told.append(
                f"torch's default dtype, default device and number of threads were {self.torch} "
                f"and are {now.torch}"
            )
            _set_torch_defaults(*self.torch)
        return told


def _loggers() -> dict[str, logging.Logger]:
    named = logging.root.manager.loggerDict.items()
    return {name: logger for name, logger in named if isinstance(logger, logging.Logger)}


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Names only: a value may be a secret of whoever runs the tests."""
    kinds = {
        "set": after.keys() - before.keys(),
        "removed": before.keys() - after.keys(),
        "changed": {name for name in before.keys() & after.keys() if before[name] != after[name]},
    }
    told = (f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names)
    return f"variables of os.environ, {'; '.join(told)}"


def _set_environment(variables: Mapping[str, str]) -> None:
    kept = {_OF_PYTEST: os.environ[_OF_PYTEST]} if _OF_PYTEST in os.environ else {}
    os.environ.clear()
    os.environ.update({**variables, **kept})


def _torch_defaults() -> tuple[Any, ...] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()


def _set_torch_defaults(dtype: Any, device: Any, num_threads: int) -> None:
    torch = sys.modules["torch"]
    torch.set_default_dtype(dtype)
    torch.set_default_device(None if device.type == "cpu" else device)
    torch.set_num_threads(num_threads)
