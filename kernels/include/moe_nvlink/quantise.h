// From rows of activations to quantised rows and scales, in registers: each row is loaded once,
// quantised and stored to its targets.
//
// A lane quantises kLaneElements elements at a time (a piece). On the GPU that is 16, so a block of
// 128 belongs to 8 neighbouring lanes, which exchange its largest magnitude. On the host it is 128,
// whole blocks of every recipe. The caller finds a row's amax (fp8_token): RowAmax.
#pragma once

#include "config.h"
#include "copy.h"
#include "numeric.h"
#include "platform.h"
#include "quantisers.h"

namespace moe_nvlink {

// Where a quantised row goes. store() takes bytes of the row, store_scales() bytes of its scales,
// at an offset that is a multiple of their number.
struct OneTarget {
  char* row;
  char* scales;
  template <int Bytes>
  HD void store(int offset, const Vector<Bytes>& vector) const {
    store_vector(row + offset, vector);
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

// The same for several blocks, which only the host has in one piece: loops that become vector code.
// For formats whose value is x * factor.
template <class Format, class Element, int Blocks, int Size>
HD void scale_blocks(const typename Element::Storage* words, float global_scale, float* values,
                     typename Format::Scale* scales) {
  uint32_t amax[Blocks];
  uint32_t wide[Blocks];
  float factors[Blocks];
  for (int i = 0; i < Blocks; ++i) amax[i] = amax_of<Element, Size>(words + i * Size);
  for (int i = 0; i < Blocks; ++i) {
    const Format format(amax[i], global_scale);
    wide[i] = format.scale;
    factors[i] = format.factor;
  }
  for (int i = 0; i < Blocks; ++i) scales[i] = static_cast<typename Format::Scale>(wide[i]);
  for (int i = 0; i < Blocks; ++i) {
    // If this loop were unrolled, vectors would hold one element of each block.
    MOE_NVLINK_ROLLED
    for (int j = 0; j < Size; ++j) values[i * Size + j] *= factors[i];
  }
}

// Quantises elements [first, last) in pieces of `Count`, every num_threads-th of this lane. For
// formats with blocks. Count divides the block, or the block divides Count.
template <class Format, class Element, int Count, class Target>
HD void quantise_blocks(const Cta& cta, int lane, const char* row, bool wide, int first, int last,
                        float global_scale, const Target& target) {
  using Word = typename Element::Storage;
  using Scale = typename Format::Scale;
  constexpr int kLanes = Format::kBlock > Count ? Format::kBlock / Count : 1;
  constexpr int kBlocks = Format::kBlock > Count ? 1 : Count / Format::kBlock;
  constexpr int kBlock = Count / kBlocks;  // this lane's part of one
  constexpr int kRowBytes = Count * Format::kBits / 8;
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
    Vector<kBlocks * sizeof(Scale)> scales;
    if constexpr (kBlocks == 1) {
      const Format format(cta.max_of_lanes<kLanes>(amax_of<Element, Count>(words)), global_scale);
      scale_elements<Format, Count>(format, values);
      *reinterpret_cast<Scale*>(&scales) = format.scale;
    } else {
      scale_blocks<Format, Element, kBlocks, kBlock>(words, global_scale, values,
                                                     reinterpret_cast<Scale*>(&scales));
    }
    if (!mine) continue;
    Vector<kRowBytes> codes;
    Format::template encode<Count>(values, codes.bytes);
    target.store(place * Format::kBits / 8, codes);
    if (lane % kLanes == 0) {
      target.store_scales(place / kBlock / kLanes * static_cast<int>(sizeof(Scale)), scales);
    }
  }
}

// The same with one scale for the whole row.
template <class Format, class Element, int Count, class Target>
HD void quantise_range(const Cta& cta, int lane, const char* row, bool wide, int first, int last,
                       const Format& format, const Target& target) {
  using Word = typename Element::Storage;
  for (int place = first + lane * Count; place < last; place += cta.num_threads * Count) {
    Vector<Count * sizeof(Word)> loaded;
    load_elements<Element, Count>(row + place * static_cast<int>(sizeof(Word)), wide,
                                  reinterpret_cast<Word*>(&loaded));
    float values[Count];
    floats_of<Element, Count>(reinterpret_cast<const Word*>(&loaded), values);
    scale_elements<Format, Count>(format, values);
    Vector<Count> codes;
    Format::template encode<Count>(values, codes.bytes);
    target.store(place, codes);
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
  int whole = hidden_size / kLaneElements * kLaneElements;
  if constexpr (Format::kBlock == 0) {
    const Format format(row_amax, global_scale);
    // Rows of an odd size begin anywhere at the target.
    if (kAlignedVectorsOnly && whole != hidden_size) whole = 0;
    quantise_range<Format, Element, kLaneElements>(cta, lane, row, wide, 0, whole, format, target);
    quantise_elements<Format, Element>(cta, lane, row, whole, hidden_size, format, target);
    if constexpr (Format::kHasRowScale) {
      if (lane == 0) {
        target.store_scales(0, *reinterpret_cast<const Vector<4>*>(&format.scale));
      }
    }
  } else {
    quantise_blocks<Format, Element, kLaneElements>(cta, lane, row, wide, 0, whole, global_scale,
                                                    target);
    if constexpr (Format::kBlock < kLaneElements) {  // host
      quantise_blocks<Format, Element, Format::kBlock>(cta, lane, row, wide, whole, hidden_size,
                                                       global_scale, target);
    }
  }
}

// This lane's part of a row's amax, as bits; lanes as in quantise_row.
template <class Element>
HD uint32_t amax_of_lane(const Cta& cta, int lane, const char* row, int hidden_size, bool wide) {
  using Word = typename Element::Storage;
  constexpr int kBytes = static_cast<int>(sizeof(Word));
  const int whole = wide ? hidden_size / kLaneElements * kLaneElements : 0;
  uint32_t most = 0;
  MOE_NVLINK_ROLLED
  for (int place = lane * kLaneElements; place < whole; place += cta.num_threads * kLaneElements) {
    Vector<kLaneElements * kBytes> loaded;
    Word* words = reinterpret_cast<Word*>(&loaded);
    load_elements<Element, kLaneElements>(row + place * kBytes, true, words);
    const uint32_t amax = amax_of<Element, kLaneElements>(words);
    most = amax > most ? amax : most;
  }
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
