"""PTX entries that show what single instructions do, and what runs one over arrays.

Thread i has record i of the first array, four words of 64 bits, and result i of the second one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.support.ptx.build import Kernel
from tests.support.ptx.machine import Machine

WORDS = 4
RECORD_BYTES = 8 * WORDS
THREADS = 64
Words = npt.NDArray[np.uint64]

HEAD = """.version 8.8
.target sm_100a
.address_size 64
"""

_ENTRY = """
.visible .entry {name}(.param .u64 {name}_records, .param .u64 {name}_results)
{{
.reg .pred %p<8>;
.reg .b32 %tid, %ctaid, %ntid, %index, %r<16>;
.reg .b64 %records, %results, %offset, %record, %result, %word<8>;
.shared .align 16 .b8 {name}_shared[{shared}];
ld.param.u64 %records, [{name}_records];
ld.param.u64 %results, [{name}_results];
mov.u32 %tid, %tid.x;
mov.u32 %ctaid, %ctaid.x;
mov.u32 %ntid, %ntid.x;
mad.lo.s32 %index, %ctaid, %ntid, %tid;
mul.wide.u32 %offset, %index, {record_bytes};
add.s64 %record, %records, %offset;
mul.wide.u32 %offset, %index, {result_bytes};
add.s64 %result, %results, %offset;
{body}
ret;
}}
"""


def entry(name: str, body: str, *, words: int = WORDS) -> str:
    """An entry whose body has %record and %result, both global, and %index, %tid; words: of a
    result.
    """
    return _ENTRY.format(
        name=name,
        body=body,
        shared=THREADS * RECORD_BYTES,
        record_bytes=RECORD_BYTES,
        result_bytes=8 * words,
    )


def run(machine: Machine, kernel: Kernel, arrays: Sequence[Words], ctas: int = 1) -> None:
    """One launch whose parameters are the arrays' addresses."""
    for number, array in enumerate(arrays):
        machine.allocate(0, array.ctypes.data, array.nbytes, f"array {number}")
    params = np.array([array.ctypes.data for array in arrays], np.uint64).tobytes()
    machine.launch(0, kernel, ctas, THREADS, params)
    machine.run()
