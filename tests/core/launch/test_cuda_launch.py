"""Launches through unmodified cuda-python on the tests' own driver (tests/support/fake_cuda): what
is asked of the driver, and that the kernels give the right rows, run by it from the host build and,
where a test says so, from their PTX.

Here the ranks' memory is the host transport's; test_nvlink_exchange.py puts both together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gc
import logging.handlers
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll, driver, rank_mask
from moe_nvlink_plugin.choices import Choices
from moe_nvlink_plugin.errors import (
    CompileError,
    DriverError,
    ExchangeStateError,
    ExchangeTimeoutError,
    MoeNvlinkError,
    UnsupportedError,
)
from moe_nvlink_plugin.exchange.in_flight import InFlight
from moe_nvlink_plugin.exchange.kernels import COMBINE, DISPATCH, LAYER
from moe_nvlink_plugin.exchange.launches import variant
from moe_nvlink_plugin.groups import Group, as_group
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.jit.header import constants, structs
from moe_nvlink_plugin.launch.cuda import CudaExecutor
from moe_nvlink_plugin.launch.machine_code import _loaded
from moe_nvlink_plugin.testing import ThreadGroup, random_inputs, run_ranks, try_ranks
from moe_nvlink_plugin.verify import cases, compare
from tests.support import case_list, fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.processes import Driven
from tests.support.fake_cuda.transport import capturing
from tests.support.long_tests import first_of

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


def config(group: Group, **values: Any) -> AllToAllConfig:
    usual: dict[str, Any] = {
        "num_experts": 8,
        "top_k": 4,
        "hidden_size": 7168,
        "max_tokens_per_rank": 8,
        "timeout_s": 60,
        "transport": "launched_by_driver",
    }
    return AllToAllConfig(ep_size=group.size, ep_rank=group.rank, **{**usual, **values})


def alone(**values: Any) -> MoeAllToAll:
    (group,) = ThreadGroup.ranks(1)
    return MoeAllToAll.create(config(group, **values), group)


def inputs(layer: MoeAllToAll, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_inputs(layer.config, num_tokens, torch.Generator().manual_seed(num_tokens))


def round_trip(layer: MoeAllToAll, num_tokens: int = 3) -> torch.Tensor:
    received = layer.dispatch(*inputs(layer, num_tokens))
    rows = layer.combine_input().copy_(received.hidden_states)
    return layer.combine(rows, received.metadata)


def units_of(on: str, *, top_k: int = 4, tma: str = "no") -> list[ptx.Unit]:
    """What `alone` loads, for a test that runs on the host build ("host") or on PTX ("ptx")."""
    return ptx.of(LAYER.variant(top_k=top_k, dtype="bf16", tma=tma)) if on == "ptx" else []


# What the driver is asked.


def launches() -> dict[str, Any]:
    with alone(small_tokens=0) as layer:
        hidden, ids, weights = inputs(layer, 3)
        received = layer.dispatch(hidden, ids, weights)
        dispatch = fake_cuda.control().last_launch()
        seen: dict[str, Any] = {"dispatch": described(dispatch)}
        struct: Any = structs()["DispatchArgs"]
        args = struct.from_buffer_copy(dispatch.args)
        seen["dispatch args"] = {
            "num_tokens": args.geometry.num_tokens == 3,
            "hidden_size": args.geometry.hidden_size == 7168,
            "slots": args.send_slots == received.metadata.send_slots.data_ptr(),
            "source": args.payloads[2].source == hidden.data_ptr(),
            "row_bytes": args.payloads[2].row_bytes == 14336,
        }
        rows = layer.combine_input().copy_(received.hidden_states)
        added = hidden.clone()
        output = layer.combine(rows, received.metadata, add=added, scale=-2.0)
        combine = fake_cuda.control().last_launch()
        seen["combine"] = described(combine)
        struct = structs()["CombineArgs"]
        args = struct.from_buffer_copy(combine.args)
        seen["combine args"] = {
            "output": args.output == output.data_ptr(),
            "hidden_splits": args.hidden_splits == 4,
            "add": args.add == added.data_ptr(),
            "scale": args.scale == -2.0,
        }
        same = torch.equal(output, -hidden)
    return {**seen, "same": same}


def described(launch: fake_cuda.LastLaunch) -> tuple[Any, ...]:
    grid, block = tuple(launch.grid), tuple(launch.block)
    return launch.name.decode(), grid, block, launch.pdl, launch.shared_bytes, len(launch.args)


@pytest.mark.parametrize("on", ["host", ptx.LONG])
def test_launches(on: str, driven: Driven) -> None:
    seen = driven(launches, sms=132, units=units_of(on))
    sizes = {name: ctypes.sizeof(structs()[name]) for name in ("DispatchArgs", "CombineArgs")}
    # A few hundred bytes: the driver copies them at every launch.
    assert all(size <= 400 for size in sizes.values())
    dispatch = ("moe_nvlink_dispatch", (3, 1, 1), (896, 1, 1), 1, 0, sizes["DispatchArgs"])
    assert seen["dispatch"] == dispatch
    combine = ("moe_nvlink_combine", (12, 1, 1), (224, 1, 1), 1, 0, sizes["CombineArgs"])
    assert seen["combine"] == combine
    assert set(seen["dispatch args"].values()) == set(seen["combine args"].values()) == {True}
    assert seen["same"]


#: What says nothing of contexts, as a driver older than they.
_UNKNOWN = ",".join(f"cuCtxGetDevResource:{n}:CUDA_ERROR_NOT_SUPPORTED" for n in range(1, 9))


@pytest.mark.parametrize(
    ("pdl", "max_sms", "options", "ctas"),
    [
        (0, 1, {}, range(1, 9)),  # one SM holds no more CTAs
        # A green context, or MPS: CTAs beyond its SMs would not run at the same time.
        (1, 100, {"context_sms": 1}, range(1, 9)),
        (1, 132, {"context_sms": 1, "fail": _UNKNOWN}, range(101, 10**4)),
    ],
    ids=["asked for", "context", "unknown context"],
)
def test_few_sms(
    pdl: int,
    max_sms: int,
    options: dict[str, Any],
    ctas: range,
    monkeypatch: pytest.MonkeyPatch,
    driven: Driven,
) -> None:
    monkeypatch.setenv("MOE_NVLINK_PDL", str(pdl))
    monkeypatch.setenv("MOE_NVLINK_MAX_SMS", str(max_sms))
    given = {"max_tokens_per_rank": 400}, 400
    (name, grid, _block, early, *_rest), _ = driven(shapes, *given, sms=132, **options)
    assert (name, early) == ("moe_nvlink_dispatch", pdl)
    assert grid[0] in ctas


def shapes(values: dict[str, Any], num_tokens: int = 3) -> list[tuple[Any, ...]]:
    """Of the two launches of a round of a layer with these values."""
    with alone(**values) as layer:
        return shapes_of(layer, num_tokens)


def shapes_of(layer: MoeAllToAll, num_tokens: int, channel: int = 0) -> list[tuple[Any, ...]]:
    received = layer.dispatch(*inputs(layer, num_tokens), channel=channel)
    first = described(fake_cuda.control().last_launch())
    layer.combine(layer.combine_input(channel=channel), received.metadata)
    return [first, described(fake_cuda.control().last_launch())]


def test_launches_choose_as_the_layer_says(driven: Driven) -> None:
    choices = Choices(pdl=False, wide_ctas_per_sm=0, combine_threads=512)
    seen = driven(shapes, {"small_tokens": 0, "tuning": choices}, sms=132)
    chosen = [(grid[0], block[0], pdl) for _name, grid, block, pdl, *_rest in seen]
    assert chosen == [(3, 256, 0), (6, 448, 0)]  # and today's: test_launches


#: Hidden size of calls of a layer with 7168, and whether their rows are whole vectors. Wider ones
#: have room where rows may be float32.
WIDTHS = {7168: True, 64: True, 14336: True, 4: False, 7164: False}


def rows_by_tma(limit: dict[str, Any]) -> list[tuple[int, int, bool, bool]]:
    """Width, memory that the launch asks for, and whether the rows are those by loads."""
    seen = []
    settings: dict[str, Any] = {"small_tokens": 0, "ordered_slots": True, **limit}
    settings["combine_dtypes"] = (torch.float32,)
    beside = "leave_sms" in limit
    with (
        alone(**settings) as layer,
        alone(**settings, tuning=Choices(tma_sms=0)) as other,
    ):
        for width in WIDTHS:
            outputs = []
            for one in (layer, other):
                received = one.dispatch(*inputs(one, 7))
                rows = one.combine_input(hidden_size=width)
                rows.copy_(torch.arange(rows.numel()).sin().view_as(rows))
                output = torch.full((7, width), torch.nan, dtype=rows.dtype)
                told: dict[str, Any] = {"metadata": received.metadata, "output": output}
                told["hidden_size"] = width
                if beside:
                    one.combine_async(expert_output=rows, **told).wait()
                else:
                    one.combine(rows, **told)
                outputs.append(output)
                shared = fake_cuda.control().last_launch().shared_bytes
                if one is layer:
                    by_tma = shared
            same = torch.equal(*(output.view(torch.int16) for output in outputs))
            seen.append((width, by_tma, shared == 0, same))
    return seen


@pytest.mark.parametrize("on", ["host", ptx.LONG])
@pytest.mark.parametrize("limit", [{"max_sms": 1}, {"max_sms": 32}, {"leave_sms": True}], ids=str)
def test_rows_by_tma_of_any_width(limit: dict[str, Any], on: str, driven: Driven) -> None:
    """The grid and the memory are for the layer's width; the kernel gets the call's."""
    units = ptx.of(
        *(
            LAYER.variant(top_k=4, dtype=dtype, ordered_slots="yes", tma=tma)
            for dtype in ("bf16", "fp32")
            for tma in ("no", "yes")
        )
    )
    seen = driven(rows_by_tma, limit, sms=132, units=units if on == "ptx" else [])
    assert [(width, shared > 0) for width, shared, *_rest in seen] == [*WIDTHS.items()]
    assert all(others and same for *_rest, others, same in seen)


def launches_that_leave_sms(settings: dict[str, Any]) -> dict[tuple[int, str], tuple[str, int]]:
    """By tokens and verb: the kernel, with "by TMA" if it asks for shared memory, and its CTAs."""
    seen = {}

    def ended(verb: Callable[..., Any], tokens: int, *given: Any, **options: Any) -> Any:
        result = verb(*given, **options)
        name, grid, *_rest, shared, _ = described(fake_cuda.control().last_launch())
        seen[tokens, verb.__name__] = (name + " by TMA" * (shared > 0), grid[0])
        return result.wait() if isinstance(result, InFlight) else result

    limits = {"small_tokens": 8, "small_combine_tokens": 8, "max_tokens_per_rank": 400}
    with alone(leave_sms=True, **limits, **settings) as layer:
        alike = [(layer.dispatch, layer.combine), (layer.dispatch_async, layer.combine_async)]
        for tokens in (400, 8):
            for dispatch, combine in alike:
                given = inputs(layer, tokens)
                received = ended(dispatch, tokens, *given, max_tokens=tokens)
                rows = layer.combine_input(metadata=received.metadata)
                ended(combine, tokens, rows, metadata=received.metadata)
    return seen


BULK = "moe_nvlink_combine"


@pytest.mark.parametrize(
    ("settings", "sms", "sms_beside", "combine_beside"),
    [
        ({}, 132, 32, (f"{BULK} by TMA", 32)),
        ({"max_sms": 64}, 64, 32, (f"{BULK} by TMA", 32)),
        ({"max_sms": 16}, 16, 16, (f"{BULK} by TMA", 16)),
        ({"num_channels": 16}, 132 // 16, 132 // 16, (f"{BULK} by TMA", 132 // 16)),
        ({"tuning": Choices(tma_sms=0)}, 132, 132, None),
        ({"combine": "fp8_block"}, 132, 32, None),
    ],
    ids=str,
)
def test_verbs_beside_their_caller_leave_sms(
    settings: dict[str, Any],
    sms: int,
    sms_beside: int,
    combine_beside: tuple[str, int] | None,
    driven: Driven,
) -> None:
    seen = driven(launches_that_leave_sms, settings, sms=132)
    assert seen[400, "combine_async"] == (combine_beside or seen[400, "combine"])
    (name, ctas), (same, ctas_beside) = (seen[400, f"dispatch{way}"] for way in ("", "_async"))
    assert name == same == "moe_nvlink_dispatch"
    most_of_an_sm = 2048 // 256
    assert ctas_beside <= sms_beside * most_of_an_sm
    assert ctas_beside == ctas if sms == sms_beside else ctas_beside < ctas
    for verb in ("dispatch", "combine"):
        small = seen[8, verb], seen[8, f"{verb}_async"]
        if verb == "dispatch" or "combine" not in settings:
            assert {kernel for kernel, _ in small} == {f"moe_nvlink_small_{verb}"}
        assert small[0] == small[1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"leave_sms": True}, ",tma=yes"),
        ({"max_sms": 32}, ",tma=yes"),
        ({"leave_sms": True, "combine": "fp8_block"}, ",combine=fp8_block"),
        ({"leave_sms": True, "tuning": Choices(tma_sms=0)}, ""),
        ({"max_sms": 33}, ""),
        ({"tuning": Choices(async_release=True)}, ",async_release=yes"),
    ],
    ids=str,
)
def test_builds_that_have_to_be_named(settings: dict[str, Any], named: str) -> None:
    (group,) = ThreadGroup.ranks(1)
    plain = str(variant(config(group), 0))
    assert str(variant(config(group, **settings), 0)) == plain + named


def launches_beside_another_channel() -> list[tuple[int, tuple[Any, ...]]]:
    """CTAs of its kind that an SM holds, and each launch."""
    with alone(max_tokens_per_rank=400, num_channels=2) as layer:
        variant = LAYER.variant(top_k=4, dtype="bf16")
        kernels = [_loaded[0, variant.build(kernel, pdl=False)] for kernel in (DISPATCH, COMBINE)]
        seen = shapes_of(layer, 400, channel=1)
        with driver.on_device(0):
            pairs = zip(kernels, seen, strict=True)
            held = [kernel.blocks_per_sm(block[0]) for kernel, (_, _, block, *_rest) in pairs]
        return list(zip(held, seen, strict=True))


def test_a_channel_leaves_room_for_the_others(driven: Driven) -> None:
    """Kernels that wait for the peers must not keep each other off the GPU."""
    seen = driven(launches_beside_another_channel, sms=20)
    for held, (name, grid, block, pdl, *_rest) in seen:
        assert 1 <= held < 2048 // block[0], "registers are fewer than threads"
        assert grid[0] == 10, f"{name}: a CTA on each of half of the SMs"
        assert pdl == 0, "a kernel that starts early behind this one would take the other half"


# Kernels of third parties that are loaded beside ours.


def warnings_of_layers(num_ranks: int, num_channels: int) -> list[str]:
    """What is logged while two layers are made."""
    handler = logging.handlers.BufferingHandler(1000)
    handler.setLevel(logging.WARNING)
    logging.getLogger("moe_nvlink_plugin").addHandler(handler)

    def rank_main(group: ThreadGroup) -> None:
        for _ in range(2):
            MoeAllToAll.create(config(group, num_channels=num_channels), group).close()

    run_ranks(num_ranks, rank_main)
    return [record.getMessage() for record in handler.buffer]


LAZY = "Start all ranks with CUDA_MODULE_LOADING=EAGER"
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS=1, and 2 channels"


@pytest.mark.parametrize(
    ("loading", "connections", "num_ranks", "num_channels", "expected"),
    [
        (None, None, 2, 2, [LAZY]),
        ("EAGER", None, 2, 2, []),
        (None, None, 2, 1, []),
        (None, None, 1, 2, []),
        ("EAGER", "1", 2, 2, [ONE_QUEUE]),
        ("EAGER", "8", 2, 2, []),
        ("EAGER", "1", 2, 1, []),
        ("EAGER", "", 2, 2, []),
    ],
)
def test_what_channels_want(
    loading: str | None,
    connections: str | None,
    num_ranks: int,
    num_channels: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    driven: Driven,
) -> None:
    """Said once by a process: a kernel that waits must not meet one that is loaded meanwhile, nor
    keep another channel's queue.
    """
    for name, value in (("MODULE_LOADING", loading), ("DEVICE_MAX_CONNECTIONS", connections)):
        monkeypatch.delenv(f"CUDA_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"CUDA_{name}", value)
    said = driven(warnings_of_layers, num_ranks, num_channels, sms=20)
    assert [words in text for words, text in zip(expected, said, strict=True)] == [True] * len(said)


# Several ranks on one GPU.


def shared_launches(_rank: int, _size: int, num_channels: int) -> list[Any]:
    """Shapes of this rank's launches; the error where there are none."""
    values = {"max_tokens_per_rank": 400, "hidden_size": 512, "num_channels": num_channels}
    group = as_group(dist.group.WORLD, 60)
    try:
        layer = MoeAllToAll.create(config(group, transport="on_fake_driver", **values), group)
    except MoeNvlinkError as error:
        return [type(error).__name__, str(error)]
    with layer:
        return shapes_of(layer, 400)


