"""The command line: which groups, on what, and what is compared."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_nvlink_plugin.errors import ConfigError, MoeNvlinkError

from . import expectations, fetch, models
from .expectations import Rule
from .groups import Device, Group, Plugin
from .outcomes import Outcome, Result
from .run import Ran, Where, run
from .selection import all_groups

#: Differences of one group that are printed; the rest are in the log.
SHOWN = 40


def main(arguments: Sequence[str]) -> int:
    """0 if every outcome is as expected, 1 if not, 2 if nothing could be run."""
    arguments, extra = _split(list(arguments))
    options = _parser().parse_args(arguments)
    try:
        fetch.check_version(options.version)
        if options.tree:
            fetch.check_tree(options.tree, options.version)
        groups = chosen(options.group, Device.GPU if options.gpu else Device.CPU, options.gpu)
        if options.list:
            for group in groups:
                print(f"{group.name:24} {group.title}")
            return 0
        return run_all(options, groups, extra)
    except MoeNvlinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moe_nvlink_plugin.integration.vllm.upstream",
        description="Runs vLLM's own tests against our backend, and compares every outcome.",
        epilog="After -- come arguments of pytest, for a part of a group.",
    )
    parser.add_argument("--version", default=fetch.installed_version(), help="of vLLM")
    parser.add_argument("--group", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--fast", action="store_true", help="each group's fast subset")
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="on N GPUs, not on CPUs")
    parser.add_argument("--update", action="store_true", help="rewrite counts, add missing rules")
    parser.add_argument("--break", dest="broken", default="", metavar="NAME", help="of our backend")
    parser.add_argument("--list", action="store_true", help="the groups, and nothing else")
    parser.add_argument("--tree", type=Path, help="unpacked tests of vLLM, instead of fetching")
    parser.add_argument("--logs", type=Path, help="where logs go (default: a new folder)")
    return parser


def chosen(names: Sequence[str], device: Device, gpus: int) -> list[Group]:
    """Groups by name, in their order, that the device can run."""
    groups = {group.name: group for group in all_groups()}
    unknown = sorted(set(names) - set(groups))
    if unknown:
        raise ConfigError(f"no group {', '.join(unknown)}; there are: {', '.join(groups)}")
    return [
        group
        for name, group in groups.items()
        if (not names or name in names)
        and device in group.devices
        and (device is Device.CPU or group.gpus <= gpus)
    ]


def run_all(options: argparse.Namespace, groups: Sequence[Group], extra: Sequence[str]) -> int:
    """Every group, one after the other, and a line about each."""
    device = Device.GPU if options.gpu else Device.CPU
    path = expectations.file_of(options.version, device)
    rules = expectations.read(path) if path.exists() or not options.update else {}
    logs = options.logs or Path(tempfile.mkdtemp(prefix="moe_nvlink_upstream_"))
    where = Where(
        options.tree.resolve() if options.tree else fetch.tree(options.version),
        logs.resolve(),
        models.redirect_file(fetch.CACHE / "models"),
        fetch.CACHE / "hub",
        device,
        options.gpu,
        options.broken,
    )
    found = 0
    for group in groups:
        words = (group.fast if options.fast else group.arguments) + tuple(extra)
        if options.fast and not group.fast:
            continue
        known = rules.get(group.name, ())
        ran = run(where, group, words, expectations.left_out(known))
        if options.update:
            known = tuple(expectations.updated(known, ran.results))
            expectations.write_group(path, group.name, known)
        found += _report(
            group,
            ran,
            _differences(where, group, words, known, ran, whole=not options.fast and not extra),
        )
    return 1 if found else 0


def _differences(
    where: Where,
    group: Group,
    words: Sequence[str],
    known: Sequence[Rule],
    ran: Ran,
    *,
    whole: bool,
) -> list[str]:
    found = [f"{group.name}: {ran.ending}"] if ran.ending else []
    if not ran.results:
        found.append(f"{group.name}: no test was run")
    found += expectations.differences(known, ran.results, whole=whole)
    if group.plugin is Plugin.COMPARED:
        without = run(where, group, words, expectations.left_out(known), plugin=False)
        found += [f"{group.name}, without the plugin: {without.ending}"] if without.ending else []
        found += compared(ran.results, without.results)
    return found


def compared(with_it: Mapping[str, Result], without: Mapping[str, Result]) -> list[str]:
    """Tests whose outcome depends on whether our plugin is installed."""
    nothing = Result(Outcome.NOT_RUN, "not collected")
    found = []
    for node in dict.fromkeys([*with_it, *without]):
        one, other = with_it.get(node, nothing), without.get(node, nothing)
        if one.outcome is not other.outcome:
            found.append(f"{node}: with the plugin {one.line()}, without it {other.line()}")
    return found


def _report(group: Group, ran: Ran, found: Sequence[str]) -> int:
    counts = Counter(result.outcome.value for result in ran.results.values())
    said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    verdict = f"{len(found)} DIFFERENCES, output in {ran.output}" if found else "as expected"
    print(f"{group.name}: {said or 'no tests'}; {verdict} ({ran.seconds:.0f} s)", flush=True)
    for line in found[:SHOWN]:
        print(f"  {line}")
    if len(found) > SHOWN:
        print(f"  ... and {len(found) - SHOWN} more")
    return len(found)
