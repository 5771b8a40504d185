from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def turns_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tokens are audited does not depend on the clock."""
    from moe_nvlink_plugin.integration.common import audit

    monkeypatch.setattr(audit, "time", SimpleNamespace(time_ns=lambda: 2**23))
