"""What the software GPU refuses to execute, and what it says of it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.ptx import one_instruction as one
from tests.support import emulated
from tests.support.ptx import build
from tests.support.ptx.machine import (
    DeadlockError,
    DivergenceError,
    Machine,
    MisalignedError,
    OutOfBoundsError,
    PtxError,
    UninitialisedError,
)

#: name -> (body, error, what the message says). Of one CTA of two warps; %p7 is thread 5.
_WRONG: dict[str, tuple[str, type[PtxError], str]] = {
    "misaligned_global": (
        "@%p7 ld.global.u32 %r0, [%record+2];",
        MisalignedError,
        r"thread 5, .*ld.global.u32 %r0, \[%record\+2\].*\n.*4 bytes",
    ),
    "misaligned_vector": (
        "ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%record+8];",
        MisalignedError,
        "16 bytes",
    ),
    "after_an_array": (
        f"ld.global.u32 %r0, [%records+{one.RECORD_BYTES * one.THREADS}];",
        OutOfBoundsError,
        r"lie in no allocation; 2048 after the begin of 'array 0' of rank 0, which has 2048",
    ),
    "before_an_array": (
        "@%p7 st.global.u8 [%results+-1], %tid;",
        OutOfBoundsError,
        "rank 0 launch [01] .* CTA 0 thread 5, PTX line [0-9]+.*st.global.u8",
    ),
    "across_the_end": (
        f"ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%short+{16}];",
        OutOfBoundsError,
        "16 after the begin of 'array 2' of rank 0, which has 24",
    ),
    "beyond_shared": (
        f"mov.u32 %r0, beyond_shared_shared;\nst.shared.u32 [%r0+{one.RECORD_BYTES * one.THREADS}],"
        " %tid;",
        OutOfBoundsError,
        "shared memory, which has 2048",
    ),
    "beyond_parameters": (
        "ld.param.u64 %word0, [beyond_parameters_records+24];",
        OutOfBoundsError,
        "parameter memory, which has 24",
    ),
    "not_written": (
        "mov.u32 %r0, not_written_shared;\n@%p7 ld.shared.u32 %r1, [%r0+12];",
        UninitialisedError,
        "thread 5, .*\n.*shared memory at 12 has not been written by this CTA",
    ),
    "partly_written": (
        "mov.u32 %r0, partly_written_shared;\nst.shared.u16 [%r0], 1;\nld.shared.u32 %r1, [%r0];",
        UninitialisedError,
        "shared memory at 2 ",
    ),
    "diverged_at_a_barrier": (
        "@%p7 bra OTHER;\nbar.sync 0;\nbra.uni END;\nOTHER:\nbar.sync 0;\nEND:",
        DivergenceError,
        "a lane of the same warp came to another barrier: PTX line [0-9]+",
    ),
    "diverged_at_a_shuffle": (
        "@%p7 bra OTHER;\nshfl.sync.bfly.b32 %r0, %tid, 1, 31, -1;\nbra.uni END;\nOTHER:\n"
        "shfl.sync.bfly.b32 %r0, %tid, 1, 31, -1;\nEND:",
        DivergenceError,
        "lanes of its mask wait elsewhere: PTX line [0-9]+",
    ),
    "other_masks": (
        "selp.b32 %r0, 0xff, -1, %p7;\nbar.warp.sync %r0;",
        DivergenceError,
        "mask",
    ),
    "not_in_its_mask": ("bar.warp.sync 1;", DivergenceError, "does not have its own lane"),
    "a_lane_that_left": (
        "@%p7 exit;\nredux.sync.max.u32 %r0, %tid, -1;",
        DivergenceError,
        "a lane of its mask (has )?ended",
    ),
    "value_of_a_stranger": (
        "setp.ge.u32 %p0, %tid, 16;\n@%p0 exit;\nshfl.sync.bfly.b32 %r0, %tid, 16, 31, 0xffff;",
        DivergenceError,
        "it takes the value of lane [0-9]+, which is not in its mask",
    ),
    "waits_for_nobody": (
        "POLL:\nld.acquire.sys.global.u64 %word0, [%records];\nsetp.ne.u64 %p0, %word0, 1;\n"
        "@%p0 bra POLL;",
        DeadlockError,
        "(?s)rank 0 launch [01] .*CTA 0.*ld.acquire.sys.global.u64",
    ),
}


def _entry(name: str) -> str:
    begin = f"setp.eq.u32 %p7, %tid, 5;\nld.param.u64 %short, [{name}_short];\n"
    text = one.entry(name, ".reg .b64 %short;\n" + begin + _WRONG[name][0])
    return text.replace(f"{name}_results)", f"{name}_results, .param .u64 {name}_short)")


@pytest.fixture(scope="module")
def library() -> build.Library:
    return build.load(one.HEAD + "".join(map(_entry, _WRONG)))


def _arrays() -> list[one.Words]:
    """Three parts of one array, between which bytes are nobody's."""
    whole = np.zeros(3 * one.WORDS * one.THREADS, dtype=np.uint64)
    size = one.WORDS * one.THREADS
    return [whole[:size], whole[size + 8 : 2 * size + 8], whole[2 * size + 32 : 2 * size + 35]]


