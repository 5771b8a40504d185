"""The steps of a first half hour on one GPU: their order, their limits, their small rehearsals."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

#: What a stage takes beside its steps: the machine's first import of torch, and the summary.
START_S = 15.0
#: What `again` may take, whichever steps it is given.
AGAIN_S = 460.0


@dataclasses.dataclass(frozen=True)
class Step:
    """One program.

    Attributes:
        name: what the summary calls the step, and what `again` takes.
        limit_s: when the runner ends the step.
        command: what follows the interpreter. `{results}` is where the result file's name begins,
            `{limit_s}` when the runner ends the step.
        rehearsed: what a rehearsal appends; if an option is given twice, the last one counts.
        needs: a module without which the step does not begin.
        variables: of its environment, "NAME=VALUE ..."; a value may name variables of the runner.
        beside: it runs while the step before it does, and is given no more time.
    """

    name: str
    limit_s: float
    command: str
    rehearsed: str = ""
    needs: str = ""
    variables: str = ""
    beside: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Return `variables` by name."""
        return dict(word.split("=", 1) for word in os.path.expandvars(self.variables).split())


def limit_of(steps: Iterable[Step]) -> float:
    """Return what the steps may take in all."""
    return START_S + sum(step.limit_s for step in steps if not step.beside)


def _tests(name: str, limit_s: float, selected: str, *, beside: bool = False) -> Step:
    """Make a step of GPU tests. If one test takes too long, pytest ends that test alone."""
    options = "-q -rfs -p no:cacheprovider --timeout-method=signal --durations=5"
    return Step(name, limit_s, f"-m pytest -m gpu {options} {selected}", beside=beside)


def _verify(name: str, limit_s: float, options: str) -> Step:
    """Make a step of what users run on their machine; its ranks are processes of one GPU."""
    command = f"-m moe_nvlink_plugin verify {options} --output {{results}}-{name}.json"
    return Step(name, limit_s, command, "--device cpu --quick --hidden-size 256")


def _bench(name: str, limit_s: float, command: str, rehearsed: str, needs: str = "") -> Step:
    """Make a step that leaves a result file."""
    command = f"benchmarks/{command} --output_file {{results}}-{name}.json"
    return Step(name, limit_s, command, rehearsed, needs)


def _emulated(name: str, limit_s: float, options: str, needs: str = "", ranks: int = 8) -> Step:
    """Make a step of bench_moe_comm.py whose ranks share the GPU."""
    of_all = f"bench_moe_comm.py --perfect_router --device cuda --emulate_ranks {ranks}"
    small = (
        "--device rehearsal --emulate_ranks 2 --profile custom --hidden_size 64 --top_k 8"
        " --num_experts 256 --batches 1 4 --iters 10 --warmup 1 --backend moe_nvlink"
    )
    return _bench(name, limit_s, f"{of_all} {options}", small, needs)


def _small_up_to(tokens: int, step: Step) -> Step:
    """Let batches of no more tokens go through the kernels for small batches."""
    return dataclasses.replace(step, variables=f"MOE_NVLINK_SMALL_TOKENS={tokens}")


def _watched(tool: str) -> Step:
    return Step(tool, 20, f"-m tests.gpu.watched {tool} --limit {{limit_s}}", "--rehearse")


def _of_vllm(step: Step) -> Step:
    """Let this step alone find vLLM: other tests ask whether it is installed."""
    variables = "PYTHONPATH=$GPU_STAGES_VLLM VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1"
    return dataclasses.replace(step, needs="vllm", variables=variables)


SMOKE = (
    _verify("verify", 75, "--quick --ranks 2"),
    # Of one rank alone, which has programmatic dependent launch.
    _verify("verify-one", 25, "--quick --ranks 1"),
    Step("doctor", 20, "-m moe_nvlink_plugin doctor"),
    _tests("real", 45, "tests/gpu/test_real_path.py tests/gpu/test_real_head.py"),
    _emulated("emulated", 25, "--backend moe_nvlink --batches 1 32 64 2048"),
    _watched("memcheck"),
    _emulated("flashinfer", 30, "--backend flashinfer --batches 64 --iters 10", "flashinfer"),
)

_SMALL = "--backend moe_nvlink --batches 1 4 16 32"

