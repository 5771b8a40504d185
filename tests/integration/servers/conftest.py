from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.servers.servers import Requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def requests(folder: Path) -> Requests:
    """What vLLM's servers of a file are asked; one rank has answered."""
    from tests.integration.servers.test_vllm_e2e import QWEN3, ask_one_rank

    return ask_one_rank(QWEN3, folder / "model")
