"""moe-nvlink: what a user can ask from a shell."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

from . import env
from .errors import MoeNvlinkError
from .jit import cache, host, nvrtc
from .jit.source import specialised_source


def doctor() -> int:
    """Prints what this machine offers the plugin, and what is missing with the remedy."""
    print(f"moe-nvlink-plugin {importlib.metadata.version('moe-nvlink-plugin')}")
    healthy = _report("host compiler", lambda: shutil.which(env.cxx().split()[0]) or _missing_cxx())
    healthy &= _report("kernel cache", lambda: str(cache.directory()))
    healthy &= _report("host kernels", lambda: str(host.load() and "compiled and loaded"))
    healthy &= _report("shared memory", _shared_memory)
    for name, (default, meaning) in env.VARIABLES.items():
        print(f"  {name} (default: {default}): {meaning}")
    return 0 if healthy else 1


def _missing_cxx() -> str:
    raise MoeNvlinkError(f"{env.cxx()} not found; apt-get install g++ or set MOE_NVLINK_CXX")


def _shared_memory() -> str:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        raise MoeNvlinkError(f"{folder} is not writable; CPU ranks exchange through it")
    status = os.statvfs(folder)
    return f"{status.f_bavail * status.f_frsize / 2**30:.1f} GiB free in {folder}"


def _report(what: str, check: object) -> bool:
    assert callable(check)
    try:
        print(f"  ok       {what}: {check()}")
    except MoeNvlinkError as error:
        print(f"  MISSING  {what}: {error}")
        return False
    return True


def precompile(architectures: list[str], top_k: int, element: int, folder: Path) -> int:
    """Compiles the host library into the cache, and cubins for the architectures into a folder."""
    host.load()
    print(f"host kernels are in {cache.directory()}")
    for architecture in architectures:
        folder.mkdir(parents=True, exist_ok=True)
        cubin = nvrtc.compile_cubin(specialised_source(top_k, element), architecture)
        path = folder / f"moe_nvlink-top{top_k}-element{element}-{architecture}.cubin"
        path.write_bytes(cubin)
        print(f"{path}: {len(cubin)} bytes (compiled, not run: this release launches on CPU only)")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="moe-nvlink", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="check this machine")
    compiling = commands.add_parser("precompile", help="compile kernels ahead of time")
    compiling.add_argument("--arch", nargs="*", default=[], choices=nvrtc.ARCHITECTURES)
    compiling.add_argument("--top-k", type=int, default=8)
    compiling.add_argument(
        "--element", type=int, default=0, choices=[0, 1, 2], help="bf16 fp16 fp32"
    )
    compiling.add_argument("--output", type=Path, default=Path("cubins"))
    options = parser.parse_args(arguments)
    try:
        if options.command == "doctor":
            return doctor()
        return precompile(options.arch, options.top_k, options.element, options.output)
    except MoeNvlinkError as error:
        print(error, file=sys.stderr)
        return 1
