"""Tests written for CUDA devices, on CPU: "cuda" is this process's CPU.

Names for other adapters: `install()`, idempotent and for good. As a pytest plugin this module
installs itself before any conftest is imported; `processes` installs it in every rank.

What it changes, in the processes of the tests only:

* a device argument of torch's functions and of `Tensor.to` that names a CUDA device or a number
  becomes "cpu", `Tensor.cuda` a no-op (one `TorchFunctionMode`);
* the functions of `torch.accelerator` and `torch.cuda` that raise in CPU builds do nothing, or
  answer with the CPU;
* `torch.compile` leaves functions as they are: it would look for streams of the device;
* `current_platform.device_count()` is `MOST_RANKS`, so that tests that count devices are not
  skipped; each "device" is a process.

`torch.cuda.is_available()` stays False, and `torch.device("cuda")` what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
#: As many "devices" as the largest of the selected tests asks for.
MOST_RANKS = 4

_OF_ANY_TENSOR = (torch.Tensor.to,)
_installed: list[Any] = []


def on_cpu(device: Any) -> Any:
    """A device argument, with the CPU for CUDA devices and numbers of devices. Local.

    Everything else is handed back as it is, dtypes and tensors (`Tensor.to` takes both) among it.
    """
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return CPU
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return CPU
    return device


class CpuForCuda(TorchFunctionMode):
    """Rewrites the device arguments of the calls that pass through it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """torch's name for it."""
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in named:
            named["device"] = on_cpu(named["device"])
        if func in _OF_ANY_TENSOR and len(args) > 1:
            args = (args[0], on_cpu(args[1]), *args[2:])
        return func(*args, **named)


def install() -> None:
    """Puts all of it in place. Local, idempotent, for the calling thread and for good."""
    if _installed:
        return
    _count_processes_as_devices()  # imports vLLM, which is to find torch as it is
    torch._dynamo.config.disable = True
    _shim_accelerator()
    _shim_cuda()
    mode = CpuForCuda()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _installed.append(mode)


def _nothing() -> Callable[..., None]:
    """A function of its own for each name: Dynamo keeps tables by function."""
    return lambda *_args, **_named: None


class _Stream:
    """What tests and vLLM's EPLB ask of a stream: on CPU everything has happened already."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


def _shim_accelerator() -> None:
    shims: dict[str, Callable[..., Any]] = {
        "current_accelerator": lambda *_args, **_named: CPU,
        "current_device_index": lambda: 0,
        "device_count": lambda: MOST_RANKS,
        "current_stream": lambda *_args, **_named: _Stream(),
    }
    for name in ("set_device_index", "synchronize", "empty_cache"):
        shims[name] = _nothing()
    for name, shim in shims.items():
        setattr(torch.accelerator, name, shim)


def _shim_cuda() -> None:
    shims: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "current_stream": lambda *_args, **_named: _Stream(),
    }
    for name in ("synchronize", "empty_cache", "set_device"):
        shims[name] = _nothing()
    for name, shim in shims.items():
        setattr(torch.cuda, name, shim)


def _count_processes_as_devices() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.device_count = classmethod(lambda _cls: MOST_RANKS)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any module of vLLM's tests is imported."""
    install()
