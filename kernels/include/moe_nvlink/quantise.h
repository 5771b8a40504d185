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

// ---- A lane's whole piece in registers, on the host, where it is whole blocks.

constexpr bool kLaneHasRegisters = kRegisterFloats > 1 && Cta::kExchangeThreads == 1;

// Elements that are quantised together: first all their scales are made, then all their codes. So
// the codes wait only once for the way from elements to scales.
constexpr int kGroupElements = 1024;

// The largest magnitudes, as bits, of Size elements: one for each element of a register, of the pairs
// of neighbours that load_pair() would put there.
template <class Element, int Size>
HD BitRegister largest_magnitudes(const char* source) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Element::Storage));
  BitRegister most{};
  if constexpr (kElementBytes == 2) {
    for (int i = 0; i < Size; i += kPairElements) {
      most = larger_halves(most, load_register<uint32_t>(source + i * kElementBytes) & 0x7fff7fffu);
    }
    // In every element type magnitudes have the order of their bits.
    most = larger(most >> 16, most & 0xffffu);
    return bits_of_float(Element::floats_of(most));
  } else {
    for (int i = 0; i < Size; i += kPairElements) {
      const RegisterPair pair = load_pair<Element>(source + i * kElementBytes);
      most = larger(most, larger(magnitudes_of(pair.even), magnitudes_of(pair.odd)));
    }
    return most;
  }
}

// The largest magnitude of each block of Size elements, from element 0 on.
template <class Element, int Count, int Size>
HD BitRegister amax_of_blocks(const char* source) {
  // A register has a part of one block, or several blocks.
  constexpr int kPart = Size > kPairElements ? Size : kPairElements;
  constexpr int kLanes = Size < kPairElements ? Size / 2 : kRegisterFloats;
  BitRegister parts[Count / kPart];
  MOE_NVLINK_HOST_ONLY(_Pragma("GCC unroll 16"))
  for (int i = 0; i < Count / kPart; ++i) {
    parts[i] = largest_magnitudes<Element, kPart>(
        source + i * kPart * static_cast<int>(sizeof(typename Element::Storage)));
  }
  return largest_of_lanes<Count / kPart, kLanes>(parts);
}

// The codes of a pair, those of two neighbours in one word.
template <class Format>
HD void store_codes(unsigned char* target, const RegisterPair& values) {
  using Code = typename Format::Code;
  const BitRegister words = Code::rounded(bits_of_float(values.even)) |
                            Code::rounded(bits_of_float(values.odd)) << Format::kBits;
  char* bytes = reinterpret_cast<char*>(target);
  if constexpr (Format::kBits == 8) {
    store_register<uint16_t>(bytes, words);
  } else {
    static_assert(Format::kBits == 4);
    store_register<uint8_t>(bytes, words);
  }
}

// The same of magnitudes for which Code::rounded_magnitude() holds, and of signs, that of an even
// element in bit 15 and that of an odd one in bit 31.
template <class Format>
HD void store_codes_of_numbers(unsigned char* target, BitRegister even, BitRegister odd,
                               BitRegister signs) {
  using Code = typename Format::Code;
  // Each code in half an element, below its sign.
  const BitRegister halves =
      merged(Code::kMagnitude * 0x10001u,
             merged(0xffffu, Code::rounded_magnitude(even), Code::rounded_magnitude(odd) << 16),
             halves_shifted_right<16 - Format::kBits>(signs));
  char* bytes = reinterpret_cast<char*>(target);
  if constexpr (Format::kBits == 8) {
    store_halves_as_bytes(bytes, halves);
  } else {
    static_assert(Format::kBits == 4);
    store_register<uint8_t>(bytes, halves | halves >> 12);
  }
}

