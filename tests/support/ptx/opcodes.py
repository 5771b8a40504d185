"""The table of opcodes: what each instruction of PTX is in C++, over runtime/machine.h.

An emitter takes the context of its entry and the instruction, and returns C++ statements. It takes
the modifiers that it knows; one that is left over is an error, and so is an opcode that has no
emitter. What each instruction does is said in NVIDIA's PTX ISA, chapter 9.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from .text import TYPE_BYTES, Instruction, UnknownPtxError

ORDERS = {
    "weak": "kWeak",
    "relaxed": "kRelaxed",
    "acquire": "kAcquire",
    "release": "kRelease",
    "acq_rel": "kAcqRel",
    "sc": "kSc",
}
SCOPES = {"cta": "kCta", "cluster": "kCluster", "gpu": "kGpu", "sys": "kSys"}
SPACES = {
    "global": "kGlobal",
    "shared": "kShared",
    "shared::cta": "kShared",
    "local": "kLocal",
    "param": "kParam",
    "param::entry": "kParam",
}
#: Hints, which change no result.
_HINTS = {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt"}


class Context(Protocol):
    """What an emitter asks of its entry (translate.py)."""

    def value(self, operand: str, kind: str) -> str:
        """C++ that reads an operand as a type; floating types are float or double."""
        ...

    def assign(self, operand: str, kind: str, value: str) -> str:
        """A C++ statement that writes to a register; a narrower value is extended by its type."""
        ...

    def address(self, operand: str, space: str) -> str:
        """C++ of `[register + offset]` or `[symbol + offset]`, as 64 bits."""
        ...

    def site(self, kind: str, order: str = "kWeak", scope: str = "kNone") -> str:
        """C++ of a new entry in the table of sites."""
        ...

    def pause(self, status: str) -> str:
        """A place at which the thread stops and goes on: always, or when it is tired."""
        ...

    def block(self, meets: str) -> str:
        """Waits unless `meets` says that nobody is missing; the thread goes on after it."""
        ...

    def branch(self, label: str) -> str: ...


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

    def hints(self) -> None:
        self._left = [
            each
            for each in self._left
            if each not in _HINTS and not each.startswith(("L1::", "L2::"))
        ]

    def end(self) -> None:
        if self._left:
            raise self.error(f"unknown modifier .{self._left[0]}")

    def error(self, what: str) -> UnknownPtxError:
        return UnknownPtxError(what, self._instruction.line, self._instruction.text)


Emitter = Callable[[Context, Instruction], str]
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
        UnknownPtxError: the table lacks the opcode, or the emitter a modifier.
    """
    emitter = OPCODES.get(instruction.opcode)
    if emitter is None:
        raise UnknownPtxError(
            f"unknown opcode {instruction.opcode}", instruction.line, instruction.text
        )
    return emitter(context, instruction)


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
    return kind in ("f16", "bf16", "f32", "f64")


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
    to, space = modifiers.has("to"), modifiers.one_of(*SPACES)
    modifiers.end()
    target, source = instruction.operands
    windows = {"kShared": "kSharedWindow", "kLocal": "kLocalWindow", "kParam": "kParamWindow"}
    window = windows.get(SPACES[space], "0")
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
    modifiers.has("mmio")
    space = modifiers.one_of(*SPACES)
    return SPACES.get(space, ""), ORDERS[order], SCOPES.get(scope, "kNone")


def _pause_before(context: Context, space: str, order: str) -> str:
    if order != "kWeak":
        return context.pause("kPolls")
    return context.pause("kPaused") if space in ("kGlobal", "") else ""


def _place(context: Context, operand: str, space: str) -> str:
    """C++ of (space, whether it is generic, address)."""
    known = f"Space::{space or 'kGlobal'}, {'false' if space else 'true'}"
    return f"{known}, {context.address(operand, space)}"


