"""pytest processes in the unpacked tests of vLLM, with no configuration of this repository."""

from __future__ import annotations

import dataclasses
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
from xml.etree import ElementTree

from . import family, fetch, settings
from .groups import Group, Plugin
from .within.moe_nvlink_upstream_expected import Rule

HERE = Path(__file__).resolve().parent
#: Our name where vLLM's tests run, see `within/moe_nvlink_upstream.py`.
PACKAGE = "moe_nvlink_upstream"
#: A test that goes on for so long after its own limit, pytest-timeout cannot end: the process ends.
GRACE_S = 120
#: A proxy that does not exist: tests that download fail on machines with a network, too.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
NO_NETWORK |= {"no_proxy": "localhost,127.0.0.1,::1,0.0.0.0"}
#: pytest loads these plugins. Other installed plugins could change outcomes.
PYTEST_PLUGINS = (
    *("pytest_asyncio.plugin", "pytest_timeout"),
    *("moe_nvlink_upstream_expected", "moe_nvlink_upstream_quick_cleanup"),
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
    hub: Path  #: the hub's cache; an empty one, whatever the user has downloaded
    broken: str = ""  #: a deliberate break of our backend (`breaks.py`)


@dataclass(frozen=True, eq=False)
class Job:
    """One pytest process; `words` are pytest's arguments."""

    group: Group
    words: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    whole: bool = False  #: all tests of the group run
    plugin: bool = True  #: False: our package is hidden from it

    @property
    def name(self) -> str:
        """Begins the names of its files."""
        return self.group.name + ("" if self.plugin else "-without-plugin")

    def expected(self, differences: Path) -> str:
        """What the plugin in the process is told."""
        rules = [dataclasses.asdict(rule) for rule in self.rules]
        # Our plugin stays out if another platform is active. vLLM must still have asked it.
        asked = self.plugin and self.group.plugin is Plugin.INSTALLED
        used = ("asked" if asked else "taken", self.plugin)
        order = {"rules": rules, "whole": self.whole, "used": used}
        return json.dumps(order | {"differences": str(differences)})


@dataclass(frozen=True)
class Ran:
    """A pytest process that has ended: what differs, and the outcome of each test that was run."""

    differences: tuple[str, ...]
    outcomes: Mapping[str, str]
    seconds: float
    output: Path


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
    own |= CPU
    own |= {settings.LAUNCH_S: str(job.group.test_timeout_s - 20)}
    own |= {settings.BREAK: where.broken} if where.broken else {}
    own |= {"VLLM_MODEL_REDIRECT_PATH": str(where.redirects), "HF_HOME": str(where.hub)}
    # vLLM's cache of models and compiled graphs, apart from the user's.
    own |= {"VLLM_CACHE_ROOT": str(fetch.CACHE / "vllm")}
    own |= {} if job.plugin else {settings.HIDE: "1"}
    first = [] if job.plugin else [HERE / "hiding"]
    own |= {"PYTHONPATH": os.pathsep.join(map(str, [*first, where.tree, HERE / "within"]))}
    return own | {"TMPDIR": str(scratch)} | dict(job.group.environment)


def command(where: Where, job: Job, files: Mapping[str, Path]) -> list[str]:
    """pytest's command line; only the tree's own configuration holds."""
    adapters = [f"adapt.{name}" for name in job.group.adapters] if job.plugin else []
    adapters += ["breaks"] if where.broken and job.plugin else []
    plugins = [*PYTEST_PLUGINS, *(f"{PACKAGE}.{name}" for name in adapters)]
    limit_s = job.group.test_timeout_s
    line = [sys.executable, "-m", "pytest", "-c", str(where.tree / "pyproject.toml")]
    line += ["--rootdir", str(where.tree), "-p", "no:cacheprovider"]
    line += [word for name in plugins for word in ("-p", name)]
    line += [f"--upstream-expected={files['expected.json']}", f"--junitxml={files['xml']}"]
    line += [f"--timeout={limit_s}", "--timeout-method=signal"]
    line += ["-o", f"faulthandler_timeout={limit_s + GRACE_S}"]
    line += ["-o", "faulthandler_exit_on_timeout=true"]
    return [*line, "-ra", "--tb=short", "--continue-on-collection-errors", *job.words]


def run(where: Where, job: Job) -> Ran:
    """Runs the tests in a process of their own."""
    where.logs.mkdir(parents=True, exist_ok=True)
    ends = ("log", "xml", "differences", "expected.json")
    files = {end: where.logs / f"{job.name}.{end}" for end in ends}
    for old in files.values():
        old.unlink(missing_ok=True)
    files["expected.json"].write_text(job.expected(files["differences"]), encoding="utf-8")
    started = time.monotonic()
    # Not below `logs`: sockets have their names there, which must be short.
    scratch = Path(tempfile.mkdtemp(prefix="up"))
    try:
        with files["log"].open("wb") as log:
            process = subprocess.Popen(
                command(where, job, files),
                cwd=where.tree,
                env=environment(where, job, scratch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None and not stopping.is_set():
                    time.sleep(0.1)
                code = process.poll()
            finally:
                family.end(process, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - started
    return Ran(_differences(files, code), outcomes_of(files["xml"]), seconds, files["log"])


def _differences(files: Mapping[str, Path], code: int | None) -> tuple[str, ...]:
    """What the plugin has found; a process that has not come so far is a difference itself."""
    found = files["differences"]
    lines = found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    if code is None:
        return (*lines, "the runner was stopped")
    if found.exists() and code == bool(lines):
        return tuple(lines)
    ended = f"code {code}" if code >= 0 else signal.Signals(-code).name
    return (*lines, f"the process ended by {ended} before pytest's end")


def outcomes_of(report: Path) -> dict[str, str]:
    """Test -> outcome, of pytest's report in XML; nothing if there is none."""
    if not report.exists():
        return {}
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        tags = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        outcomes = {tags.get(part.tag, "passed") for part in case} | {found.get(test, "passed")}
        found[test] = next(one for one in ("failed", "skipped", "passed") if one in outcomes)
    return found
