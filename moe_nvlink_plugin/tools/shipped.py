"""Every kernel that the package ships, which doctor and precompile go through."""

from __future__ import annotations

import hashlib

from moe_nvlink_plugin.exchange.kernels import LAYER
from moe_nvlink_plugin.jit import host
from moe_nvlink_plugin.launch.kernel import Family, host_source
from moe_nvlink_plugin.lm_head.kernels import HEAD

#: Help and reports name the families in this order.
FAMILIES: tuple[Family, ...] = (LAYER, HEAD)


def kernel_text_digest() -> str:
    """Return a digest of the kernels' source. Ranks compare it to find different installations."""
    return hashlib.sha256(host_source(FAMILIES).encode()).hexdigest()[:16]


def load_host_libraries() -> None:
    """Load the host library of each family, and compare its structs with Python's mirrors. Local.

    It takes seconds for a library that is not in the cache.

    Raises:
        CompileError: a library cannot be compiled, or a struct in it differs from its mirror.
    """
    for family in FAMILIES:
        library = host.load(family.host_source())
        for kernel in family.kernels:
            library.kernel(kernel.name, kernel.args_type())