#: Options of two processes on one GPU.
SHARED = {"ranks": 2, "shared_uuid": 1, "sms": 20}


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_NVLINK_ALLOW_SHARED_GPU", "1")


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("num_channels", "sms_each"), [(1, 10), (2, 5)])
def test_ranks_share_their_gpu(num_channels: int, sms_each: int, driven: Driven) -> None:
    """The kernels of one rank must not keep out those that they wait for."""
    for seen in driven(shared_launches, num_channels, **SHARED):
        names = [name for name, *_rest in seen]
        assert names == ["moe_nvlink_dispatch", "moe_nvlink_combine"]
        assert [(grid[0], pdl) for _name, grid, _block, pdl, *_rest in seen] == [(sms_each, 0)] * 2


def test_ranks_on_gpus_of_their_own_share_nothing(driven: Driven) -> None:
    for seen in driven(shared_launches, 1, ranks=2, sms=20):
        for name, grid, _block, pdl, *_rest in seen:
            assert grid[0] > 20, f"{name}: several CTAs on each of 20 SMs"
            assert pdl == 1


@pytest.mark.usefixtures("allowed")
def test_more_ranks_than_sms(driven: Driven) -> None:
    for kind, message in driven(shared_launches, 1, **SHARED | {"sms": 1}):
        assert kind == "ConfigError"
        assert "2 rank(s) of the group on one GPU, 1 channel(s) each" in message
        assert "2 together, and the GPU has 1" in message


