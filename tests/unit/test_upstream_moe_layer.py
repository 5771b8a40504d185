"""What fits vLLM's MoE layer tests to CPUs, without vLLM's files: devices, ranks, breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.upstream import breaks, settings
from tests.upstream.adapt import cpu_device, moe_layer
from tests.upstream.run import HERE


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda", 1)])
def test_cuda_devices_are_the_cpu(device: Any) -> None:
    assert cpu_device.on_cpu(device) == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "meta", None, True, torch.float32, torch.device("meta")])
def test_other_device_arguments_stay(device: Any) -> None:
    assert cpu_device.on_cpu(device) is device


def test_factories_and_moves_take_cuda_for_the_cpu() -> None:
    with cpu_device.CpuForCuda():
        made = torch.ones(2, device="cuda")
        moved = [made.to("cuda:1"), made.to(device=0), made.cuda(), made.to(torch.float64)]
        module = torch.nn.Linear(2, 2, device="cuda").to("cuda")
    assert {t.device.type for t in [made, *moved, module.weight]} == {"cpu"}
    assert moved[-1].dtype == torch.float64


def test_ranks_have_rows_and_routes_of_their_own() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Data:
        hidden_states: torch.Tensor
        router_logits: torch.Tensor

    data = Data(torch.arange(4.0).reshape(4, 1), torch.arange(8.0).reshape(2, 4))
    own = [moe_layer._own_inputs(lambda: data, rank) for rank in range(2)]
    assert torch.equal(own[0].hidden_states, data.hidden_states)
    assert own[1].hidden_states.flatten().tolist() == [3.0, 0.0, 1.0, 2.0]
    assert own[1].router_logits[0].tolist() == [3.0, 0.0, 1.0, 2.0]


def test_a_break_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.BREAK, "no-such")
    with pytest.raises(KeyError, match=r"no-such.*dropped-row"):
        breaks.install_chosen()


# Ranks. A stand-in for the module of vLLM's tests that `processes` fits is enough for them.

UTILS = """
import dataclasses, torch

@dataclasses.dataclass
class ProcessGroupInfo:
    world_size: int
    world_local_size: int
    rank: int
    node_rank: int
    local_rank: int
    device: torch.device
"""

WORKERS = """
import os, time, torch
from moe_nvlink_upstream.adapt import processes

def add(info, config, group, path):
    total = torch.tensor([info.rank + 1])
    torch.distributed.all_reduce(total)
    open(f"{path}{info.rank}", "w").write(f"{int(total)} {info.device} {os.environ['SAID']}")
    memory = f"/dev/shm/{os.environ['VLLM_DIST_IDENT']}-toy_{info.rank}"
    open(memory, "w").close()
    open(f"memory{info.rank}", "w").write(memory)
    print(f"rank {info.rank} has added")

def one_raises(info, config, group):
    if info.rank == 1:
        raise ValueError("out of rows")
    time.sleep(600)

def raises(number):
    try:
        with processes.in_step():
            raise ValueError(f"no row {number}")
    except ValueError:
        pass

def all_raise(info, config, group):
    for number in range(2):
        raises(number)
        torch.distributed.barrier()
    print("all have gone on")

def one_stays_behind(info, config, group):
    if info.rank == 1:
        raises(7)
        torch.distributed.barrier()
    with processes.in_step():
        torch.distributed.new_group([0, 1])

def hang(info, config, group):
    torch.distributed.barrier()
    if info.rank == 1:
        time.sleep(600)
"""

PROGRAM = """
import os, sys, time, workers
from moe_nvlink_upstream.adapt import processes

def launch(name, *words):
    started = time.monotonic()
    try:
        processes.launch(2, getattr(workers, name), None, {"SAID": "hello"}, *words)
    except Exception as error:
        print(f"{name} failed:", error)
    print(f"{name} took less than 100 s:", time.monotonic() - started < 100)

processes.install()
launch("add", sys.argv[1])
print("left:", [os.path.exists(open(f"memory{rank}").read()) for rank in range(2)])
launch("one_raises")
launch("all_raise")
os.environ[processes.COLLECTIVE_S] = "3"
launch("one_stays_behind")
os.environ[processes.LIMIT_S] = "8"
launch("hang")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a program has printed whose ranks add, raise and hang, and what its ranks wrote."""
    folder = tmp_path_factory.mktemp("tree")
    package = folder / "tests/kernels/moe/modular_kernel_tools"
    package.mkdir(parents=True)
    for part in (package, *package.parents[:3]):
        (part / "__init__.py").touch()
    (package / "parallel_utils.py").write_text(UTILS)
    (folder / "workers.py").write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{folder}/written"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{HERE / 'within'}"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    written = [path.read_text() for path in sorted(folder.glob("written*"))]
    return "\n".join([done.stdout, done.stderr, f"written: {written}"])


def test_ranks_meet_and_print(said: str) -> None:
    assert "written: ['3 cpu hello', '3 cpu hello']" in said, said
    assert "rank 0 has added" in said
    assert "add failed" not in said


def test_shared_memory_of_a_launch_goes_with_it(said: str) -> None:
    assert "left: [False, False]" in said, said


def test_a_rank_that_raises_is_named_and_the_others_end(said: str) -> None:
    assert "one_raises failed: \n\n-- Process 1 terminated" in said, said
    assert "out of rows" in said
    assert "one_raises took less than 100 s: True" in said, "rank 0 would have slept for 600 s"


def test_ranks_that_raise_alike_go_on(said: str) -> None:
    assert "all have gone on" in said
    assert "all_raise failed" not in said


def test_ranks_that_wait_for_one_that_raised_give_up(said: str) -> None:
    """It goes on to a barrier, and so does not end."""
    assert "one_stays_behind failed: " in said, said
    assert "ValueError: no row 7" in said
    assert "one_stays_behind took less than 100 s: True" in said


def test_a_rank_that_hangs_is_named(said: str) -> None:
    assert "hang failed: rank(s) [1] have not ended within 8 s" in said, said
