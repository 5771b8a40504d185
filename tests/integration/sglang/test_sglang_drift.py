"""Every name of SGLang that we touch, held against SGLang's own source, release by release.

The wheel of each release in `compat.READ` is fetched by pip without its dependencies, reduced to
its Python files, and kept in the user's cache directory. Nothing of it is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.common.names import Fields, Touched
from moe_nvlink_plugin.integration.common.own_source import Reader
from moe_nvlink_plugin.integration.sglang import compat
from tests.integration.common.framework_source import Source, patched_for_no_reason, unmarked
from tests.integration.common.framework_wheels import Wheels

ROOT = Path(__file__).resolve().parents[3]
ADAPTER = Path(compat.__file__).parent
TOUCHED = compat.touched()
WHEELS = Wheels(
    "sglang",
    python="3.11",
    platforms=tuple(f"manylinux_2_{number}_x86_64" for number in (28, 34, 35)),
    left_out=("sglang/multimodal_gen/", "sglang/srt/models/", "sglang/test/"),
)


@pytest.fixture(scope="module", params=compat.READ)
def source(request: pytest.FixtureRequest) -> Source:
    return WHEELS.source(request.param)


def test_every_name_is_there_as_we_touch_it(source: Source) -> None:
    complaints = [source.complaints(touched) for touched in TOUCHED]
    assert [complaint for complaint in complaints if complaint] == []


def test_every_field_we_read_is_there(source: Source) -> None:
    missing = [name for fields in compat.FIELDS for name in source.missing_fields(fields)]
    assert missing == []


def test_a_name_that_moved_is_found(source: Source) -> None:
    """On SGLang's source itself: the reader follows imports and classes of another package too."""
    hook = next(one for one in TOUCHED if one.name == "create_moe_dispatcher")
    assert "takes" in source.complaints(hook._replace(kind="hook", parameters=("renamed",)))
    gone = Touched("sglang.srt.layers.moe.utils", "MoeA2ABackend.is_gone", "use")
    assert "is gone" in source.complaints(gone)
    owner = Fields("sglang.srt.runtime_context", "MoeFlags", ("speculative_context", "gone"))
    assert source.missing_fields(owner) == ["sglang.srt.runtime_context.MoeFlags.gone"]


def test_tests_have_served_no_version_that_none_has_read() -> None:
    assert {one for tried in compat.TRIED.values() for one in tried} <= set(compat.READ)


def test_every_method_that_overrides_one_says_so(source: Source) -> None:
    assert unmarked(Reader(compat.RULES), source) == set()


# The list, held against our own source and the README.


def test_every_name_that_we_replace_has_a_reason() -> None:
    assert patched_for_no_reason(TOUCHED) == []


def test_the_tables_of_versions_say_what_was_done() -> None:
    """README's what is supported, and the integrations' how that is known."""
    row = f"| SGLang | {compat.supported_versions()} |"
    for file, wanted in (
        ("README.md", f"{row.rpartition(' | ')[0]} |"),
        ("integration/README.md", row),
    ):
        assert wanted in (ROOT / file).read_text(encoding="utf-8").splitlines()


def test_neither_adapter_imports_the_other() -> None:
    """Nor the other's framework: each is installed where the other's framework is missing."""
    for folder, other in (("sglang", "vllm"), ("vllm", "sglang")):
        for path in sorted((ADAPTER.parent / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.ImportFrom):
                    names = [str(node.module), *(alias.name for alias in node.names)]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                assert not [name for name in names if other in name.split(".")], path
