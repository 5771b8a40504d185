"""The forms of instructions that our kernels have, and more of the same opcodes, each against an
oracle that does not know the table. Other forms that opcodes.py takes have none.

Many forms share one entry, because g++ takes most of the time; each is compared by itself.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from tests.ptx import accesses, forms
from tests.ptx import one_instruction as one
from tests.ptx.forms import Form
from tests.support.ptx import build, opcodes, translate
from tests.support.ptx.machine import TrapError
from tests.support.ptx.text import UnknownPtxError

#: Forms with the same registers, which are one entry.
GROUPS: dict[str, list[Form]] = {}
for _form in forms.FORMS:
    GROUPS.setdefault(f"{'_'.join(_form.sources)}_to_{_form.result}", []).append(_form)

_LOADS = {
    space or "generic": tuple(each for each in accesses.LOADS if each.space == space)
    for space in ("global", "shared", "param", "")
}
_STORES = {
    space or "generic": tuple(each for each in accesses.STORES if each.space == space)
    for space in ("global", "shared", "")
}

# ---- operations of a warp

_SHUFFLES = ("bfly", "idx")
#: With values, then with predicates, then match and both results of elect.
_MEETINGS = ("redux.sync.add.s32", "redux.sync.min.u32", "redux.sync.max.u32")
_WORDS_OF_MEETINGS = len(_MEETINGS) + 4
#: Lanes of the meetings: the record's last word, the same in a group of lanes.
_WARP = """ld.global.u32 %r0, [%record];
ld.global.u32 %r1, [%record+8];
ld.global.u32 %r2, [%record+16];
ld.global.u32 %r3, [%record+24];
setp.ne.u32 %p0, %r0, 0;
"""


def _shuffles_entry() -> str:
    lines = [_WARP]
    for index, mode in enumerate(_SHUFFLES):
        lines.append(f"shfl.sync.{mode}.b32 %r4|%p1, %r0, %r1, %r2, -1;")
        lines.append("selp.u32 %r5, 1, 0, %p1;")
        lines += [f"st.global.u32 [%result+{16 * index}], %r4;"]
        lines += [f"st.global.u32 [%result+{16 * index + 8}], %r5;"]
        lines.append(f"shfl.sync.{mode}.b32 %r6, %r0, %r1, %r2, -1;")
        lines += ["setp.ne.u32 %p2, %r6, %r4;", "@%p2 trap;"]
    return one.entry("shuffles", "\n".join(lines), words=2 * len(_SHUFFLES))


def _meetings_entry() -> str:
    """Lanes of one mask go one way, the others the other, so both meet at a place of their own."""
    lines = [_WARP, "setp.eq.u32 %p3, %r3, 65535;", "@%p3 bra LOW;"]
    for label in ("HIGH", "LOW"):
        lines.append(f"{label}:")
        for index, name in enumerate(_MEETINGS):
            lines += [f"{name} %r5, %r0, %r3;", *_keep(index)]
        index = len(_MEETINGS)
        lines += ["vote.sync.ballot.b32 %r5, %p0, %r3;", *_keep(index)]
        lines += ["match.any.sync.b32 %r5, %r0, %r3;", *_keep(index + 1)]
        lines += ["elect.sync %r5|%p4, %r3;", *_keep(index + 2)]
        lines += ["selp.u32 %r5, 1, 0, %p4;", *_keep(index + 3)]
        lines += ["bar.warp.sync %r3;", "bra.uni END;"]
    lines.append("END:")
    return one.entry("meetings", "\n".join(lines), words=_WORDS_OF_MEETINGS)


def _keep(index: int) -> list[str]:
    return ["cvt.u64.u32 %word0, %r5;", f"st.global.u64 [%result+{8 * index}], %word0;"]


# ---- control, special registers, barriers

#: 3 to the power of tid, modulo 2^32, by a loop; odd threads take another way out.
_CONTROL = """mov.u32 %r0, 1;
mov.u32 %r1, 0;
LOOP:
setp.ge.u32 %p0, %r1, %index;
@%p0 bra AFTER;
mul.lo.u32 %r0, %r0, 3;
add.u32 %r1, %r1, 1;
bra.uni LOOP;
AFTER:
and.b32 %r2, %index, 1;
setp.eq.u32 %p1, %r2, 1;
@!%p1 add.u32 %r0, %r0, 1000000;
nanosleep.u32 20;
st.global.u32 [%result], %r0;
@%p1 exit;
fence.acq_rel.gpu;
fence.acquire.sys;
fence.release.cta;
fence.sc.sys;
st.global.u32 [%result+8], %r1;
"""

_SPECIAL = tuple(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz")

#: Neighbours in a CTA exchange words by shared memory: the barriers order it.
_BARRIERS = """mul.lo.u32 %r0, %tid, 4;
mov.u32 %r1, {name}_shared;
add.u32 %r0, %r0, %r1;
mul.lo.u32 %r2, %index, 7;
st.shared.u32 [%r0], %r2;
bar.sync 0;
xor.b32 %r3, %tid, 33;
mul.lo.u32 %r3, %r3, 4;
add.u32 %r3, %r3, %r1;
ld.shared.u32 %r4, [%r3];
bar.sync 0;
st.shared.u32 [%r0], %r4;
bar.sync 0;
ld.shared.u32 %r5, [%r3];
cvt.u64.u32 %word0, %r4;
st.global.u64 [%result], %word0;
cvt.u64.u32 %word0, %r5;
st.global.u64 [%result+8], %word0;
"""


def _special_entry() -> str:
    """The index is that of the whole grid."""
    index = """mov.u32 %r0, %ctaid.z;
