"""The GPU compiler: kernels/ to a cubin by NVRTC. Needs no GPU and no driver.

The cubins are compiled and inspected by the tests; nothing launches them in this release.
"""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin.errors import CompileError, UnsupportedError

#: Architectures the kernels are kept compiling for. The `a` forms: FP4 conversions need them.
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


def compile_cubin(text: str, architecture: str) -> bytes:
    """Machine code of one translation unit for one architecture. Local.

    Raises:
        UnsupportedError: cuda-bindings is not installed.
        CompileError: NVRTC refused the text; its log is in the message. A register spill is an
            error too.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedError(
            "compiling for GPUs needs NVRTC: pip install 'moe-nvlink-plugin[cuda]'"
        ) from error
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++20",
        "--fmad=false",
        "--ptxas-options=--warn-on-spills",
        "--ptxas-options=--warning-as-error",
    ]
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"moe_nvlink.cu", 0, [], []))
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
                + log.decode(errors="replace").rstrip("\0 ")
            )
        size = _check(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytes(size)
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _version(nvrtc: Any) -> str:
    major, minor = _check(nvrtc, nvrtc.nvrtcVersion())
    return f"{major}.{minor}"


def _check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status}")
    return values[0] if len(values) == 1 else tuple(values)
