"""moe-nvlink verify: ranks run every kernel against the reference, and time it beside others.

ranks.py starts the ranks, or finds that a launcher has.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_nvlink_plugin import env
from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError, PeerError
from moe_nvlink_plugin.groups import Group, refuse_differences
from moe_nvlink_plugin.verify import table
from moe_nvlink_plugin.verify.checks import Check, is_mismatch
from moe_nvlink_plugin.verify.plan import Geometry, has_async_release, plan, unsuited
from moe_nvlink_plugin.version import own_version

from . import ranks, tune

#: A process whose check or table takes so many seconds, beside two waits for other ranks, prints
#: where it is, and ends.
_LIMIT_S = 1200.0

#: Tokens of a rank in the table's rows.
_TOKENS = (1, 8, 32, 128, 512, 1024, 4096)

#: The table's time in seconds, and that of tuned values against today's.
_TABLE_S, _TUNED_S = 20.0, 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user asks for; equal on every rank, `output` apart.

    Attributes:
        device: "cpu" or "cuda"; "" for GPUs if torch sees any.
        ranks: to start if no launcher has; 0: one for each GPU, 2 on a CPU or one GPU.
        num_experts, top_k, hidden_size, max_tokens: of the layer; 0: as the device suggests.
        timeout_s: seconds that a rank waits for another one.
        quick: the shortest list of checks, and no table.
        output: file for the report as JSON.
    """

    device: str = ""
    ranks: int = 0
    num_experts: int = 0
    top_k: int = 8
    hidden_size: int = 0
    max_tokens: int = 0
    timeout_s: float = 20.0
    quick: bool = False
    output: Path | None = None


class Outcome(NamedTuple):
    """How a check ended: for each rank what is wrong there, or ""."""

    name: str
    rounds: int
    seconds: float
    wrong: list[str]


def main(options: Options) -> int:
    """Check and print. Collective among the ranks of a launcher.

    Returns:
        0 if every round was right, else 1; equal on every rank that meets the others.

    Raises:
        ConfigError: an option cannot be.
    """
    options = dataclasses.replace(options, device=ranks.device_kind(options.device))
    launched = env.launched()
    if options.output is not None and (launched is None or launched.rank == 0):
        _check_writable(options.output)
    wanted = ranks.Wanted("verify", options.device, options.ranks, options.timeout_s, _LIMIT_S)
    if launched is None:  # otherwise the ranks meet first: their options may differ
        _geometry(options, ranks.to_start(wanted), torch.device(options.device))
    return ranks.run(wanted, functools.partial(_verified, options))


def _check_writable(file: Path) -> None:
    try:
        # Not touch(), which takes directories, and files that only their owner may date.
        file.open("a").close()
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--output {file} cannot be written: {error.strerror}")


def _verified(options: Options, group: Group, device: torch.device) -> int:
    """Run the checks and the table; rank 0 prints and writes."""
    own = dataclasses.replace(options, output=None)
    told = {name: str(value) for name, value in dataclasses.asdict(own).items()}
    told |= {"version": own_version(), "MOE_NVLINK_TUNING": "set" if env.tuning() else "unset"}
    told["a GPU with st.async.release"] = str(has_async_release(device))
    refuse_differences(group.all_gather_object(told))
    geometry = _geometry(options, group.size, device)
    say = ranks.voice(group.rank)
    say(_title(geometry, device))
    outcomes: list[Outcome] = []
    lines: list[table.Line] = []
    tuned: list[str] = []
    lost = ""
    try:
        for check in plan(geometry, device, quick=options.quick):
            ranks.begin_anew(_LIMIT_S, options.timeout_s)
            outcomes.append(_outcome(check, group, device))
            say(_as_text(outcomes[-1]))
        if not options.quick and not any(any(outcome.wrong) for outcome in outcomes):
            ranks.begin_anew(_LIMIT_S, options.timeout_s)
            lines = _table(geometry, device)
            say(table.render(lines, device))
            tuned = _tuned(options, group, device)
            say("\n".join(f"tuning: {line}" for line in tuned))
    except (MoeNvlinkError, RuntimeError) as error:  # torch raises RuntimeError
        lost = f"{type(error).__name__}: {error}"
    verdict, code = _verdict(outcomes, lost, geometry, device)
    say(verdict)
    if lost and group.rank:  # rank 0 may be the lost one
        print(f"rank {group.rank}: {lost}", file=sys.stderr, flush=True)
    if options.output is not None and group.rank == 0:
        report = _report(geometry, outcomes, lines, tuned, verdict, code)
        try:
            options.output.write_text(json.dumps(report, indent=1) + "\n")
        except OSError as error:  # such as a full disk
            raise _unwritable(options.output, error) from error
    return code


