"""What benchmarks/moe_comm does on GPUs, on CPU threads and with a stand-in of FlashInfer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.moe_comm import accounting, cuda_clock, emulated, emulated_flashinfer, rows
from benchmarks.moe_comm import flashinfer_api as api_module
from benchmarks.moe_comm.backends import Context, WrongResult
from benchmarks.moe_comm.cuda_clock import SPAN, Seen
from benchmarks.moe_comm.options import OptionError, Options
from benchmarks.moe_comm.peers import FlashInfer
from benchmarks.moe_comm.routers import tokens_of
from moe_nvlink_plugin.integration.common.names import Call, Fields, Touched
from moe_nvlink_plugin.jit import host
from tests.integration.common.framework_source import Source
from tests.integration.common.framework_wheels import left_out
from tests.integration.flashinfer import fake_flashinfer
from tests.support import emulated_text, fake_cuda, flashinfer_wheel
from tests.support.emulated import FLAGS, CudaBackend
from tests.support.ranks import run_processes
from tests.support.wheels import FetchError

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


@pytest.fixture
def beside(fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in runs on this CPU, too, as far as emulated.run looks."""
    monkeypatch.setattr(emulated_flashinfer, "unavailable", lambda options: None)
    monkeypatch.setattr(emulated_flashinfer, "probe", lambda options: None)
    monkeypatch.setattr(api_module, "version", lambda: "0.0 (a stand-in)")


# Ours.


@pytest.mark.long
def test_rows_of_emulated_ranks() -> None:
    shown: list[Any] = []
    options = dataclasses.replace(SMALL, batches=(1, 3), cuda_graph=True, kernel_breakdown=True)
    found = emulated.run(options, show=shown.append)
    assert [row["tokens"] for row in found] == [1, 3]
    assert shown == [[row] for row in found]
    for row in found:
        assert row["launch"] == emulated.GRAPH
        for phase in ("dispatch", "combine", "both"):
            assert row[phase]["median_us"] > 0
            assert row[phase]["of_ceiling"] > 0
        assert row["kernels"] == {}, "a CPU has no kernels"
    traffic = accounting.traffic(options, 3)
    first = found[1]["dispatch"]
    moved = traffic.mean_put_bytes("dispatch")
    assert first["copied_gb_s"] == pytest.approx(moved / first["median_us"] / 1e3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "combine"), [("mxfp8", "bf16"), ("nvfp4", "nvfp4"), ("fp8_tensor", "bf16")]
)
def test_quantised_rows_are_checked_bit_for_bit(recipe: str, combine: str) -> None:
    options = dataclasses.replace(SMALL, recipe=recipe, combine=combine, ep_size=2)
    with contextlib.closing(emulated.make_backend(options)) as backend:
        for post_quant in (False, True):
            layer = emulated.Layer(options, 3, backend, post_quant=post_quant)
            layer.check()


@pytest.mark.long
def test_a_wrong_row_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulated.Layer._send_back

    def one_wrong(layer: Any, rank: int, filled: torch.Tensor, rows: torch.Tensor) -> None:
        if rank == 1:
            rows[0, 5] += 1
        right(layer, rank, filled, rows)

    monkeypatch.setattr(emulated.Layer, "_send_back", one_wrong)
    with pytest.raises(WrongResult, match=r"moe_nvlink, 3 tokens per rank, rank \d: .* wrong"):
        emulated.run(SMALL)


@pytest.mark.long
def test_what_went_wrong_while_it_was_timed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = cuda_clock.Clock("cpu", 2, 0)
    with contextlib.closing(emulated.make_backend(SMALL)) as backend:

        def spoiled(bodies: Any, before: Any = None) -> Any:
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


def test_a_batch_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulated.make_inputs

    def full(options: Options, tokens: int) -> Any:
        if tokens == 3:
            raise torch.cuda.OutOfMemoryError("Tried to allocate 200 GiB")
        return right(options, tokens)

    monkeypatch.setattr(emulated, "make_inputs", full)
    left_out: list[str] = []
    options = dataclasses.replace(SMALL, batches=(1, 3, 4))
    assert [row["tokens"] for row in emulated.run(options, not_measured=left_out)] == [1, 4]
    (said,) = left_out
    assert said.startswith("3 tokens on 4 emulated ranks: Tried to allocate 200 GiB; take fewer")


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


LONG_NAME = "void ns::(anonymous namespace)::combine_kernel<T<2>, 8>(Args const, int)"


