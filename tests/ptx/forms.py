"""Opcodes of PTX with their modifiers ("forms"), each with operands and an oracle of its own.

`FORMS` has what computes a value from values: a test runs one form over many operands in one
launch. The oracles are Python's integers, fractions, numpy and ml_dtypes; they follow the PTX ISA
and know nothing of the table in tests/support/ptx. Values that the ISA leaves open (a division by
zero, the payload of some NaN) are not among the operands, or any NaN is accepted.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

#: NaN of an f32 operation (CUDA programming guide, floating-point standard).
NAN = 0x7FFFFFFF
_ANY_NAN = "any NaN"
#: What a register of a type holds in bits; bN, uN and sN by their name.
_BITS = {"f32": 32, "f16": 16, "e4m3x2": 16, "e2m1x2": 8, "pred": 1}


class Form(NamedTuple):
    """One form.

    Attributes:
        name: as it stands in PTX, such as "add.s32".
        sources: types of the operands, of which an oracle gets Python's values: whole numbers
            (signed for sN), np.float32, bool.
        result: type of the result.
        expected: the result: a value of the type, its bits, or ANY_NAN.
        accepts: in the place of `expected`, for approximations: whether a result is right.
        body: PTX, if it is not `name d, a, b, ...;`.
    """

    name: str
    sources: tuple[str, ...]
    result: str
    expected: Callable[..., Any]
    accepts: Callable[..., bool] | None = None
    body: str = ""

    def text(self) -> str:
        """PTX that computes %d of %a0, %a1, ..."""
        names = [f"%a{number}" for number in range(len(self.sources))]
        body = self.body or "{name} %d, {sources};"
        return body.format(name=self.name, sources=", ".join(names))

    def complaint(self, operands: Sequence[int], actual: int) -> str | None:
        """What is wrong with the bits of a result, or None."""
        values = [value_of(kind, bits) for kind, bits in zip(self.sources, operands, strict=True)]
        if self.accepts is not None:
            fine = self.accepts(value_of(self.result, actual), *values)
            return None if fine else f"{self.name} of {values}: {value_of(self.result, actual)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy: overflow, division by zero
            expected = self.expected(*values)
        if isinstance(expected, str):
            fine = bool(np.isnan(value_of(self.result, actual)))
        else:
            expected = bits_of(self.result, expected)
            fine = actual == expected
            expected = f"{expected:#x}"
        if fine:
            return None
        shown = ", ".join(f"{bits:#x}" for bits in operands)
        return f"{self.name} of {shown}: {actual:#x} instead of {expected}"


# ---- registers


def width(kind: str) -> int:
    """Bits of a register of a type."""
    return _BITS[kind] if kind in _BITS else int(kind[1:])


def value_of(kind: str, bits: int) -> Any:
    """The value of a register."""
    if kind == "pred":
        return bool(bits)
    if kind == "f32":
        return np.uint32(bits).view(np.float32)
    if kind == "f16":
        return np.uint16(bits).view(np.float16)
    if kind.startswith("s"):
        return signed(bits, width(kind))
    return bits


def bits_of(kind: str, value: Any) -> int:
    """The register that has a value; whole numbers wrap."""
    if isinstance(value, np.floating):
        bits = int(value.view({4: np.uint32, 2: np.uint16}[value.itemsize]))
        return NAN if kind == "f32" and np.isnan(value) else bits
    return int(value) & ((1 << width(kind)) - 1)


def signed(value: int, bits: int) -> int:
    """The number that the low bits stand for in two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_FLOATS = (
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x40000000, 0x3FC00000, 0x3F800001),
    *(0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x4B800000, 0x4B000001),
    *(0x3EAAAAAB, 0x34000000, 0x33800000, 0x3DCCCCCD, 0x447A0000, 0xC2F6E979, 0x477FE000),
    *(0x43E00000, 0x43E7FFFF, 0x43E80000, 0x43E80001, 0x3C000000, 0x3B000000, 0x3B000001),
    *(0x40C00000, 0x40A00000, 0x40200000, 0x3E800000, 0x3E800001, 0x3F400000, 0x7E800000),
)
_HALVES = (0, 0x8000, 0x3C00, 0xBC00, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00)


