"""What benchmarks/moe_comm does on GPUs, on CPU threads and with a stand-in of FlashInfer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.moe_comm import accounting, cuda_clock, emulated, emulated_flashinfer, timing
from benchmarks.moe_comm import flashinfer_api as api_module
from benchmarks.moe_comm.backends import WrongResult, base
from benchmarks.moe_comm.backends.all_to_all import AllToAllFull
from benchmarks.moe_comm.backends.flashinfer import FlashInfer
from benchmarks.moe_comm.backends.nccl_gather import NcclGather
from benchmarks.moe_comm.options import OptionError, Options
from benchmarks.moe_comm.routers import tokens_of
from tests.unit import fake_flashinfer

SMALL = Options(
    backends=("moe_nvlink",),
    profile="custom",
    hidden_size=64,
    top_k=3,
    num_experts=10,
    ep_size=4,
    batches=(3,),
    iters=4,
    warmup=1,
    device="rehearsal",
    emulate_ranks=True,
)
WITH_PEER = dataclasses.replace(SMALL, backends=("moe_nvlink", "flashinfer"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The stand-in as if it had been installed, where load() looks for its parts."""
    package = types.ModuleType("flashinfer")
    for name in ("comm", "comm.trtllm_moe_alltoall", "comm.mnnvl"):
        monkeypatch.setitem(sys.modules, f"flashinfer.{name}", fake_flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(fake_flashinfer, "strict", False)
    return api_module.load()


# Ours.


def test_rows_of_emulated_ranks() -> None:
    shown: list[Any] = []
    options = dataclasses.replace(SMALL, batches=(1, 3), cuda_graph=True, kernel_breakdown=True)
    rows = emulated.run(options, show=shown.append)
    assert [row["tokens"] for row in rows] == [1, 3]
    assert shown == [[row] for row in rows]
    for row in rows:
        assert row["launch"] == "graph replay"
        for phase in ("dispatch", "combine", "both"):
            assert row[phase]["median_us"] > 0
            assert row["plain_launches"][phase]["median_us"] > 0
            assert row[phase]["of_ceiling"] > 0
        assert row["kernels"] == {}, "a CPU has no kernels"
    traffic = accounting.traffic(options, 3)
    first = rows[1]["dispatch"]
    moved = traffic.mean_put_bytes("dispatch")
    assert first["copied_gb_s"] == pytest.approx(moved / first["median_us"] / 1e3)


def test_a_capacity_larger_than_the_batch() -> None:
    (row,) = emulated.run(dataclasses.replace(SMALL, max_tokens=7))
    assert row["checked"]
    assert row["launch"] == "plain launches"
    assert "plain_launches" not in row


@pytest.mark.parametrize("formats", [("mxfp8", "bf16"), ("nvfp4", "nvfp4"), ("fp8_tensor", "bf16")])
def test_quantised_rows_are_checked_bit_for_bit(formats: tuple[str, str]) -> None:
    recipe, combine = formats
    options = dataclasses.replace(SMALL, recipe=recipe, combine=combine, ep_size=2)
    with contextlib.closing(emulated.make_backend(options)) as backend:
        for post_quant in (False, True):
            layer = emulated.Layer(options, 3, backend, post_quant=post_quant)
            layer.check()


def test_a_wrong_row_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulated.Layer._send_back

    def one_wrong(layer: Any, rank: int, filled: torch.Tensor, rows: torch.Tensor) -> None:
        if rank == 1:
            rows[0, 5] += 1
        right(layer, rank, filled, rows)

    monkeypatch.setattr(emulated.Layer, "_send_back", one_wrong)
    with pytest.raises(WrongResult, match=r"moe_nvlink, 3 tokens per rank, rank \d: .* wrong"):
        emulated.run(SMALL)


def test_what_went_wrong_while_it_was_timed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = cuda_clock.Clock("cpu", 2, 0)
    with contextlib.closing(emulated.make_backend(SMALL)) as backend:

        def spoiled(bodies: Any, before: Any = None) -> Any:
            monkeypatch.setattr(emulated.Layer, "combine", lambda layer: None, raising=False)
            monkeypatch.setattr(emulated.Layer, "check", failing)
            return {key: [1.0, 2.0] for key in bodies}

        def failing(layer: Any) -> None:
            raise WrongResult("later")

        monkeypatch.setattr(clock, "flushed", spoiled)
        with pytest.raises(WrongResult, match="later"):
            emulated.measure(SMALL, 3, clock, backend)


def test_a_graph_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    options, clock = dataclasses.replace(SMALL, cuda_graph=True), cuda_clock.Clock("cpu", 2, 0)
    monkeypatch.setattr(clock, "replay", lambda body: lambda: None)
    with (
        contextlib.closing(emulated.make_backend(options)) as backend,
        pytest.raises(WrongResult, match="moe_nvlink, 3 tokens per rank, rank 0: combined"),
    ):
        emulated.measure(options, 3, clock, backend)


def test_backends_that_need_processes_are_left_out_or_refused() -> None:
    left_out: list[str] = []
    options = dataclasses.replace(SMALL, backends=("moe_nvlink", "nccl_gather", "flashinfer"))
    assert [row["backend"] for row in emulated.run(options, not_measured=left_out)] == [
        "moe_nvlink"
    ]
    assert [text.split(":")[0] for text in left_out] == ["nccl_gather", "flashinfer"]
    with pytest.raises(OptionError, match="nccl_gather cannot run here: needs a process"):
        emulated.run(options, explicit=True)


def test_a_batch_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = emulated.bytes_needed(SMALL, 3)
    with contextlib.closing(emulated.make_backend(SMALL)) as backend:
        layer = emulated.Layer(SMALL, 3, backend)
    workspace = layer.ranks.memory.numel()
    copied = emulated.Copy(accounting.traffic(SMALL, 3), "cpu")._source.numel() * 2
    assert 0 <= workspace + copied + 3 * 4 * 3 * 64 * 2 - needed < 4 * 4096, "rounded up to pages"
    on_gpu = dataclasses.replace(SMALL, device="cuda")
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2 * free))
        reason = emulated.too_large(on_gpu, 3)
        assert (reason is None) == fits
    assert reason is not None
    assert "3 tokens on 4 emulated ranks need" in reason


