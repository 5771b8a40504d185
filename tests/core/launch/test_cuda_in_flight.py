"""Verbs beside the caller's stream, on the stand-in driver: streams, events, captures, PDL."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_nvlink_plugin.errors import DriverError
from tests.core.launch.test_cuda_launch import alone, inputs, round_trip, units_of
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.processes import Driven
from tests.support.fake_cuda.transport import capturing

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


def round_beside(layer: Any, num_tokens: int = 3, channel: int = 0) -> torch.Tensor:
    """One round, both of whose verbs run beside the caller."""
    received = layer.dispatch_async(*inputs(layer, num_tokens), channel=channel).wait()
    rows = layer.combine_input(channel=channel).copy_(received.hidden_states)
    combined: torch.Tensor = layer.combine_async(rows, received.metadata).wait()
    return combined


def streams_and_calls() -> dict[str, Any]:
    control = fake_cuda.control()

    def counted(verb: Callable[..., Any], *given: Any) -> tuple[Any, dict[str, int]]:
        control.fail()  # counts from here on
        return verb(*given), control.calls()

    with alone(small_tokens=0) as layer:
        hidden, ids, weights = inputs(layer, 3)
        round_trip(layer)
        launched = [control.last_launch()]
        dispatching, started = counted(layer.dispatch_async, hidden, ids, weights)
        launched.append(control.last_launch())
        received, ended = counted(dispatching.wait)
        rows = layer.combine_input().copy_(received.hidden_states)
        combined, later = counted(lambda: layer.combine_async(rows, received.metadata).wait())
        launched.append(control.last_launch())
        received = layer.dispatch(hidden, ids, weights)
        launched.append(control.last_launch())
        layer.combine(layer.combine_input().copy_(received.hidden_states), received.metadata)
        launched.append(control.last_launch())
    plain, beside, combining, _first, after = (one.stream for one in launched)
    return {
        "pdl": [one.pdl for one in launched],
        "streams": (plain == after, beside == combining != plain),
        "started": started,
        "ended": ended,
        "later": later,
        "same": torch.equal(combined, hidden),
    }


@pytest.mark.parametrize("on", ["host", ptx.LONG])
def test_a_verb_has_a_stream_of_its_own(on: str, driven: Driven) -> None:
    seen = driven(streams_and_calls, units=units_of(on))
    assert seen["same"]
    # The first launch after `wait` comes after that event; the next one after a kernel.
    assert seen["pdl"] == [1, 0, 0, 0, 1], "PDL orders no kernel after another stream's event"
    assert seen["streams"] == (True, True)
    started, ended, later = seen["started"], seen["ended"], seen["later"]
    # Before the launch the stream waits for the caller's; the first verb makes stream and events.
    assert (started["cuStreamCreateWithPriority"], started["cuEventCreate"]) == (1, 2)
    assert (started["cuEventRecord"], started["cuStreamWaitEvent"]) == (2, 1)
    assert ended["cuStreamWaitEvent"] == 1
    assert not {"cuStreamSynchronize", "cuLaunchKernelEx"} & ended.keys(), "the host goes on"
    assert (later["cuEventRecord"], later["cuStreamWaitEvent"]) == (2, 2)
    assert not {"cuStreamCreateWithPriority", "cuEventCreate"} & later.keys()


def two_channels(leave_sms: bool) -> list[bool]:
    control = fake_cuda.control()
    with alone(num_channels=2, small_tokens=0, leave_sms=leave_sms) as layer:
        batches = [inputs(layer, num_tokens) for num_tokens in (3, 5)]
        streams, sent = [], []
        for channel, batch in enumerate(batches):
            sent.append(layer.dispatch_async(*batch, channel=channel))
            streams.append(control.last_launch().stream)
        received = [one.wait() for one in sent]
        combining = [
            layer.combine_async(
                layer.combine_input(channel=channel).copy_(one.hidden_states), one.metadata
            )
            for channel, one in enumerate(received)
        ]
        same = [
            torch.equal(one.wait(), batch[0]) for one, batch in zip(combining, batches, strict=True)
        ]
        return [*same, streams[0] != streams[1]]


@pytest.mark.parametrize("leave_sms", [False, True])
def test_channels_do_not_queue_behind_each_other(leave_sms: bool, driven: Driven) -> None:
    assert driven(two_channels, leave_sms) == [True] * 3


def captures(leave_sms: bool) -> list[bool]:
    """From the first call on; the streams are made while the thread captures."""
    control = fake_cuda.control()
    outcome = []
    with alone(small_tokens=0, leave_sms=leave_sms) as layer:
        hidden, ids, weights = inputs(layer, 3)
        output = torch.empty_like(hidden)
        with capturing():
            received = layer.dispatch_async(hidden, ids, weights).wait()
            rows = layer.combine_input()
            layer.combine_async(rows, received.metadata, output=output).wait()
        outcome.append(control.captured() == 2)
        for number in range(1, 4):
            rows.fill_(number)
            control.replay()
            outcome.append(torch.equal(output, torch.full_like(output, number)))
        outcome.append(layer.stats().rounds == 3)
        # The side stream is no part of that capture any more.
        outcome.append(torch.equal(round_beside(layer), hidden))
    return outcome


@pytest.mark.parametrize("on", ["host", ptx.LONG])
@pytest.mark.parametrize("leave_sms", [False, True])
def test_a_graph_holds_both_halves(leave_sms: bool, on: str, driven: Driven) -> None:
    outcome = driven(captures, leave_sms, units=units_of(on, tma="yes" if leave_sms else "no"))
    assert outcome == [True] * 6


def captured_without_wait() -> str:
    with alone() as layer:
        with pytest.raises(DriverError) as caught, capturing():
            layer.dispatch_async(*inputs(layer, 3))
        return str(caught.value)


def test_a_capture_that_lacks_the_wait_fails(driven: Driven) -> None:
    assert "UNJOINED" in driven(captured_without_wait)


def destroyed() -> dict[str, int]:
    layer = alone()
    round_beside(layer)
    layer.close()
    control = fake_cuda.control()
    control.fail()
    del layer
    gc.collect()
    return {name: count for name, count in control.calls().items() if name.endswith("Destroy")}


def test_streams_end_with_the_workspace(driven: Driven) -> None:
    ended = driven(destroyed)
    assert ended == {"cuStreamDestroy": 1, "cuEventDestroy": 2}