def launches_of_a_counted_round(small_tokens: int) -> int:
    with alone(num_expert_counts=8, small_tokens=small_tokens) as layer:
        before = fake_cuda.control().last_launch().count
        round_trip(layer)
        return fake_cuda.control().last_launch().count - before


@pytest.mark.parametrize("small_tokens", [0, 8])
def test_counts_per_expert_cost_no_launch(small_tokens: int, driven: Driven) -> None:
    assert driven(launches_of_a_counted_round, small_tokens) == 2


# Whose context, whose stream.


def contexts_of_launches() -> list[dict[str, int]]:
    """Pushes and pops of a round: with the context current, with another GPU's, with none."""
    control, found = fake_cuda.control(), []
    with alone() as layer:
        tokens, region = inputs(layer, 3), layer.combine_input()
        round_trip(layer)
        for current in (0, 1, None):
            around = contextlib.nullcontext() if current is None else driver.on_device(current)
            with around:
                control.fail()  # starts counting the calls
                layer.combine(region, layer.dispatch(*tokens).metadata)
                calls = control.calls()
            found.append({name: calls.get(f"cuCtx{name}Current", 0) for name in ("Push", "Pop")})
    return found


def test_a_launch_makes_its_context_current_if_another_is(driven: Driven) -> None:
    found = driven(contexts_of_launches, devices=2)
    pushed = {"Push": 2, "Pop": 2}
    assert found == [{"Push": 0, "Pop": 0}, pushed, pushed]


