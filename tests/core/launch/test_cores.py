"""The cores that threads of our kernels get if OpenMP has bound the main thread to one core."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.programs import python

CORES = sorted(os.sched_getaffinity(0))[:2]

#: It prints the cores of its main thread, of the threads that a layer starts, of a thread that runs
#: a verb beside its caller, and of the main thread once more.
_WORKER = """
import json, os
from pathlib import Path
from moe_nvlink_plugin import AllToAllConfig, MoeAllToAll
from moe_nvlink_plugin.launch.cpu import HostExecutor
from moe_nvlink_plugin.testing import ThreadGroup

def cores(thread=0):
    return sorted(os.sched_getaffinity(thread))

def threads():
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}

main, before, beside = cores(), threads(), []
config = AllToAllConfig(ep_size=1, ep_rank=0, num_experts=2, top_k=1, hidden_size=64,
                        max_tokens_per_rank=4, num_threads=3)
with MoeAllToAll.create(config, ThreadGroup.ranks(1)[0]):
    started = [cores(thread) for thread in threads() - before]
    HostExecutor().beside(0, lambda: beside.append(cores()))()
print(json.dumps([main, started, beside, cores()]))
"""


@pytest.mark.skipif(len(CORES) < 2, reason="the machine has one core")
def test_threads_of_kernels_use_all_cores_that_openmp_binds() -> None:
    """The worker's environment is as vLLM makes it for VLLM_CPU_OMP_THREADS_BIND=0,1."""
    bound = {"GOMP_CPU_AFFINITY": " ".join(map(str, CORES)), "OMP_NUM_THREADS": "2"}
    done = python("-c", _WORKER, variables=bound)
    assert done.returncode == 0, done.stderr
    main, started, beside, after = json.loads(done.stdout)
    assert main == after == CORES[:1], "OpenMP binds the main thread to the first core"
    assert len(started) == 2, "a layer of three threads starts two"
    assert started + beside == [CORES] * 3
