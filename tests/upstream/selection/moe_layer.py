"""vLLM's tests of one MoE layer, with and without ranks."""

from __future__ import annotations

from types import MappingProxyType

from ..groups import Device, Group, Plugin

_FILE = "tests/kernels/moe/test_moe_layer.py"
_ADAPTERS = ("cpu_device", "processes", "moe_layer")
#: For the 116 subcases of a test: 160 s for four ranks that have two cores for themselves.
_TIMEOUT_S = 1200

GROUPS: tuple[Group, ...] = (
    Group(
        name="moe-layer",
        title="A MoE layer, DP x TP x EP",
        arguments=(f"{_FILE}::test_moe_layer",),
        devices=frozenset({Device.CPU}),
        adapters=_ADAPTERS,
        fast=(
            f"{_FILE}::test_moe_layer[False-moe_nvlink-2-1-True]",
            f"{_FILE}::test_moe_layer[False-moe_nvlink-2-2-True]",
            f"{_FILE}::test_moe_layer[True-moe_nvlink-2-1-True]",
            "--few-subcases",
        ),
        environment=MappingProxyType(
            {"MOE_NVLINK_UPSTREAM_LAUNCH_S": f"{_TIMEOUT_S - 20}", "VLLM_LOGGING_LEVEL": "ERROR"}
        ),
        test_timeout_s=_TIMEOUT_S,
    ),
    Group(
        name="moe-layer-one-rank",
        title="A MoE layer on one rank, not ours",
        arguments=(_FILE, "-k", "not test_moe_layer["),
        plugin=Plugin.INSTALLED,
        devices=frozenset({Device.CPU}),
        adapters=_ADAPTERS,
    ),
)
