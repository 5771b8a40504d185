"""The goals of the benchmarks' issue beside what the result files say: met, not met, not measured.

A goal's verdict is computed from the newest file that measured its configuration; quartiles stand
beside it, the median decides. A goal that names a GPU is judged on that GPU only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reporting.files import Result
from benchmarks.reporting.tables import OURS, Page, table

#: The growth that is asked for, per device: series' names begin with these words.
DIMENSIONS = ("tokens", "ranks", "top_k", "payload")


class Found(NamedTuple):
    """What was measured for a goal."""

    value: float
    source: Result
    low: float | None = None  # quartiles of the value, where it has some
    high: float | None = None
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Goal:
    """One number of the issue's table."""

    work: str
    sense: str  # ">=" or "<="
    bound: float
    unit: str  # "x", "%" or "" behind the number
    measured: Callable[[Sequence[Result]], Found | None]

    def met(self, value: float) -> bool:
        return value >= self.bound if self.sense == ">=" else value <= self.bound

    def shown(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.1f}%"
        return f"{value:.2f}x" if self.unit == "x" else f"{value:g}"

    @property
    def asked(self) -> str:
        bound = f"{100 * self.bound:g}%" if self.unit == "%" else f"{self.bound:g}{self.unit}"
        return f"{self.sense} {bound}"

    def row(self, page: Page, results: Sequence[Result]) -> list[str]:
        found = self.measured(results)
        if found is None:
            return [self.work, self.asked, "", "not measured", ""]
        value = self.shown(found.value)
        if found.low is not None and found.high is not None:
            value += f" ({self.shown(found.low)}..{self.shown(found.high)})"
        if found.remark:
            value += f"; {found.remark}"
        verdict = "met" if self.met(found.value) else "**not met**"
        source = f"[{found.source.machine.get('date')}]({page.link(found.source.path)})"
        return [self.work, self.asked, value, verdict, source]


def goals_table(page: Page, results: Sequence[Result]) -> str:
    columns = ["work", "goal", "measured (quartiles)", "verdict", "result file"]
    return table(columns, [goal.row(page, results) for goal in GOALS])


# --- what is looked for ---------------------------------------------------------------------------


#: Of the routers, those that load all ranks alike and leave no rank out.
ROUTERS = ("uniform", "perfect")


class Layer(NamedTuple):
    """A configuration of bench_moe_comm.py; fields of a result's options and rows."""

    device: str
    emulate_ranks: bool
    ep_size: int
    tokens: Callable[[int], bool]
    gpu: str = ""  # part of the GPU's name
    cuda_graph: bool = False

    def rows(self, result: Result, backend: str) -> list[dict[str, Any]]:
        """The result's rows of this configuration, DeepSeek-V3's layer in bf16."""
        options = result.options
        asked = {
            "device": self.device,
            "emulate_ranks": self.emulate_ranks,
            "ep_size": self.ep_size,
            "hidden_size": 7168,
            "top_k": 8,
            "num_experts": 256,
            "recipe": "bf16",
            "combine": "bf16",
            "dtype": "bfloat16",
            "cuda_graph": self.cuda_graph,
            "pdl": False,
        }
        if result.kind != "moe_comm" or any(options.get(k) != v for k, v in asked.items()):
            return []
        if options.get("router") not in ROUTERS:
            return []
        if self.gpu not in str(result.machine.get("gpu", "")):
            return []
        return [
            row
            for row in result.data["rows"]
            if row["backend"] == backend and self.tokens(row["tokens"])
        ]


CPU_128 = Layer("cpu", False, 4, lambda tokens: tokens == 128)
CPU_2048 = Layer("cpu", False, 4, lambda tokens: tokens == 2048)
H200_64 = Layer("cuda", True, 8, lambda tokens: tokens <= 64, "H200", cuda_graph=True)
H200_2048 = Layer("cuda", True, 8, lambda tokens: tokens == 2048, "H200", cuda_graph=True)


def of_layer(
    layer: Layer,
    backend: str,
    value: Callable[[dict[str, Any]], tuple[float, float | None, float | None] | None],
    worst: Callable[..., Any],
) -> Callable[[Sequence[Result]], Found | None]:
    """The worst row of the newest file that has any of the layer; `value`: value and quartiles.

    A peer's row that was launched otherwise than ours has no ratio (moe_comm/rows.py), so none.
    """

    def measured(results: Sequence[Result]) -> Found | None:
        for result in reversed(results):
            found = [
                Found(taken[0], result, taken[1], taken[2], _remark(row))
                for row in layer.rows(result, backend)
                if (taken := value(row)) is not None
            ]
            if found:
                return worst(found, key=lambda each: each.value)  # type: ignore[no-any-return]
        return None

    return measured


def _remark(row: dict[str, Any]) -> str:
    """Which row; of emulated ranks, how they were launched."""
    launch = f", {row['launch']}" if "launch" in row else ""
    return f"{row['tokens']} tokens{launch}"


def peer_over_ours(*phases: str) -> Callable[[dict[str, Any]], Any]:
    """How many times ours the peer takes; of several phases the one where that is least."""

    def value(row: dict[str, Any]) -> tuple[float, float, float] | None:
        ratios = row.get("ratio_to_ours", {})
        found = [ratios[phase] for phase in phases if phase in ratios]
        taken = [(each["median"], each["q25"], each["q75"]) for each in found]
        return min(taken) if taken else None

    return value


