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