def streams_of_torch() -> list[Any]:
    """What an executor of cuda:1 asks torch for, first and later; and a device without index."""
    asked: list[Any] = []

    def current_stream(device: Any) -> Any:
        asked.append(str(device))
        return mock.Mock(cuda_stream=17)

    def raw(index: int) -> int:
        asked.append(index)
        return 18 + len(asked)

    streams = []
    with (
        mock.patch.object(torch.cuda, "current_stream", current_stream),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", raw, create=True),
    ):
        for device in ("cuda:1", "cuda"):
            executor = CudaExecutor(torch.device(device))
            streams += [executor.stream() for _ in range(3)]
    with mock.patch.object(torch.cuda, "current_stream", current_stream):  # no such function
        executor = CudaExecutor(torch.device("cuda:1"))
        streams += [executor.stream() for _ in range(2)]
    return [streams, asked]


def test_the_stream_is_asked_anew_at_each_launch(driven: Driven) -> None:
    if hasattr(torch._C, "_cuda_getCurrentRawStream"):
        pytest.skip("this torch has the function; tests/gpu runs it")
    streams, asked = driven(streams_of_torch, devices=2)
    assert asked == ["cuda:1", 1, 1, "cuda", "cuda", "cuda", "cuda:1", "cuda:1"]
    assert streams == [17, 20, 21, 17, 17, 17, 17, 17]


