"""What an error has to say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """An error of this class comes, and its text has all the words."""
    with pytest.raises(error) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, (missing, str(caught.value))
