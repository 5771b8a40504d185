"""A shared LM head's launches through unmodified cuda-python on the tests' own driver.

As test_cuda_launch.py: rows are CPU tensors, so torch's product is the CPU's; the kernels are the
host build's or run as PTX, launched as a GPU would be asked to, with all slots in the product and
rows split.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_nvlink_plugin import HeadConfig, HeadGroup, sharded_argmax
from moe_nvlink_plugin.errors import DriverError, ExchangeStateError, ExchangeTimeoutError
from moe_nvlink_plugin.jit.header import structs
from moe_nvlink_plugin.lm_head.kernels import HEAD
from moe_nvlink_plugin.testing import ThreadGroup, run_ranks
from tests.core.launch.test_cuda_launch import ALLOWED_IN_CAPTURE, described
from tests.support import fake_cuda
from tests.support.fake_cuda import ptx
from tests.support.fake_cuda.processes import stand_in
from tests.support.fake_cuda.transport import capturing, install
from tests.support.ranks import run_processes
from tests.support.small_head import check_argmax, check_logits, config, problem

pytestmark = [pytest.mark.usefixtures("gpu_compiler")]

#: 80000 bytes of logits a row: five parts, for a thread each 16 bytes at a time.
VOCAB, HIDDEN, CAPACITY = 40_000, 256, 8


@pytest.fixture(scope="module", params=["host", ptx.LONG])
def on(request: pytest.FixtureRequest) -> str:
    """What the driver runs of a kernel: its host build or its PTX."""
    return str(request.param)


@pytest.fixture(scope="module")
def driver(on: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Processes that are started now have the fake driver, with 132 SMs."""
    folder, units = tmp_path_factory.mktemp("driver"), []
    if on == "ptx":
        bf16, *others = (HEAD.variant(dtype=dtype) for dtype in ("bf16", "fp16", "fp32"))
        units = ptx.of(bf16, pdl=(True, False)) + ptx.of(*others)
    with pytest.MonkeyPatch.context() as patch:
        stand_in(folder, patch, units, sms=132)
        yield folder


@pytest.fixture(scope="module")
def seen(on: str, driver: Path) -> dict[str, Any]:
    """What happened in one process, by the names of the functions below."""
    (outcome,) = run_processes(1, process_main, driver, 300 if on == "host" else 30)
    return dict(outcome)


def process_main(_rank: int, _size: int, num_replays: int) -> dict[str, Any]:
    install()
    bodies = (launches, budget, ragged, late, failing)
    return {"replays": replays(num_replays)} | {body.__name__: body() for body in bodies}


def wide(rank: int = 0, size: int = 1, **values: Any) -> HeadConfig:
    usual: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "max_rows_per_rank": CAPACITY,
        "dtype": torch.bfloat16,
        "transport": "launched_by_driver",
        "full_logits": True,
    }
    return config(size, rank, **usual | values)


def alone(**values: Any) -> HeadGroup:
    (group,) = ThreadGroup.ranks(1)
    return HeadGroup.create(wide(**values), group)


# What the driver is asked.


def launches() -> dict[str, Any]:
    """Shapes of the three launches of one rank's three rows, and what their arguments say."""
    found: dict[str, Any] = {}
    with alone() as head:
        assert head._head.workspace.executor.asynchronous
        launcher, room = head._head._launches, head._head._logits
        assert room is not None
        one = problem(head.config, [3])

        def noted(name: str, launch: Any) -> Callable[[Any], None]:
            def note(args: Any) -> None:
                launch(args)
                found[name] = fake_cuda.control().last_launch()

            return note

        for name in ("gather", "argmax", "collect"):
            setattr(launcher, name, noted(name, getattr(launcher, name)))
        check_logits(head, one, row_bound=4)
        struct: Any = structs()["HeadArgs"]
        given = {name: struct.from_buffer_copy(launch.args) for name, launch in found.items()}
        shapes = {name: described(launch) for name, launch in found.items()}
        return shapes | {
            "rows": given["gather"].hidden == one.rows[0].data_ptr(),
            "splits": given["argmax"].row_splits,
            "bound": given["argmax"].geometry.row_bound,
            "in place": given["argmax"].logits == room.data_ptr(),
        }


