"""Host libraries with a sanitizer, run by watched_ranks.py, and bugs asleep in the kernel text.

A bug stands beside what it breaks, and a number wakes one: that costs a compilation for each
library and not one for every bug.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_nvlink_plugin.jit import host
from tests.support import cpp

ADDRESSES = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACES = ("-O1", "-fsanitize=thread", "-DMOE_NVLINK_CTA_THREADS=4")
RACE_STATUS = 66
PROGRAM = "tests.support.watched_ranks"
CALLED = Path(__file__).with_name("watched_ranks.h")

#: Of the bug that is awake; set before the first thread is started.
PRELUDE = """
namespace moe_nvlink { inline int seeded_bug = 0; }
"""
#: What wakes one, behind the text of a library.
WAKE = 'extern "C" void moe_nvlink_wake(int bug) { moe_nvlink::seeded_bug = bug; }\n'


class Edit(NamedTuple):
    """In a function of the kernels, what stands there once, and what shall.

    In `new`, AWAKE is whether this bug is. Comments and the breaking of lines do not count.
    """

    function: str
    old: str
    new: str


Bugs = Mapping[str, Sequence[Edit]]


def without(function: str, statement: str, *, before: str = "", after: str = "") -> list[Edit]:
    """The statement between these others is left out."""
    new = f"{before} if (!AWAKE) {{ {statement} }} {after}"
    return [Edit(function, f"{before} {statement} {after}", new)]


def instead(function: str, good: str, bad: str, *, when: str = "true") -> list[Edit]:
    """An expression gives way to another one, if `when` is true as well."""
    return [Edit(function, good, f"(AWAKE && {when} ? {bad} : {good})")]


def seed(text: str, bugs: Bugs, numbers: Mapping[str, int], prelude: str = PRELUDE) -> str:
    for name, edits in bugs.items():
        for function, old, new in edits:
            assert "AWAKE" in new, f"{name}: {old!r} would be replaced where the bug sleeps, too"
            awake = new.replace("AWAKE", f"(seeded_bug == {numbers[name]})")
            text = cpp.replace(text, function, old, awake)
    return prelude + text


def build(text: str, target: Path, *flags: str) -> Path:
    """The text, which `seed` has been over, with what watched_ranks.py calls."""
    host.compile_text(text + WAKE + CALLED.read_text(), target, (*host.FLAGS, "-g", *flags))
    return target


def run(library: Path, room: str, bug: int = 0) -> subprocess.CompletedProcess[str]:
    """watched_ranks.py in a process that has the runtimes of the library's sanitizers."""
    # Without address randomisation: older sanitizer runtimes do not find their shadow memory where
    # vm.mmap_rnd_bits is large.
    setarch = shutil.which("setarch")
    program = [sys.executable, "-m", PROGRAM, str(library), room, str(bug)]
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    # They must be loaded first. The C++ runtime too: the address sanitizer looks for its functions
    # at the start.
    runtimes = re.findall(r"=> (\S+/lib(?:[at]san|stdc\+\+)\.\S+)", needed)
    preloaded = " ".join(sorted(runtimes, key=lambda path: "stdc++" in path))
    variables = os.environ | {
        # torch and Python are not compiled for it.
        "TSAN_OPTIONS": f"halt_on_error=1:ignore_noninstrumented_modules=1:exitcode={RACE_STATUS}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    # In the place of what vLLM preloads in the processes it starts; not in setarch.
    return subprocess.run(
        [*([setarch, "-R"] if setarch else []), "env", f"LD_PRELOAD={preloaded}", *program],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=variables,
    )


def check_all_is_well(library: Path, room: str) -> None:
    done = run(library, room)
    assert done.returncode == 0, done.stderr[:4000]
    assert "all rounds verified" in done.stdout


def check_race_is_found(library: Path, room: str, bug: int) -> None:
    """Whether two accesses meet depends on the schedule, most of all on a busy machine.

    One try in many is enough, and nearly always the first is.
    """
    for _attempt in range(25):
        done = run(library, room, bug)
        if "WARNING: ThreadSanitizer: data race" in done.stderr:
            assert done.returncode == RACE_STATUS
            return
    last = f"{done.returncode}, {done.stdout} {done.stderr[:2000]}"
    pytest.fail(f"with bug {bug} the sanitizer saw nothing: {last}")
