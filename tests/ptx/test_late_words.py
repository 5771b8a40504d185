"""What threads may find of each other's words on the software GPU, over all orders.

Words of st.async.release come late, and none after the kernel. The elements of a vector come one by
one, and 16 bytes as a whole.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx import build
from tests.support.ptx.machine import Machine

SEEDS = range(40)
#: Thread 0 stores; thread 1 may wait, and looks.
PROGRAM = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry words(.param .u64 memory, .param .u64 found)
{{
.reg .pred %p<2>;
.reg .b32 %r<1>;
.reg .b64 %rd<6>;
.reg .b128 %whole<2>;
ld.param.u64 %rd0, [memory];
ld.param.u64 %rd1, [found];
mov.u32 %r0, %tid.x;
mov.u64 %rd4, 1;
mov.b128 %whole0, {{%rd4, %rd4}};
setp.ne.u32 %p0, %r0, 0;
@%p0 bra WAIT;
{stores}
ret;
WAIT:
{loads}
st.global.u64 [%rd1], %rd2;
st.global.u64 [%rd1+8], %rd3;
ret;
}}
"""


def found(stores: str, loads: str) -> set[tuple[int, ...]]:
    """%rd2 and %rd3 of thread 1, over the seeds."""
    kernel = build.load(PROGRAM.format(stores=stores, loads=loads))["words"]
    seen = set()
    for seed in SEEDS:
        memory, result = np.zeros(4, np.uint64), np.zeros(2, np.uint64)
        parts = memory[memory.ctypes.data // 8 % 2 :][:2], result  # the words at 16 bytes
        with Machine(1, seed=seed) as machine:
            for each in parts:
                machine.allocate(0, each.ctypes.data, each.nbytes, "words")
            addresses = np.array([each.ctypes.data for each in parts], np.uint64)
            machine.launch(0, kernel, 1, 2, addresses.tobytes())
            machine.run()
        assert parts[0].tolist() == [1, 1], "the kernel has ended, and a word is not there"
        seen.add(tuple(result.tolist()))
    return seen


@pytest.mark.parametrize(
    ("store", "words"), [("st.async.release.sys.global.b64", {0, 1}), ("st.release.sys.u64", {1})]
)
def test_words_behind_an_asynchronous_one_may_come_before_it(store: str, words: set[int]) -> None:
    """The control is a release: this machine runs one thread at a time."""
    stores = f"{store} [%rd0], 1;\nst.relaxed.sys.global.u64 [%rd0+8], 1;"
    loads = """ld.relaxed.sys.global.u64 %rd3, [%rd0+8];
setp.eq.u64 %p1, %rd3, 0;
@%p1 bra WAIT;
ld.relaxed.sys.global.u64 %rd2, [%rd0];"""
    assert found(stores, loads) == {(word, 1) for word in words}


@pytest.mark.parametrize("whole", [False, True])
def test_elements_of_a_vector_come_apart(whole: bool) -> None:
    """As the two words of a TwoMarkUnit (P10), and as the one of a OneMarkUnit."""
    kind, new, old = (
        ("b128", "%whole0", "%whole1") if whole else ("v2.u64", "{%rd4, %rd4}", "{%rd2, %rd3}")
    )
    stores = f"st.relaxed.sys.global.{kind} [%rd0], {new};"
    loads = (
        f"ld.relaxed.sys.global.{kind} {old}, [%rd0];\n" + "mov.b128 {%rd2, %rd3}, %whole1;" * whole
    )
    one_by_one = set() if whole else {(0, 1), (1, 0)}
    assert found(stores, loads) == {(0, 0), (1, 1)} | one_by_one