class Profiler:
    """What torch.profiler would see of a GPU whose kernels of one body overlap."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.now = 100.0

    def ran(self, *kernels: tuple[str, float, float]) -> None:
        """Kernels that start and end so many microseconds from now."""
        self.seen += [Seen(name, self.now + start, self.now + end) for name, start, end in kernels]
        self.now = max(one.end_us for one in self.seen) + 50  # the host was slow

    @contextlib.contextmanager
    def __call__(self) -> Iterator[list[Seen]]:
        yield self.seen
        self.seen.reverse()  # nobody promises an order


def peer_layer(api: types.SimpleNamespace, **changes: Any) -> emulated_flashinfer.Layer:
    options = dataclasses.replace(WITH_PEER, **changes)
    return emulated_flashinfer.Layer(options, 3, emulated.make_inputs(options, 3), api)


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> tuple[cuda_clock.Clock, Profiler]:
    """A clock of a GPU, which is not there."""
    clock, profiler = cuda_clock.Clock("cpu", 2, 0), Profiler()
    monkeypatch.setattr(clock, "on_gpu", True)
    monkeypatch.setattr(clock, "flush", lambda: profiler.ran(("fill", 0, 60)))
    monkeypatch.setattr(cuda_clock, "_profiled", profiler)
    return clock, profiler


def test_kernels_of_a_body_and_the_time_they_span(
    profiled: tuple[cuda_clock.Clock, Profiler],
) -> None:
    """Two ranks of a kernel that waits; the late one's time is nobody's waiting."""
    clock, profiler = profiled
    late = iter(range(cuda_clock.PROFILED_ROUNDS))

    def body() -> None:
        wait = float(next(late))
        both_end = 7 + wait
        profiler.ran(("prepare", 0, 1), (LONG_NAME, 2, both_end), (LONG_NAME, 2 + wait, both_end))

    found = clock.kernels(body, lambda: profiler.ran((LONG_NAME, 0, 1000)))
    assert list(found) == [SPAN, "combine_kernel", "prepare"], "what comes before is not in it"
    # Both ranks of 20 rounds, the first one's from 5 to 24 us.
    assert found["combine_kernel"] == {"median_us": 5.0, "least_us": 5.0, "per_round": 2.0}
    assert found["prepare"] == {"median_us": 1.0, "least_us": 1.0, "per_round": 1.0}
    assert found[SPAN] == {"median_us": 16.5, "q25_us": 11.25, "q75_us": 21.75, "p95_us": 25.0}


def test_kernels_of_whom_nobody_knows_are_not_told(
    profiled: tuple[cuda_clock.Clock, Profiler],
) -> None:
    clock, profiler = profiled
    with pytest.raises(ValueError, match="saw 41 flushes and 0 bodies of 20"):
        clock.kernels(lambda: None)
    profiler.seen.clear()
    bodies = iter(range(cuda_clock.PROFILED_ROUNDS))

    def body() -> None:
        if next(bodies) == 3:
            profiler.seen.pop()
        profiler.ran(("combine", 0, 1))

    with pytest.raises(ValueError, match="saw 40 flushes"):
        clock.kernels(body)


# Ours, launched as a peer is.


@pytest.mark.long
def test_ranks_on_branches_launch_what_the_product_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product's kernels by its launcher, on the stand-in driver; 4 ranks on 8 SMs."""
    kernels = host.build(emulated_text.stand_in_source(count=8), FLAGS)
    library = fake_cuda.build(tmp_path)
    for name, value in fake_cuda.environment(library, kernels, sms=8).items():
        monkeypatch.setenv(name, value)
    (launches,) = run_processes(1, _branches_on_stand_in, tmp_path)
    # The CTAs of one rank, which has 2 SMs: 16 of 128 threads on each at most, fewer by registers.
    # With 3 tokens 9 rows go back and 3 are added, and a CTA signals: of 256 threads fewer fit.
    most = {(40, False): 2 * 16, (3, False): 2 * 6, (3, True): 2 * 6}
    assert launches.keys() == most.keys()
    for (tokens, early), (name, (ctas, *_), pdl) in launches.items():
        assert name == ("moe_nvlink_combine" if tokens == 40 else "moe_nvlink_small_combine")
        assert not pdl, f"early ({early}), it would keep out a dispatch"
        assert ctas % 2 == 0
        assert 4 <= ctas <= most[tokens, early]


class OfAGpu(CudaBackend):
    """Has no kernels of its own, which the product's do without."""

    def __init__(self) -> None:
        self.device, self.ctas = torch.device("cpu"), 1


