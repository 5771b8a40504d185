"""What instructions compute, against Python: those that round, saturate, wrap, or know NaN.

The oracles are Python's integers, numpy and ml_dtypes; they follow the PTX ISA, and know nothing of
the table in tests/support/ptx. Accesses, moves, meetings and control have no special values: a
wrong one changes the bits that test_cases.py compares.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from tests.ptx import one_instruction as one
from tests.support.ptx import build, translate
from tests.support.ptx.machine import Machine
from tests.support.ptx.text import UnknownPtxError

RECORDS = 2048
#: NaN of an f32 operation (CUDA programming guide, floating-point standard).
NAN = 0x7FFFFFFF


class Form(NamedTuple):
    """An opcode with its modifiers.

    Attributes:
        name: as it stands in PTX, such as "add.s32".
        sources: types of the operands, of which an oracle gets Python's values: whole numbers
            (signed for sN), np.float32, np.float16, bool.
        result: type of the result.
        expected: the result. A Python float: it may differ in the last two bits. None: the ISA
            leaves it open.
        body: PTX, if it is not `name %d, %a0, %a1, ...;`.
    """

    name: str
    sources: tuple[str, ...]
    result: str
    expected: Callable[..., Any]
    body: str = ""

    def text(self, number: int) -> str:
        """PTX that computes %d of %a0, %a1, ..., which are the low bits of the record's words."""
        names = [f"%a{n}" for n in range(len(self.sources))]
        lines = [f".reg .{_REGISTERS[width(self.result)][0]} %d;"]
        for n, kind in enumerate(self.sources):
            register, narrow, _ = _REGISTERS[width(kind)]
            lines.append(f".reg .{register} %a{n};\n{narrow.format(f'%a{n}', f'%word{n}')}")
        lines.append(self.body or f"{self.name} %d, {', '.join(names)};")
        lines.append(_REGISTERS[width(self.result)][2].format("%d", "%word7"))
        return "{\n" + "\n".join(lines) + f"\nst.global.u64 [%result+{8 * number}], %word7;\n}}\n"

    def is_right(self, words: list[int], actual: int) -> bool:
        """Whether a result's bits are what the words of a record make."""
        expected = self.expected(*map(value_of, self.sources, words))
        if expected is None:
            return True
        if isinstance(expected, float):
            return _is_near(value_of("f32", actual), expected)
        return actual == bits_of(self.result, expected)


#: By its bits, the register that holds a value, and how 64 bits get into it and out of it.
_REGISTERS = {
    1: ("pred", "setp.ne.u64 {0}, {1}, 0;", "selp.u64 {1}, 1, 0, {0};"),
    16: ("b16", "cvt.u16.u64 {0}, {1};", "cvt.u64.u16 {1}, {0};"),
    32: ("b32", "cvt.u32.u64 {0}, {1};", "cvt.u64.u32 {1}, {0};"),
    64: ("b64", "mov.b64 {0}, {1};", "mov.b64 {1}, {0};"),
}


def width(kind: str) -> int:
    """Bits of a register of a type."""
    return 1 if kind == "pred" else int(re.sub(r"\D+", "", kind.removeprefix("b")))


def value_of(kind: str, bits: int) -> Any:
    """The value of the low bits of a word."""
    if kind == "pred":
        return bits != 0
    bits &= (1 << width(kind)) - 1
    if kind == "f32":
        return np.uint32(bits).view(np.float32)
    if kind == "f16":
        return np.uint16(bits).view(np.float16)
    return bits - (1 << width(kind)) * (kind[0] == "s" and bits >> (width(kind) - 1))


def bits_of(kind: str, value: Any) -> int:
    """The register that has a value; whole numbers wrap."""
    if isinstance(value, np.floating):
        return NAN if np.isnan(value) else int(np.float32(value).view(np.uint32))
    return int(value) & ((1 << width(kind)) - 1)


def _is_near(actual: np.float32, exact: float) -> bool:
    """What is too small may be zero, and what is too large infinite."""
    if abs(exact) < 2**-125:
        return bool(abs(actual) <= 2**-125 and np.signbit(actual) == np.signbit(exact))
    return bool(np.isclose(actual, np.float32(exact), rtol=2**-22, atol=0, equal_nan=True))


# ---- oracles


