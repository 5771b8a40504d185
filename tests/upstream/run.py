"""pytest processes in the unpacked tests of vLLM, with no configuration of this repository."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from . import family, fetch, settings
from .groups import Group, Outcome, between

HERE = Path(__file__).resolve().parent
#: Our name where vLLM's tests run, see `within/moe_nvlink_upstream.py`.
PACKAGE = "moe_nvlink_upstream"
#: A test that goes on for so long after its own limit, pytest-timeout cannot end: the process ends.
GRACE_S = 120
#: A proxy that does not exist: tests that download fail on machines with a network, too.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
NO_NETWORK |= {"no_proxy": "localhost,127.0.0.1,::1,0.0.0.0"}
#: pytest loads these plugins. Other installed plugins could change outcomes.
PYTEST_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "moe_nvlink_upstream_run")
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
#: Of a group: less than its test has. The longest took seven minutes beside others.
LIMIT_S = 1600


@dataclass(frozen=True)
class Where:
    """Where a group runs."""

    tree: Path  #: vLLM's `tests/`, without its `vllm/`: the installed vLLM is tested
    logs: Path
    redirects: Path  #: maps the hub's names to local stand-ins, see `models.py`
    hub: Path  #: the hub's cache; an empty one, whatever the user has downloaded
    broken: bool = False  #: `breaks.py` breaks our backend


@dataclass(frozen=True)
class Ran:
    """A pytest process that has ended: its tests' outcomes, or what became of it."""

    outcomes: Mapping[str, Outcome]
    problem: str = ""


def check(where: Where, group: Group, *words: str) -> list[str]:
    """Runs the group, or what pytest's arguments `words` leave of it. What differs, a line each."""
    until = time.monotonic() + LIMIT_S
    ran = run(where, group, until, *words)
    if ran.problem:
        return [ran.problem]
    found = [*group.differences(ran.outcomes)]
    if group.compared:
        without = run(where, group, until, *words, plugin=False)
        if without.problem:
            return [f"without the plugin: {without.problem}"]
        found += between(ran.outcomes, without.outcomes)
    return found


def environment(where: Where, group: Group, scratch: Path, *, plugin: bool) -> dict[str, str]:
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
    own |= {settings.LAUNCH_S: str(group.test_timeout_s - 20)}
    own |= {"VLLM_MODEL_REDIRECT_PATH": str(where.redirects), "HF_HOME": str(where.hub)}
    # vLLM's cache of models and compiled graphs, apart from the user's.
    own |= {"VLLM_CACHE_ROOT": str(fetch.CACHE / "vllm")}
    own |= {} if plugin else {settings.HIDE: "1"}
    first = [] if plugin else [HERE / "hiding"]
    own |= {"PYTHONPATH": os.pathsep.join(map(str, [*first, where.tree, HERE / "within"]))}
    return own | {"TMPDIR": str(scratch)} | dict(group.environment)


def command(where: Where, group: Group, report: Path, *, plugin: bool) -> list[str]:
    """pytest's command line; only the tree's own configuration holds."""
    adapters = [f"adapt.{name}" for name in group.adapters] if plugin else []
    adapters += ["breaks"] if where.broken and plugin else []
    plugins = [*PYTEST_PLUGINS, *(f"{PACKAGE}.{name}" for name in adapters)]
    limit_s = group.test_timeout_s
    line = [sys.executable, "-m", "pytest", "-c", str(where.tree / "pyproject.toml")]
    line += ["--rootdir", str(where.tree), "-p", "no:cacheprovider"]
    line += [word for name in plugins for word in ("-p", name)]
    line += [f"--junitxml={report}", f"--timeout={limit_s}", "--timeout-method=signal"]
    line += ["-o", f"faulthandler_timeout={limit_s + GRACE_S}"]
    line += ["-o", "faulthandler_exit_on_timeout=true"]
    return [*line, "-ra", "--tb=short", "--continue-on-collection-errors", *group.arguments]


def run(where: Where, group: Group, until: float, *words: str, plugin: bool = True) -> Ran:
    """Runs the tests in a process of their own; `plugin`: our package is not hidden from it."""
    where.logs.mkdir(parents=True, exist_ok=True)
    name = group.name + ("" if plugin else "-without-plugin")
    log, report, taken = (where.logs / f"{name}.{end}" for end in ("log", "xml", "taken"))
    for old in (report, taken):
        old.unlink(missing_ok=True)
    # Not below `logs`: sockets have their names there, which must be short.
    scratch = Path(tempfile.mkdtemp(prefix="up"))
    variables = environment(where, group, scratch, plugin=plugin) | {settings.TAKEN: str(taken)}
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command(where, group, report, plugin=plugin), *words],
                cwd=where.tree,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(until - time.monotonic())
                code = process.poll()
            finally:
                family.end(process, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _ran(code, log, report, taken, plugin=plugin)


def _ran(code: int | None, log: Path, report: Path, taken: Path, *, plugin: bool) -> Ran:
    found = outcomes_of(report)
    failed = any(one.kind == "failed" for one in found.values())
    if not found or not taken.exists() or code != int(failed):
        ending = f"us, after {LIMIT_S} s" if code is None else f"code {code}"
        if code is not None and code < 0:
            ending = signal.Signals(-code).name
        return Ran({}, f"pytest ended by {ending}, see {log}")
    # Not if another platform is active, for instance.
    if (said := taken.read_text()) != ("taken" if plugin else "not taken"):
        return Ran({}, f"our platform plugin was {said} by vLLM in this run, see {log}")
    return Ran(found)


def outcomes_of(report: Path) -> dict[str, Outcome]:
    """Test -> outcome, of pytest's report in XML; nothing if there is none. A failure counts more
    than a skip, that more than a pass, in any phase and of any subtest.
    """
    kinds = {"skipped": "skipped", "failure": "failed", "error": "failed"}
    order = ("passed", "skipped", "failed")
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        test = f"{case.get('classname')}::{case.get('name')}"
        parts = [part for part in case if part.tag in kinds]
        outcomes = [Outcome(kinds[part.tag], _message(part)) for part in parts]
        for one in (Outcome("passed"), *outcomes):
            found[test] = max(found.get(test, one), one, key=lambda each: order.index(each.kind))
    return found


def _message(part: ElementTree.Element) -> str:
    """What exceptions say, without source lines."""
    said = [line for line in (part.text or "").splitlines() if line.startswith("E ")]
    return "\n".join([part.get("message", ""), *said])