def _branches_on_stand_in(_rank: int, _size: int) -> dict[tuple[int, bool], Any]:
    launches = {}
    for tokens, pdl in ((3, False), (3, True), (40, False)):
        options = dataclasses.replace(SMALL, hidden_size=1024, batches=(tokens,), pdl=pdl)
        layer = emulated.Branches(options, tokens, OfAGpu())
        layer.check()
        layer.both()
        layer.check()
        last = fake_cuda.control().last_launch()
        launches[tokens, pdl] = (last.name.decode(), list(last.grid), bool(last.pdl))
    return launches


ALL_THREE = ["moe_nvlink_one_launch", "moe_nvlink", "flashinfer"]


def test_a_ratio_is_of_what_was_launched_alike(beside: None) -> None:
    options = dataclasses.replace(WITH_PEER, cuda_graph=True)
    failed: list[str] = []
    apart, ours, theirs = emulated.run(options, explicit=True, failed=failed)
    assert failed == []
    assert [row["backend"] for row in (apart, ours, theirs)] == ALL_THREE
    assert ours["launch"] == theirs["launch"] == emulated.BRANCHES
    assert apart["launch"] == emulated.GRAPH
    assert "ratio_to_ours" not in apart
    for phase in rows.PHASES:
        median = theirs[phase]["median_us"] / ours[phase]["median_us"]
        assert theirs["ratio_to_ours"][phase]["median"] == pytest.approx(median)
        assert theirs[phase]["ceiling_us"] == ours[phase]["ceiling_us"]
    assert "flashinfer 0.0 (a stand-in); nothing; marks empty slots" in theirs["given"]


