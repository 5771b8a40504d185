"""Do no harm: tests of vLLM that do not choose our backend end alike with our plugin and without.

Files are named one by one where a folder holds others that start engines or want GPUs: those would
take minutes to say that they cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..groups import Device, Group, Plugin

#: Plugins of `within`, for both sides of the comparison.
WITHIN: Mapping[str, str] = MappingProxyType(
    {"PYTEST_PLUGINS": "moe_nvlink_upstream_quick_cleanup,moe_nvlink_upstream_hub"}
)


def _compared(name: str, title: str, *places: str, fast: tuple[str, ...] = ()) -> Group:
    return Group(
        name=f"harmless-{name}",
        title=title,
        arguments=places,
        plugin=Plugin.COMPARED,
        devices=frozenset({Device.CPU}),
        fast=fast,
        environment=WITHIN,
        test_timeout_s=180,
    )


GROUPS: tuple[Group, ...] = (
    _compared(
        "config",
        "configuration, variables and their hashes",
        "tests/config",
        "tests/test_config.py",
        "tests/test_envs.py",
    ),
    _compared(
        "arguments",
        "command line and engine arguments",
        "tests/engine/test_arg_utils.py",
        "tests/v1/engine/test_engine_args.py",
        "tests/utils_/test_argparse_utils.py",
        "tests/entrypoints/launchers/test_cli_args.py",
        "tests/entrypoints/cli/test_serve.py",
        fast=(
            "tests/engine/test_arg_utils.py",
            "tests/v1/engine/test_engine_args.py",
            "tests/utils_/test_argparse_utils.py",
        ),
    ),
    _compared("scheduler", "scheduler and KV cache manager", "tests/v1/core"),
)