// The first `Count` of a register's scales.
template <int Count, int ScaleBytes>
HD void store_scales(unsigned char* target, BitRegister scales) {
  static_assert(ScaleBytes == 1 || ScaleBytes == 4);
  char bytes[kRegisterFloats * ScaleBytes];
  if constexpr (ScaleBytes == 1) {
    store_register<uint8_t>(bytes, scales);
  } else {
    store_register<uint32_t>(bytes, scales);
  }
  MOE_NVLINK_HOST_ONLY(std::memcpy(target, bytes, Count * ScaleBytes);)
}

// Rare, as is encode_special_blocks(): both stay out of the loops.
template <class Format, int Pairs>
MOE_NVLINK_HOST_ONLY([[gnu::noinline]])
HD void encode_special_values(const RegisterPair* values, unsigned char* codes) {
  for (int i = 0; i < Pairs; ++i) store_codes<Format>(codes + i * kPairElements, values[i]);
}

// Elements that share the scale of `format`, e4m3.
template <class Format, class Element, int Count>
HD void encode_in_registers(const char* source, const Format& format, int ahead,
                            unsigned char* codes) {
  constexpr int kPairs = Count / kPairElements;
  constexpr int kPairBytes = kPairElements * static_cast<int>(sizeof(typename Element::Storage));
  RegisterPair values[kPairs];
  BitRegister most{};
  MOE_NVLINK_HOST_ONLY(_Pragma("GCC unroll 8"))
  for (int i = 0; i < kPairs; ++i) {
    MOE_NVLINK_HOST_ONLY(__builtin_prefetch(source + i * kPairBytes + ahead);)
    const RegisterPair pair = load_pair<Element>(source + i * kPairBytes);
    values[i] = RegisterPair{format.value(pair.even), format.value(pair.odd)};
    most = larger(most, larger(magnitudes_of(values[i].even), magnitudes_of(values[i].odd)));
  }
  // NaN
  if (!all_below(0x7f800001u, most)) return encode_special_values<Format, kPairs>(values, codes);
  MOE_NVLINK_HOST_ONLY(_Pragma("GCC unroll 8"))
  for (int i = 0; i < kPairs; ++i) {
    store_codes_of_numbers<Format>(
        codes + i * kPairElements, E4m3::bounded(magnitudes_of(values[i].even)),
        E4m3::bounded(magnitudes_of(values[i].odd)), signs_of_pair(values[i]));
  }
}

// The codes of blocks, with the factors of PerRegister elements in each register. AreNumbers: no
// amax and no factor is infinite or NaN, and no factor is negative. Then no value is NaN, and every
// value has the sign of its element. In e4m3 every value rounds to 448 or less, because the scales
// are made of the amax.
template <class Format, class Element, int Count, int PerRegister, bool AreNumbers>
HD void encode_blocks(const char* source, const FloatRegister* factors, int ahead,
                      unsigned char* codes) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Element::Storage));
  for (int piece = 0; piece < Count; piece += kLaneElements) {
    const FloatRegister own = elements_from(
        factors[piece / PerRegister], static_cast<uint32_t>(piece % PerRegister / Format::kBlock));
    MOE_NVLINK_HOST_ONLY(_Pragma("GCC unroll 8"))
    for (int i = 0; i < kLaneElements; i += kPairElements) {
      const char* elements = source + (piece + i) * kElementBytes;
      MOE_NVLINK_HOST_ONLY(__builtin_prefetch(elements + ahead);)
      const RegisterPair pair = load_pair<Element>(elements);
      const FloatRegister factor = factors_of_pair<Format::kBlock>(own, static_cast<uint32_t>(i));
      const RegisterPair values = kDivides<Format>
                                      ? RegisterPair{pair.even / factor, pair.odd / factor}
                                      : RegisterPair{pair.even * factor, pair.odd * factor};
      unsigned char* target = codes + (piece + i) * Format::kBits / 8;
      if constexpr (AreNumbers) {
        store_codes_of_numbers<Format>(target, magnitudes_of(values.even),
                                       magnitudes_of(values.odd),
                                       signs_of_elements<Element>(elements, pair));
      } else {
        store_codes<Format>(target, values);
      }
    }
  }
}

