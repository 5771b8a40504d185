"""Tests written for CUDA devices, on CPU: "cuda" is this process's CPU.

`ranks` calls `install()` in pytest's process and in every rank. It changes, in those processes:

* a device argument of torch's functions and of `Tensor.to` that names a CUDA device or a number
  becomes "cpu", `Tensor.cuda` does nothing (one `TorchFunctionMode`);
* the functions of `torch.accelerator` and `torch.cuda` that raise in CPU builds do nothing, or
  answer with the CPU; there is no default device;
* `torch.compile` leaves functions as they are: it would look for streams of the device;
* `current_platform.device_count()` is `MOST_RANKS`, so that tests that count devices are not
  skipped; each "device" is a process.

`torch.cuda.is_available()` stays False, and `torch.device("cuda")` what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
#: As many "devices" as the largest of the selected tests asks for.
MOST_RANKS = 4

_installed: list[Any] = []


def on_cpu(device: Any) -> Any:
    """A device argument, with the CPU for CUDA devices and numbers of devices. Local.

    Everything else is handed back as it is: `Tensor.to` also takes dtypes and tensors.
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
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], on_cpu(args[1]), *args[2:])
        return func(*args, **named)


def install() -> None:
    """Puts all of it in place. Local, idempotent, for the calling thread and for good."""
    if _installed:
        return
    from vllm.platforms import current_platform  # before torch changes

    platform = type(current_platform)
    platform.device_count = classmethod(lambda _cls: MOST_RANKS)
    torch._dynamo.config.disable = True
    _replace(torch, {}, "set_default_device")
    answers: dict[str, Callable[..., Any]] = {
        "current_accelerator": lambda *_args, **_named: CPU,
        "current_device_index": lambda: 0,
        "device_count": lambda: MOST_RANKS,
        "current_stream": lambda *_args, **_named: _Stream(),
    }
    _replace(torch.accelerator, answers, "set_device_index", "synchronize", "empty_cache")
    answers = {"current_device": lambda: 0, "current_stream": answers["current_stream"]}
    _replace(torch.cuda, answers, "synchronize", "empty_cache", "set_device")
    mode = CpuForCuda()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _installed.append(mode)


def _replace(module: Any, answers: Mapping[str, Callable[..., Any]], *does_nothing: str) -> None:
    for name in does_nothing:
        # A function of its own for each name: Dynamo keeps tables by function.
        setattr(module, name, lambda *_args, **_named: None)
    for name, answer in answers.items():
        setattr(module, name, answer)


class _Stream:
    """What tests and vLLM's EPLB ask of a stream: on CPU everything has happened already."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""