def _divided(a: int, b: int, bits: int) -> int | None:
    if b == 0 or (a, b) == (-(1 << bits - 1), -1):
        return None
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int, bits: int) -> int | None:
    quotient = _divided(a, b, bits)
    return None if quotient is None else a - b * quotient


def _integers() -> Iterator[Form]:
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        two, bits = (kind, kind), width(kind)
        yield Form(f"add.{kind}", two, kind, lambda a, b: a + b)
        yield Form(f"sub.{kind}", two, kind, lambda a, b: a - b)
        yield Form(f"mul.lo.{kind}", two, kind, lambda a, b: a * b)
        yield Form(f"mul.hi.{kind}", two, kind, lambda a, b, n=bits: a * b >> n)
        yield Form(f"mad.lo.{kind}", (*two, kind), kind, lambda a, b, c: a * b + c)
        yield Form(f"min.{kind}", two, kind, min)
        yield Form(f"max.{kind}", two, kind, max)
        yield Form(f"div.{kind}", two, kind, lambda a, b, n=bits: _divided(a, b, n))
        yield Form(f"rem.{kind}", two, kind, lambda a, b, n=bits: _remainder(a, b, n))
        yield Form(f"shr.{kind}", (kind, "u32"), kind, lambda a, n: a >> n)
        if kind[0] == "s":
            yield Form(f"neg.{kind}", (kind,), kind, lambda a: -a)
        if bits < 64:
            yield Form(f"mul.wide.{kind}", two, f"{kind[0]}{2 * bits}", lambda a, b: a * b)
            yield Form(f"cvt.rn.f32.{kind}", (kind,), "f32", np.float32)
        for to in ("u16", "s16", "u32", "s32", "u64", "s64"):
            if width(to) != bits:
                yield Form(f"cvt.{to}.{kind}", (kind,), to, lambda a: a)
        if bits > 16:
            least, most = value_of(kind, 1 << bits - 1), value_of(kind, (1 << bits - 1) - 1)
            least, most = (least, most) if kind[0] == "s" else (0, (1 << bits) - 1)
            truncated = lambda a, low=least, high=most: _truncated(a, low, high)  # noqa: E731
            yield Form(f"cvt.rzi.{kind}.f32", ("f32",), kind, truncated)


def _truncated(value: np.float32, least: int, most: int) -> int:
    """The next whole number towards zero that the type has; of NaN 0, in 64 bits the highest."""
    if np.isnan(value):
        return 0 if most < 1 << 32 else 1 << 63
    return most if value > most else least if value < least else int(value)


def _extracted(a: int, position: int, length: int) -> int:
    return a >> (position & 255) & ((1 << (length & 255)) - 1)


def _inserted(a: int, b: int, position: int, length: int) -> int:
    mask = ((1 << (length & 255)) - 1) << (position & 255)
    return (b & ~mask) | (a << (position & 255) & mask)


def _permuted(a: int, b: int, selector: int) -> int:
    sources = (b << 32 | a).to_bytes(8, "little")
    codes = [selector >> 4 * place for place in range(4)]
    chosen = [sources[code & 7] for code in codes]
    return int.from_bytes(
        bytes(
            255 * (byte >> 7) if code & 8 else byte
            for byte, code in zip(chosen, codes, strict=True)
        ),
        "little",
    )