# The product's cases, launched by the driver.


@pytest.mark.parametrize("on", ["host", ptx.LONG])
@pytest.mark.parametrize("number", range(4))
def test_cases(number: int, on: str, driven: Driven) -> None:
    some = case_list.CASES[number::4]
    names = [case.name for case in some]
    units = ptx.of_configs(*(case.config(0) for case in some)) if on == "ptx" else []
    outcomes = driven(run, names, units=units)
    for case, rounds in zip(some, outcomes, strict=True):
        several_ctas = dataclasses.replace(case, num_threads=4)  # slots in any order
        for seen in rounds:
            compare.check_received(several_ctas, cases.make_inputs(case), seen)
            compare.check_combined(several_ctas, cases.make_inputs(case), seen)


def run(names: list[str]) -> list[list[list[cases.Seen]]]:
    by_name = {case.name: case for case in case_list.CASES}
    return [case_list.run_case(by_name[name], transport="launched_by_driver") for name in names]


# CUDA graphs.


#: Calls that neither wait, nor allocate, nor are part of the graph (the launch is).
ALLOWED_IN_CAPTURE = {
    "cuLaunchKernelEx",
    "cuStreamIsCapturing",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
}


def capture_and_replay(num_replays: int) -> list[bool]:
    control = fake_cuda.control()
    outcome = []
    with alone() as layer:
        hidden, ids, weights = inputs(layer, 8)
        mask, me = torch.zeros(8, dtype=torch.bool), rank_mask((0,), 1)
        allocations = control.live()
        with capturing():
            control.fail()  # starts counting the calls
            # The first call after create.
            received = layer.dispatch(hidden, ids, weights, is_padding=mask, active_ranks=me)
            output = torch.empty_like(hidden)
            # What experts would be in the graph: they write where combine reads.
            layer.combine(layer.combine_input(), received.metadata, output=output)
            calls = set(control.calls())
        outcome.append(calls <= ALLOWED_IN_CAPTURE)
        outcome.append(control.live() == allocations)
        outcome.append(control.captured() == 2)
        generator = torch.Generator().manual_seed(1)
        region, counts = layer.combine_input(), layer._layer.channel(0).recv_counts
        for number in range(num_replays):
            filled = number % 9
            hidden.copy_(torch.randn(hidden.shape, generator=generator))
            region.fill_(number % 100)
            scores = torch.rand((8, 8), generator=generator)
            ids.copy_(scores.topk(4, dim=1).indices)
            # Padding of a smaller batch: by the mask and by the ids in turn.
            behind = torch.arange(8) >= filled
            mask.copy_(behind & (number % 2 == 0))
            ids[behind & (number % 2 == 1)] = -1
            control.replay()
            expected = torch.where(torch.arange(8)[:, None] < filled, number % 100, 0)
            same = torch.equal(output, expected.to(output.dtype).expand_as(output))
            # The CTAs race for slots: the rows are all there, in some order.
            slots = received.metadata.send_slots.max(dim=1).values[:filled].long()
            same = same and torch.equal(received.hidden_states[slots], hidden[:filled])
            if not same or counts.tolist() != [filled]:
                outcome.append(False)
                break
        outcome.append(layer.stats().rounds == num_replays)
    control.replay()  # the graph outlives its exchange: memory stays mapped
    outcome.append(control.live()["host_allocations"] == 1)
    return outcome


