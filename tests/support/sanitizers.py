"""Programs of ranks as threads, for the sanitizers to look at, and bugs asleep in the kernel text.

A bug stands beside what it breaks, and the program's argument wakes one: that costs a compilation
for each program and not one for every bug.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_nvlink_plugin import env
from tests.support import cpp

FLAGS = ("-std=c++20", "-g", "-pthread", "-Wall", "-Wextra", "-Werror")
ADDRESSES = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACES = ("-O1", "-fsanitize=thread", "-DMOE_NVLINK_CTA_THREADS=4")
RACE_STATUS = 66

#: Of the bug that is awake; set before the first thread is started.
PRELUDE = """
#define MOE_NVLINK_HAS_SEEDED_BUGS
namespace moe_nvlink { inline int seeded_bug = 0; }
"""


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


def build(program: Path, text: str, folder: Path, *flags: str) -> Path:
    """What `program` includes as kernel_text.h is `text`."""
    (folder / "kernel_text.h").write_text(text, encoding="utf-8")
    built = folder / "ranks"
    command = [
        *(*shlex.split(env.cxx()), *FLAGS),
        "-Wno-psabi",  # registers wider than the baseline machine's stay within the program
        *(*flags, "-I", str(folder), str(program), "-o", str(built)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


def run(program: Path, bug: int = 0) -> subprocess.CompletedProcess[str]:
    # Without address randomisation: older sanitizer runtimes do not find their shadow memory where
    # vm.mmap_rnd_bits is large.
    setarch = shutil.which("setarch")
    command = [*([setarch, "-R"] if setarch else []), str(program), str(bug)]
    # vLLM preloads an allocator for the processes it starts; in front of it the address sanitizer
    # refuses to work.
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    variables["TSAN_OPTIONS"] = f"halt_on_error=1:exitcode={RACE_STATUS}"
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=variables
    )


def check_all_is_well(program: Path) -> None:
    done = run(program)
    assert done.returncode == 0, done.stderr[:4000]
    assert "all rounds verified" in done.stdout


def check_race_is_found(program: Path, bug: int) -> None:
    """Whether two accesses meet depends on the schedule, most of all on a busy machine.

    One try in many is enough, and nearly always the first is.
    """
    for _attempt in range(25):
        done = run(program, bug)
        if "WARNING: ThreadSanitizer: data race" in done.stderr:
            assert done.returncode == RACE_STATUS
            return
    last = f"{done.returncode}, {done.stdout} {done.stderr[:2000]}"
    pytest.fail(f"with bug {bug} the sanitizer saw nothing: {last}")
