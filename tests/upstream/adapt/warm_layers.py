"""As `warm`, for `gpu_layers`: ranks import a test file before they can be prepared for it."""

from __future__ import annotations

from . import torch_experts, warm

__all__ = ["warm"]

torch_experts.export_triton_experts()
