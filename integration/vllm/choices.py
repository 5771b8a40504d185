"""What a vLLM configuration chooses beside the backend: ``additional_config["moe_nvlink"]``."""

from __future__ import annotations

from typing import Any

from moe_nvlink_plugin.integration.common.options import UNQUANTISED, Options, Wording, read

from .backend import BACKEND, CARRIER, additional

KEY = "moe_nvlink"
#: Key beside the fields of Options: what our schedulers do, see ``scheduler.capacity``.
CAPACITY = "capacity"

WORDING = Wording(
    framework="vLLM",
    flag=f"--all2all-backend {BACKEND}",
    options=f'additional_config["{KEY}"]',
    unquantised=f'--additional-config \'{{"{KEY}": {{"dispatch": "{UNQUANTISED}"}}}}\'',
    own_backend=CARRIER,
)


def options_of(vllm_config: Any) -> Options:
    """Return the choices of a configuration. Local; takes any object and None; raises as `read`."""
    given = additional(vllm_config).get(KEY)
    if isinstance(given, dict):
        given = {key: value for key, value in given.items() if key != CAPACITY}
    return read(given, WORDING)


def names(vllm_config: Any, option: str) -> bool:
    """Return whether a configuration names an option itself. Local.

    Args:
        vllm_config: a configuration that `options_of` accepts.
        option: a field of Options.
    """
    given = additional(vllm_config).get(KEY)
    return isinstance(given, dict) and option in given
