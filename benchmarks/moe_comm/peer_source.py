"""Make PTX of FlashInfer's one-sided kernels. No line of its source is here.

The source is read in the wheel of flashinfer-python, CUDA's headers in wheels of NVIDIA. NVRTC has
no headers of the host, and it compiles no host code. So:

- Its launch functions are left out of the text; peer_launches.py says what they launch.
- Headers that its kernels use of nothing but names get the few lines of _NAMES instead.
- printf, which tells of a peer that never came before the kernel traps, prints nothing.

Not compiled: combine that quantises its sums, whose converters include headers of the host. No
round of unquantised rows launches it.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from moe_nvlink_plugin.errors import CompileError
from tests.support import flashinfer_wheel, wheels
from tests.support.delays import replace_once

from .flashinfer_api import READ_FROM

#: NVRTC 13.0.48 and 13.5.37 take these headers, which are the same for every host.
_RUNTIME, _CCCL = "13.0.96", "13.0.85"
_TAGS = ("--platform", "manylinux2014_x86_64")
_KERNELS = "flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/communicationKernels"
_SOURCE = "moeAlltoAllKernels.cu"
_NO_SYNC = "#define DISABLE_SYNC_FOR_PROFILING"
_NAMESPACE = "tensorrt_llm::kernels::moe_alltoall"

#: What its own build gives nvcc (flashinfer/jit/core.py and jit/comm.py), as far as it shapes code.
OPTIONS = ("--std=c++17", "--use_fast_math", "-DNDEBUG", "-DENABLE_BF16")

#: Headers of which nothing is used without the launch functions.
_EMPTY = (
    *("cooperative_groups.h", "cuda.h", "cuda_runtime.h"),
    *("flashinfer/exception.h", "flashinfer/utils.cuh"),
)
#: Headers of which names alone are used: in parameters of launch functions, and in templates that
#: a plain sum does not instantiate.
_NAMES = MappingProxyType(
    {
        "cstdint": "#include <cuda/std/cstdint>",
        "stdint.h": "#include <cuda/std/cstdint>",
        "type_traits": """
            #include <cuda/std/type_traits>
            namespace std { using namespace cuda::std; }""",
        "tensorrt_llm/common/dataType.h": "namespace nvinfer1 { enum class DataType : int; }",
        "tensorrt_llm/common/envUtils.h": """
            namespace tensorrt_llm::common {
            template <class... T> void launchWithPdlWhenEnabled(T...);
            }""",
        "tensorrt_llm/kernels/quantization_utils.cuh": """
            namespace tensorrt_llm::kernels {
            template <class T, int N> struct PackedVec;
            template <class T, int B, int N>
            __device__ uint64_t cvt_warp_fp16_to_mxfp8(PackedVec<T, N>&, uint8_t*);
            template <class T, int B, int N, bool M>
            __device__ uint64_t cvt_warp_fp16_to_fp4(PackedVec<T, N>&, float, uint8_t*);
            __device__ int64_t get_sf_out_offset_128x4(int, int64_t, int64_t);
            __device__ int64_t get_sf_out_offset_8x4(int, int64_t, int64_t);
            }""",
    }
)
#: Before the source; the two functions are those that CUDA's runtime header defines for nvcc.
_PROLOGUE = """
#define printf(...) ((void)0)
static inline __device__ void cudaGridDependencySynchronize() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
static inline __device__ void cudaTriggerProgrammaticLaunchCompletion() {
  asm volatile("griddepcontrol.launch_dependents;" :::);
}
#line 1
"""


class Compiled(NamedTuple):
    """PTX, and each kernel's name in it by its name in C++, without the namespace."""

    ptx: str
    names: dict[str, str]