def _bits() -> Iterator[Form]:
    for kind in ("b16", "b32", "b64", "pred"):
        yield Form(f"and.{kind}", (kind, kind), kind, lambda a, b: a & b)
        yield Form(f"or.{kind}", (kind, kind), kind, lambda a, b: a | b)
        yield Form(f"xor.{kind}", (kind, kind), kind, lambda a, b: a ^ b)
        yield Form(f"not.{kind}", (kind,), kind, lambda a: -1 - a)
    for kind in ("b16", "b32", "b64"):
        # Python would build a number of so many bits.
        yield Form(f"shl.{kind}", (kind, "u32"), kind, lambda a, n: a << n if n < 64 else 0)
    for kind in ("b32", "b64"):
        yield Form(f"bfi.{kind}", (kind, kind, "u32", "u32"), kind, _inserted)
        turned = lambda a, n=kind[1:]: int(f"{a:0{n}b}"[::-1], 2)  # noqa: E731
        yield Form(f"brev.{kind}", (kind,), kind, turned)
    for kind in ("u32", "u64"):
        yield Form(f"bfe.{kind}", (kind, "u32", "u32"), kind, _extracted)
    # Of zero: -1, which has all bits.
    shift = lambda a: 32 - a.bit_length() if a else -1  # noqa: E731
    yield Form("bfind.shiftamt.u32", ("u32",), "u32", shift)
    yield Form("prmt.b32", ("b32", "b32", "b32"), "b32", _permuted)
    funnel = lambda low, high, count: (high << 32 | low) << (count & 31) >> 32  # noqa: E731
    yield Form("shf.l.wrap.b32", ("b32", "b32", "u32"), "b32", funnel)


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: bool(a == b),
    "ne": lambda a, b: bool(a != b),
    "lt": lambda a, b: bool(a < b),
    "le": lambda a, b: bool(a <= b),
    "gt": lambda a, b: bool(a > b),
    "ge": lambda a, b: bool(a >= b),
}


def _compared(compare: Callable[[Any, Any], bool], of_nan: bool) -> Callable[[Any, Any], bool]:
    return lambda a, b: of_nan if np.isnan(a) or np.isnan(b) else compare(a, b)


def _comparisons() -> Iterator[Form]:
    for name, compare in _COMPARISONS.items():
        for kind in ("s16", "u16", "s32", "u32", "s64", "u64", "b16", "b32", "b64"):
            if kind[0] != "b" or name in ("eq", "ne"):
                yield Form(f"setp.{name}.{kind}", (kind, kind), "pred", compare)
        for suffix, of_nan in (("", False), ("u", True)):
            of_floats = _compared(compare, of_nan)
            yield Form(f"setp.{name}{suffix}.f32", ("f32", "f32"), "pred", of_floats)


def _fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32 | None:
    """a * b + c, rounded once. The product is exact in f64; of a tie there it would be twice."""
    total = np.float64(a) * np.float64(b) + np.float64(c)
    nearest = np.float32(total)
    next_ones = [np.float64(np.nextafter(nearest, np.float32(way))) for way in (-np.inf, np.inf)]
    return None if any(total - one == nearest - total for one in next_ones) else nearest


def _larger(a: np.float32, b: np.float32) -> np.float32:
    if np.isnan(a) or np.isnan(b):
        return b if np.isnan(a) else a
    if a == b:  # zeros: -0.0 is the smaller
        return b if np.signbit(a) else a
    return max(a, b)


def _with_sign(sign: np.float32, value: np.float32) -> int:
    return int(sign.view(np.uint32)) & 0x80000000 | int(value.view(np.uint32)) & 0x7FFFFFFF


def _unless_nan(result: Callable[[np.float32], Any]) -> Callable[[np.float32], Any]:
    return lambda a: None if np.isnan(a) else result(a)


def _flushed(value: np.float32) -> np.float32:
    return value * np.float32(0) if abs(value) < np.float32(2**-126) else value


def _floats() -> Iterator[Form]:
    two = ("f32", "f32")
    yield Form("add.rn.f32", two, "f32", lambda a, b: a + b)
    yield Form("add.ftz.f32", two, "f32", lambda a, b: _flushed(_flushed(a) + _flushed(b)))
    yield Form("sub.rn.f32", two, "f32", lambda a, b: a - b)
    yield Form("mul.rn.f32", two, "f32", lambda a, b: a * b)
    yield Form("fma.rn.f32", (*two, "f32"), "f32", _fused)
    yield Form("div.rn.f32", two, "f32", lambda a, b: a / b)
    yield Form("rcp.rn.f32", ("f32",), "f32", lambda a: np.float32(1) / a)
    yield Form("max.f32", two, "f32", _larger)
    yield Form("neg.f32", ("f32",), "f32", _unless_nan(lambda a: -a))
    yield Form("abs.f32", ("f32",), "f32", _unless_nan(abs))
    yield Form("copysign.f32", two, "b32", _with_sign)
    reciprocal = lambda a: float(1 / np.float64(_flushed(a)))  # noqa: E731
    yield Form("rcp.approx.ftz.f32", ("f32",), "f32", reciprocal)
    power = lambda a: float(np.exp2(np.float64(_flushed(a))))  # noqa: E731
    yield Form("ex2.approx.ftz.f32", ("f32",), "f32", power)


