"""Compare the goals of the issues with the result files: met, not met, not measured.

A goal's verdict is computed from the newest file that measured its configuration. The median
decides; quartiles stand beside it. A goal that names GPUs is judged on those only, and its remark
says on which.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.reporting import tables
from benchmarks.reporting.files import Result
from benchmarks.reporting.tables import OURS

#: Routers that load all ranks alike and leave no rank out.
ROUTERS = ("uniform", "perfect")

Row = dict[str, Any]


class Found(NamedTuple):
    """A goal's measured value; `low`, `high`: its quartiles."""

    value: float
    source: Result
    low: float | None = None
    high: float | None = None
    remark: str = ""


class Goal(NamedTuple):
    """One number of the issues' tables. `sense`: ">=" or "<="; `unit`: "x", "%", " us" or ""."""

    work: str
    sense: str
    bound: float
    unit: str
    measured: Callable[[Sequence[Result]], Found | None]

    def shown(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.1f}%"
        return f"{value:.2f}x" if self.unit == "x" else f"{value:.3g}{self.unit}"

    def row(self, results: Sequence[Result]) -> list[str]:
        bound = f"{100 * self.bound:g}%" if self.unit == "%" else f"{self.bound:g}{self.unit}"
        asked, found = f"{self.sense} {bound}", self.measured(results)
        if found is None:
            return [self.work, asked, "", "not measured", ""]
        value = self.shown(found.value)
        if found.low is not None and found.high is not None:
            value += f" ({self.shown(found.low)}..{self.shown(found.high)})"
        value += f"; {found.remark}" if found.remark else ""
        compare = operator.ge if self.sense == ">=" else operator.le
        verdict = "met" if compare(found.value, self.bound) else "**not met**"
        source = f"[{found.source.machine.get('date')}]({found.source.link})"
        return [self.work, asked, value, verdict, source]


def table(results: Sequence[Result]) -> str:
    columns = ["work", "goal", "measured (quartiles)", "verdict", "result file"]
    return tables.table(columns, [goal.row(results) for goal in GOALS])


#: DeepSeek-V3's layer in bf16, as bench_moe_comm.py measures it on CPU ranks and on one GPU.
_LAYER: Row = {"hidden_size": 7168, "top_k": 8, "num_experts": 256, "pdl": False}
_LAYER |= {"recipe": "bf16", "combine": "bf16", "dtype": "bfloat16"}
_CPU = _LAYER | {"device": "cpu", "ep_size": 4, "emulate_ranks": False, "cuda_graph": False}
_CPU_2 = _CPU | {"ep_size": 2}
_GPU = _LAYER | {"device": "cuda", "ep_size": 8, "emulate_ranks": True, "cuda_graph": True}


def of_layer(
    asked: Row, batches: range, backend: str, what: str, *phases: str
) -> Callable[[Sequence[Result]], Found | None]:
    """Find the worst row and phase of the newest file that has any of the layer at these batches.

    A peer's row that was launched otherwise than ours has no ratio (moe_comm/rows.py), so none.

    Args:
        what: "times ours", "part" (ours over the peer), or "of_ceiling" (of the copy's speed).
    """
    worst: Callable[..., Found] = max if what == "part" else min

    def measured(results: Sequence[Result]) -> Found | None:
        for result in reversed(results):
            found = [
                Found(value, result, low, high, _which(row, gpu_of(result)))
                for row in _rows(result, asked, batches, backend)
                for value, low, high in _values(row, what, phases)
            ]
            if found:
                return worst(found, key=lambda each: each.value)
        return None

    return measured


def _rows(result: Result, asked: Row, batches: range, backend: str) -> Iterator[Row]:
    is_asked = (
        result.data.get("kind") == "moe_comm"
        and all(result.options.get(name) == value for name, value in asked.items())
        and result.options.get("router") in ROUTERS
        and not result.options.get("bind")  # ranks run where Linux puts them
        and (asked["device"] == "cpu" or gpu_of(result))
    )
    for row in result.data["rows"] if is_asked else []:
        if row["backend"] == backend and row["tokens"] in batches:
            yield row


