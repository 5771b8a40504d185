// From rows of activations to quantised rows and scales, in registers: each row is loaded once,
// quantised and stored to its targets.
//
// A lane quantises kLaneElements elements at a time (a piece). On the GPU that is 16, so a block of
// 128 belongs to 8 neighbouring lanes, which exchange its largest magnitude. On the host it is 128,
// whole blocks of every recipe. The caller finds a row's amax (fp8_token): RowAmax.
#pragma once

#include "config.h"
#include "copy.h"
#include "number_formats.h"
#include "platform.h"
#include "quantise_host.h"
#include "quantisers.h"
#include "registers.h"

namespace moe_nvlink {

// Where a quantised row goes. store() takes bytes of the row, store_scales() bytes of its scales,
// at an offset that is a multiple of their number.
struct OneTarget {
  char* row;
  char* scales;
  bool streamed = false;  // of are_streamed()
  template <int Bytes>
  HD void store(int offset, const Vector<Bytes>& vector) const {
    store_part(row + offset, vector, streamed);
  }
  template <int Bytes>
  HD void store_scales(int offset, const Vector<Bytes>& vector) const {
    store_vector(scales + offset, vector);
  }
};

// Loads `Count` elements from `source`. wide: `source` lies on a vector's boundary.
template <class Element, int Count>
HD void load_elements(const char* source, bool wide, typename Element::Storage* words) {
  constexpr int kBytes = Count * static_cast<int>(sizeof(typename Element::Storage));
  constexpr int kWide = kBytes < kVectorBytes ? kBytes : kVectorBytes;
  if (wide) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kBytes / kWide; ++i) {
      load_vector(reinterpret_cast<Vector<kWide>*>(words)[i], source + i * kWide);
    }
  } else {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Count; ++i) {
      words[i] = load_word(reinterpret_cast<const typename Element::Storage*>(source) + i);
    }
  }
}

// Largest magnitude of `Count` elements, as bits of fp32. Compares the stored words: in every
// element type magnitudes have the order of their bits, and NaN is above all numbers.
template <class Element, int Count>
HD uint32_t amax_of(const typename Element::Storage* words) {
  using Word = typename Element::Storage;
  constexpr Word kMagnitude = static_cast<Word>(Element::kMinusZero - 1);
  Word most = 0;
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Count; ++i) {
    const Word magnitude = words[i] & kMagnitude;
    most = magnitude > most ? magnitude : most;
  }
  return magnitude_bits(Element::to_float(most));
}

template <class Element, int Count>
HD void floats_of(const typename Element::Storage* words, float* values) {
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Count; ++i) values[i] = Element::to_float(words[i]);
}

// Makes of `Count` elements with one scale the numbers to encode.
template <class Format, int Count>
HD void scale_elements(const Format& format, float* values) {
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Count; ++i) values[i] = format.value(values[i]);
}

// Quantises elements [first, last) in parts of blocks, which neighbouring lanes share, or of a block by
// itself. Count divides the block.
template <class Format, class Element, int Count, class Target>
HD void quantise_parts_of_blocks(const Cta& cta, int lane, const char* row, bool wide, int first,
                                 int last, float global_scale, const Target& target) {
  using Word = typename Element::Storage;
  using Scale = typename Format::Scale;
  constexpr int kLanes = Format::kBlock / Count;
  static_assert(kLanes > 0);
  // The lanes of a warp stay together, because they exchange values. Lanes after the end of the row
  // work on its first piece and store nothing.
  const int warp = lane - lane % Cta::kExchangeThreads;
  MOE_NVLINK_ROLLED
  for (int start = first; start + warp * Count < last; start += cta.num_threads * Count) {
    const int place = start + lane * Count;
    const bool mine = place < last;
    Vector<Count * sizeof(Word)> loaded;
    const Word* words = reinterpret_cast<const Word*>(&loaded);
    load_elements<Element, Count>(row + (mine ? place : first) * static_cast<int>(sizeof(Word)),
                                  wide, reinterpret_cast<Word*>(&loaded));
    float values[Count];
    floats_of<Element, Count>(words, values);
    const Format format(cta.max_of_lanes<kLanes>(amax_of<Element, Count>(words)), global_scale);
    scale_elements<Format, Count>(format, values);
    Vector<sizeof(Scale)> scale;
    *reinterpret_cast<Scale*>(&scale) = format.scale;
    if (!mine) continue;
    Vector<Count * Format::kBits / 8> codes;
    Format::template encode<Count>(values, codes.bytes);
    target.store(place * Format::kBits / 8, codes);
    if (lane % kLanes == 0) {
      target.store_scales(place / Count / kLanes * static_cast<int>(sizeof(Scale)), scale);
    }
  }
}

