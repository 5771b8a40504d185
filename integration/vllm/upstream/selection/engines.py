"""Data-parallel engines and servers, with a mixture of experts served by us and without one."""

from __future__ import annotations

from types import MappingProxyType

from moe_nvlink_plugin.integration.vllm.upstream.groups import Group, Plugin

_ENGINES = "tests/v1/distributed/test_async_llm_dp.py"
_ADAPTERS = ("forked", "redirects", "engines")

GROUPS: tuple[Group, ...] = (
    Group(
        name="engines",
        title="Data-parallel engines: load, pauses, barriers, idle ranks",
        arguments=(_ENGINES, "-k", "not Llama and not (pause and False)"),
        adapters=_ADAPTERS,
        fast=(f"{_ENGINES}::test_dp_pause_keep_race_staggered_engines",),
        gpus=2,
    ),
    Group(
        name="engines-dense",
        title="The same engines with a model that has no experts",
        arguments=(_ENGINES, "-k", "Llama or (pause and False)"),
        plugin=Plugin.INSTALLED,
        adapters=("forked", "redirects"),
        gpus=2,
    ),
    Group(
        name="servers",
        title="Servers behind external, hybrid and internal load balancing",
        arguments=(
            "tests/v1/distributed/test_external_lb_dp.py",
            "tests/v1/distributed/test_internal_lb_dp.py",
            "tests/v1/distributed/test_hybrid_lb_dp.py",
        ),
        adapters=("redirects", "engines"),
        # Each server is told its GPUs by a variable that on CPUs means memory nodes, of which there
        # may be one; where this is set, vLLM does not read that.
        environment=MappingProxyType({"VLLM_CPU_SIM_MULTI_NUMA": "0"}),
        gpus=4,
    ),
)
