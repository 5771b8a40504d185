"""Every kernel header stands on its own, and one of them alone knows CUDA from the host."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from moe_nvlink_plugin import env
from tests.support import cpp

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
INCLUDE = KERNELS / "include"
#: The host compiler sees all headers but one; NVRTC compiles that one in tests/kernels.
HEADERS = sorted(path for path in KERNELS.rglob("*.h") if path.name != "platform_gpu.h")
SOURCES = [path for path in KERNELS.rglob("*") if path.suffix in {".h", ".cu", ".cpp"}]
COMPILER_MACROS = re.compile(r"__CUDACC__|__CUDA_ARCH__|__CUDACC_RTC__|__NVCC__")


def compile_alone(header: Path) -> subprocess.CompletedProcess[str]:
    command = [
        *(*shlex.split(env.cxx()), "-fsyntax-only", "-std=c++20", "-Wall", "-Wextra", "-Werror"),
        # Registers of eight floats are wider than the baseline machine's; none leaves the library.
        "-Wno-psabi",
        *("-I", str(KERNELS), "-I", str(INCLUDE), "-x", "c++", "-"),
    ]
    # Twice, so that a header without a guard fails too.
    text = f'#include "{header}"\n' * 2
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_there_are_headers() -> None:
    assert INCLUDE / "moe_nvlink" / "platform.h" in HEADERS


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: str(path.relative_to(KERNELS)))
def test_header_compiles_alone_on_the_host(header: Path) -> None:
    done = compile_alone(header)
    assert done.returncode == 0, done.stderr


def test_a_header_that_forgets_an_include_is_caught(tmp_path: Path) -> None:
    header = tmp_path / "forgetful.h"
    header.write_text("#pragma once\ninline uint32_t f(uint32_t x) { return x; }\n")
    assert compile_alone(header).returncode != 0
    header.write_text(
        "#pragma once\n#include <cstdint>\ninline uint32_t f(uint32_t x) { return x; }\n"
    )
    assert compile_alone(header).returncode == 0


def test_one_header_knows_cuda_from_host() -> None:
    """Beside the file that it includes for CUDA only."""
    knowing = {
        path.relative_to(KERNELS).as_posix()
        for path in SOURCES
        if COMPILER_MACROS.search(path.read_text(encoding="utf-8"))
    }
    assert knowing == {
        "include/moe_nvlink/platform.h",
        "include/moe_nvlink/platform_gpu.h",
    }


def test_ordered_accesses_stand_in_one_header() -> None:
    """Everywhere else they are called by the names it gives them."""
    spelled = {
        path.relative_to(KERNELS).as_posix()
        for path in SOURCES
        if path.parent.name != "host"  # the executor's threads, not the protocol
        if re.search(
            r"\batomic\w*\s*[(<]|std::atomic_ref|__threadfence|[.](?:acquire|release|relaxed)[.]",
            re.sub(r"//.*", "", path.read_text(encoding="utf-8")),
        )
    }
    assert spelled == {"include/moe_nvlink/memory_order.h"}


def test_each_access_is_named_after_its_instruction() -> None:
    text = cpp.plain((INCLUDE / "moe_nvlink" / "memory_order.h").read_text(encoding="utf-8"))
    operations = {"ld": "load", "st": "store", "atom": "fetch_add", "red": "add"}
    operations["st_async"] = "store_async"
    named = {}
    for function in cpp.functions(text):
        body = text[function.start : function.end]
        instruction = re.search(r"asm\s+volatile.*?\b((?:ld|st|atom|red)[.]\S+)", body, re.DOTALL)
        if instruction:
            name = instruction[1].replace("st.async", "st_async", 1)
            operation, order, scope, _space, *rest = name.split(".")
            words = "words_" if "v2" in rest else "long_word_" if "b128" in rest else ""
            named[function.name] = f"{operations[operation]}_{words}{order}_{scope}"
    assert len(named) >= 8
    assert all(name == instruction for name, instruction in named.items()), named
