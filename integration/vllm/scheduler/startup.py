"""What one of our schedulers needs in the processes that build a configuration, as servers do."""

from __future__ import annotations

import logging
from typing import Any

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.integration.common import logs

from . import capacity, reports


def prepare(vllm_config: Any) -> None:
    """Check the options, and let this process's /metrics show the scheduler. Local.

    Raises:
        ConfigError: an option is not allowed.
        UnsupportedError: vLLM would schedule this model with a class that ours does not extend.
    """
    check(vllm_config)
    reports.serve(vllm_config)


def check(vllm_config: Any) -> capacity.Capacity:
    """Return the options of a configuration that our schedulers can serve. Raises as `prepare`."""
    logs.show_through(logging.getLogger("vllm"))  # vLLM has configured its loggers again
    if vllm_config.diffusion_config is not None:
        raise UnsupportedError(
            "GuaranteedNoEvictScheduler does not extend the scheduler that vLLM has for diffusion "
            "models. Remove --scheduler-cls"
        )
    return capacity.read(vllm_config)
