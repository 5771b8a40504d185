"""pytest processes in the unpacked tests of vLLM, with no configuration of this repository."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import family, fetch, outcomes, settings
from .groups import Group, Plugin
from .outcomes import Result

HERE = Path(__file__).resolve().parent
#: Our name where vLLM's tests run, see `within/moe_nvlink_upstream.py`.
PACKAGE = "moe_nvlink_upstream"
#: If a test reports nothing for so long after its own limit, pytest cannot end it.
GRACE_S = 120
#: A proxy that does not exist: tests that download fail on machines with a network, too.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
NO_NETWORK |= {"no_proxy": "localhost,127.0.0.1,::1,0.0.0.0"}
#: pytest loads these plugins. Other installed plugins could change outcomes.
PYTEST_PLUGINS = (
    *("pytest_asyncio.plugin", "pytest_reportlog.plugin", "pytest_timeout"),
    *("moe_nvlink_upstream_selection", "moe_nvlink_upstream_quick_cleanup"),
)
#: Not VLLM_TARGET_DEVICE: if it is "cpu", vLLM asks no platform plugin.
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
#: Variables of the user's that would change outcomes.
FOREIGN = (
    *("VLLM_", "PYTEST_", "PYTHON", "HF_", "TRANSFORMERS_", "MOE_NVLINK_", "TORCH", "MASTER_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ATEN_CPU", "ONEDNN_"),
)
#: Kept nevertheless: where our kernels' builds lie, and which compiler makes them.
KEPT = ("MOE_NVLINK_CACHE_DIR", "MOE_NVLINK_CXX")

#: Set when the runner gives up, for instance by Ctrl-C: all processes are ended.
stopping = threading.Event()


@dataclass(frozen=True)
class Where:
    """What all groups of one call have in common."""

    tree: Path  #: vLLM's `tests/`, without its `vllm/`: the installed vLLM is tested
    logs: Path
    redirects: Path  #: maps the hub's names to local stand-ins, see `models.py`
    hub: Path  #: the hub's cache; on CPUs an empty one, whatever the user has downloaded
    gpus: int = 0  #: 0: ranks run on CPUs
    broken: str = ""  #: a deliberate break of our backend (`breaks.py`)


@dataclass(frozen=True, eq=False)
class Job:
    """One pytest process; `words` are pytest's arguments."""

    group: Group
    words: tuple[str, ...]
    leave_out: tuple[str, ...] = ()
    plugin: bool = True  #: False: our package is hidden from it

    @property
    def name(self) -> str:
        """Begins the names of its files."""
        return self.group.name + ("" if self.plugin else "-without-plugin")


@dataclass(frozen=True)
class Ran:
    """A pytest process that has ended; `ending` says how, if not by itself."""

    results: Mapping[str, Result]
    seconds: float
    output: Path
    ending: str = ""


def environment(where: Where, job: Job, scratch: Path) -> dict[str, str]:
    """The variables of the tests: the user's, except those that would change outcomes."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not name.startswith(FOREIGN)
    }
    own |= NO_NETWORK | {name.upper(): value for name, value in NO_NETWORK.items()}
    own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    own |= {settings.GPUS: str(where.gpus)} | ({} if where.gpus else CPU)
    own |= {settings.LAUNCH_S: str(job.group.test_timeout_s - 20)}
    own |= {settings.BREAK: where.broken} if where.broken else {}
    own |= {"VLLM_MODEL_REDIRECT_PATH": str(where.redirects), "HF_HOME": str(where.hub)}
    # vLLM's cache of models and compiled graphs, apart from the user's.
    own |= {"VLLM_CACHE_ROOT": str(fetch.CACHE / "vllm")}
    own |= {} if job.plugin else {settings.HIDE: "1"}
    first = [] if job.plugin else [HERE / "hiding"]
    own |= {"PYTHONPATH": os.pathsep.join(map(str, [*first, where.tree, HERE / "within"]))}
    return own | {"TMPDIR": str(scratch)} | dict(job.group.environment)


def command(where: Where, job: Job, report: Path, selection: Path) -> list[str]:
    """pytest's command line; only the tree's own configuration holds."""
    adapters = [f"adapt.{name}" for name in job.group.adapters] if job.plugin else []
    adapters += ["breaks"] if where.broken and job.plugin else []
    plugins = [*PYTEST_PLUGINS, *(f"{PACKAGE}.{name}" for name in adapters)]
    line = [sys.executable, "-m", "pytest", "-c", str(where.tree / "pyproject.toml")]
    line += ["--rootdir", str(where.tree), "-p", "no:cacheprovider"]
    line += [word for name in plugins for word in ("-p", name)]
    line += [f"--upstream-selection={selection}", f"--report-log={report}"]
    line += [f"--timeout={job.group.test_timeout_s}", "--timeout-method=signal"]
    return [*line, "-ra", "--tb=short", "--continue-on-collection-errors", *job.words]


def run(where: Where, job: Job) -> Ran:
    """Runs the tests in a process of their own, and reads the outcome of each."""
    where.logs.mkdir(parents=True, exist_ok=True)
    report, chosen, selection, output = (
        where.logs / f"{job.name}.{end}" for end in ("reports.jsonl", "chosen.json", "json", "log")
    )
    for old in (report, chosen):
        old.unlink(missing_ok=True)
    order = {"leave_out": list(job.leave_out), "chosen": str(chosen)}
    selection.write_text(json.dumps(order), encoding="utf-8")
    started = time.monotonic()
    # Not below `logs`: sockets have their names there, which must be short.
    scratch = Path(tempfile.mkdtemp(prefix="up"))
    try:
        with output.open("wb") as log:
            process = subprocess.Popen(
                command(where, job, report, selection),
                cwd=where.tree,
                env=environment(where, job, scratch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ending = _wait(process, report, job.group.test_timeout_s + GRACE_S)
            finally:
                family.end(process, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - started
    said = json.loads(chosen.read_text(encoding="utf-8")) if chosen.exists() else {}
    ending = ending or _vacuous(job, said)
    return Ran(outcomes.read_run(report, said, ending), seconds, output, ending)


def _vacuous(job: Job, said: Mapping[str, Any]) -> str:
    """Why a complete run shows nothing: vLLM did not use our plugin, or used it unseen.

    Our plugin stays out if another platform plugin is active. vLLM must then still have asked it.
    """
    asked = job.plugin and job.group.plugin is Plugin.INSTALLED
    verb, key = ("ask", "asked") if asked else ("take", "platform")
    so_it_was = said.get(key, job.plugin)
    if so_it_was is job.plugin:
        return ""
    return f"vLLM {'did' if so_it_was else 'did not'} {verb} our platform plugin in this run"


def _wait(process: subprocess.Popen[bytes], report: Path, patience_s: float) -> str:
    """Waits for the process; returns how it ended, or "" if it ended by itself."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = report.stat().st_size if report.exists() else 0
        if stopping.is_set():
            return "the runner was stopped"
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
