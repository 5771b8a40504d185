"""What the runner tells adapters, in every process of a run: variables that `run.py` sets."""

from __future__ import annotations

import os

from .groups import Device

DEVICE = "MOE_NVLINK_UPSTREAM_DEVICE"
GPUS = "MOE_NVLINK_UPSTREAM_GPUS"
BREAK = "MOE_NVLINK_UPSTREAM_BREAK"
#: What `hiding/sitecustomize.py` hides.
HIDE = "MOE_NVLINK_UPSTREAM_HIDE"


def device() -> Device:
    """Where the ranks of this run are."""
    return Device(os.environ.get(DEVICE, Device.CPU.value))


def gpus() -> int:
    """How many GPUs the run may use; 0 on CPUs."""
    return int(os.environ.get(GPUS, "0"))


def chosen_break() -> str:
    """The name of the deliberate break of our backend, of `breaks.py`; "" for none."""
    return os.environ.get(BREAK, "")
