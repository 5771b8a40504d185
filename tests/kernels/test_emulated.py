"""tests/support/emulated.py on the CPU: what tests/gpu runs on a GPU, run here as far as it goes.

The kernels' GPU entry points are compiled, for every architecture, and counted against an H100.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.moe_comm import cuda_clock
from benchmarks.moe_comm import emulated as one_gpu
from benchmarks.moe_comm.options import Options
from moe_nvlink_plugin.errors import UnsupportedError
from moe_nvlink_plugin.jit import host, nvrtc
from moe_nvlink_plugin.jit.header import constants
from moe_nvlink_plugin.verify import cases, compare
from moe_nvlink_plugin.verify.cases import Case
from tests.gpu import test_rounds as test_gpu_rounds
from tests.support import case_list, delays, emulated, emulated_text, fake_cuda, sanitized
from tests.support import ranks as processes
from tests.support.long_tests import first_of
from tests.support.sass import cuobjdump

ENTRY = "moe_nvlink_emulated_dispatch"
H100_SMS = 132
REGISTERS_OF_AN_SM = 65536
THREADS_OF_AN_SM = 2048

FUSED = Case(
    name="fused",
    tokens=(0, 0, 0, 0),
    num_experts=10,
    top_k=3,
    hidden_size=19,
    capacity=6,
    routing="invalid",
)


#: Rows that the rounds' own experts can read, and that come back quantised.
QUANTISED = dataclasses.replace(
    cases.with_formats(FUSED, "fp8_block", "nvfp4"), name="fused, quantised", hidden_size=256
)


@pytest.mark.long
def test_rounds() -> None:
    emulated.check_rounds("cpu", FUSED, rounds=200, ctas=2, delays=True)


def test_fused_rounds() -> None:
    """The ranks run apart, with sleeps in between: 400 rounds in one launch."""
    emulated.check_fused("cpu", FUSED, rounds=400, ctas=2)


def test_fused_rounds_of_quantised_rows() -> None:
    emulated.check_fused("cpu", QUANTISED, rounds=100, ctas=2)


@pytest.mark.parametrize(("dtype", "top_k"), [(torch.bfloat16, 8), (torch.float16, 2)])
def test_fused_rounds_of_other_types(dtype: torch.dtype, top_k: int) -> None:
    case = Case(name=f"fused {dtype}", tokens=(0, 0), dtype=dtype, top_k=top_k, hidden_size=70)
    emulated.check_fused("cpu", case, rounds=40)


def test_static_buffers() -> None:
    """What a replayed graph does: fixed addresses and counts, other tokens, padded with -1."""
    emulated.check_static_rounds("cpu", FUSED, rounds=100)
    emulated.check_static_rounds("cpu", test_gpu_rounds.UNITS, rounds=50)


def test_rounds_of_small_batches() -> None:
    emulated.check_rounds("cpu", test_gpu_rounds.UNITS, rounds=100, ctas=2, delays=True)


@pytest.mark.parametrize("small", [False, True], ids=["any size", "small"])
def test_a_missing_rank_is_named(small: bool) -> None:
    emulated.check_missing_rank("cpu", small=small)


# These checks can fail.


def test_rounds_notice_a_row_of_the_wrong_round(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = emulated_text.host_source().replace(
        "shared.dispatch_args.payloads[2].source = args.hidden_states + first * row_bytes;",
        "shared.dispatch_args.payloads[2].source = args.hidden_states;",
    )
    monkeypatch.setattr(emulated_text, "host_source", lambda *, delays: broken)
    with pytest.raises(AssertionError, match="round 1"):
        emulated.check_fused("cpu", FUSED, rounds=3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "instead"), test_gpu_rounds.LEFT_OUT.values(), ids=test_gpu_rounds.LEFT_OUT
)
def test_fused_rounds_notice_a_wait_that_is_left_out(
    line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read that have not been written, or a fault is reported. And the GPU's compiler
    takes the broken text, which tests/gpu runs.
    """
    broken = delays.replace_once(emulated_text.host_source(delays=True), line, instead)
    monkeypatch.setattr(emulated_text, "host_source", lambda *, delays: broken)
    with pytest.raises(AssertionError, match="round|fault"):
        emulated.check_fused("cpu", FUSED, rounds=400, timeout_s=2.0)
    emulated.broken_cubin(line, instead)(2, 0, 8, "sm_90a", fused=True, delays=True)


def test_near_is_one_code() -> None:
    """What a GPU's reciprocals excuse in nvfp4, and what not."""
    case = cases.with_formats(Case(name="near", tokens=(5, 5), dtype=torch.bfloat16), "nvfp4")
    inputs = cases.make_inputs(case)
    (seen,) = case_list.run_case(case, rounds=1)
    codes = [seen[1].payloads[index].view(torch.uint8) for index in (1, 2)]
    place = int((codes[0][0] & 7 < 6).nonzero()[0]), int((codes[1][0] < 0x70).nonzero()[0])
    for index, column in enumerate(place):
        codes[index][0, column] += 1
        with pytest.raises(AssertionError, match="first difference"):
            compare.check_received(case, inputs, seen)
        compare.check_received(case, inputs, seen, near=True)
        codes[index][0, column] += 1
        with pytest.raises(AssertionError, match="more than one away"):
            compare.check_received(case, inputs, seen, near=True)
        codes[index][0, column] -= 2
    seen[1].combined[0] *= 1.5
    with pytest.raises(AssertionError, match="combined on rank 1"):
        compare.check_combined(case, inputs, seen, near=True)


def test_delays_are_sown() -> None:
    for text, on_host in (
        (emulated_text.host_source(), True),
        (emulated_text.device_source(2, 0, 8), False),
    ):
        sown = delays.with_delays(text, on_host=on_host)
        assert sown.count("test_delay();") - text.count("test_delay();") >= 5


