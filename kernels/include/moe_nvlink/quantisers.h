// The formats of the built-in recipes: a block's scale, and the codes of its elements.
// moe_nvlink_plugin/recipes/ has the same arithmetic in torch, and the tests compare the bits.
// Magnitudes are compared as bits: for numbers the order is the same, and NaN is above all of them,
// so that it reaches the scale, as in torch.
#pragma once

#include "config.h"
#include "divider.h"
#include "number_formats.h"
#include "platform.h"

namespace moe_nvlink {

HD uint32_t magnitude_bits(float value) {
  return bits_of_float(value) & 0x7fffffffu;
}

template <class Bits>
HD auto over_448(Bits amax_bits) {
  const auto amax = float_of_bits(amax_bits);
  return amax_bits < 0x7f800000u ? Divider(448.0f, 1.0f / 448.0f).quotient(amax) : amax;
}

// Each format is made of a block's largest magnitude, as bits, and the tensor's scale. It then has
// the block's scale as it travels, and value(x) is the number whose code the element x becomes.
//   kBits         of a code
//   kBlock        elements that share a scale; 0: a whole row
//   kHasRowScale  a row has one scale, made of its largest magnitude

// e4m3: codes of one byte.
struct E4m3Values {
  static constexpr int kBits = 8;
  using Code = E4m3;
  template <int Count>
  HD static void encode(const float* values, uint8_t* codes) {
    E4m3::from_floats<Count>(values, codes);
  }
};

// scale = max(amax, 1e-10) / 448; value = x / scale.
struct Fp8Block : E4m3Values {
  static constexpr int kBlock = 128;
  static constexpr bool kHasRowScale = false;
  using Scale = float;
  Scale scale;
  Divider divider;
  template <class Bits>
  HD static Bits scale_of(Bits amax, float /*global_scale*/) {
    return bits_of_float(over_448(larger(amax, Bits{} + 0x2edbe6ffu)));  // 1e-10
  }
  template <class Bits>
  HD static auto factor_of(Bits /*amax*/, Bits scale, float /*global_scale*/) {
    return float_of_bits(scale);  // a divisor: kDivides
  }
  HD Fp8Block(uint32_t amax, float global_scale)
      : scale(float_of_bits(scale_of(amax, global_scale))), divider(scale) {}
  template <class Floats>
  HD Floats value(Floats x) const {
    return divider.quotient(x);
  }
};

// scale = the least power of two that is at least max(amax / 448, 1e-10); value = x / scale, by a
// product with the reciprocal, which is a power of two as well.
struct Fp8BlockPow2 : E4m3Values {
  static constexpr int kBlock = 128;
  static constexpr bool kHasRowScale = false;
  using Scale = float;
  Scale scale;
  float factor;
  template <class Bits>
  HD static Bits scale_of(Bits amax, float /*global_scale*/) {
    const Bits bits = larger(bits_of_float(over_448(amax)), Bits{} + 0x2edbe6ffu);  // 1e-10
    const Bits power = (bits + 0x7fffffu) & 0x7f800000u;
    return bits < 0x7f800000u ? power : bits;  // infinity and NaN stay
  }
  template <class Bits>
  HD static auto factor_of(Bits /*amax*/, Bits scale, float /*global_scale*/) {
    return 1.0f / float_of_bits(scale);
  }
  HD Fp8BlockPow2(uint32_t amax, float global_scale)
      : scale(float_of_bits(scale_of(amax, global_scale))),
        factor(factor_of(amax, bits_of_float(scale), global_scale)) {}
  template <class Floats>
  HD Floats value(Floats x) const {
    return x * factor;
  }
};

// scale = max(amax of the row / 448, 1 / (448 * 512)); value = x / scale.
struct Fp8Token : E4m3Values {
  static constexpr int kBlock = 0;
  static constexpr float kLeast = 1.0f / (448.0f * 512.0f);
  static constexpr bool kHasRowScale = true;
  using Scale = float;
  Scale scale;
  Divider divider;
  HD Fp8Token(uint32_t amax, float /*global_scale*/) : scale(bounded(amax)), divider(scale) {}
  template <class Floats>
  HD Floats value(Floats x) const {
    return divider.quotient(x);
  }
  HD static float bounded(uint32_t amax) {
    const uint32_t bits = bits_of_float(over_448(amax));
    const uint32_t least = bits_of_float(kLeast);
    return float_of_bits(bits > least ? bits : least);
  }
};

// The scale is the model's and does not travel; value = x * (1 / scale).
struct Fp8Tensor : E4m3Values {
  static constexpr int kBlock = 0;
  static constexpr bool kHasRowScale = false;
  using Scale = void;
  float reciprocal;
  HD Fp8Tensor(uint32_t /*amax*/, float global_scale) : reciprocal(1.0f / global_scale) {}
  template <class Floats>
  HD Floats value(Floats x) const {
    return x * reciprocal;
  }
};

// scale = 2^e with the smallest e for which amax / 2^e <= 448, stored as e + 127; value = x / 2^e,
// which is x * 2^-e. amax = m * 2^n with 1 <= m < 2: if m <= 1.75 = 448 / 2^8, e = n - 8, else
// e = n - 7. Infinity has e = 127. NaN makes every value of its block NaN and its stored byte 0, as
// torch casts it.
struct Mxfp8 : E4m3Values {
  static constexpr int kBlock = 32;
  static constexpr bool kHasRowScale = false;
  using Scale = uint8_t;
  Scale scale;
  float factor;
  template <class Bits>
  HD static Bits scale_of(Bits amax, float /*global_scale*/) {
    const Bits exponent = (amax + 0x1fffffu) >> 23;
    const Bits biased = exponent > 8u ? exponent - 8u : Bits{};
    const Bits bounded = amax == 0x7f800000u ? Bits{} + 254u : biased;
    return amax > 0x7f800000u ? Bits{} : bounded;
  }
  template <class Bits>
  HD static auto factor_of(Bits amax, Bits biased, float /*global_scale*/) {
    // 2^-127, for infinity, is below fp32's normal numbers.
    const Bits power = biased == 254u ? Bits{} + 0x00400000u : (254u - biased) << 23;
    return float_of_bits(amax > 0x7f800000u ? Bits{} + 0x7fc00000u : power);
  }
  HD Mxfp8(uint32_t amax, float global_scale)
      : scale(static_cast<Scale>(scale_of(amax, global_scale))),
        factor(factor_of(amax, uint32_t{scale}, global_scale)) {}

