"""One pytest process per group, in the unpacked tests of vLLM, and nothing of this repository's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import outcomes, settings
from .groups import Device, Group
from .outcomes import Result

HERE = Path(__file__).resolve().parent
PACKAGE = __package__ or "moe_nvlink_plugin.integration.vllm.upstream"
#: Nothing has been reported for so long beyond a test's own time: pytest cannot end it by itself.
GRACE_S = 120
#: A proxy that is not there: tests that fetch fail alike on machines with and without a network.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
NO_NETWORK |= {"no_proxy": "localhost,127.0.0.1,::1,0.0.0.0"}
#: Not VLLM_TARGET_DEVICE: with "cpu" vLLM asks no platform plugin, ours among them.
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
#: Of the user's environment, what would change outcomes.
FOREIGN = ("VLLM_", "PYTEST_", "PYTHON", "HF_", "TRANSFORMERS_", "MOE_NVLINK_", "TORCH", "MASTER_")


@dataclass(frozen=True)
class Where:
    """What all groups of one call have in common."""

    tree: Path  #: vLLM's `tests/`, without its `vllm/`: the installed one is tested
    logs: Path
    redirects: Path  #: of the hub's names to local stand-ins, see `models.py`
    hub: Path  #: the hub's cache, empty whatever the user has downloaded
    device: Device = Device.CPU
    gpus: int = 0
    broken: str = ""  #: a deliberate break of our backend, of `breaks.py`


@dataclass(frozen=True)
class Ran:
    """A pytest process that has ended."""

    results: Mapping[str, Result]
    seconds: float
    output: Path
    ending: str = ""  #: how, if not by itself


def environment(where: Where, group: Group, *, plugin: bool = True) -> dict[str, str]:
    """Of the tests: the user's, less what would change outcomes."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    own |= NO_NETWORK | {name.upper(): value for name, value in NO_NETWORK.items()}
    own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    own |= CPU if where.device is Device.CPU else {}
    own |= {settings.DEVICE: where.device.value, settings.GPUS: str(where.gpus)}
    own |= {settings.BREAK: where.broken} if where.broken else {}
    own |= {"VLLM_MODEL_REDIRECT_PATH": str(where.redirects), "HF_HOME": str(where.hub)}
    first = [] if plugin else [str(HERE / "without_plugin")]
    own["PYTHONPATH"] = os.pathsep.join([*first, str(where.tree), str(HERE / "within")])
    return own | dict(group.environment)


def command(
    where: Where, group: Group, arguments: Sequence[str], selection: Path, *, plugin: bool = True
) -> list[str]:
    """pytest's, with nothing of any configuration but the tree's own."""
    line = [sys.executable, "-m", "pytest", "-c", str(where.tree / "pyproject.toml")]
    line += ["--rootdir", str(where.tree), "-p", "no:cacheprovider", "-p", "no:xdist"]
    line += ["-p", "moe_nvlink_upstream_selection", f"--upstream-selection={selection}"]
    adapters = [f"adapt.{name}" for name in group.adapters] if plugin else []
    adapters += ["breaks"] if where.broken and plugin else []
    line += [word for name in adapters for word in ("-p", f"{PACKAGE}.{name}")]
    line += [f"--timeout={group.test_timeout_s}", "--timeout-method=signal"]
    return [*line, "-ra", "--tb=short", *arguments]


def run(
    where: Where,
    group: Group,
    arguments: Sequence[str],
    leave_out: Sequence[str] = (),
    *,
    plugin: bool = True,
) -> Ran:
    """Runs one group's tests in a process of their own, and reads what became of each."""
    name = group.name + ("" if plugin else "-without-plugin")
    where.logs.mkdir(parents=True, exist_ok=True)
    report, chosen, selection, output = (
        where.logs / f"{name}.{end}" for end in ("reports.jsonl", "chosen.json", "json", "log")
    )
    report.unlink(missing_ok=True)
    chosen.unlink(missing_ok=True)
    order = {"leave_out": list(leave_out), "chosen": str(chosen)}
    selection.write_text(json.dumps(order), encoding="utf-8")
    line = command(where, group, [f"--report-log={report}", *arguments], selection, plugin=plugin)
    started = time.monotonic()
    with output.open("wb") as log:
        process = subprocess.Popen(
            line,
            cwd=where.tree,
            env=environment(where, group, plugin=plugin),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ending = _wait(process, report, group.test_timeout_s + GRACE_S)
        finally:
            _end(process)
    seconds = time.monotonic() - started
    return Ran(outcomes.read_run(report, chosen, ending), seconds, output, ending)


def _wait(process: subprocess.Popen[bytes], report: Path, patience_s: float) -> str:
    """How the process ended; "" if by itself."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = report.stat().st_size if report.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s:
            return f"ended after {patience_s:.0f} s without a report of any test"
        time.sleep(0.1)
    if process.returncode < 0:
        return f"the process was ended by {signal.Signals(-process.returncode).name}"
    if process.returncode not in outcomes.ENDED:
        return f"pytest's process ended with code {process.returncode}"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it has left behind in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