@pytest.mark.parametrize(
    ("holder", "method", "call", "first_batch"),
    [
        # Ours on branches does not run: its ranks do not run beside each other, say.
        (emulated.Branches, "check", 1, ["moe_nvlink"]),
        (emulated_flashinfer.Layer, "__init__", 1, ["moe_nvlink"]),
        (emulated_flashinfer.Layer, "check", 2, ["moe_nvlink"]),  # after it was timed
        (emulated_flashinfer.Layer, "__init__", 2, ALL_THREE),
    ],
)
def test_ours_goes_on_alone_where_a_peer_fails(
    beside: None,
    monkeypatch: pytest.MonkeyPatch,
    holder: type,
    method: str,
    call: int,
    first_batch: list[str],
) -> None:
    right, calls = getattr(holder, method), []

    def failing(*args: Any, **named: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("out of memory")
        right(*args, **named)

    monkeypatch.setattr(holder, method, failing)
    failed: list[str] = []
    left_out: list[str] = []
    options = dataclasses.replace(WITH_PEER, batches=(1, 3, 4))
    found = emulated.run(options, failed=failed, not_measured=left_out)
    assert [row["backend"] for row in found] == [*first_batch, "moe_nvlink", "moe_nvlink"]
    assert {row["launch"] for row in found[len(first_batch) :]} == {emulated.PLAIN}
    since = 3 if first_batch == ALL_THREE else 1
    said = f"peers, from {since} tokens on: RuntimeError: out of memory"
    assert failed == left_out == [said], "once: the peer is not tried again"
    assert len(calls) == call


# FlashInfer.


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The release that the adapter was read from; nothing of it is installed."""
    try:
        return flashinfer_wheel.folder()
    except FetchError as error:
        left_out(error)


def _loaded(_rank: int, _size: int) -> str:
    with flashinfer_wheel.importable():
        return str(api_module.load().version)


@pytest.mark.long
def test_the_release_that_was_read_has_the_names(wheel: Path, tmp_path: Path) -> None:
    """Imported in a process of its own: no other test may find it."""
    found = run_processes(1, _loaded, tmp_path, meets=False)
    assert found == [api_module.READ_FROM]


def _record(monkeypatch: pytest.MonkeyPatch) -> list[Touched]:
    """Return a list that gets each call of the stand-in, as it would be made to FlashInfer."""
    made: list[Touched] = []

    def noted(module: str, name: str, call: Any, bound: int) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            how = Call(len(given) - bound, tuple(named))
            made.append(Touched(module, name, "use", calls=(how,)))
            return call(*given, **named)

        return run

    for module, names in api_module.CALLS.items():
        where = f"flashinfer.comm{module}"
        for name in names:
            one = getattr(fake_flashinfer, name)
            if not isinstance(one, type):
                monkeypatch.setattr(fake_flashinfer, name, noted(where, name, one, 0))
                continue
            for method, call in [*vars(one).items()]:
                if isinstance(call, types.FunctionType):
                    called = f"{name}.{method}".removesuffix(".__init__")
                    monkeypatch.setattr(one, method, noted(where, called, call, 1))
    return made


def test_the_release_that_was_read_takes_our_calls(
    wheel: Path, fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of both adapters, as the stand-in gets them, binds to the wheel's parameters."""
    made = _record(monkeypatch)
    api = api_module.load()
    layer = peer_layer(api)
    layer.spare_waiting()
    layer.before["both"]()
    layer.both()
    layer.check()
    check_by_processes(api, "fp8_block")
    of = {one.name.partition(".")[0] for one in made}
    assert of == {name for names in api_module.CALLS.values() for name in names}
    source = Source(wheel, flashinfer_wheel.VERSION, "flashinfer")
    calls = set(made)
    assert [complaint for one in calls if (complaint := source.complaints(one))] == []
    # A dataclass, whose parameters are its fields.
    (config,) = (one for one in calls if one.name == "MnnvlConfig")
    fields = Fields(config.module, config.name, config.calls[0].keywords)
    assert fields.names == ("comm_backend",)
    assert source.missing_fields(fields) == []
    combine = next(one for one in calls if one.name == "moe_a2a_combine")
    (call,) = combine.calls
    other = combine._replace(calls=(call._replace(keywords=(*call.keywords, "is_gone")),))
    assert "is_gone" in source.complaints(other)


def test_ours_is_measured_where_flashinfer_does_not_load(
    beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name, it is missed; ours is there."""
    monkeypatch.undo()
    monkeypatch.setattr(emulated_flashinfer, "unavailable", lambda options: None)
    monkeypatch.setattr("benchmarks.common.is_installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # its import fails
    for explicit in (True, False):
        failed: list[str] = []
        left_out: list[str] = []
        (row,) = emulated.run(WITH_PEER, explicit=explicit, failed=failed, not_measured=left_out)
        assert (row["backend"], row["launch"]) == ("moe_nvlink", emulated.PLAIN)
        assert "cannot be called as 0.7.2.post1" in left_out[0]
        assert failed == (left_out if explicit else [])
    with pytest.raises(OptionError, match="cannot be called as"):
        emulated.run(dataclasses.replace(WITH_PEER, backends=("flashinfer",)))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_the_adapter_moves_the_right_rows(fake: types.SimpleNamespace, recipe: str) -> None:
    layer = peer_layer(fake, recipe=recipe)
    layer.check()
    layer.both()
    layer.check()
    assert ("rows quantised before" in layer.given) == (recipe != "bf16")


def test_a_row_that_the_peer_loses_is_found(fake: types.SimpleNamespace) -> None:
    layer = peer_layer(fake)
    right = layer.dispatch

    def losing() -> None:
        right()
        rows, ids, *_ = layer.received[2]
        source, slot, _k = (ids >= 0).nonzero()[0].tolist()
        rows[source, slot] = 0

    layer.dispatch = losing
    with pytest.raises(WrongResult, match="flashinfer, 3 tokens per rank, rank"):
        layer.check()


def test_combine_whose_flags_are_set_before_waits_for_nobody(
    fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_flashinfer, "strict", True)
    layer = peer_layer(fake)
    layer.dispatch()
    with pytest.raises(TimeoutError, match="rank 0 would wait"):
        layer.combine()
    layer = peer_layer(fake)
    layer.spare_waiting()
    layer.check()
    layer.before["both"]()
    layer.both()
    layer.check()
    assert "combine's wait for its peers" in layer.given


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
    cuda_clock.forked([Stream("s0"), Stream("s1")], *verbs)()
    assert log == [
        *("s0 after here", "s1 after here"),
        *("dispatch 0 on s0", "combine 0 on s0", "dispatch 1 on s1", "combine 1 on s1"),
        *("here after s0", "here after s1"),
    ]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_flashinfer_by_processes(fake: types.SimpleNamespace, recipe: str) -> None:
    check_by_processes(fake, recipe)


def check_by_processes(fake: types.SimpleNamespace, recipe: str) -> None:
    """Its class and workspace, with threads in the place of processes."""
    options = dataclasses.replace(
        WITH_PEER, recipe=recipe, hidden_size=128, ep_size=2, batches=(2, 3)
    )
    barrier = threading.Barrier(2, timeout=20)

    def rank_main(rank: int) -> None:
        mine = tokens_of(options, 3, rank)
        context = Context(options, rank, mine, barrier, torch.device("cpu"))
        side = FlashInfer(context, fake)
        for _ in range(2):
            side.check()
            side.dispatch()
            side.combine()
        side.close()

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(rank_main, rank) for rank in range(2)]:
            done.result(timeout=30)
