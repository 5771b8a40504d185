"""The process that `ranks` forks ranks from imports this module once."""

from __future__ import annotations

import os
import sys

# The server's own path has its start folder only as "", which later imports may not.
sys.path[:0] = [os.getcwd()]

import vllm.model_executor.layers.fused_moe.experts.cpu_moe  # noqa: E402,F401

import tests.kernels.moe.modular_kernel_tools.parallel_utils  # noqa: E402,F401
