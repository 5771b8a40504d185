"""Every name of SGLang that we touch, held against SGLang's own source, release by release.

The wheel of each release in `compat.READ` is fetched by pip without its dependencies, reduced to
its Python files, and kept in the user's cache directory. Nothing of it is imported.
"""

from __future__ import annotations

import pytest

from moe_nvlink_plugin.integration.sglang import compat
from tests.integration.common.framework_source import Source, differences
from tests.integration.common.framework_wheels import Wheels

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
    assert differences(compat, source) == []


def test_tests_have_served_no_version_that_none_has_read() -> None:
    assert {one for tried in compat.TRIED.values() for one in tried} <= set(compat.READ)