def _narrowed(kind: Any, largest: float, of_nan: int, bits: int) -> Callable[..., int]:
    """cvt.rn.satfinite to a pair: the first source has the upper half."""

    def code(value: np.float32) -> int:
        clipped = np.clip(value, np.float32(-largest), np.float32(largest))
        return of_nan if np.isnan(value) else int(np.asarray(clipped).astype(kind).view(np.uint8))

    return lambda a, b: code(a) << bits | code(b)


def _widened(kind: Any, bits: int) -> Callable[[int], int]:
    """cvt.rn.f16x2 of a pair; every value is one of f16's."""

    def half(code: int) -> int:
        value = np.uint8(code).view(kind).astype(np.float16)
        return 0x7FFF if np.isnan(value) else int(value.view(np.uint16))

    return lambda pair: half(pair >> bits) << 16 | half(pair & ((1 << bits) - 1))


def _brain(value: np.float32) -> int:
    of = np.asarray(value).astype(ml_dtypes.bfloat16).view(np.uint16)
    return 0x7FFF if np.isnan(value) else int(of)


#: The register of a pair of e2m1 has 8 bits, which no other instruction takes.
_TO_E2M1 = """{ .reg .b8 %pair, %none;
cvt.rn.satfinite.e2m1x2.f32 %none, 0f00000000, 0f00000000;
cvt.rn.satfinite.e2m1x2.f32 %pair, %a0, %a1;
mov.b32 %d, {%pair, %none, %none, %none}; }"""
_OF_E2M1 = """{ .reg .b8 %pair<4>;
mov.b32 {%pair0, %pair1, %pair2, %pair3}, %a0;
cvt.rn.f16x2.e2m1x2 %d, %pair1; }"""


def _conversions() -> Iterator[Form]:
    two, e4m3, e2m1 = ("f32", "f32"), ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
    yield Form("cvt.f32.f16", ("f16",), "f32", _unless_nan(np.float32))
    yield Form("cvt.rn.bf16.f32", ("f32",), "b16", _brain)
    yield Form("cvt.rn.bf16x2.f32", two, "b32", lambda a, b: _brain(a) << 16 | _brain(b))
    yield Form("cvt.rn.satfinite.e4m3x2.f32", two, "b16", _narrowed(e4m3, 448, 0x7F, 8))
    yield Form("cvt.rn.f16x2.e4m3x2", ("b16",), "b32", _widened(e4m3, 8))
    yield Form("cvt.rn.satfinite.e2m1x2.f32", two, "b32", _narrowed(e2m1, 6, 7, 4), _TO_E2M1)
    second = lambda word: _widened(e2m1, 4)(word >> 8 & 255)  # noqa: E731
    yield Form("cvt.rn.f16x2.e2m1x2", ("b32",), "b32", second, _OF_E2M1)


FORMS = (*_integers(), *_bits(), *_comparisons(), *_floats(), *_conversions())

_FLOATS = (
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x40000000, 0x3FC00000, 0x3F800001),
    *(0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x4B800000, 0x4B000001),
    *(0x3EAAAAAB, 0x34000000, 0x33800000, 0x3DCCCCCD, 0x447A0000, 0xC2F6E979, 0x477FE000),
    *(0x43E00000, 0x43E7FFFF, 0x43E80000, 0x43E80001, 0x3C000000, 0x3B000000, 0x3B000001),
    *(0x40C00000, 0x40A00000, 0x40200000, 0x3E800000, 0x3E800001, 0x3F400000, 0x7E800000),
)
_NEAR = (0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 4180)
_POWERS = tuple(1 << bits for bits in (8, 15, 16, 31, 32, 63))


def records() -> one.Words:
    """Words that are special in a type, or close to it, and others; the same in every run."""
    draw = random.Random(1)
    special = [*_FLOATS, *(v + d for v in (*_NEAR, *_POWERS) for d in (-1, 0, 1))]
    special += [-each for each in special]
    words = [
        draw.choice(special) if draw.random() < 0.7 else draw.getrandbits(draw.choice((16, 32, 64)))
        for _ in range(RECORDS * one.WORDS)
    ]
    return np.array([each & 2**64 - 1 for each in words], np.uint64).reshape(-1, one.WORDS)


