"""The stand-in for the CUDA driver, for programs that are rehearsed.

One GPU, which launches emulated kernels for up to 8 ranks on CPU threads; times mean nothing.
"""

from __future__ import annotations

from pathlib import Path

from moe_nvlink_plugin.jit import host
from tests.support import emulated, emulated_text, fake_cuda


def environment(folder: Path) -> dict[str, str]:
    """Return variables for a process that is yet to start."""
    kernels = host.build(emulated_text.stand_in_source(count=8), emulated.FLAGS)
    return fake_cuda.environment(fake_cuda.build(folder), kernels, devices=1, sms=132)
