"""Words of st.async.release on the software GPU: they come late, and none after the kernel."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx import build
from tests.support.ptx.machine import Machine

SEEDS = range(40)
#: Thread 0 stores a word by STORE and then another one, for which thread 1 waits. What that one
#: then finds in the first word is the third.
PROGRAM = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry words(.param .u64 memory)
{
.reg .pred %p<2>;
.reg .b32 %r<1>;
.reg .b64 %rd<4>;
ld.param.u64 %rd0, [memory];
mov.u32 %r0, %tid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra WAIT;
STORE [%rd0], 1;
st.relaxed.sys.global.u64 [%rd0+8], 1;
ret;
WAIT:
ld.relaxed.sys.global.u64 %rd1, [%rd0+8];
setp.eq.u64 %p1, %rd1, 0;
@%p1 bra WAIT;
ld.relaxed.sys.global.u64 %rd2, [%rd0];
st.relaxed.sys.global.u64 [%rd0+16], %rd2;
ret;
}
"""


def found(store: str, *, races: bool = False) -> set[int]:
    """What thread 1 has found, over the seeds."""
    kernel = build.load(PROGRAM.replace("STORE", store), races=races)["words"]
    seen = set()
    for seed in SEEDS:
        machine, memory = Machine(1, seed=seed, races=races), np.zeros(3, np.uint64)
        machine.allocate(0, memory.ctypes.data, memory.nbytes, "memory")
        parameters = np.array([memory.ctypes.data], np.uint64).tobytes()
        machine.launch(0, kernel, 1, 2, parameters)
        machine.run()
        machine.close()
        assert memory[0] == 1, "the kernel has ended, and the word is not there"
        seen.add(int(memory[2]))
    return seen


def test_later_words_may_come_before() -> None:
    assert found("st.async.release.sys.global.b64") == {0, 1}


def test_words_of_a_release_do_not() -> None:
    """The control: this machine runs one thread at a time."""
    assert found("st.release.sys.global.u64") == {1}


@pytest.mark.parametrize(
    "form", ["st.async.release.sys.global.b32", "st.async.release.cta.shared.b64"]
)
def test_other_forms_are_unknown(form: str) -> None:
    with pytest.raises(Exception, match="st.async is a release of a word in global memory only"):
        found(form)
