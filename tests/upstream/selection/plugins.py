"""vLLM's tests of its plugin mechanisms, with ours installed beside those that they bring."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..adapt.dummy_plugins import WANTED
from ..groups import Group, Plugin
from .harmless import WITHIN

_FOLDER = "tests/plugins_tests"
_PLATFORM = "test_platform_plugins.py"
#: These fork, and expect a process that has loaded no plugin before.
_MODELS = ("test_oot_registration_offline.py", "test_oot_registration_online.py")


def _with(*dummies: str) -> Mapping[str, str]:
    """The environment in which these of vLLM's dummy plugins are installed, and no others."""
    return MappingProxyType({**WITHIN, WANTED: ",".join(dummies)})


GROUPS: tuple[Group, ...] = (
    Group(
        name="plugins-platform",
        title="Another platform plugin is active: ours stays out",
        arguments=(f"{_FOLDER}/{_PLATFORM}",),
        plugin=Plugin.INSTALLED,
        adapters=("dummy_plugins",),
        fast=(f"{_FOLDER}/{_PLATFORM}",),
        environment=_with("vllm_add_dummy_platform"),
    ),
    Group(
        name="plugins",
        title="Stat logger, endpoint, IO processor, scheduler and LoRA resolver plugins",
        # The folder, for files named one by one are imported even if a rule leaves them out.
        arguments=(_FOLDER, *(f"--ignore={_FOLDER}/{name}" for name in (_PLATFORM, *_MODELS))),
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
        title="Models registered out of tree",
        arguments=tuple(f"{_FOLDER}/{name}" for name in _MODELS),
        plugin=Plugin.INSTALLED,
        adapters=("dummy_plugins", "vllm_command"),
        environment=_with("vllm_add_dummy_model"),
        test_timeout_s=900,  # one of them compiles its model
    ),
)
