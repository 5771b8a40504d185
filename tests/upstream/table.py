"""The table of integration/README.md: what became of the selected tests, from the expectations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_nvlink_plugin.errors import ConfigError
from moe_nvlink_plugin.integration.vllm import compat

from . import expectations
from .expectations import CANNOT_RUN, FAILED, PASSED, Rule
from .groups import Device, Group, Plugin
from .selection import all_groups

README = Path(__file__).resolve().parents[2] / "integration" / "README.md"
BEGIN = "<!-- upstream tests: written by `--write-table` -->"
END = "<!-- end of upstream tests -->"
HEADER = (
    "| vLLM's tests | our backend | passed | failed for vLLM's reasons | cannot run here |\n"
    "|---|---|---|---|---|\n"
)
ROLES = {
    Plugin.SELECTED: "chosen",
    Plugin.INSTALLED: "not chosen",
    Plugin.COMPARED: "not chosen; as without the plugin",
}


def text(folder: Path = expectations.FOLDER) -> str:
    """All that stands between the markers."""
    sections = []
    for version in compat.READ:
        path = expectations.file_of(version, Device.CPU, folder)
        if path.is_file():
            sections.append(section(version, all_groups(), expectations.read(path)))
    return "\n".join(sections)


def section(version: str, groups: Sequence[Group], rules: Mapping[str, Sequence[Rule]]) -> str:
    """Of one version: a row per group, and the reasons behind the numbers."""
    lines = [f"vLLM {version} on CPU processes:\n", HEADER.rstrip("\n")]
    total: Counter[str] = Counter()
    for group in groups:
        if group.name in rules:
            counts = _counts(rules[group.name])
            total += counts
            lines.append(_row(group.title, ROLES[group.plugin], counts))
    lines.append(_row("all", "", total))
    for outcome, heading in ((FAILED, "Failed"), (CANNOT_RUN, "Cannot run here")):
        lines += _reasons(heading, outcome, groups, rules)
    return "\n".join(lines) + "\n"


def _counts(rules: Sequence[Rule]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for rule in rules:
        counts[rule.outcome] += rule.count
    return counts


def _row(title: str, role: str, counts: Mapping[str, int]) -> str:
    numbers = (str(counts.get(outcome, 0)) for outcome in (PASSED, FAILED, CANNOT_RUN))
    return f"| {title.replace('|', chr(92) + '|')} | {role} | {' | '.join(numbers)} |"


def _reasons(
    heading: str,
    outcome: str,
    groups: Sequence[Group],
    rules: Mapping[str, Sequence[Rule]],
) -> list[str]:
    counts: Counter[str] = Counter()
    for group in groups:
        for rule in rules.get(group.name, ()):
            if rule.outcome == outcome:
                counts[rule.reason.strip()] += rule.count
    if not counts:
        return []
    return [f"\n{heading}:\n"] + [f"- {count}: {reason}" for reason, count in counts.most_common()]


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
