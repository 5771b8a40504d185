// Activation formats to and from fp32. The same arithmetic on both executors; every bf16 and fp16
// pattern and a few million fp32 values are compared with torch in the tests.
#pragma once

#include "config.h"
#include "platform.h"

namespace moe_nvlink {

HD float float_of_bits(uint32_t bits) {
  MOE_NVLINK_DEVICE_ONLY(return __uint_as_float(bits);)
  MOE_NVLINK_HOST_ONLY(float value; std::memcpy(&value, &bits, sizeof(value)); return value;)
}

HD uint32_t bits_of_float(float value) {
  MOE_NVLINK_DEVICE_ONLY(return __float_as_uint(value);)
  MOE_NVLINK_HOST_ONLY(uint32_t bits; std::memcpy(&bits, &value, sizeof(bits)); return bits;)
}

HD int element_bytes(int element) {
  return element == kElementFp32 ? 4 : 2;
}

struct Bf16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMinusZero = 0x8000;

  HD static float to_float(uint16_t bits) {
    return float_of_bits(static_cast<uint32_t>(bits) << 16);
  }

  // Round to nearest even; every NaN becomes 0x7fc0, as in torch.
  HD static uint16_t from_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
  }
};

struct Fp16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMinusZero = 0x8000;

  // Moving the 15 magnitude bits up to fp32's place leaves the exponent 112 too low; the product
  // with 2^112 is exact and makes normals of subnormals. Infinity and NaN get fp32's exponent.
  HD static float to_float(uint16_t half) {
    const uint32_t magnitude = (half & 0x7fffu) << 13;
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const float scaled = float_of_bits(magnitude) * float_of_bits(0x77800000u);
    const uint32_t special = magnitude | 0x7f800000u;
    return float_of_bits(sign | (magnitude >= 0x0f800000u ? special : bits_of_float(scaled)));
  }

  // Round to nearest even. Below 2^-14 (fp16's smallest normal) adding 0.5 makes fp32's own adder
  // round to multiples of 2^-24, fp16's subnormal step.
  HD static uint16_t from_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
    half =
        magnitude >= 0x47800000u ? 0x7c00u : half;  // 65536 and above; 65520.. rounds there itself
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return static_cast<uint16_t>(sign | half);
  }
};

struct Fp32 {
  using Storage = uint32_t;
  static constexpr uint32_t kMinusZero = 0x80000000u;
  HD static float to_float(uint32_t bits) { return float_of_bits(bits); }
  HD static uint32_t from_float(float value) { return bits_of_float(value); }
};

}  // namespace moe_nvlink
