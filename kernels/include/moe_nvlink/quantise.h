// Rows of activations to the quantised rows and scales of the built-in recipes, in registers: loaded
// once, quantised, stored to whoever is to have them. moe_nvlink_plugin/recipes/ has the same
// arithmetic in torch, and the tests compare the bits.
//
// A lane quantises kLaneElements elements at a time (a "piece"). On the GPU that is 16, so a block
// of 128 belongs to 8 lanes side by side, which exchange its largest magnitude; on the host it is
// 128, whole blocks of every recipe. A row's amax (fp8_token) is the caller's business: row_amax.
// Magnitudes are compared as bits: for numbers that is their order, and a NaN is above all of them,
// so that it reaches the scale, as in torch.
#pragma once

#include "config.h"
#include "copy.h"
#include "numeric.h"
#include "platform.h"

namespace moe_nvlink {

HD uint32_t magnitude_bits(float value) {
  return bits_of_float(value) & 0x7fffffffu;
}

HD float over_448(uint32_t amax_bits) {
  const float amax = float_of_bits(amax_bits);
  return amax_bits < 0x7f800000u ? Divider(448.0f, 1.0f / 448.0f).quotient(amax) : amax;
}

// ---- The formats. Each is made of a block's largest magnitude, as bits, and the tensor's scale; it
// then has the block's scale as it travels and gives the number whose code an element becomes.

// Values of e4m3, `Count` codes of a byte.
struct E4m3Values {
  static constexpr int kBits = 8;
  template <int Count>
  HD static void encode(const float* values, uint8_t* codes) {
    E4m3::from_floats<Count>(values, codes);
  }
};

// scale = max(amax, 1e-10) / 448; value = x / scale.
struct Fp8Block : E4m3Values {
  static constexpr int kBlock = 128;
  using Scale = float;
  Scale scale;
  Divider divider;
  HD Fp8Block(uint32_t amax, float /*global_scale*/)
      : scale(over_448(amax > 0x2edbe6ffu ? amax : 0x2edbe6ffu)), divider(scale) {}  // 1e-10
  HD float value(float x) const { return divider.quotient(x); }
};

// scale = max(amax of the row / 448, 1 / (448 * 512)); value = x / scale.
struct Fp8Token : E4m3Values {
  static constexpr int kBlock = 0;
  static constexpr float kLeast = 1.0f / (448.0f * 512.0f);
  using Scale = float;
  Scale scale;
  Divider divider;
  HD Fp8Token(uint32_t amax, float /*global_scale*/) : scale(bounded(amax)), divider(scale) {}
  HD float value(float x) const { return divider.quotient(x); }
  HD static float bounded(uint32_t amax) {
    const uint32_t bits = bits_of_float(over_448(amax));
    const uint32_t least = bits_of_float(kLeast);
    return float_of_bits(bits > least ? bits : least);
  }
};

// The scale is the model's and does not travel; value = x * (1 / scale).
struct Fp8Tensor : E4m3Values {
  static constexpr int kBlock = 0;
  using Scale = void;
  float reciprocal;
  HD Fp8Tensor(uint32_t /*amax*/, float global_scale) : reciprocal(1.0f / global_scale) {}
  HD float value(float x) const { return x * reciprocal; }
};

// scale = 2^e with the smallest e for which amax / 2^e <= 448, stored as e + 127; value = x / 2^e,
// which is x * 2^-e. amax = m * 2^n with 1 <= m < 2: e = n - 8 where m <= 1.75 = 448 / 2^8, else
// n - 7. Infinity has e = 127; NaN makes every value of its block NaN and has the stored byte 0, as
// torch casts it.
struct Mxfp8 : E4m3Values {
  static constexpr int kBlock = 32;
  using Scale = uint8_t;
  Scale scale;
  float factor;
  HD Mxfp8(uint32_t amax, float /*global_scale*/) {
    const int wanted = static_cast<int>(amax >> 23) - 8 + ((amax & 0x7fffffu) > 0x600000u ? 1 : 0);
    int biased = wanted > 0 ? wanted : 0;
    biased = amax == 0x7f800000u ? 254 : biased;
    biased = amax > 0x7f800000u ? 0 : biased;
    scale = static_cast<Scale>(biased);
    // 2^-127, for infinity, is below fp32's normal numbers.
    const uint32_t bits = biased == 254 ? 0x00400000u : static_cast<uint32_t>(254 - biased) << 23;
    factor = float_of_bits(amax > 0x7f800000u ? 0x7fc00000u : bits);
  }
  HD float value(float x) const { return x * factor; }
};

// scale = e4m3(global * amax / 6); value = x / (scale / global), both with reciprocals as vLLM's
// kernel takes them. A block whose scale is 0 is 0.
struct Nvfp4 {
  static constexpr int kBits = 4;
  static constexpr int kBlock = 16;
  using Scale = uint8_t;
  Scale scale;
  float factor;
  HD Nvfp4(uint32_t amax, float global_scale) {
    const float wanted = global_scale * (float_of_bits(amax) * reciprocal_for_fp4(E2m1::kLargest));
    scale = E4m3::from_float(wanted);
    const float used = E4m3::to_float(scale);
    factor = scale == 0 ? 0.0f : reciprocal_for_fp4(used * reciprocal_for_fp4(global_scale));
  }
  HD float value(float x) const { return x * factor; }
  template <int Count>
  HD static void encode(const float* values, uint8_t* codes) {
    E2m1::from_floats<Count>(values, codes);
  }
};

template <int Quantiser>
struct FormatOf;
template <>
struct FormatOf<kQuantiserFp8Block> {
  using Type = Fp8Block;
};
template <>
struct FormatOf<kQuantiserFp8Token> {
  using Type = Fp8Token;
};
template <>
struct FormatOf<kQuantiserFp8Tensor> {
  using Type = Fp8Tensor;
};
template <>
struct FormatOf<kQuantiserMxfp8> {
  using Type = Mxfp8;
};
template <>
struct FormatOf<kQuantiserNvfp4> {
  using Type = Nvfp4;
};

// Whether scales travel beside the rows.
HD bool has_scales(int quantiser) {
  return quantiser != kQuantiserNone && quantiser != kQuantiserFp8Tensor;
}

// ---- Targets: where a quantised row goes. store() takes bytes of the row, store_scales() bytes of
// its scales, at an offset which is a multiple of their number.

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

// ---- Pieces.

// `Count` elements from `source`, which lies on a vector's boundary where `wide` says so.
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

// Largest magnitude of `Count` elements, as bits of fp32. Taken of the stored words: in every
// element type a number's magnitude has the order of its bits, and NaN is above all.
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

// `Count` elements that have one scale become the numbers to encode.
template <class Format, int Count>
HD void scale_elements(const Format& format, float* values) {
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Count; ++i) values[i] = format.value(values[i]);
}

