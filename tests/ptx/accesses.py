"""Forms of PTX that load, store and exchange, each with what it must do to bytes.

All loads of one space are one entry of one_instruction.py, and so are all stores: the bytes of
record i, or of the launch's parameters, against what the registers then hold, and the other way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tests.ptx import one_instruction as one

#: Where in a record or a result an access lies: as far as the widest vector must be aligned.
OFFSET = 16
#: Words that each form writes to a thread's result.
WORDS = 4
_KINDS = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32")
_VECTORS = (
    *("v2.b8", "v4.u8", "v2.u16", "v4.b16", "v4.u16"),
    *("v2.b32", "v4.b32", "v2.u32", "v4.u32", "v2.f32", "v4.f32", "v2.b64"),
)
_ORDERED_KINDS = ("b32", "u32", "b64", "u64", "b128", "v2.u64", "v4.u32")


class Access(NamedTuple):
    """One form. `space`: "global", "shared", "param", or "" for a generic address."""

    name: str
    space: str

    @property
    def kind(self) -> str:
        return self.name.rsplit(".", 1)[1]

    @property
    def bits(self) -> int:
        return int(self.kind[1:])

    @property
    def elements(self) -> int:
        """Elements."""
        return next((int(part[1]) for part in self.name.split(".") if part in ("v2", "v4")), 1)

    @property
    def words(self) -> int:
        """Words of 64 bits of an element."""
        return max(1, self.bits // 64)

    def registers(self) -> str:
        """The operand: the narrowest registers that PTX allows."""
        names = [f"%v{max(self.bits, 16)}_{number}" for number in range(self.elements)]
        return names[0] if self.elements == 1 else f"{{{', '.join(names)}}}"

    def loaded(self, there: bytes) -> list[int]:
        """The words that a thread writes after it has loaded from these bytes."""
        size = self.bits // 8
        words = []
        for number in range(self.elements):
            part = there[number * size : (number + 1) * size]
            value = int.from_bytes(part, "little", signed=self.kind.startswith("s"))
            value &= (1 << max(self.bits, 16)) - 1
            words += [value >> 64 * n & (1 << 64) - 1 for n in range(self.words)]
        return words + [one.POISON] * (WORDS - len(words))

    def stored(self, words: list[int]) -> bytes:
        """What lies in a poisoned result after the low parts of these words have been stored."""
        size = self.bits // 8
        size = min(size, 8)
        parts = b"".join((word & ((1 << 8 * size) - 1)).to_bytes(size, "little") for word in words)
        before = one.POISON.to_bytes(8, "little") * WORDS
        parts = parts[: size * self.elements * self.words]
        return before[:OFFSET] + parts + before[OFFSET + len(parts) :]


def _forms(opcode: str, orders: tuple[str, ...], hints: tuple[str, ...]) -> Iterator[Access]:
    for space in ("global", "shared", "param", ""):
        of_space = f"{opcode}.{space}" if space else opcode
        for kind in _KINDS + _VECTORS:
            yield Access(f"{of_space}.{kind}", space)
        if space == "param":
            continue
        for order, scope, kind in itertools.product(orders, ("cta", "gpu", "sys"), _ORDERED_KINDS):
            last = f".{space}" if space else ""
            yield Access(f"{opcode}.{order}.{scope}{last}.{kind}", space)
        yield Access(f"{opcode}.volatile{'.' * bool(space)}{space}.u32", space)
    for hint in hints:
        yield Access(f"{opcode}.global.{hint}.u32", "global")


LOADS = (
    *_forms("ld", ("relaxed", "acquire"), ("nc",)),
    Access("ld.weak.global.u32", "global"),
    Access("ld.shared::cta.u32", "shared"),
)
STORES = (
    *(each for each in _forms("st", ("relaxed", "release"), ()) if each.space != "param"),
    *(Access(f"st.async.release.{scope}.global.b64", "global") for scope in ("gpu", "sys")),
)

_DECLARED = "\n".join(
    f".reg .b{bits} {', '.join(f'%v{bits}_{n}' for n in range(4))};" for bits in (16, 32, 64, 128)
)
_TO_WORD = {16: "cvt.u64.u16 %word7, {};", 32: "cvt.u64.u32 %word7, {};", 64: "mov.b64 %word7, {};"}
_TO_WORD[128] = "mov.b128 {{%word7, %word6}}, {};"
_OF_WORD = {16: "cvt.u16.u64 {}, %word7;", 32: "cvt.u32.u64 {}, %word7;", 64: "mov.b64 {}, %word7;"}
_OF_WORD[128] = "mov.b128 {}, {{%word7, %word6}};"

#: Puts a record into shared memory: %word5 is the place of this thread's.
_INTO_SHARED = """mov.u64 %word5, {name}_shared;
mul.wide.u32 %word6, %tid, 32;
add.s64 %word5, %word5, %word6;
""" + "".join(
    f"ld.global.u64 %word0, [%record+{8 * n}];\nst.shared.u64 [%word5+{8 * n}], %word0;\n"
    for n in range(4)
)
_GENERIC = "cvta.shared.u64 %word5, %word5;\n"


def loads_entry(name: str, accesses: tuple[Access, ...], *, generic_shared: bool = False) -> str:
    """An entry of loads of one space; each has WORDS words of the result."""
    space = accesses[0].space
    lines = [_INTO_SHARED.format(name=name)]
    places = {"global": "%record", "shared": "%word5", "": "%record"}
    base = "%word5" if generic_shared else places.get(space, "")
    if generic_shared:
        lines.append(_GENERIC)
    for index, each in enumerate(accesses):
        address = f"[{name}_records]" if space == "param" else f"[{base}+{OFFSET}]"
        lines.append(f"{each.name} {each.registers()}, {address};")
        bits = max(each.bits, 16)
        for number in range(each.elements):
            lines.append(_TO_WORD[bits].format(f"%v{bits}_{number}"))
            for word, register in zip(range(each.words), ("%word7", "%word6"), strict=False):
                place = WORDS * index + each.words * number + word
                lines.append(f"st.global.u64 [%result+{8 * place}], {register};")
    return one.entry(name, "\n".join(lines), _DECLARED, words=WORDS * len(accesses))


def stores_entry(name: str, accesses: tuple[Access, ...], *, generic_shared: bool = False) -> str:
    """An entry of stores of one space, each of the record's words, to the result or by way of
    shared memory.
    """
    in_shared = generic_shared or accesses[0].space == "shared"
    lines = [_INTO_SHARED.format(name=name), f"mov.u64 %word4, {one.POISON:#x};"]
    if generic_shared:
        lines.append("mov.u64 %word3, %word5;\ncvta.shared.u64 %word5, %word5;")
    for index, each in enumerate(accesses):
        bits, result = max(each.bits, 16), 8 * WORDS * index
        for number in range(each.elements):
            for word, register in zip(range(each.words), ("%word7", "%word6"), strict=False):
                place = each.words * number + word
                lines.append(f"ld.global.u64 {register}, [%record+{8 * place}];")
            lines.append(_OF_WORD[bits].format(f"%v{bits}_{number}"))
        if not in_shared:
            lines.append(f"{each.name} [%result+{result + OFFSET}], {each.registers()};")
            continue
        plain = "%word3" if generic_shared else "%word5"
        lines += [f"st.shared.u64 [{plain}+{8 * n}], %word4;" for n in range(WORDS)]
        lines.append(f"{each.name} [%word5+{OFFSET}], {each.registers()};")
        for n in range(WORDS):
            lines.append(f"ld.shared.u64 %word7, [{plain}+{8 * n}];")
            lines.append(f"st.global.u64 [%result+{result + 8 * n}], %word7;")
    return one.entry(name, "\n".join(lines), _DECLARED, words=WORDS * len(accesses))


#: atom and red: what the kernels have, and each order and space with words of both sizes.
ATOMICS = (
    *("acq_rel.gpu.global.add.u32", "relaxed.gpu.global.add.u32", "relaxed.cta.shared.add.u32"),
    *(
        f"{order}{space}add.u{bits}"
        for order in ("", "relaxed.gpu.", "acquire.sys.", "release.cta.", "acq_rel.sys.")
        for space in ("global.", "shared.", "")
        for bits in (32, 64)
    ),
)


def atomics_entry(name: str) -> str:
    """Each atomic on a word that has the record's first word, with its second: what it was, what it
    became; then the same by `red`, which returns nothing.
    """
    lines = [_INTO_SHARED.format(name=name)]
    for index, each in enumerate(ATOMICS):
        bits = int(each[-2:])
        word, added, was = (f"%v{bits}_{n}" for n in range(3))
        for number, register in enumerate((word, added)):
            lines.append(f"ld.global.u64 %word7, [%record+{8 * number}];")
            lines.append(_OF_WORD[bits].format(register))
        space, place = "global", f"%result+{8 * WORDS * index + 24}"
        if "shared." in each:
            space, place = "shared", "%word5"
        for turn, call in enumerate((f"atom.{each} {was}, ", f"red.{each} ")):
            lines.append(f"st.{space}.b{bits} [{place}], {word};")
            lines.append(f"{call}[{place}], {added};")
            if turn == 0:
                lines.append(_TO_WORD[bits].format(was))
                lines.append(f"st.global.u64 [%result+{8 * WORDS * index}], %word7;")
            lines.append(f"ld.{space}.b{bits} {was}, [{place}];")
            lines.append(_TO_WORD[bits].format(was))
            lines.append(f"st.global.u64 [%result+{8 * (WORDS * index + 1 + turn)}], %word7;")
    return one.entry(name, "\n".join(lines), _DECLARED, words=WORDS * len(ATOMICS))
