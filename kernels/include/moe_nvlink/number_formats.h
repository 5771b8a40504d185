// Activation types and quantised formats to and from fp32, with the same values on both executors:
// by the hardware's conversions if the GPU has them, else by arithmetic. The tests compare every
// pattern up, and a few million fp32 values down, with torch and ml_dtypes.
#pragma once

#include "config.h"
#include "platform.h"

namespace moe_nvlink {

HD float float_of_bits(uint32_t bits) {
  MOE_NVLINK_DEVICE_ONLY(return __uint_as_float(bits);)
  MOE_NVLINK_HOST_ONLY(return __builtin_bit_cast(float, bits);)
}

HD uint32_t bits_of_float(float value) {
  MOE_NVLINK_DEVICE_ONLY(return __float_as_uint(value);)
  MOE_NVLINK_HOST_ONLY(return __builtin_bit_cast(uint32_t, value);)
}

// The same for registers of several elements, which the host has. Each conversion is written once,
// for one element (Bits is uint32_t) and for a register of elements.
MOE_NVLINK_HOST_ONLY(
    HD FloatRegister float_of_bits(BitRegister bits) {
      return reinterpret_cast<FloatRegister>(bits);
    }

    HD BitRegister bits_of_float(FloatRegister values) {
      return reinterpret_cast<BitRegister>(values);
    })

template <class Bits>
HD Bits lesser(Bits a, Bits b) {
  return a < b ? a : b;
}

template <class Bits>
HD Bits larger(Bits a, Bits b) {
  return a > b ? a : b;
}

HD int element_bytes(int element) {
  static_assert(kNumElements == 3);
  return element == kElementFp32 ? 4 : 2;
}

struct Bf16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMinusZero = 0x8000;

  template <class Bits>
  HD static auto floats_of(Bits bits) {
    return float_of_bits(bits << 16);
  }

  // Round to nearest even; every NaN becomes 0x7fc0, as in torch.
  template <class Bits>
  HD static Bits rounded(Bits bits) {
    const Bits result = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? Bits{} + 0x7fc0u : result;
  }

  HD static float to_float(uint16_t bits) { return floats_of(static_cast<uint32_t>(bits)); }
  HD static uint16_t from_float(float value) {
    return static_cast<uint16_t>(rounded(bits_of_float(value)));
  }
};

struct Fp16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMinusZero = 0x8000;

  // Moving the 15 magnitude bits up to fp32's place leaves the exponent 112 too low; the product
  // with 2^112 is exact and makes normals of subnormals. Infinity and NaN get fp32's exponent.
  template <class Bits>
  HD static auto floats_of(Bits half) {
    const Bits magnitude = (half & 0x7fffu) << 13;
    const Bits sign = (half & 0x8000u) << 16;
    const Bits scaled = bits_of_float(float_of_bits(magnitude) * float_of_bits(0x77800000u));
    const Bits special = magnitude | 0x7f800000u;
    return float_of_bits(sign | (magnitude >= 0x0f800000u ? special : scaled));
  }

  // Round to nearest even. Below 2^-14 (fp16's smallest normal) adding 0.5 makes fp32's own adder
  // round to multiples of 2^-24, fp16's subnormal step.
  template <class Bits>
  HD static Bits rounded(Bits bits) {
    const Bits sign = (bits >> 16) & 0x8000u;
    const Bits magnitude = bits & 0x7fffffffu;
    const Bits normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const Bits subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    Bits half = magnitude < 0x38800000u ? subnormal : normal;
    // 65536 and above; 65520.. rounds there itself
    half = magnitude >= 0x47800000u ? Bits{} + 0x7c00u : half;
    half = magnitude > 0x7f800000u ? Bits{} + 0x7e00u : half;
    return sign | half;
  }

  HD static float to_float(uint16_t half) { return floats_of(static_cast<uint32_t>(half)); }
  HD static uint16_t from_float(float value) {
    return static_cast<uint16_t>(rounded(bits_of_float(value)));
  }
};

struct Fp32 {
  using Storage = uint32_t;
  static constexpr uint32_t kMinusZero = 0x80000000u;
  template <class Bits>
  HD static auto floats_of(Bits bits) {
    return float_of_bits(bits);
  }
  template <class Bits>
  HD static Bits rounded(Bits bits) {
    return bits;
  }
  HD static float to_float(uint32_t bits) { return float_of_bits(bits); }
  HD static uint32_t from_float(float value) { return bits_of_float(value); }
};

// 1 sign, 4 exponent, 3 mantissa bits, no infinities: the largest number is 448, 0x7f is NaN.
struct E4m3 {
  static constexpr float kLargest = 448.0f;
  static constexpr uint32_t kMagnitude = 0x7f;

  // Round to nearest even. Numbers above 448, infinity too, become 448, as in the hardware and in
  // torch from 2.13 on (older versions make NaN of them). NaN becomes 0x7f, of either sign.
  template <class Bits>
  HD static Bits rounded(Bits bits) {
    const Bits magnitude = bits & 0x7fffffffu;
    const Bits code = rounded_magnitude(bounded(magnitude)) & kMagnitude;
    return magnitude > 0x7f800000u ? Bits{} + 0x7fu : code | ((bits >> 24) & 0x80u);
  }

  template <class Bits>
  HD static Bits bounded(Bits magnitude) {
    return lesser(magnitude, Bits{} + 0x43e00000u);
  }