// The same of several blocks, which only the host has in one piece: loops that become vector code, of
// a format whose number is x * factor.
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
    // Unrolled, it becomes vectors of one element of each block.
    MOE_NVLINK_ROLLED
    for (int j = 0; j < Size; ++j) values[i * Size + j] *= factors[i];
  }
}

// Pieces of `Count` elements in [first, last), the lane's every num_threads-th: a block format. Count
// and the block divide one another.
template <class Format, class Element, int Count, class Target>
HD void quantise_blocks(const Cta& cta, int lane, const char* row, bool wide, int first, int last,
                        float global_scale, const Target& target) {
  using Word = typename Element::Storage;
  using Scale = typename Format::Scale;
  constexpr int kLanes = Format::kBlock > Count ? Format::kBlock / Count : 1;
  constexpr int kBlocks = Format::kBlock > Count ? 1 : Count / Format::kBlock;
  constexpr int kBlock = Count / kBlocks;  // this lane's part of one
  constexpr int kRowBytes = Count * Format::kBits / 8;
  // The lanes of a warp go round together, for they exchange values; behind the end of the row they
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

// The same where one scale holds for the whole row.
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

// One element at a time, for rows of an odd size and the rest of others.
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
// and store it to `target`. `lane` numbers them; lanes side by side are threads side by side, and
// lane 0 is the first of a warp. Row and scales of the target lie on boundaries of what is stored at
// a time where the host's do not matter: 16 bytes of e4m3, 8 of e2m1, a scale.
//   wide          loads_are_wide()
//   row_amax      bits, recipes with one scale for a row: amax_of_row of the whole of it
//   global_scale  recipes that are given one
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
    if constexpr (Quantiser == kQuantiserFp8Token) {
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
// part, and behind a barrier of the CTA every thread takes the largest.
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

// Behind that barrier: the row's amax, as bits.
HD uint32_t take_row_amax(const Cta& cta, const RowAmax& shared) {
  uint32_t most = 0;
  for (int i = cta.thread % Cta::kExchangeThreads; i < cta.num_threads / Cta::kExchangeThreads;
       i += Cta::kExchangeThreads) {
    most = shared.parts[i] > most ? shared.parts[i] : most;
  }
  return cta.max_of_lanes<Cta::kExchangeThreads>(most);
}

}  // namespace moe_nvlink
