"""Our own recipes and transports, through the same hooks as a stranger's."""

from __future__ import annotations

from .hookspecs import hookimpl
from .recipes import BF16, FP16, FP32, Recipe
from .transport import Transport
from .transport.host import HostTransport
from .transport.nvlink import NvlinkTransport


@hookimpl
def moe_nvlink_recipes() -> list[Recipe]:
    """bf16, fp16, fp32."""
    return [BF16, FP16, FP32]


@hookimpl
def moe_nvlink_transports() -> list[Transport]:
    """host, nvlink."""
    return [HostTransport(), NvlinkTransport()]
