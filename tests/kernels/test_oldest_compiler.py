"""The oldest host compiler that README.md names compiles the kernels, which give the same bits.

With the AVX-512 code, of which compilers differ most in what they know. Every other test takes the
g++ that this machine calls by that name.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.recipes.combine_formats import FORMATS
from moe_nvlink_plugin.verify.cases import RECIPES
from tests.kernels.exchange import test_combine_formats
from tests.kernels.formats import test_quantisers
from tests.support import builds, kernel_texts

OLDEST, LEVEL = "g++-11", "x86-64-v4"
README = Path(__file__).resolve().parents[2] / "README.md"

pytestmark = [
    pytest.mark.long,
    builds.ON_X86,
    pytest.mark.skipif(
        shutil.which(OLDEST) is None, reason=f"not installed: {OLDEST} (Debian's package)"
    ),
]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels, compiled by the oldest compiler."""
    monkeypatch.setenv("MOE_NVLINK_CXX", OLDEST)
    return host.build(kernel_texts.host_source(), builds.flags(LEVEL))


def test_the_oldest_compiler_compiles_the_kernels(library: Path) -> None:
    readme = README.read_text(encoding="utf-8")
    row = re.search(r"\| host compiler \| g\+\+ (\d+) and newer", readme)
    assert row is not None
    assert f"g++-{row[1]}" == OLDEST
    version = f"GCC: \\([^)]*\\) {row[1]}\\.".encode()  # in the section .comment
    assert re.search(version, library.read_bytes())


@pytest.mark.skipif(
    bool(builds.missing(LEVEL)), reason=f"not executed: this processor does not know {LEVEL}"
)
def test_its_kernels_give_the_same_bits(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = mock.Mock(return_value=host.HostLibrary(library))
    monkeypatch.setattr(host, "load", load)
    for recipe in RECIPES:
        test_quantisers.test_rows_of_several_pieces(recipe, torch.bfloat16)
    for name in FORMATS:
        test_combine_formats.test_every_code_and_scale(name, torch.bfloat16)
        test_combine_formats.test_special_rows(name, torch.bfloat16, 2304)
    assert load.called