# The clock.


def test_bodies_take_turns_and_what_comes_before_is_not_timed() -> None:
    clock = cuda_clock.Clock("cpu", 4, 2)
    calls: list[str] = []
    bodies = {name: functools.partial(calls.append, name) for name in "ab"}
    taken = clock.flushed(bodies, {"b": lambda: calls.append("before b")})
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 4, "b": 4}
    assert calls[:6] == ["a", "before b", "b", "before b", "b", "a"]
    waits = cuda_clock.Clock("cpu", 2, 0).flushed(
        {"x": lambda: None}, {"x": lambda: time.sleep(0.05)}
    )
    assert min(waits["x"]) < 50_000, "the wait before it is not in it"


def test_kernels_by_their_short_names() -> None:
    seen = [
        ("void fill<float, (int)4>(float*)", 9.0),
        ("void ns::(anonymous namespace)::combine_kernel<T<2>, 8>(Args const, int)", 3.0),
        ("void ns::(anonymous namespace)::combine_kernel<T<2>, 8>(Args const, int)", 5.0),
        ("moe_nvlink_emulated_dispatch", 7.0),
    ]
    found = cuda_clock.breakdown(seen, {seen[0][0]}, rounds=2)
    assert found == {
        "moe_nvlink_emulated_dispatch": {"median_us": 7.0, "per_round": 0.5},
        "combine_kernel": {"median_us": 4.0, "per_round": 1.0},
    }


# FlashInfer.


def test_the_recorded_interface_is_that_of_an_installed_release() -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed; its interface was read from 0.7.2.post1")
    api_module.load()