  // The code of a magnitude that rounds to 448 or less, in the low 7 bits; the others may be set.
  //
  // A number's codes are multiples of 2^-3 of its binade, below 2^-6 of 2^-9. So fp32's own adder
  // rounds it to a code if 2^20 times the binade (at least 2^-6) is added. The sum's low bits are
  // the number of steps, from 8 on in a binade, and each binade is 8 codes above the one before.
  // With 0x38 steps more the codes begin at 0, modulo 2^7.
  template <class Bits>
  HD static Bits rounded_magnitude(Bits magnitude) {
    const Bits binade = larger(magnitude & 0x7f800000u, Bits{} + 0x3c800000u);
    const Bits steps =
        bits_of_float(float_of_bits(magnitude) + float_of_bits(Bits(binade + 0x0a000038u)));
    return steps + (binade >> 20);
  }

  // The code in a word as wide as a float.
  HD static uint32_t code_of(float value) {
    if constexpr (kHasFp8Conversions) return e4m3_pair_of_floats(value, 0.0f) & 0xffu;
    return rounded(bits_of_float(value));
  }
  MOE_NVLINK_HOST_ONLY(HD static BitRegister code_of(FloatRegister values) {
    return rounded(bits_of_float(values));
  })
  HD static uint8_t from_float(float value) { return static_cast<uint8_t>(code_of(value)); }

  // As Fp16::to_float: 2^120 = 2^(127 - 7).
  template <class Bits>
  HD static auto floats_of(Bits code) {
    const Bits sign = (code & 0x80u) << 24;
    const Bits magnitude = code & 0x7fu;
    const Bits scaled = bits_of_float(float_of_bits(magnitude << 20) * float_of_bits(0x7b800000u));
    return float_of_bits(sign | (magnitude == 0x7fu ? Bits{} + 0x7fc00000u : scaled));
  }
  HD static float to_float(uint8_t code) { return floats_of(static_cast<uint32_t>(code)); }

  // Arrays; Count is even and `codes` aligned to 2.
  template <int Count>
  HD static void from_floats(const float* values, uint8_t* codes) {
    if constexpr (kHasFp8Conversions) {
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Count; i += 2) {
        reinterpret_cast<uint16_t*>(codes)[i / 2] =
            static_cast<uint16_t>(e4m3_pair_of_floats(values[i], values[i + 1]));
      }
    } else {
      uint32_t wide[Count];
      for (int i = 0; i < Count; ++i) wide[i] = code_of(values[i]);
      for (int i = 0; i < Count; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
    }
  }

  template <int Count>
  HD static void to_floats(const uint8_t* codes, float* values) {
    if constexpr (kHasFp8Conversions) {
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Count; i += 2) {
        floats_of_e4m3_pair(reinterpret_cast<const uint16_t*>(codes)[i / 2], values[i],
                            values[i + 1]);
      }
    } else {
      for (int i = 0; i < Count; ++i) values[i] = to_float(codes[i]);
    }
  }
};

// 1 sign, 2 exponent, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, two codes to
// a byte, the first in the low half.
struct E2m1 {
  static constexpr float kLargest = 6.0f;

  static constexpr uint32_t kMagnitude = 7;

  // Round to nearest even; beyond 6 it saturates; NaN becomes 7, which is 6.
  template <class Bits>
  HD static Bits rounded(Bits bits) {
    const Bits magnitude = bits & 0x7fffffffu;
    const Bits code = rounded_magnitude(magnitude) & kMagnitude;
    return magnitude > 0x7f800000u ? Bits{} + 7u : code | ((bits >> 28) & 8u);
  }

  // The code of a magnitude in the low 3 bits; the others may be set. As E4m3::rounded_magnitude: codes
  // are multiples of 2^-1 of the binade, below 1 of 2^-1.
  template <class Bits>
  HD static Bits rounded_magnitude(Bits magnitude) {
    const Bits bounded = lesser(magnitude, Bits{} + 0x40c00000u);
    const Bits binade = larger(bounded & 0x7f800000u, Bits{} + 0x3f800000u);
    const Bits steps =
        bits_of_float(float_of_bits(bounded) + float_of_bits(Bits(binade + 0x0b000002u)));
    return steps + (binade >> 22);
  }

  // The code in a word as wide as a float.
  HD static uint32_t code_of(float value) { return rounded(bits_of_float(value)); }
  HD static uint8_t from_float(float value) { return static_cast<uint8_t>(code_of(value)); }

  // As Fp16::to_float: 2^126 = 2^(127 - 1).
  template <class Bits>
  HD static auto floats_of(Bits code) {
    const Bits sign = (code & 8u) << 28;
    const Bits scaled =
        bits_of_float(float_of_bits((code & 7u) << 22) * float_of_bits(0x7e800000u));
    return float_of_bits(sign | scaled);
  }
  HD static float to_float(uint8_t code) { return floats_of(static_cast<uint32_t>(code)); }

  // Arrays; Count is a multiple of 8 and `codes`, Count / 2 bytes, aligned to 4.
  template <int Count>
  HD static void from_floats(const float* values, uint8_t* codes) {
    if constexpr (kHasFp4Conversions) {
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Count; i += 8) {
        reinterpret_cast<uint32_t*>(codes)[i / 8] = e2m1_of_8_floats(values + i);
      }
    } else {
      uint32_t wide[Count];
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Count; ++i) wide[i] = code_of(values[i]);
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Count / 2; ++i) {
        codes[i] = static_cast<uint8_t>(wide[2 * i] | wide[2 * i + 1] << 4);
      }
    }
  }

  template <int Count>
  HD static void to_floats(const uint8_t* codes, float* values) {
    if constexpr (kHasFp4Conversions) {
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Count; i += 8) {
        floats_of_8_e2m1(reinterpret_cast<const uint32_t*>(codes)[i / 8], values + i);
      }
    } else {
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Count / 2; ++i) {
        values[2 * i] = to_float(codes[i] & 15u);
        values[2 * i + 1] = to_float(codes[i] >> 4);
      }
    }
  }
};

}  // namespace moe_nvlink
