"""Calls that must be refused: the error names the value and what is expected, nothing is harmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin import Dispatched, MoeAllToAll
from moe_nvlink_plugin.errors import (
    InputError,
)
from tests.unit.small_exchange import (
    CAPACITY,
    HIDDEN,
    TOP_K,
    assert_still_works,
    good,
    other_metadata,
)

pytestmark = pytest.mark.timeout(120)


BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "hidden width": (
        {"hidden_states": torch.randn(3, HIDDEN + 1)},
        r"hidden_states has shape \[3, 9\], expected \[3, 8\]",
    ),
    "hidden rank": ({"hidden_states": torch.randn(3)}, r"hidden_states has shape \[3\]"),
    "hidden scalar": ({"hidden_states": torch.tensor(1.0)}, r"hidden_states has shape \[\]"),
    "hidden dtype": (
        {"hidden_states": torch.randn(3, HIDDEN).bfloat16()},
        "hidden_states has dtype torch.bfloat16, expected torch.float32",
    ),
    "hidden strides": (
        {"hidden_states": torch.randn(HIDDEN, 3).T},
        r"hidden_states is not contiguous \(strides \[1, 3\]\); call .contiguous",
    ),
    "hidden device": (
        {"hidden_states": torch.empty(3, HIDDEN, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "ids device": (
        {"topk_ids": torch.empty(3, TOP_K, dtype=torch.int32, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "bound of another type": ({"max_tokens": 3.0}, "max_tokens=3.0 is a float, it must be an int"),
    "too many tokens": (good(CAPACITY + 1), "5 tokens exceed max_tokens_per_rank=4"),
    "ids of fewer tokens": (
        {"topk_ids": torch.zeros(2, TOP_K, dtype=torch.int32)},
        r"topk_ids has shape \[2, 2\], expected \[3, 2\]",
    ),
    "ids top_k": ({"topk_ids": torch.zeros(3, 1, dtype=torch.int32)}, r"expected \[3, 2\]"),
    "ids dtype": (
        {"topk_ids": torch.zeros(3, TOP_K)},
        "topk_ids has dtype torch.float32, expected torch.int32 or torch.int64",
    ),
    "ids strides": (
        {"topk_ids": torch.zeros(3, 2 * TOP_K, dtype=torch.int32)[:, ::2]},
        "topk_ids is not contiguous",
    ),
    "weights dtype": (
        {"topk_weights": torch.rand(3, TOP_K).half()},
        "topk_weights has dtype torch.float16",
    ),
    "weights shape": ({"topk_weights": torch.rand(3, 3)}, r"topk_weights has shape \[3, 3\]"),
    "padding tokens": (
        {"is_padding": torch.zeros(2, dtype=torch.bool)},
        r"is_padding has shape \[2\], expected \[3\]",
    ),
    "padding dtype": (
        {"is_padding": torch.zeros(3, dtype=torch.int32)},
        "is_padding has dtype torch.int32, expected torch.bool",
    ),
    "padding strides": (
        {"is_padding": torch.zeros(6, dtype=torch.bool)[::2]},
        "is_padding is not contiguous",
    ),
    "padding device": (
        {"is_padding": torch.zeros(3, dtype=torch.bool, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "mask of two words": (
        {"active_ranks": torch.ones(2, dtype=torch.int64)},
        r"active_ranks has shape \[2\], expected \[1\]",
    ),
    "mask dtype": (
        {"active_ranks": torch.ones(1, dtype=torch.bool)},
        "active_ranks has dtype torch.bool, expected torch.int64",
    ),
    "mask device": (
        {"active_ranks": torch.ones(1, dtype=torch.int64, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "mask without oneself": (
        {"active_ranks": torch.zeros(1, dtype=torch.int64)},
        r"active_ranks names ranks \[\] of 0 to 0, but this is rank 0; a rank that dispatches",
    ),
    "two extra payloads": (
        {"extra_payloads": [torch.zeros(3, 6, dtype=torch.uint8)] * 2},
        r"2 extra payloads given, the configuration has room for 1 \(extra_payload_bytes=\(6,\)\)",
    ),
    "extra row bytes": (
        {"extra_payloads": [torch.zeros(3, 7, dtype=torch.uint8)]},
        r"extra_payloads\[0\] has rows of 7 bytes, not 1 to 6",
    ),
    "extra tokens": (
        {"extra_payloads": [torch.zeros(2, 6, dtype=torch.uint8)]},
        r"extra_payloads\[0\] has shape \[2, 6\], expected \[3, 6\]",
    ),
    "unexpected scales": ({"scales": torch.ones(3, 1)}, "has no scales"),
    "channel": ({"channel": 2}, "channel=2 is not below num_channels=2"),
    "negative channel": ({"channel": -1}, "channel=-1"),
}


@pytest.mark.parametrize("name", BAD_DISPATCHES)
def test_dispatch_refuses(name: str, layer: MoeAllToAll) -> None:
    changes, message = BAD_DISPATCHES[name]
    with pytest.raises(InputError, match=message):
        layer.dispatch(**{**good(), **changes})
    assert_still_works(layer)


SLOTS = CAPACITY
BAD_COMBINES: dict[str, tuple[Callable[[Dispatched], tuple[Any, ...]], str]] = {
    "rows": (
        lambda r: (torch.randn(SLOTS - 1, HIDDEN), r.metadata),
        r"expert_output has shape \[3, 8\], expected \[4, 8\]",
    ),
    "dtype": (
        lambda r: (torch.randn(SLOTS, HIDDEN).half(), r.metadata),
        "expert_output has dtype torch.float16",
    ),
    "strides": (
        lambda r: (torch.randn(HIDDEN, SLOTS).T, r.metadata),
        "expert_output is not contiguous",
    ),
    "device": (
        lambda r: (torch.empty(SLOTS, HIDDEN, device="meta"), r.metadata),
        "is on meta, this exchange works on cpu",
    ),
    "output shape": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(2, HIDDEN)),
        r"output has shape \[2, 8\], expected \[3, 8\]",
    ),
    "output dtype": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(3, HIDDEN).double()),
        "output has dtype torch.float64",
    ),
    "output strides": (
        lambda r: (r.hidden_states, r.metadata, torch.empty(HIDDEN, 3).T),
        "output is not contiguous",
    ),
    "another layer's metadata": (
        lambda r: (r.hidden_states, other_metadata(r, handle=10**6)),
        "metadata belongs to exchange 1000000",
    ),
    "metadata without top_k": (
        lambda r: (r.hidden_states, other_metadata(r, send_slots=r.metadata.send_slots[:, :1])),
        r"metadata.send_slots has shape \[3, 1\]",
    ),
    "metadata of too many tokens": (
        lambda r: (
            r.hidden_states,
            other_metadata(r, send_slots=torch.zeros(9, TOP_K, dtype=torch.int32)),
        ),
        "metadata of 9 tokens exceeds max_tokens=4 of the dispatch",
    ),
    "metadata channel": (
        lambda r: (r.hidden_states, other_metadata(r, channel=7)),
        "channel=7 is not below num_channels=2",
    ),
}


@pytest.mark.parametrize("name", BAD_COMBINES)
def test_combine_refuses(name: str, layer: MoeAllToAll) -> None:
    """The dispatch before stays to be combined."""
    arguments, message = BAD_COMBINES[name]
    inputs = good()
    received = layer.dispatch(**inputs)
    rows, metadata, *output = arguments(received)
    with pytest.raises(InputError, match=message):
        layer.combine(rows, metadata, output=output[0] if output else None)
    combined = layer.combine(received.hidden_states.clone(), received.metadata)
    assert torch.equal(combined, inputs["hidden_states"])


BAD_ADDS: dict[str, tuple[Callable[[MoeAllToAll], dict[str, Any]], str]] = {
    "add shape": (
        lambda layer: {"add": torch.zeros(2, HIDDEN)},
        r"add has shape \[2, 8\], expected \[3, 8\]",
    ),
    "add dtype": (
        lambda layer: {"add": torch.zeros(3, HIDDEN).half()},
        "add has dtype torch.float16, expected torch.float32; convert it first",
    ),
    "add strides": (
        lambda layer: {"add": torch.zeros(HIDDEN, 3).T},
        r"add is not contiguous \(strides \[1, 3\]\); call .contiguous",
    ),
    "add device": (
        lambda layer: {"add": torch.empty(3, HIDDEN, device="meta")},
        "is on meta, this exchange works on cpu",
    ),
    "add in the combine region": (
        lambda layer: {"add": layer.combine_input()[:3]},
        "add lies at 0x[0-9a-f]+, in the exchange's workspace .*; pass a copy",
    ),
    "add across the output": (
        lambda layer: overlapping(torch.zeros(4, HIDDEN)),
        "add overlaps output, which begins 32 bytes after it; pass the same memory or",
    ),
    "output before add": (
        lambda layer: overlapping(torch.zeros(4, HIDDEN), names=("output", "add")),
        "add overlaps output, which begins -32 bytes after it",
    ),
    "scale NaN": (lambda layer: {"scale": float("nan")}, "scale=nan is no finite number of float"),
    "scale infinity": (lambda layer: {"scale": float("-inf")}, "scale=-inf is no finite number"),
    "scale beyond float32": (
        lambda layer: {"scale": 3.5e38},
        r"scale=3.5e\+38 is no finite number of float32 \(at most 3.4028.*e\+38 in magnitude\); ",
    ),
}


def overlapping(memory: torch.Tensor, names: tuple[str, str] = ("add", "output")) -> dict[str, Any]:
    """Rows of three tokens in memory of four; the second name's begin one later."""
    return dict(zip(names, (memory[:3], memory[1:]), strict=True))


