"""Every kernel text that is compiled for GPUs, and what a release of NVRTC makes of it.

    python -m tests.kernels.every_nvrtc                    # every release in pip's index
    python -m tests.kernels.every_nvrtc 13.0.88 --list whole    # one release, the whole list
    python -m tests.kernels.every_nvrtc --as-ptx    # PTX, and what tests/support/ptx makes of it

Prints a table: how many kernels of each family each release compiles, and how many it refuses. A
kernel of the product for which ptxas has a warning, such as a register spill, counts as refused.
pip installs each release into a temporary folder, and each runs in a process of its own, because a
process loads one NVRTC. Needs no GPU. test_every_nvrtc.py does the same with
two releases and half of the list each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import MoeNvlinkError
from moe_nvlink_plugin.exchange.kernels import (
    COMBINE_FORMAT,
    LAYER,
    MEET,
    QUANTISER,
    SMALL_COMBINE,
    SMALL_DISPATCH,
)
from moe_nvlink_plugin.jit import header, nvrtc
from moe_nvlink_plugin.launch.kernel import Build, Variant
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.tools import precompile
from tests.support import emulated_text
from tests.support.ptx.build import ptx_of
from tests.support.ptx.text import UnknownPtxError
from tests.support.ptx.translate import to_cpp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "nvidia-cuda-nvrtc"
#: Longest that one release may take for the whole list.
TIME_LIMIT_S = 3600.0
#: For kernels of the short list whose element type is not bf16; those of bf16 have top_k 8.
_OTHER_TOP_K = (1, 4, 6, 22, 32)
_EMULATED_RANKS = 8
_ENDS = (nvrtc.ARCHITECTURES[0], nvrtc.ARCHITECTURES[-1])


class Kernel(NamedTuple):
    """One text for one architecture.

    Attributes:
        family: the column of the table.
        strict: a warning of ptxas refuses the kernel.
    """

    family: str
    name: str
    architecture: str
    text: Callable[[], str]
    strict: bool = True


class Outcome(NamedTuple):
    """What became of one kernel; `error` is "" if it compiled."""

    family: str
    name: str
    error: str


class Release(NamedTuple):
    """What one release of NVRTC made of the kernels."""

    version: str
    library: str
    outcomes: list[Outcome]
    seconds: float

    def refused(self) -> list[Outcome]:
        """Kernels that did not compile."""
        return [outcome for outcome in self.outcomes if outcome.error]


# ---- the list


def kernels(whole: bool = False) -> list[Kernel]:
    """What to compile.

    The short list has every kind of kernel for every architecture, every kind with every element
    type, and everything that tests and benchmarks compile for emulated ranks.

    Args:
        whole: every kind for every architecture with every element type, for two common top_k, and
            the kinds in bf16 without programmatic dependent launch too.
    """
    layers = _whole_layers() if whole else _layers()
    return [*layers, *_heads(), *_emulated_verbs(), *_emulated_others()]


def ends() -> list[Kernel]:
    """Of the short list, what is for the oldest architecture and for the newest."""
    return [kernel for kernel in kernels() if kernel.architecture in _ENDS]


def few() -> list[Kernel]:
    """One kernel of each family, the architectures in turn."""
    every = kernels()
    return [
        next(kernel for kernel in every if (kernel.family, kernel.architecture) == wanted)
        for wanted in zip(
            dict.fromkeys(kernel.family for kernel in every),
            itertools.cycle(nvrtc.ARCHITECTURES),
            strict=False,
        )
    ]


#: By the name that the command knows it by.
LISTS: dict[str, Callable[[], list[Kernel]]] = {
    "few": few,
    "third of few": lambda: few()[::3],
    "ends": ends,
    "half": lambda: ends()[::2],
    "other half": lambda: ends()[1::2],
    "short": kernels,
    "whole": functools.partial(kernels, whole=True),
}


@functools.cache
def kinds() -> tuple[Variant, ...]:
    """Of layers: rows as they come, and each other value of an axis, also where it changes nothing:
    a user may choose it there.
    """
    return tuple(kind for kind in precompile.kinds("sm_100a") if kind.family is LAYER)


def _layers() -> Iterator[Kernel]:
    for kind, architecture in itertools.product(kinds(), nvrtc.ARCHITECTURES):
        yield from _builds(kind, architecture)
    others = itertools.product(kinds(), [name for name in header.elements() if name != "bf16"])
    top_k = itertools.cycle(_OTHER_TOP_K)
    architectures = itertools.cycle(nvrtc.ARCHITECTURES)
    for kind, dtype in others:
        geometry = kind.instead(top_k=next(top_k), dtype=dtype)
        yield from _builds(geometry, next(architectures), pdl=False)


def _whole_layers() -> Iterator[Kernel]:
    every = itertools.product(kinds(), nvrtc.ARCHITECTURES, header.elements(), (4, 8))
    for kind, architecture, dtype, top_k in every:
        yield from _builds(kind.instead(top_k=top_k, dtype=dtype), architecture)
    for kind, architecture in itertools.product(kinds(), nvrtc.ARCHITECTURES):
        yield from _builds(kind, architecture, pdl=False)


def _builds(geometry: Variant, architecture: str, *, pdl: bool = True) -> Iterator[Kernel]:
    """The kernels that a GPU gets for a geometry, each as the product compiles it.

    Of a recipe or a format, only the kernel that it changes: the other is in the list already. So
    is a kernel that is the same for every geometry.
    """
    plain, common = set[Build](), kinds()[0]
    if geometry.family is LAYER and _family(geometry) != "unquantised":
        usual = geometry.instead(
            **{axis.name: axis.default for axis in LAYER.axes if axis.is_silent and axis.default}
        )
        plain = set(usual.builds(pdl=pdl))
    if geometry.family is LAYER and geometry != common:
        plain.add(common.build(MEET, pdl=pdl))
    for build in geometry.builds(pdl=pdl):
        if build not in plain:
            name = f"{build.kernel.name} of {_name(geometry, pdl)}"
            is_small = build.kernel in (SMALL_DISPATCH, SMALL_COMBINE)
            family = f"small {_family(geometry)}" if is_small else _family(geometry)
            yield Kernel(family, name, architecture, build.text)


def _heads() -> Iterator[Kernel]:
    for architecture, (number, dtype) in itertools.product(
        nvrtc.ARCHITECTURES, enumerate(header.elements())
    ):
        yield from _builds(HEAD.variant(dtype=dtype), architecture, pdl=number % 2 == 0)


def _emulated_verbs() -> Iterator[Kernel]:
    """All kernels of a layer for many ranks; in the oracle's form they may spill, which is no
    mistake (emulated.py), so they are compiled as the benchmarks compile them.
    """
    # The ranks of one launch get no rows by TMA.
    others = [kind for kind in kinds() if not kind.codes()["tma"]]
    for kind, architecture in zip(others, itertools.cycle(nvrtc.ARCHITECTURES), strict=False):
        text = functools.partial(
            emulated_text.device_source, 8, 0, _EMULATED_RANKS, as_product=True, small=True
        )
        yield Kernel("emulated", f"emulated {kind}", architecture, _with(text, kind))


def _emulated_others() -> Iterator[Kernel]:
    """Whole rounds with delays, the quantisers alone, and the LM head."""
    architectures = itertools.cycle(nvrtc.ARCHITECTURES)
    rounds = functools.partial(
        emulated_text.device_source, 2, 0, _EMULATED_RANKS, fused=True, delays=True
    )
    yield Kernel("emulated", "emulated rounds", next(architectures), rounds, strict=False)
    for kind in kinds():
        if kind.codes()["recipe"]:
            alone = functools.partial(
                emulated_text.device_source, 1, 0, _EMULATED_RANKS, alone=True, as_product=True
            )
            name = f"emulated quantiser {_family(kind)}"
            yield Kernel("emulated", name, next(architectures), _with(alone, kind))
    head = functools.partial(
        emulated_text.device_source, 0, 0, _EMULATED_RANKS, head=True, as_product=True
    )
    yield Kernel("emulated", "emulated LM head", next(architectures), head)


def _with(text: Callable[..., str], geometry: Variant) -> Callable[[], str]:
    codes = geometry.codes()
    names = ("combine", "expert_counts", "ordered_slots", "units", "async_release")
    values = {name: codes[name] for name in names}
    return functools.partial(text, quantiser=codes["recipe"], **values)


def _family(geometry: Variant) -> str:
    if geometry.family is HEAD:
        return "LM head"
    codes = geometry.codes()
    if codes["recipe"]:
        return QUANTISER.word(codes["recipe"])
    if codes["expert_counts"]:
        return "expert counts"
    if codes["ordered_slots"]:
        return "ordered slots"
    if codes["tma"]:
        return "combine by TMA"
    if codes["async_release"]:
        return "asynchronous signals"
    if codes["units"] != env.UNIT_DATA_BYTES[0]:
        return f"units of {codes['units']} bytes"
    combine = COMBINE_FORMAT.word(codes["combine"])
    return f"combine {combine}" if codes["combine"] else "unquantised"


def _name(geometry: Variant, pdl: bool) -> str:
    return str(geometry) if pdl else f"{geometry}, no PDL"


# ---- a release


def oldest() -> str:
    """The oldest release that pyproject.toml allows."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = set(re.findall(rf'"{PACKAGE}>=([\d.]+),<14"', text))
    return str(version)


