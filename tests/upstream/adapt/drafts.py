"""`v1/e2e/spec_decode/test_mtp_parallel_load.py` with a toy that has experts and a draft layer.

The file names two models of the hub, a target and its draft, which have no stand-in: transformers
has no model class with draft layers to write one with. The demonstration's toy has both in one
checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MTP_MODEL, write_checkpoint

from .. import models

_MODULE = "tests.v1.e2e.spec_decode.test_mtp_parallel_load"
#: The file asks for contexts of 2048.
MODEL = dataclasses.replace(MTP_MODEL, max_position_embeddings=4096)


def write(folder: Path) -> Path:
    """The toy with a tokenizer, its numbers taken for float32; returns the folder."""
    write_checkpoint(folder, MODEL)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8")) | {"torch_dtype": "float32"}
    path.write_text(json.dumps(config), "utf-8")
    models._tokenizer().save_pretrained(folder)
    return folder


class Drafts:
    """The plugin: writes the toy once, and names it in the module."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """The module is imported, and none of its tests has run."""
        modules = {item.module.__name__: item.module for item in items}
        if _MODULE not in modules:
            return
        toy = str(write(self._folder))
        modules[_MODULE].DEEPSEEK_MTP_MAIN_RANDOM = toy
        modules[_MODULE].DEEPSEEK_MTP_DRAFT_RANDOM = toy
        _count_processes_as_devices()


def _count_processes_as_devices() -> None:
    """What the file asks of its own process; engines run in others."""
    torch.accelerator.device_count = lambda: 2
    torch.accelerator.empty_cache = lambda: None


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin with a folder of this run."""
    factory = pytest.TempPathFactory.from_config(config, _ispytest=True)
    config.pluginmanager.register(Drafts(factory.mktemp("drafts")), "moe_nvlink_drafts")
