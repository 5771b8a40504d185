"""The package's version. The module imports no torch."""

from __future__ import annotations

import importlib.metadata


def own_version() -> str:
    """Return this package's version; "not installed" in a checkout. Local."""
    try:
        # Against its type it returns None for a *.dist-info that an uninstallation has left empty.
        return importlib.metadata.version("moe-nvlink-plugin") or "unknown"
    except importlib.metadata.PackageNotFoundError:  # benchmarks/on_gpu.sh runs a checkout
        return "not installed"
