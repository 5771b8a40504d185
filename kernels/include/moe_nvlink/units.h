// Rows of small batches travel as units that carry their own flags.
//
// A unit is 16 bytes: data, and a mark or two, which stand for the epoch. Data and its mark are one
// word, and a word arrives as a whole, so a reader that finds the mark has the data: no fence, no cell
// and no acquire stands between a row's store and its use. That costs more bytes, and saves the
// sender the wait for its stores' acknowledgement. There are two kinds:
//
//   OneMarkUnit   one word of 16 bytes, 14 of them data
//   TwoMarkUnit   two words of 8 bytes, each with 6 bytes of data and a mark of its own
//
// What is known of a word of 16 bytes is less than of one of 8 (P10 in PROTOCOL.md), so who distrusts
// it builds the kernels of rows with the other kind (Config::kUnitDataBytes). Counts per expert, and
// rows of fp32 in combine, whose elements 14 bytes would cut, always travel in two words.
//
// Units lie in a staging region, from where the receiver copies them. It sets every unit that it has
// read to zero, so at the start of a round every unit of a region is zero, whatever layers used the
// region before, and for how long this unit was not in use: 15 bits of the epoch could not tell it.
// The next round's units come after these zeros (P12).
#pragma once

#include "config.h"
#include "memory_order.h"
#include "platform.h"

namespace moe_nvlink {

constexpr int kUnitBytes = 16;
// Words of 4 bytes that a unit holds as a whole.
constexpr int kUnitWords = 3;

// Never 0, which stands for a unit that has not arrived.
HD uint32_t mark_of(uint32_t epoch) {
  return 0x8000u | (epoch & 0x7fffu);
}

// Both kinds take and return data as kParts values: three words, and of a OneMarkUnit half a word in
// the lower half of a fourth. Each half of a word of 8 bytes is for itself: it is in a register of its
// own on a GPU.
struct TwoMarkUnit {
  static constexpr int kDataBytes = 12;
  static constexpr int kParts = 3;
  uint32_t halves[4];

  HD static TwoMarkUnit pack(const uint32_t* data, uint32_t mark) {
    return TwoMarkUnit{{data[0], (data[1] & 0xffffu) | mark << 16, data[1] >> 16 | data[2] << 16,
                        data[2] >> 16 | mark << 16}};
  }
  HD bool has_arrived(uint32_t mark) const {
    return halves[1] >> 16 == mark && halves[3] >> 16 == mark;
  }
  HD void unpack(uint32_t* data) const {
    data[0] = halves[0];
    data[1] = (halves[1] & 0xffffu) | halves[2] << 16;
    data[2] = halves[2] >> 16 | halves[3] << 16;
  }
  HD static void store(uint64_t* target, uint64_t first, uint64_t second) {
    store_words_relaxed_sys(target, first, second);
  }
  HD static void load(const uint64_t* source, uint64_t& first, uint64_t& second) {
    load_words_relaxed_sys(source, first, second);
  }
};

struct OneMarkUnit {
  static constexpr int kDataBytes = 14;
  static constexpr int kParts = 4;
  uint32_t halves[4];

  HD static OneMarkUnit pack(const uint32_t* data, uint32_t mark) {
    return OneMarkUnit{{data[0], data[1], data[2], (data[3] & 0xffffu) | mark << 16}};
  }
  HD bool has_arrived(uint32_t mark) const { return halves[3] >> 16 == mark; }
  HD void unpack(uint32_t* data) const {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kUnitWords; ++i) data[i] = halves[i];
    data[3] = halves[3] & 0xffffu;
  }
  HD static void store(uint64_t* target, uint64_t first, uint64_t second) {
    store_long_word_relaxed_sys(target, first, second);
  }
  HD static void load(const uint64_t* source, uint64_t& first, uint64_t& second) {
    load_long_word_relaxed_sys(source, first, second);
  }
};

template <int DataBytes>
struct UnitWith;
template <>
struct UnitWith<TwoMarkUnit::kDataBytes> {
  using Type = TwoMarkUnit;
};
template <>
struct UnitWith<OneMarkUnit::kDataBytes> {
  using Type = OneMarkUnit;
};

// Units of `bytes` bytes of data, which are whole words of 4 bytes.
template <class Unit>
HD int units_of(int bytes) {
  return (bytes + Unit::kDataBytes - 1) / Unit::kDataBytes;
}

// Where a unit's data lies in its row, in words of 4 bytes. Two OneMarkUnits side by side have seven
// words, three each and half of the last, so every whole word lies on its boundary. A row that ends
// within such a pair fills the words of the first unit, then of the second, then the shared one.
template <class Unit>
struct UnitPlace {
  int first;   // of kUnitWords words
  int shared;  // OneMarkUnit: the word of which the unit has a half
  int half;    // which half

  HD explicit UnitPlace(int unit) {
    if constexpr (Unit::kParts == kUnitWords) {
      first = kUnitWords * unit;
      shared = half = 0;
    } else {
      half = unit % 2;
      shared = unit / 2 * (2 * kUnitWords + 1) + 2 * kUnitWords;
      first = shared - (2 - half) * kUnitWords;
    }
  }
};

// P10: the data and its mark are one word.
template <class Unit>
HD void put_unit(char* target, const Unit& unit) {
  Unit::store(reinterpret_cast<uint64_t*>(target),
              static_cast<uint64_t>(unit.halves[1]) << 32 | unit.halves[0],
              static_cast<uint64_t>(unit.halves[3]) << 32 | unit.halves[2]);
}

template <class Unit>
HD Unit look_at_unit(const char* source) {
  uint64_t first;
  uint64_t second;
  Unit::load(reinterpret_cast<const uint64_t*>(source), first, second);
  return Unit{{static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
               static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)}};
}

// After the unit has been read. A strong store, as the peer's that it follows: nothing else orders
// the two, because a look acquires nothing.
template <class Unit>
HD void clear_unit(char* place) {
  Unit::store(reinterpret_cast<uint64_t*>(place), 0, 0);
}

}  // namespace moe_nvlink