@functools.cache
def compiled(architecture: str, kernels: tuple[str, ...], *, has_sync: bool = True) -> Compiled:
    """Compile instances of its kernels. Seconds; the wheels are fetched at the first call.

    Args:
        architecture: such as "sm_90a".
        kernels: names in C++ without the namespace, with template arguments.
        has_sync: with flags and waits; without, they compute nothing of use.

    Raises:
        FetchError: a wheel could not be fetched.
        CompileError: NVRTC refused the text. The message has its log.
    """
    folder = flashinfer_wheel.folder()
    text = (folder / _KERNELS / _SOURCE).read_text(encoding="utf-8")
    if not has_sync:
        text = replace_once(text, f"{_NO_SYNC} 0", f"{_NO_SYNC} 1")
    expressions = {kernel: f"{_NAMESPACE}::{kernel}" for kernel in kernels}
    options = _options(architecture, folder)
    return _compile(_PROLOGUE + _without_launchers(text), expressions, options)


@functools.cache
def compiled_cake(kernels: tuple[str, ...]) -> Compiled:
    """Compile kernels of the back end "cake" for sm_100a.

    Raises:
        FetchError, CompileError: as compiled.
    """
    folder = flashinfer_wheel.folder()
    text = (folder / flashinfer_wheel.CAKE).read_text(encoding="utf-8")

    def kept(found: re.Match[str]) -> str:
        is_wanted = any(f"{kernel}(" in found[0] for kernel in kernels)
        return found[0] if is_wanted else "\n" * found[0].count("\n")

    text = re.sub(r'^extern "C" \{.*?^\} // extern "C"', kept, text, flags=re.DOTALL | re.MULTILINE)
    made = _compile(text, {}, _options("sm_100a", folder))
    return Compiled(made.ptx, {kernel: kernel for kernel in kernels})


def _options(architecture: str, folder: Path) -> list[str]:
    return [
        # ptxas is of no use here: PTX is what the virtual architecture gives.
        f"--gpu-architecture={architecture.replace('sm_', 'compute_')}",
        *OPTIONS,
        *("--device-as-default-execution-space", "--generate-line-info"),
        *(f"--include-path={path}" for path in _include_paths(folder)),
    ]


def _without_launchers(text: str) -> str:
    """Return the text with empty lines for the functions of the host that launch kernels."""
    launcher = re.compile(r"^void moe_a2a_\w+_launch\([^;{]*\{.*?^\}", re.DOTALL | re.MULTILINE)
    return launcher.sub(lambda found: "\n" * found[0].count("\n"), text)


def _include_paths(folder: Path) -> list[Path]:
    data, cuda = folder / "flashinfer" / "data", Path("nvidia/cu13/include")
    runtime = wheels.files_of("nvidia-cuda-runtime", _RUNTIME, _is_header, "headers", _TAGS)
    cccl = wheels.files_of("nvidia-cuda-cccl", _CCCL, _is_header, "headers", _TAGS)
    return [
        *(runtime / cuda, cccl / cuda, cccl / cuda / "cccl"),
        *(data / "csrc" / "nv_internal", data / "include"),
    ]


def _is_header(name: str) -> bool:
    return name.startswith("nvidia/cu13/include/")


def _compile(text: str, expressions: dict[str, str], options: list[str]) -> Compiled:
    """Compile a text; expressions: how C++ names those of its kernels that are templates."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC: {result[0]}")
        return result[1] if len(result) > 1 else None

    def text_of(size_of: Any, read: Any) -> str:
        data: bytes = b" " * check(size_of(program))
        check(read(program, data))
        return data.decode(errors="replace").rstrip("\0 \n")

    headers = {**dict.fromkeys(_EMPTY, ""), **_NAMES}
    contents = [content.encode() for content in headers.values()]
    files = [name.encode() for name in headers]
    program = check(
        nvrtc.nvrtcCreateProgram(text.encode(), _SOURCE.encode(), len(files), contents, files)
    )
    try:
        for expression in expressions.values():
            check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        given = [option.encode() for option in options]
        if nvrtc.nvrtcCompileProgram(program, len(given), given)[0].value != 0:
            log = text_of(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise CompileError(f"NVRTC refused FlashInfer {READ_FROM}:\n{log}")
        lowered = {
            kernel: check(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode()
            for kernel, expression in expressions.items()
        }
        return Compiled(text_of(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX), lowered)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