def test_launches(seen: dict[str, Any]) -> None:
    size = ctypes.sizeof(structs()["HeadArgs"])
    assert size <= 272, "the driver copies them at every launch"
    found = seen["launches"]
    assert found["gather"] == ("moe_nvlink_head_gather", (3, 1, 1), (32, 1, 1), 1, 0, size)
    # As many rows as there may be: how many there are only the GPU knows.
    assert found["argmax"] == ("moe_nvlink_head_argmax", (20, 1, 1), (256, 1, 1), 1, 0, size)
    assert found["collect"] == ("moe_nvlink_head_collect", (3, 1, 1), (1024, 1, 1), 1, 0, size)
    assert (found["splits"], found["bound"]) == (5, 4)
    assert found["rows"]
    assert found["in place"]


def budget() -> list[tuple[Any, ...]]:
    """Of one SM, without programmatic dependent launch."""
    os.environ["MOE_NVLINK_PDL"] = "0"
    try:
        with alone(max_sms=1, max_rows_per_rank=64, vocab_size=100) as head:
            check_argmax(head, problem(head.config, [64]))
            return [described(fake_cuda.control().last_launch())]
    finally:
        del os.environ["MOE_NVLINK_PDL"]


def test_without_pdl_and_with_few_sms(seen: dict[str, Any]) -> None:
    (((name, grid, _block, pdl, *_rest)),) = seen["budget"]
    assert (name, pdl) == ("moe_nvlink_head_argmax", 0)
    assert 1 <= grid[0] <= 32, "one SM holds no more CTAs"


# What it computes.


def ragged() -> list[int]:
    """Every rank of three held to torch: split rows, slots that nobody filled, other bounds."""
    counts = [[8, 0, 3], [0, 0, 0], [1, 2, 0], [8, 8, 8]]
    shapes: list[dict[str, Any]] = [
        {"vocab_size": 3 * VOCAB + 7, "hidden_size": 8},
        {"vocab_size": 20_001, "hidden_size": 8, "dtype": torch.float32},
        {"vocab_size": 33, "hidden_size": 24, "dtype": torch.float16},
    ]

    def rank_main(group: ThreadGroup) -> int:
        splits = 0
        for values in shapes:
            with HeadGroup.create(wide(group.rank, 3, **values), group) as head:
                for seed, each in enumerate(counts):
                    one = problem(head.config, each, seed, padding=5, bias=seed % 2 == 0)
                    bound = max(1, *each)
                    check_argmax(head, one, row_bound=bound)
                    splits = max(splits, head._head._args.row_splits)
                    check_logits(head, one, row_bound=bound)
                assert head.failure() is None
        return splits

    return run_ranks(3, rank_main)


def test_every_rank_gets_torchs_ids_and_logits(seen: dict[str, Any]) -> None:
    assert seen["ragged"] == [5, 5, 5], "CTAs shared rows"


# CUDA graphs.


