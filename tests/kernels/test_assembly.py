"""The host builds move rows and add them with vector instructions (x86-64).

Of the build for this processor, and of those for others, which need not be executed for that.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_nvlink_plugin.jit import host, source
from tests.support import builds, kernel_texts
from tests.support.long_tests import first_of

pytestmark = builds.ON_X86

README = Path(__file__).resolve().parents[2] / "README.md"

#: The build that ranks of this machine load, and what they would load elsewhere.
EVERY_BUILD = pytest.mark.parametrize("level", ["native", *first_of(builds.LEVELS, 0)])

#: A move of a whole vector register: of 16, 32 or 64 bytes, whatever the CPU has.
VECTOR_MOVE = re.compile(r"v?mov(?:dq[au]|[au]p[sd])(?:8|16|32|64)?\s")
VECTOR_ADD = re.compile(r"v?addps\s")
VECTOR_MAX = re.compile(r"v?pmaxud\s")
#: One step of a sum of quantised rows: a row's codes are decoded, and there is nothing before that.
DECODES = {
    "Fp8BlockTerm<": re.compile(r"vcvtph2ps\s"),
    "Nvfp4Term<": re.compile(r"vpmovzxbd\s"),
    "Fp8TensorTerm<": re.compile(r"vcvtph2ps\s"),
}
VECTOR_MULTIPLY = re.compile(r"v?mulps\s")
SCALAR_MULTIPLY = re.compile(r"v?mulss\s")
#: Elements that enter or leave a register one by one, or numbers that are added one by one.
ONE_ELEMENT = re.compile(r"v?(?:pinsr[bwdq]|pextr[bwdq]|insertps|extractps|addss)\s")

#: Parts of combine that one compiler inlines, for one CPU, and another does not.
SUMS = ("sum_present_rows", "sum_rows")


def disassembly(text: str, flags: tuple[str, ...] = host.FLAGS) -> dict[str, str]:
    """Symbol -> code; with the default flags, of the library the CPU ranks load."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed (apt-get install binutils)")
    path = host.build(text, flags)
    command = ["objdump", "-d", "--no-show-raw-insn", "--demangle", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^[0-9a-f]+ <(.*)>:\n((?:.+\n)+)", listing, re.MULTILINE)
    assert found
    return dict(found)


@functools.cache
def of_level(level: str) -> dict[str, str]:
    """The whole library's, as a processor of this level would load it."""
    return disassembly(kernel_texts.host_source(), builds.flags(level))


def code_of(symbols: dict[str, str], verb: str, *helpers: str) -> str:
    """All code of a verb: its entry point and whatever the compiler did not inline into it."""
    (other,) = {"dispatch", "combine"} - {verb}
    mine = [
        code
        for name, code in symbols.items()
        if any(word in name.lower() for word in (verb, *helpers)) and other not in name.lower()
    ]
    assert mine, f"no symbol of {verb} among {len(symbols)}"
    return "".join(mine)


def runs_of_moves(code: str) -> list[int]:
    """Lengths of the runs of consecutive vector moves that touch memory."""
    runs, length = [], 0
    for line in code.splitlines():
        if VECTOR_MOVE.search(line) and "(" in line and "rsp" not in line:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return runs


def copies_with_vectors(code: str) -> bool:
    # 128 bytes per target: two registers of 64 bytes, or more of the narrower ones. Copies of the
    # compiler's own structs make some ten moves, rows some hundreds.
    moves = runs_of_moves(code)
    return max(moves, default=0) >= 2 and sum(moves) >= 32


def adds_with_vectors(code: str) -> bool:
    return len(VECTOR_ADD.findall(code)) >= 4


def compares_with_vectors(symbols: dict[str, str]) -> bool:
    """The head's argmax: 128 bytes of logits are at least two registers of orders."""
    code = [code for name, code in symbols.items() if re.search(r"argmax|words|largest", name)]
    return sum(len(VECTOR_MAX.findall(one)) for one in code) >= 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "widest"), [("x86-64", "xmm"), ("x86-64-v3", "ymm"), ("x86-64-v4", "zmm")]
)
def test_a_build_is_for_its_processor(level: str, widest: str) -> None:
    """Or the tests below would look at the same code several times."""
    code = "".join(of_level(level).values())
    assert max(re.findall(r"%([xyz]mm)\d", code)) == widest


@pytest.mark.long
@builds.HAS_OLDEST
def test_the_oldest_compiler_compiles_the_kernels() -> None:
    """The oldest that README.md names; test_builds.py runs them."""
    row = re.search(r"\| host compiler \| g\+\+ (\d+) and newer", README.read_text("utf-8"))
    assert row is not None
    assert f"g++-{row[1]}" == builds.OLDEST
    version = f"GCC: \\([^)]*\\) {row[1]}\\.".encode()  # in the section .comment
    assert re.search(version, builds.library("x86-64-v4", builds.OLDEST).read_bytes())


@EVERY_BUILD
def test_dispatch_copies_with_vectors(level: str) -> None:
    code = code_of(of_level(level), "dispatch", "put_r")
    assert copies_with_vectors(code), f"runs of vector moves: {runs_of_moves(code)}"


@EVERY_BUILD
def test_combine_adds_with_vectors(level: str) -> None:
    code = code_of(of_level(level), "combine", *SUMS)
    assert adds_with_vectors(code), f"{len(VECTOR_ADD.findall(code))} vector additions"