def _values(
    row: Row, what: str, phases: Sequence[str]
) -> Iterator[tuple[float, float | None, float | None]]:
    """Yield value and quartiles of each phase that has them."""
    for phase in phases:
        if what == "of_ceiling":
            if (share := row[phase].get("of_ceiling")) is not None:
                yield share, None, None
        elif ratio := row.get("ratio_to_ours", {}).get(phase):
            found = ratio["median"], ratio["q25"], ratio["q75"]
            yield (1 / found[0], 1 / found[2], 1 / found[1]) if what == "part" else found


def gpu_of(result: Result) -> str:
    """Return which of the GPUs that the goals name a result is of, or nothing."""
    found = re.search(r"\bH[12]00\b", str(result.machine.get("gpu")))
    return found[0] if found else ""


def _which(row: Row, gpu: str) -> str:
    """Name the row's batch; of emulated ranks, how they were launched, and the GPU."""
    return ", ".join(filter(None, (f"{row['tokens']} tokens", row.get("launch"), gpu)))


def one_token(asked: Row) -> Callable[[Sequence[Result]], Found | None]:
    """Make a reader of the time of our dispatch and combine of one token per rank, in us."""

    def found(results: Sequence[Result]) -> Found | None:
        for result in reversed(results):
            for row in _rows(result, asked, range(1, 2), OURS):
                took = row["both"]
                return Found(took["median_us"], result, took["q25_us"], took["q75_us"])
        return None

    return found


def crowded(results: Sequence[Result]) -> Found | None:
    """Return how much longer one token takes with four ranks than with two."""
    two, four = one_token(_CPU_2)(results), one_token(_CPU)(results)
    return Found(four.value / two.value, four.source) if two and four else None


def over_bf16(verb: str, *formats: str) -> Callable[[Sequence[Result]], Found | None]:
    """Make a reader of a verb's time in some formats over that in bf16: the most, CPU ranks."""

    def found(results: Sequence[Result]) -> Found | None:
        for result in reversed(results):
            if not result.path.match("*-cpu-recipes.json"):
                continue
            rows = [
                (row["times_bf16"], f"{row['name'].split()[0]}, {row['tokens']} tokens")
                for row in result.data["rows"]
                if row.get("verb") == verb
                and row.get("name", "").removesuffix(" fused") in formats
                and row.get("tokens", 0) >= 128
            ]
            if not rows:
                return None
            rate, which = min(rows, key=lambda row: row[0]["ratio"])
            return Found(1 / rate["ratio"], result, 1 / rate["q75"], 1 / rate["q25"], which)
        return None

    return found


def served_against(
    server: str, size: str = "demo", requests: int | None = None
) -> Callable[[Sequence[Result]], Found | None]:
    """Make a reader of decode tokens/s, ours over a server's.

    Args:
        server: the peer's name. size: of the model; files before there were sizes are the demo's.
        requests: sent at once; None: the number for which the ratio is least.
    """

    def found(results: Sequence[Result]) -> Found | None:
        for result in reversed(results):
            is_asked = (
                result.data.get("kind") == "serve"
                and result.data.get("size", "demo") == size
                and result.data.get("ep_size") == 2
            )
            ratios = result.data.get("ratio", {}).get(server, {})
            if requests is not None:
                ratios = {count: one for count, one in ratios.items() if count == str(requests)}
            if is_asked and ratios:
                count, least = min(ratios.items(), key=lambda item: item[1]["median"])
                remark = f"{count} requests at once"
                return Found(least["median"], result, least["q25"], least["q75"], remark)
        return None

    return found