// For formats with blocks.
template <class Format, class Element, int Count, class Target>
HD void quantise_blocks(const Cta& cta, int lane, const char* row, bool wide, int first, int last,
                        float global_scale, const Target& target) {
  if constexpr (kLaneHasRegisters && Count >= kLaneElements) {
    quantise_whole_blocks<Format, Element, Count>(cta, lane, row, first, last, global_scale,
                                                  target);
  } else {
    quantise_parts_of_blocks<Format, Element, Count>(cta, lane, row, wide, first, last,
                                                     global_scale, target);
  }
}

// A whole row of blocks, the first in groups on the host.
template <class Format, class Element, class Target>
HD void quantise_row_of_blocks(const Cta& cta, int lane, const char* row, int hidden_size,
                               bool wide, float global_scale, const Target& target) {
  int first = 0;
  if constexpr (kLaneHasRegisters) {
    first = hidden_size / kGroupElements * kGroupElements;
    quantise_blocks<Format, Element, kGroupElements>(cta, lane, row, wide, 0, first, global_scale,
                                                     target);
  }
  const int whole = hidden_size / kLaneElements * kLaneElements;
  quantise_blocks<Format, Element, kLaneElements>(cta, lane, row, wide, first, whole, global_scale,
                                                  target);
  if constexpr (Format::kBlock < kLaneElements) {  // host
    quantise_blocks<Format, Element, Format::kBlock>(cta, lane, row, wide, whole, hidden_size,
                                                     global_scale, target);
  }
}

// The codes of `Count` elements from `source` on.
template <class Format, class Element, int Count>
HD void encode_elements(const char* source, bool wide, const Format& format, int ahead,
                        unsigned char* codes) {
  if constexpr (kLaneHasRegisters && Count == kLaneElements) {
    encode_in_registers<Format, Element, Count>(source, format, ahead, codes);
  } else {
    using Word = typename Element::Storage;
    Vector<Count * sizeof(Word)> loaded;
    load_elements<Element, Count>(source, wide, reinterpret_cast<Word*>(&loaded));
    float values[Count];
    floats_of<Element, Count>(reinterpret_cast<const Word*>(&loaded), values);
    scale_elements<Format, Count>(format, values);
    Format::template encode<Count>(values, codes);
  }
}

// Elements of a row with one scale. Codes go to memory as those of quantise_whole_blocks() do.
template <class Format, class Element, int Count, class Target>
HD void quantise_range(const Cta& cta, int lane, const char* row, bool wide, int first, int last,
                       const Format& format, const Target& target) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Element::Storage));
  constexpr int kPieces = Count / kLaneElements;
  const int ahead = (kRowWasRead<Format> ? last : Count) * kElementBytes;
  for (int place = first + lane * Count; place < last; place += cta.num_threads * Count) {
    Vector<kLaneElements> codes[kPieces];
    for (int i = 0; i < kPieces; ++i) {
      encode_elements<Format, Element, kLaneElements>(
          row + (place + i * kLaneElements) * kElementBytes, wide, format, ahead, codes[i].bytes);
    }
    for (int i = 0; i < kPieces; ++i) target.store(place + i * kLaneElements, codes[i]);
  }
}

// One element at a time: rows of an odd size, and the rest of the other rows.
template <class Format, class Element, class Target>
HD void quantise_elements(const Cta& cta, int lane, const char* row, int first, int last,
                          const Format& format, const Target& target) {
  using Word = typename Element::Storage;
  MOE_NVLINK_ROLLED
  for (int place = first + lane; place < last; place += cta.num_threads) {
    const Word word = load_word(reinterpret_cast<const Word*>(row) + place);
    Vector<1> code;
    code.bytes[0] = E4m3::from_float(format.value(Element::to_float(word)));
    target.store(place, code);
  }
}

// Whether a row's elements may be loaded as whole vectors: rows of `hidden_size` from `address` on.
template <class Element>
HD bool loads_are_wide(uint64_t address, int hidden_size) {
  const uint64_t row_bytes = static_cast<uint64_t>(hidden_size) * sizeof(typename Element::Storage);
  return vector_bytes_for(address, row_bytes) == kVectorBytes;
}

// The codes of a row whose elements share the scale of `format`; lanes and rows as in quantise_row.
template <class Format, class Element, class Target>
HD void encode_row(const Cta& cta, int lane, const char* row, int hidden_size, bool wide,
                   const Format& format, const Target& target) {
  int whole = hidden_size / kLaneElements * kLaneElements;
  // Rows of an odd size begin anywhere at the target.
  if (kAlignedVectorsOnly && whole != hidden_size) whole = 0;
  int first = 0;
  if constexpr (kLaneHasRegisters) {
    first = hidden_size / kGroupElements * kGroupElements;
    quantise_range<Format, Element, kGroupElements>(cta, lane, row, wide, 0, first, format, target);
  }
  quantise_range<Format, Element, kLaneElements>(cta, lane, row, wide, first, whole, format,
                                                 target);
  quantise_elements<Format, Element>(cta, lane, row, whole, hidden_size, format, target);
}

