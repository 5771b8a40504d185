"""A pytest plugin of every upstream run: leaves tests out, and writes down which are to run.

It also writes whether vLLM has asked our plugin for a platform, and whether it has taken ours:
without that a run shows nothing. It imports nothing of our package, because runs without our plugin
load it too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

#: Imported by vLLM alone, when it follows our entry point; it may then stay out.
PLATFORM = "moe_nvlink_plugin.integration.vllm.plugin.platform"


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option: a JSON file with `leave_out` (patterns of node ids) and `chosen` (a path)."""
    parser.addoption("--upstream-selection", type=Path, required=True, help="see run.py")


def pytest_configure(config: pytest.Config) -> None:
    """Starts what does the work."""
    order = json.loads(config.getoption("--upstream-selection").read_text(encoding="utf-8"))
    selection = _Selection(order["leave_out"], Path(order["chosen"]))
    config.pluginmanager.register(selection)
    # pytest asks no hook about a file that is named on its command line.
    config.args[:] = [one for one in config.args if not one.endswith(".py") or selection.keeps(one)]


class _Selection:
    def __init__(self, leave_out: list[str], chosen: Path) -> None:
        #: As in the expectations files: only * is wild.
        self._leave_out = [
            re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
            for pattern in leave_out
        ]
        self._chosen = chosen
        self._left_out: list[str] = []
        self._names: list[str] = []
        self._taken = False

    def keeps(self, node: str) -> bool:
        """Whether a file or test is to run; remembers those that are not."""
        if not any(pattern.fullmatch(node) for pattern in self._leave_out):
            return True
        if node not in self._left_out:
            self._left_out.append(node)
        return False

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """A file that is named as a whole is not even imported."""
        if collection_path.suffix != ".py" or not collection_path.is_relative_to(config.rootpath):
            return None
        name = collection_path.relative_to(config.rootpath).as_posix()
        return None if self.keeps(name) else True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        """After `-k` and its like, so that what they take away is not counted as left out."""
        yield
        kept = [item for item in items if self.keeps(item.nodeid)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Before the first test, which may take the process with it."""
        self._names = [item.nodeid for item in session.items]
        self._taken = is_taken()  # a test may leave another platform behind
        self._write()

    def pytest_sessionfinish(self) -> None:
        """Once vLLM has had every reason to load its plugins."""
        self._write(platform=self._taken or is_taken(), asked=PLATFORM in sys.modules)

    def _write(self, **said: bool) -> None:
        chosen = {"chosen": self._names, "left_out": self._left_out, **said}
        self._chosen.write_text(json.dumps(chosen), encoding="utf-8")


def is_taken() -> bool:
    """Whether the platform that vLLM works with is ours. Never makes vLLM choose one."""
    platforms = sys.modules.get("vllm.platforms")
    chosen = None if platforms is None else vars(platforms).get("_current_platform")
    return type(chosen).__module__ == PLATFORM
