"""moe-nvlink dump-source: NVRTC makes the product's code of the text that it prints."""

from __future__ import annotations

import itertools
import re

import pytest

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.exchange.kernels import LAYER, SMALL_DISPATCH
from moe_nvlink_plugin.jit import folded, nvrtc
from moe_nvlink_plugin.launch.kernel import Build
from moe_nvlink_plugin.tools import cli, dump_source, shipped

#: Values beside the defaults, for kernels that have these axes.
VALUES = {"top_k": "8", "recipe": "nvfp4", "combine": "fp8_block", "dtype": "fp16"}
KERNELS = {kernel.name: kernel for family in shipped.FAMILIES for kernel in family.kernels}


def build_of(name: str) -> Build:
    axes = {axis.name for axis in KERNELS[name].axes}
    return dump_source.parse_build(name, [f"{n}={v}" for n, v in VALUES.items() if n in axes])


# sm_100a converts FP4 by instructions, and so takes the other branch of the one condition there is.
@pytest.mark.parametrize(
    ("name", "architecture"), list(zip(KERNELS, itertools.cycle(["sm_90a", "sm_100a"])))
)
def test_the_code_is_that_of_the_product(gpu_compiler: None, name: str, architecture: str) -> None:
    build = build_of(name)
    text = dump_source.text(build, architecture)
    assert text != build.text()
    product = nvrtc.compile_cubin(build.text(), architecture)
    assert nvrtc.compile_cubin(text, architecture) == product


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_left_out(name: str) -> None:
    text = dump_source.text(build_of(name), "sm_90a")
    code = re.sub(r"//.*", "", text)
    for gone in ("HOST_ONLY", "DEVICE_ONLY", "platform_host", "std::", "#if", "#include", "__AVX"):
        assert gone not in code
    assert "Config::" not in code
    assert not re.search(r"[ \t]$|\n\n\n", text, re.MULTILINE)
    assert "// The executor on a GPU: one launch is a grid of CTAs." in text
    assert "constexpr bool kHasFp4Conversions = false;" in text
    assert "constexpr bool kHasFp4Conversions = true;" not in text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dump-source", "--arch", "sm_100a", "small_dispatch", "top_k=6", "pdl=no"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    build = LAYER.variant(top_k=6).build(SMALL_DISPATCH, pdl=False)
    assert out == dump_source.text(build, "sm_100a")
    first = (
        "// small_dispatch top_k=6 dtype=bf16 recipe=none expert_counts=no units=14 "
        "async_release=no pdl=no for sm_100a\n"
    )
    assert out.startswith(first)
    assert "  if constexpr (false) pdl_wait();\n" in out
    assert "constexpr bool kHasFp4Conversions = true;" in out


def test_ptx(gpu_compiler: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dump-source", "--arch", "sm_90a", "meet", "--ptx"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("// meet pdl=yes for sm_90a\n")
    assert "\n.target sm_90a\n" in out
    assert ".entry moe_nvlink_meet(" in out
    assert "\0" not in out


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("combined", "kernel 'combined' is unknown; use one of dispatch, combine, small_dispatch"),
        ("combine", "top_k is missing; combine takes top_k from 1 to 32; dtype of bf16, fp16, "),
        ("combine top_k=33", "top_k=33 is none of the values that kernels are built for; use one "),
        ("combine top_k=8 recipe=mxfp8", "unknown: recipe; combine takes top_k from 1 to 32; "),
        ("combine top_k=8 combine=int4", "combine=int4 is none of the values that kernels are "),
        ("combine top_k=8 pdl", "'pdl' is not name=value"),
        ("combine top_k=8 top_k=8", "top_k is given twice"),
        ("meet top_k=8", "unknown: top_k; meet takes pdl of no, yes (yes if left out)"),
    ],
)
def test_refusals(arguments: str, refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *values = arguments.split()
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        dump_source.parse_build(name, values)
    assert cli.main(["dump-source", "--arch", "sm_90a", name, *values]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(refusal)


# ---- what folded makes of texts that kernels/ does not have, or not yet


@pytest.mark.parametrize(
    "text",
    ["#if A > 1\n#endif\n", "#ifdef A\n#endif\n", "#if defined(A)\n#elif defined(B)\n#endif\n"],
)
def test_other_conditions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write #"):
        folded.as_compiled(text, "sm_90a")