// The CTA's threads quantise one row of `hidden_size` elements (a multiple of the recipe's block)
// and store it to `target`. `lane` numbers them; neighbouring lanes are neighbouring threads, and
// lane 0 is the first of a warp. On the GPU the target's row lies on a boundary of 16 bytes (e4m3)
// or 8 (e2m1), its scales on one of a scale; on the host they may lie anywhere.
//   wide          loads_are_wide()
//   row_amax      bits; formats with kHasRowScale: the largest magnitude of the whole row
//   global_scale  of recipes that take one
template <int Quantiser, class Element, class Target>
HD void quantise_row(const Cta& cta, int lane, const char* row, int hidden_size, bool wide,
                     uint32_t row_amax, float global_scale, const Target& target) {
  using Format = typename FormatOf<Quantiser>::Type;
  if constexpr (Format::kBlock == 0) {
    const Format format(row_amax, global_scale);
    encode_row<Format, Element>(cta, lane, row, hidden_size, wide, format, target);
    if constexpr (Format::kHasRowScale) {
      if (lane == 0) {
        target.store_scales(0, *reinterpret_cast<const Vector<4>*>(&format.scale));
      }
    }
  } else {
    quantise_row_of_blocks<Format, Element>(cta, lane, row, hidden_size, wide, global_scale,
                                            target);
  }
}

// The largest magnitude, as bits, of this lane's pieces of elements [0, whole).
template <class Element>
HD uint32_t amax_of_pieces(const Cta& cta, int lane, const char* row, int whole) {
  using Word = typename Element::Storage;
  constexpr int kBytes = static_cast<int>(sizeof(Word));
  const int step = cta.num_threads * kLaneElements;
  if constexpr (kLaneHasRegisters) {
    BitRegister most{};
    for (int place = lane * kLaneElements; place < whole; place += step) {
      most = larger(most, largest_magnitudes<Element, kLaneElements>(row + place * kBytes));
    }
    return first_element(largest_of_lanes<1, kRegisterFloats>(&most));
  } else {
    uint32_t most = 0;
    MOE_NVLINK_ROLLED
    for (int place = lane * kLaneElements; place < whole; place += step) {
      Vector<kLaneElements * kBytes> loaded;
      Word* words = reinterpret_cast<Word*>(&loaded);
      load_elements<Element, kLaneElements>(row + place * kBytes, true, words);
      most = larger(most, amax_of<Element, kLaneElements>(words));
    }
    return most;
  }
}

// This lane's part of a row's amax, as bits; lanes as in quantise_row.
template <class Element>
HD uint32_t amax_of_lane(const Cta& cta, int lane, const char* row, int hidden_size, bool wide) {
  using Word = typename Element::Storage;
  const int whole = wide ? hidden_size / kLaneElements * kLaneElements : 0;
  uint32_t most = amax_of_pieces<Element>(cta, lane, row, whole);
  MOE_NVLINK_ROLLED
  for (int place = whole + lane; place < hidden_size; place += cta.num_threads) {
    const Word word = load_word(reinterpret_cast<const Word*>(row) + place);
    const uint32_t amax = magnitude_bits(Element::to_float(word));
    most = amax > most ? amax : most;
  }
  return most;
}

// A row's amax by way of shared memory: each group of lanes that can exchange values leaves one
// part, and after a barrier of the CTA every thread takes the largest.
struct RowAmax {
  static constexpr int kMostParts = 32;
  uint32_t parts[kMostParts];
};

// Collective over the CTA; its next barrier publishes the parts.
template <class Element>
HD void leave_row_amax(const Cta& cta, const char* row, int hidden_size, bool wide,
                       RowAmax& shared) {
  const uint32_t most = cta.max_of_lanes<Cta::kExchangeThreads>(
      amax_of_lane<Element>(cta, cta.thread, row, hidden_size, wide));
  if (cta.thread % Cta::kExchangeThreads == 0) {
    shared.parts[cta.thread / Cta::kExchangeThreads] = most;
  }
}

// After that barrier: the row's amax, as bits.
HD uint32_t take_row_amax(const Cta& cta, const RowAmax& shared) {
  uint32_t most = 0;
  for (int i = cta.thread % Cta::kExchangeThreads; i < cta.num_threads / Cta::kExchangeThreads;
       i += Cta::kExchangeThreads) {
    most = shared.parts[i] > most ? shared.parts[i] : most;
  }
  return cta.max_of_lanes<Cta::kExchangeThreads>(most);
}

}  // namespace moe_nvlink
