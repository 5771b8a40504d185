// How the host quantises: a lane's whole piece is in registers, because it is whole blocks. A GPU's
// compiler reads these templates and makes nothing of them.
#pragma once

#include "config.h"
#include "copy.h"
#include "number_formats.h"
#include "platform.h"
#include "quantisers.h"
#include "registers.h"

namespace moe_nvlink {

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

}  // namespace moe_nvlink