mov.u32 %r1, %nctaid.y;
mov.u32 %r2, %ctaid.y;
mad.lo.u32 %r0, %r0, %r1, %r2;
mov.u32 %r1, %nctaid.x;
mov.u32 %r2, %ctaid.x;
mad.lo.u32 %r0, %r0, %r1, %r2;
mov.u32 %r1, %ntid.z;
mov.u32 %r2, %tid.z;
mad.lo.u32 %r0, %r0, %r1, %r2;
mov.u32 %r1, %ntid.y;
mov.u32 %r2, %tid.y;
mad.lo.u32 %r0, %r0, %r1, %r2;
mov.u32 %r1, %ntid.x;
mov.u32 %r2, %tid.x;
mad.lo.u32 %r0, %r0, %r1, %r2;
"""
    lines = [index]
    lines.append(f"mul.wide.u32 %offset, %r0, {8 * len(_SPECIAL)};")
    lines.append("add.s64 %result, %results, %offset;")
    for number, name in enumerate(_SPECIAL):
        lines += [f"mov.u32 %r3, {name};", "cvt.u64.u32 %word0, %r3;"]
        lines.append(f"st.global.u64 [%result+{8 * number}], %word0;")
    return one.entry("special", "\n".join(lines))


@functools.cache
def whole_module() -> str:
    """PTX of every entry of this file."""
    texts = [one.HEAD, ".global .align 4 .u32 table[4] = {3, 5, 7, 0xffffffff};\n"]
    for name, group in GROUPS.items():
        sources = [forms.width(kind) for kind in group[0].sources]
        result = forms.width(group[0].result)
        texts.append(one.over_values(name, [each.text() for each in group], sources, result))
    texts += [accesses.loads_entry(f"loads_{name}", each) for name, each in _LOADS.items()]
    texts += [accesses.stores_entry(f"stores_{name}", each) for name, each in _STORES.items()]
    texts.append(accesses.loads_entry("loads_window", _LOADS["generic"], generic_shared=True))
    texts.append(accesses.stores_entry("stores_window", _STORES["generic"], generic_shared=True))
    texts += [accesses.atomics_entry("atomics"), _shuffles_entry(), _meetings_entry()]
    texts += [one.entry("control", _CONTROL), _special_entry()]
    texts.append(one.entry("barriers", _BARRIERS.format(name="barriers")))
    texts.append(one.entry("traps", "setp.eq.u32 %p0, %index, 5;\n@%p0 trap;"))
    variable = """mov.u64 %word0, table;
