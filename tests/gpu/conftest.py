"""Kernels of changed texts stay out of the user's cache, as in tests/kernels."""

from __future__ import annotations

from tests.kernels.conftest import cache_of_this_run

__all__ = ["cache_of_this_run"]