def replays(num_replays: int) -> dict[str, bool]:
    """Captured from the first call on. torch's product is no launch of this driver: the test puts
    logits where it would.
    """
    control = fake_cuda.control()
    with alone(vocab_size=500) as head:
        one = problem(head.config, [8])
        hidden = one.rows[0].clone()
        allocations = control.live()
        with capturing():
            control.fail()  # starts counting the calls
            ids = sharded_argmax(hidden, one.weight, group=head)
            calls = set(control.calls())
        outcome = {
            "waits": not calls <= ALLOWED_IN_CAPTURE,
            "allocates": control.live() != allocations,
            "two launches": control.captured() == 2,
        }
        rows, logits = head._head._rows.view(-1, HIDDEN), head._head._logits
        assert logits is not None
        generator = torch.Generator().manual_seed(1)
        same = True
        for _ in range(num_replays):
            hidden.copy_(torch.randn(hidden.shape, generator=generator))
            put = torch.randn((8, 500), generator=generator).to(torch.bfloat16)
            logits[: put.numel()].copy_(put.view(-1))
            control.replay()
            same = same and torch.equal(ids, put.float().argmax(1))
            same = same and torch.equal(rows[:8], hidden)
        outcome["same"] = same
        outcome["rounds"] = head.stats().rounds == num_replays
    control.replay()  # the graph outlives its group: memory stays mapped
    control.forget_capture()
    return outcome


def test_capture_from_the_first_call_and_replays(seen: dict[str, Any]) -> None:
    assert seen["replays"] == {
        "waits": False,
        "allocates": False,
        "two launches": True,
        "same": True,
        "rounds": True,
    }


# Bad days.


def late() -> list[Any]:
    """Rank 1 stays away."""

    def rank_main(group: ThreadGroup) -> Any:
        values = {"timeout_s": 0.3, "vocab_size": 100}
        with HeadGroup.create(wide(group.rank, 2, **values), group) as head:
            if group.rank == 1:
                group.all_gather_object(None)
                return None
            one = problem(head.config, [2, 2])
            assert head.failure() is None
            with pytest.raises(ExchangeTimeoutError, match=r"0.3 s in head gather .* rank\(s\) 1"):
                check_argmax(head, one)
            with pytest.raises(ExchangeTimeoutError):
                head.synchronize()
            with pytest.raises(ExchangeStateError, match="unusable since"):
                check_logits(head, one)
            group.all_gather_object(None)
            failure = head.failure()
            assert isinstance(failure, ExchangeTimeoutError)
            return failure.ranks

    return run_ranks(2, rank_main)


def test_a_late_rank(seen: dict[str, Any]) -> None:
    assert seen["late"] == [(1,), None]


def failing() -> str:
    with alone(vocab_size=100) as head:
        one = problem(head.config, [2])
        fake_cuda.control().fail("cuLaunchKernelEx:1:CUDA_ERROR_ILLEGAL_ADDRESS")
        with pytest.raises(DriverError) as caught:
            check_argmax(head, one)
        fake_cuda.control().fail()
        return caught.value.status


def test_a_launch_that_fails(seen: dict[str, Any]) -> None:
    assert seen["failing"] == "CUDA_ERROR_ILLEGAL_ADDRESS"


# Between processes, over the nvlink transport.


def process_rounds(rank: int, size: int) -> tuple[int, int, int]:
    """How many rounds, and of the last one's argmax the CTAs and whether it may start early."""
    install()
    values = {"transport": "on_fake_driver", "vocab_size": 20_001, "hidden_size": 8}
    with HeadGroup.create(wide(rank, size, **values), dist.group.WORLD) as head:
        for seed in range(6):
            one = problem(head.config, [(seed + 3 * each) % 9 for each in range(size)], seed)
            check_logits(head, one)
            check_argmax(head, one)
        _name, grid, _block, pdl, *_rest = described(fake_cuda.control().last_launch())
        return head.stats().rounds, grid[0], pdl


def test_processes(driver: Path, tmp_path: Path) -> None:
    # 16 rows, two parts of each.
    assert run_processes(2, process_rounds, tmp_path) == [(12, 32, 1)] * 2


def test_processes_on_one_gpu(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets its part of the SMs."""
    monkeypatch.setenv("MOE_NVLINK_ALLOW_SHARED_GPU", "1")
    monkeypatch.setenv("FAKE_CUDA_SHARED_UUID", "1")
    monkeypatch.setenv("FAKE_CUDA_SMS", "10")
    assert run_processes(2, process_rounds, tmp_path) == [(12, 5, 0)] * 2
