"""The table of opcodes: what each instruction of PTX is in C++, over runtime/machine.h.

An emitter takes the context of its entry and the instruction, and returns C++ statements. It takes
the modifiers that it knows; one that is left over is an error, and so is an opcode that has no
emitter. What each instruction does is said in NVIDIA's PTX ISA, chapter 9.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .text import TYPE_BYTES, Instruction, UnknownPtxError

if TYPE_CHECKING:
    from .translate import Context

#: PTX -> the runtime's name (hooks.h).
ORDERS = {
    name: f"k{name.title().replace('_', '')}"
    for name in ("weak", "relaxed", "acquire", "release", "acq_rel", "sc")
}
SCOPES = {name: f"k{name.title()}" for name in ("cta", "gpu", "sys")}
SPACES = {
    "global": "kGlobal",
    "shared": "kShared",
    "shared::cta": "kShared",
    "param": "kParam",
}


class Modifiers:
    """Takes an instruction's modifiers one after another."""

    def __init__(self, instruction: Instruction) -> None:
        self._instruction = instruction
        self._left = list(instruction.modifiers)

    def type(self) -> str:
        """The last modifier, which is the type."""
        if not self._left or self._left[-1] not in TYPE_BYTES:
            raise self.error("no type")
        return self._left.pop()

    def one_of(self, *names: str, default: str = "") -> str:
        for name in self._left:
            if name in names:
                self._left.remove(name)
                return name
        return default

    def has(self, name: str) -> bool:
        return bool(self.one_of(name))

    def end(self) -> None:
        if self._left:
            raise self.error(f"unknown modifier .{self._left[0]}")

    def error(self, what: str) -> UnknownPtxError:
        return UnknownPtxError(what, self._instruction.line, self._instruction.text)


Emitter = Callable[["Context", Instruction], str]
OPCODES: dict[str, Emitter] = {}


def emits(*opcodes: str) -> Callable[[Emitter], Emitter]:
    def register(emitter: Emitter) -> Emitter:
        for opcode in opcodes:
            OPCODES[opcode] = emitter
        return emitter

    return register


def emit(context: Context, instruction: Instruction) -> str:
    """C++ of one instruction, without its guard.

    Raises:
        UnknownPtxError: the table lacks the opcode, or the emitter a modifier, type or operand.
    """
    emitter = OPCODES.get(instruction.opcode)
    if emitter is None:
        raise UnknownPtxError(
            f"unknown opcode {instruction.opcode}", instruction.line, instruction.text
        )
    try:
        return emitter(context, instruction)
    except UnknownPtxError:
        raise
    except (LookupError, ValueError) as error:
        raise UnknownPtxError(repr(error), instruction.line, instruction.text) from error


def elements(operand: str) -> list[str]:
    """The operands of `{a, b}`, or the one operand."""
    if not operand.startswith("{"):
        return [operand]
    return [each.strip() for each in operand[1:-1].split(",")]


def bits(kind: str) -> int:
    return 8 * TYPE_BYTES[kind]


def unsigned(kind: str) -> str:
    return f"uint{bits(kind)}_t"


def is_float(kind: str) -> bool:
    return kind in ("f16", "bf16", "f32")


# ---- moves and conversions of addresses