cvta.global.u64 %word0, %word0;
cvta.to.global.u64 %word1, %word0;
and.b32 %r0, %index, 3;
mul.wide.u32 %offset, %r0, 4;
add.s64 %word1, %word1, %offset;
ld.global.u32 %word2, [%word1];
st.global.u64 [%result], %word2;
mov.u64 %word3, variable_shared;
cvta.shared.u64 %word4, %word3;
cvta.to.shared.u64 %word5, %word4;
sub.s64 %word5, %word5, %word3;
st.global.u64 [%result+8], %word5;
"""
    texts.append(one.entry("variable", variable))
    return "".join(texts)


@pytest.fixture(scope="module")
def bench() -> Iterator[one.Bench]:
    library = build.load(whole_module())
    with one.Bench(library) as made:
        made.machine.use(library)
        yield made


def check_group(bench: one.Bench, name: str, operands: list[tuple[int, ...]]) -> None:
    """Every form of a group over the same operands."""
    group = GROUPS[name]
    results = bench.run(name, np.array(operands, dtype=np.uint64), len(group))
    for index, form in enumerate(group):
        for given_bits, actual in zip(operands, results[:, index].tolist(), strict=True):
            if forms.is_defined(form, given_bits):
                complaint = form.complaint(given_bits, actual)
                assert complaint is None, complaint


@pytest.mark.parametrize("name", GROUPS)
def test_values(name: str, bench: one.Bench) -> None:
    check_group(bench, name, forms.operands(GROUPS[name][0]))


def _records(seed: int, count: int = 4 * one.THREADS) -> one.Words:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << 64, (count, one.WORDS), dtype=np.uint64)


@pytest.mark.parametrize("space", [*_LOADS, "window"])
def test_loads(space: str, bench: one.Bench) -> None:
    every = _LOADS["generic" if space == "window" else space]
    records = _records(1)
    results = bench.run(f"loads_{space}", records, accesses.WORDS * len(every))
    for index, each in enumerate(every):
        words = results[:, accesses.WORDS * index :][:, : accesses.WORDS].tolist()
        for record, mine in zip(records, words, strict=True):
            there = record.tobytes()[accesses.OFFSET :]
            if space == "param":
                there = bench.last_params
            assert mine == each.loaded(there), f"{each.name} of {there.hex()}"


@pytest.mark.parametrize("space", [*_STORES, "window"])
def test_stores(space: str, bench: one.Bench) -> None:
    every = _STORES["generic" if space == "window" else space]
    records = _records(2)
    results = bench.run(f"stores_{space}", records, accesses.WORDS * len(every))
    for index, each in enumerate(every):
        places = results[:, accesses.WORDS * index :][:, : accesses.WORDS]
        for record, there in zip(records, places, strict=True):
            assert there.tobytes() == each.stored(record.tolist()), f"{each.name}: {record}"


def test_atomics(bench: one.Bench) -> None:
    """A word alone: what it was, and what it became."""
    records = _records(3)
    results = bench.run("atomics", records, accesses.WORDS * len(accesses.ATOMICS))
    for index, each in enumerate(accesses.ATOMICS):
        mask = (1 << int(each[-2:])) - 1
        for record, words in zip(records.tolist(), results.tolist(), strict=True):
            before, added = record[0] & mask, record[1] & mask
            after = before + added & mask
            was, became, reduced = words[accesses.WORDS * index :][:3]
            assert (was, became, reduced) == (before, after, after), f"{each} of {before}, {added}"


def _shuffled(mode: str, values: list[int], by: list[int], limits: list[int]) -> list[int]:
    """As the ISA's pseudocode; value and predicate of each lane."""
    found = []
    for lane, (b, c) in enumerate(zip(by, limits, strict=True)):
        b, clamp, segment = b & 31, c & 31, c >> 8 & 31
        highest = lane & segment | clamp & ~segment
        source = {"bfly": lane ^ b, "idx": lane & segment | b & ~segment}[mode]
        is_inside = source <= highest
        found += [values[source if is_inside else lane], int(is_inside)]
    return found