@pytest.mark.parametrize(("on", "num_replays"), first_of([("host", 1000), ("ptx", 20)]))
def test_capture_from_the_first_call_and_many_replays(
    on: str, num_replays: int, driven: Driven
) -> None:
    """On PTX, the kernels of a replay overlap as their programmatic launches allow."""
    outcome = driven(capture_and_replay, num_replays, units=units_of(on))
    assert outcome == [True] * 5


def capture_other_rows() -> list[bool]:
    """Bound, type and width of the captured calls stay those of the graph."""
    control = fake_cuda.control()
    with alone(combine_dtypes=(torch.float32,)) as layer:
        hidden, ids, weights = inputs(layer, 2)
        output = torch.empty(2, 64)
        with capturing():
            control.fail()  # starts counting the calls
            received = layer.dispatch(hidden, ids, weights, max_tokens=2)
            region = layer.combine_input(torch.float32, hidden_size=64, metadata=received.metadata)
            layer.combine(region, received.metadata, output=output, hidden_size=64)
            outcome = [set(control.calls()) <= ALLOWED_IN_CAPTURE]
        for number in range(6):
            if number % 2:  # a round of another bound and of other rows, outside of the graph
                outcome.append(torch.equal(round_trip(layer, 8), inputs(layer, 8)[0]))
                continue
            region.fill_(number + 1)
            control.replay()
            outcome.append(torch.equal(output, torch.full_like(output, number + 1)))
            slots = received.metadata.send_slots.max(dim=1).values.long()
            outcome.append(torch.equal(received.hidden_states[slots], hidden))
    return outcome


@pytest.mark.parametrize("on", ["host", ptx.LONG])
def test_a_graph_keeps_bound_and_rows(on: str, driven: Driven) -> None:
    units = units_of(on)
    if on == "ptx":
        units += ptx.of(LAYER.variant(top_k=4, dtype="fp32"))
    outcome = driven(capture_other_rows, units=units)
    assert outcome == [True] * 10


def drop_after_capture() -> list[bool]:
    control = fake_cuda.control()
    alone().close()
    before = control.live()["host_allocations"]
    outcome = []
    for captures in (False, True):
        layer = alone()
        hidden, ids, weights = inputs(layer, 8)
        output = torch.empty_like(hidden)
        with capturing() if captures else contextlib.nullcontext():
            received = layer.dispatch(hidden, ids, weights)
            layer.combine(layer.combine_input(), received.metadata, output=output)
        slots = received.metadata.send_slots  # a graph's pool would keep them
        del layer, received  # nobody calls close
        gc.collect()
        outcome.append(control.live()["host_allocations"] == before + captures)
    control.replay()
    assert (slots >= 0).any()
    return outcome


def test_layers_dropped_after_a_capture_leave_the_graph_its_memory(driven: Driven) -> None:
    assert driven(drop_after_capture) == [True, True]


def grow_during_capture() -> list[str]:
    messages = []
    with alone() as layer:
        (group,) = ThreadGroup.ranks(1)
        larger = config(group, hidden_size=8192)
        with capturing():
            for share_with in (layer, None):
                with pytest.raises(ExchangeStateError) as caught:
                    MoeAllToAll.create(larger, group, share_with=share_with)
                messages.append(str(caught.value))
        round_trip(layer)
        MoeAllToAll.create(larger, group, share_with=layer).close()
    return messages


def test_growth_during_capture_is_refused(driven: Driven) -> None:
    for message in driven(grow_during_capture):
        assert "capturing a CUDA graph" in message
        assert "create all layers before the capture" in message


# Bad days.


def late_rank() -> list[Any]:
    def rank_main(group: ThreadGroup) -> Any:
        with MoeAllToAll.create(config(group, timeout_s=0.3), group) as layer:
            if group.rank == 1:
                group.all_gather_object(None)
                return None
            hidden, ids, weights = inputs(layer, 3)
            assert layer.failure() is None
            # On a GPU the launch returns before the fault; this driver runs it at once, and the
            # word in the host's memory is all there is to hear of it.
            with pytest.raises(ExchangeTimeoutError, match=r"rank 0 waited 0.3 s .* rank\(s\) 1"):
                layer.dispatch(hidden, ids, weights)
            with pytest.raises(ExchangeTimeoutError):
                layer.synchronize()
            with pytest.raises(ExchangeStateError, match="unusable since"):
                layer.dispatch(hidden, ids, weights)
            group.all_gather_object(None)
            failure = layer.failure()
            assert isinstance(failure, ExchangeTimeoutError)
            return failure.ranks == (1,)

    return run_ranks(2, rank_main)


@pytest.mark.parametrize("on", ["host", ptx.LONG])
def test_a_late_rank(on: str, driven: Driven) -> None:
    assert driven(late_rank, units=units_of(on)) == [True, None]