@emits("mov")
def _mov(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.end()
    target, source = instruction.operands
    if source.startswith("{"):
        parts = elements(source)
        width = bits(kind) // len(parts)
        joined = " | ".join(
            f"static_cast<uint{bits(kind)}_t>({context.value(part, f'b{width}')}) << {width * n}"
            for n, part in enumerate(parts)
        )
        return context.assign(target, kind, joined)
    if target.startswith("{"):
        parts = elements(target)
        width = bits(kind) // len(parts)
        whole = context.value(source, f"b{bits(kind)}")
        pieces = "".join(
            context.assign(part, f"b{width}", f"static_cast<uint{width}_t>(whole >> {width * n})")
            for n, part in enumerate(parts)
        )
        return f"{{ const uint{bits(kind)}_t whole = {whole}; {pieces} }}"
    raw = "pred" if kind == "pred" else f"b{bits(kind)}"
    return context.assign(target, raw, context.value(source, raw))


@emits("cvta")
def _cvta(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    modifiers.type()
    to, space = modifiers.has("to"), modifiers.one_of("global", "shared")
    modifiers.end()
    target, source = instruction.operands
    window = {"global": "0", "shared": "kSharedWindow"}[space]
    value = context.value(source, "u64")
    return context.assign(target, "u64", f"{value} {'-' if to else '+'} {window}")


# ---- memory


def _memory(modifiers: Modifiers) -> tuple[str, str, str]:
    """(space or "", order, scope) as names of the runtime."""
    if modifiers.has("volatile"):
        order, scope = "relaxed", "sys"
    else:
        order = modifiers.one_of(*ORDERS, default="weak")
        scope = modifiers.one_of(*SCOPES)
    space = modifiers.one_of(*SPACES)
    return SPACES.get(space, ""), ORDERS[order], SCOPES.get(scope, "kNone")


def _pause_before(context: Context, space: str, order: str) -> str:
    if order != "kWeak":
        return context.pause("kPolls")
    return context.pause("kPaused") if space in ("kGlobal", "") else ""


def _place(context: Context, operand: str, space: str) -> str:
    """C++ of (space, whether it is generic, address)."""
    known = f"Space::{space or 'kGlobal'}, {'false' if space else 'true'}"
    return f"{known}, {context.address(operand)}"


@emits("ld")
def _ld(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.has("nc")
    space, order, scope = _memory(modifiers)
    modifiers.one_of("v2", "v4")
    modifiers.end()
    targets = elements(instruction.operands[0])
    place = _place(context, instruction.operands[1], space)
    site = context.site("kLoad", order, scope)
    writes = [
        context.assign(target, kind, f"{as_value(kind, f'v[{n}]')}")
        for n, target in enumerate(targets)
    ]
    begin = f"{{ {unsigned(kind)} v[{len(targets)}]; "
    at_once = f"{begin}load<{unsigned(kind)}, {len(targets)}>(t, {site}, {place}, v); "
    body = f"{at_once}{''.join(writes)} }}"
    if order == "kWeak" or len(targets) == 1:
        return _pause_before(context, space, order) + body
    read = f"{begin}load_part<{unsigned(kind)}, {len(targets)}>(t, {site}, {place}"
    # A target may be the register of the address; it comes last.
    of_address = re.split(r"[\[\]+\s]+", instruction.operands[1])
    numbers = sorted(range(len(targets)), key=lambda n: targets[n] in of_address)
    return _one_by_one(context, body, [f"{read}, {n}, v); {writes[n]} }}" for n in numbers])


def _one_by_one(context: Context, at_once: str, parts: list[str]) -> str:
    """The elements of a strong vector are accesses of their own, between which others run.

    On the clock they are one packet.
    """
    first = context.pause("kPolls")
    others = "".join(f" {context.pause('kPolls')} {part}" for part in parts[1:])
    return f"{first} AT_ONCE({at_once}) ONE_BY_ONE({parts[0]}{others})"


def as_value(kind: str, raw: str) -> str:
    """C++ of a value of a type from its raw bits."""
    if kind.startswith("s"):
        return f"static_cast<int{bits(kind)}_t>({raw})"
    return f"{kind}({raw})" if is_float(kind) else raw


@emits("st")
def _st(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    is_async = modifiers.has("async")
    space, order, scope = _memory(modifiers)
    if is_async and (space, order, kind) != ("kGlobal", "kRelease", "b64"):
        raise modifiers.error("st.async is a release of a word in global memory only")
    modifiers.one_of("v2", "v4")
    modifiers.end()
    raw = f"b{bits(kind)}"
    values = [context.value(each, raw) for each in elements(instruction.operands[1])]
    place = _place(context, instruction.operands[0], space)
    site = context.site("kAsyncStore" if is_async else "kStore", order, scope)
    begin = f"{{ const {unsigned(kind)} v[] = {{{', '.join(values)}}}; "
    access = f"<{unsigned(kind)}, {len(values)}>(t, {site}, {place}"
    body = f"{begin}store{access}, v); }}"
    if is_async:
        body = f"{begin}store_async(t, {site}, {place}, v); }}"
    if order == "kWeak" or len(values) == 1:
        return _pause_before(context, space, order) + body
    parts = [f"{begin}store_part{access}, {n}, v); }}" for n in range(len(values))]
    return _one_by_one(context, body, parts)


@emits("atom", "red")
def _atom(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    adds = modifiers.has("add")
    space, order, scope = _memory(modifiers)
    modifiers.end()
    if not adds or kind not in ("u32", "u64"):
        raise modifiers.error("unknown atomic operation")
    order = "kRelaxed" if order == "kWeak" else order
    scope = "kGpu" if scope == "kNone" else scope
    *target, place, value = instruction.operands
    site = context.site("kAtomic", order, scope)
    given = context.value(value, kind)
    call = f"fetch_add<{unsigned(kind)}>(t, {site}, {_place(context, place, space)}, {given})"
    call = context.assign(target[0] if target else "_", kind, call)
    return f"{context.pause('kPolls')} {call}"


def signed_type(kind: str) -> str:
    return f"{'int' if kind.startswith('s') else 'uint'}{bits(kind)}_t"


@emits("mbarrier")
def _mbarrier(context: Context, instruction: Instruction) -> str:
    """Barriers of copies: init, arrive.expect_tx, try_wait.parity; their orders by default."""
    modifiers = Modifiers(instruction)
    modifiers.type()
    does = modifiers.one_of("init", "arrive", "try_wait")
    how = modifiers.one_of("expect_tx", "parity")
    space = modifiers.one_of("shared", "shared::cta")
    modifiers.end()
    if not space or (does, how) not in (
        ("init", ""),
        ("arrive", "expect_tx"),
        ("try_wait", "parity"),
    ):
        raise modifiers.error("unknown barrier")
    *target, place, given = instruction.operands
    if does == "arrive" and target != ["_"]:
        raise modifiers.error("unknown result")
    values = f"{context.address(place)}, {context.value(given, 'u32')}"
    if does == "init":
        return f"init_copies(t, {context.site('kStore')}, {values});"
    pause = context.pause("kPolls")
    if does == "arrive":
        return f"{pause} expect_copies(t, {context.site('kAtomic', 'kRelease', 'kCta')}, {values});"
    landed = f"have_landed(t, {context.site('kLoad', 'kAcquire', 'kCta')}, {values})"
    return f"{pause} {context.assign(target[0], 'pred', landed)}"


@emits("cp")
def _cp(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    wanted = ("async", "bulk", "shared::cluster", "global", "mbarrier::complete_tx::bytes")
    if instruction.modifiers != wanted:
        raise modifiers.error("unknown copy")
    target, source, count, barrier = instruction.operands
    places = ", ".join(context.address(place) for place in (target, source, barrier))
    copy = f"start_copy(t, {context.site('kLoad')}, {places}, {context.value(count, 'u32')});"
    return f"{context.pause('kPaused')} {copy}"


@emits("fence")
def _fence(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    if modifiers.has("proxy"):
        space = modifiers.one_of("global", "shared::cta")
        if not modifiers.has("async") or not space:
            raise modifiers.error("unknown proxy")
        modifiers.end()
        return f"fence_copies(t, {context.site('kProxyFence')}, Space::{SPACES[space]});"
    order = modifiers.one_of("acq_rel", "sc", "acquire", "release")
    scope = modifiers.one_of(*SCOPES)
    modifiers.end()
    site = context.site("kFence", ORDERS[order], SCOPES[scope])
    return f"{context.pause('kPolls')} fence(t, {site});"


# ---- meetings, the grid, control


@emits("bar")
def _bar(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    of_warp = modifiers.has("warp")
    if not modifiers.has("sync"):
        raise modifiers.error("unknown barrier")
    modifiers.end()
    first, *others = instruction.operands
    if of_warp:
        return _meet(context, "kWarpBarrier", "kBarrier", first, "0")
    if first != "0" or others:
        raise modifiers.error("unknown barrier")
    return context.block(f"meet_at_barrier(t, {context.site('kBarrier')})")


def _meet(context: Context, kind: str, operation: str, mask: str, values: str) -> str:
    """C++ that waits for the lanes of a mask."""
    site, members = context.site(kind), context.value(mask, "u32")
    return context.block(f"meet_in_warp(t, {site}, WarpOp::{operation}, {members}, {values})")


_MEETINGS = {
    "shfl.sync.bfly.b32": "kShuffleBfly",
    "shfl.sync.idx.b32": "kShuffleIdx",
    "redux.sync.add.s32": "kAdd",
    "redux.sync.add.u32": "kAdd",
    "redux.sync.min.u32": "kMin",
    "redux.sync.max.u32": "kMax",
    "vote.sync.ballot.b32": "kBallot",
    "match.any.sync.b32": "kMatchAny",
    "elect.sync": "kElect",
}


@emits("shfl", "redux", "vote", "match", "elect")
def _meeting(context: Context, instruction: Instruction) -> str:
    operation = _MEETINGS.get(".".join((instruction.opcode, *instruction.modifiers)))
    if operation is None:
        raise Modifiers(instruction).error("unknown meeting")
    target, *given, mask = instruction.operands
    kind = "pred" if operation == "kBallot" else "u32"
    values = ", ".join(context.value(each, kind) for each in given) or "0"
    target, _, predicate = target.partition("|")
    got = context.assign(target, "b32", "static_cast<uint32_t>(t.result)")
    if predicate:
        got += context.assign(predicate, "pred", "t.result_predicate")
    return f"{_meet(context, 'kWarp', operation, mask, values)} {got}"


@emits("griddepcontrol")
def _griddepcontrol(context: Context, instruction: Instruction) -> str:
    if instruction.modifiers == ("wait",):
        site = context.site("kGridWait")
        wait = context.block(f"wait_for_grid(t, {site})")
        done = "if (kRaces) races::on_grid_wait(t); if (kClock) clocks::on_grid_wait(t);"
        return f"if ({site}.removed == 0) {{ {wait} {done} }}"
    if instruction.modifiers != ("launch_dependents",):
        raise Modifiers(instruction).error("unknown modifier")
    return f"{context.pause('kPaused')} let_dependents_start(t);"


@emits("bra")
def _bra(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    modifiers.has("uni")
    modifiers.end()
    return context.branch(instruction.operands[0])


@emits("ret", "exit")
def _ret(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    modifiers.has("uni")
    modifiers.end()
    return "return Status::kEnded;"


@emits("trap")
def _trap(context: Context, instruction: Instruction) -> str:
    return f'fail(t, &{context.site("kFence")}, "Trap", "the kernel gave up");'


@emits("nanosleep")
def _nanosleep(context: Context, instruction: Instruction) -> str:
    return context.pause("kPolls")


# ---- integers

#: Opcode and modifiers but the type -> operands (T: of the type, B: of its bits, U: u32, P: a
#: predicate, W: of twice its bits), and C++ of what is computed: of the type, or of its bits where
#: the first operand is B, or of twice its bits.
_COMPUTED = {
    "add": ("BB", "{0} + {1}"),
    "sub": ("BB", "{0} - {1}"),
    # `1u`: C++ would multiply 16 bits as int, which may overflow.
    "mul.lo": ("BB", "1u * {0} * {1}"),
    "mul.hi": ("TT", "high_product({0}, {1})"),
    "mul.wide": ("TT", "wide_product({0}, {1})"),
    "mad.lo": ("BBB", "1u * {0} * {1} + {2}"),
    "mad.wide": ("TTW", "wide_product({0}, {1}) + {2}"),
    "neg": ("B", "0 - {0}"),
    "and": ("TT", "{0} & {1}"),
    "or": ("TT", "{0} | {1}"),
    "xor": ("TT", "{0} ^ {1}"),
    "not": ("T", "~{0}"),
    "div": ("TT", "quotient<{T}>({0}, {1})"),
    "rem": ("TT", "remainder_of<{T}>({0}, {1})"),
    "min": ("TT", "std::min<{T}>({0}, {1})"),
    "max": ("TT", "std::max<{T}>({0}, {1})"),
    "shl": ("TU", "shifted_left<{T}>({0}, {1})"),
    "shr": ("TU", "shifted_right<{T}>({0}, {1})"),
    "shf.l.wrap": ("UUU", "funnel({0}, {1}, {2})"),
    "bfe": ("TUU", "extracted<{T}>({0}, {1}, {2})"),
    "bfi": ("TTUU", "inserted<{T}>({0}, {1}, {2}, {3})"),
    # How far up the highest bit can move; all ones where there is none.
    "bfind.shiftamt": ("U", "({0} == 0 ? ~0u : static_cast<uint32_t>(std::countl_zero({0})))"),
    "prmt": ("UUU", "permuted({0}, {1}, {2})"),
    "brev": ("T", "reversed({0})"),
    "selp": ("BBP", "{2} ? {0} : {1}"),
    "copysign": ("BB", "({0} & {sign}) | ({1} & ~{sign})"),
}
#: The same of floating types, whose bits are enough for it.
_OF_BITS = {"selp": "", "copysign": "", "neg": "{0} ^ {sign}", "abs": "{0} & ~{sign}"}
#: Other types of neg, bfe and bfind are not done here, or do not exist.
_TYPES = {
    "bfe": ("u32", "u64"),
    "bfind.shiftamt": ("u32",),
    "neg": ("s16", "s32", "s64", "bf16", "f16", "f32"),
}


@emits("mul", "mad", "shf", "bfind", "abs", *(name for name in _COMPUTED if "." not in name))
def _computed(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    raw, name = f"b{bits(kind)}", ".".join((instruction.opcode, *instruction.modifiers[:-1]))
    if is_float(kind) and name not in _OF_BITS:
        return _real(context, instruction)
    if kind not in _TYPES.get(name, (kind,)):
        raise modifiers.error("unknown type")
    types, formula = _COMPUTED.get(name, ("B", ""))
    if is_float(kind):
        formula = _OF_BITS[name] or formula
    elif not formula:
        raise modifiers.error("unknown form")
    wide = f"{kind[0]}{2 * bits(kind)}"
    of = {"T": kind, "B": raw, "U": "u32", "P": "pred", "W": wide}
    target, *sources = instruction.operands
    values = [context.value(each, of[letter]) for each, letter in zip(sources, types, strict=True)]
    sign = f"static_cast<{unsigned(raw)}>(1ull << {bits(raw) - 1})"
    if kind == "pred" and name == "not":
        formula = "!{0}"
    value = formula.format(*values, T=signed_type(kind), sign=sign)
    result = wide if name.endswith(".wide") else raw if types[0] == "B" else kind
    return context.assign(target, result, value)


# ---- floating point

_FORMULAS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "fma": "std::fma({}, {}, {})",
    "max": "greatest({}, {})",
    "rcp": "1.0F / {}",
    "ex2": "std::exp2({})",
}


@emits("fma", "rcp", "ex2")
def _real(context: Context, instruction: Instruction) -> str:
    """Rounded to nearest even; .approx: a value within the error that the ISA states."""
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.one_of("rn", "approx")
    flushes = modifiers.has("ftz")
    modifiers.end()
    if kind != "f32":
        raise modifiers.error("unknown type")
    target, *sources = instruction.operands
    values = [context.value(each, kind) for each in sources]
    if flushes:
        values = [f"flushed({each})" for each in values]
    value = _FORMULAS[instruction.opcode].format(*values)
    value = f"flushed({value})" if flushes else value
    return context.assign(target, "b32", f"result_of({value})")


# ---- comparisons

_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
#: True where an operand is a NaN.
_UNORDERED = tuple(f"{name}u" for name in _COMPARED)


@emits("setp")
def _setp(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    comparison = modifiers.one_of(*_COMPARED, *_UNORDERED)
    modifiers.end()
    if not comparison or (comparison in _UNORDERED and kind != "f32"):
        raise modifiers.error("unknown comparison")
    target, *sources = instruction.operands
    a, b = (context.value(each, kind) for each in sources)
    compared = f"{a} {_COMPARED[comparison.removesuffix('u')]} {b}"
    if is_float(kind):
        is_nan = f"(std::isnan({a}) || std::isnan({b}))"
        joined = f"{is_nan} || " if comparison in _UNORDERED else f"!{is_nan} && "
        compared = f"({joined}{compared})"
    return context.assign(target, "pred", compared)


# ---- conversions

_PACKED_FORMATS = {"e4m3x2": ("e4m3", 8), "e2m1x2": ("e2m1", 4)}


@emits("cvt")
def _cvt(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    to, source = instruction.modifiers[-2:]
    modifiers.one_of(to)
    modifiers.one_of(source)
    rounding = modifiers.one_of("rn", "rzi")
    saturates = modifiers.has("satfinite")
    modifiers.end()
    if to.endswith("x2") and saturates == (to in _PACKED_FORMATS):
        return _cvt_packed(context, instruction, to, source)
    if to not in TYPE_BYTES or source not in TYPE_BYTES or saturates:
        raise modifiers.error("unknown types")
    if is_float(to) and rounding == "rzi":
        raise modifiers.error("unknown types")
    target, operand = instruction.operands
    value = context.value(operand, source)
    if to == "f32":
        return context.assign(target, "b32", f"result_of(static_cast<float>({value}))")
    if is_float(source) and not is_float(to):
        if rounding != "rzi":
            raise modifiers.error("unknown rounding")
        value = f"clamped<{signed_type(to)}>(std::trunc(static_cast<double>({value})))"
    return context.assign(target, to, value)


def _cvt_packed(context: Context, instruction: Instruction, to: str, source: str) -> str:
    """Pairs: the first operand is the upper half."""
    target, *operands = instruction.operands
    if source == "f32":
        upper, lower = (context.value(each, "f32") for each in operands)
        name, width = _PACKED_FORMATS.get(to, (to.removesuffix("x2"), 16))
        pair = f"static_cast<uint32_t>({name}_of({lower})) | "
        pair += f"static_cast<uint32_t>({name}_of({upper})) << {width}"
        return context.assign(target, f"b{2 * max(width, 4)}", pair)
    if source in _PACKED_FORMATS and to == "f16x2":
        name, width = _PACKED_FORMATS[source]
        value = context.value(operands[0], f"b{2 * width}")
        halves = [f"f16_of({name}({value} >> {width * lane}))" for lane in range(2)]
        pair = f"static_cast<uint32_t>({halves[0]}) | static_cast<uint32_t>({halves[1]}) << 16"
        return context.assign(target, "b32", pair)
    raise Modifiers(instruction).error("unknown types")
