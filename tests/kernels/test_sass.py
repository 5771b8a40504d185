"""What NVRTC makes of the kernels for GPUs: in the machine code stand the wide accesses and the
ordered ones that the text asks for, and little else. Compiled and read, not run.

TABLE has every property of every build, and MUTANTS the texts that must not have a property.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest

from moe_nvlink_plugin import driver
from moe_nvlink_plugin.exchange.kernels import (
    ASYNC_RELEASE,
    COMBINE,
    DISPATCH,
    LAYER,
    SMALL_COMBINE,
    SMALL_DISPATCH,
)
from moe_nvlink_plugin.jit import nvrtc, source
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.launch.kernel import Kernel
from moe_nvlink_plugin.lm_head.kernels import ARGMAX, COLLECT, GATHER, HEAD
from tests.support import sass
from tests.support.delays import replace_once
from tests.support.sass import Code

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

EVERY_ARCHITECTURE = nvrtc.ARCHITECTURES
HOPPER, BLACKWELL = "sm_90a", "sm_100a"


@dataclasses.dataclass(frozen=True)
class Build:
    """One kernel as a GPU gets it."""

    kernel: Kernel[Any]
    architecture: str = HOPPER
    top_k: int = 8
    dtype: str = "bf16"
    recipe: str = "none"
    combine: str = "bf16"
    expert_counts: str = "no"
    ordered_slots: str = "no"
    units: str = "14"
    tma: str = "no"
    async_release: str = "no"
    pdl: bool = True

    def __str__(self) -> str:
        others = dataclasses.fields(self)[2:]
        values = [(one.name, getattr(self, one.name), one.default) for one in others]
        words = [f"{name}={value}" for name, value, usual in values if value != usual]
        return "-".join([self.kernel.name, *words, self.architecture])

    def text(self) -> str:
        if self.kernel in HEAD.kernels:
            return HEAD.variant(dtype=self.dtype).build(self.kernel, pdl=self.pdl).text()
        variant = LAYER.variant(**{axis.name: getattr(self, axis.name) for axis in LAYER.axes})
        return variant.build(self.kernel, pdl=self.pdl).text()

    def code(self) -> Code:
        return _code_of(self)


@functools.cache
def _code_of(build: Build) -> Code:
    return sass.compiled(build.text(), build.architecture, build.kernel.entry)


#: A property: raises AssertionError where the code does not have it.
Check = Callable[[Build, Code], None]
#: How often an instruction is there: so often, or as often as one of these, or as the build says.
Count = int | range | Callable[[Build], int | range]


# Properties of any kernel.

#: Asked of common top_k only. 64: a CTA of 1024 threads, one for each vector of a row. 128: two
#: CTAs of 256 threads on an SM; 80: three. 72: 896 threads, one for each vector of a bf16 row of
#: 7168; the launch asks the driver how many threads the registers allow.
REGISTERS = {DISPATCH: 64, COMBINE: 128, SMALL_DISPATCH: 80, SMALL_COMBINE: 80}
REGISTERS |= dict.fromkeys(HEAD.kernels, 64)
OTHER_REGISTERS = {
    (DISPATCH, "yes", "no", "bf16"): 72,
    (DISPATCH, "no", "yes", "bf16"): 72,
    (SMALL_COMBINE, "no", "no", "fp32"): 96,
}
COMMON_TOP_K = 8
#: What a CTA may have without asking for more.
SHARED_BYTES = 48 * 1024
#: A kernel that was written several times over (a loop that the compiler made seven of) has more.
INSTRUCTIONS = {GATHER: 900, ARGMAX: 1900, COLLECT: 700}


def resources(build: Build, code: Code) -> None:
    """Few registers; no local memory, which would be a spilled register or an array that did not
    unroll; no access that finds out at run time which memory it means.
    """
    assert code.usage["STACK"] == code.usage["LOCAL"] == 0, code.usage
    assert code.usage["SHARED"] <= SHARED_BYTES, code.usage
    if build.top_k <= COMMON_TOP_K:
        of_kernel = REGISTERS[build.kernel]
        key = (build.kernel, build.expert_counts, build.ordered_slots, build.dtype)
        assert code.usage["REG"] <= OTHER_REGISTERS.get(key, of_kernel), code.usage
    assert not code.count(r"(LDL|STL)\b")
    assert not sass.generic_accesses(code.names)
    assert len(code.names) <= INSTRUCTIONS.get(build.kernel, sys.maxsize)


def waits_first(_build: Build, code: Code) -> None:
    """Nothing of global memory is touched before the wait for the kernel before and the signal."""
    assert not sass.touches_before_wait(code)


def prepares_first(_build: Build, code: Code) -> None:
    """Before its wait it prepares shared memory."""
    assert code.places("STS")[0] < code.names.index("ACQBULK")


def no_pdl(_build: Build, code: Code) -> None:
    """Without programmatic dependent launch there is no trace of it."""
    assert not {"ACQBULK", "PREEXIT"} & set(code.names)


def has(expected: Mapping[str, Count], *, beside: dict[str, Any] | None = None) -> Check:
    """Instructions whose names begin so, by their number.

    Args:
        beside: fields of another build, whose instructions do not count.
    """

    def check(build: Build, code: Code) -> None:
        other = dataclasses.replace(build, **beside).code() if beside else None
        for pattern, wanted in expected.items():
            found = code.count(pattern) - (other.count(pattern) if other else 0)
            wanted = wanted(build) if callable(wanted) else wanted
            assert found in ([wanted] if isinstance(wanted, int) else wanted), (pattern, found)

    return check


def at_least(least: int) -> range:
    return range(least, sys.maxsize)


def ordered(*sequence: str, stores: int) -> Check:
    """These ordered accesses in this order, some relaxed stores (two for each fault that a kernel
    reports: in the workspace and in the host's memory), and nothing ordered beside them.
    """

    def check(_build: Build, code: Code) -> None:
        order = sass.order_of(code)
        assert [one for one in order if one not in ("poll", "store")] == [*sequence], order
        assert order.count("store") == stores, order

    return check


def ordered_at_all(expected: Mapping[str, int | range]) -> Check:
    """The same where the compiler chooses the order, or unrolls a loop of looks."""

    def check(_build: Build, code: Code) -> None:
        order = Counter(sass.order_of(code))
        for name, wanted in expected.items():
            assert order.pop(name, 0) in ([wanted] if isinstance(wanted, int) else wanted), name
        assert order.pop("poll", 0) > 0
        assert not order

    return check


def run_of_loads(build: Build, code: Code) -> None:
    """A long row has kVectorsInFlight loads of 16 bytes on their way, more than on a host."""
    in_flight, on_host = (
        int(re.findall(r"int kVectorsInFlight = (\d+);", source.read_kernel_file(path))[0])
        for path in ("include/moe_nvlink/platform_gpu.h", "include/moe_nvlink/platform_host.h")
    )
    assert in_flight > on_host
    assert sass.longest_run_of_loads(code.listing) == in_flight
    assert build.kernel is DISPATCH or "STG.E.128" in code.names


def loads_first(number: Callable[[Build], int]) -> Check:
    """So many wide loads are on their way before the kernel waits for the first one."""

    def check(build: Build, code: Code) -> None:
        assert sass.loads_before_first_use(code.listing) == number(build)

    return check


#: Acquires of dispatch that are no cells: epochs of other ranks.
EPOCHS_ACQUIRED = {HOPPER: 2}


def acquires_whole_cell(build: Build, code: Code) -> None:
    """Count and epoch of a cell come from one load, or they could belong to two rounds."""

    def acquired(load: str) -> int:
        return sum(code.names[i + 1] == "CCTL.IVALL" for i in code.places(load))

    assert acquired(r"LDG\.E\.64\.STRONG\.SYS")
    if build.kernel is DISPATCH:
        assert acquired(r"LDG\.E\.STRONG\.SYS") == EPOCHS_ACQUIRED.get(build.architecture, 1)


def same_order(build: Build, code: Code) -> None:
    """Quantising adds no barrier and no ordered access: a row's amax is published by the barrier
    that ends its routing.
    """
    pattern = re.compile(r"BAR\.|MEMBAR|CCTL|ATOMG|REDG|ACQBULK|PREEXIT|.*\.STRONG\.")
    plain = dataclasses.replace(build, recipe="none").code()
    assert sorted(filter(pattern.match, code.names)) == sorted(filter(pattern.match, plain.names))


# Properties of one kernel.

#: Of the first warp of dispatch: fault word, mask, the token's byte of padding, an id.
LOADS_OF_A_ROUTE = {"LDG.E.64.STRONG.SYS", "LDG.E.64", "LDG.E.U8", "LDG.E"}


def route_waits_once(_build: Build, code: Code) -> None:
    """What says whether the rank may send at all does not delay the load of the ids."""
    ways = sass.loads_in_flight(code.listing)
    assert any({code.names[i] for i in way} >= LOADS_OF_A_ROUTE for way in ways)


def loads_both_vectors(build: Build, code: Code) -> None:
    """16 elements of bf16 are two loads of 16 bytes, both on their way before either is waited for;
    their codes are stored to all targets behind the conversions.
    """
    converts = code.places("F2FP")
    first, second = [i for i in code.places(r"LDG\.E\.128") if i < converts[0]][-2:]
    between = code.listing[first + 1 : second]
    assert not any(one.registers() & code.listing[first].loaded() for one in between)
    stores = code.places(r"STG\.E\.64$" if build.recipe == "nvfp4" else r"STG\.E\.128")
    assert sum(i > converts[0] for i in stores) >= COMMON_TOP_K


#: What a thread loads of one partial row: codes of 8 elements, a block's scale, a row's.
PULLS = {
    "fp8_block": {"LDG.E.64": 1, "LDG.E": 1},
    "nvfp4": {"LDG.E": 2, "LDG.E.U8": 1},
    "fp8_tensor": {"LDG.E.64": 1},
}


def pulls_together(build: Build, code: Code) -> None:
    """One trip to the peers for the codes and both scales of all top_k rows."""
    expected = {load: count * build.top_k for load, count in PULLS[build.combine].items()}
    assert _pulls(code) == expected


def _pulls(code: Code) -> dict[str, int]:
    """Loads of the stretch of code with the most of them that are issued before anything touches
    what one of them loads, or a branch comes.
    """
    best: list[str] = []
    names: list[str] = []
    loaded: set[int] = set()
    for one in code.listing:
        if re.match(r"BRA|BAR|EXIT|CALL|RET", one.name) or one.registers() & loaded:
            names, loaded = [], set()
        if re.fullmatch(r"LDG\.E(\.64|\.U8)?", one.name):
            loaded |= one.loaded()
            names.append(one.name)
        best = max(best, names, key=len).copy()
    return {name: best.count(name) for name in best}


def rows_before_arrival(_build: Build, code: Code) -> None:
    """The rows are stored before the arrival that says so."""
    fence = next(i for i in code.places("MEMBAR") if "GPU" in code.names[i])
    assert min(code.places(r"STG\.E\.(64|128)$")) < fence


#: Of a sender of small rows: words of a unit's data, the count, the epoch and the fault word.
LOADS_OF_A_SENDER = {"14": 4 + 1 + 1 + 1, "12": 3 + 1 + 1 + 1}


def small_combine_sends_at_once(build: Build, code: Code) -> None:
    """Its row, the count that says whether there is such a row, epoch and fault fly together."""
    first_unit = code.names.index("STG.E.128.STRONG.SYS")
    loaded: set[int] = set()
    count = 0
    for one in code.listing[:first_unit]:
        if loaded & one.registers():
            break
        if re.fullmatch(r"LDG\.E(\.64\.STRONG\.SYS)?", one.name):
            loaded |= one.loaded()
            count += 1
    assert count == LOADS_OF_A_SENDER[build.units]


def adds_what_flies(build: Build, code: Code) -> None:
    """What is added is on its way before the looks: three words of 4 bytes, with units of 14 bytes
    also half a word, which nothing touches until the units have arrived.
    """
    look = code.names.index("LDG.E.128.STRONG.SYS")
    loads = [i for i in code.places(r"LDG\.E$") if i < look][-3:]
    if build.units == "14" and build.dtype != "fp32":
        loads.append(next(i for i in code.places(r"LDG\.E\.U16") if i > loads[0]))
    assert max(loads) - loads[0] < 6 * len(loads)
    assert len(set().union(*(code.listing[i].loaded() for i in loads))) == len(loads)
    # Rows on odd halves of words have a way of their own, which may stand behind this one.
    end = next((i for i in code.places("BRA") if max(loads) < i), look)
    for i in loads:
        between = code.listing[i + 1 : min(end, look)]
        assert not [one for one in between if one.registers() & code.listing[i].loaded()]


def divides_before_wait(_build: Build, code: Code) -> None:
    """Where the first row lies is computed before the wait."""
    wait, load = code.names.index("ACQBULK"), code.places("LDG")[0]
    divisions = code.places(r"MUFU\.RCP")
    assert len([i for i in divisions if i < wait]) >= 2
    assert not [i for i in divisions if wait < i < load]


def small_dispatch_sends_at_once(build: Build, code: Code) -> None:
    """For a piece of the row, the ids of the token and of two before it, and the epoch. Its row and
    ids are on their way before it knows whether it may send. Warps that wait for peers look at the
    fault word after that, while the others find the route.
    """
    epoch = f"+{structs()['LocalControl'].combined_epoch.offset:#x}]"
    wide = 1 + 3 * build.top_k * 4 // 16
    assert any(
        [code.names[i] for i in way].count("LDG.E.128") == wide
        and any(code.listing[i].operands.endswith(epoch) for i in way)
        for way in sass.loads_in_flight(code.listing)
    )


# The builds.


def every(kernel: Kernel[Any], architectures: Iterable[str], **values: Any) -> list[Build]:
    return [Build(kernel, architecture, **values) for architecture in architectures]


def common(kernel: Kernel[Any]) -> list[Build]:
    return every(kernel, EVERY_ARCHITECTURE)


def both(kernel: Kernel[Any], **values: Any) -> list[Build]:
    return every(kernel, (HOPPER, BLACKWELL), **values)


def without_pdl(builds: Iterable[Build]) -> list[Build]:
    return [dataclasses.replace(build, pdl=False) for build in builds]


GEOMETRIES = ((1, "bf16"), (6, "fp16"), (8, "bf16"), (22, "bf16"), (22, "fp32"), (32, "fp32"))
SMALL_GEOMETRIES = (
    *((1, "bf16"), (8, "bf16"), (8, "fp32")),
    *((22, "fp16"), (32, "bf16"), (32, "fp16"), (32, "fp32")),
)


def geometries(kernel: Kernel[Any]) -> list[Build]:
    pairs = GEOMETRIES if kernel is not SMALL_COMBINE else SMALL_GEOMETRIES
    chips = EVERY_ARCHITECTURE if kernel is not SMALL_COMBINE else (HOPPER, BLACKWELL)
    return [Build(kernel, chip, *pair) for pair, chip in itertools.product(pairs, chips)]


#: A common geometry is read for every architecture, and each other one for one of them. The rest is
#: long: test_every_nvrtc.py notices what spills.
TURNS = dict(zip(GEOMETRIES, itertools.cycle(EVERY_ARCHITECTURE), strict=False))


def is_long(build: Build) -> bool:
    if build.kernel is SMALL_COMBINE:  # the larger top_k take long to compile
        return build.top_k > COMMON_TOP_K and build.architecture != HOPPER
    if build.kernel is SMALL_DISPATCH:
        return build in MORE_SMALL_DISPATCHES
    turn = TURNS.get((build.top_k, build.dtype), build.architecture)
    is_plain = build == Build(build.kernel, build.architecture, build.top_k, build.dtype)
    return is_plain and build.top_k != COMMON_TOP_K and build.architecture != turn


#: Every recipe on one architecture, nvfp4 with and without the hardware's conversions.
QUANTISING = [
    Build(DISPATCH, architecture, recipe=recipe)
    for recipe, architecture in (
        ("fp8_block", HOPPER),
        ("fp8_token", BLACKWELL),
        ("fp8_tensor", HOPPER),
        ("mxfp8", BLACKWELL),
        ("nvfp4", HOPPER),
        ("nvfp4", BLACKWELL),
        ("fp8_block_pow2", BLACKWELL),
    )
]
QUANTISED_BACK = [
    Build(COMBINE, architecture, combine=combine)
    for combine, architecture in (
        ("fp8_block", HOPPER),
        ("nvfp4", HOPPER),
        ("nvfp4", BLACKWELL),
        ("fp8_tensor", HOPPER),
    )
]
#: Three addresses for each of 32 rows would not fit into the registers at once.
MOST_QUANTISED_BACK = [
    Build(COMBINE, top_k=32, combine=combine) for combine in ("nvfp4", "fp8_tensor")
]
#: Rows as they are, a scale for a block of a row, and blocks whose codes and scales take the most
#: instructions; the largest top_k.
SMALL_DISPATCHES = [
    *both(SMALL_DISPATCH),
    Build(SMALL_DISPATCH, HOPPER, top_k=32),
    Build(SMALL_DISPATCH, HOPPER, recipe="fp8_block"),
    Build(SMALL_DISPATCH, BLACKWELL, recipe="nvfp4"),
]
#: The other recipes, and each of those on the other kind of GPU.
MORE_SMALL_DISPATCHES = [
    Build(SMALL_DISPATCH, HOPPER, top_k=1, dtype="fp32"),
    Build(SMALL_DISPATCH, BLACKWELL, top_k=32),
    Build(SMALL_DISPATCH, BLACKWELL, recipe="fp8_token"),
    Build(SMALL_DISPATCH, HOPPER, recipe="fp8_tensor"),
    Build(SMALL_DISPATCH, BLACKWELL, recipe="mxfp8"),
    Build(SMALL_DISPATCH, HOPPER, recipe="nvfp4"),
    Build(SMALL_DISPATCH, BLACKWELL, recipe="fp8_block_pow2"),
]


def heads(kernel: Kernel[Any]) -> list[Build]:
    """Every architecture, and every element type."""
    others = [Build(kernel, HOPPER, dtype="fp16"), Build(kernel, BLACKWELL, dtype="fp32")]
    return [*common(kernel), *others]


# The table.


def top_k(build: Build) -> int:
    return build.top_k


def top_k_and_more(build: Build) -> range:
    return at_least(build.top_k)


def of(field: str, values: dict[str, int | range], otherwise: int | range) -> Count:
    """The number for a value of one of the build's fields."""
    return lambda build: values.get(getattr(build, field), otherwise)


def e2m1(pairs: int) -> Count:
    """sm_90a has no conversions of e2m1."""
    has_them = {("nvfp4", BLACKWELL)}
    return lambda build: (
        pairs
        * (
            not has_them.isdisjoint(
                {(build.recipe, build.architecture), (build.combine, build.architecture)}
            )
        )
    )


WIDE_LOAD, WIDE_STORE = r"LDG\.E.*\.128", r"STG\.E.*\.128"
UNIT_LOAD, UNIT_STORE = (rf"{verb}\.E\.128\.STRONG\.SYS" for verb in ("LDG", "STG"))
#: scale * sum + add is rounded twice, as on CPU ranks.
NOT_FUSED = has({"FMUL": at_least(1), r"FFMA|HFMA2\.BF16": 0})
#: Dispatch loads a vector once and stores it up to top_k times; combine the other way round.
WIDE_DISPATCH = has({WIDE_LOAD: at_least(1), WIDE_STORE: top_k_and_more})
WIDE_COMBINE = has({WIDE_LOAD: top_k_and_more, WIDE_STORE: at_least(1)})
#: The signal waits for no fence, where it otherwise does.
HOLDS_NO_THREAD = has(
    {r"USTGR\.E\.NA\.64\.STRONG\.SYS": 1, r"MEMBAR\..*SYS": -1}, beside={"async_release": "no"}
)
#: P1; P1, P14, and P12 before the first token and in a CTA without tokens; P2, behind this CTA's
#: rows and before what reads the others'; one takes a slot. ptxas may unroll the looks of P12 and
#: P14. Faults: of each wait, of a mask without oneself, of a dispatch behind another one.
DISPATCH_ORDER = ordered_at_all(
    {"release": 1, "acquire": range(4, 8), "arrival": 1, "take": 1, "store": 12}
)
#: P3 and P14; P3; P14.
COMBINE_ORDER = ordered_at_all({"release": 2, "acquire": 1, "arrival": 1, "store": 2})
#: Rows are taken, the first and every next one; P5; P3; P14.
QUANTISED_ORDER = ordered(
    *("take", "take", "arrival", "release", "acquire", "arrival", "release"), stores=2
)
#: P11, and rows wait for no fence and no arrival.
SMALL_DISPATCH_ORDER = ordered_at_all({"release": 1, "acquire": at_least(1), "store": at_least(2)})
#: P12: units are relaxed.
SMALL_COMBINE_ORDER = ordered("release", stores=2)
#: P6 and P7 in gather, P8 and P9 in argmax.
HEAD_ORDER = ordered("arrival", "release", "acquire", stores=2)
#: Collect waits for nobody.
COLLECT_ORDER = ordered(stores=0)
#: top_k loads, and that of the row which it adds.
LOADS_FIRST = loads_first(lambda build: build.top_k + 1)
LOOKS_FIRST = loads_first(top_k)

PAIRS = 16 // 2  # a lane's elements, two to an instruction
UNPACKED = 8 * 8 // 2  # of 8 rows, 8 elements of a thread

PLAIN = {"recipe": "none"}
#: Codes of 16 elements are one store to each target, of 16 bytes or (e2m1) of 8.
WIDE_QUANTISING = has(
    {
        r"LDG\.E\.128": at_least(2),
        r"STG\.E\.64$": of("recipe", {"nvfp4": COMMON_TOP_K}, 0),
        r"STG\.E\.128": of("recipe", {"nvfp4": 0}, COMMON_TOP_K),
    },
    beside=PLAIN,
)
#: nvfp4's scales are e4m3.
CONVERTS = has(
    {
        r"F2FP\.SATFINITE\.E4M3\.F32": of("recipe", {"nvfp4": at_least(1)}, at_least(PAIRS)),
        r"F2FP\.SATFINITE\.E2M1\.F32": e2m1(PAIRS),
    }
)
#: What lanes exchange a block's largest magnitude with: 8 lanes, a whole warp, 2, or none.
EXCHANGES = has(
    {
        "C?SHFL": of(
            "recipe", dict.fromkeys(("fp8_block", "fp8_block_pow2", "mxfp8"), at_least(1)), 0
        ),
        "C?REDUX": of("recipe", {"fp8_token": at_least(1)}, 0),
    }
)
#: 16 elements of the experts' row in two loads (nvfp4: for amax too), their codes in one store,
#: sums in one; the row that is added in one load.
WIDE_BACK = has(
    {
        r"LDG\.E\.128$": of("combine", {"nvfp4": 4 + 1}, 2 + 1),
        r"STG\.E\.128$": of("combine", {"nvfp4": 1}, 2),
        r"STG\.E\.64$": at_least(1),
    }
)
#: nvfp4: the scale. fp8_tensor: beside 16 elements one, for rows of sizes that combine never has.
CONVERTS_BACK = has(
    {
        r"F2FP.*E4M3.*UNPACK|F2FP.*UNPACK.*E4M3": of("combine", {"nvfp4": 0}, UNPACKED),
        r"F2FP.*E4M3.*SATFINITE|F2FP.*SATFINITE.*E4M3": of(
            "combine", {"nvfp4": 1, "fp8_tensor": 8 + 1}, 8
        ),
        r"F2FP.*E2M1.*UNPACK|F2FP.*UNPACK.*E2M1": e2m1(UNPACKED),
        r"F2FP.*E2M1.*SATFINITE|F2FP.*SATFINITE.*E2M1": e2m1(8),
    }
)
#: No release, no acquire and no arrival; a reduction that nobody waits for; a unit's store, and the
#: zeros after it has been read.
COUNTS_ADD = has(
    dict.fromkeys(("MEMBAR", "CCTL", "FENCE", "ATOM"), 0) | {"RED": 1, UNIT_STORE: 2, UNIT_LOAD: 1},
    beside={"expert_counts": "no"},
)
#: One load of 16 bytes, and no store of so many.
WIDE_LOGITS = has({r".*128": 1, "LDG.*128": 1})
#: A warp's largest word by its reductions (order and complement, of a thread's part, of the CTA's,
#: for the two of a word), that of eight threads of one row by three shuffles of two halves.
COMPARES = has({"C?REDUX": at_least(4), r"SHFL\.BFLY": 6, r"ATOMS|RED\b|REDG": 0})
#: A thread looks at the units of all k by 16 bytes each before it waits for the first one.
LOOKS = has({r"LDG\.E\.128": top_k, UNIT_LOAD: top_k})
#: A store for each target and of the zeros after it has been read, a look at a time.
UNITS = has({UNIT_STORE: lambda build: build.top_k + 1, UNIT_LOAD: 1})

#: A copy before the first item and one for every next one; a row's part is read as vectors from
#: shared memory, and only the row that is added from global.
BY_TMA = has(
    {
        r"UBLKCP\.S\.G": 2,
        r"SYNCS\.ARRIVE\.TRANS64": 2,
        r"FENCE\.VIEW\.ASYNC\.S": at_least(2),  # ptxas has more, one behind each SYNCS.EXCH
        r"FENCE\.VIEW\.ASYNC\.G": 1,
        r"LDS\.128": top_k,
        WIDE_LOAD: 1,
    }
)

#: Builds, and what each of them is asked.
TABLE: tuple[tuple[list[Build], dict[str, Check]], ...] = (
    (geometries(DISPATCH), {"resources": resources, "wide": WIDE_DISPATCH}),
    (
        geometries(COMBINE),
        {
            "resources": resources,
            "wide": WIDE_COMBINE,
            "loads first": LOADS_FIRST,
        },
    ),
    (
        common(DISPATCH),
        {
            "run of loads": run_of_loads,
            "order": DISPATCH_ORDER,
            "route waits once": route_waits_once,
            "whole cell": acquires_whole_cell,
        },
    ),
    (common(COMBINE), {"not fused": NOT_FUSED, "order": COMBINE_ORDER}),
    (
        [*both(COMBINE, tma="yes"), Build(COMBINE, tma="yes", top_k=32)],
        {"resources": resources, "by TMA": BY_TMA, "not fused": NOT_FUSED},
    ),
    (
        [
            *(
                Build(kernel, BLACKWELL, async_release="yes")
                for kernel in (DISPATCH, COMBINE, SMALL_DISPATCH, SMALL_COMBINE)
            ),
            Build(COMBINE, BLACKWELL, combine="fp8_block", async_release="yes"),
            Build(COMBINE, BLACKWELL, tma="yes", async_release="yes"),
            Build(SMALL_DISPATCH, BLACKWELL, expert_counts="yes", async_release="yes"),
        ],
        {"resources": resources, "holds no thread": HOLDS_NO_THREAD},
    ),
    (
        [*common(DISPATCH), *common(COMBINE)],
        {"waits first": waits_first, "prepares first": prepares_first},
    ),
    (without_pdl([*common(DISPATCH), *common(COMBINE)]), {"no PDL": no_pdl}),
    (
        QUANTISING,
        {
            "resources": resources,
            "wide": WIDE_QUANTISING,
            "loads both vectors": loads_both_vectors,
            "converts": CONVERTS,
            "exchanges": EXCHANGES,
            "same order": same_order,
            "waits first": waits_first,
        },
    ),
    (
        QUANTISED_BACK,
        {
            "resources": resources,
            "pulls together": pulls_together,
            "wide": WIDE_BACK,
            "converts": CONVERTS_BACK,
            "waits first": waits_first,
            "order": QUANTISED_ORDER,
            "rows before arrival": rows_before_arrival,
        },
    ),
    (MOST_QUANTISED_BACK, {"resources": resources}),
    (
        [*both(DISPATCH, expert_counts="yes"), *both(SMALL_DISPATCH, expert_counts="yes")],
        {"resources": resources, "adds": COUNTS_ADD},
    ),
    (
        [
            *both(DISPATCH, ordered_slots="yes"),
            *both(DISPATCH, ordered_slots="yes", recipe="fp8_block"),
        ],
        {"resources": resources},
    ),
    (
        [*SMALL_DISPATCHES, *MORE_SMALL_DISPATCHES, *both(SMALL_DISPATCH, units="12")],
        {"resources": resources, "units": UNITS, "order": SMALL_DISPATCH_ORDER},
    ),
    (
        both(SMALL_DISPATCH),
        {"sends at once": small_dispatch_sends_at_once, "waits first": waits_first},
    ),
    (
        [*geometries(SMALL_COMBINE), *both(SMALL_COMBINE, units="12")],
        {"resources": resources, "looks": LOOKS, "looks first": LOOKS_FIRST},
    ),
    (
        [*both(SMALL_COMBINE), Build(SMALL_COMBINE, units="12")],
        {
            "adds what flies": adds_what_flies,
            "sends at once": small_combine_sends_at_once,
            "order": SMALL_COMBINE_ORDER,
            "waits first": waits_first,
            "prepares first": prepares_first,
            "divides before wait": divides_before_wait,
        },
    ),
    (without_pdl([Build(SMALL_DISPATCH), Build(SMALL_COMBINE)]), {"no PDL": no_pdl}),
    (heads(GATHER), {"resources": resources, "run of loads": run_of_loads}),
    (heads(COLLECT), {"resources": resources, "run of loads": run_of_loads}),
    (heads(ARGMAX), {"resources": resources, "wide": WIDE_LOGITS, "compares": COMPARES}),
    (
        [*common(GATHER), *common(ARGMAX)],
        {"order": HEAD_ORDER, "whole cell": acquires_whole_cell},
    ),
    (common(COLLECT), {"order": COLLECT_ORDER}),
    ([*common(GATHER), *common(ARGMAX), *common(COLLECT)], {"waits first": waits_first}),
    (without_pdl(Build(kernel) for kernel in HEAD.kernels), {"no PDL": no_pdl}),
)


def rows() -> Iterator[Any]:
    for builds, checks in TABLE:
        for build, (name, check) in itertools.product(builds, checks.items()):
            marks = [pytest.mark.long] if is_long(build) else []
            yield pytest.param(build, check, id=f"{build}-{name}", marks=marks)


@pytest.mark.parametrize(("build", "check"), [*rows()])
def test_machine_code(build: Build, check: Check) -> None:
    check(build, build.code())


# These checks can fail.

Edit = Callable[[str], str]


def instead(old: str, new: str) -> Edit:
    return lambda text: replace_once(text, old, new)


def relaxed(text: str) -> str:
    return re.sub(r"\b(st\.release|ld\.acquire|atom\.acq_rel)\b", _relaxed, text)


def _relaxed(match: re.Match[str]) -> str:
    return match[0].split(".")[0] + ".relaxed"


def moved(lines: str, before: str) -> Edit:
    """Put lines of the text to another place, before a line of it."""
    return lambda text: replace_once(replace_once(text, lines, ""), before, lines + before)


def sums_wait(text: str) -> str:
    text = replace_once(text, "    if (element >= last) return;\n", "")
    return replace_once(
        text,
        "    const int place = element < last ? element : first;\n",
        "    if (element >= last) return;\n    const int place = element;\n",
    )


GENERIC = instead("load_word(&local_control(args)->epoch)", "local_control(args)->epoch")
IN_LOCAL_MEMORY = instead("if (most <= best) continue;", "if (orders[best % Width] == 7) continue;")
MASK_WAITS = instead(
    "  if (args.active_ranks != 0) {\n    const uint64_t* words =",
    "  if (exclusion.fault == 0 && args.active_ranks != 0) {\n    const uint64_t* words =",
)
NO_CONVERSIONS = instead(
    "constexpr bool kHasFp8Conversions = true;", "constexpr bool kHasFp8Conversions = false;"
)
#: As soon as nothing stands between the looks and their use.
LOOKS_WAIT = instead("    if (unknown(missing) == 0) return 0;\n", "")
COUNT_FIRST = instead(
    "  uint32_t data[Unit::kParts];\n  load_data<Unit>(plan, row,",
    "  uint32_t data[Unit::kParts];\n"
    "  if (load_word(&rows_from(args)[sent.source]) == 0) return this_round(args);\n"
    "  load_data<Unit>(plan, row,",
)
RELEASED_UNITS = instead(
    "st.relaxed.sys.global.b128", "fence.acq_rel.sys; st.relaxed.sys.global.b128"
)
FAULT_FIRST = instead("  if (role.sends()) {\n", "  if (!has_failed(args) && role.sends()) {\n")
#: The compiler then loads the count of a cell alone.
HALF_A_CELL = instead("return cell_epoch(*seen) == epoch ? 0 : kFaultAhead;", "return 0;")

NARROW_LOADS = instead(
    "ld.global.v4.u32 {%0, %1, %2, %3}, [%4];",
    "ld.global.v2.u32 {%0, %1}, [%4]; ld.global.v2.u32 {%2, %3}, [%4+8];",
)
NARROW_STORES = instead(
    "st.global.v4.u32 [%0], {%1, %2, %3, %4};",
    "st.global.v2.u32 [%0], {%1, %2}; st.global.v2.u32 [%0+8], {%3, %4};",
)
NARROW_LOOKS = instead(
    "ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];",
    "ld.relaxed.sys.global.u64 %0, [%2]; ld.relaxed.sys.global.u64 %1, [%2+8];",
)
ONE_IN_FLIGHT = instead("int kVectorsInFlight = 2;", "int kVectorsInFlight = 1;")
FUSED_SUMS = instead(
    "sums[0][i] *= work.finish.scale;",
    "sums[0][i] = fused_multiply_add(sums[0][i], work.finish.scale, work.finish.scale);",
)
WAIT = "  if constexpr (Config::kPdl) pdl_wait();\n"
SIGNAL = "  if constexpr (Config::kPdl) pdl_launch_dependents();\n"
ALWAYS_WAITS = instead(WAIT, "  pdl_wait();\n")
SIGNALS_FIRST = moved(SIGNAL, WAIT)
LOADS_EARLY = instead(WAIT, "  if (load_word(&local_control(args)->epoch) == 7) return;\n" + WAIT)
PREPARES_LATE = moved("  if (cta.thread == 0) shared.faulted = 0;\n", SIGNAL)
DIVIDES_LATE = moved(
    "  const SentPart first = sent_part(args, plan, cta.block);\n"
    "  const char* first_row = sent_row(args, plan, first);\n"
    "  // A store needs the address, so it is computed before the wait: "
    "ptxas moves arithmetic behind it.\n"
    "  if (cta.thread == 0) shared.first_row = first_row;\n",
    "  if (role.sends()) send_rows<",
)
_LOAD = "      load_vector(reinterpret_cast<Vector<kWide>*>(words)[i], source + i * kWide);\n"
SECOND_VECTOR_WAITS = instead(_LOAD, _LOAD + "      if (unknown(words[i * 8]) == 7) return;\n")
NO_SHUFFLES = instead("__shfl_xor_sync(0xffffffffu, value, distance)", "value")
NO_REDUCTIONS = instead(
    "    if constexpr (Lanes == 32) return __reduce_max_sync(0xffffffffu, value);\n", ""
)
_PUBLISH = "    cta.sync();  // the route and the parts of the row's amax are whole\n"
ONE_MORE_BARRIER = instead(_PUBLISH, 2 * _PUBLISH)
ARRIVES_EARLY = instead(
    "  const uint32_t quantised = quantise_received<Element, Format>(args, cta, num_rows, sizes, "
    "shared);\n"
    "  if (!completes_rows(args, cta, quantised, num_rows, shared)) return;\n",
    "  const bool completes = completes_rows(args, cta, num_rows, num_rows, shared);\n"
    "  quantise_received<Element, Format>(args, cta, num_rows, sizes, shared);\n"
    "  if (!completes) return;\n",
)
ORDERED_COUNTS = instead(
    "fetch_add_relaxed_gpu(&expert_counters(args)[id], 1)",
    "fetch_add_acq_rel_gpu(&expert_counters(args)[id], 1)",
)
NOT_CLEARED = instead("  Unit::store(reinterpret_cast<uint64_t*>(place), 0, 0);\n", "")
NOT_FENCED = instead("  if (copies) fence_copies_global();\n", "")
FENCED_SIGNAL = instead("st.async.release.sys", "fence.acq_rel.sys; st.async.release.sys")
ADDS_LATE = instead("Config::kTopKBound <= kMostUnitsAndAdded", "false")
COLLECT_RELEASES = instead(
    "  get_logits(args, cta, shared);\n",
    "  get_logits(args, cta, shared);\n"
    "  store_release_sys(&exchange_counters(args)->bytes_combined, 1);\n",
)

FP8_ROWS, FP8_BACK = Build(DISPATCH, recipe="fp8_block"), Build(COMBINE, combine="fp8_block")
MUTANTS: tuple[tuple[str, Build, Edit, Check], ...] = (
    ("relaxed", Build(DISPATCH), relaxed, DISPATCH_ORDER),
    ("relaxed", Build(COMBINE), relaxed, COMBINE_ORDER),
    ("relaxed", Build(GATHER), relaxed, HEAD_ORDER),
    ("generic", Build(DISPATCH), GENERIC, resources),
    ("order in local memory", Build(ARGMAX), IN_LOCAL_MEMORY, resources),
    ("half a cell", Build(DISPATCH), HALF_A_CELL, acquires_whole_cell),
    ("the mask waits", Build(DISPATCH), MASK_WAITS, route_waits_once),
    ("no conversions", Build(DISPATCH, recipe="mxfp8"), NO_CONVERSIONS, CONVERTS),
    ("sums wait", Build(COMBINE), sums_wait, LOADS_FIRST),
    ("sums wait", Build(COMBINE, combine="nvfp4"), sums_wait, pulls_together),
    (
        "looks wait",
        Build(SMALL_COMBINE, BLACKWELL, top_k=6, dtype="fp32"),
        LOOKS_WAIT,
        LOOKS_FIRST,
    ),
    ("the count first", Build(SMALL_COMBINE), COUNT_FIRST, small_combine_sends_at_once),
    ("released units", Build(SMALL_DISPATCH, top_k=2), RELEASED_UNITS, SMALL_DISPATCH_ORDER),
    ("the fault first", Build(SMALL_DISPATCH), FAULT_FIRST, small_dispatch_sends_at_once),
    ("narrow stores", Build(DISPATCH), NARROW_STORES, WIDE_DISPATCH),
    ("narrow loads", Build(COMBINE), NARROW_LOADS, WIDE_COMBINE),
    ("narrow loads", Build(ARGMAX), NARROW_LOADS, WIDE_LOGITS),
    ("narrow stores", FP8_ROWS, NARROW_STORES, WIDE_QUANTISING),
    ("narrow loads", FP8_BACK, NARROW_LOADS, WIDE_BACK),
    ("narrow looks", Build(SMALL_COMBINE, units="12"), NARROW_LOOKS, LOOKS),
    ("one in flight", Build(DISPATCH), ONE_IN_FLIGHT, run_of_loads),
    ("fused", Build(COMBINE), FUSED_SUMS, NOT_FUSED),
    ("always waits", Build(DISPATCH, pdl=False), ALWAYS_WAITS, no_pdl),
    ("signals first", Build(COMBINE), SIGNALS_FIRST, waits_first),
    ("loads early", Build(DISPATCH), LOADS_EARLY, waits_first),
    ("prepares late", Build(COMBINE), PREPARES_LATE, prepares_first),
    ("divides late", Build(SMALL_COMBINE), DIVIDES_LATE, divides_before_wait),
    ("the second vector waits", FP8_ROWS, SECOND_VECTOR_WAITS, loads_both_vectors),
    ("no shuffles", FP8_ROWS, NO_SHUFFLES, EXCHANGES),
    ("no reductions", Build(ARGMAX), NO_REDUCTIONS, COMPARES),
    ("one more barrier", FP8_ROWS, ONE_MORE_BARRIER, same_order),
    ("no conversions", FP8_BACK, NO_CONVERSIONS, CONVERTS_BACK),
    ("relaxed", FP8_BACK, relaxed, QUANTISED_ORDER),
    ("arrives early", FP8_BACK, ARRIVES_EARLY, rows_before_arrival),
    ("ordered counts", Build(DISPATCH, expert_counts="yes"), ORDERED_COUNTS, COUNTS_ADD),
    ("not cleared", Build(SMALL_DISPATCH), NOT_CLEARED, UNITS),
    ("not fenced", Build(COMBINE, tma="yes"), NOT_FENCED, BY_TMA),
    (
        "fenced signal",
        Build(COMBINE, BLACKWELL, async_release="yes"),
        FENCED_SIGNAL,
        HOLDS_NO_THREAD,
    ),
    ("adds late", Build(SMALL_COMBINE), ADDS_LATE, adds_what_flies),
    ("relaxed", Build(SMALL_COMBINE), relaxed, SMALL_COMBINE_ORDER),
    ("releases", Build(COLLECT), COLLECT_RELEASES, COLLECT_ORDER),
)


@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_signals_that_hold_no_thread_are_code_of_some_architectures_only(
    architecture: str,
) -> None:
    plain = Build(COMBINE, architecture)
    other = dataclasses.replace(plain, async_release="yes")
    is_other = architecture in ASYNC_RELEASE.only_on
    assert (other.code().names != plain.code().names) == is_other
    capabilities = {each for each, name in driver.ARCHITECTURES.items() if name == architecture}
    assert {major == 10 for major, _minor in capabilities} == {is_other}


def test_every_property_has_a_mutant() -> None:
    noticed = {check for _name, _build, _edit, check in MUTANTS}
    unnoticed = [
        f"{builds[0]}: {name}"
        for builds, checks in TABLE
        for name, check in checks.items()
        if check not in noticed
    ]
    assert not unnoticed, f"{unnoticed}: add a text to MUTANTS that must not have the property"


@pytest.mark.parametrize(
    ("build", "edit", "check"),
    [
        pytest.param(build, edit, check, id=f"{build}-{name}")
        for name, build, edit, check in MUTANTS
    ],
)
def test_a_mutant_is_noticed(build: Build, edit: Edit, check: Check) -> None:
    text = edit(build.text())
    assert text != build.text()
    code = sass.compiled(text, build.architecture, build.kernel.entry, strict=False)
    with pytest.raises(AssertionError):
        check(build, code)
