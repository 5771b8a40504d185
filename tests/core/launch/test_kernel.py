"""Kernel, Family and Variant: what is chosen by a caller, on the command line, and in C++."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from moe_nvlink_plugin.errors import CompileError, ConfigError
from moe_nvlink_plugin.exchange.kernels import COMBINE, DISPATCH, LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.lm_head.kernels import GATHER, HEAD
from moe_nvlink_plugin.tools.shipped import FAMILIES
from tests.support import kernel_texts
from tests.support.delays import replace_once
from tests.support.long_tests import first_of


def test_names_and_codes_are_the_same_choice() -> None:
    named = LAYER.variant(top_k="8", dtype="fp16", recipe="mxfp8", combine="nvfp4")
    assert named == LAYER.variant(top_k=8, dtype=1, recipe=4, combine=2)
    assert str(named) == "top_k=8,dtype=fp16,recipe=mxfp8,combine=nvfp4"
    assert str(named.instead(recipe=0, combine="bf16")) == "top_k=8,dtype=fp16"
    assert str(HEAD.variant()) == "lm_head,dtype=bf16"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"top_k=N is missing; top_k=N\[,dtype=TYPE\]"),
        ({"top_k": 0}, "top_k=0 is none of the values .* one of 1, 2, .*, 32"),
        ({"top_k": 33}, "top_k=33 is none"),
        ({"top_k": 8, "dtype": "fp8"}, "dtype=fp8 is none .* one of bf16, fp16, fp32"),
        ({"top_k": 8, "hidden": 7168}, "unknown: hidden; top_k=N"),
    ],
)
def test_what_is_no_choice(values: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LAYER.variant(**values)


def test_a_kernel_has_builds_for_its_own_axes_only() -> None:
    one, other = (
        LAYER.variant(top_k=8, recipe="mxfp8", combine=name) for name in ("bf16", "nvfp4")
    )
    assert one.build(DISPATCH, pdl=True) == other.build(DISPATCH, pdl=True)
    assert one.build(COMBINE, pdl=True) != other.build(COMBINE, pdl=True)
    plain = LAYER.variant(top_k=8)
    assert plain.build(COMBINE, pdl=True) == one.build(COMBINE, pdl=True)
    assert plain.build(DISPATCH, pdl=True) == one.build(DISPATCH, pdl=True, recipe=0)
    assert [build.kernel for build in plain.builds(pdl=True)] == [*LAYER.kernels]


def test_a_build_has_one_kernel_and_fixes_its_values() -> None:
    text = LAYER.variant(top_k=8, recipe="mxfp8").build(DISPATCH, pdl=False).text()
    assert text.count("\nMOE_NVLINK_KERNEL(") == 1
    for line in ("int kTopK = 8;", "int kTopKBound = 8;", "int kElement = 0;"):
        assert f"\n  static constexpr {line}" in text
    assert "\n  static constexpr int kQuantiser = 4;" in text
    assert "\n  static constexpr bool kPdl = false;" in text.partition("struct Config :")[2]
    head = HEAD.variant(dtype="fp32").build(GATHER, pdl=True).text().partition("struct Config :")[2]
    assert "kTopK = " not in head.partition("};")[0]


def test_processes_that_compile_are_given_the_same_choice() -> None:
    for variant in (LAYER.variant(top_k=2), HEAD.variant()):
        there = pickle.loads(pickle.dumps(variant))
        assert there == variant
        assert there.builds(pdl=True) == variant.builds(pdl=True)


def test_names_are_no_one_elses() -> None:
    kernels = [kernel for family in FAMILIES for kernel in family.kernels]
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert len({family.word for family in FAMILIES}) == len(FAMILIES)
    codes = [phase.code for family in FAMILIES for phase in family.phases]
    assert len(set(codes)) == len(codes) == 4


@pytest.mark.parametrize(
    ("last", "new"),
    first_of(
        [
            ("kQuantiserFp8BlockPow2 = 6,", "kQuantiserNew = 7,"),
            ("kElementFp32 = 2,", "kElementNew = 3,"),
        ]
    ),
)
def test_a_forgotten_case_does_not_compile(last: str, new: str, tmp_path: Path) -> None:
    text = replace_once(kernel_texts.host_source(), last, f"{last} {new}")
    name = new.partition(" ")[0]
    with pytest.raises(CompileError, match=f"enumeration value .{name}. not handled in switch"):
        host.compile_text(text, tmp_path / "unused.so", (*host.FLAGS, "-fsyntax-only"))