def edges(kind: str) -> tuple[int, ...]:
    """Registers of a type that are special, or close to what is."""
    if kind == "f32":
        return _FLOATS
    if kind == "f16":
        return _HALVES
    if kind == "e2m1x2":
        return tuple(range(256))
    if kind == "e4m3x2":
        return tuple(first | (255 - first) << 8 for first in range(256))
    bits = width(kind)
    near = {0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 255, 256, 4180}
    powers = {1 << (bits - 1), 1 << (bits // 2), 0xDEADBEEFCAFEF00D}
    every = {v + d for v in near | powers | {-v for v in near} for d in (-1, 0, 1)}
    return tuple(sorted({v & ((1 << bits) - 1) for v in every}))


def operands(form: Form, most: int = 1024) -> list[tuple[int, ...]]:
    """Edges with edges, then random registers, the same in every run."""
    choose = random.Random(form.name)
    per_source = [edges(kind) for kind in form.sources]
    combined = list(itertools.product(*per_source)) if len(per_source) < 3 else []
    if not combined or len(combined) > most:
        combined = [tuple(map(choose.choice, per_source)) for _ in range(most)]
    combined += [
        tuple(choose.getrandbits(width(kind)) for kind in form.sources) for _ in range(most // 4)
    ]
    return [each for each in combined if is_defined(form, each)]


def is_defined(form: Form, bits: tuple[int, ...]) -> bool:
    """Whether the ISA says what the result is."""
    if form.name.startswith(("div.s", "div.u", "rem.")):
        dividend, divisor = (value_of(kind, b) for kind, b in zip(form.sources, bits, strict=True))
        return divisor != 0 and not (divisor == -1 and dividend < -(1 << 30))
    return True


# ---- oracles


def _binary(kind: str, name: str, result: Callable[[Any, Any], Any]) -> Form:
    return Form(f"{name}.{kind}", (kind, kind), kind, result)


def _divided(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _integers() -> Iterator[Form]:
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64"):
        bits = width(kind)
        wide = f"{kind[0]}{2 * bits}"
        yield _binary(kind, "add", lambda a, b: a + b)
        yield _binary(kind, "sub", lambda a, b: a - b)
        yield _binary(kind, "mul.lo", lambda a, b: a * b)
        yield Form(f"mul.hi.{kind}", (kind, kind), kind, lambda a, b, n=bits: (a * b) >> n)
        yield _binary(kind, "min", min)
        yield _binary(kind, "max", max)
        yield _binary(kind, "div", _divided)
        yield _binary(kind, "rem", lambda a, b: a - b * _divided(a, b))
        three = (kind, kind, kind)
        yield Form(f"mad.lo.{kind}", three, kind, lambda a, b, c: a * b + c)
        if bits < 64:
            yield Form(f"mul.wide.{kind}", (kind, kind), wide, lambda a, b: a * b)
        yield Form(f"shr.{kind}", (kind, "u32"), kind, lambda a, n: a >> n)
        if kind.startswith("s"):
            yield Form(f"neg.{kind}", (kind,), kind, lambda a: -a)


def _inserted(bits: int) -> Callable[[int, int, int, int], int]:
    def insert(a: int, b: int, position: int, length: int) -> int:
        mask = ((1 << (length & 255)) - 1) << (position & 255)
        return (b & ~mask) | (a << (position & 255) & mask)

    return lambda a, b, position, length: insert(a, b, position, length) & ((1 << bits) - 1)


def _permuted(a: int, b: int, selector: int) -> int:
    chosen, sources = 0, (b << 32 | a).to_bytes(8, "little")
    for place in range(4):
        code = selector >> (4 * place)
        byte = sources[code & 7]
        if code & 8:
            byte = 255 * (byte >> 7)
        chosen |= byte << (8 * place)
    return chosen


def _bits() -> Iterator[Form]:
    for kind in ("b16", "b32", "b64", "pred"):
        yield _binary(kind, "and", lambda a, b: a & b)
        yield _binary(kind, "or", lambda a, b: a | b)
        yield _binary(kind, "xor", lambda a, b: a ^ b)
        yield Form(f"not.{kind}", (kind,), kind, lambda a: -1 - a)
    for kind in ("b16", "b32", "b64"):
        # Python would build a number of so many bits.
        yield Form(f"shl.{kind}", (kind, "u32"), kind, lambda a, n: a << n if n < 64 else 0)
        yield Form(f"shr.{kind}", (kind, "u32"), kind, lambda a, n: a >> n)
    for kind in ("b32", "b64"):
        four, bits = (kind, kind, "u32", "u32"), width(kind)
        yield Form(f"bfi.{kind}", four, kind, _inserted(bits))
        yield Form(f"brev.{kind}", (kind,), kind, lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))
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


def _ordered(compare: Callable[[Any, Any], bool], of_nan: bool) -> Callable[[Any, Any], bool]:
    return lambda a, b: of_nan if np.isnan(a) or np.isnan(b) else compare(a, b)


def _choices() -> Iterator[Form]:
    signed_or_not = ("s16", "u16", "s32", "u32", "s64", "u64")
    for name, compare in _COMPARISONS.items():
        kinds = signed_or_not + (("b16", "b32", "b64") if name in ("eq", "ne") else ())
        for kind in kinds:
            yield Form(f"setp.{name}.{kind}", (kind, kind), "pred", compare)
        for suffix, of_nan in (("", False), ("u", True)):
            ordered = _ordered(compare, of_nan)
            yield Form(f"setp.{name}{suffix}.f32", ("f32", "f32"), "pred", ordered)
    for kind in (*signed_or_not, "b16", "b32", "b64", "f32"):
        # By their bits: a NaN stays what it is.
        bits = kind if kind != "f32" else "b32"
        sources = (bits, bits, "pred")
        yield Form(f"selp.{kind}", sources, bits, lambda a, b, p: a if p else b)


def rounded(exact: Fraction) -> Any:
    """The nearest f32 of a number that is not zero, of two the even one."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    nearest = round(size / unit) * unit  # Python rounds a half to even
    value = np.float32(np.inf if nearest >= 2**128 else float(nearest))
    return -value if exact < 0 else value


def _fused(*values: np.float32) -> Any:
    """a * b + c, rounded once."""
    if all(np.isfinite(value) for value in values):
        a, b, c = (Fraction(float(value)) for value in values)
        if exact := a * b + c:
            return rounded(exact)
    # Infinite, NaN, or a zero: f64, whose products are exact, knows the sign.
    x, y, z = (np.float64(value) for value in values)
    return np.float32(x * y + z)


def _larger(a: np.float32, b: np.float32) -> np.float32:
    if np.isnan(a) or np.isnan(b):
        return b if np.isnan(a) else a
    if a == b:  # zeros: -0.0 is the smaller
        return b if np.signbit(a) else a
    return max(a, b)


def _with_sign(sign: np.float32, value: np.float32) -> int:
    return bits_of("b32", sign.view(np.uint32) & 0x80000000 | value.view(np.uint32) & 0x7FFFFFFF)


def _negated(value: np.float32) -> np.float32 | str:
    return _ANY_NAN if np.isnan(value) else -value


def _magnitude(value: np.float32) -> np.float32 | str:
    return _ANY_NAN if np.isnan(value) else np.abs(value)


def _flushed(value: np.float32) -> np.float32:
    return value * np.float32(0) if abs(value) < np.float32(2**-126) else value


def _is_close(actual: np.float32, exact: float, most: float) -> bool:
    """Within a relative error; what is too small may also be zero, and what is too large infinite.

    For a NaN and what has an exact result, that alone.
    """
    if np.isnan(exact) or np.isinf(exact) or exact == 0:
        same = np.array_equal(actual, np.float32(exact), equal_nan=True)
        return bool(same and (np.isnan(exact) or np.signbit(actual) == np.signbit(exact)))
    if abs(exact) < 2**-126 * (1 + most):
        return bool(abs(actual) <= 2**-126 and np.signbit(actual) == np.signbit(exact))
    if np.isinf(actual):
        return abs(exact) >= 2**128 * (1 - most)
    return abs(float(actual) - exact) <= most * abs(exact)


def _is_reciprocal(actual: np.float32, value: np.float32) -> bool:
    """rcp.approx.ftz: one unit in the last place, which is at most 2^-23 of the value."""
    value = _flushed(value)
    with np.errstate(all="ignore"):
        exact = float(np.float64(1) / np.float64(value))
    return _is_close(actual, exact, 2**-23)


def _is_power(actual: np.float32, value: np.float32) -> bool:
    """ex2.approx.ftz: two units in the last place."""
    with np.errstate(all="ignore"):
        exact = float(np.exp2(np.float64(_flushed(value))))
    if np.isfinite(value) and not 0 < exact < np.inf:  # far beyond what f32 holds
        return bool(actual == (0 if value < 0 else np.inf))
    return _is_close(actual, exact, 2**-22)


def _none(*_values: Any) -> Any:
    raise AssertionError("an approximation has no exact result")


def _floats() -> Iterator[Form]:
    two, three = ("f32", "f32"), ("f32", "f32", "f32")
    yield Form("add.rn.f32", two, "f32", lambda a, b: a + b)
    yield Form("add.ftz.f32", two, "f32", lambda a, b: _flushed(_flushed(a) + _flushed(b)))
    yield Form("sub.rn.f32", two, "f32", lambda a, b: a - b)
    yield Form("mul.rn.f32", two, "f32", lambda a, b: a * b)
    yield Form("fma.rn.f32", three, "f32", _fused)
    yield Form("div.rn.f32", two, "f32", lambda a, b: a / b)
    yield Form("rcp.rn.f32", ("f32",), "f32", lambda a: np.float32(1) / a)
    yield Form("max.f32", two, "f32", _larger)
    yield Form("neg.f32", ("f32",), "f32", _negated)
    yield Form("abs.f32", ("f32",), "f32", _magnitude)
    yield Form("copysign.f32", two, "b32", _with_sign)
    yield Form("rcp.approx.ftz.f32", ("f32",), "f32", _none, _is_reciprocal)
    yield Form("ex2.approx.ftz.f32", ("f32",), "f32", _none, _is_power)


def _narrowed(kind: Any, largest: float, of_nan: int, bits: int) -> Callable[..., int]:
    """cvt.rn.satfinite to a pair: the first source has the upper half."""

    def code(value: np.float32) -> int:
        if np.isnan(value):
            return of_nan
        clipped = np.clip(value, np.float32(-largest), np.float32(largest))
        return int(np.asarray(clipped).astype(kind).view(np.uint8))

    return lambda a, b: code(a) << bits | code(b)


def _widened(kind: Any, bits: int) -> Callable[[int], int]:
    """cvt.rn.f16x2 of a pair; every value is one of f16's."""

    def half(code: int) -> int:
        value = np.uint8(code).view(kind).astype(np.float16)
        return 0x7FFF if np.isnan(value) else int(value.view(np.uint16))

    return lambda pair: half(pair >> bits) << 16 | half(pair & ((1 << bits) - 1))


def _truncated(value: np.float32) -> int:
    """The next whole number towards zero that s32 has; 0 for NaN."""
    if np.isnan(value):
        return 0
    least, most = -(2**31), 2**31 - 1
    return most if value > most else least if value < least else int(value)


def _brain(value: np.float32) -> int:
    if np.isnan(value):
        return 0x7FFF
    return int(np.asarray(value).astype(ml_dtypes.bfloat16).view(np.uint16))


def _conversions() -> Iterator[Form]:
    kinds = ("u16", "s16", "u32", "s32", "u64", "s64")
    for to, of in itertools.permutations(kinds, 2):
        if width(to) != width(of):
            yield Form(f"cvt.{to}.{of}", (of,), to, lambda a: a)
    for of in ("s32", "u32", "s64", "u64"):
        yield Form(
            f"cvt.rn.f32.{of}", (of,), "f32", lambda a: rounded(Fraction(a)) if a else np.float32(0)
        )
    yield Form("cvt.rzi.s32.f32", ("f32",), "s32", _truncated)
    yield Form("cvt.f32.f16", ("f16",), "f32", _of_half)
    yield Form("cvt.rn.bf16.f32", ("f32",), "b16", _brain)
    two = ("f32", "f32")
    yield Form("cvt.rn.bf16x2.f32", two, "b32", lambda a, b: _brain(a) << 16 | _brain(b))
    e4m3, e2m1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
    yield Form("cvt.rn.satfinite.e4m3x2.f32", two, "b16", _narrowed(e4m3, 448, 0x7F, 8))
    yield Form("cvt.rn.f16x2.e4m3x2", ("e4m3x2",), "b32", _widened(e4m3, 8))
    # The register of a pair of e2m1 has 8 bits, which no other instruction takes.
    yield Form(
        "cvt.rn.satfinite.e2m1x2.f32",
        two,
        "b32",
        _narrowed(e2m1, 6, 7, 4),
        None,
        "{{ .reg .b8 %pair, %none; cvt.rn.satfinite.e2m1x2.f32 %none, 0f00000000, 0f00000000; "
        "{name} %pair, {sources}; mov.b32 %d, {{%pair, %none, %none, %none}}; }}",
    )
    yield Form(
        "cvt.rn.f16x2.e2m1x2",
        ("b32",),
        "b32",
        lambda word: _widened(e2m1, 4)(word >> 8 & 255),
        None,
        "{{ .reg .b8 %pair<4>; mov.b32 {{%pair0, %pair1, %pair2, %pair3}}, %a0; "
        "{name} %d, %pair1; }}",
    )


def _of_half(value: np.float16) -> np.float32 | str:
    return _ANY_NAN if np.isnan(value) else np.float32(value)


def _moves() -> Iterator[Form]:
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "pred", "f32"):
        bits = kind if kind != "f32" else "b32"
        yield Form(f"mov.{kind}", (bits,), bits, lambda a: a)


def _parts() -> Iterator[Form]:
    """mov between a register and a vector of its parts, any of which may be `_`."""
    for whole, part in ((32, 16), (64, 32), (64, 16)):
        count, mask = whole // part, (1 << part) - 1
        name, kind = f"mov.b{whole}", f"b{part}"
        for place in range(count):
            for fill in ("_", "%unused"):
                names = [f"{fill}{n}" if fill != "_" else "_" for n in range(count)]
                names[place] = "%d"
                body = f"{{{{ .reg .b{part} %unused<{count}>; {{name}} {{{{{', '.join(names)}}}}}, "
                body += "%a0; }}"
                taken = lambda a, n=part * place, m=mask: a >> n & m  # noqa: E731
                yield Form(name, (f"b{whole}",), kind, taken, None, body)
        yield Form(
            name,
            (kind,) * count,
            f"b{whole}",
            lambda *parts, n=part: sum(p << (n * place) for place, p in enumerate(parts)),
            None,
            "{name} %d, {{{sources}}};",
        )


#: Every form that computes a value, by its name. Some have several operand lists.
FORMS: tuple[Form, ...] = tuple(
    itertools.chain(_integers(), _bits(), _choices(), _floats(), _conversions(), _moves(), _parts())
)
