"""A deliberate break of our backend, which vLLM's tests must catch: tokens go to the experts of the
next rank. A pytest plugin, which `adapt.ranks` installs in every rank that it starts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests() -> None:
    """Before any rank is started."""
    from .adapt import ranks

    ranks.in_every_rank(_break)


def _break() -> None:
    from moe_nvlink_plugin.integration.vllm.moe.cpu_prepare_finalize import CpuPrepareAndFinalize

    original = CpuPrepareAndFinalize.prepare

    def prepare(self: Any, a1: Any, weights: Any, ids: Any, *rest: Any, **named: Any) -> Any:
        config = self._exchange.config
        moved = (ids + config.num_experts // config.ep_size) % config.num_experts
        return original(self, a1, weights, torch.where(ids < 0, ids, moved), *rest, **named)

    setattr(CpuPrepareAndFinalize, "prepare", prepare)  # noqa: B010 - its parameters are fewer
