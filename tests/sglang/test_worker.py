"""What one process holds of ours: pools by namespace, capacity, options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here: make sglang-env")

from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.testing import ThreadGroup

Resolve = Callable[..., Any]


class Coordinator:
    """What we read of SGLang's GroupCoordinator."""

    def __init__(self, size: int) -> None:
        self.cpu_group = ThreadGroup.ranks(size)[0]
        self.world_size, self.rank_in_group = size, 0


@pytest.fixture
def publish(resolved: Resolve) -> Iterator[Callable[..., Any]]:
    """Publishes arguments, and gives the process an expert-parallel group."""
    from sglang.srt import runtime_context

    from moe_nvlink_plugin.integration.sglang import worker

    def run(**values: Any) -> Any:
        runtime_context.publish(resolved(**values), role="scheduler")
        runtime_context.get_parallel().override_permanently(moe_ep_group=Coordinator(2))
        return worker

    yield run
    worker.close()
    runtime_context.reset_context()


def test_target_and_draft_have_a_pool_each(publish: Callable[..., Any]) -> None:
    from sglang.srt.layers.moe.utils import (
        draft_model_build_scope,
        initialize_moe_config,
        speculative_moe_a2a_backend_context,
    )

    worker = publish()
    initialize_moe_config()
    target = worker.pool()
    assert worker.namespace() == "target"
    assert worker.pool() is target
    for scope in (speculative_moe_a2a_backend_context, draft_model_build_scope):
        with scope():
            assert worker.namespace() == "draft"
            draft = worker.pool()
    assert draft is not target
    assert worker.pool("draft") is draft
    assert worker.pool() is target
    assert draft.ranks is target.ranks, "a draft's context narrows groups, not this one"


def test_the_pool_knows_what_the_server_was_given(publish: Callable[..., Any]) -> None:
    worker = publish(
        chunked_prefill_size=64,
        max_running_requests=8,
        json_model_override_args='{"moe_nvlink": {"combine": "nvfp4"}}',
    )
    assert worker.capacity() == 32
    assert worker.options().combine == "nvfp4"
    assert worker.device().type == "cpu"
    assert (worker.pool().ranks.rank, worker.pool().ranks.size) == (0, 2)
    assert worker.pool().ranks.wording.flag == "--moe-a2a-backend moe_nvlink"


def test_a_group_that_does_not_span_the_ranks_is_refused(publish: Callable[..., Any]) -> None:
    worker = publish()
    from sglang.srt.runtime_context import get_parallel

    # SGLang compares the sizes when a group is set; this one changes after that.
    get_parallel().moe_ep_group.world_size = 1
    with pytest.raises(UnsupportedError, match="group has 1 ranks, --ep-size is 2"):
        worker.pool()


def test_closing_forgets_everything(publish: Callable[..., Any]) -> None:
    worker = publish()
    first = worker.pool()
    worker.close()
    worker.close()
    assert worker.pool() is not first