def test_another_interface_is_refused_by_name(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(tokens: Any, payloads: Any) -> None: ...

    monkeypatch.setattr(fake_flashinfer, "moe_a2a_dispatch", renamed)
    monkeypatch.delattr(fake_flashinfer.MoeAlltoAll, "combine")
    with pytest.raises(api_module.DriftError) as raised:
        api_module.load()
    text = str(raised.value)
    assert "not the one this adapter was read from, 0.7.2.post1" in text
    assert "moe_a2a_dispatch: missing a required argument: 'tokens'" in text
    assert "flashinfer.comm has no MoeAlltoAll.combine" in text


def test_a_new_parameter_without_default_is_refused(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fake_flashinfer.moe_a2a_initialize

    def more(
        workspace: Any, ep_rank: int, ep_size: int, max_num_tokens: int, window: int
    ) -> torch.Tensor:
        return right(workspace, ep_rank, ep_size, max_num_tokens)

    monkeypatch.setattr(fake_flashinfer, "moe_a2a_initialize", more)
    with pytest.raises(api_module.DriftError, match="missing a required argument: 'window'"):
        api_module.load()


def test_what_flashinfer_cannot_do(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.common.is_installed", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    good = dataclasses.replace(WITH_PEER, device="cuda")
    assert emulated.unavailable("flashinfer", good) is None
    for changes, said in (
        ({"ep_size": 33, "num_experts": 66}, "33 emulated ranks need a stream each"),
        ({"top_k": 23, "num_experts": 64}, "top_k=23, and its kernels take at most 22"),
        ({"combine": "fp8_block", "hidden_size": 128}, "it has no combine in fp8_block"),
        ({"device": "rehearsal"}, "need a GPU"),
    ):
        reason = emulated.unavailable("flashinfer", dataclasses.replace(good, **changes))
        assert reason is not None
        assert said in reason


def test_flashinfer_beside_ours(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated_flashinfer, "unavailable", lambda options: None)
    monkeypatch.setattr(emulated_flashinfer, "probe", lambda options: None)
    monkeypatch.setattr(api_module, "version", lambda: "0.0 (a stand-in)")
    ours, theirs = emulated.run(WITH_PEER, explicit=True)
    assert (ours["backend"], theirs["backend"]) == ("moe_nvlink", "flashinfer")
    assert "flashinfer 0.0 (a stand-in); nothing; marks empty slots" in theirs["given"]
    for phase in ("dispatch", "combine", "both"):
        median = theirs[phase]["median_us"] / ours[phase]["median_us"]
        assert theirs["ratio_to_ours"][phase]["median"] == pytest.approx(median)
        assert theirs[phase]["ceiling_us"] == ours[phase]["ceiling_us"]


def test_a_trial_that_fails_leaves_it_out(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'RuntimeError: trap' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(emulated_flashinfer, "unavailable", lambda options: None)
    monkeypatch.setattr(sys, "executable", str(broken))
    left_out: list[str] = []
    (row,) = emulated.run(WITH_PEER, not_measured=left_out)
    assert row["backend"] == "moe_nvlink"
    assert left_out == [
        "flashinfer: a trial of (3,) tokens ended with status 3: RuntimeError: trap"
    ]
    broken.write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(emulated_flashinfer, "PROBE_LIMIT_S", 0.2)
    assert "did not end within" in str(emulated_flashinfer.probe(WITH_PEER))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_the_adapter_moves_the_right_rows(fake: types.SimpleNamespace, recipe: str) -> None:
    options = dataclasses.replace(WITH_PEER, recipe=recipe)
    layer = emulated_flashinfer.Layer(options, 3, emulated.make_inputs(options, 3), fake)
    layer.check()
    layer.both()
    layer.check()
    assert ("rows quantised before" in layer.given) == (recipe != "bf16")


def test_a_row_that_the_peer_loses_is_found(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = emulated_flashinfer.Layer(WITH_PEER, 3, emulated.make_inputs(WITH_PEER, 3), fake)
    right = layer.dispatch

    def losing() -> None:
        right()
        rows = layer.ranks.received[2][0]
        ids = layer.ranks.received[2][1]
        source, slot, _k = (ids >= 0).nonzero()[0].tolist()
        rows[source, slot] = 0

    layer.dispatch = losing
    with pytest.raises(WrongResult, match="flashinfer, 3 tokens per rank, rank"):
        layer.check()


def test_combine_whose_flags_are_set_before_waits_for_nobody(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_flashinfer, "strict", True)
    layer = emulated_flashinfer.Layer(WITH_PEER, 3, emulated.make_inputs(WITH_PEER, 3), fake)
    layer.dispatch()
    with pytest.raises(TimeoutError, match="rank 0 would wait"):
        layer.combine()
    layer = emulated_flashinfer.Layer(WITH_PEER, 3, emulated.make_inputs(WITH_PEER, 3), fake)
    layer.spare_waiting()
    layer.check()
    layer.before["both"]()
    layer.both()
    layer.check()
    assert "combine's wait for its peers" in layer.given


def test_which_ranks_surely_run_together() -> None:
    eight = dataclasses.replace(SMALL, ep_size=8, num_experts=16)
    assert emulated_flashinfer.surely_resident(eight, 16, num_sms=132)
    assert not emulated_flashinfer.surely_resident(eight, 17, num_sms=132)


def test_branches_begin_and_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for the beginning before any rank's work, and the end waits for all of them."""
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} after {other.name}")

    here, current = Stream("here"), ["here"]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "stream", on)
    verbs: list[Callable[[int], None]] = [
        lambda rank: log.append(f"dispatch {rank} on {current[-1]}"),
        lambda rank: log.append(f"combine {rank} on {current[-1]}"),
    ]
    emulated_flashinfer.forked([Stream("s0"), Stream("s1")], *verbs)()
    assert log == [
        *("s0 after here", "s1 after here"),
        *("dispatch 0 on s0", "combine 0 on s0", "dispatch 1 on s1", "combine 1 on s1"),
        *("here after s0", "here after s1"),
    ]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_flashinfer_by_processes(fake: types.SimpleNamespace, recipe: str) -> None:
    """Its class and workspace, with threads in the place of processes."""
    options = dataclasses.replace(
        WITH_PEER, recipe=recipe, hidden_size=128, ep_size=2, batches=(2, 3)
    )
    traffic, barrier = accounting.traffic(options, 3), threading.Barrier(2, timeout=20)

    def rank_main(rank: int) -> None:
        mine = tokens_of(options, 3, rank)
        context = base.Context(options, rank, mine, barrier, torch.device("cpu"), traffic)
        side = FlashInfer(context, fake)
        for _ in range(2):
            side.check()
            side.dispatch()
            side.combine()
        side.close()

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(rank_main, rank) for rank in range(2)]:
            done.result(timeout=30)


def test_nccl_says_what_it_lacks() -> None:
    assert "CUDA tensors" in str(NcclGather.unavailable(SMALL))
    if not torch.distributed.is_nccl_available():
        on_gpu = dataclasses.replace(SMALL, device="cuda", emulate_ranks=False)
        assert "built without NCCL" in str(NcclGather.unavailable(on_gpu))


def test_what_no_graph_can_hold_is_not_captured() -> None:
    """all_to_all_full tells its split sizes to the host."""

    class Side:
        def dispatch(self) -> None: ...

        def combine(self) -> None: ...

    class FullSide(Side):
        capturable = AllToAllFull.capturable

    prepared: list[Any] = []
    clock: Any = types.SimpleNamespace(prepare=prepared.append)
    timing._bodies(FullSide(), clock)
    assert prepared == []
    timing._bodies(Side(), clock)
    assert len(prepared) == 3
