// Rows of small batches travel as units that carry their own flags.
//
// A unit is two words of 8 bytes. A word has 6 bytes of data and a mark, which stands for the epoch.
// A word arrives as a whole (the PTX memory model says so of words up to 8 bytes), so a reader that
// finds the mark has the data: no fence, no cell and no acquire stands between a row's store and its
// use. That costs a third more bytes, and saves the sender the wait for its stores' acknowledgement.
//
// Units lie in a staging region, from where the receiver copies them. It sets every unit that it has
// read to zero, so at the start of a round every unit of a region is zero, whatever layers used the
// region before, and for how long this unit was not in use: 15 bits of the epoch could not tell it.
// The next round's units come after these zeros (P12).
#pragma once

#include "memory_order.h"
#include "platform.h"

namespace moe_nvlink {

constexpr int kUnitBytes = 16;
constexpr int kUnitDataBytes = 12;

// Units of `bytes` bytes of data.
HD int units_of(int bytes) {
  return (bytes + kUnitDataBytes - 1) / kUnitDataBytes;
}

// Never 0, which stands for a unit that has not arrived.
HD uint32_t mark_of(uint32_t epoch) {
  return 0x8000u | (epoch & 0x7fffu);
}

// Three words of data as they travel, each half of a word for itself: it is in a register of its
// own on a GPU.
struct Unit {
  uint32_t halves[4];

  HD bool has_arrived(uint32_t mark) const {
    return halves[1] >> 16 == mark && halves[3] >> 16 == mark;
  }
  HD void unpack(uint32_t* data) const {
    data[0] = halves[0];
    data[1] = (halves[1] & 0xffffu) | halves[2] << 16;
    data[2] = halves[2] >> 16 | halves[3] << 16;
  }
};

HD Unit pack_unit(uint32_t data0, uint32_t data1, uint32_t data2, uint32_t mark) {
  return Unit{
      {data0, (data1 & 0xffffu) | mark << 16, data1 >> 16 | data2 << 16, data2 >> 16 | mark << 16}};
}

// P10: the data and its mark are one word.
HD void put_unit(char* target, const Unit& unit) {
  store_words_relaxed_sys(reinterpret_cast<uint64_t*>(target),
                          static_cast<uint64_t>(unit.halves[1]) << 32 | unit.halves[0],
                          static_cast<uint64_t>(unit.halves[3]) << 32 | unit.halves[2]);
}

HD Unit look_at_unit(const char* source) {
  uint64_t first;
  uint64_t second;
  load_words_relaxed_sys(reinterpret_cast<const uint64_t*>(source), first, second);
  return Unit{{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
               static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)}};
}

// After the unit has been read. A strong store, as the peer's that it follows: nothing else orders
// the two, because a look acquires nothing.
HD void clear_unit(char* place) {
  store_words_relaxed_sys(reinterpret_cast<uint64_t*>(place), 0, 0);
}

}  // namespace moe_nvlink
