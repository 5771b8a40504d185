// How the experts' rows travel in combine: as they are, or quantised. For each format:
// the bytes of a row, what one thread loads of a row and adds to its sums (a part), and how a row
// is quantised. moe_nvlink_plugin/recipes/combine_formats.py has the same arithmetic in torch.
#pragma once

#include "args.h"
#include "copy.h"
#include "number_formats.h"
#include "platform.h"
#include "quantise.h"

namespace moe_nvlink {

// Where a partial row lies; null for a k that has none. A format sets what it uses.
struct PartialRow {
  const char* row;
  const char* scales;
  const char* row_scale;
};

// Whether scales lie beside the rows that travel.
template <int Format>
constexpr bool kHasScales = Format == kCombineFp8Block || Format == kCombineNvfp4;

// Bytes of a row in each of the regions it lies in.
struct RowSizes {
  uint64_t row;
  uint64_t scales;
  uint64_t row_scale;
};

template <int Format>
HD RowSizes row_sizes(uint64_t element_bytes, int hidden_size) {
  const uint64_t elements = static_cast<uint64_t>(hidden_size);
  if constexpr (Format == kCombineFp8Block) {
    return RowSizes{elements, elements / 128 * 4, 0};
  } else if constexpr (Format == kCombineNvfp4) {
    return RowSizes{elements / 2, elements / 16, 4};
  } else if constexpr (Format == kCombineFp8Tensor) {
    return RowSizes{elements, 0, 0};
  } else {
    static_assert(Format == kCombineUnquantised);
    return RowSizes{elements * element_bytes, 0, 0};
  }
}

// Width elements of one row, as loaded.
template <class Element, int Width>
using Lanes = Vector<Width* static_cast<int>(sizeof(typename Element::Storage))>;

template <int Bytes>
HD void fill_bytes(Vector<Bytes>& vector, unsigned char byte) {
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Bytes; ++i) vector.bytes[i] = byte;
}

// ---- Parts: Width elements of one row. An absent row's are -0.0, which change no sum.

template <class Element, int Width>
struct UnquantisedPart {
  static constexpr int kWidth = Width;
  using Rest = UnquantisedPart<Element, 1>;  // host: for the elements after the last whole part
  Lanes<Element, Width> lanes;

  HD void set_absent() {
    auto* words = reinterpret_cast<typename Element::Storage*>(&lanes);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) {
      words[i] = static_cast<typename Element::Storage>(Element::kMinusZero);
    }
  }
  HD void load(const PartialRow& from, int element) {
    load_vector(lanes, from.row + element * static_cast<int>(sizeof(typename Element::Storage)));
  }
  HD void add_to(float* sums) const {
    const auto* words = reinterpret_cast<const typename Element::Storage*>(&lanes);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) sums[i] += Element::to_float(words[i]);
  }
};

// value = e4m3 * scale of its block of 128.
template <int Width>
struct Fp8BlockPart {
  static_assert(128 % Width == 0);
  static constexpr int kWidth = Width;
  using Rest = Fp8BlockPart;
  Vector<Width> codes;
  float scale;

  HD void set_absent() {
    fill_bytes(codes, 0x80);
    scale = 1.0f;
  }
  HD void load(const PartialRow& from, int element) {
    load_vector(codes, from.row + element);
    scale = load_word(reinterpret_cast<const float*>(from.scales) + element / 128);
  }
  HD void add_to(float* sums) const {
    float values[Width];
    E4m3::to_floats<Width>(codes.bytes, values);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) sums[i] += values[i] * scale;
  }
};

// value = e2m1 * (e4m3 scale of its block of 16 * scale of its row).
template <int Width>
struct Nvfp4Part {
  static constexpr int kScales = Width > 16 ? Width / 16 : 1;
  static constexpr int kBlock = Width / kScales;  // this part's share of one
  static_assert(16 % kBlock == 0);
  static constexpr int kWidth = Width;
  using Rest = Nvfp4Part<16>;
  Vector<Width / 2> codes;
  Vector<kScales> scales;
  float row_scale;

