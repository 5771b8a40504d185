"""integration/vllm/SELECTION.md says what vLLM 0.33 and our exchange decide together."""

from __future__ import annotations

import re

import pytest
import vllm

from tests.integration.vllm import selection


def test_every_layer_is_served_or_refused_for_a_reason() -> None:
    """On the page, which is that of all machines."""
    text = selection.PAGE.read_text("utf-8")
    rows = re.findall(r"^\| (?!model |---)(.*) \|$", text, re.MULTILINE)
    tables = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert ", ".join(tables) == ", ".join(selection.MACHINES.values())
    assert len(rows) == len(tables) * len(selection.LAYERS)
    served = r"\w+: (unquantised|`\w+`(, \w+ scales)?)"
    for row in rows:
        _layer, with_it, without = row.rsplit(" | ", 2)
        assert re.fullmatch(served, with_it), row
        assert without == "the same" or re.fullmatch(served, without), row


@pytest.mark.skipif(
    vllm.__version__.split("+")[0] != "0.33.0", reason="this is not vLLM 0.33: test_vllm33.py"
)
def test_the_page_is_what_is_decided() -> None:
    assert selection.page() == selection.PAGE.read_text("utf-8")