def test_values() -> None:
    lines = [f"ld.global.u64 %word{n}, [%record+{8 * n}];" for n in range(one.WORDS)]
    lines += [form.text(number) for number, form in enumerate(FORMS)]
    library = build.load(one.HEAD + one.entry("values", "\n".join(lines), words=len(FORMS)))
    given, results = records(), np.zeros((RECORDS, len(FORMS)), np.uint64)
    with Machine(ranks=1, seed=1) as machine:
        one.run(machine, library["values"], (given, results), RECORDS // one.THREADS)
    with np.errstate(all="ignore"):
        for form, of_form in zip(FORMS, results.T.tolist(), strict=True):
            for words, actual in zip(given.tolist(), of_form, strict=True):
                right = form.is_right(words, actual)
                assert right, f"{form.name} of {[*map(hex, words)]}: {actual:#x}"


def test_wrong_values_are_noticed() -> None:
    """A result that is one bit off, unless the ISA leaves it open."""
    with np.errstate(all="ignore"):
        for form in FORMS:
            few = records()[:200].tolist()
            values = [form.expected(*map(value_of, form.sources, each)) for each in few]
            exact = [
                (each, bits_of(form.result, value))
                for each, value in zip(few, values, strict=True)
                if value is not None and not isinstance(value, float)
            ]
            assert all(form.is_right(each, bits) for each, bits in exact)
            assert not any(form.is_right(each, bits ^ 1) for each, bits in exact), form.name
            assert exact or ".approx" in form.name


# ---- what is not known is an error that names it

_UNKNOWN = {
    "madc.lo.u32 %r0, %r1, %r2, %r3;": "unknown opcode madc",
    "ld.global.b7 %r0, [%record];": "no type",
    "atom.global.mul.u32 %r0, [%record], %r1;": ".mul",
    "cvt.rn.satfinite.e3m2x2.f32 %r0, %r1, %r2;": "unknown types",
    "setp.lo.u32 %p0, %r1, %r2;": ".lo",
    "bar.sync 1, 64;": "unknown barrier",
    ".local .align 4 .b8 depot[8];": "unknown directive",
    "mov.u32 %r0, %no_such_register;": "unknown operand %no_such_register",
    "ld.global.u32 %r0, [%record*2];": "%record*2",
    ".callprototype;": "unknown directive",
    ".reg .b7 %x;": "unknown registers",
    "shfl.sync.left.b32 %r0, %r1, 1, 31, -1;": "unknown meeting",
    "bfe.s32 %r0, %r1, %r2, %r3;": "unknown type",
    "bfind.u32 %r0, %r1;": "unknown form",
    "bfind.shiftamt.s32 %r0, %r1;": "unknown type",
    "bfind.shiftamt.u64 %r0, %word0;": "unknown type",
    "neg.u32 %r0, %r1;": "unknown type",
    "cvt.rq.f32.u32 %r0, %r1;": "unknown modifier .rq",
    "cvt.rzi.f32.f32 %r0, %r1;": "unknown types",
    "mov.u32 %r0;": "ValueError",
    "ld.global.u32 %r0;": "IndexError",
    "st.async.release.cta.shared.b64 [%r0], %word0;": "st.async is a release",
    "cp.async.bulk.global.shared::cta.bulk_group [%word0], [%r0], 16;": "unknown copy",
    "mbarrier.arrive.shared::cta.b64 _, [%r0], 1;": "unknown barrier",
    "mbarrier.test_wait.parity.shared::cta.b64 %p0, [%r0], 0;": "unknown modifier .test_wait",
    "fence.proxy.alias;": "unknown proxy",
    "fence.proxy.async;": "unknown proxy",
}


@pytest.mark.parametrize("text", _UNKNOWN)
def test_what_is_unknown_is_named(text: str) -> None:
    ptx = one.HEAD + one.entry("unknown", text)
    line = 1 + ptx[: ptx.index(text)].count("\n")
    with pytest.raises(UnknownPtxError, match=rf"PTX line {line}: ") as raised:
        translate.to_cpp(ptx)
    assert _UNKNOWN[text] in str(raised.value)
    assert text.rstrip(";") in str(raised.value)
