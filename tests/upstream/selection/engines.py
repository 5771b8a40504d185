"""Data-parallel engines and servers, with a mixture of experts served by us and without one."""

from __future__ import annotations

from types import MappingProxyType

from ..groups import Group, Plugin

_FOLDER = "tests/v1/distributed"
_ENGINES = f"{_FOLDER}/test_async_llm_dp.py"
_WITH_US = ("forked", "redirects", "engines")
#: The first test of a file starts its servers: a dozen processes that import vLLM.
_SERVERS_S = 480
_SERVERS_WITH_US = ("vllm_command", "redirects", "engines")
#: vLLM's tests tell each server its GPUs by a variable that on CPUs means memory nodes, of which
#: there may be one; where this is set, vLLM does not read that.
_ONE_NODE = MappingProxyType({"VLLM_CPU_SIM_MULTI_NUMA": "0"})

GROUPS: tuple[Group, ...] = (
    Group(
        name="engines",
        title="Data-parallel engines: load, pauses, barriers, idle ranks",
        arguments=(_ENGINES, "-k", "not Llama and not (pause and False)"),
        adapters=_WITH_US,
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
        name="engines-variants",
        title="Drafts, dual batches and pipelines under data parallelism",
        arguments=(
            f"{_FOLDER}/test_eagle_dp.py",
            f"{_FOLDER}/test_dbo.py",
            f"{_FOLDER}/test_pp_dp_v2.py",
        ),
        adapters=_WITH_US,
        gpus=2,
    ),
    Group(
        name="servers-external",
        title="Servers behind an external load balancer, one for each rank",
        # With our backend, those without expert parallelism would be the same again.
        arguments=(f"{_FOLDER}/test_external_lb_dp.py", "-k", "ep-enabled"),
        adapters=_SERVERS_WITH_US,
        environment=_ONE_NODE,
        test_timeout_s=_SERVERS_S,
        gpus=2,
    ),
)
