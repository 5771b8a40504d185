"""Every name of FlashInfer that we touch, held against its source; imports nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_nvlink_plugin.integration.flashinfer import compat
from tests.integration.common.framework_source import Source, differences
from tests.integration.common.framework_wheels import left_out
from tests.support import flashinfer_wheel
from tests.support.wheels import FetchError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source() -> Source:
    try:
        return Source(flashinfer_wheel.folder(), flashinfer_wheel.VERSION, "flashinfer")
    except FetchError as error:
        left_out(error)


def test_every_name_is_there_as_we_touch_it(source: Source) -> None:
    assert differences(compat, source) == []


def test_a_field_that_is_gone_is_noticed(source: Source) -> None:
    params = next(one for one in compat.FIELDS if one.owner == "MoEEpCommParams")
    assert source.missing_fields(params._replace(names=("top_k", "is_gone"))) == [
        f"{params.module}.MoEEpCommParams.is_gone"
    ]


def test_the_release_that_tests_import_is_one_of_those_read() -> None:
    assert flashinfer_wheel.VERSION in compat.READ


def test_the_oldest_release_that_may_be_installed_is_the_one_that_was_read() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"flashinfer-python>={compat.OLDEST}"' in text