  HD void set_absent() {
    fill_bytes(codes, 0x88);
    fill_bytes(scales, 0x38);  // 1
    row_scale = 1.0f;
  }
  HD void load(const PartialRow& from, int element) {
    load_vector(codes, from.row + element / 2);
    load_vector(scales, from.scales + element / 16);
    row_scale = load_word(reinterpret_cast<const float*>(from.row_scale));
  }
  HD void add_to(float* sums) const {
    float values[Width];
    E2m1::to_floats<Width>(codes.bytes, values);
    MOE_NVLINK_UNROLL
    for (int block = 0; block < kScales; ++block) {
      const float unit = E4m3::to_float(scales.bytes[block]) * row_scale;
      MOE_NVLINK_UNROLL
      for (int i = block * kBlock; i < (block + 1) * kBlock; ++i) sums[i] += values[i] * unit;
    }
  }
};

// value = e4m3. What a code of 1 stands for is the same in all rows, so the sum is multiplied by it,
// with CombineArgs.scale.
template <int Width>
struct Fp8TensorPart {
  static constexpr int kWidth = Width;
  using Rest = Fp8TensorPart<16>;
  Vector<Width> codes;

  HD void set_absent() { fill_bytes(codes, 0x80); }
  HD void load(const PartialRow& from, int element) { load_vector(codes, from.row + element); }
  HD void add_to(float* sums) const {
    float values[Width];
    E4m3::to_floats<Width>(codes.bytes, values);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) sums[i] += values[i];
  }
};

// ---- Quantising, in the blocks of quantise.h. Fp8Block serves unchanged.

// The scale of a row of nvfp4 from its largest magnitude, as bits: the largest block's scale is
// then e4m3's largest number. Not below 2^-100, so that the least unit of a block is a normal
// number. NaN if the row has a NaN or an infinity.
HD float nvfp4_row_scale(uint32_t amax_bits) {
  constexpr float kLeast = 0x1p-100f;
  if (amax_bits >= 0x7f800000u) return float_of_bits(0x7fc00000u);
  const float scale = float_of_bits(amax_bits) / (E4m3::kLargest * E2m1::kLargest);
  return scale > kLeast ? scale : kLeast;
}

// A block of nvfp4 under the scale of its row. It divides as IEEE 754 says on every executor. The
// recipe Nvfp4 does not, because it must agree with a model's calibration and with other kernels.
struct Nvfp4OfRow {
  static constexpr int kBits = Nvfp4::kBits;
  using Code = Nvfp4::Code;
  static constexpr int kBlock = Nvfp4::kBlock;
  using Scale = Nvfp4::Scale;
  Scale scale;
  float factor;

  template <class Bits>
  HD static Bits scale_of(Bits amax, float row_scale) {
    return E4m3::code_of(1.0f / row_scale * (float_of_bits(amax) * (1.0f / E2m1::kLargest)));
  }
  template <class Bits>
  HD static auto factor_of(Bits /*amax*/, Bits code, float row_scale) {
    const auto unit = E4m3::floats_of(code) * row_scale;
    return code == 0u ? decltype(unit * 1.0f){} : 1.0f / unit;
  }
  HD Nvfp4OfRow(uint32_t amax, float row_scale)
      : scale(static_cast<Scale>(scale_of(amax, row_scale))),
        factor(factor_of(amax, uint32_t{scale}, row_scale)) {}
  template <class Floats>
  HD Floats value(Floats x) const {
    return x * factor;
  }
  template <int Count>
  HD static void encode(const float* values, uint8_t* codes) {
    Nvfp4::encode<Count>(values, codes);
  }
};
template <>
constexpr bool kRowWasRead<Nvfp4OfRow> = true;

// A row under CombineArgs.rows_factor. x * 0 is NaN for an infinity, which else would become 448, as
// a large number does: nobody could tell it from a result.
struct Fp8TensorOfRow : E4m3Values {
  static constexpr int kBlock = 0;
  float factor;
  HD explicit Fp8TensorOfRow(float rows_factor) : factor(rows_factor) {}
  template <class Floats>
  HD Floats value(Floats x) const {
    return (x + x * 0.0f) * factor;
  }
};

}  // namespace moe_nvlink
