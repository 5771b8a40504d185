// Arithmetic of PTX that C++ does not have, on raw bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace ptx {

inline float f32(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

constexpr uint32_t kCanonicalNan = 0x7fffffff;

// A NaN that arithmetic makes is this one.
inline uint32_t result_of(float value) {
  return std::isnan(value) ? kCanonicalNan : bits_of(value);
}
inline float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0F, value) : value;
}

// Rounds to a binary format of `mantissa_bits` and an exponent that is at least `least`; to nearest
// even. The value is finite; the result is exact in a double.
inline double rounded(double value, int mantissa_bits, int least) {
  if (value == 0.0) return value;
  int exponent = std::ilogb(value);
  if (exponent < least) exponent = least;
  const double unit = std::ldexp(1.0, exponent - mantissa_bits);
  return std::nearbyint(value / unit) * unit;
}

// The bits of a small format with `exponent_bits` and `mantissa_bits`, bias 2^(e-1)-1, of a value
// that it holds exactly; the sign is the highest bit.
inline uint32_t packed(double value, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t sign = std::signbit(value) ? 1U << (exponent_bits + mantissa_bits) : 0U;
  const double magnitude = std::fabs(value);
  if (magnitude == 0.0) return sign;
  int exponent = std::ilogb(magnitude);
  if (exponent < 1 - bias) {
    return sign | static_cast<uint32_t>(std::ldexp(magnitude, bias - 1 + mantissa_bits));
  }
  const auto mantissa = static_cast<uint32_t>(std::ldexp(magnitude, mantissa_bits - exponent));
  return sign | static_cast<uint32_t>(exponent + bias) << mantissa_bits |
         (mantissa & ((1U << mantissa_bits) - 1U));
}

inline double unpacked(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1U << mantissa_bits) - 1U);
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1U << exponent_bits) - 1U));
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                    : std::ldexp(mantissa | 1U << mantissa_bits, exponent - bias - mantissa_bits);
  return (bits >> (exponent_bits + mantissa_bits) & 1U) != 0 ? -magnitude : magnitude;
}

// To an IEEE format of 16 bits.
inline uint16_t narrowed(double value, int exponent_bits, int mantissa_bits) {
  const uint32_t infinity = ((1U << exponent_bits) - 1U) << mantissa_bits;
  const auto sign = static_cast<uint32_t>(std::signbit(value)) << 15;
  if (std::isnan(value)) return 0x7fff;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double most = std::ldexp(2.0 - std::ldexp(1.0, -mantissa_bits), bias);
  const double near = std::isinf(value) ? value : rounded(value, mantissa_bits, 1 - bias);
  if (std::fabs(near) > most) {
    return static_cast<uint16_t>(sign | infinity);
  }
  return static_cast<uint16_t>(packed(near, exponent_bits, mantissa_bits));
}
inline uint16_t f16_of(double value) {
  return narrowed(value, 5, 10);
}
inline uint16_t bf16_of(double value) {
  return narrowed(value, 8, 7);
}
inline float f16(uint16_t bits) {
  if ((bits & 0x7c00U) != 0x7c00U) return static_cast<float>(unpacked(bits, 5, 10));
  const float infinity = std::numeric_limits<float>::infinity();
  if ((bits & 0x3ffU) != 0) return f32(kCanonicalNan);
  return (bits & 0x8000U) != 0 ? -infinity : infinity;
}
inline float bf16(uint16_t bits) {
  return f32(static_cast<uint32_t>(bits) << 16);
}

// Formats of 8 and fewer bits; all saturate (.satfinite).
inline uint32_t e4m3_of(double value) {
  if (std::isnan(value)) return 0x7f;
  const double near = std::isinf(value) ? value : rounded(value, 3, -6);
  return packed(std::fabs(near) > 448.0 ? std::copysign(448.0, near) : near, 4, 3);
}
inline uint32_t e2m1_of(double value) {
  if (std::isnan(value)) return 0x7;
  const double near = std::isinf(value) ? value : rounded(value, 1, 0);
  return packed(std::fabs(near) > 6.0 ? std::copysign(6.0, near) : near, 2, 1);
}
inline float e4m3(uint32_t bits) {
  return (bits & 0x7fU) == 0x7fU ? f32(kCanonicalNan)
                                 : static_cast<float>(unpacked(bits & 0xffU, 4, 3));
}
inline float e2m1(uint32_t bits) {
  return static_cast<float>(unpacked(bits & 0xfU, 2, 1));
}

