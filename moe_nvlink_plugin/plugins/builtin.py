"""Recipes and transports of this package, through the hooks that third-party plugins use."""

from __future__ import annotations

from moe_nvlink_plugin.recipes import BUILT_IN, Recipe
from moe_nvlink_plugin.transport import Transport
from moe_nvlink_plugin.transport.host import HostTransport
from moe_nvlink_plugin.transport.nvlink import NvlinkTransport

from .hookspecs import hookimpl


@hookimpl
def moe_nvlink_recipes() -> list[Recipe]:
    """Return bf16, fp16, fp32, fp8_block, fp8_token, fp8_tensor, mxfp8 and nvfp4."""
    return list(BUILT_IN)


@hookimpl
def moe_nvlink_transports() -> list[Transport]:
    """Return host and nvlink."""
    return [HostTransport(), NvlinkTransport()]