def _geometry(options: Options, ep_size: int, device: torch.device) -> Geometry:
    """Return the user's geometry; what is missing is DeepSeek-V3's on GPUs, a smaller on CPUs.

    Raises:
        ConfigError: there is no such layer.
    """
    on_gpus = device.type == "cuda"
    geometry = Geometry(
        ep_size=ep_size,
        num_experts=options.num_experts or (256 if on_gpus else 64),
        top_k=options.top_k,
        hidden_size=options.hidden_size or (7168 if on_gpus else 1024),
        max_tokens=options.max_tokens or (128 if on_gpus else 64),
        timeout_s=options.timeout_s,
    )
    geometry.case("any", geometry.max_tokens, device).config(0)  # no check is to fail for it
    return geometry


def _outcome(check: Check, group: Group, device: torch.device) -> Outcome:
    start = time.monotonic()
    wrong = check.run(group, device)
    return Outcome(check.name, check.rounds, time.monotonic() - start, wrong)


def _table(geometry: Geometry, device: torch.device) -> list[table.Line]:
    group = dist.group.WORLD
    assert group is not None
    config = geometry.case("table", _TOKENS[-1], device).config(dist.get_rank())
    config = dataclasses.replace(config, small_tokens=None, small_combine_tokens=None)
    return table.measure(group, device, config, _TOKENS, seconds=_TABLE_S)


def _tuned(options: Options, group: Group, device: torch.device) -> list[str]:
    """Return what a tuning file gains, a line for each layer; or why nothing is said. Collective.

    A file that servers would refuse makes no round wrong.
    """
    path = env.tuning()
    if not path:
        return ["MOE_NVLINK_TUNING names no file; moe-nvlink tune measures whether one would help"]
    try:
        return tune.compared(path, group, device, seconds=_TUNED_S, timeout_s=options.timeout_s)
    except (ConfigError, PeerError) as error:
        return [f"not compared: {error}"]


def _title(geometry: Geometry, device: torch.device) -> str:
    kind = "CPU ranks" if device.type == "cpu" else f"ranks on {torch.cuda.get_device_name(device)}"
    title = (
        f"moe-nvlink {own_version()}, {geometry.ep_size} {kind}: {geometry.num_experts} experts, "
        f"top {geometry.top_k}, rows of {geometry.hidden_size}"
    )
    out = ", ".join(unsuited(geometry))
    return f"{title}\n  left out, because such rows do not suit: {out}" if out else title


def _as_text(outcome: Outcome) -> str:
    line = (
        f"  {_state(outcome):6} {outcome.name:56} {outcome.rounds:3} rounds"
        f" {outcome.seconds:6.1f} s"
    )
    wrong = [f"         rank {rank}: {error}" for rank, error in enumerate(outcome.wrong) if error]
    return "\n".join([line, *wrong])


def _state(outcome: Outcome) -> str:
    """Return "ok", "WRONG" if a bit differs, or "FAILED" if the rounds did not run to their end."""
    if not any(outcome.wrong):
        return "ok"
    return "WRONG" if any(map(is_mismatch, outcome.wrong)) else "FAILED"


def _verdict(
    outcomes: list[Outcome], lost: str, geometry: Geometry, device: torch.device
) -> tuple[str, int]:
    """Return the last line, and the exit code."""
    wrong, failed = (
        [outcome.name for outcome in outcomes if _state(outcome) == state]
        for state in ("WRONG", "FAILED")
    )
    where = f"{geometry.ep_size} {'CPU' if device.type == 'cpu' else 'GPU'} ranks"
    if lost:
        return f"verify: FAILED after {len(outcomes)} checks on {where}: {lost}", 1
    if wrong:
        return f"verify: WRONG on {where}, {len(wrong)} of {len(outcomes)}: {'; '.join(wrong)}", 1
    if failed:
        count = f"{len(failed)} of {len(outcomes)} did not end"
        return f"verify: FAILED on {where}, {count}: {'; '.join(failed)}", 1
    rounds = sum(outcome.rounds for outcome in outcomes)
    return (
        f"verify: right: {len(outcomes)} checks, {rounds} rounds on {where}, every bit as the "
        "reference has it",
        0,
    )


def _report(
    geometry: Geometry,
    outcomes: list[Outcome],
    lines: list[table.Line],
    tuned: list[str],
    verdict: str,
    code: int,
) -> dict[str, Any]:
    """Return what a user can attach to an issue."""
    from .doctor import inquiry  # takes a moment: it compiles a kernel of each kind

    return {
        "verdict": verdict,
        "right": code == 0,
        "geometry": dataclasses.asdict(geometry) | {"dtype": str(geometry.dtype)},
        "checks": [outcome._asdict() for outcome in outcomes],
        "table": [line._asdict() for line in lines],
        "tuning": tuned,
        "machine": json.loads(inquiry.to_json(inquiry.facts())),
    }
