"""The command line: which groups run, where, and what their outcomes are compared with."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError

from . import expectations, fetch, models, table
from .breaks import BREAKS
from .groups import Group, Plugin, all_groups
from .run import Job, Ran, Where, run, stopping


def main(arguments: Sequence[str]) -> int:
    """0 if every outcome is as expected, 1 if not, 2 if nothing could be run."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1 process")
    try:
        if options.list:
            for group in all_groups():
                print(f"{group.name:28} {group.plugin.value:10} {group.title}")
            return 0
        if options.write_table:
            table.write()
            return 0
        return _run(options)
    except MoeNvlinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream",
        description="Runs vLLM's own tests against our backend, and compares every outcome.",
    )
    add = parser.add_argument
    names = [group.name for group in all_groups()]
    add("--group", nargs="+", default=names, choices=names, metavar="NAME", help="only these")
    add("--fast", action="store_true", help="the fast subset of each group")
    add("--jobs", type=int, default=1, metavar="N", help="so many pytest processes at once")
    add("--break", dest="broken", default="", choices=BREAKS, help="break our backend on purpose")
    add("--list", action="store_true", help="show the groups, run nothing")
    add("--write-table", action="store_true", help="renew the table of README.md, run nothing")
    add("--logs", type=Path, metavar="FOLDER", help="where logs go (default: a new folder)")
    add("pytest", nargs="*", help="after --: arguments of pytest, such as -k EXPRESSION")
    return parser


def _run(options: argparse.Namespace) -> int:
    groups = [group for group in all_groups() if group.name in options.group]
    if options.fast and not (groups := [group for group in groups if group.fast]):
        raise ConfigError("none of these groups has a fast subset: leave --fast out")
    version = fetch.supported_version()
    rules = expectations.read(expectations.file_of(version))
    whole = not (options.fast or options.pytest)
    jobs = []
    for group in groups:
        words = (*(group.fast if options.fast else group.arguments), *options.pytest)
        known = rules.get(group.name, ())
        sides = (True, False) if group.plugin is Plugin.COMPARED else (True,)
        jobs.append({side: Job(group, words, known, whole, plugin=side) for side in sides})
    found = 0
    with _started(_where(options, version), jobs, options.jobs) as started:
        for group, futures in zip(groups, started, strict=True):
            runs = {plugin: future.result() for plugin, future in futures.items()}
            differences = differences_of(runs)
            _report(group, runs, differences)
            found += len(differences)
    print(f"{found} differences" if found else "every outcome is as expected", flush=True)
    return 1 if found else 0


def _where(options: argparse.Namespace, version: str) -> Where:
    logs = options.logs or Path(tempfile.mkdtemp(prefix="moe_nvlink_upstream_"))
    redirects = models.redirect_file(fetch.CACHE / "models")
    # An empty folder, so that outcomes do not depend on downloads.
    hub = fetch.CACHE / "hub"
    return Where(fetch.tree(version), logs.resolve(), redirects, hub, options.broken)


@contextlib.contextmanager
def _started(
    where: Where, jobs: Sequence[Mapping[bool, Job]], at_once: int
) -> Iterator[list[dict[bool, Future[Ran]]]]:
    """Starts all processes, and yields a future for each. Ends those that still run."""
    pool = ThreadPoolExecutor(at_once)
    try:
        yield [
            {plugin: pool.submit(run, where, job) for plugin, job in of_group.items()}
            for of_group in jobs
        ]
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)
        stopping.clear()


def differences_of(runs: Mapping[bool, Ran]) -> list[str]:
    """All that is not as it should be, one line each; by whether our plugin is there.

    In a compared group an outcome must not depend on that.
    """
    sides = {True: "", False: "without the plugin: "}
    found = [sides[plugin] + line for plugin, ran in runs.items() for line in ran.differences]
    if False in runs:
        with_it, without = runs[True].outcomes, runs[False].outcomes
        for test in dict.fromkeys([*with_it, *without]):
            one, other = with_it.get(test, "not run"), without.get(test, "not run")
            if one != other:
                found.append(f"{test}: with the plugin {one}, without it {other}")
    return found


def _report(group: Group, runs: Mapping[bool, Ran], differences: Sequence[str]) -> None:
    counts = Counter(runs[True].outcomes.values())
    said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    seconds = " + ".join(f"{ran.seconds:.0f}" for ran in runs.values())
    logs = ", ".join(str(ran.output) for ran in runs.values())
    verdict = f"{len(differences)} DIFFERENCES, output in {logs}" if differences else "as expected"
    print(f"{group.name}: {said or 'no test'}; {verdict} ({seconds} s)", flush=True)
    for line in differences:
        print(f"  {line}", flush=True)
