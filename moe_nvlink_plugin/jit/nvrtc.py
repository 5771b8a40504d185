"""The GPU compiler: NVRTC makes a cubin of kernels/, without a GPU and without a driver.

To load a cubin from the cache, a process needs neither NVRTC nor cuda-bindings: the key has the
text, the architecture and the options, but not the version of NVRTC.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import CompileError, UnsupportedError

from . import cache

logger = logging.getLogger(__name__)

#: Architectures for which the tests compile every kernel. FP4 conversions need the `a` forms.
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")

#: Options that shape the code. --fmad=false: with fused multiply-add, results would differ from
#: those of CPU ranks.
OPTIONS = ("--std=c++20", "--fmad=false", "--ptxas-options=--warn-on-spills")
#: A warning of ptxas, such as a register spill, is a mistake in the kernels; the tests compile with
#: this option.
STRICT = ("--ptxas-options=--warning-as-error",)
#: The code names the lines of its source, and is the same code.
LINEINFO = ("--generate-line-info",)

#: The oldest NVRTC that pyproject.toml allows, and the newest one that has compiled every kernel:
#: tests/kernels/every_nvrtc.py.
TRIED = ("13.0.48", "13.5.37")

_INSTALL = "pip install 'moe-nvlink-plugin[cuda]'"
_CUDA_MACHINE = 190  # e_machine of an ELF file for NVIDIA GPUs


def version() -> str:
    """Return the version of NVRTC, such as "13.0". Local.

    Raises:
        UnsupportedError: cuda-bindings or NVRTC is not installed.
    """
    return _version(_nvrtc())


def compile_cubin(
    text: str, architecture: str, *, strict: bool = True, source: Path | None = None
) -> bytes:
    """Compile one translation unit for one architecture; return the cubin. Local; seconds.

    Args:
        text: the translation unit.
        architecture: such as "sm_90a".
        strict: whether a warning of ptxas, such as a register spill, is an error.
        source: file whose lines the cubin names; None: it names none.

    Raises:
        UnsupportedError: cuda-bindings or NVRTC is not installed, or this NVRTC does not know the
            architecture.
        CompileError: NVRTC refused the text. The message has its log.
    """
    options = (*(STRICT if strict else ()), *(LINEINFO if source else ()))
    return _compiled(text, architecture, "CUBIN", options, source)


def compile_ptx(text: str, architecture: str) -> str:
    """Compile as compile_cubin; return the PTX from which the cubin is made. Local; seconds.

    Raises:
        UnsupportedError: as compile_cubin.
        CompileError: as compile_cubin.
    """
    return _compiled(text, architecture, "PTX").rstrip(b"\0").decode()


def _compiled(
    text: str,
    architecture: str,
    kind: str,
    options: tuple[str, ...] = (),
    source: Path | None = None,
) -> bytes:
    """Return what NVRTC makes of a text: CUBIN or PTX, as its functions name them."""
    nvrtc = _nvrtc()
    _check_architecture(nvrtc, architecture)
    options = (f"--gpu-architecture={architecture}", *OPTIONS, *options)
    name = str(source or "moe_nvlink.cu").encode()
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), name, 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            size = _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise CompileError(
                f"NVRTC {_version(nvrtc)} failed for {architecture}:\n"
                + log.decode(errors="replace").rstrip("\0 \n")
            )
        made = bytes(_check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
        _check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, made))
        return made
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def load_or_compile(text: str, architecture: str, *, of_this_nvrtc: bool = False) -> bytes:
    """Return the cubin of a text; compile it if the cache lacks it or holds a damaged file. Local.

    If a text compiles only with warnings, the user gets its cubin and one log line: a kernel that
    spills registers is slow but correct. Our tests refuse such a text.

    With MOE_NVLINK_LINEINFO=1 the text also lies in the cache, and the cubin names its lines.

    Args:
        text: the translation unit.
        architecture: such as "sm_90a".
        of_this_nvrtc: take no cubin that another version of NVRTC has made.

    Raises:
        UnsupportedError: the cubin is not in the cache, and NVRTC is missing or does not know the
            architecture.
        CompileError: NVRTC refused the text, or the cache directory cannot be used.
        ConfigError: MOE_NVLINK_LINEINFO is neither 0 nor 1.
    """
    key = _key(text, architecture, *((version(),) if of_this_nvrtc else ()))

    def build(target: Path) -> None:
        source = cache.write_beside(key, ".cu", text) if env.lineinfo() else None
        target.write_bytes(_compile_for_user(text, architecture, source))

    return cache.load_or_build(key, ".cubin", build, _gpu_code)


def is_cached(text: str, architecture: str) -> bool:
    """Return whether load_or_compile would find the cubin of a text. Local; compiles nothing.

    Raises:
        CompileError: the cache directory cannot be used.
        ConfigError: MOE_NVLINK_LINEINFO is neither 0 nor 1.
    """
    return cache.load(_key(text, architecture), ".cubin", _gpu_code) is not None


def _key(text: str, architecture: str, *more: str) -> str:
    options = (*OPTIONS, *(LINEINFO if env.lineinfo() else ()), *more)
    return "\0".join(("cubin", architecture, *options, text))


def _compile_for_user(text: str, architecture: str, source: Path | None) -> bytes:
    try:
        return compile_cubin(text, architecture, source=source)
    except CompileError as strict_error:
        try:
            cubin = compile_cubin(text, architecture, strict=False, source=source)
        except CompileError as error:
            raise CompileError(
                f"{error}\nPlease report this log. Meanwhile: NVRTC {TRIED[0]} and {TRIED[1]} have "
                f"compiled every kernel (pip install nvidia-cuda-nvrtc=={TRIED[1]}), or fill a "
                "cache with `moe-nvlink precompile` on another machine and set MOE_NVLINK_CACHE_DIR"
            ) from error
        logger.warning("the kernels work but are slower than they should be: %s", strict_error)
        return cubin


def _gpu_code(entry: cache.Entry) -> bytes | None:
    cubin = entry.content
    is_gpu_code = cubin[:4] == b"\x7fELF" and cubin[18:20] == _CUDA_MACHINE.to_bytes(2, "little")
    return cubin if is_gpu_code else None


def _nvrtc() -> Any:
    """Return cuda.bindings.nvrtc after it has loaded its library."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedError(f"compiling for GPUs needs NVRTC: {_INSTALL}") from error
    except Exception as error:  # a broken installation may raise anything
        raise UnsupportedError(f"cuda-bindings cannot be imported ({error}): {_INSTALL}") from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda.bindings looks for the library at its first call
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(
            f"cuda-bindings finds no NVRTC library ({reason}): {_INSTALL}"
        ) from error
    oldest = TRIED[0]
    if major < int(oldest.split(".")[0]):
        # A torch that is built for CUDA 12 loads its NVRTC for the whole process.
        raise UnsupportedError(
            f"NVRTC {major}.{minor} is loaded, and the kernels need {oldest} or newer: install a "
            "torch that is built for CUDA 13, or fill the cache from a process without torch "
            "(moe-nvlink precompile)"
        )
    return nvrtc


def _check_architecture(nvrtc: Any, architecture: str) -> None:
    """Raise UnsupportedError for an architecture that this NVRTC does not know.

    NVRTC itself would only say "invalid value for --gpu-architecture".
    """
    known = {int(number) for number in _check(nvrtc, nvrtc.nvrtcGetSupportedArchs())}
    match = re.fullmatch(r"sm_(\d+)[af]?", architecture)
    if match is None or int(match[1]) not in known:
        raise UnsupportedError(
            f"NVRTC {_version(nvrtc)} does not know {architecture} (it knows "
            f"{', '.join(f'sm_{number}' for number in sorted(known))}); install another: "
            f"pip install -U 'nvidia-cuda-nvrtc>={TRIED[0]},<14'"
        )


def _version(nvrtc: Any) -> str:
    major, minor = _check(nvrtc, nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status}")
    return values[0] if len(values) == 1 else tuple(values)
