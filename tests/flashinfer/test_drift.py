"""Every name of FlashInfer that we touch, held against its source; imports nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.common.names import Touched
from moe_nvlink_plugin.integration.common.own_source import Reader
from moe_nvlink_plugin.integration.flashinfer import compat
from tests.integration.common.framework_source import Source, patched_for_no_reason, unmarked
from tests.integration.common.framework_wheels import left_out
from tests.support import flashinfer_wheel
from tests.support.wheels import FetchError

ROOT = Path(__file__).resolve().parents[2]
TOUCHED = compat.touched()


@pytest.fixture(scope="module")
def source() -> Source:
    try:
        return Source(flashinfer_wheel.folder(), flashinfer_wheel.VERSION, "flashinfer")
    except FetchError as error:
        left_out(error)


def test_every_name_is_there_as_we_touch_it(source: Source) -> None:
    complaints = [source.complaints(touched) for touched in TOUCHED]
    assert [complaint for complaint in complaints if complaint] == []


def test_every_field_we_read_is_there(source: Source) -> None:
    missing = [name for fields in compat.FIELDS for name in source.missing_fields(fields)]
    assert missing == []


def test_a_change_is_noticed(source: Source) -> None:
    verb = next(one for one in TOUCHED if one.name == "MoeAlltoAll.dispatch")
    assert verb.parameters is not None
    assert verb.signature is not None
    fewer = verb.signature._replace(names=verb.parameters[:-1])
    assert "takes" in source.complaints(verb._replace(signature=fewer))
    gone = Touched(verb.module, "MoeAlltoAll.is_gone", "use")
    assert "is gone" in source.complaints(gone)
    params = next(one for one in compat.FIELDS if one.owner == "MoEEpCommParams")
    assert source.missing_fields(params._replace(names=("top_k", "is_gone"))) == [
        f"{params.module}.MoEEpCommParams.is_gone"
    ]


def test_the_release_that_tests_import_is_one_of_those_read() -> None:
    assert flashinfer_wheel.VERSION in compat.READ


def test_the_oldest_release_that_may_be_installed_is_the_one_that_was_read() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"flashinfer-python>={compat.OLDEST}"' in text


def test_every_name_that_we_replace_has_a_reason() -> None:
    assert patched_for_no_reason(TOUCHED) == []


def test_every_method_that_overrides_one_says_so(source: Source) -> None:
    assert unmarked(Reader(compat.RULES), source) == set()


def test_the_tables_of_versions_say_what_was_done() -> None:
    """README's what is supported, and the integrations' how that is known."""
    row = f"| FlashInfer | {compat.supported_versions()} |"
    for file, wanted in (
        ("README.md", f"{row.rpartition(' | ')[0]} |"),
        ("integration/README.md", row),
    ):
        assert wanted in (ROOT / file).read_text(encoding="utf-8").splitlines()
