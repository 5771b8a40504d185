"""What a SGLang user chooses beside the backend, in ``--json-model-override-args``.

That flag is the only one whose JSON SGLang hands to every process without a meaning of its own: its
keys become attributes of the model's configuration, and no model of SGLang reads ours.
"""

from __future__ import annotations

import json
from typing import Any

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.integration.common.options import UNQUANTISED, Options, Wording, read

from .backend import BACKEND, FLAG

KEY = BACKEND
_ARGUMENT = "--json-model-override-args"
#: What SGLang calls its exchange without an all-to-all backend.
OWN_BACKEND = "none"
#: What lets ranks go on with it.
FALL_BACK = f'{_ARGUMENT} \'{{"{KEY}": {{"fallback": "{OWN_BACKEND}"}}}}\''

WORDING = Wording(
    framework="SGLang",
    flag=FLAG,
    options=f'"{KEY}" in {_ARGUMENT}',
    unquantised=f'{_ARGUMENT} \'{{"{KEY}": {{"dispatch": "{UNQUANTISED}"}}}}\'',
    own_backend=OWN_BACKEND,
)


def given(server_args: Any) -> Any:
    """Return what the user wrote for us; None if nothing. Local; takes any object.

    Raises:
        ConfigError: the flag holds no JSON object.
    """
    text = getattr(server_args, "json_model_override_args", None) or "{}"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{_ARGUMENT} {text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{_ARGUMENT} holds a {type(found).__name__}, it must be an object like "
            f'{{"{KEY}": {{"combine": "{UNQUANTISED}"}}}}'
        )
    return found.get(KEY)


def options_of(server_args: Any) -> Options:
    """Return the choices of a configuration. Local; raises as `given` and `options.read`."""
    return read(given(server_args), WORDING)
