"""What the GPU compiler makes of a dispatch with counts per expert: compiled and read, not run."""

from __future__ import annotations

import functools
import re

import pytest

from moe_nvlink_plugin.exchange.kernels import DISPATCH, LAYER, SMALL_DISPATCH
from moe_nvlink_plugin.jit import nvrtc
from moe_nvlink_plugin.launch.kernel import Kernel
from tests.kernels.test_nvrtc import cuobjdump, disassemble, generic_accesses
from tests.kernels.test_small_dispatch_nvrtc import MAX_REGISTERS as MAX_SMALL_REGISTERS

pytestmark = pytest.mark.timeout(280)

each_kernel = pytest.mark.parametrize("kernel", [DISPATCH, SMALL_DISPATCH], ids=lambda k: k.name)
each_architecture = pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])


@functools.cache
def cubin(kernel: Kernel[object], counts: str, architecture: str) -> bytes:
    made = LAYER.variant(top_k=8, expert_counts=counts).build(kernel, pdl=True)
    return nvrtc.compile_cubin(made.text(), architecture)


def names(kernel: Kernel[object], counts: str, architecture: str) -> tuple[str, ...]:
    code = disassemble(cubin(kernel, counts, architecture), kernel.entry)
    return tuple(one.name for one in code)


def found(names: tuple[str, ...], pattern: str) -> list[str]:
    return [name for name in names if re.match(pattern, name)]


#: 896 threads, one for each vector of a bf16 row of 7168. The launch asks the driver how many
#: threads the registers allow; without counts they allow 1024.
BULK_REGISTERS = 72


@each_kernel
@each_architecture
def test_registers_and_no_spills(kernel: Kernel[object], architecture: str) -> None:
    """Small batches have the limit of the builds without counts."""
    usage = cuobjdump(cubin(kernel, "yes", architecture), "-res-usage")
    line = re.search(rf"Function {kernel.entry}:\n\s*(REG:.*)", usage)
    assert line is not None, usage
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line[1])}
    assert numbers["STACK"] == numbers["LOCAL"] == 0, line[1]
    limit = BULK_REGISTERS if kernel is DISPATCH else MAX_SMALL_REGISTERS
    assert numbers["REG"] <= limit, line[1]
    assert not generic_accesses(names(kernel, "yes", architecture))


@each_kernel
@each_architecture
def test_what_counts_add(kernel: Kernel[object], architecture: str) -> None:
    """No release, no acquire and no arrival; a reduction that nobody waits for; units of 16 bytes.

    The builds without counts have none of it: test_nvrtc.py and test_small_dispatch_nvrtc.py know
    each of their ordered accesses.
    """
    without, with_counts = (names(kernel, counts, architecture) for counts in ("no", "yes"))
    for ordered in (r"MEMBAR", r"CCTL", r"FENCE", r"ATOM"):
        assert len(found(with_counts, ordered)) == len(found(without, ordered)), ordered
    added = {
        pattern: len(found(with_counts, pattern)) - len(found(without, pattern))
        for pattern in (r"RED", r"STG\.E\.128\.STRONG\.SYS", r"LDG\.E\.128\.STRONG\.SYS")
    }
    # A unit's store, and the zeros after it has been read.
    assert list(added.values()) == [1, 2, 1], added