NUMBERS = (
    # What the software GPU's clock assumes, before anything else may use up the time.
    _bench("constants", 25, "gpu_constants.py", "--device rehearsal --limit_s 999"),
    # Beside FlashInfer if it is there. The goals are at 64 tokens or fewer, and at 2048.
    _emulated("moe-comm", 90, "--batches 1 4 16 32 64 128 256 512 1024 2048"),
    # What the kernels wait for, and in which lines.
    Step(
        "ncu",
        100,
        "-m tests.gpu.profiled --reports={results}-ncu --limit {limit_s}",
        "--rehearse",
    ),
    _emulated("pdl", 40, "--backend moe_nvlink --pdl --kernel_breakdown --batches 16 2048"),
    _bench(
        "recipes",
        60,
        "bench_recipes.py --device cuda --ep-size 8 --tokens 16 128 2048 --iterations 100",
        "--device rehearsal --ep-size 2 --tokens 4 --hidden-size 256 --num-experts 8"
        " --iterations 5",
    ),
    _bench(
        "lm-head",
        30,
        "bench_lm_head.py --device cuda --iterations 50",
        "--device rehearsal --groups 2 --vocab 1000 --hidden 64 --rows 1 4 --iterations 5",
    ),
    _bench(
        "launch",
        30,
        "bench_launch.py --driver real --profile",
        "--driver emulated --batches 2 --tokens 4",
    ),
    # One rank, the product's own calls in a graph: an audited round, and one between two.
    _bench(
        "audits",
        50,
        "bench_moe_comm.py --device cuda --ep_size 1 --batches 1 16 64 512 --backend"
        " moe_nvlink moe_nvlink_audited moe_nvlink_audit_words --recipe fp8_block",
        "--device cpu --ep_size 2 --profile custom --hidden_size 128 --top_k 2 --num_experts 4"
        " --batches 2 --iters 5 --warmup 1",
    ),
    # Small batches through the kernels for batches of any size: what their own kernels save. A
    # batch that is above the limit for small batches shows the spread from run to run.
    _small_up_to(0, _emulated("bulk", 30, f"{_SMALL} 64")),
    # As `emulated` of the stage `smoke`, beside which it is to be run.
    _emulated("ordered", 25, "--backend moe_nvlink --ordered_slots --batches 1 32 64 2048"),
    # A rank of two has four times the SMs of a rank of eight, and so about the share of the bytes a
    # SM that a rank of eight with a GPU of its own has at half as many tokens.
    _small_up_to(64, _emulated("two-ranks", 20, f"{_SMALL} 48 64", ranks=2)),
    _small_up_to(0, _emulated("two-ranks-bulk", 20, f"{_SMALL} 48 64", ranks=2)),
)

_FORMS = "tests/gpu/test_users_form.py tests/gpu/test_real_processes.py"
_NEWER = "tests/gpu/test_comings.py tests/gpu/test_flashinfer_doors.py tests/gpu/test_audit.py"

BREADTH = (
    _verify("verify-all", 120, "--ranks 4"),
    _verify("verify-pdl", 210, "--ranks 1"),
    _tests("cases", 210, "tests/gpu/test_cases.py tests/gpu/test_quantisers.py", beside=True),
    _tests("rounds", 210, "tests/gpu/test_rounds.py", beside=True),
    _tests("forms", 210, f"{_FORMS} {_NEWER}", beside=True),
    # Of one rank alone: ranks that share a GPU take turns, and a tuned value would be of that.
    Step(
        "tune",
        65,
        # One word: without a gain there is no file.
        "-m moe_nvlink_plugin tune --ranks 1 --budget 45 --output={results}-tune.json",
        "--device cpu --hidden-size 256 --num-experts 8 --max-tokens 4 --budget 1",
    ),
    *(_watched(tool) for tool in ("racecheck", "memcheck", "synccheck", "initcheck")),
    _tests("planted-bugs", 35, "tests/gpu/test_sanitizers.py -k the_tool_looks"),
)

#: By itself: `benchmarks/carry.sh --vllm` packs what it needs, which few machines are sent.
#: It has the time of `again`.
VLLM = (
    _of_vllm(_tests("vllm-experts", 150, "tests/gpu/test_vllm_experts.py -s")),
    _of_vllm(_tests("vllm-engine", 170, "tests/gpu/test_vllm_engine.py -s")),
)

STAGES = {"smoke": SMOKE, "numbers": NUMBERS, "breadth": BREADTH, "vllm": VLLM}
STEPS = {step.name: step for steps in STAGES.values() for step in steps}


def again(names: Iterable[str]) -> tuple[Step, ...]:
    """Return the named steps, one after the other."""
    return tuple(dataclasses.replace(STEPS[name], beside=False) for name in names)
