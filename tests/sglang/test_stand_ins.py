"""What stands in for packages that SGLang's CPU engine imports: there to import, not to compute."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")


def test_a_function_of_the_kernel_library_raises() -> None:
    library = importlib.import_module("sgl_kernel")
    with pytest.raises(NotImplementedError, match="sgl_kernel.silu_and_mul has a stand-in"):
        library.silu_and_mul(1)
    assert not hasattr(library, "__all__")


def test_a_triton_kernel_can_be_written_but_not_launched() -> None:
    triton = importlib.import_module("triton")
    language = importlib.import_module("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(pointer: object, size: int) -> None:
        language.store(pointer, size)

    with pytest.raises(TypeError, match="not subscriptable"):
        kernel[(1,)](None, 1)


def test_torchvision_imports_beside_this_torch() -> None:
    assert importlib.import_module("torchvision.transforms").InterpolationMode.BICUBIC


def test_vllm_is_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="hidden in the environment of SGLang"):
        importlib.import_module("vllm.logger")
