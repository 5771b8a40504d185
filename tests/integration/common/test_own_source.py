"""The reader of an adapter's own source, on an adapter of a few lines; no framework is needed."""

from __future__ import annotations

import ast
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import names
from moe_nvlink_plugin.integration.common.names import Call, Signature, Touched, patch, use
from moe_nvlink_plugin.integration.common.own_source import Base, Reader, Rules, modules_of
from moe_nvlink_plugin.integration.flashinfer import compat as of_flashinfer
from moe_nvlink_plugin.integration.sglang import compat as of_sglang
from moe_nvlink_plugin.integration.vllm import compat as of_vllm
from tests.architecture.test_import_arrows import OURS, names_imported

ROOT = Path(__file__).resolve().parents[3]
COMPATS: dict[str, Any] = {"vLLM": of_vllm, "SGLang": of_sglang, "FlashInfer": of_flashinfer}
ADAPTER = {
    "": '"""An adapter."""\n',
    "base": (
        '"""The base of two classes.\n\nMore."""\n'
        "from typing import TYPE_CHECKING\n"
        "import lib.deep.kernels as mk\n"
        "import lib.whole\n"
        "from lib.things import Thing, made\n"
        "if TYPE_CHECKING:\n"
        "    from lib.types import ForTheTypeChecker\n"
        "class Ours(mk.Kernel):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "    @property\n"
        "    @overrides\n"
        "    def shown(self): return Thing.RED.value\n"
        "    @overrides\n"
        "    def run(self, rows, out=None, *, stream=None, **more):\n"
        "        super().run(rows, out, stream=stream)\n"
        "        super().finish(*rows)\n"
        "        self.own()\n"
        "    def own(self):\n"
        "        lib.whole.start(1, two=2)\n"
        "        made.value(1)\n"
        "        made.value = 3\n"
        "        made.__name__\n"
    ),
    "cuda_more": (
        '"""One for GPUs."""\n'
        "from adapter.base import Ours\n"
        "from . import base\n"
        "class Cuda(Ours):\n"
        "    @overrides\n"
        "    def finish(self, rows):\n"
        "        super().own()\n"
        "        super().run(rows)\n"
        "        super().wait()\n"
        "class Another(base.Ours): ...\n"
    ),
    "room.mixin": (
        '"""A mixin."""\n'
        "class Mixin:\n"
        "    @overrides\n"
        "    def load(self): ...\n"
        "    def unmarked(self): ...\n"
    ),
    "room.silent": '"""Names lib, and imports nothing of it."""\n',
}
RULES = Rules(
    package="adapter",
    framework="lib",
    features={"room": "rooms"},
    bases={"Mixin": [Base("lib.workers", "Worker", "cpu"), Base("lib.workers", "Gpu", "cuda")]},
    by_hand={
        "room.silent": patch("lib.things", "Thing.method(a, b)", "quieter"),
        "base": use("lib.things", "Thing.other()", since="2.0"),
    },
)
WHY = "base: The base of two classes"


def read() -> dict[str, list[Touched]]:
    found: dict[str, list[Touched]] = {}
    for one in Reader(RULES, ADAPTER).touched():
        found.setdefault(f"{one.module}.{one.name}", []).append(one)
    return found


