"""Units of small batches (kernels/include/moe_nvlink/units.h), executed as PTX.

A rank stores units, another one looks at them: a word arrives as a whole, the two words of a unit
in any order, and a unit whose words both have the mark has its data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from moe_nvlink_plugin.jit import source
from tests.support.ptx import build
from tests.support.ptx.machine import Machine, MisalignedError

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")

THREADS = 32
#: What the first look found of the two words of a unit: whether each has the mark.
NEITHER, BOTH = (False, False), (True, True)
COPY, UNITS = "include/moe_nvlink/copy.h", "include/moe_nvlink/units.h"
MARK = 0x8005

#: Of each thread: words of a unit that it stores, looks at, or waits for and clears.
TEXT = """
using namespace moe_nvlink;
extern "C" __global__ void put(char* units, const uint32_t* data) {
  const uint32_t* mine = data + 3 * threadIdx.x;
  put_unit(units + kUnitBytes * threadIdx.x,
           pack_unit(load_word(mine), load_word(mine + 1), load_word(mine + 2), mark_of(5)));
}
extern "C" __global__ void look(char* units, uint64_t* found) {
  const Unit unit = look_at_unit(units + kUnitBytes * threadIdx.x);
  uint32_t* halves = reinterpret_cast<uint32_t*>(found + 2 * threadIdx.x);
  for (int i = 0; i < 4; ++i) store_word(halves + i, unit.halves[i]);
}
extern "C" __global__ void take(char* units, uint32_t* data) {
  char* place = units + kUnitBytes * threadIdx.x;
  Unit unit = look_at_unit(place);
  while (!unit.has_arrived(mark_of(5))) unit = look_at_unit(place);
  clear_unit(place);
  uint32_t words[3];
  unit.unpack(words);
  for (int i = 0; i < 3; ++i) store_word(data + 3 * threadIdx.x + i, words[i]);
}
"""


@functools.cache
def library(races: bool) -> build.Library:
    text = source.amalgamate((source.CONFIG_HEADER, COPY, UNITS)) + TEXT
    return build.load(build.ptx_of(text, "sm_90a"), races=races)


class Ranks:
    """Rank 0, which stores units into the memory of rank 1."""

    def __init__(self, seed: int, *, races: bool = False) -> None:
        self.machine = Machine(2, seed=seed, races=races)
        generator = np.random.default_rng(seed)
        self.races = races
        self.data = generator.integers(0, 2**32, (THREADS, 3), np.uint32)
        raw = np.zeros(16 * (THREADS + 1), np.uint8)
        start = -raw.ctypes.data % 16
        self.units = raw[start : start + 16 * THREADS].view(np.uint64).reshape(THREADS, 2)
        self.found = np.zeros((THREADS, 2), np.uint64)
        self.taken = np.zeros((THREADS, 3), np.uint32)
        for rank, name in ((0, "data"), (1, "units"), (1, "found"), (1, "taken")):
            memory = getattr(self, name)
            self.machine.allocate(rank, memory.ctypes.data, memory.nbytes, name)

    def launch(self, rank: int, name: str, second: str, shift: int = 0) -> None:
        addresses = (self.units.ctypes.data + shift, getattr(self, second).ctypes.data)
        params = b"".join(address.to_bytes(8, "little") for address in addresses)
        self.machine.launch(rank, library(self.races)[name], 1, THREADS, params)


@pytest.fixture(params=range(4))
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.machine.close()


def test_who_finds_both_marks_has_the_data(ranks: Ranks) -> None:
    ranks.launch(0, "put", "data")
    ranks.launch(1, "take", "taken")
    ranks.machine.run()
    assert np.array_equal(ranks.taken, ranks.data)
    assert not ranks.units.any()


def test_words_arrive_as_a_whole_and_apart() -> None:
    """Old and new in both orders: what is looked at while it is stored is zero or has its mark."""
    seen = set()
    for seed in range(40):
        ranks = Ranks(seed)
        ranks.launch(0, "put", "data")
        ranks.launch(1, "look", "found")
        ranks.machine.run()
        stored = ranks.units
        assert (stored >> 48 == MARK).all()
        assert ((ranks.found == 0) | (ranks.found == stored)).all()
        seen |= {tuple(map(bool, each)) for each in ranks.found.astype(bool)}
        ranks.machine.close()
    assert seen == {NEITHER, (True, False), (False, True), BOTH}


@pytest.mark.parametrize("seed", range(4))
def test_units_are_no_race(seed: int) -> None:
    """Relaxed words of both ranks; and clearing them comes after the store that was observed."""
    ranks = Ranks(seed, races=True)
    ranks.launch(0, "put", "data")
    ranks.launch(1, "take", "taken")
    ranks.machine.run()
    ranks.machine.close()


def test_a_unit_is_aligned_as_a_whole() -> None:
    ranks = Ranks(0)
    ranks.launch(0, "put", "data", shift=8)
    with pytest.raises(MisalignedError):
        ranks.machine.run()
    ranks.machine.close()


def test_packing_loses_nothing() -> None:
    """Every bit of the data by itself, and only the marks beside it."""
    ranks = Ranks(0)
    for bit in range(96):
        ranks.data[bit % THREADS] = 0
        ranks.data[bit % THREADS, bit // 32] = 1 << bit % 32
        if bit % THREADS != THREADS - 1:
            continue
        ranks.launch(0, "put", "data")
        ranks.launch(1, "take", "taken")
        ranks.machine.run()
        assert np.array_equal(ranks.taken, ranks.data)
    ranks.machine.close()