def test_shuffles(bench: one.Bench) -> None:
    choose = random.Random(1)
    warps = []
    for width, by in itertools.product((1, 2, 4, 8, 16, 32), (0, 1, 2, 3, 5, 16, 31, 33)):
        for clamp in (0, 31, choose.randint(0, 31)):
            limit = (32 - width) << 8 | clamp
            warps.append([(choose.getrandbits(32), by, limit, 0) for _ in range(32)])
    lanes = [(choose.getrandbits(32), choose.getrandbits(8), 31, 0) for _ in range(32)]
    warps += [lanes, lanes]
    records = np.array(list(itertools.chain(*warps)), dtype=np.uint64)
    results = bench.run("shuffles", records, 2 * len(_SHUFFLES)) & np.uint64(0xFFFFFFFF)
    for number, warp in enumerate(warps):
        values, shifts, limits, _ = (list(each) for each in zip(*warp, strict=True))
        mine = results[32 * number : 32 * number + 32]
        for index, mode in enumerate(_SHUFFLES):
            actual = mine[:, 2 * index : 2 * index + 2].reshape(-1).tolist()
            expected = _shuffled(mode, values, shifts, limits)
            assert actual == expected, (mode, shifts[0], limits[0])


def test_other_meetings_of_a_warp(bench: one.Bench) -> None:
    """Of the whole warp, and of two halves that have gone different ways."""
    choose = random.Random(2)
    warps: list[tuple[list[int], list[int]]] = []
    for masks in ([0xFFFFFFFF] * 32, [0xFFFF] * 16 + [0xFFFF0000] * 16):
        drawn = [choose.getrandbits(32) for _ in range(32)]
        some = [choose.choice((0, 5)) for _ in range(32)]
        warps += [(values, masks) for values in ([0] * 32, [1] * 32, drawn, some)]
    flat = [(v, 0, 0, m) for values, masks in warps for v, m in zip(values, masks, strict=True)]
    results = bench.run("meetings", np.array(flat, dtype=np.uint64), _WORDS_OF_MEETINGS)
    results = results.tolist()
    for number, (values, masks) in enumerate(warps):
        for lane, mask in enumerate(masks):
            members = [v for n, v in enumerate(values) if mask >> n & 1]
            ballot = sum(1 << n for n, v in enumerate(values) if mask >> n & 1 and v)
            alike = sum(1 << n for n, v in enumerate(values) if mask >> n & 1 and v == values[lane])
            reduced = [sum(members) & 0xFFFFFFFF, min(members), max(members)]
            *mine, leader, is_leader = results[32 * number + lane]
            assert mine == [*reduced, ballot, alike], (number, lane)
            # Which lane is elected is open; all agree on one of the mask.
            assert mask >> leader & 1
            assert leader == results[32 * number + mask.bit_length() - 1][-2]
            assert is_leader == int(leader == lane)


def test_control(bench: one.Bench) -> None:
    results = bench.run("control", _records(4)).tolist()
    for index, (power, count, *_) in enumerate(results):
        is_odd = index % 2 == 1
        assert power & 0xFFFFFFFF == (3**index + (0 if is_odd else 1000000)) % 2**32
        assert count & 0xFFFFFFFF == (one.POISON & 0xFFFFFFFF if is_odd else index)


def test_special_registers(bench: one.Bench) -> None:
    grid, block = (3, 2, 2), (5, 4, 3)
    sizes = (*block[::-1], *grid[::-1])
    results = np.zeros((np.prod(sizes), len(_SPECIAL)), dtype=np.uint64)
    bench.run_on("special", (_records(5), results), grid, block)
    for index, row in enumerate(results.tolist()):
        *cta, z, y, x = np.unravel_index(index, (*grid[::-1], *block[::-1]))
        assert row == [x, y, z, *block, *reversed(cta), *grid], index


