"""Fetches a framework's wheel for its source: by pip, without its dependencies, kept on disk."""

from __future__ import annotations

import os
from typing import NamedTuple, NoReturn

import pytest

from tests.integration.common.framework_source import Source
from tests.support import wheels


def left_out(error: wheels.FetchError) -> NoReturn:
    """Skips the test where no registry can be reached, and fails it for any other reason."""
    # Where tests run for others to rely on, this one is not left out in silence.
    if isinstance(error, wheels.UnreachableError) and not os.environ.get("CI"):
        pytest.skip(f"no registry can be reached; {error}")
    pytest.fail(str(error))


class Wheels(NamedTuple):
    """Wheels of one distribution, which has one package of the same name.

    python: the version whose wheels are asked for. platforms: tags they are published under; pip
    matches them one by one. left_out: folders that hold nothing we touch but what `kept` names.
    """

    name: str
    python: str
    platforms: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()

    def source(self, version: str) -> Source:
        """The Python files of one release. Skips the test where no registry can be reached."""
        platforms = [word for platform in self.platforms for word in ("--platform", platform)]
        try:
            folder = wheels.files_of(
                self.name,
                version,
                self._is_wanted,
                "".join([*self.left_out, *sorted(self.kept)]),
                ("--python-version", self.python, *platforms),
            )
        except wheels.FetchError as error:
            left_out(error)
        return Source(folder, version, self.name)

    def _is_wanted(self, name: str) -> bool:
        is_source = name.endswith(".py")
        return is_source and (name in self.kept or not name.startswith(self.left_out))