  template <class Floats>
  HD Floats value(Floats x) const {
    return x * factor;
  }
};

// scale = e4m3(global * amax / 6); value = x / (scale / global), both with reciprocals as vLLM's
// kernel takes them. A block whose scale is 0 is 0.
struct Nvfp4 {
  static constexpr int kBits = 4;
  using Code = E2m1;
  static constexpr int kBlock = 16;
  static constexpr bool kHasRowScale = false;
  using Scale = uint8_t;
  Scale scale;
  float factor;
  template <class Bits>
  HD static Bits scale_of(Bits amax, float global_scale) {
    return E4m3::code_of(global_scale * (float_of_bits(amax) * reciprocal_for_fp4(E2m1::kLargest)));
  }
  template <class Bits>
  HD static auto factor_of(Bits /*amax*/, Bits code, float global_scale) {
    const auto used = E4m3::floats_of(code);
    return code == 0u ? decltype(used * 1.0f){}
                      : reciprocal_for_fp4(used * reciprocal_for_fp4(global_scale));
  }
  HD Nvfp4(uint32_t amax, float global_scale)
      : scale(static_cast<Scale>(scale_of(amax, global_scale))),
        factor(factor_of(amax, uint32_t{scale}, global_scale)) {}

  template <class Floats>
  HD Floats value(Floats x) const {
    return x * factor;
  }
  template <int Count>
  HD static void encode(const float* values, uint8_t* codes) {
    E2m1::from_floats<Count>(values, codes);
  }
};

// Whether factor_of() is what elements are divided by; else they are multiplied by it.
template <class Format>
constexpr bool kDivides = false;
template <>
constexpr bool kDivides<Fp8Block> = true;

// Whether a row is read for its own scale before its blocks are quantised.
template <class Format>
constexpr bool kRowWasRead = false;
template <>
constexpr bool kRowWasRead<Fp8Token> = true;

// Not defined for a code without a format, which so does not compile.
template <int Quantiser>
struct FormatOf;
template <>
struct FormatOf<kQuantiserFp8Block> {
  using Type = Fp8Block;
};
template <>
struct FormatOf<kQuantiserFp8BlockPow2> {
  using Type = Fp8BlockPow2;
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
  static_assert(kNumQuantisers == 7);
  return quantiser != kQuantiserNone && quantiser != kQuantiserFp8Tensor;
}

}  // namespace moe_nvlink
