"""The software GPU translates every kernel text that is compiled for GPUs, as PTX of the oldest
NVRTC that pyproject.toml allows and of this environment's, and every form in it has an oracle.

Translated, not run: test_cases.py runs them.
"""

from __future__ import annotations

import re

import pytest

from tests.kernels import every_nvrtc
from tests.kernels.every_nvrtc import Kernel, Release
from tests.kernels.test_every_nvrtc import oldest_release
from tests.ptx.test_opcodes import FORMS
from tests.support.ptx import build, translate
from tests.support.ptx.text import Instruction, parse

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
pytestmark = pytest.mark.timeout(3600)

_LISTS = [pytest.param(each, marks=pytest.mark.long) for each in ("short", "whole")]


def check(release: Release, which: str) -> None:
    assert not release.refused(), every_nvrtc.complaints(release.refused())
    assert len(release.outcomes) == len(every_nvrtc.LISTS[which]())


@pytest.mark.long
@pytest.mark.parametrize("which", ["few", *_LISTS])
def test_ptx_of_the_oldest_translates(which: str) -> None:
    release = every_nvrtc.compile_all(oldest_release(), which=which, as_ptx=True)
    assert every_nvrtc.oldest().startswith(f"{release.version}.")
    check(release, which)


@pytest.mark.parametrize("which", _LISTS)
def test_ptx_of_this_environments_translates(which: str) -> None:
    check(every_nvrtc.compile_all(None, which=which, as_ptx=True), which)


# ---- the forms

#: Accesses, moves, meetings, the grid, control.
PLAIN = {
    *("ld", "st", "atom", "red", "cp", "mbarrier", "fence", "mov", "cvta", "selp"),
    *("bar", "shfl", "redux", "vote", "match", "elect", "griddepcontrol"),
    *("bra", "ret", "exit", "trap", "nanosleep"),
}


def forms_of(kernel: Kernel) -> set[str]:
    """Opcodes with modifiers, as this environment's NVRTC writes them; all can be translated."""
    ptx = build.ptx_of(kernel.text(), kernel.architecture)
    translate.to_cpp(ptx)
    module = parse(ptx)
    return {
        ".".join((each.opcode, *each.modifiers))
        for entry in module.entries
        for each in entry.body
        if isinstance(each, Instruction)
    }


@pytest.mark.long
def test_every_form_has_an_oracle() -> None:
    """But those that have no special values, which test_cases.py and test_copies.py execute."""
    used = set().union(*map(forms_of, every_nvrtc.kernels()))
    others = {form for form in used if form.split(".")[0] in PLAIN}
    assert used - others <= {form.name for form in FORMS}


def test_few_have_every_family() -> None:
    families = {each.family for each in every_nvrtc.kernels()}
    assert {each.family for each in every_nvrtc.few()} == families


def test_a_refusal_names_opcode_line_and_kernel() -> None:
    text = 'extern "C" __global__ void f(int* p) { asm("isspacep.shared p, %0;" :: "l"(p)); }'
    text = text.replace('"isspacep', '"{ .reg .pred p; isspacep').replace(';" ::', '; }" ::')
    refused = every_nvrtc.translated(Kernel("nvfp4", "a kernel", "sm_90a", lambda: text))
    assert refused.name == "a kernel for sm_90a"
    assert re.search(r"PTX line \d+: unknown opcode isspacep: ", refused.error), refused.error
