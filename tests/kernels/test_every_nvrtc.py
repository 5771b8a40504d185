"""Every kind of kernel for GPUs compiles with the oldest NVRTC that pyproject.toml allows, and with
this environment's, which is the newest in a new environment. Compiled, not run.

In each run the oldest compiles a kernel of every third family; what this environment's compiles
then, other tests look into (test_sass.py) and execute (tests/ptx). Behind the marker `long`, both
compile all kinds for the oldest architecture and the newest.
every_nvrtc.py compiles for all architectures, with every release.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest

from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import header, nvrtc
from moe_nvlink_plugin.launch.kernel import ELEMENT
from tests.kernels import every_nvrtc
from tests.kernels.every_nvrtc import Kernel, Outcome, Release
from tests.support import long_tests

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
#: A minute of processor time each; other tests may have most of the processors.
pytestmark = pytest.mark.timeout(1800)


def oldest_release() -> Path:
    """Where `make test` puts it. Nowhere else is it there, and only in CI must it be."""
    folder = Path(sys.prefix) / f"nvrtc-{every_nvrtc.oldest()}"
    if not folder.is_dir():
        reason = f"{folder} is not there: run `make {folder.parent.name}/{folder.name}`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


def test_messages_name_the_oldest() -> None:
    assert nvrtc.TRIED[0] == every_nvrtc.oldest()


def check(release: Release, which: str) -> None:
    assert not release.refused(), every_nvrtc.complaints(release.refused())
    assert len(release.outcomes) == len(every_nvrtc.LISTS[which]())


@pytest.mark.parametrize("which", long_tests.first_of(["third of few", "half", "other half"]))
def test_the_oldest_compiles_every_kind(which: str) -> None:
    release = every_nvrtc.compile_all(oldest_release(), which=which, time_limit_s=1700)
    assert every_nvrtc.oldest().startswith(f"{release.version}.")
    check(release, which)


@pytest.mark.long
@pytest.mark.parametrize("which", ["half", "other half"])
def test_this_environments_compiles_every_kind(which: str) -> None:
    release = every_nvrtc.compile_all(None, which=which, time_limit_s=1700)
    assert release.version == nvrtc.version()
    check(release, which)


@pytest.mark.parametrize("whole", long_tests.first_of([False, True]))
def test_the_list_has_every_kind_of_kernel(whole: bool) -> None:
    """A recipe, a format, an element type or an architecture that is new is in the list too."""
    kinds = {*header.quantisers(), *header.combine_formats()} - {"none", "bf16"}
    names = [f"{one.name} for {one.architecture}" for one in every_nvrtc.kernels(whole)]
    for kind, architecture in itertools.product(kinds, nvrtc.ARCHITECTURES):
        wanted = [f"dtype=bf16,{word}={kind} for {architecture}" for word in ("recipe", "combine")]
        assert any(name.endswith(tuple(wanted)) for name in names), (kind, architecture)
    for dtype, architecture in itertools.product(header.elements(), nvrtc.ARCHITECTURES):
        assert any(
            f" of lm_head,dtype={dtype}" in name and name.endswith(architecture) for name in names
        )
    for kind, dtype in itertools.product(kinds, header.elements()):
        assert any(f"dtype={dtype}," in name and f"={kind}" in name for name in names)
    for kernel, architecture in itertools.product(LAYER.kernels, nvrtc.ARCHITECTURES):
        first = f"{kernel.name} of "
        of_kernel = [n for n in names if n.startswith(first) and n.endswith(architecture)]
        has_types = whole and ELEMENT in kernel.axes
        for dtype in header.elements() if has_types else ["bf16"]:
            assert any(f"dtype={dtype}" in name for name in of_kernel), (first, architecture)
    of_types = [kernel for kernel in LAYER.kernels if ELEMENT in kernel.axes]
    for kernel, dtype in itertools.product(of_types, header.elements()):
        first = f"{kernel.name} of "
        assert any(n.startswith(first) and f"dtype={dtype}" in n for n in names), (first, dtype)
    texts = [(one.text(), one.architecture) for one in every_nvrtc.kernels(whole)]
    assert len(set(texts)) == len(texts), "something is compiled twice"


def test_a_refusal_is_told() -> None:
    text = 'extern "C" __global__ void f(int* p) { no_such_function(p); }'
    refused = every_nvrtc.outcome_of(Kernel("nvfp4", "a kernel", "sm_90a", lambda: text))
    assert "no_such_function" in refused.error
    compiled = Outcome("nvfp4", "another", "")
    found = {"13.0.48": Release("13.0", "", [compiled, refused], 1.0)}
    assert "| 13.0.48 | 1, **1 refused** | 1, **1 refused** | 1 |" in every_nvrtc.table(found)
    told = every_nvrtc.complaints([refused] * 4)
    assert told.count("no_such_function") == 3 * refused.error.count("no_such_function")
    assert "a kernel for sm_90a: refused too" in told


def test_a_spill_counts_as_a_refusal() -> None:
    text = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) f(float* p) { float v[256]; '
        "for (int i = 0; i < 256; ++i) v[i] = p[i * 1024]; "
        "for (int i = 255; i >= 0; --i) p[i] = v[i] * v[255 - i]; }"
    )
    spilling = Kernel("mxfp8", "a spill", "sm_90a", lambda: text)
    assert "spill" in every_nvrtc.outcome_of(spilling).error
    assert not every_nvrtc.outcome_of(spilling._replace(strict=False)).error
