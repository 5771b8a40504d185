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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import family, fetch, outcomes, settings
from .expectations import Rule, left_out
from .groups import Device, Group, Plugin
from .outcomes import Result

HERE = Path(__file__).resolve().parent
#: Our name where vLLM's tests run, see `within/moe_nvlink_upstream.py`.
PACKAGE = "moe_nvlink_upstream"
#: Nothing has been reported for so long beyond a test's own time: pytest cannot end it by itself.
GRACE_S = 120
#: A proxy that is not there: tests that fetch fail alike on machines with and without a network.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
NO_NETWORK |= {"no_proxy": "localhost,127.0.0.1,::1,0.0.0.0"}
#: These and no others that happen to be installed, which could change outcomes.
PYTEST_PLUGINS = ("pytest_asyncio.plugin", "pytest_reportlog.plugin", "pytest_timeout")
#: Not VLLM_TARGET_DEVICE: with "cpu" vLLM asks no platform plugin, ours among them.
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
#: Of torch's and oneDNN's kernels, beside what `hiding` does for vLLM's.
WITHOUT_AVX512 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
#: Of the user's environment, what would change outcomes.
FOREIGN = (
    *("VLLM_", "PYTEST_", "PYTHON", "HF_", "TRANSFORMERS_", "MOE_NVLINK_", "TORCH", "MASTER_"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *WITHOUT_AVX512),
)
#: Kept all the same: where our code is compiled to, and with what.
KEPT = ("MOE_NVLINK_CACHE_DIR", "MOE_NVLINK_CXX")

#: Set when the runner gives up, for instance by Ctrl-C: all processes are ended.
stopping = threading.Event()


@dataclass(frozen=True)
class Where:
    """What all groups of one call have in common."""

    tree: Path  #: vLLM's `tests/`, without its `vllm/`: the installed one is tested
    logs: Path
    redirects: Path  #: of the hub's names to local stand-ins, see `models.py`
    hub: Path  #: the hub's cache; on CPUs an empty one, whatever the user has downloaded
    device: Device = Device.CPU
    gpus: int = 0
    broken: str = ""  #: a deliberate break of our backend, of `breaks.py`
    without_avx512: bool = False  #: as on CPUs that have none: vLLM takes its AVX2 library


@dataclass(frozen=True)
class Part:
    """What of a group is run."""

    group: Group
    words: tuple[str, ...]

    @property
    def places(self) -> list[str]:
        """The words that are paths or node ids, not options and their values."""
        return [word for word in self.words if word.startswith("tests/")]


@dataclass(frozen=True, eq=False)
class Job:
    """One pytest process."""

    part: Part
    leave_out: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()  #: arguments of pytest
    plugin: bool = True  #: False: our package is hidden from it

    @property
    def name(self) -> str:
        """Of its files."""
        return self.group.name + ("" if self.plugin else "-without-plugin")

    @property
    def group(self) -> Group:
        """Whose tests it runs."""
        return self.part.group


@dataclass(frozen=True)
class Ran:
    """A pytest process that has ended."""

    results: Mapping[str, Result]
    seconds: float
    output: Path
    ending: str = ""  #: how, if not by itself


def is_below(place: str, node: str) -> bool:
    """Whether pytest, told to run `place` (a folder, file, test or its id), runs the test."""
    return node == place or (node.startswith(place) and node[len(place.rstrip("/"))] in "/:[")


def jobs_of(part: Part, rules: Sequence[Rule], extra: tuple[str, ...] = ()) -> dict[bool, Job]:
    """A process with our plugin, and for a COMPARED group also one without it."""
    sides = (True, False) if part.group.plugin is Plugin.COMPARED else (True,)
    leave = tuple(left_out(rules))
    return {plugin: Job(part, leave, extra, plugin) for plugin in sides}


def environment(where: Where, job: Job, scratch: Path) -> dict[str, str]:
    """Of the tests: the user's, less what would change outcomes."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not name.startswith(FOREIGN)
    }
    own |= NO_NETWORK | {name.upper(): value for name, value in NO_NETWORK.items()}
    own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    own |= CPU if where.device is Device.CPU else {}
    own |= {settings.DEVICE: where.device.value, settings.GPUS: str(where.gpus)}
    own |= {settings.BREAK: where.broken} if where.broken else {}
    own |= {"VLLM_MODEL_REDIRECT_PATH": str(where.redirects), "HF_HOME": str(where.hub)}
    # What vLLM keeps of models and compiled graphs: not among what it keeps for the user.
    own |= {"VLLM_CACHE_ROOT": str(fetch.CACHE / "vllm")}
    hidden = [] if job.plugin else ["plugin"]
    if where.without_avx512:
        hidden.append("avx512")
        own |= WITHOUT_AVX512
    own |= {settings.HIDE: ",".join(hidden)}
    first = [HERE / "hiding"] if hidden else []
    own |= {"PYTHONPATH": os.pathsep.join(map(str, [*first, where.tree, HERE / "within"]))}
    return own | {"TMPDIR": str(scratch)} | dict(job.group.environment)


def command(where: Where, job: Job, report: Path, selection: Path) -> list[str]:
    """pytest's, with nothing of any configuration but the tree's own."""
    line = [sys.executable, "-m", "pytest", "-c", str(where.tree / "pyproject.toml")]
    line += ["--rootdir", str(where.tree), "-p", "no:cacheprovider"]
    line += [word for name in PYTEST_PLUGINS for word in ("-p", name)]
    line += ["-p", "moe_nvlink_upstream_selection", f"--upstream-selection={selection}"]
    line += ["-p", "moe_nvlink_upstream_quick_cleanup"]
    adapters = [f"adapt.{name}" for name in job.group.adapters] if job.plugin else []
    adapters += ["breaks"] if where.broken and job.plugin else []
    line += [word for name in adapters for word in ("-p", f"{PACKAGE}.{name}")]
    line += [f"--timeout={job.group.test_timeout_s}", "--timeout-method=signal"]
    line += [f"--report-log={report}", "-ra", "--tb=short", "--continue-on-collection-errors"]
    return [*line, *job.part.words, *job.extra]


def run(where: Where, job: Job) -> Ran:
    """Runs the tests in a process of their own, and reads what became of each."""
    where.logs.mkdir(parents=True, exist_ok=True)
    report, chosen, selection, output = (
        where.logs / f"{job.name}.{end}" for end in ("reports.jsonl", "chosen.json", "json", "log")
    )
    for old in (report, chosen):
        old.unlink(missing_ok=True)
    order = {"leave_out": list(job.leave_out), "chosen": str(chosen)}
    selection.write_text(json.dumps(order), encoding="utf-8")
    started = time.monotonic()
    # Sockets have their names there, which must be short.
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
    ending = ending or _vacuous(job, chosen)
    return Ran(outcomes.read_run(report, chosen, ending), seconds, output, ending)


def _vacuous(job: Job, chosen: Path) -> str:
    """What makes a run to its end say nothing: our plugin was not where it should be, or was.

    Beside another platform plugin ours stays out; so where it is only INSTALLED, it must have been
    asked.
    """
    if job.plugin and job.group.plugin is Plugin.INSTALLED:
        verb, so_it_was = "ask", outcomes.platform_asked(chosen)
    else:
        verb, so_it_was = "take", outcomes.platform_taken(chosen)
    if so_it_was is job.plugin or so_it_was is None:
        return ""
    return f"vLLM {'did' if so_it_was else 'did not'} {verb} our platform plugin in this run"


def _wait(process: subprocess.Popen[bytes], report: Path, patience_s: float) -> str:
    """How the process ended; "" if by itself."""
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