def test_files_of_editors_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "adapter_with_strays"
    (package / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("__init__.py", "ops.py", ".ipynb_checkpoints/ops.py"):
        (package / name).write_text("")
    (package / ".#ops.py").symlink_to("somebody@host:1")  # Emacs, while it has unsaved changes
    (package / "._ops.py").write_bytes(b"\x00\x05\x16\x07\xff")  # macOS, on other file systems
    monkeypatch.syspath_prepend(str(tmp_path))
    assert modules_of("adapter_with_strays") == {"": "", "ops": ""}


def test_it_reads_what_the_source_says() -> None:
    found = read()
    assert set(found) == {
        *("lib.things.Thing", "lib.things.Thing.RED", "lib.things.made", "lib.things.made.value"),
        *("lib.whole.start", "lib.deep.kernels.Kernel"),
        *(f"lib.deep.kernels.Kernel.{name}" for name in ("shown", "run", "finish", "wait")),
        *("lib.workers.Worker", "lib.workers.Worker.load"),
        *("lib.workers.Gpu", "lib.workers.Gpu.load"),
        *("lib.things.Thing.method", "lib.things.Thing.other"),
    }
    (start,) = found["lib.whole.start"]
    assert start == Touched("lib.whole", "start", "use", why=WHY, calls=(Call(1, ("two",)),))
    assert [one.calls for one in found["lib.things.made.value"]] == [(Call(1),)]


def test_overrides_have_our_parameters_and_calls_of_super_our_arguments() -> None:
    found = read()
    ours = Signature(("rows", "out", "stream"), 2, frozenset({"out", "stream"}), (False, True))
    run = found["lib.deep.kernels.Kernel.run"]
    assert {(one.kind, one.signature, one.calls) for one in run} == {
        ("subclass", ours, ()),
        ("use", None, (Call(2, ("stream",)),)),
    }, "super() of the second class finds the first"
    finish = found["lib.deep.kernels.Kernel.finish"]
    assert {(one.kind, one.device, one.parameters, one.calls) for one in finish} == {
        ("use", "", None, ()),  # *rows: only a running program knows how many
        ("subclass", "cuda", ("rows",), ()),
    }
    assert found["lib.deep.kernels.Kernel.shown"][0].parameters == ()


def test_names_belong_to_devices_and_features() -> None:
    found = read()
    load = found["lib.workers.Worker.load"]
    assert [(one.device, one.needed_for) for one in load] == [("cpu", "rooms")]
    assert {one.device for one in found["lib.deep.kernels.Kernel.wait"]} == {"cuda"}
    (quieter,) = found["lib.things.Thing.method"]
    assert quieter == Touched(
        "lib.things",
        "Thing.method",
        "patch",
        ("a", "b"),
        needed_for="rooms",
        why="room.silent: quieter",
    )
    on_cpu = Reader(RULES, ADAPTER).touched("cpu", {"rooms"})
    assert {one.module for one in on_cpu} == {"lib.workers", "lib.things"}
    assert {one.name for one in on_cpu} == {"Worker", "Worker.load", "Thing.method"}


def test_it_yields_methods_without_a_mark() -> None:
    found = {(one.base.name, one.name, one.is_marked) for one in Reader(RULES, ADAPTER).methods()}
    assert ("Worker", "unmarked", False) in found
    assert ("Gpu", "load", True) in found
    assert ("Kernel", "own", False) in found


def test_a_missing_name_is_refused_with_its_reason() -> None:
    needed = [
        Touched("json", "loads", "use", why="a: found"),
        Touched("json", "no_such_name", "use", why="b.c: Does this"),
        Touched("json", "JSONDecoder.no_such_method", "subclass", why="d: Does that"),
        Touched("json.no_such_module", "name", "use", why="e: Does more"),
    ]
    with pytest.raises(UnsupportedError) as caught:
        names.require(needed, "Lib", "1.5", "2.0")
    assert str(caught.value) == (
        "Lib 1.5 lacks names that the moe_nvlink adapter needs:"
        "\n  - json.no_such_name, for b.c: Does this"
        "\n  - json.JSONDecoder.no_such_method, for d: Does that"
        "\n  - json.no_such_module.name, for e: Does more"
        "\nInstall Lib 2.0, or a newer moe-nvlink-plugin."
    )
    names.require(needed[:1], "Lib", "1.5", "2.0")


@pytest.mark.parametrize("framework", ["vllm", "sglang", "flashinfer"])
def test_a_command_prints_every_name(framework: str) -> None:
    """Without the framework: each is also started where it is not installed."""
    done = subprocess.run(
        [sys.executable, "-m", f"moe_nvlink_plugin.integration.{framework}.compat"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert f"use       {framework}." in done.stdout
    assert f"patch     {framework}." in done.stdout
    assert f"field     {framework}." in done.stdout


def test_it_reads_a_zip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "adapter.zip", "w") as archive:
        for name, text in ADAPTER.items():
            is_package = name in ("", "room")
            path = "/".join(["zipped_adapter", *filter(None, name.split("."))])
            archive.writestr(f"{path}/__init__.py" if is_package else f"{path}.py", text)
    monkeypatch.syspath_prepend(str(tmp_path / "adapter.zip"))
    assert modules_of("zipped_adapter") == ADAPTER


def test_without_sources_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands in lists is still looked for."""
    (tmp_path / "bare_adapter").mkdir()
    source = tmp_path / "source.py"
    source.write_text("")
    py_compile.compile(str(source), str(tmp_path / "bare_adapter" / "__init__.pyc"))
    monkeypatch.syspath_prepend(str(tmp_path))
    bare = Reader(RULES._replace(package="bare_adapter"))
    assert {one.name for one in bare.touched()} == {"Thing.method", "Thing.other"}
    assert "bare_adapter is installed without its source" in caplog.text


def test_a_worker_parses_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up waits for it."""
    parsed: list[str] = []

    def parse(text: str) -> ast.Module:
        parsed.append(text)
        return whole(text)

    whole = ast.parse
    monkeypatch.setattr(ast, "parse", parse)
    texts = modules_of(of_vllm.RULES.package)
    Reader(of_vllm.RULES, texts).touched("cpu", {""})
    read = {name for name, text in texts.items() if text in parsed}
    assert "moe.layers" in read
    assert len(parsed) == len(read), "none twice"
    elsewhere = ("balancing.", "draft.", "lora.", "scheduler.", "moe.cuda_", "plugin.cuda_")
    assert not [name for name in read if name.startswith(elsewhere)]
    assert not read & {"choices", "metrics", "plugin.graphs"}, "they spell no name of vLLM"


def test_only_its_own_adapter_imports_a_framework() -> None:
    """Each is installed where the others' frameworks are missing. In servers FlashInfer's kernels
    are reached through the framework's choice of experts, or not at all.

    SGLang leaves it to the dispatcher to quantise rows, and to lay out scales, for FlashInfer.
    """
    importers: dict[str, set[str]] = {"vllm": set(), "sglang": set(), "flashinfer": set()}
    for module, path in OURS.files.items():
        for _line, name in names_imported(path, module):
            importers.get(name.split(".")[0], set()).add(module)
    importers["flashinfer"].remove("moe_nvlink_plugin.integration.sglang.moe.experts_input")
    for framework, modules in importers.items():
        assert modules, "of its own"
        own = f"moe_nvlink_plugin.integration.{framework}"
        assert all(module.startswith(own) for module in modules), modules


@pytest.mark.parametrize("framework", COMPATS)
def test_every_module_that_a_list_names_is_there(framework: str) -> None:
    """Each list, table of features and table of bases: an entry without effect is a mistake."""
    rules, texts = COMPATS[framework].RULES, modules_of(COMPATS[framework].RULES.package)
    rooms = {name.rpartition(".")[0] for name in texts}
    assert set(rules.by_hand) <= set(texts)
    assert {*rules.features, *rules.devices} <= {*texts, *rooms}
    for cls in rules.bases:
        assert any(f"\nclass {cls}" in text for text in texts.values()), cls


@pytest.mark.parametrize("framework", COMPATS)
def test_every_name_that_we_replace_has_a_reason(framework: str) -> None:
    """`why` begins with our module's name."""
    replaced = [one for one in COMPATS[framework].touched() if one.kind == "patch"]
    assert [one for one in replaced if not one.why.partition(": ")[2]] == []


@pytest.mark.parametrize("framework", COMPATS)
def test_the_tables_of_versions_say_what_was_done(framework: str) -> None:
    """README's what is supported, and the integrations' how that is known."""
    row = f"| {framework} | {COMPATS[framework].supported_versions()} |"
    pages = {"README.md": f"{row.rpartition(' | ')[0]} |", "integration/README.md": row}
    for page, wanted in pages.items():
        assert wanted in (ROOT / page).read_text(encoding="utf-8").splitlines()