def ours_over_peer(phase: str) -> Callable[[dict[str, Any]], Any]:
    """Which part of the peer's time ours takes."""

    def value(row: dict[str, Any]) -> tuple[float, float, float] | None:
        ratio = row.get("ratio_to_ours", {}).get(phase)
        return (1 / ratio["median"], 1 / ratio["q75"], 1 / ratio["q25"]) if ratio else None

    return value


def of_ceiling(*phases: str) -> Callable[[dict[str, Any]], Any]:
    """Which part of the copy's speed; of several phases the least."""

    def value(row: dict[str, Any]) -> tuple[float, None, None] | None:
        found = [row.get(phase, {}).get("of_ceiling") for phase in phases]
        taken = [each for each in found if each is not None]
        return (min(taken), None, None) if taken else None

    return value


def served(results: Sequence[Result]) -> Found | None:
    """Decode tokens/s, ours over gloo's: the least of the numbers of requests."""
    for result in reversed(results):
        ratios = result.data.get("ratio", {}).get("gloo_ag_rs") if result.kind == "serve" else None
        if ratios:
            found = [
                Found(each["median"], result, each["q25"], each["q75"], f"{count} requests at once")
                for count, each in ratios.items()
            ]
            return min(found, key=lambda each: each.value)
    return None


def knees_left(page_root: Path) -> Callable[[Sequence[Result]], Found | None]:
    """How many knees NOTES.md does not explain, plus series that the growth of a device lacks."""

    def measured(results: Sequence[Result]) -> Found | None:
        newest = {str(r.data.get("device")): r for r in results if r.kind == "growth"}
        if not newest:
            return None
        notes = page_root / "benchmarks" / "NOTES.md"
        text = notes.read_text() if notes.exists() else ""
        left = [knee for result in newest.values() for knee in unexplained(result, text)]
        missing = [
            f"{dimension} on {device}"
            for device, result in newest.items()
            for dimension in DIMENSIONS
            if not any(series["name"].startswith(dimension) for series in result.data["series"])
        ]
        remark = f"of {', '.join(sorted(newest))}"
        if missing:
            remark += f"; no curve of {', '.join(missing)}"
        return Found(len(left) + len(missing), list(newest.values())[-1], remark=remark)

    return measured


def unexplained(result: Result, notes: str) -> Iterator[str]:
    """Ids of the knees that neither the file nor the notes explain."""
    for series in result.data["series"]:
        for knee in series["knees"]:
            if not knee.get("explanation") and f"`{knee['id']}`" not in notes:
                yield knee["id"]


def model_error(results: Sequence[Result]) -> Found | None:
    """Median error of the analytical model against the published rows it was fitted to."""
    for result in reversed(results):
        if result.kind == "model":
            checked = result.data["validation"]
            unseen = checked["leave_one_out"]["summary"]["median"]
            worst = max(part["median"] for part in checked["held_out"]["summary"].values())
            remark = (
                f"{100 * unseen:.1f}% where a table is left out of its own fit; on other sources' "
                f"figures up to {100 * worst:.0f}%"
            )
            return Found(checked["fitted"]["summary"]["median"], result, remark=remark)
    return None


ROOT = Path(__file__).resolve().parents[2]

_EP4 = "CPU, 4 ranks, hidden 7168, top_k 8, bf16, 128 tokens per rank: dispatch + combine"
_EMULATED = "one H200, 8 ranks emulated, L2 flushed"
_ALIKE = f"{_EMULATED}, each rank on a branch of one graph"
GOALS = (
    Goal(
        f"{_EP4}, faster than gloo all-gather + reduce-scatter",
        ">=",
        8,
        "x",
        of_layer(CPU_128, "gloo_gather", peer_over_ours("both"), min),
    ),
    Goal(
        f"{_EP4}, faster than gloo all_to_all_single both ways",
        ">=",
        3,
        "x",
        of_layer(CPU_128, "all_to_all", peer_over_ours("both"), min),
    ),
    Goal(
        "same at 2048 tokens: bytes/s against memcpy of the same bytes by the same cores",
        ">=",
        0.70,
        "%",
        of_layer(CPU_2048, OURS, of_ceiling("both"), min),
    ),
    Goal(
        "CPU, demo server, 2 ranks: decode tokens/s against gloo AG/RS through the same seams",
        ">=",
        1.2,
        "x",
        served,
    ),
    Goal(
        f"{_ALIKE}, up to 64 tokens: dispatch, part of FlashInfer moe_a2a's time",
        "<=",
        0.6,
        "x",
        of_layer(H200_64, "flashinfer", ours_over_peer("dispatch"), max),
    ),
    Goal(
        f"{_ALIKE}, up to 64 tokens: combine, part of FlashInfer moe_a2a's time",
        "<=",
        0.4,
        "x",
        of_layer(H200_64, "flashinfer", ours_over_peer("combine"), max),
    ),
    Goal(
        f"{_ALIKE}, 2048 tokens: bandwidth against FlashInfer",
        ">=",
        1.1,
        "x",
        of_layer(H200_2048, "flashinfer", peer_over_ours("dispatch", "combine"), min),
    ),
    Goal(
        f"{_EMULATED}, 2048 tokens: bandwidth against device copy",
        ">=",
        0.90,
        "%",
        of_layer(H200_2048, OURS, of_ceiling("dispatch", "combine"), min),
    ),
    Goal(
        "growth: curves of time against tokens, ranks, top_k and payload; knees unexplained or "
        "curves missing",
        "<=",
        0,
        "",
        knees_left(ROOT),
    ),
    Goal(
        "analytical model: median error against the published GB200 rows",
        "<=",
        0.15,
        "%",
        model_error,
    ),
)
