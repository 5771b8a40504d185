"""vLLM's tests of its CPU experts and of the MoE code around them, beside our plugin.

Left out are what needs a GPU as a whole, and what depends on the CPU's extensions:
`test_cpu_quant_fused_moe.py` (AVX512-BF16), and with `-k "not amx"` the cases that machines with
AMX have more of.
"""

from __future__ import annotations

from ..groups import Device, Group, Plugin

_FOLDER = "tests/kernels/moe"
_LOADING = ("test_fp8_tp_loading.py", "test_moe_weight_loading_padded.py")
_CHOOSING = (
    "test_flashinfer_cutedsl_layout.py",
    "test_moe_kernel_oracle.py",
    "test_mori_prepare_finalize.py",
    "test_routing_simulator.py",
    "test_unquantized_backend_selection.py",
    "test_zen_cpu_int8_moe.py",
)


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"{_FOLDER}/{name}" for name in names)


GROUPS: tuple[Group, ...] = (
    Group(
        name="cpu-experts",
        title="CPU experts: the kernel, its activations and shapes",
        arguments=(*_files("test_cpu_fused_moe.py"), "-k", "not amx"),
        plugin=Plugin.COMPARED,
        devices=frozenset({Device.CPU}),
    ),
    Group(
        name="moe-beside-us",
        title="MoE weights, backends, routers and layouts, chosen and loaded on CPU",
        arguments=_files(*_LOADING, *_CHOOSING),
        plugin=Plugin.COMPARED,
        devices=frozenset({Device.CPU}),
        fast=_files(*_CHOOSING),
    ),
)
