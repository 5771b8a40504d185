"""The steps of a first half hour on one GPU: their order, their limits, their small rehearsals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

#: What a stage keeps back of its time: the machine's first import of torch, and the summary.
START_S = 10.0
#: What `again` may take, whichever steps it is given.
AGAIN_S = 460.0


@dataclasses.dataclass(frozen=True)
class Step:
    """One program.

    Attributes:
        name: what the summary calls the step, and what `again` takes.
        limit_s: when the runner ends the step.
        command: what follows the interpreter. `{results}` is where the result file's name begins.
        rehearsed: what a rehearsal appends; if an option is given twice, the last one counts.
        needs: a module without which the step does not begin.
        path: variable of the runner that holds this step's PYTHONPATH; "": it is the runner's.
        variables: of its environment, beside those of the runner.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    rehearsed: tuple[str, ...] = ()
    needs: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    path: str = ""

    @property
    def result(self) -> str | None:
        """Return the result file, as the command spells it."""
        return next((part for part in self.command if part.startswith("{results}")), None)

    @property
    def is_tests(self) -> bool:
        """Return whether pytest's last line says what became of the step."""
        return "pytest" in self.command


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps in their order, most valuable first; the steps of one tuple run side by side."""

    name: str
    limit_s: float
    steps: tuple[tuple[Step, ...], ...]


def _step(name: str, limit_s: float, command: str, rehearsed: str = "", needs: str = "") -> Step:
    return Step(name, limit_s, tuple(command.split()), tuple(rehearsed.split()), needs)


def _tests(name: str, limit_s: float, selected: str) -> Step:
    """Make a step of GPU tests. If one test takes too long, pytest ends that test alone."""
    options = "-q -rfs -p no:cacheprovider --timeout-method=signal --durations=5"
    return _step(name, limit_s, f"-m pytest -m gpu {options} {selected}")


def _verify(name: str, limit_s: float, options: str) -> Step:
    """Make a step of what users run on their machine; its ranks are processes of one GPU."""
    report = f"--output {{results}}-{name}.json"
    rehearsed = "--device cpu --quick --hidden-size 256"
    return _step(name, limit_s, f"-m moe_nvlink_plugin verify {options} {report}", rehearsed)


def _bench(name: str, limit_s: float, command: str, rehearsed: str, needs: str = "") -> Step:
    """Make a step that leaves a result file."""
    command = f"{command} --output_file {{results}}-{name}.json"
    return _step(name, limit_s, command, rehearsed, needs)


def _emulated(
    name: str, limit_s: float, options: str, needs: str = "", ranks: int = 8, small: str = ""
) -> Step:
    """Make a step of bench_moe_comm.py; `small`: the most tokens of a small batch."""
    every = f"--perfect_router --device cuda --emulate_ranks {ranks}"
    step = _bench(
        name,
        limit_s,
        f"benchmarks/bench_moe_comm.py {every} {options}",
        "--device rehearsal --emulate_ranks 2 --profile custom --hidden_size 64 --top_k 8"
        " --num_experts 256 --batches 1 4 --iters 10 --warmup 1 --backend moe_nvlink",
        needs,
    )
    variables = (("MOE_NVLINK_SMALL_TOKENS", small),) if small else ()
    return dataclasses.replace(step, variables=variables)


def _watched(tool: str) -> Step:
    rehearsed = "--rehearse" if tool == "memcheck" else "--rehearse --command-only"
    return _step(tool, 20, f"-m tests.gpu.watched {tool}", rehearsed)


def _of_vllm(name: str, limit_s: float, selected: str) -> Step:
    return dataclasses.replace(
        _tests(name, limit_s, selected),
        needs="vllm",
        path="GPU_STAGES_VLLM",
        variables=(("VLLM_USE_DEEP_GEMM", "0"), ("VLLM_NO_USAGE_STATS", "1")),
    )


_MEMCHECK = _watched("memcheck")

SMOKE = Stage(
    "smoke",
    265,
    (
        (_verify("verify", 75, "--quick --ranks 2"),),
        # Of one rank alone, which has programmatic dependent launch.
        (_verify("verify-one", 25, "--quick --ranks 1"),),
        (_step("doctor", 20, "-m moe_nvlink_plugin doctor"),),
        (_tests("real", 45, "tests/gpu/test_real_path.py tests/gpu/test_real_head.py"),),
        (_emulated("emulated", 25, "--backend moe_nvlink --batches 1 32 64 2048"),),
        (_MEMCHECK,),
        (
            _emulated(
                "flashinfer", 30, "--backend flashinfer --batches 64 --iters 10", needs="flashinfer"
            ),
        ),
    ),
)

#: Small batches through the kernels for batches of any size: what their own kernels save. A batch
#: that is above the limit for small batches shows the spread from run to run.
_BULK = _emulated("bulk", 30, "--backend moe_nvlink --batches 1 4 16 32 64", small="0")
#: A rank of two has four times the SMs of a rank of eight, and so about the share of the bytes a SM
#: that a rank of eight with a GPU of its own has at half as many tokens.
_TWO, _TWO_BULK = (
    _emulated(name, 20, "--backend moe_nvlink --batches 1 4 16 32 48 64", ranks=2, small=small)
    for name, small in (("two-ranks", "64"), ("two-ranks-bulk", "0"))
)

#: As `emulated` of the stage `smoke`, beside which it is to be run.
_ORDERED = _emulated("ordered", 25, "--backend moe_nvlink --ordered_slots --batches 1 32 64 2048")

#: One rank, the product's own calls in a graph: what an audited round costs, and one between two.
_AUDITS = _bench(
    "audits",
    50,
    "benchmarks/bench_moe_comm.py --device cuda --ep_size 1 --batches 1 16 64 512 --backend"
    " moe_nvlink moe_nvlink_audited moe_nvlink_audit_words --recipe fp8_block",
    "--device cpu --ep_size 2 --profile custom --hidden_size 128 --top_k 2 --num_experts 4"
    " --batches 2 --iters 5 --warmup 1",
)

NUMBERS = Stage(
    "numbers",
    530,
    (
        # What the software GPU's clock assumes, before anything else may use up the time.
        (
            _bench(
                "constants", 25, "benchmarks/gpu_constants.py", "--device rehearsal --limit_s 999"
            ),
        ),
        # Beside FlashInfer if it is there. The goals are at 64 tokens or fewer, and at 2048.
        (_emulated("moe-comm", 90, "--batches 1 4 16 32 64 128 256 512 1024 2048"),),
        # What the kernels wait for, and in which lines.
        (_bench("ncu", 100, "-m tests.gpu.profiled --limit 95", "--rehearse"),),
        (_emulated("pdl", 40, "--backend moe_nvlink --pdl --kernel_breakdown --batches 16 2048"),),
        (
            _bench(
                "recipes",
                60,
                "benchmarks/bench_recipes.py --device cuda --ep-size 8 --tokens 16 128 2048"
                " --iterations 100",
                "--device rehearsal --ep-size 2 --tokens 4 --hidden-size 256 --num-experts 8"
                " --iterations 5",
            ),
        ),
        (
            _bench(
                "lm-head",
                30,
                "benchmarks/bench_lm_head.py --device cuda --iterations 50",
                "--device rehearsal --groups 2 --vocab 1000 --hidden 64 --rows 1 4 --iterations 5",
            ),
        ),
        (
            _bench(
                "launch",
                30,
                "benchmarks/bench_launch.py --driver real --profile",
                "--driver emulated --batches 2 --tokens 4",
            ),
        ),
        (_AUDITS,),
        (_BULK,),
        (_ORDERED,),
        (_TWO,),
        (_TWO_BULK,),
    ),
)

_FORMS = "tests/gpu/test_users_form.py tests/gpu/test_real_processes.py"
_NEWER = "tests/gpu/test_comings.py tests/gpu/test_flashinfer_doors.py tests/gpu/test_audit.py"

BREADTH = Stage(
    "breadth",
    540,
    (
        (_verify("verify-all", 120, "--ranks 4"),),
        (
            _verify("verify-pdl", 210, "--ranks 1"),
            _tests("cases", 210, "tests/gpu/test_cases.py tests/gpu/test_quantisers.py"),
            _tests("rounds", 210, "tests/gpu/test_rounds.py"),
            _tests("forms", 210, f"{_FORMS} {_NEWER}"),
        ),
        # Of one rank alone: ranks that share a GPU take turns, and a tuned value would be of that.
        (
            _step(
                "tune",
                65,
                # One word: without a gain there is no file.
                "-m moe_nvlink_plugin tune --ranks 1 --budget 45 --output={results}-tune.json",
                "--device cpu --hidden-size 256 --num-experts 8 --max-tokens 4 --budget 1",
            ),
        ),
        (_watched("racecheck"),),
        (_MEMCHECK,),
        (_watched("synccheck"),),
        (_watched("initcheck"),),
        (_tests("planted-bugs", 35, "tests/gpu/test_sanitizers.py -k the_tool_looks"),),
        (_tests("litmus", 20, "tests/gpu/test_litmus.py -s"),),
    ),
)

#: By itself: `benchmarks/carry.sh --vllm` packs what it needs, which few machines are sent.
#: It has the time of `again`.
VLLM = Stage(
    "vllm",
    335,
    (
        (_of_vllm("vllm-experts", 150, "tests/gpu/test_vllm_experts.py -s"),),
        (_of_vllm("vllm-engine", 170, "tests/gpu/test_vllm_engine.py -s"),),
    ),
)

STAGES = {stage.name: stage for stage in (SMOKE, NUMBERS, BREADTH, VLLM)}
STEPS = {step.name: step for stage in STAGES.values() for group in stage.steps for step in group}


def again(names: Sequence[str]) -> Stage:
    """Return the named steps, one after the other.

    Raises:
        ValueError: there is no such step, or one call has not the time for all of them.
    """
    unknown = [name for name in names if name not in STEPS]
    if unknown or not names:
        what = f"no step is called {', '.join(unknown)}" if unknown else "again which step?"
        raise ValueError(f"{what}; the steps are {', '.join(STEPS)}")
    needed = START_S + sum(STEPS[name].limit_s for name in names)
    if needed > AGAIN_S:
        raise ValueError(
            f"{', '.join(names)} may take {needed:g} s, and one call has {AGAIN_S:g} s; name fewer"
        )
    return Stage("again", AGAIN_S, tuple((STEPS[name],) for name in names))