@pytest.mark.parametrize("name", BAD_ADDS)
def test_combine_refuses_what_it_cannot_add(name: str, layer: MoeAllToAll) -> None:
    """The dispatch before stays to be combined."""
    changes, message = BAD_ADDS[name]
    inputs = good()
    received = layer.dispatch(**inputs)
    with pytest.raises(InputError, match=message):
        layer.combine(received.hidden_states, received.metadata, **changes(layer))
    combined = layer.combine(received.hidden_states.clone(), received.metadata)
    assert torch.equal(combined, inputs["hidden_states"])


def test_the_largest_scale(layer: MoeAllToAll) -> None:
    inputs, largest = good(), torch.finfo(torch.float32).max
    received = layer.dispatch(**inputs)
    rows = torch.full((CAPACITY, HIDDEN), 0.5)
    combined = layer.combine(rows, received.metadata, scale=largest)
    assert bool((combined == torch.tensor(largest) * 0.5).all())


def test_slots_outside_the_buffers_are_no_rows(layer: MoeAllToAll) -> None:
    received = layer.dispatch(**good())
    slots = torch.tensor([[-5, 10**6], [2**31 - 1, -(2**31)], [SLOTS, -1]], dtype=torch.int32)
    combined = layer.combine(received.hidden_states, other_metadata(received, send_slots=slots))
    assert not bool(combined.any())


def test_combine_input_of_another_type(layer: MoeAllToAll) -> None:
    with pytest.raises(InputError, match=r"torch.float16 was asked for, combine reduces torch.fl"):
        layer.combine_input(torch.float16)
    assert layer.combine_input(torch.float32).dtype is torch.float32
    with pytest.raises(InputError, match="channel=2"):
        layer.combine_input(channel=2)
