"""vLLM's own tests end as `tests/upstream/groups.yaml` says, and notice a broken backend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.upstream import adapt, fetch, models
from tests.upstream.groups import VERSION, all_groups
from tests.upstream.run import Where, check

#: One layer on two ranks.
CASE = "False-moe_nvlink-2-1-True"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def tree() -> Path:
    """vLLM's tests, fetched once."""
    assert fetch.installed_version() == VERSION, f"groups.yaml is about vLLM {VERSION}"
    try:
        return fetch.tree(VERSION)
    except fetch.UnreachableError as error:
        # Where tests run for others to rely on, these are not left out in silence.
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no registry can be reached; {error}")


def where(tree: Path, logs: Path, *, broken: bool = False) -> Where:
    redirects = models.redirect_file(fetch.CACHE / "models")
    return Where(tree, logs, redirects, fetch.CACHE / "hub", broken=broken)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", all_groups())
def test_a_whole_group_ends_as_expected(name: str, tree: Path, tmp_path: Path) -> None:
    assert check(where(tree, tmp_path), all_groups()[name]) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_vllms_tests_catch_a_broken_backend(tree: Path, tmp_path: Path) -> None:
    """One of our classes sends tokens to the next rank's experts; vLLM's comparison fails."""
    broken = where(tree, tmp_path, broken=True)
    found = check(broken, all_groups()["moe-layer"], "-k", CASE)
    assert any(CASE in line for line in found), found
    assert "Mismatched elements" in (tmp_path / "moe-layer.log").read_text()


def test_what_is_selected_exists(tree: Path) -> None:
    for group in all_groups().values():
        for name in group.adapters:
            assert Path(adapt.__path__[0], f"{name}.py").is_file(), f"{group.name}: {name}"
        for word in group.arguments:
            path, *function = word.split("[")[0].split("::")
            if not path.startswith("tests/"):
                continue
            found = tree / path
            assert found.exists(), f"{group.name}: {path}"
            assert not function or f" {function[-1]}" in found.read_text("utf-8"), word
