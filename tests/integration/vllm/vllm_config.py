"""vLLM's command line and configurations, as a user asks for them. Needs vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_nvlink_plugin.integration.vllm.backend import BACKEND


def parser() -> Any:
    """That of `vllm serve`, with the arguments of engines alone."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def engine_args(model: Path, **values: Any) -> Any:
    """For one rank of a small model."""
    from vllm.engine.arg_utils import EngineArgs

    usual = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}
    return EngineArgs(model=str(model), **{**usual, **values})


def args_with_us(model: Path, **values: Any) -> Any:
    """For two data-parallel ranks that share their experts by our backend."""
    usual = {
        "all2all_backend": BACKEND,
        "enable_expert_parallel": True,
        "data_parallel_size": 2,
    }
    return engine_args(model, **{**usual, **values})


def config_with_us(model: Path, **values: Any) -> Any:
    """vLLM's configuration of such ranks."""
    return args_with_us(model, **values).create_engine_config()


#: Parts of vLLM's configuration, in the order in which `other` looks for a name.
_PARTS = (
    *("parallel_config", "model_config", "scheduler_config"),
    *("compilation_config", "speculative_config"),
)


class Other:
    """An object of vLLM's with other values, which its own checks and properties do not see."""

    def __init__(self, real: Any, **values: Any) -> None:
        vars(self).update(values, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def other(config: Any, **values: Any) -> Any:
    """A configuration with other values, each in the first part that has the name, or beside all.

    So rules are tested that vLLM's own checks, or this machine, would hide. A part may also be
    given itself, or by values of which it has not even the names.
    """
    parts: dict[str, Any] = {}
    for part in _PARTS:
        given, inner = values.pop(part, {}), getattr(config, part)
        if isinstance(given, dict):
            mine = [name for name in values if inner is not None and hasattr(inner, name)]
            more = {name: values.pop(name) for name in mine}
            given = Other(inner, **given, **more) if given or more else inner
        parts[part] = given
    for name in values:
        assert hasattr(config, name), f"this vLLM's configuration has no {name}"
    return Other(config, **parts, **values)
