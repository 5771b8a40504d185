"""What the runner tells adapters in every process of a run: variables that `run.py` sets."""

from __future__ import annotations

import os

#: A launch of ranks ends before its test's limit does, so that the ranks that hang are named.
LAUNCH_S = "MOE_NVLINK_UPSTREAM_LAUNCH_S"
BREAK = "MOE_NVLINK_UPSTREAM_BREAK"
#: If it is set, `hiding/sitecustomize.py` hides our package.
HIDE = "MOE_NVLINK_UPSTREAM_HIDE"


def chosen_break() -> str:
    """The name of the deliberate break of our backend (`breaks.py`), or ""."""
    return os.environ.get(BREAK, "")


def launch_s() -> float:
    """How many seconds all ranks of a launch may take together."""
    return float(os.environ[LAUNCH_S])