@emits("ld", "ldu")
def _ld(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.hints()
    space, order, scope = _memory(modifiers)
    modifiers.one_of("v2", "v4", "v8")
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
    modifiers.hints()
    is_async = modifiers.has("async")
    space, order, scope = _memory(modifiers)
    if is_async and (space, order, kind) != ("kGlobal", "kRelease", "b64"):
        raise modifiers.error("st.async is a release of a word in global memory only")
    modifiers.one_of("v2", "v4", "v8")
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


_COMBINED = {
    "add": "static_cast<T>(x + b)",
    "min": "x < b ? x : b",
    "max": "x > b ? x : b",
    "and": "static_cast<T>(x & b)",
    "or": "static_cast<T>(x | b)",
    "xor": "static_cast<T>(x ^ b)",
    "exch": "b",
    "inc": "static_cast<T>(x >= b ? 0 : x + 1)",
    "dec": "static_cast<T>(x == 0 || x > b ? b : x - 1)",
    "cas": "x == b ? c : x",
}


@emits("atom", "red")
def _atom(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.hints()
    operation = modifiers.one_of(*_COMBINED)
    modifiers.has("noftz")
    space, order, scope = _memory(modifiers)
    modifiers.end()
    if not operation:
        raise modifiers.error("unknown atomic operation")
    order = "kRelaxed" if order == "kWeak" else order
    scope = "kGpu" if scope == "kNone" else scope
    operands = list(instruction.operands)
    target = operands.pop(0) if instruction.opcode == "atom" else "_"
    place = _place(context, operands[0], space)
    # Floating values are added as such; every other operation is on bits.
    real = is_float(kind)
    if kind.endswith("x2") or (real and bits(kind) == 16):
        raise modifiers.error("unknown type")
    work = "float" if kind == "f32" else "double" if kind == "f64" else signed_type(kind)
    given = "".join(
        f"const T {name} = {context.value(operand, kind)}; "
        for name, operand in zip("bc", operands[1:], strict=False)
    )
    read = f"{kind}(raw)" if real else "static_cast<T>(raw)"
    written = "bits_of(after)" if real else f"static_cast<{unsigned(kind)}>(after)"
    combine = (
        f"[&]({unsigned(kind)} raw) {{ const T x = {read}; const T after = {_COMBINED[operation]}; "
        f"return {written}; }}"
    )
    site = context.site("kAtomic", order, scope)
    call = f"atomic<{unsigned(kind)}>(t, {site}, {place}, {combine})"
    if target != "_":
        call = context.assign(target, kind, as_value(kind, call))
    return f"{context.pause('kPolls')}{{ using T = {work}; {given}{call}; }}"


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
    values = f"{context.address(place, 'kShared')}, {context.value(given, 'u32')}"
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
    places = ", ".join(
        context.address(place, space)
        for place, space in ((target, "kShared"), (source, "kGlobal"), (barrier, "kShared"))
    )
    copy = f"start_copy(t, {context.site('kLoad')}, {places}, {context.value(count, 'u32')});"
    return f"{context.pause('kPaused')} {copy}"


@emits("fence", "membar")
def _fence(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    if modifiers.has("proxy"):
        space = modifiers.one_of("global", "shared::cta")
        if not modifiers.has("async") or not space:
            raise modifiers.error("unknown proxy")
        modifiers.end()
        return f"fence_copies(t, {context.site('kProxyFence')}, Space::{SPACES[space]});"
    if instruction.opcode == "membar":
        level = modifiers.one_of("cta", "gl", "gpu", "sys")
        order, scope = "sc", {"gl": "gpu"}.get(level, level)
    else:
        order = modifiers.one_of("acq_rel", "sc", "acquire", "release", default="acq_rel")
        scope = modifiers.one_of(*SCOPES)
    modifiers.end()
    site = context.site("kFence", ORDERS[order], SCOPES[scope])
    return f"{context.pause('kPolls')} fence(t, {site});"


# ---- meetings, the grid, control


@emits("bar", "barrier")
def _bar(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    if modifiers.has("warp"):
        modifiers.one_of("sync")
        modifiers.end()
        mask = context.value(instruction.operands[0], "u32")
        site = context.site("kWarpBarrier")
        return context.block(f"meet_in_warp(t, {site}, WarpOp::kBarrier, {mask}, 0)")
    modifiers.has("cta")
    modifiers.has("aligned")
    if not modifiers.has("sync"):
        raise modifiers.error("unknown barrier")
    modifiers.end()
    number, count, *_ = [*(context.value(each, "u32") for each in instruction.operands), "0"]
    return context.block(f"meet_at_barrier(t, {context.site('kBarrier')}, {number}, {count})")


@emits("shfl")
def _shfl(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind, _ = modifiers.type(), modifiers.has("sync")
    mode = modifiers.one_of("up", "down", "bfly", "idx")
    modifiers.end()
    target, value, by, clamp, mask = instruction.operands
    target, _, predicate = target.partition("|")
    a, b, c, members = (context.value(each, "u32") for each in (value, by, clamp, mask))
    site = context.site("kWarp")
    meets = f"meet_in_warp(t, {site}, WarpOp::kShuffle{mode.title()}, {members}, {a}, {b}, {c})"
    got = context.assign(target, kind, "static_cast<uint32_t>(t.result)")
    if predicate:
        got += context.assign(predicate, "pred", "t.result_predicate")
    return f"{context.block(meets)} {got}"


@emits("redux")
def _redux(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind, _ = modifiers.type(), modifiers.has("sync")
    operation = modifiers.one_of("add", "min", "max", "and", "or", "xor")
    modifiers.end()
    target, value, mask = instruction.operands
    suffix = kind.upper() if operation in ("min", "max") else ""
    site, members = context.site("kWarp"), context.value(mask, "u32")
    meets = (
        f"meet_in_warp(t, {site}, WarpOp::k{operation.title()}{suffix}, {members}, "
        f"{context.value(value, 'b32')})"
    )
    got = context.assign(target, "b32", "static_cast<uint32_t>(t.result)")
    return f"{context.block(meets)} {got}"


@emits("vote")
def _vote(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind, _ = modifiers.type(), modifiers.has("sync")
    operation = modifiers.one_of("any", "all", "ballot")
    modifiers.end()
    target, value, mask = instruction.operands
    site, members = context.site("kWarp"), context.value(mask, "u32")
    meets = (
        f"meet_in_warp(t, {site}, WarpOp::k{operation.title()}, {members}, "
        f"{context.value(value, 'pred')} ? 1 : 0)"
    )
    result = "static_cast<uint32_t>(t.result)" if kind == "b32" else "t.result != 0"
    return f"{context.block(meets)} {context.assign(target, kind, result)}"


@emits("match")
def _match(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind, _, mode = modifiers.type(), modifiers.has("sync"), modifiers.one_of("any")
    modifiers.end()
    if not mode:
        raise modifiers.error("unknown mode")
    target, value, mask = instruction.operands
    site, members = context.site("kWarp"), context.value(mask, "u32")
    given = context.value(value, f"u{bits(kind)}")
    meets = f"meet_in_warp(t, {site}, WarpOp::kMatchAny, {members}, {given})"
    got = context.assign(target, "b32", "static_cast<uint32_t>(t.result)")
    return f"{context.block(meets)} {got}"


@emits("elect")
def _elect(context: Context, instruction: Instruction) -> str:
    """PTX leaves open which lane is elected; here it is the lowest one of the mask."""
    modifiers = Modifiers(instruction)
    modifiers.has("sync")
    modifiers.end()
    target, mask = instruction.operands
    leader, _, predicate = target.partition("|")
    site, members = context.site("kWarp"), context.value(mask, "u32")
    meets = f"meet_in_warp(t, {site}, WarpOp::kElect, {members}, 0)"
    got = context.assign(leader, "b32", "static_cast<uint32_t>(t.result)")
    elected = context.assign(predicate, "pred", "t.result == t.lane")
    return f"{context.block(meets)} {got} {elected}"


@emits("activemask")
def _activemask(context: Context, instruction: Instruction) -> str:
    return context.assign(instruction.operands[0], "b32", "t.warp->live")


@emits("griddepcontrol")
def _griddepcontrol(context: Context, instruction: Instruction) -> str:
    if instruction.modifiers == ("wait",):
        site = context.site("kGridWait")
        wait = context.block(f"wait_for_grid(t, {site})")
        done = "races::on_grid_wait(t); clocks::on_grid_wait(t);"
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

_BINARY = {
    "add": "{a} + {b}",
    "sub": "{a} - {b}",
    "and": "{a} & {b}",
    "or": "{a} | {b}",
    "xor": "{a} ^ {b}",
}


@emits("and", "or", "xor", "not", "cnot")
def _logic(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.end()
    target, *sources = instruction.operands
    values = [context.value(each, kind) for each in sources]
    if instruction.opcode == "not":
        value = f"!{values[0]}" if kind == "pred" else f"~{values[0]}"
    elif instruction.opcode == "cnot":
        value = f"{values[0]} == 0 ? 1 : 0"
    else:
        value = _BINARY[instruction.opcode].format(a=values[0], b=values[1])
    return context.assign(target, kind, value)


@emits("add", "sub")
def _add(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    if not kind.startswith(("u", "s", "b3", "b6")) or kind.startswith("bf"):
        return _real(context, instruction, modifiers, kind)
    saturates = modifiers.has("sat")
    modifiers.end()
    target, a, b = instruction.operands
    if saturates:
        wide = _BINARY[instruction.opcode].format(
            a=f"static_cast<int64_t>({context.value(a, kind)})", b=context.value(b, kind)
        )
        value = f"clamped<{signed_type(kind)}>(static_cast<double>({wide}))"
        return context.assign(target, kind, value)
    raw = f"b{bits(kind)}"
    value = _BINARY[instruction.opcode].format(a=context.value(a, raw), b=context.value(b, raw))
    return context.assign(target, raw, value)


@emits("mul", "mad")
def _mul(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    if is_float(kind) or kind.endswith("x2"):
        return _real(context, instruction, modifiers, kind)
    mode = modifiers.one_of("lo", "hi", "wide")
    modifiers.end()
    target, a, b, *added = instruction.operands
    product = f"static_cast<{_wide(kind)}>({context.value(a, kind)}) * {context.value(b, kind)}"
    result = kind
    if mode == "hi":
        product = f"static_cast<{signed_type(kind)}>(({product}) >> {bits(kind)})"
    elif mode == "wide":
        result = f"{kind[0]}{2 * bits(kind)}"
    elif bits(kind) == 64:
        product = f"{context.value(a, 'u64')} * {context.value(b, 'u64')}"
    if added:
        product = f"static_cast<uint64_t>({product}) + {context.value(added[0], result)}"
    return context.assign(target, result, product)


def _wide(kind: str) -> str:
    sign = "" if kind.startswith("s") else "unsigned "
    return f"{sign}__int128" if bits(kind) == 64 else f"{'' if sign == '' else 'u'}int64_t"


@emits("div", "rem")
def _div(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    if is_float(kind):
        return _real(context, instruction, modifiers, kind)
    modifiers.end()
    target, a, b = instruction.operands
    function = "quotient" if instruction.opcode == "div" else "remainder_of"
    values = f"{context.value(a, kind)}, {context.value(b, kind)}"
    return context.assign(target, kind, f"{function}<{signed_type(kind)}>({values})")


@emits("min", "max")
def _extreme(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    target, a, b = instruction.operands
    if kind == "f32":
        flushes, keeps_nan = modifiers.has("ftz"), modifiers.has("NaN")
        modifiers.end()
        name = "least" if instruction.opcode == "min" else "greatest"
        values = [context.value(each, kind) for each in (a, b)]
        if flushes:
            values = [f"flushed({each})" for each in values]
        call = f"{name}({', '.join(values)}, {'true' if keeps_nan else 'false'})"
        return context.assign(target, "b32", f"result_of({call})")
    modifiers.end()
    if is_float(kind) or kind.endswith("x2"):
        raise modifiers.error("unknown type")
    name = "std::min" if instruction.opcode == "min" else "std::max"
    values = [context.value(each, kind) for each in (a, b)]
    return context.assign(target, kind, f"{name}<{signed_type(kind)}>({', '.join(values)})")


@emits("shl", "shr")
def _shift(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.end()
    target, value, by = instruction.operands
    name = "shifted_left" if instruction.opcode == "shl" else "shifted_right"
    a, b = context.value(value, kind), context.value(by, "u32")
    return context.assign(target, kind, f"{name}<{signed_type(kind)}>({a}, {b})")


@emits("shf")
def _shf(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    modifiers.type()
    left, wraps = modifiers.one_of("l", "r") == "l", modifiers.one_of("wrap", "clamp") == "wrap"
    modifiers.end()
    target, *sources = instruction.operands
    values = ", ".join(context.value(each, "u32") for each in sources)
    flags = f"{str(left).lower()}, {str(wraps).lower()}"
    return context.assign(target, "u32", f"funnel({values}, {flags})")


@emits("bfi", "bfe")
def _field(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.end()
    target, *sources = instruction.operands
    counts = [context.value(each, "u32") for each in sources[-2:]]
    values = [context.value(each, kind) for each in sources[:-2]]
    name = "inserted" if instruction.opcode == "bfi" else "extracted"
    call = f"{name}<{signed_type(kind)}>({', '.join(values + counts)})"
    return context.assign(target, kind, call)


@emits("prmt", "lop3")
def _bytes(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    modifiers.type()
    modifiers.end()
    target, *sources = instruction.operands
    name = "permuted" if instruction.opcode == "prmt" else "looked_up"
    values = ", ".join(context.value(each, "u32") for each in sources)
    return context.assign(target, "u32", f"{name}({values})")


@emits("popc", "clz", "brev", "bfind")
def _count(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind, shifts = modifiers.type(), modifiers.has("shiftamt")
    modifiers.end()
    if instruction.opcode == "bfind" and kind.startswith("s"):
        raise modifiers.error("unknown type")
    target, source = instruction.operands
    value = context.value(source, f"u{bits(kind)}")
    calls = {
        "popc": f"static_cast<uint32_t>(std::popcount({value}))",
        "clz": f"static_cast<uint32_t>(std::countl_zero({value}))",
        "bfind": f"static_cast<uint32_t>({bits(kind) - 1} - std::countl_zero({value}))",
        "brev": f"reversed({value})",
    }
    if shifts:  # how far up the highest bit can move; all ones where there is none
        leading = f"static_cast<uint32_t>(std::countl_zero({value}))"
        calls["bfind"] = f"({value} == 0 ? ~0u : {leading})"
    result = kind if instruction.opcode == "brev" else "u32"
    return context.assign(target, result, calls[instruction.opcode])


@emits("abs", "neg")
def _sign(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    flushes = modifiers.has("ftz")
    modifiers.end()
    if flushes and kind != "f32":
        raise modifiers.error("unknown modifier .ftz")
    target, source = instruction.operands
    if is_float(kind) or kind.endswith("x2"):
        raw = f"b{bits(kind)}"
        sign = {"f16x2": "0x80008000u", "bf16x2": "0x80008000u"}.get(
            kind, f"1ull << {bits(kind) - 1}"
        )
        value = context.value(source, raw)
        if flushes:
            value = f"bits_of(flushed(f32({value})))"
        operator = "& ~" if instruction.opcode == "abs" else "^ "
        return context.assign(
            target, raw, f"{value} {operator}static_cast<{unsigned(kind)}>({sign})"
        )
    value = context.value(source, kind)
    negative = f"static_cast<{signed_type(kind)}>(0 - static_cast<uint64_t>({value}))"
    if instruction.opcode == "abs":
        negative = f"{value} < 0 ? {negative} : {value}"
    return context.assign(target, kind, negative)


# ---- floating point


def _lanes(context: Context, operand: str, kind: str) -> list[str]:
    """C++ of the values that an operand holds: two of f16x2 and bf16x2, else one."""
    if not kind.endswith("x2"):
        return [context.value(operand, kind)]
    whole = context.value(operand, "b32")
    half = kind.removesuffix("x2")
    return [f"{half}(static_cast<uint16_t>({whole} >> {16 * lane}))" for lane in range(2)]


def _real(context: Context, instruction: Instruction, modifiers: Modifiers, kind: str) -> str:
    """add, sub, mul, fma, div and mad; rounded to nearest even."""
    modifiers.one_of("rn", "full", "approx")
    flushes, saturates, relu = (modifiers.has(name) for name in ("ftz", "sat", "relu"))
    modifiers.end()
    if relu:
        raise modifiers.error("unknown modifier .relu")
    if flushes and kind != "f32":
        raise modifiers.error("unknown modifier .ftz")
    target, *sources = instruction.operands
    formula = {
        "add": "{0} + {1}",
        "sub": "{0} - {1}",
        "mul": "{0} * {1}",
        "div": "{0} / {1}",
        "fma": "std::fma({0}, {1}, {2})",
        "mad": "std::fma({0}, {1}, {2})",
    }[instruction.opcode]
    results = []
    # Halves are computed in double, where no sum or product of them is rounded twice.
    narrow = bits(kind) == 16 or kind.endswith("x2")
    if narrow and instruction.opcode in ("fma", "mad"):
        formula = "fused_halves({0}, {1}, {2})"
    for lane in zip(*(_lanes(context, each, kind) for each in sources), strict=True):
        values = [f"static_cast<double>({each})" for each in lane] if narrow else list(lane)
        if flushes:
            values = [f"flushed({each})" for each in values]
        value = formula.format(*values)
        if flushes:
            value = f"flushed({value})"
        if saturates:
            value = f"saturated({value})"
        results.append(value)
    return _assign_real(context, target, kind, results)


def _assign_real(context: Context, target: str, kind: str, results: list[str]) -> str:
    if kind in ("f32", "f64"):
        return context.assign(target, f"b{bits(kind)}", f"result_of({results[0]})")
    half = kind.removesuffix("x2")
    packed = " | ".join(
        f"static_cast<uint32_t>({half}_of({each})) << {16 * lane}"
        for lane, each in enumerate(results)
    )
    return context.assign(target, f"b{bits(kind)}", packed)


@emits("fma")
def _fma(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    return _real(context, instruction, modifiers, modifiers.type())


_FUNCTIONS = {
    "rcp": "1.0F / {}",
    "sqrt": "std::sqrt({})",
    "rsqrt": "1.0F / std::sqrt({})",
    "ex2": "std::exp2({})",
    "lg2": "std::log2({})",
}


@emits(*_FUNCTIONS)
def _function(context: Context, instruction: Instruction) -> str:
    """.approx: a value within the error that the ISA states."""
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    modifiers.one_of("rn", "approx")
    flushes = modifiers.has("ftz")
    modifiers.end()
    if kind != "f32":
        raise modifiers.error("unknown type")
    target, source = instruction.operands
    value = context.value(source, kind)
    value = _FUNCTIONS[instruction.opcode].format(f"flushed({value})" if flushes else value)
    value = f"flushed({value})" if flushes else value
    return context.assign(target, "b32", f"result_of({value})")


@emits("copysign")
def _copysign(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    raw = f"b{bits(modifiers.type())}"
    modifiers.end()
    target, sign, magnitude = instruction.operands
    mask = f"static_cast<{unsigned(raw)}>(1ull << {bits(raw) - 1})"
    value = f"({context.value(sign, raw)} & {mask}) | ({context.value(magnitude, raw)} & ~{mask})"
    return context.assign(target, raw, value)


# ---- comparisons

_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


def _compared(context: Context, comparison: str, kind: str, a: str, b: str, flushes: bool) -> str:
    if is_float(kind):
        x, y = context.value(a, kind), context.value(b, kind)
        if flushes:
            x, y = f"flushed({x})", f"flushed({y})"
        unordered = f"(std::isnan({x}) || std::isnan({y}))"
        if comparison in ("num", "nan"):
            return unordered if comparison == "nan" else f"!{unordered}"
        operator = _COMPARED[comparison.removesuffix("u")]
        joined = f"{x} {operator} {y}"
        if comparison.endswith("u"):
            return f"({unordered} || {joined})"
        return f"(!{unordered} && {joined})"
    if comparison in _UNSIGNED:
        kind = f"u{bits(kind)}"
    operator = (_COMPARED | _UNSIGNED)[comparison]
    return f"({context.value(a, kind)} {operator} {context.value(b, kind)})"


@emits("setp")
def _setp(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    kind = modifiers.type()
    unordered = [f"{name}u" for name in _COMPARED]
    comparison = modifiers.one_of(*_COMPARED, *_UNSIGNED, *unordered, "num", "nan")
    joined = modifiers.one_of("and", "or", "xor")
    flushes = modifiers.has("ftz")
    modifiers.end()
    if kind.endswith("x2"):
        raise modifiers.error("unknown type")
    if flushes and kind != "f32":
        raise modifiers.error("unknown modifier .ftz")
    target, a, b, *third = instruction.operands
    first, _, second = target.partition("|")
    one, two = "is", "!is"
    if joined:
        operator = {"and": "&&", "or": "||", "xor": "!="}[joined]
        extra = context.value(third[0], "pred")
        one, two = f"is {operator} {extra}", f"!is {operator} {extra}"
    text = f"const bool is = {_compared(context, comparison, kind, a, b, flushes)}; "
    text += f"const bool one = {one}; const bool two = {two}; static_cast<void>(two); "
    text += context.assign(first, "pred", "one")
    if second:
        text += context.assign(second, "pred", "two")
    return f"{{ {text} }}"


@emits("selp")
def _selp(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    raw = f"b{bits(modifiers.type())}"
    modifiers.end()
    target, a, b, predicate = instruction.operands
    chosen = (
        f"{context.value(predicate, 'pred')} ? {context.value(a, raw)} : {context.value(b, raw)}"
    )
    return context.assign(target, raw, chosen)


# ---- conversions

_PACKED_FORMATS = {"e4m3x2": ("e4m3", 8), "e5m2x2": ("e5m2", 8), "e2m1x2": ("e2m1", 4)}
_TO_INTEGER = {
    "rni": "std::nearbyint",
    "rzi": "std::trunc",
    "rmi": "std::floor",
    "rpi": "std::ceil",
}


@emits("cvt")
def _cvt(context: Context, instruction: Instruction) -> str:
    modifiers = Modifiers(instruction)
    to, source = instruction.modifiers[-2:]
    modifiers.one_of(to)
    modifiers.one_of(source)
    rounding = modifiers.one_of("rn", *_TO_INTEGER)
    flushes = modifiers.has("ftz")
    saturates = modifiers.one_of("sat", "satfinite")
    modifiers.end()
    if to.endswith("x2") or source.endswith("x2"):
        return _cvt_packed(context, instruction, to, source, bool(saturates))
    if to not in TYPE_BYTES or source not in TYPE_BYTES:
        raise modifiers.error("unknown types")
    target, operand = instruction.operands
    value = context.value(operand, source)
    if flushes:
        value = f"flushed({value})"
    if is_float(to):
        return _cvt_to_real(context, target, to, value, (rounding, saturates, flushes))
    if is_float(source):
        value = f"{_TO_INTEGER[rounding]}(static_cast<double>({value}))"
    if is_float(source) or saturates:
        value = f"clamped<{signed_type(to)}>(static_cast<double>({value}))"
    return context.assign(target, to, f"static_cast<{signed_type(to)}>({value})")


def _cvt_to_real(
    context: Context, target: str, to: str, value: str, how: tuple[str, str, bool]
) -> str:
    rounding, saturates, flushes = how
    if rounding in _TO_INTEGER:
        value = f"{_TO_INTEGER[rounding]}({value})"
    if saturates == "sat":
        value = f"saturated(static_cast<float>({value}))"
    if to in ("f32", "f64"):
        value = f"static_cast<{'float' if to == 'f32' else 'double'}>({value})"
        if flushes and to == "f32":
            value = f"flushed({value})"
    elif saturates == "satfinite":
        return context.assign(target, "b16", f"{to}_of({value}, true)")
    return _assign_real(context, target, to, [value])


def _cvt_packed(
    context: Context, instruction: Instruction, to: str, source: str, saturates: bool
) -> str:
    """Pairs: the first operand is the upper half."""
    target, *operands = instruction.operands
    if source == "f32":
        upper, lower = (context.value(each, "f32") for each in operands)
        if to in _PACKED_FORMATS:
            name, width = _PACKED_FORMATS[to]
            pair = f"{name}_of({lower}) | {name}_of({upper}) << {width}"
            return context.assign(target, f"b{2 * max(width, 4)}", pair)
        if to not in ("f16x2", "bf16x2"):
            raise Modifiers(instruction).error("unknown types")
        half = to.removesuffix("x2")
        flag = ", true" if saturates else ""
        pair = (
            f"static_cast<uint32_t>({half}_of({lower}{flag})) | "
            f"static_cast<uint32_t>({half}_of({upper}{flag})) << 16"
        )
        return context.assign(target, "b32", pair)
    if source in _PACKED_FORMATS and to == "f16x2":
        name, width = _PACKED_FORMATS[source]
        value = context.value(operands[0], f"b{2 * max(width, 4)}")
        halves = [f"f16_of({name}({value} >> {width * lane}))" for lane in range(2)]
        pair = f"static_cast<uint32_t>({halves[0]}) | static_cast<uint32_t>({halves[1]}) << 16"
        return context.assign(target, "b32", pair)
    raise Modifiers(instruction).error("unknown types")