def decodes_with_vectors(symbols: dict[str, str], term: str) -> bool:
    """Combine's sums of quantised rows: all codes of a step at once, and only a scale by itself."""
    code = "".join(
        text for name, text in symbols.items() if term in name and not name.endswith("@plt")
    )
    steps = len(DECODES[term].findall(code))
    scalars = len(SCALAR_MULTIPLY.findall(code))
    vectors = len(VECTOR_MULTIPLY.findall(code))
    assert scalars + vectors >= 24, f"no sums of {term} found"
    return scalars <= steps <= vectors and steps >= 8 and not ONE_ELEMENT.search(code)


@EVERY_BUILD
@pytest.mark.parametrize("term", DECODES)
def test_combine_decodes_with_vectors(level: str, term: str) -> None:
    """Where there are instructions for it: x86-64 promises none."""
    assert decodes_with_vectors(of_level(level), term) is (level != "x86-64")


@EVERY_BUILD
def test_combine_streams_the_rows_that_it_quantises(level: str) -> None:
    """Without AVX nothing is streamed."""
    names = re.compile("send_quantised|quantise_received")
    code = [code for name, code in of_level(level).items() if names.search(name)]
    assert code
    assert ("movnt" in "".join(code)) is (level != "x86-64")


@EVERY_BUILD
def test_argmax_compares_with_vectors(level: str) -> None:
    """Where there is an instruction for it: SSE2, all that x86-64 promises, has none."""
    assert compares_with_vectors(of_level(level)) is (level != "x86-64")


#: What a lane of a CPU rank quantises at a time: 128 elements of bf16.
PIECES = """
using namespace moe_nvlink;
#define PIECE extern "C" [[gnu::flatten]]
PIECE void piece_mxfp8(const char* row, unsigned char* codes, uint8_t* scales) {
  quantise_in_registers<Mxfp8, Bf16, kLaneElements>(row, 1.0f, 0, codes, scales);
}
PIECE void piece_nvfp4(const char* row, unsigned char* codes, uint8_t* scales) {
  quantise_in_registers<Nvfp4, Bf16, kLaneElements>(row, 1.0f, 0, codes, scales);
}
PIECE void piece_fp8_block(const char* row, unsigned char* codes, unsigned char* scales) {
  quantise_in_registers<Fp8Block, Bf16, kGroupElements>(row, 1.0f, 0, codes, scales);
}
PIECE void piece_fp8(const char* row, const Fp8Tensor* format, unsigned char* codes) {
  encode_elements<Fp8Tensor, Bf16, kLaneElements>(row, true, *format, 0, codes);
}
"""


def encodes_with_vectors(code: str, elements: int) -> bool:
    """Without a loop. Each code takes one addition of fp32's, of at least 8 elements at a time.

    There is one branch, to the function for infinities and NaN.
    """
    packed = len(re.findall(r"v?addps\s.*%[yz]mm", code))
    scalar = re.search(r"v?addss\s", code) is not None
    branches = re.findall(r"\sj(?!mp)[a-z]+\s", code)
    return not scalar and len(branches) <= 1 and elements // 16 <= packed <= elements // 8 + 2


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_codes_are_made_with_vectors(level: str) -> None:
    text = source.amalgamate(("include/moe_nvlink/quantise.h",)) + PIECES
    symbols = disassembly(text, builds.flags(level))
    for piece in ("mxfp8", "nvfp4", "fp8"):
        assert encodes_with_vectors(symbols[f"piece_{piece}"], 128), piece


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_scales_of_blocks_are_made_together(level: str) -> None:
    """One division makes all scales of a group; elements are divided a register at a time."""
    text = source.amalgamate(("include/moe_nvlink/quantise.h",)) + PIECES
    code = disassembly(text, builds.flags(level))["piece_fp8_block"]
    assert not re.search(r"v?divss\s", code)
    assert re.search(r"vdivps\s.*%[yz]mm", code)


def test_codes_made_one_by_one_are_noticed() -> None:
    """Of arrays, which the compiler is left to vectorise, and does not."""
    text = source.amalgamate(("include/moe_nvlink/quantise.h",)) + PIECES
    start = "constexpr bool kLaneHasRegisters ="
    assert text.count(start) == 1
    symbols = disassembly(text.replace(start, f"{start} false &&"), builds.flags("x86-64-v3"))
    assert not encodes_with_vectors(symbols["piece_fp8"], 128)


def test_scalar_code_is_noticed() -> None:
    """Rows moved byte by byte, loops left as they are written."""
    # Without quantisers and the head's kernels, which move vectors too.
    constants = {"int kTopK": "8", "int kTopKBound": "8", "int kElement": "0"}
    constants |= {"int kQuantiser": "0", "int kCombine": "0"}
    whole = kernel_texts.host_unit(*kernel_texts.LAYER_FILES, constants=constants)
    unstreamed = whole.replace(
        "constexpr bool kStreams = true;", "constexpr bool kStreams = false;"
    )
    text = unstreamed.replace("put_range<kVectorBytes, ", "put_range<1, ")
    assert whole != unstreamed != text
    symbols = disassembly(
        text, (*host.FLAGS, "-O1", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")
    )
    assert not copies_with_vectors(code_of(symbols, "dispatch", "put_r"))


def test_an_argmax_of_one_logit_after_the_other_is_noticed() -> None:
    text = kernel_texts.host_unit(*kernel_texts.HEAD_FILES)
    flags = (*host.FLAGS, "-O1", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")
    assert not compares_with_vectors(disassembly(text, flags))
