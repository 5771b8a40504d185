"""The YAML file of integration/vllm/README.md, through vLLM's own parser and to our options."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.exchange import tuning
from moe_nvlink_plugin.integration.common.options import Options
from moe_nvlink_plugin.integration.demo.tiny_checkpoint import MODELS, write_checkpoint
from moe_nvlink_plugin.integration.vllm import backend
from moe_nvlink_plugin.integration.vllm.choices import KEY, options_of
from tests.integration.vllm import vllm_config

#: Arguments for that model.
HERE = ("--skip-tokenizer-init", "--dtype=float32", "--max-model-len=512")
README = Path(__file__).parents[3] / "integration" / "vllm" / "README.md"


@pytest.fixture(scope="module")
def documented() -> str:
    """The block as a user would copy it."""
    text = README.read_text(encoding="utf-8")
    found = re.search(r"\n### As a YAML file\n.*?\n```yaml\n(.*?)```\n", text, re.DOTALL)
    assert found is not None
    return found[1]


def instead(documented: str) -> str:
    """The block with its comment in the place of the option that the comment names."""
    text, times = re.subn(
        r"    (\w+): .*\n    # (.+)  # in the place of \1\n", r"    \2\n", documented
    )
    assert times == 1
    return text


def _engine_args(text: str, folder: Path, *more: str) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    file = folder / "moe_nvlink.yaml"
    file.write_text(text, encoding="utf-8")
    arguments = vllm_config.parser().parse_args(["--config", str(file), *more])
    return AsyncEngineArgs.from_cli_args(arguments)


def found_here(text: str, folder: Path) -> str:
    """The block with a model that drafts and a tuning file, which are there."""
    with_draft = dataclasses.replace(MODELS["glm4_moe"], num_mtp_layers=1)
    model = write_checkpoint(folder / "model", with_draft)
    file = folder / "tuned.json"
    tuning.save(str(file), tuning.Tuning(tuning.Machine.here(torch.device("cpu"), 8), {}))
    for name, path in (("model: MODEL\n", model), ("tuning: tuned.json\n", file)):
        assert name in text
        text = text.replace(name, f"{name.split(':')[0]}: {path}\n")
    return text


def test_the_block_shows_every_option(documented: str) -> None:
    shown = [yaml.safe_load(text) for text in (documented, instead(documented))]
    ours = [set(block["additional-config"][KEY]) for block in shown]
    assert ours[0] != ours[1]
    assert ours[0] | ours[1] == set(Options._fields)


@pytest.mark.parametrize("change", [str, instead], ids=["block", "comment"])
def test_every_option_of_ours_arrives_as_it_is_written(
    change: Callable[[str], str], documented: str, tmp_path: Path
) -> None:
    documented = change(documented)
    written = yaml.safe_load(documented)
    found = _engine_args(documented, tmp_path)
    ours = written["additional-config"][KEY]
    assert found.additional_config == {backend.KEY: backend.BACKEND, KEY: ours}
    assert options_of(found) == Options(**ours)
    # A value that equals its default would also be there if vLLM had dropped it.
    assert [name for name in ours if ours[name] == Options._field_defaults[name]] == []
    assert found.all2all_backend == backend.CARRIER
    assert found.enable_expert_parallel
    assert found.data_parallel_size == written["data-parallel-size"]
    assert found.moe_backend == written["moe-backend"]
    assert found.speculative_config == written["speculative-config"]
    compiled = written["compilation-config"]
    assert found.compilation_config.cudagraph_mode.name == compiled["cudagraph_mode"]
    assert found.compilation_config.cudagraph_capture_sizes == compiled["cudagraph_capture_sizes"]


@pytest.mark.long
def test_its_server_starts(documented: str, tmp_path: Path) -> None:
    """All checks at start-up pass: the options fit together, and with such a model."""
    text = found_here(documented, tmp_path)
    found = _engine_args(text, tmp_path, *HERE).create_engine_config()
    assert backend.is_selected(found)
    assert found.speculative_config.use_local_argmax_reduction, "our check has come to the draft"
    # A tuning file that cannot be read is refused before a worker starts.
    (tmp_path / "tuned.json").write_text("{")
    with pytest.raises(UnsupportedError, match=r"tuning='.*tuned.json' .* is torn, or no file of"):
        _engine_args(text, tmp_path, *HERE).create_engine_config()
