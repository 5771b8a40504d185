"""PTX entries that show what single instructions do, and what runs one over an array.

An entry takes the addresses of records and of results: thread i has record i, four words of 64
bits, which are its operands' raw bits, and writes result i.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.ptx.machine import Machine

WORDS = 4
RECORD_BYTES = 8 * WORDS
THREADS = 64
#: What results have where nothing is written.
POISON = 0xEEEEEEEEEEEEEEEE
Words = npt.NDArray[np.uint64]

HEAD = """.version 8.8
.target sm_100a
.address_size 64
"""

_ENTRY = """
.visible .entry {name}(.param .u64 {name}_records, .param .u64 {name}_results)
{{
.reg .pred %p<8>, %d_pred;
.reg .b32 %tid, %ctaid, %ntid, %index, %r<16>;
.reg .b64 %records, %results, %offset, %record, %result, %word<8>;
{declared}
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


def entry(
    name: str,
    body: str,
    declared: str = "",
    *,
    words: int = WORDS,
    shared: int = THREADS * RECORD_BYTES,
) -> str:
    """An entry whose body has %record and %result, both global, and %index, %tid.

    Args:
        words: of a result.
        shared: bytes of its shared memory.
    """
    return _ENTRY.format(
        name=name,
        body=body,
        declared=declared,
        shared=shared,
        record_bytes=RECORD_BYTES,
        result_bytes=8 * words,
    )


#: The register that holds a type, and how 64 bits get into it and out of it.
_NARROW = {
    8: ("b16", "cvt.u16.u64 {0}, {1};", "cvt.u64.u16 {1}, {0};"),
    16: ("b16", "cvt.u16.u64 {0}, {1};", "cvt.u64.u16 {1}, {0};"),
    32: ("b32", "cvt.u32.u64 {0}, {1};", "cvt.u64.u32 {1}, {0};"),
    64: ("b64", "mov.b64 {0}, {1};", "mov.b64 {1}, {0};"),
    1: ("pred", "setp.ne.u64 {0}, {1}, 0;", "selp.u64 {1}, 1, 0, {0};"),
}


def over_values(name: str, texts: Sequence[str], sources: Sequence[int], result: int) -> str:
    """An entry that computes %d of %a0, %a1, ... by each text, and writes one word for each.

    Args:
        sources, result: widths of the registers in bits; 1: a predicate.
    """
    declared = [f".reg .{_NARROW[bits][0]} %a{n};" for n, bits in enumerate(sources)]
    declared.append(f".reg .{_NARROW[result][0]} %d;")
    lines = []
    for number, bits in enumerate(sources):
        lines.append(f"ld.global.u64 %word{number}, [%record+{8 * number}];")
        lines.append(_NARROW[bits][1].format(f"%a{number}", f"%word{number}"))
    for number, text in enumerate(texts):
        lines += [text, _NARROW[result][2].format("%d", "%word7")]
        lines.append(f"st.global.u64 [%result+{8 * number}], %word7;")
    return entry(name, "\n".join(lines), "\n".join(declared), words=len(texts), shared=16)


class Bench:
    """One rank that runs entries of a library."""

    def __init__(self, library: Any, seed: int = 1) -> None:
        self.library = library
        self.machine = Machine(ranks=1, seed=seed)
        self.last_params = b""

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.machine.close()

    def run(self, name: str, records: Words, words: int = WORDS) -> Words:
        """The results of as many threads as there are records, each of so many words."""
        threads = THREADS
        count = -(-len(records) // threads) * threads
        padded = np.zeros((count, WORDS), dtype=np.uint64)
        padded[: len(records), : records.shape[1]] = records
        results = np.full((count, words), POISON, dtype=np.uint64)
        self.run_on(name, (padded, results), (count // threads, 1, 1), (threads, 1, 1))
        return results[: len(records)]

    def run_on(
        self,
        name: str,
        arrays: Sequence[Words],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
    ) -> None:
        """One launch whose parameters are the arrays' addresses."""
        for number, array in enumerate(arrays):
            self.machine.allocate(0, array.ctypes.data, array.nbytes, f"array {number}")
        self.last_params = params = bytes(
            (ctypes.c_uint64 * len(arrays))(*(array.ctypes.data for array in arrays))
        )
        try:
            self.machine.launch(0, self.library[name], grid, block, params)
            self.machine.run()
        finally:
            for array in arrays:
                self.machine.release(array.ctypes.data)