_EP4 = "CPU, 4 ranks, 128 tokens per rank: dispatch + combine"
_EP2 = "CPU, 2 ranks on 2 cores"
_OVER_BF16 = "CPU, 4 ranks, 128 tokens and more, time over bf16's"
_FP8 = over_bf16("dispatch", "fp8_block", "fp8_token", "fp8_tensor", "mxfp8")
_SERVER = "CPU, demo server, 2 ranks: decode tokens/s against"
_SIZED = "CPU, server of 4 layers of 1.7B parameters, 2 ranks: decode tokens/s over"
_SEAMS = "gloo AG/RS through the same seams"
_ONE_RANK = "a server of one rank on the same two cores"
_EMULATED = "one H100 or H200, 8 ranks emulated"
_PART = "part of FlashInfer moe_a2a's time"
_128, _2048, _SMALL = range(128, 129), range(2048, 2049), range(1, 65)
_OVER_GLOO = of_layer(_CPU, _128, "gloo_gather", "times ours", "both")
_OVER_ALL_TO_ALL = of_layer(_CPU, _128, "all_to_all", "times ours", "both")
_CPU_COPY = of_layer(_CPU, _2048, OURS, "of_ceiling", "both")
_CPU_2_COPY = of_layer(_CPU_2, _128, OURS, "of_ceiling", "both")
_DISPATCH = of_layer(_GPU, _SMALL, "flashinfer", "part", "dispatch")
_COMBINE = of_layer(_GPU, _SMALL, "flashinfer", "part", "combine")
_RATES = of_layer(_GPU, _2048, "flashinfer", "times ours", "dispatch", "combine")
_GPU_COPY = of_layer(_GPU, _2048, OURS, "of_ceiling", "dispatch", "combine")
_MEMCPY = "same at 2048 tokens: bytes/s against memcpy of the same bytes by the same cores"
_sized = partial(served_against, size="1.7B")
GOALS = (
    Goal(f"{_EP4}, faster than gloo all-gather + reduce-scatter", ">=", 8, "x", _OVER_GLOO),
    Goal(f"{_EP4}, faster than gloo all_to_all_single both ways", ">=", 3, "x", _OVER_ALL_TO_ALL),
    Goal(_MEMCPY, ">=", 0.70, "%", _CPU_COPY),
    Goal(f"{_EP2}, 1 token per rank: dispatch + combine", "<=", 60, " us", one_token(_CPU_2)),
    Goal(f"{_EP2}, 128 tokens: bytes/s against the same memcpy", ">=", 0.70, "%", _CPU_2_COPY),
    Goal("CPU, 2 cores, 1 token per rank: four ranks against two", "<=", 4, "x", crowded),
    Goal(f"{_OVER_BF16}: dispatch in fp8 and mxfp8", "<=", 1.3, "x", _FP8),
    Goal(f"{_OVER_BF16}: dispatch in nvfp4", "<=", 1.6, "x", over_bf16("dispatch", "nvfp4")),
    Goal(f"{_OVER_BF16}: combine in fp8_block", "<=", 2, "x", over_bf16("combine", "fp8_block")),
    Goal(f"{_OVER_BF16}: combine in nvfp4", "<=", 3, "x", over_bf16("combine", "nvfp4")),
    Goal(f"{_SERVER} {_SEAMS}", ">=", 1.2, "x", served_against("gloo_ag_rs")),
    Goal(f"{_SERVER} {_ONE_RANK}", ">=", 0.67, "x", served_against("one_rank")),
    Goal(f"{_SIZED} tensor_parallel", ">=", 0.9, "x", _sized("tensor_parallel", requests=1)),
    Goal(f"{_SIZED} tensor_parallel", ">=", 0.95, "x", _sized("tensor_parallel", requests=8)),
    Goal(f"{_SIZED} tensor_parallel", ">=", 1, "x", _sized("tensor_parallel", requests=32)),
    Goal(f"{_SIZED} one_rank", ">=", 1, "x", _sized("one_rank", requests=8)),
    Goal(f"{_SIZED} one_rank", ">=", 1, "x", _sized("one_rank", requests=32)),
    Goal(f"{_EMULATED}, up to 64 tokens: dispatch, {_PART}", "<=", 0.6, "x", _DISPATCH),
    Goal(f"{_EMULATED}, up to 64 tokens: combine, {_PART}", "<=", 0.4, "x", _COMBINE),
    Goal(f"{_EMULATED}, 2048 tokens: bandwidth against FlashInfer", ">=", 1.1, "x", _RATES),
    Goal(f"{_EMULATED}, 2048 tokens: bandwidth against device copy", ">=", 0.90, "%", _GPU_COPY),
)
