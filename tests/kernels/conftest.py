"""Libraries that tests compile from changed kernel texts stay out of the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_NVLINK_CACHE_DIR", str(tmp_path_factory.mktemp("kernels", numbered=True)))
        yield
