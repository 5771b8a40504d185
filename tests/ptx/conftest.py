from __future__ import annotations

from tests.support.fake_cuda.processes import driven

__all__ = ["driven"]
