"""The command line: which groups, on what, and what is compared with what."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError

from . import expectations, fetch, models, table
from .expectations import Rule
from .groups import Device, Group, Plugin
from .outcomes import Outcome, Result
from .run import Job, Part, Ran, Where, is_below, jobs_of, run, stopping
from .selection import all_groups


def main(arguments: Sequence[str]) -> int:
    """0 if every outcome is as expected, 1 if not, 2 if nothing could be run."""
    options = _parser().parse_args(arguments)
    try:
        if options.list:
            return _list()
        if options.write_table:
            table.write()
            return 0
        return _run(options, tuple(options.pytest))
    except MoeNvlinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream",
        description="Runs vLLM's own tests against our backend, and compares every outcome.",
    )
    add = parser.add_argument
    add("--group", nargs="+", default=[], metavar="NAME", help="only these (default: all)")
    add("--fast", action="store_true", help="the fast subset of each group")
    add("--gpu", type=int, default=0, metavar="N", help="on N GPUs instead of CPUs")
    add("--jobs", type=int, default=1, metavar="N", help="so many pytest processes at once")
    add("--update", action="store_true", help="rewrite counts, add rules for unknown tests")
    add("--break", dest="broken", default="", metavar="NAME", help="break our backend, see --list")
    add("--without-avx512", action="store_true", help="as on CPUs that have AVX2 alone")
    add("--list", action="store_true", help="show the groups and the breaks, run nothing")
    add("--write-table", action="store_true", help="renew integration/README.md, run nothing")
    add("--tree", type=Path, metavar="FOLDER", help="unpacked tests of vLLM: nothing is fetched")
    add("--logs", type=Path, metavar="FOLDER", help="where logs go (default: a new folder)")
    add("pytest", nargs="*", help="after --: arguments of pytest, such as -k EXPRESSION")
    return parser


def _list() -> int:
    print("groups:")
    for group in all_groups():
        devices = "/".join(sorted(device.value for device in group.devices))
        print(f"  {group.name:28} {devices:8} {group.plugin.value:10} {group.title}")
    from . import breaks

    print("breaks:")
    for name, install in breaks.BREAKS.items():
        print(f"  {name:28} {(install.__doc__ or '').splitlines()[0]}")
    return 0


def _run(options: argparse.Namespace, extra: tuple[str, ...]) -> int:
    groups = _groups(options, extra)
    version = fetch.supported_version()
    where = _where(options, version)
    path = expectations.file_of(version, where.device)
    rules = expectations.read(path)
    whole = not (options.fast or extra)
    parts = [Part(group, group.fast if options.fast else group.arguments) for group in groups]
    if options.fast:
        parts = [part for part in parts if part.words]
    if not parts:
        raise ConfigError("none of these groups has a fast subset: leave --fast out")
    jobs = [jobs_of(part, rules.get(part.group.name, ()), extra) for part in parts]
    found = 0
    with _started(where, jobs, options.jobs) as started:
        for part, futures in zip(parts, started, strict=True):
            name = part.group.name
            # On GPUs nobody has run them yet: a group without a section has no expectations.
            known = rules.get(name, None if where.device is Device.GPU else ())
            runs = {plugin: future.result() for plugin, future in futures.items()}
            if options.update and not any(ran.ending for ran in runs.values()):
                known = tuple(expectations.updated(known or (), runs[True].results))
                rules[name] = known
                expectations.write(path, rules)
            differences = differences_of(part, known, runs, whole=whole, places=options.fast)
            if known is None:
                print(f"{name}: no expectation yet; --update writes them", flush=True)
            _report(part.group, runs, differences)
            found += len(differences)
    print(f"{found} differences" if found else "every outcome is as expected", flush=True)
    return 1 if found else 0


def _groups(options: argparse.Namespace, extra: tuple[str, ...]) -> list[Group]:
    if options.gpu < 0:
        raise ConfigError(f"--gpu {options.gpu}: give the number of GPUs, or leave it out")
    device = Device.GPU if options.gpu else Device.CPU
    groups = chosen(all_groups(), options.group, device, options.gpu)
    if options.broken:
        _check_break(options.broken)
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: at least one process must run")
    if options.update and (options.fast or options.broken or extra):
        raise ConfigError("--update needs whole groups of a backend that is not broken")
    if options.without_avx512 and options.gpu:
        raise ConfigError("--without-avx512 is about vLLM's library for CPUs: leave out --gpu")
    return groups


def _check_break(name: str) -> None:
    from . import breaks

    if name not in breaks.BREAKS:
        known = ", ".join(breaks.BREAKS)
        raise ConfigError(f"there is no break {name!r}; there are: {known}")


def chosen(groups: Sequence[Group], names: Sequence[str], device: Device, gpus: int) -> list[Group]:
    """Groups by name, in their order, that the device can run."""
    known = {group.name: group for group in groups}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"there is no group {', '.join(unknown)}; there are: {', '.join(known)}")
    found = [
        group
        for group in known.values()
        if device in group.devices and (device is Device.CPU or group.gpus <= gpus)
    ]
    unfit = sorted(set(names) - {group.name for group in found})
    if unfit or not found:
        wanted = ", ".join(unfit) or "of all groups"
        raise ConfigError(f"{wanted}: none runs on {gpus or 'no'} GPUs; see --list")
    return [group for group in found if not names or group.name in names]


def _where(options: argparse.Namespace, version: str) -> Where:
    if options.tree:
        fetch.check_tree(options.tree, version)
    tree = options.tree.resolve() if options.tree else fetch.tree(version)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="moe_nvlink_upstream_"))
    return Where(
        tree,
        logs.resolve(),
        models.redirect_file(fetch.CACHE / "models"),
        _hub(options.gpu),
        Device.GPU if options.gpu else Device.CPU,
        options.gpu,
        options.broken,
        options.without_avx512,
    )


def _hub(gpus: int) -> Path:
    """Hugging Face's folder: on CPUs an empty one, so that outcomes do not depend on downloads.

    On GPUs the user's: most engines' models have no stand-in, and must have been downloaded.
    """
    if not gpus:
        return fetch.CACHE / "hub"
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()


@contextlib.contextmanager
def _started(
    where: Where, jobs: Sequence[Mapping[bool, Job]], at_once: int
) -> Iterator[list[dict[bool, Future[Ran]]]]:
    """All processes, as what waits for each. Ends those that still run."""
    pool = ThreadPoolExecutor(at_once)
    try:
        yield [
            {plugin: pool.submit(run, where, job) for plugin, job in of_part.items()}
            for of_part in jobs
        ]
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)
        stopping.clear()


def differences_of(
    part: Part,
    rules: Sequence[Rule] | None,
    runs: Mapping[bool, Ran],
    *,
    whole: bool,
    places: bool,
) -> list[str]:
    """All that is not as it should be. `whole`: the group was; `places`: each one must have run.

    rules None: there are none yet, so that tests fail or pass, and both sides must do it alike.
    """
    found = []
    for plugin, ran in runs.items():
        side = "" if plugin else "without the plugin: "
        these = [f"{part.group.name}: {ran.ending}"] if ran.ending else []
        if not ran.results:
            these.append(f"{part.group.name}: no test was run")
        if rules is not None:
            these += expectations.differences(rules, ran.results, whole=whole)
        elif part.group.plugin is not Plugin.COMPARED:
            these += expectations.failures(ran.results)
        these += idle_places(part, ran.results) if places else []
        found += [side + line for line in these]
    if part.group.plugin is Plugin.COMPARED:
        found += compared(runs[True].results, runs[False].results)
        passed = any(one.outcome is Outcome.PASSED for one in runs[True].results.values())
        if rules is None and not passed:
            found.append(f"{part.group.name}: no test passed, so that nothing was compared")
    return found


def idle_places(part: Part, results: Mapping[str, Result]) -> list[str]:
    """Places of a fast subset in which nothing passed or failed."""
    ran = [n for n, r in results.items() if r.outcome in (Outcome.PASSED, Outcome.FAILED)]
    return [
        f"{place}: no test of it was run"
        for place in part.places
        if not any(is_below(place, node) for node in ran)
    ]


def compared(with_it: Mapping[str, Result], without: Mapping[str, Result]) -> list[str]:
    """Tests whose outcome depends on whether our plugin is installed."""
    nothing = Result(Outcome.NOT_RUN, "not collected")
    found = []
    for node in dict.fromkeys([*with_it, *without]):
        one, other = with_it.get(node, nothing), without.get(node, nothing)
        if one.outcome is not other.outcome:
            found.append(f"{node}: with the plugin {one.line()}, without it {other.line()}")
    return found


def _report(group: Group, runs: Mapping[bool, Ran], differences: Sequence[str]) -> None:
    counts = Counter(result.outcome.value for result in runs[True].results.values())
    said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    seconds = " + ".join(f"{ran.seconds:.0f}" for ran in runs.values())
    logs = ", ".join(str(ran.output) for ran in runs.values())
    verdict = f"{len(differences)} DIFFERENCES, output in {logs}" if differences else "as expected"
    print(f"{group.name}: {said or 'no test'}; {verdict} ({seconds} s)", flush=True)
    for line in differences:
        print(f"  {line}", flush=True)
