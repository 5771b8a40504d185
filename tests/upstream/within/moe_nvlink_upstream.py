"""`tests.upstream`, by a name that is free where vLLM's own package `tests` is imported.

This folder is on PYTHONPATH in every process of vLLM's tests. A module with `__path__` is a package
to Python: `moe_nvlink_upstream.adapt.engines` is `tests/upstream/adapt/engines.py`.
"""

from __future__ import annotations

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1])]