@pytest.mark.parametrize("name", _WRONG)
def test_what_is_wrong_is_reported(name: str, library: build.Library) -> None:
    _body, error, message = _WRONG[name]
    arrays = _arrays()
    with Machine(1, seed=1) as machine:
        for _ in range(2):  # the machine and the library go on after a report
            with pytest.raises(error, match=message) as raised:
                one.run(machine, library[name], arrays)
            assert type(raised.value) is error


def test_released_memory_is_out_of_bounds(library: build.Library) -> None:
    arrays = _arrays()
    kernel = library["waits_for_nobody"]
    params = bytes((ctypes.c_uint64 * 3)(*(array.ctypes.data for array in arrays)))
    with Machine(1, seed=1) as machine:
        machine.allocate(0, arrays[0].ctypes.data, arrays[0].nbytes, "released")
        machine.release(arrays[0].ctypes.data)
        machine.launch(0, kernel, 1, 32, params)
        with pytest.raises(OutOfBoundsError, match="lie in no allocation"):
            machine.run()


def test_what_does_not_fit_the_machine_is_refused(library: build.Library) -> None:
    kernel = library["waits_for_nobody"]
    with Machine(1) as machine:
        with pytest.raises(ValueError, match="takes 24 bytes of parameters, not 8"):
            machine.launch(0, kernel, 1, 32, bytes(8))
        with pytest.raises(ValueError, match="load it with the machine's"):
            machine.launch(0, kernel._replace(mode=(True, False)), 1, 32, bytes(24))


_STUCK = """extern "C" __global__ void stuck(volatile unsigned* word) {
  if (threadIdx.x == 3) {
    while (word[0] != 7) {
    }
  }
  __syncthreads();
  word[1] = 1;
}
"""


def test_a_deadlock_names_each_cta_with_its_source_line() -> None:
    """By -lineinfo: the line of the loop, and that of the barrier where the others wait."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
    words = np.zeros(2, dtype=np.uint32)
    library = build.load(build.ptx_of(_STUCK, "sm_90a"))
    with Machine(2, seed=1) as machine:
        machine.allocate(1, words.ctypes.data, words.nbytes, "words")
        for rank in range(2):
            params = bytes(ctypes.c_uint64(words.ctypes.data))
            machine.launch(rank, library["stuck"], 2, 64, params)
        with pytest.raises(DeadlockError) as raised:
            machine.run()
        report = str(raised.value)
        for rank in range(2):
            for cta in range(2):
                of_cta = [line for line in report.splitlines() if f"CTA {cta}" in line]
                assert any(f"rank {rank}" in line for line in of_cta), report
        assert "source line 3" in report, report
        assert "source line 6" in report, report


@pytest.mark.parametrize("small", [False, True], ids=["bulk", "small"])
@pytest.mark.parametrize("seed", range(1, 4))
def test_a_dispatch_that_is_repeated_without_its_combine(seed: int, small: bool) -> None:
    """However the ranks' threads take turns: rows may be lost, and no other fault may say so."""
    emulated.check_repeated_dispatch("ptx", small=small, ctas=4, seed=seed)


def test_words_that_are_older_than_half_of_all_epochs() -> None:
    emulated.check_stale_pulled_cell("ptx", ctas=4)
    for small in (False, True):
        emulated.check_stale_end_of_reading("ptx", small=small, ahead=2**31 - 5, ctas=4)
