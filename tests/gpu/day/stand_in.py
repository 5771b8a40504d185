"""Print variables with which programs find the stand-in for the CUDA driver, as JSON.

    python -m tests.gpu.day.stand_in FOLDER     # its library goes there

One GPU, which launches emulated kernels for up to 8 ranks on CPU threads; times mean nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moe_nvlink_plugin.jit import host
from tests.support import emulated, emulated_text, fake_cuda


def environment(folder: Path) -> dict[str, str]:
    """Return variables for a process that is yet to start."""
    kernels = host.build(emulated_text.stand_in_source(count=8), emulated.FLAGS)
    return fake_cuda.environment(fake_cuda.build(folder), kernels, devices=1, sms=132)


if __name__ == "__main__":
    print(json.dumps(environment(Path(sys.argv[1]))))