template <class Format, class Element, int Count, int PerRegister>
MOE_NVLINK_HOST_ONLY([[gnu::noinline]])
HD void encode_special_blocks(const char* source, const FloatRegister* factors, int ahead,
                              unsigned char* codes) {
  encode_blocks<Format, Element, Count, PerRegister, false>(source, factors, ahead, codes);
}

// Blocks of kLaneElements elements or more. ahead: bytes from an element to what is read next after
// this group. It is fetched meanwhile, because the loads of a group come all at once and would wait
// for memory.
template <class Format, class Element, int Count>
HD void quantise_in_registers(const char* source, float global_scale, int ahead,
                              unsigned char* codes, unsigned char* scales) {
  constexpr int kBlock = Format::kBlock;
  constexpr int kScaleBytes = static_cast<int>(sizeof(typename Format::Scale));
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Element::Storage));
  constexpr int kMost = kBlock * kRegisterFloats;
  constexpr int kPerRegister = Count < kMost ? Count : kMost;
  constexpr int kRegisters = Count / kPerRegister;
  static_assert(Count % kLaneElements == 0 && Count % kPerRegister == 0);
  FloatRegister factors[kRegisters];
  BitRegister most{};
  for (int i = 0; i < kRegisters; ++i) {
    const BitRegister amax =
        amax_of_blocks<Element, kPerRegister, kBlock>(source + i * kPerRegister * kElementBytes);
    const BitRegister scale = Format::scale_of(amax, global_scale);
    factors[i] = Format::factor_of(amax, scale, global_scale);
    store_scales<kPerRegister / kBlock, kScaleBytes>(
        scales + i * kPerRegister / kBlock * kScaleBytes, scale);
    most = larger(most, larger(amax, bits_of_float(factors[i])));
  }
  if (all_below(0x7f800000u, most)) {
    encode_blocks<Format, Element, Count, kPerRegister, true>(source, factors, ahead, codes);
  } else {
    encode_special_blocks<Format, Element, Count, kPerRegister>(source, factors, ahead, codes);
  }
}

// ---- Rows.

// Quantises elements [first, last) in pieces of `Count`, every num_threads-th of this lane, which
// is in registers: whole blocks. The codes of a group go to memory together, after the last one is
// made: a load of codes that were stored a moment ago in smaller parts waits for these stores.
template <class Format, class Element, int Count, class Target>
HD void quantise_whole_blocks(const Cta& cta, int lane, const char* row, int first, int last,
                              float global_scale, const Target& target) {
  constexpr int kElementBytes = static_cast<int>(sizeof(typename Element::Storage));
  constexpr int kScaleBytes = static_cast<int>(sizeof(typename Format::Scale));
  constexpr int kPieceBytes = kLaneElements * Format::kBits / 8;
  constexpr int kPieces = Count / kLaneElements;
  // If this row is in the cache already, what lies after these elements is fetched: where hidden_size is
  // a multiple of the group, the next row, if the rows lie side by side.
  const int ahead = (kRowWasRead<Format> ? last : Count) * kElementBytes;
  MOE_NVLINK_ROLLED
  for (int place = first + lane * Count; place < last; place += cta.num_threads * Count) {
    const int offset = place * Format::kBits / 8;
    Vector<kPieceBytes> codes[kPieces];
    Vector<Count / Format::kBlock * kScaleBytes> scales;
    quantise_in_registers<Format, Element, Count>(row + place * kElementBytes, global_scale, ahead,
                                                  reinterpret_cast<unsigned char*>(codes),
                                                  scales.bytes);
    for (int i = 0; i < kPieces; ++i) target.store(offset + i * kPieceBytes, codes[i]);
    target.store_scales(place / Format::kBlock * kScaleBytes, scales);
  }
}

// The same with parts of blocks, which neighbouring lanes share, or of a block by itself. Count
// divides the block.
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