def releases() -> list[str]:
    """Those that pip's index has and pyproject.toml allows, oldest first."""
    said = _run([sys.executable, "-m", "pip", "index", "versions", PACKAGE])
    match = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    assert match is not None, said
    found = sorted(match[1].split(", "), key=_numbers)
    return [version for version in found if _numbers(oldest()) <= _numbers(version) < (14,)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def install(version: str, folder: Path) -> None:
    """One release below `folder`, beside the environment's own."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    _run([*command, "--only-binary=:all:", "--target", str(folder), f"{PACKAGE}=={version}"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return done.stdout


def compile_all(
    folder: Path | None,
    *,
    which: str = "short",
    as_ptx: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> Release:
    """What one NVRTC makes of the list, in a process of its own.

    Args:
        folder: where `install` put the release; None: the NVRTC of this environment.
        as_ptx: PTX is made, and C++ of it by the software GPU (tests/support/ptx).
    """
    command = [
        sys.executable,
        "-m",
        "tests.kernels.every_nvrtc",
        "--child",
        *("--list", which),
        *(["--as-ptx"] if as_ptx else []),
    ]
    variables = dict(os.environ)
    if folder is not None:
        (library,) = folder.glob("nvidia/*/lib/libnvrtc.so.*")
        command.append(str(library))
        # NVRTC looks there for its own second library.
        variables["LD_LIBRARY_PATH"] = str(library.parent)
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=time_limit_s,
    )
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    version, loaded = json.loads(first)
    assert folder is None or Path(loaded).is_relative_to(folder), f"{loaded} answered"
    outcomes = [Outcome(*json.loads(line)) for line in rest]
    return Release(version, loaded, outcomes, time.monotonic() - start)


def _child(library: str | None, which: str, as_ptx: bool) -> None:
    """Prints which NVRTC this process has, then each outcome, as lines of JSON."""
    of = translated if as_ptx else outcome_of
    if library is not None:
        ctypes.CDLL(library)  # cuda-bindings takes the one that the process has
    version = nvrtc.version()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    (loaded,) = set(re.findall(r"(/\S*/libnvrtc\.so\.\S+)$", maps, re.MULTILINE))
    print(json.dumps([version, loaded]))
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for outcome in pool.map(of, LISTS[which]()):
            print(json.dumps(outcome))


def outcome_of(kernel: Kernel) -> Outcome:
    """Compiles one kernel with this process's NVRTC."""
    error = ""
    try:
        nvrtc.compile_cubin(kernel.text(), kernel.architecture, strict=kernel.strict)
    except MoeNvlinkError as refusal:
        error = str(refusal)
    return Outcome(kernel.family, f"{kernel.name} for {kernel.architecture}", error)


def translated(kernel: Kernel) -> Outcome:
    """What this process's NVRTC makes of one kernel as PTX, and the software GPU of that."""
    error = ""
    try:
        to_cpp(ptx_of(kernel.text(), kernel.architecture))
    except (MoeNvlinkError, UnknownPtxError) as refusal:
        error = str(refusal)
    return Outcome(kernel.family, f"{kernel.name} for {kernel.architecture}", error)


# ---- the table


def table(found: dict[str, Release]) -> str:
    """Version by family; a cell has how many kernels compiled, and how many did not."""
    columns = list(dict.fromkeys(o.family for release in found.values() for o in release.outcomes))
    lines = ["| NVRTC | " + " | ".join(columns) + " | all | s |", "|---" * (len(columns) + 3) + "|"]
    for version, release in found.items():
        groups = [[o for o in release.outcomes if o.family == column] for column in columns]
        cells = [_cell(group) for group in [*groups, release.outcomes]]
        lines.append("| " + " | ".join([version, *cells, f"{release.seconds:.0f}"]) + " |")
    return "\n".join(lines)


def _cell(outcomes: Sequence[Outcome]) -> str:
    refused = sum(bool(outcome.error) for outcome in outcomes)
    return f"{len(outcomes) - refused}" + (f", **{refused} refused**" if refused else "")


def complaints(outcomes: Sequence[Outcome], most: int = 3) -> str:
    """The first refusals in full, the others by name."""
    told = [f"{outcome.name}:\n{outcome.error}" for outcome in outcomes[:most]]
    return "\n".join([*told, *(f"{outcome.name}: refused too" for outcome in outcomes[most:])])


def main() -> int:
    """The command of the module's docstring. 1 if a release refuses a kernel."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="*", help="releases (default: all of pip's index)")
    parser.add_argument("--list", choices=LISTS, default="short", help="which kernels")
    parser.add_argument("--as-ptx", action="store_true", help="executable by tests/support/ptx")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(next(iter(options.versions), None), options.list, options.as_ptx)
        return 0
    found: dict[str, Release] = {}
    for version in options.versions or releases():
        with tempfile.TemporaryDirectory() as folder:
            install(version, Path(folder))
            found[version] = compile_all(Path(folder), which=options.list, as_ptx=options.as_ptx)
        refused = found[version].refused()
        print(f"{version}: {_cell(found[version].outcomes)}", file=sys.stderr)
        print(complaints(refused), end="\n" if refused else "", file=sys.stderr)
    print(table(found))
    return int(any(release.refused() for release in found.values()))


if __name__ == "__main__":
    sys.exit(main())
