"""Fixtures that more than one file of unit tests uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_nvlink_plugin import MoeAllToAll
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import write_checkpoint
from moe_nvlink_plugin.testing import ThreadGroup
from tests.unit.small_exchange import config


@pytest.fixture
def layer() -> Iterator[MoeAllToAll]:
    """One rank's exchange with an extra payload and two channels."""
    (group,) = ThreadGroup.ranks(1)
    with MoeAllToAll.create(config(extra_payload_bytes=(6,), num_channels=2), group) as exchange:
        yield exchange


@pytest.fixture(autouse=True)
def our_messages_reach_pytest() -> Iterator[None]:
    """A vLLM in this process has taken our messages to its own handlers (`vllm.logs`)."""
    ours = logging.getLogger("moe_nvlink_plugin")
    before = ours.handlers, ours.level, ours.propagate
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield
    ours.handlers, level, ours.propagate = before
    ours.setLevel(level)


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM's CPU platform edits os.environ, LD_PRELOAD included; other tests must not see it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-MoE-like model."""
    return write_checkpoint(tmp_path_factory.mktemp("qwen3_moe"))
