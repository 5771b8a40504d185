"""compute-sanitizer over tests/support/sanitized.py: python -m tests.gpu.watched TOOL [options]

Exit status 0: the tool found nothing. CANNOT_RUN: it is not installed, or it refuses this machine's
runtime; the last line says which. Otherwise it found something, or the program failed.
`--rehearse` runs the program without the tool, on the stand-in for the driver.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The tool's exit status where it found something and the program itself ended well.
FOUND = 99
#: As automake has it.
CANNOT_RUN = 77
#: Where tools of NVIDIA's are when they are not on the PATH, the newest first.
_PATTERNS = ("/usr/local/cuda/bin", "/opt/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/*/*")
PLACES = tuple(place for each in _PATTERNS for place in sorted(glob.glob(each), reverse=True))
#: What a tool says where it does not know the runtime, or may not count, as in a container without
#: the right to.
REFUSED = re.compile(
    r"(?m)^.*(Device not supported|ERR_NVGPUCTRPERM"
    r"|==ERROR==.*(not supported|[Uu]nsupported|resource was unavailable)).*"
)
#: What a tool gets between the signal that asks it to end and the signal that ends it.
GRACE_S = 3
#: What is kept back of a step's time: the runner of the steps would leave nothing of what was said.
SPARE_S = GRACE_S + 1.0
#: For everything, where no time is given.
LIMIT_S = 90.0
#: torch is slow to load on a cold machine.
_USUAL = ("--launch-timeout", "60", "--error-exitcode", str(FOUND))
#: torch's own kernels are many, large, and not ours to check.
_OURS = (*_USUAL, "--kernel-name", "kernel_substring=moe_nvlink")
#: Tool -> its options.
TOOLS = {
    # Failed calls of the driver are torch's way to find out what it has.
    "memcheck": (*_OURS, "--report-api-errors", "no"),
    "racecheck": _OURS,
    "synccheck": _OURS,
    # What torch's kernels have written would be unwritten to it if it did not watch them.
    "initcheck": _USUAL,
}


def run(tool: str, *options: str, limit_s: float, **variables: str) -> tuple[int, str]:
    """Exit status of a tool, and what it and the program said; of CANNOT_RUN at last the reason.

    At its limit it gets ^C, at which ncu leaves a report of what it has counted.
    """
    found = shutil.which(tool, path=os.pathsep.join([os.environ["PATH"], *PLACES]))
    if found is None:
        return CANNOT_RUN, f"{tool} is not installed"
    print(found, *options, flush=True)
    limits = ("--signal=INT", f"--kill-after={GRACE_S}", f"{max(limit_s, 1):.1f}")
    with subprocess.Popen(
        ["timeout", *limits, found, *options],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            said, _nothing = process.communicate()
        except BaseException:
            process.terminate()  # it leads a process group of its own, all of which it ends
            raise
    refused = REFUSED.search(said)
    return (CANNOT_RUN, f"{said}\n{refused[0]}") if refused else (process.returncode, said)


def watch(tool: str, *, limit_s: float = LIMIT_S, broken: bool = False) -> tuple[int, str]:
    """As run, of a tool of compute-sanitizer; `broken`: of the program with the bug to be found."""
    program = [sys.executable, "-m", "tests.support.sanitized"]
    options = ["--tool", tool, *TOOLS[tool], *program, *(("--break", tool) if broken else ())]
    # Every tensor an allocation of its own: inside torch's pool nothing is out of bounds.
    apart = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return run("compute-sanitizer", *options, limit_s=limit_s, **apart)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    given = parser.parse_args(arguments)
    if given.rehearse:
        program = [sys.executable, "-m", "tests.support.sanitized", "--backend", "stand-in"]
        return subprocess.run(program, cwd=ROOT, check=False).returncode
    status, said = watch(given.tool, limit_s=given.limit - SPARE_S)
    print(said[-6000:])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
