"""Names of SGLang that the dispatchers touch; `compat` lists them with all others."""

from __future__ import annotations

from moe_nvlink_plugin.integration.common.names import Fields, Touched

TOUCHED: tuple[Touched, ...] = ()
FIELDS: tuple[Fields, ...] = ()
