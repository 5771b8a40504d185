"""Units of small batches (kernels/include/moe_nvlink/units.h), executed as PTX.

A rank stores units, another one looks at them: a word arrives as a whole, the two words of a
TwoMarkUnit in any order, and a unit whose words all have the mark has its data.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from moe_nvlink_plugin.jit import source
from tests.support.ptx import build
from tests.support.ptx.machine import Machine, MisalignedError

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

THREADS = 32
COPY, UNITS = "include/moe_nvlink/copy.h", "include/moe_nvlink/units.h"
MARK = 0x8005
#: Of each kind: parts of 4 bytes that a thread stores, bytes of a word that arrives as a whole, and
#: bits of a unit that are data.
KINDS = {"TwoMarkUnit": (3, 8, 96), "OneMarkUnit": (4, 16, 112)}

#: Of each thread: parts of a unit that it stores, looks at, or waits for and clears.
TEXT = """
using namespace moe_nvlink;
using Unit = KIND;
extern "C" __global__ void put(char* units, const uint32_t* data) {
  uint32_t mine[Unit::kParts];
  for (int i = 0; i < Unit::kParts; ++i) mine[i] = load_word(data + Unit::kParts * threadIdx.x + i);
  put_unit(units + kUnitBytes * threadIdx.x, Unit::pack(mine, mark_of(5)));
}
extern "C" __global__ void look(char* units, uint64_t* found) {
  const Unit unit = look_at_unit<Unit>(units + kUnitBytes * threadIdx.x);
  uint32_t* halves = reinterpret_cast<uint32_t*>(found + 2 * threadIdx.x);
  for (int i = 0; i < 4; ++i) store_word(halves + i, unit.halves[i]);
}
extern "C" __global__ void take(char* units, uint32_t* data) {
  char* place = units + kUnitBytes * threadIdx.x;
  Unit unit = look_at_unit<Unit>(place);
  while (!unit.has_arrived(mark_of(5))) unit = look_at_unit<Unit>(place);
  clear_unit<Unit>(place);
  uint32_t parts[Unit::kParts];
  unit.unpack(parts);
  data += Unit::kParts * threadIdx.x;
  for (int i = 0; i < Unit::kParts; ++i) store_word(data + i, parts[i]);
}
"""


@functools.cache
def library(kind: str, races: bool) -> build.Library:
    text = source.amalgamate((source.CONFIG_HEADER, COPY, UNITS)) + TEXT.replace("KIND", kind)
    return build.load(build.ptx_of(text, "sm_90a"), races=races)


class Ranks:
    """Rank 0, which stores units into the memory of rank 1."""

    def __init__(self, kind: str, seed: int, *, races: bool = False) -> None:
        self.machine = Machine(2, seed=seed, races=races)
        generator = np.random.default_rng(seed)
        self.kind, self.races = kind, races
        parts, _, bits = KINDS[kind]
        self.data = generator.integers(0, 2**32, (THREADS, parts), np.uint32)
        if bits % 32:
            self.data[:, -1] &= 0xFFFF
        raw = np.zeros(16 * (THREADS + 1), np.uint8)
        start = -raw.ctypes.data % 16
        self.units = raw[start : start + 16 * THREADS].view(np.uint64).reshape(THREADS, 2)
        self.found = np.zeros((THREADS, 2), np.uint64)
        self.taken = np.zeros((THREADS, parts), np.uint32)
        for rank, name in ((0, "data"), (1, "units"), (1, "found"), (1, "taken")):
            memory = getattr(self, name)
            self.machine.allocate(rank, memory.ctypes.data, memory.nbytes, name)

    def launch(self, rank: int, name: str, second: str, shift: int = 0) -> None:
        addresses = (self.units.ctypes.data + shift, getattr(self, second).ctypes.data)
        params = b"".join(address.to_bytes(8, "little") for address in addresses)
        self.machine.launch(rank, library(self.kind, self.races)[name], 1, THREADS, params)


pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_who_finds_both_marks_has_the_data(seed: int, races: bool, kind: str) -> None:
    """Relaxed words of both ranks are no race; and clearing them comes after the store that was
    observed.
    """
    ranks = Ranks(kind, seed, races=races)
    ranks.launch(0, "put", "data")
    ranks.launch(1, "take", "taken")
    ranks.machine.run()
    assert np.array_equal(ranks.taken, ranks.data)
    assert not ranks.units.any()
    ranks.machine.close()


def test_words_arrive_as_a_whole_and_apart(kind: str) -> None:
    """Old and new in every order: what is looked at while it is stored is zero or has its mark."""
    seen = set()
    word_bytes = KINDS[kind][1]
    for seed in range(40):
        ranks = Ranks(kind, seed)
        ranks.launch(0, "put", "data")
        ranks.launch(1, "look", "found")
        ranks.machine.run()
        found, stored = (
            each.view(f"V{word_bytes}").reshape(THREADS, -1) for each in (ranks.found, ranks.units)
        )
        assert (ranks.units[:, -1] >> 48 == MARK).all()
        empty = np.zeros(word_bytes, np.uint8).view(f"V{word_bytes}")
        assert ((found == empty) | (found == stored)).all()
        seen |= {tuple(map(bool, each)) for each in found != empty}
        ranks.machine.close()
    assert seen == set(itertools.product((False, True), repeat=16 // word_bytes))


def test_a_unit_is_aligned_as_a_whole(kind: str) -> None:
    ranks = Ranks(kind, 0)
    ranks.launch(0, "put", "data", shift=8)
    with pytest.raises(MisalignedError):
        ranks.machine.run()
    ranks.machine.close()