def test_barriers(bench: one.Bench) -> None:
    results = bench.run("barriers", _records(6)).tolist()
    for index, (first, second, *_) in enumerate(results):
        assert first == 7 * (index ^ 33)
        assert second == 7 * index, "what the neighbour had got from here"


def test_variables_of_the_module_and_windows(bench: one.Bench) -> None:
    results = bench.run("variable", _records(7)).tolist()
    assert [row[:2] for row in results] == [[[3, 5, 7, 0xFFFFFFFF][n % 4], 0] for n in range(256)]


def test_trap(bench: one.Bench) -> None:
    with pytest.raises(TrapError, match=r"CTA 0 thread 5, PTX line \d+.*: @%p0 trap"):
        bench.run("traps", _records(8))


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
    "shfl.sync.left.b32 %r0, %r1, 1, 31, -1;": "",
    "cvt.rq.f32.u32 %r0, %r1;": "",
    "cvt.rzi.f32.f32 %r0, %r1;": "unknown types",
    "mov.u32 %r0;": "ValueError",
    "ld.global.u32 %r0;": "IndexError",
}


@pytest.mark.parametrize("text", _UNKNOWN)
def test_what_is_unknown_is_named(text: str) -> None:
    ptx = one.HEAD + one.entry("unknown", text)
    line = 1 + ptx[: ptx.index(text)].count("\n")
    with pytest.raises(UnknownPtxError, match=rf"PTX line {line}: ") as raised:
        translate.to_cpp(ptx)
    assert _UNKNOWN[text] in str(raised.value)
    assert text.rstrip(";") in str(raised.value)


# ---- these checks can fail, and they have everything

#: Shown elsewhere: test_cases.py has programmatic dependent launches, test_copies.py copies.
_ELSEWHERE = {"griddepcontrol", "cp", "mbarrier"}


def covered_forms() -> set[str]:
    """Every form that the entries of this file have."""
    lines = [line.strip() for line in re.split(r"[;{}\n]", whole_module())]
    found = set()
    for line in lines:
        match = re.match(r"(?:@!?%\w+\s+)?([a-z][\w.:]*)(?:\s|$)", line)
        if match and match[1].split(".")[0] in opcodes.OPCODES:
            found.add(match[1])
    return found


def test_every_opcode_of_the_table_is_tested() -> None:
    tested = {name.split(".")[0] for name in covered_forms()}
    assert set(opcodes.OPCODES) - tested == _ELSEWHERE


def test_a_wrong_bit_is_noticed() -> None:
    """The lowest or the highest bit of a result, by every exact oracle."""
    for form in forms.FORMS:
        few = [each for each in forms.operands(form, 64) if forms.is_defined(form, each)]
        assert form.accepts or any(_right(form, each) for each in few), form.name
        for bit in (1, 1 << (forms.width(form.result) - 1)):
            for each in few:
                for right in _right(form, each):
                    assert form.complaint(each, right ^ bit), f"{form.name} of {each}"


@pytest.mark.parametrize(
    ("name", "operand", "nearest"),
    [
        ("rcp.approx.ftz.f32", 3.0, 1 / 3),
        ("ex2.approx.ftz.f32", 0.5, 2**0.5),
    ],
)
def test_an_approximation_is_held_to_its_error(name: str, operand: float, nearest: float) -> None:
    (form,) = (each for each in forms.FORMS if each.name == name)
    bits = forms.bits_of("f32", np.float32(nearest))
    operands = (forms.bits_of("f32", np.float32(operand)),)
    assert form.complaint(operands, bits) is None
    for distance in (-5, 5, 1 << 31):
        assert form.complaint(operands, bits + distance), distance
    assert form.complaint(operands, forms.NAN)


def _right(form: Form, operands: tuple[int, ...]) -> list[int]:
    """The bits that an exact oracle expects; none where any NaN will do."""
    if form.accepts:
        return []
    complaint = form.complaint(operands, 0) or form.complaint(operands, 1)
    match = re.search(r"instead of (0x[0-9a-f]+)$", complaint or "")
    return [int(match[1], 16)] if match else []