# A rank that has died.

#: Survivors wait as long for each other as for the dead rank; on a busy machine they need seconds.
DEATH = cases.Case(name="death", tokens=(3, 2, 4), timeout_s=6.0)


def go_on(small: bool) -> list[list[cases.Seen]]:
    """A round that the last rank does not come to, and two of the others without it."""
    case = dataclasses.replace(DEATH, small=small)
    inputs = cases.make_inputs(case)

    def rank_main(group: ThreadGroup) -> list[cases.Seen]:
        seen: list[cases.Seen] = []
        here = dataclasses.replace(case.config(group.rank), transport="launched_by_driver")
        with MoeAllToAll.create(here, group) as layer:
            if group.rank < 2:
                with pytest.raises(ExchangeTimeoutError):
                    cases.dispatch(layer, inputs[group.rank])
                layer.mask(2)
                seen = [cases.run_round(layer, inputs[group.rank]) for _ in range(2)]
            group.all_gather_object(None)
        return seen

    return run_ranks(3, rank_main)


@pytest.mark.parametrize("on", ["host", ptx.LONG])
@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
def test_ranks_go_on_without_another(small: bool, on: str, driven: Driven) -> None:
    case = dataclasses.replace(DEATH, small=small, left_out=(2,))
    units = ptx.of_configs(case.config(0)) if on == "ptx" else []
    by_rank = driven(go_on, small, units=units)
    everyones = cases.among_active(case, cases.make_inputs(case))
    assert [len(seen) for seen in by_rank] == [2, 2, 0]
    for rank, seen in enumerate(by_rank):
        expected = compare.expected_combined(case, everyones[rank], rank)
        for of_round in seen:
            compare.assert_same_bits(of_round.combined, expected, f"rank {rank}")


def replay_after_a_death(follows: bool) -> list[Any]:
    """A graph that rank 0 of 2 captures before rank 1 dies, replayed afterwards."""
    control = fake_cuda.control()

    def rank_main(group: ThreadGroup) -> list[Any]:
        with MoeAllToAll.create(config(group), group) as layer:
            if group.rank == 1:
                group.all_gather_object(None)
                return []
            hidden, ids, weights = inputs(layer, 8)
            mask, output = layer.active_ranks if follows else None, torch.empty_like(hidden)
            with capturing():
                received = layer.dispatch(hidden, ids, weights, active_ranks=mask)
                layer.combine(layer.combine_input(), received.metadata, output=output)
            layer.mask(1)
            layer.combine_input().fill_(3)
            control.replay()
            code = layer._layer.workspace.fault(0) >> 56
            has_row = (ids < 4).any(dim=1, keepdim=True)  # at rank 0
            same = torch.equal(output, torch.where(has_row, 3.0, 0.0).to(output).expand_as(output))
            said = [same, code, str(layer.failure())]
            if not follows:
                layer.mask()  # the same rank is left out; the workspace is usable again
                round_trip(layer)
            group.all_gather_object(None)
            return said

    return run_ranks(2, rank_main)[0]


@pytest.mark.parametrize("on", ["host", ptx.LONG])
@pytest.mark.parametrize("follows", [True, False])
def test_a_graph_after_a_death(follows: bool, on: str, driven: Driven) -> None:
    """One follows the mask; one without it waits for nobody, and says what to do."""
    same, code, message = driven(replay_after_a_death, follows, units=units_of(on))
    if follows:
        assert (same, code, message) == (True, 0, "None")
        return
    assert (same, code) == (False, constants()["kFaultAhead"])
    assert "took rank 1 for a rank that takes part, but mask() has left it out" in message
    assert "capture the graph again" in message


def failing(spec: str) -> tuple[list[str], dict[str, int], dict[str, int]]:
    control = fake_cuda.control()
    alone().close()  # context and module stay for the process
    before = control.live()

    def rank_main(group: ThreadGroup) -> None:
        layer = MoeAllToAll.create(config(group, top_k=5), group)
        with layer:
            round_trip(layer)

    control.fail(spec)
    outcomes = try_ranks(2, rank_main)
    control.fail()
    kinds = [f"{type(outcome).__name__}: {outcome}" for outcome in outcomes]
    del outcomes  # their tracebacks hold on to what the failed calls had
    gc.collect()
    run_ranks(2, rank_main)
    return kinds, before, control.live()


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ("cuModuleLoadData", "CUDA_ERROR_NO_BINARY_FOR_GPU", "need driver 580 or newer"),
        ("cuModuleLoadData", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "need driver 580 or newer"),
        ("cuModuleGetFunction", "CUDA_ERROR_NOT_FOUND", "need driver 580 or newer"),
        ("cuModuleLoadData", "CUDA_ERROR_OUT_OF_MEMORY", "leave more room on the GPU"),
        ("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "cuMemHostAlloc"),
    ],
)
def test_a_rank_that_cannot_start(call: str, status: str, message: str, driven: Driven) -> None:
    """An error on both ranks, nothing left behind, and the next attempt works."""
    # A rank makes another cubin of one that the driver refuses; one of these is refused too.
    spec = ",".join(f"{call}:{number}:{status}" for number in (1, 2, 3))
    outcomes, before, after = driven(failing, spec)
    assert any(message in outcome and status in outcome for outcome in outcomes), outcomes
    assert all(not outcome.startswith("NoneType") for outcome in outcomes), outcomes
    assert before == after