# The GPU's part, without a GPU.

#: The oldest and the newest; those between are behind the marker `long`.
ARCHITECTURES = [
    nvrtc.ARCHITECTURES[0],
    *(pytest.param(each, marks=pytest.mark.long) for each in nvrtc.ARCHITECTURES[1:-1]),
    nvrtc.ARCHITECTURES[-1],
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("top_k", "count"), [(8, 64), pytest.param(32, 8, marks=pytest.mark.long)])
@pytest.mark.parametrize("fused", [False, True], ids=["verbs", "rounds"])
def test_entry_points_compile_and_64_ranks_fit(
    top_k: int, count: int, architecture: str, fused: bool
) -> None:
    """And are resident together on 132 SMs."""
    element = constants()["kElementBf16"]
    if fused:
        count = min(count, emulated_text.most_ranks(emulated_text.RoundsArgs))
    made = {"fused": fused, "small": not fused}
    code = emulated.cubin(top_k, element, count, architecture, **made)
    usage = cuobjdump(code, "-res-usage")
    for verb in emulated_text.verbs(**made):
        line = re.search(rf"Function moe_nvlink_emulated_{verb}:\n\s*(REG:.*)", usage)
        assert line is not None, usage
        numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
        per_sm = REGISTERS_OF_AN_SM // (-(-numbers["REG"] // 8) * 8 * emulated.THREADS)
        per_sm = min(per_sm, THREADS_OF_AN_SM // emulated.THREADS)
        assert emulated.ctas_per_rank(64, H100_SMS, per_sm, 16) >= 2, line[1]


@pytest.mark.parametrize("pdl", first_of([True, False]))
def test_the_gpu_code_on_a_stand_in_driver(
    pdl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The "cuda" back end: compiled, loaded, packed and launched by unmodified cuda-python."""
    kernels = host.build(emulated_text.stand_in_source(count=8), emulated.FLAGS)
    library = fake_cuda.build(tmp_path)
    for name, value in fake_cuda.environment(library, kernels, sms=132).items():
        monkeypatch.setenv(name, value)
    (result,) = processes.run_processes(1, _on_stand_in, tmp_path, pdl)
    name, grid, block, attributes, has_pdl, modules = result
    assert name == b"moe_nvlink_emulated_combine"
    assert grid == [3, 4, 1], "CTAs of a rank, ranks"
    assert block == [emulated.THREADS, 1, 1]
    assert (attributes, bool(has_pdl)) == (1, pdl), "one attribute: cooperative, or PDL"
    assert modules == 0, "a module is still loaded"


def _on_stand_in(_rank: int, _size: int, pdl: bool) -> tuple[Any, ...]:
    emulated.check_rounds("stand-in", FUSED, rounds=3, ctas=3, pdl=pdl)
    last = fake_cuda.control().last_launch()
    if not pdl:  # each of them compiles
        emulated.check_fused("stand-in", FUSED, rounds=20, ctas=3)
        emulated.check_rounds("stand-in", QUANTISED, rounds=3, ctas=3)
        emulated.check_static_rounds("stand-in", FUSED, rounds=3)
        emulated.check_missing_rank("stand-in")
        emulated.check_rounds("stand-in", test_gpu_rounds.UNITS, rounds=3, ctas=3)
        emulated.check_static_rounds("stand-in", test_gpu_rounds.UNITS, rounds=3)
        _sanitized_programs()
    _benchmark(pdl)
    modules = fake_cuda.control().modules()
    return last.name, list(last.grid), list(last.block), last.num_attributes, last.pdl, modules


def _benchmark(pdl: bool) -> None:
    """bench_moe_comm.py with the launch shapes of a GPU with 132 SMs; the times mean nothing."""
    options = Options(
        backends=("moe_nvlink",),
        profile="custom",
        hidden_size=1024,
        top_k=2,
        num_experts=9,
        ep_size=4,
        batches=(3,),
        iters=2,
        warmup=0,
        device="rehearsal",
        emulate_ranks=True,
        pdl=pdl,
    )
    config = one_gpu.config_of(options, 0, 1)
    made = emulated.CudaBackend(4, 1, config, pdl=pdl, device="cpu", as_product=True)
    with contextlib.closing(made) as backend:
        (row,) = one_gpu.measure(options, 3, cuda_clock.Clock("cpu", 2, 0), backend)
        last = fake_cuda.control().last_launch()
    shape = row["shapes"]["combine"]
    assert (last.grid[0], last.grid[1], last.block[0]) == (shape["blocks"], 4, shape["threads"])
    assert bool(last.pdl) == pdl


def _sanitized_programs() -> None:
    for options in ([], ["--break", "racecheck"]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["sanitized", "--backend", "stand-in", *options])
            patch.setattr(emulated_text, "device_source", emulated_text.device_source)
            sanitized.main()


def test_arguments_of_all_ranks_fit_into_one_launch() -> None:
    assert emulated.most_ranks_for(1) == emulated.most_ranks_for(8) == 8
    assert emulated.most_ranks_for(9) == emulated.most_ranks_for(64) == 64
    assert emulated.most_ranks_for(72) >= 72, "an NVL72 domain"
    assert emulated.most_ranks_for(48, ("rounds",)) >= 48
    with pytest.raises(UnsupportedError, match="1000 emulated ranks"):
        emulated.most_ranks_for(1000)


def test_the_mirror_of_rounds_args_is_the_struct() -> None:
    """Field by field, as the host compiler lays the struct out."""
    names = [field[0] for field in emulated_text.RoundsArgs._fields_]
    struct = emulated_text._ROUNDS.split("struct RoundsArgs {")[1].split("};")[0]
    assert re.findall(r"(\w+);", struct) == names
