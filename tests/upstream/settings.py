"""What the runner tells adapters in every process of a run: variables that `run.py` sets."""

from __future__ import annotations

import os

#: A launch of ranks ends before its test's limit does, so that the ranks that hang are named.
LAUNCH_S = "MOE_NVLINK_UPSTREAM_LAUNCH_S"
#: If it is set, `hiding/sitecustomize.py` hides our package.
HIDE = "MOE_NVLINK_UPSTREAM_HIDE"
#: Where `within/moe_nvlink_upstream_run.py` writes whether vLLM took our platform.
TAKEN = "MOE_NVLINK_UPSTREAM_TAKEN"


def launch_s() -> float:
    """How many seconds all ranks of a launch may take together."""
    return float(os.environ[LAUNCH_S])
