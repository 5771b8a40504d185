"""The table of README.md in this folder: outcomes of the selected tests, from the expectations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.integration.vllm import compat

from . import expectations
from .expectations import CANNOT_RUN, FAILED, PASSED
from .groups import Group, Plugin, all_groups
from .within.moe_nvlink_upstream_expected import Rule

README = Path(__file__).with_name("README.md")
BEGIN = "<!-- upstream tests: written by `--write-table` -->"
END = "<!-- end of upstream tests -->"
HEADER = (
    "| vLLM's tests | our backend | passed | failed, as listed below | cannot run here |\n"
    "|---|---|---|---|---|"
)
ROLES = {
    Plugin.SELECTED: "chosen",
    Plugin.INSTALLED: "not chosen",
    Plugin.COMPARED: "not chosen; compared",
}


def text() -> str:
    """All that stands between the markers."""
    paths = {version: expectations.file_of(version) for version in compat.READ}
    return "\n".join(
        section(version, all_groups(), expectations.read(path))
        for version, path in paths.items()
        if path.is_file()
    )


def section(version: str, groups: Sequence[Group], rules: Mapping[str, Sequence[Rule]]) -> str:
    """The part about one version: a row per group, and the reasons of what failed."""
    lines = [f"vLLM {version} on CPU processes:\n", HEADER]
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for group in (group for group in groups if group.name in rules):
        counts: Counter[str] = Counter()
        for rule in rules[group.name]:
            counts[rule.outcome] += rule.count
            if rule.outcome == FAILED:
                reasons[rule.reason.strip()] += rule.count
        total += counts
        lines.append(_row(group.title, ROLES[group.plugin], counts))
    lines.append(_row("all", "", total))
    if reasons:
        lines.append("\nFailed:\n")
        lines += [f"- {count}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _row(title: str, role: str, counts: Mapping[str, int]) -> str:
    numbers = (str(counts.get(outcome, 0)) for outcome in (PASSED, FAILED, CANNOT_RUN))
    return f"| {title} | {role} | {' | '.join(numbers)} |"


def replaced(document: str, new: str) -> str:
    """The document with `new` between its markers."""
    before, found, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end or BEGIN in rest:
        raise ConfigError(f"the document must have the lines {BEGIN!r} and {END!r} once, in order")
    return f"{before}{BEGIN}\n{new}{END}{after}"


def write(readme: Path = README) -> None:
    """Renews the table in place."""
    document = readme.read_text(encoding="utf-8")
    readme.write_text(replaced(document, text()), encoding="utf-8")
