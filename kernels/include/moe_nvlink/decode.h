// Codes of quantised formats to fp32, a pair of registers at a time. The numbers are those of
// numeric.h; of a NaN the bits may differ. On the GPU a register holds one element.
#pragma once

#include "copy.h"
#include "number_formats.h"
#include "platform.h"
#include "registers.h"

namespace moe_nvlink {

// The numbers of 2 * kRegisterFloats codes of e4m3, times a scale. The scale is below 2^120, or infinite:
// Fp8Block's are at most a 448th of fp32's largest number.
MOE_NVLINK_INLINE HD RegisterPair e4m3_values(const char* codes, float scale) {
  if constexpr (kHasHalfConversions) {
    const float halves_scale = scale * 256.0f;
    RegisterPair halves;
    halves_of_e4m3(codes, halves.even, halves.odd);
    return RegisterPair{halves.even * halves_scale, halves.odd * halves_scale};
  }
  const BitRegister pairs = load_register<uint16_t>(codes);
  return RegisterPair{E4m3::floats_of(pairs & 0xffu) * scale, E4m3::floats_of(pairs >> 8) * scale};
}

// The number of every code of e4m3. A code that all elements of a block share is looked up here, which
// takes a load; registers could only decode such codes by the dozen.
MOE_NVLINK_HOST_ONLY(constexpr struct E4m3Numbers {
  float of[256];
  constexpr E4m3Numbers() : of{} {
    float step = 0x1p-9f;  // of the codes of one exponent; 0 and 1 have the same
    for (int code = 0; code < 0x80; ++code) {
      if (code >= 0x10 && code % 8 == 0) step *= 2.0f;
      const float number = static_cast<float>(code < 8 ? code : 8 + code % 8) * step;
      of[code] = code == 0x7f ? __builtin_nanf("") : number;
      of[code + 0x80] = -of[code];
    }
  }
} kE4m3Numbers;)

// The numbers of the e4m3 codes from `codes` on, one for the kRegisterFloats elements of a register
// of a pair that lie in the same 16 elements.
MOE_NVLINK_INLINE HD FloatRegister e4m3_of_16(const char* codes) {
  MOE_NVLINK_DEVICE_ONLY(return E4m3::to_float(static_cast<uint8_t>(*codes));)
  MOE_NVLINK_HOST_ONLY(const auto* bytes = reinterpret_cast<const unsigned char*>(codes);
                       const FloatRegister first = kE4m3Numbers.of[bytes[0]] - FloatRegister{};
                       if constexpr (kRegisterFloats == 8) return first; BitRegister is_second;
                       for (int i = 0; i < kRegisterFloats; ++i) is_second[i] = i < 8 ? 0u : ~0u;
                       return is_second ? kE4m3Numbers.of[bytes[1]] - FloatRegister{} : first;)
}

// The numbers of the e2m1 codes in the lowest four bits.
MOE_NVLINK_INLINE HD FloatRegister e2m1_numbers(BitRegister codes) {
  if constexpr (kHasShuffles) return shuffled_e2m1(codes);
  return E2m1::floats_of(codes & 15u);
}

// The numbers of 2 * kRegisterFloats codes of e2m1, times a unit for the two codes of each byte.
MOE_NVLINK_INLINE HD RegisterPair e2m1_values(const char* codes, FloatRegister units) {
  const BitRegister pairs = load_bytes(codes);
  return RegisterPair{e2m1_numbers(pairs) * units, e2m1_numbers(pairs >> 4) * units};
}

}  // namespace moe_nvlink
