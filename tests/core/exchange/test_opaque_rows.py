"""Lists of payloads: what is said after a failed round, after `close`, and in a capture."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from moe_nvlink_plugin import AllToAllConfig
from moe_nvlink_plugin.errors import ExchangeStateError, ExchangeTimeoutError
from moe_nvlink_plugin.integration.flashinfer.opaque_rows import Kind, OpaqueRows
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks

IDS, ROWS = torch.zeros((2, 4), dtype=torch.int32), torch.ones((2, 256), dtype=torch.bfloat16)


def rows_of(group: ThreadGroup) -> OpaqueRows:
    def config_of(kind: Kind) -> AllToAllConfig:
        return AllToAllConfig(
            ep_size=2,
            ep_rank=group.rank,
            num_experts=8,
            top_k=4,
            hidden_size=256,
            max_tokens_per_rank=2,
            recipe=f"bytes_{kind.row_bytes[0]}",
            received_ids=kind.received_ids,
            timeout_s=1.0,
        )

    return OpaqueRows(group, config_of)


def dispatch(rows: OpaqueRows) -> torch.Tensor:
    received = rows.dispatch(IDS, None, [ROWS], received_ids="global", max_tokens=2)
    return received.payloads[0]


@pytest.mark.parametrize("verb", ["dispatch", "combine"])
def test_verbs_after_a_round_that_failed_say_why(verb: str) -> None:
    """Of the verb that failed and of the other one; rank 1 leaves the round out."""

    def body(group: ThreadGroup) -> None:
        rows = rows_of(group)
        rows.prepare(Kind((512,), "global"), torch.device("cpu"))
        partial = torch.zeros((4, 256), dtype=torch.bfloat16)
        verbs: dict[str, Callable[[], torch.Tensor]] = {
            "dispatch": lambda: dispatch(rows),
            "combine": lambda: rows.combine(partial, None),
        }
        if verb == "combine":
            dispatch(rows)
        group.all_gather_object(None)
        if group.rank == 0:
            with pytest.raises(ExchangeTimeoutError) as failed:
                verbs[verb]()
            told = re.escape(f"the exchange is unusable since: {failed.value}; close ")
            for again in verbs.values():
                with pytest.raises(ExchangeStateError, match=told):
                    again()
        group.all_gather_object(None)
        rows.close()

    run_ranks(2, body)


def test_a_closed_workspace_is_not_created_anew() -> None:
    rows = rows_of(ThreadGroup.ranks(1)[0])
    rows.close()
    told = "the workspace is closed; create a new object on it"
    with pytest.raises(ExchangeStateError, match=told):
        dispatch(rows)
    with pytest.raises(ExchangeStateError, match=told):
        rows.combine(ROWS, None)


def test_what_a_capture_must_not_be_the_first_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rows, gpu, kind = rows_of(ThreadGroup.ranks(1)[0]), torch.device("cuda"), Kind((512,), "global")
    with pytest.raises(
        ExchangeStateError,
        match="512,. bytes with 0 statistics is being captured; run",
    ):
        rows.prepare(kind, gpu)
    mask, config = (1,), rows._config_of(kind)
    with pytest.raises(ExchangeStateError, match=r"active_rank_mask=\(1,\) is being captured; run"):
        rows._active_ranks(mask, config, gpu)
    known = rows._active_ranks(mask, config, torch.device("cpu"))
    assert rows._active_ranks(mask, config, gpu) is known
