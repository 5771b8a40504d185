"""Transports: how peers reach each other's memory, in one window over all ranks' workspaces."""

from __future__ import annotations

from .base import HUGE_PAGE_BYTES, Extent, SymmetricMemory, Transport

__all__ = ["HUGE_PAGE_BYTES", "Extent", "SymmetricMemory", "Transport"]
