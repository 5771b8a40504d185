"""vLLM's tests of its plugin mechanisms, with ours installed beside those that they bring."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..adapt.dummy_plugins import WANTED
from ..groups import Group, Plugin

_FOLDER = "tests/plugins_tests"


def _with(*dummies: str) -> Mapping[str, str]:
    """The environment in which these of vLLM's dummy plugins are installed, and no others."""
    return MappingProxyType({WANTED: ",".join(dummies)})


GROUPS: tuple[Group, ...] = (
    Group(
        name="plugins-platform",
        title="another platform plugin is active: ours stays out",
        arguments=(f"{_FOLDER}/test_platform_plugins.py",),
        plugin=Plugin.INSTALLED,
        adapters=("dummy_plugins",),
        fast=(f"{_FOLDER}/test_platform_plugins.py",),
        environment=_with("vllm_add_dummy_platform"),
    ),
    Group(
        name="plugins",
        title="stat logger, endpoint, IO processor, scheduler and LoRA resolver plugins",
        arguments=(
            f"{_FOLDER}/test_stats_logger_plugins.py",
            f"{_FOLDER}/test_endpoint_plugins.py",
            f"{_FOLDER}/test_io_processor_plugins.py",
            f"{_FOLDER}/test_scheduler_plugins.py",
            f"{_FOLDER}/lora_resolvers",
            f"{_FOLDER}/test_bge_m3_sparse_io_processor_plugins.py",
            f"{_FOLDER}/test_colbert_query_io_processor_plugins.py",
            f"{_FOLDER}/test_terratorch_io_processor_plugins.py",
            f"{_FOLDER}/bitsandbytes",
            f"{_FOLDER}/gguf",
        ),
        plugin=Plugin.INSTALLED,
        adapters=("dummy_plugins",),
        fast=(
            f"{_FOLDER}/test_endpoint_plugins.py",
            f"{_FOLDER}/test_io_processor_plugins.py",
        ),
        environment=_with("vllm_add_dummy_stat_logger", "vllm_add_dummy_endpoint_plugin"),
    ),
    Group(
        name="plugins-models",
        title="models registered out of tree",
        arguments=(
            f"{_FOLDER}/test_oot_registration_offline.py",
            f"{_FOLDER}/test_oot_registration_online.py",
        ),
        plugin=Plugin.INSTALLED,
        adapters=("dummy_plugins", "hub", "vllm_command"),
        environment=_with("vllm_add_dummy_model"),
    ),
)