// max: the number where one is NaN; -0 is below +0.
inline float greatest(float a, float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

// Of a value that has been rounded to an integer: clamped to the type. NaN becomes 0, in 64 bits the
// highest bit alone.
template <class Integer>
inline Integer clamped(double value) {
  if (std::isnan(value)) return sizeof(Integer) == 8 ? static_cast<Integer>(uint64_t{1} << 63) : 0;
  const double low = static_cast<double>(std::numeric_limits<Integer>::min());
  const double high = std::ldexp(1.0, std::numeric_limits<Integer>::digits);
  if (value <= low) return std::numeric_limits<Integer>::min();
  if (value >= high) return std::numeric_limits<Integer>::max();
  return static_cast<Integer>(value);
}

// The ISA leaves a division by zero open; it must not end this process.
template <class Integer>
inline Integer quotient(Integer a, Integer b) {
  if (b == 0) return static_cast<Integer>(-1);
  // The one quotient that overflows; C++ leaves it open, PTX wraps.
  if (static_cast<Integer>(-1) < 0 && b == static_cast<Integer>(-1)) {
    return static_cast<Integer>(0 - static_cast<uint64_t>(a));
  }
  return a / b;
}
template <class Integer>
inline Integer remainder_of(Integer a, Integer b) {
  if (b == 0) return a;
  if (static_cast<Integer>(-1) < 0 && b == static_cast<Integer>(-1)) return 0;
  return a % b;
}

// Of twice the bits; of 128 nobody takes more than the upper half.
template <class Integer>
inline auto wide_product(Integer a, Integer b) {
  constexpr bool is_signed = static_cast<Integer>(-1) < 0;
  using Long = std::conditional_t<is_signed, int64_t, uint64_t>;
  using Longest = std::conditional_t<is_signed, __int128, unsigned __int128>;
  using Wide = std::conditional_t<sizeof(Integer) == 8, Longest, Long>;
  return static_cast<Wide>(a) * static_cast<Wide>(b);
}
template <class Integer>
inline Integer high_product(Integer a, Integer b) {
  return static_cast<Integer>(wide_product(a, b) >> (8 * sizeof(Integer)));
}

template <class Unsigned>
inline Unsigned shifted_left(Unsigned a, uint32_t by) {
  return by >= sizeof(Unsigned) * 8 ? 0 : static_cast<Unsigned>(a << by);
}
// Signed: filled with the sign.
template <class Integer>
inline Integer shifted_right(Integer a, uint32_t by) {
  const uint32_t most = sizeof(Integer) * 8 - 1;
  if (by > most) return a < 0 ? static_cast<Integer>(-1) : 0;
  return static_cast<Integer>(a >> by);
}
inline uint32_t funnel(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) << (by & 31U) >> 32);
}
template <class Unsigned>
inline Unsigned extracted(Unsigned a, uint32_t at, uint32_t count) {
  constexpr uint32_t kBits = sizeof(Unsigned) * 8;
  at &= 255U;
  count &= 255U;
  if (at >= kBits) return 0;
  const Unsigned ones = count >= kBits ? ~Unsigned{0} : (Unsigned{1} << count) - 1;
  return a >> at & ones;
}
template <class Unsigned>
inline Unsigned inserted(Unsigned field, Unsigned base, uint32_t at, uint32_t count) {
  constexpr uint32_t kBits = sizeof(Unsigned) * 8;
  at &= 255U;
  count &= 255U;
  if (at >= kBits || count == 0) return base;
  const Unsigned ones = count >= kBits ? ~Unsigned{0} : (Unsigned{1} << count) - 1;
  const Unsigned mask = static_cast<Unsigned>(ones << at);
  return static_cast<Unsigned>((base & ~mask) | (field << at & mask));
}
inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 15U;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (selector & 7U))) & 255U;
    if ((selector & 8U) != 0) byte = (byte & 128U) != 0 ? 255U : 0U;
    result |= byte << (8 * i);
  }
  return result;
}
template <class Unsigned>
inline Unsigned reversed(Unsigned value) {
  Unsigned result = 0;
  for (size_t i = 0; i < sizeof(Unsigned) * 8; ++i) {
    result = static_cast<Unsigned>(result << 1 | (value >> i & 1));
  }
  return result;
}

}  // namespace ptx
