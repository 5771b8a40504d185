"""As `warm`, for `gpu_layers`: ranks import a test file before they can be prepared for it."""

from __future__ import annotations

from . import gpu_layers, warm

__all__ = ["warm"]

gpu_layers.export_triton_experts()
