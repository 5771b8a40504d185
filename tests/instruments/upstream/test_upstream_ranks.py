"""What fits vLLM's tests of layers to CPUs, without vLLM's files."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.upstream import settings
from tests.upstream.adapt import modular_kernels, moe_layer
from tests.upstream.run import HERE

pytestmark = pytest.mark.long

# Ranks, of a launcher that starts them as vLLM's do.

LAUNCHER = """
import os, time, torch
from torch.multiprocessing import spawn
from moe_nvlink_upstream.adapt import ranks

def launch(worker, *words):
    store = f"file://{os.getcwd()}/store-{worker.__name__}"
    spawn(begin, args=(2, 2, 0, store, worker, *words), nprocs=2, join=True)

def begin(local_rank, world_size, world_local_size, node_rank, store, worker, *words):
    rank = node_rank * world_local_size + local_rank
    torch.set_default_device(torch.device("cuda", local_rank))
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store, rank=rank, world_size=world_size,
        device_id=torch.device("cuda", local_rank))
    worker(rank, *words)

def add(rank, path):
    total = torch.tensor([rank + 1])
    torch.distributed.all_reduce(total)
    open(f"{path}{rank}", "w").write(f"{int(total)} {total.device} {os.environ['SAID']}")
    memory = f"/dev/shm/{os.environ['VLLM_DIST_IDENT']}-toy_{rank}"
    open(memory, "w").close()
    open(f"memory{rank}", "w").write(memory)
    print(f"rank {rank} has added")

def one_raises(rank):
    if rank == 1:
        raise ValueError("out of rows")
    time.sleep(600)

def one_exits(rank):
    if rank == 1:
        os._exit(3)
    time.sleep(600)

def raises(number):
    try:
        with ranks.in_step():
            raise ValueError(f"no row {number}")
    except ValueError:
        pass

def one_stays_behind(rank):
    if rank == 1:
        raises(7)
        torch.distributed.barrier()
    torch.distributed.new_group([0, 1])

def hang(rank):
    torch.distributed.barrier()
    if rank == 1:
        time.sleep(600)
"""

PROGRAM = """
import os, sys, time
from moe_nvlink_upstream.adapt import ranks

ranks.pytest_load_initial_conftests()
from tests.kernels.moe import parallel_utils as utils

def launch(worker, *words):
    started = time.monotonic()
    try:
        utils.launch(worker, *words)
    except Exception as error:
        print(f"{worker.__name__} failed:", error)
    print(f"{worker.__name__} took less than 100 s:", time.monotonic() - started < 100)

os.environ["SAID"] = "hello"
launch(utils.add, sys.argv[1])
print("left:", [os.path.exists(open(f"memory{rank}").read()) for rank in range(2)])
launch(utils.one_raises)
launch(utils.one_exits)
os.environ[ranks.COLLECTIVE_S] = "3"
launch(utils.one_stays_behind)
os.environ["MOE_NVLINK_UPSTREAM_LAUNCH_S"] = "8"
launch(utils.hang)
"""


def test_ranks_meet_and_those_that_fail_are_named(tmp_path: Any) -> None:
    """One program, because vLLM's import takes longest: ranks add, raise, exit, wait and hang."""
    package = tmp_path / "tests/kernels/moe/modular_kernel_tools"
    package.mkdir(parents=True)
    for part in (package, *package.parents[:3]):
        (part / "__init__.py").touch()
    (package.parent / "parallel_utils.py").write_text(LAUNCHER)
    (package / "parallel_utils.py").touch()
    own = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{HERE / 'within'}", settings.LAUNCH_S: "200"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{tmp_path}/written"],
        cwd=tmp_path,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = done.stdout + done.stderr
    written = [path.read_text() for path in sorted(tmp_path.glob("written*"))]
    assert written == ["3 cpu hello", "3 cpu hello"], said
    for words in (
        "rank 0 has added",
        "add took less than",
        "left: [False, False]",  # shared memory of a launch goes with it
        "one_raises failed: \n\n-- Process 1 terminated",
        "out of rows",
        "one_raises took less than 100 s: True",  # rank 0 would have slept for 600 s
        "one_exits failed: process 1 terminated with exit code 3",
        "one_exits took less than 100 s: True",
        "ValueError: no row 7",
        "one_stays_behind failed: ",  # rank 0 waits where rank 1 has raised, and gives up
        "one_stays_behind took less than 100 s: True",
        "hang failed: rank(s) [1] have not ended within 8 s",
    ):
        assert words in said, said
    assert "add failed" not in said


# Adapters.


def test_ranks_have_rows_and_routes_of_their_own() -> None:
    @dataclasses.dataclass
    class Data:
        hidden_states: torch.Tensor
        router_logits: torch.Tensor

    data = Data(torch.arange(4.0).reshape(4, 1), torch.arange(8.0).reshape(2, 4))
    own = [moe_layer._own_inputs(lambda: data, rank) for rank in range(2)]
    assert torch.equal(own[0].hidden_states, data.hidden_states)
    assert own[1].hidden_states.flatten().tolist() == [3.0, 0.0, 1.0, 2.0]
    assert own[1].router_logits[0].tolist() == [3.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("wrong", [0.0, 2.0, float("nan")])
def test_one_wrong_row_is_found(wrong: float) -> None:
    expected = torch.randn(5, 64, generator=torch.Generator().manual_seed(7))
    modular_kernels.within(expected * 1.01, expected, 0.02)
    output = expected.clone()
    output[3] *= wrong
    with pytest.raises(AssertionError, match=r"1 of 5 rows .* rows \[3\]"):
        modular_kernels.within(output, expected, 0.02)


def test_rows_asked_of_an_exchange_are_unique_ranks_of_tokens() -> None:
    ids = torch.tensor([[0, 1, 2], [0, 4, 5], [7, 6, 3]])
    # Four experts on each of two ranks: token 0 stays on rank 0, the others go to both.
    assert modular_kernels.asked_of(ids, 4, 0) == (1, 3, 5, 2)
    assert modular_kernels.asked_of(ids, 4, 1) == (1, 3, 5, 3)
