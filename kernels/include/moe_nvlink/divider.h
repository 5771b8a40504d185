// Division of many numbers by one.
#pragma once

#include "number_formats.h"
#include "platform.h"

namespace moe_nvlink {

// x / divisor, rounded as IEEE division rounds it, for many x: RN(1 / divisor) once, then a product
// and two corrections. Each correction takes the exact remainder. The first leaves the quotient at
// most one unit off, and from there the second is right by Markstein's theorem. The theorem does
// not hold for quotients or remainders below fp32's normal numbers; the formats have no codes there
// but 0. The remainder is taken as divisor * q - x and the reciprocal with the opposite sign, so
// that -0 stays -0. An infinite divisor makes x * 0, and NaN makes NaN, as in division; which NaN
// is not promised.
struct Divider {
  float divisor;
  float reciprocal;
  MOE_NVLINK_HOST_ONLY(float exact;)

  HD explicit Divider(float by)
      : divisor(bits_of_float(by) < 0x7f800000u ? by : 0.0f), reciprocal(1.0f / by) {
    MOE_NVLINK_HOST_ONLY(exact = by;)
  }
  HD Divider(float by, float one_by) : divisor(by), reciprocal(one_by) {
    MOE_NVLINK_HOST_ONLY(exact = by;)
  }

  MOE_NVLINK_HOST_ONLY(HD FloatRegister quotient(FloatRegister x) const { return x / exact; })

  HD float quotient(float x) const {
    float q = x * reciprocal;
    q = fused_multiply_add(fused_multiply_add(divisor, q, -x), -reciprocal, q);
    return fused_multiply_add(fused_multiply_add(divisor, q, -x), -reciprocal, q);
  }
};

}  // namespace moe_nvlink
