"""vLLM's combinations of prepare/finalize and experts, with ours among them."""

from __future__ import annotations

from ..groups import Device, Group

_FILE = "tests/kernels/moe/test_modular_kernel_combinations.py"
_ADAPTERS = ("cpu_device", "processes", "modular_kernels")
#: One case of floats and one of FP8 blocks, both on two ranks.
_FAST = tuple(
    f"2048-1024-32-{case}-2"
    for case in (
        "dtype0-None-MoEActivation.SILU-CpuPrepareAndFinalize-CPUUnquantizedExperts",
        "dtype5-quant_config5-MoEActivation.SILU-CpuPrepareAndFinalize-Fp8RowsExperts",
    )
)

GROUPS: tuple[Group, ...] = (
    Group(
        name="modular-kernels",
        title="Prepare/finalize and experts, rank by rank (2 and 4 ranks, float and FP8 rows)",
        arguments=(_FILE,),
        devices=frozenset({Device.CPU}),
        adapters=_ADAPTERS,
        fast=tuple(f"{_FILE}::test_modular_kernel_combinations_multigpu[{case}]" for case in _FAST),
    ),
)
