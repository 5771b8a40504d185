"""Processes that have the tests' own driver."""

from tests.support.fake_cuda.processes import driven

__all__ = ["driven"]
