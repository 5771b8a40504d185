"""Transports: how peers reach each other's memory, in one window over all ranks' workspaces."""

from __future__ import annotations

from .base import Extent, SymmetricMemory, Transport

__all__ = ["Extent", "SymmetricMemory", "Transport"]
