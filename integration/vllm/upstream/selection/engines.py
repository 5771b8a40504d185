"""To be written."""

from __future__ import annotations

from ..groups import Group

GROUPS: tuple[Group, ...] = ()
