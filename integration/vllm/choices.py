"""What a vLLM configuration chooses beside the backend: ``additional_config["moe_nvlink"]``."""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin.integration.common.options import UNQUANTISED, Options, Wording, read

from .backend import BACKEND, additional

KEY = "moe_nvlink"

WORDING = Wording(
    framework="vLLM",
    flag=f"--all2all-backend {BACKEND}",
    options=f'additional_config["{KEY}"]',
    unquantised=f'--additional-config \'{{"{KEY}": {{"dispatch": "{UNQUANTISED}"}}}}\'',
)


def options_of(vllm_config: Any) -> Options:
    """The choices of a configuration (any object, None included). Local; ConfigError as `read`."""
    return read(additional(vllm_config).get(KEY), WORDING)


def names(vllm_config: Any, option: str) -> bool:
    """Whether a configuration that `options_of` accepts names the option itself. Local."""
    given = additional(vllm_config).get(KEY)
    return isinstance(given, dict) and option in given