def refusing(cache: str) -> list[int]:
    """Cubins compiled by a start, one whose first cubin the driver refuses, and one more such."""
    os.environ["MOE_NVLINK_CACHE_DIR"] = cache
    control, compiled = fake_cuda.control(), []
    for refused in ("", *["cuModuleLoadData:1:CUDA_ERROR_INVALID_IMAGE"] * 2):
        _loaded.clear()
        control.fail(refused)
        with mock.patch.object(nvrtc, "compile_cubin", wraps=nvrtc.compile_cubin) as compiling:
            round_trip(alone())
        compiled.append(compiling.call_count)
    return compiled


def test_a_cubin_that_the_driver_refuses_is_compiled_anew_once(
    tmp_path: Path, driven: Driven
) -> None:
    """A newer NVRTC may have filled the cache, on another machine."""
    first, *others = driven(refusing, str(tmp_path / "cache"))
    assert first > 1
    assert others == [1, 0]


def failed_launch() -> list[str]:
    with alone() as layer:
        fake_cuda.control().fail("cuLaunchKernelEx:1:CUDA_ERROR_ILLEGAL_ADDRESS")
        with pytest.raises(DriverError) as caught:
            layer.dispatch(*inputs(layer, 3))
    return [caught.value.status, str(caught.value)]


def test_a_launch_that_fails(driven: Driven) -> None:
    status, message = driven(failed_launch)
    assert status == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert "CUDA_LAUNCH_BLOCKING=1" in message


def close_during_capture() -> list[int]:
    rounds = []
    for captures in (False, True):
        layer = alone()
        round_trip(layer)
        with capturing() if captures else contextlib.nullcontext():
            layer.close()
        rounds.append(layer.stats().rounds)
    return rounds


def test_close_during_a_capture_reads_nothing(driven: Driven) -> None:
    """A copy from the GPU would end the capture; the counters are lost instead."""
    assert driven(close_during_capture) == [1, 0]


@contextlib.contextmanager
def capturing_elsewhere() -> Iterator[None]:
    """Another thread captures meanwhile; what breaks its capture is raised at the end."""
    begun, done = threading.Event(), threading.Event()

    def capture() -> None:
        with capturing():
            begun.set()
            done.wait(60)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(capture)
        try:
            assert begun.wait(60)
            yield
        finally:
            done.set()
        other.result()


def drop_during_capture() -> tuple[int, int, set[str]]:
    control = fake_cuda.control()
    layer = alone()
    round_trip(layer)
    with capturing_elsewhere():
        control.fail()
        del layer
        gc.collect()
        calls = control.calls()
    second = alone()
    control.fail("cuMemFreeHost:1:CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    second.close()  # not an error: a few words stay
    return (
        control.live()["host_allocations"],
        calls["cuThreadExchangeStreamCaptureMode"],
        set(calls),
    )


def test_layers_dropped_while_somebody_captures(driven: Driven) -> None:
    left, exchanged, calls = driven(drop_during_capture)
    assert left == 1, "those whose release failed"
    assert exchanged == 6, "relaxed, and back, for the words, the reader's, and its stream"
    assert not calls & {"cuCtxSynchronize", "cuStreamSynchronize"}


def counted_without_waiting() -> tuple[list[Any], dict[str, int]]:
    control = fake_cuda.control()
    with alone(transport="on_fake_driver") as layer:
        round_trip(layer)
        whole = layer.stats()
        with capturing_elsewhere():
            control.fail()
            seen = [layer.stats(wait=False), layer.waits()]
            calls = control.calls()
    return [whole, *seen], calls


def test_counters_are_read_beside_a_capture_and_wait_for_no_launch(driven: Driven) -> None:
    """Nothing breaks the capture, and only the reader's own stream is waited for."""
    (whole, stats, waits), calls = driven(counted_without_waiting)
    assert stats == whole
    assert stats.rounds == 1
    assert waits == [list(whole.waited_ns)]
    assert calls["cuMemcpyDtoHAsync"] == 3, "two regions for stats, one for waits"
    assert calls["cuStreamSynchronize"] == 3
    assert not calls.keys() & {"cuCtxSynchronize", "cuMemHostAlloc", "cuStreamCreate"}


def refused() -> str:
    with pytest.raises((UnsupportedError, CompileError)) as caught:
        alone()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capability": "8.0"}, "compute capability 8.0, the kernels are built for 9.0, 10.0"),
        ({"devices": 0}, "GPU"),
    ],
)
def test_refused_gpus(options: dict[str, Any], message: str, driven: Driven) -> None:
    assert message in driven(refused, **options)
