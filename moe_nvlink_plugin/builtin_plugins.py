"""Our own recipes and transports, through the same hooks as a stranger's."""

from __future__ import annotations

from .hookspecs import hookimpl
from .recipes import BUILT_IN, Recipe
from .transport import Transport
from .transport.host import HostTransport
from .transport.nvlink import NvlinkTransport


@hookimpl
def moe_nvlink_recipes() -> list[Recipe]:
    """bf16, fp16, fp32; fp8_block, fp8_token, fp8_tensor, mxfp8, nvfp4."""
    return list(BUILT_IN)


@hookimpl
def moe_nvlink_transports() -> list[Transport]:
    """host, nvlink."""
    return [HostTransport(), NvlinkTransport()]
