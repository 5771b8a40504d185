// The executor on a GPU: one launch is a grid of CTAs. platform.h says how this file is used.
#pragma once

#define HD __device__ __forceinline__
#define MOE_NVLINK_DEVICE_ONLY(...) __VA_ARGS__
#define MOE_NVLINK_HOST_ONLY(...)
#define MOE_NVLINK_UNROLL _Pragma("unroll")
// For loops of few iterations that move no rows. Unrolled code is more code to fetch, and in a
// launch with one token per CTA no code is in the instruction cache.
#define MOE_NVLINK_ROLLED _Pragma("unroll 1")
#define MOE_NVLINK_INLINE

#if defined(__CUDACC_RTC__)
// NVRTC has no standard headers; these widths are fixed by the CUDA ABI.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

namespace moe_nvlink {

// Bytes one thread moves at a time: the widest load it has. A load must be aligned to its width.
constexpr int kVectorBytes = 16;
constexpr bool kAlignedVectorsOnly = true;
// Loads that a thread has in flight while it copies a long row. With more, dispatch would need over
// 64 registers, and 1024 threads, one for each vector of a common row, could not be launched.
constexpr int kVectorsInFlight = 2;
// Combine adds -0.0 for an absent row. A branch instead would make the loads wait for one another.
constexpr bool kSkipAbsentRows = false;
// Elements of a row that one thread quantises at a time; lanes side by side share a larger block.
constexpr int kLaneElements = 16;
// A register holds one element.
constexpr int kRegisterFloats = 1;
using FloatRegister = float;
using BitRegister = uint32_t;
// Only the host streams (platform_host.h).
constexpr bool kStreams = false;
constexpr uint64_t kStreamedBytes = 0;
HD void stream_register(char*, BitRegister) {}
constexpr bool kHasShuffles = false;
HD FloatRegister shuffled_e2m1(BitRegister) {
  return 0.0f;
}
HD BitRegister merged(uint32_t mask, BitRegister a, BitRegister b) {
  return (a & mask) | (b & ~mask);
}
HD bool all_below(uint32_t limit, BitRegister bits) {
  return bits < limit;
}
constexpr bool kHasHalfConversions = false;
HD void halves_of_e4m3(const char*, FloatRegister&, FloatRegister&) {}
HD BitRegister load_bytes(const char* source) {
  return static_cast<unsigned char>(*source);
}
HD void end_streams() {}

// One cooperative thread array: the thread's place in it, and its barriers.
struct Cta {
  int block;
  int num_blocks;
  int thread;
  int num_threads;
  // Every access of this CTA's threads before it happens before every access after it.
  HD void sync() const { __syncthreads(); }
  // The same among the threads of a warp. The first kWarpThreads of a CTA are a warp.
  static constexpr int kWarpThreads = 32;
  HD void sync_warp() const { __syncwarp(); }
  // Threads that can exchange values without memory. All of them call max_of_lanes together.
  static constexpr int kExchangeThreads = 32;
  // The largest value among this thread's group of `Lanes` neighbours; Lanes is a power of 2.
  template <int Lanes>
  HD uint32_t max_of_lanes(uint32_t value) const {
    if constexpr (Lanes == 32) return __reduce_max_sync(0xffffffffu, value);
    MOE_NVLINK_UNROLL
    for (int distance = Lanes / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, value, distance);
      value = other > value ? other : value;
    }
    return value;
  }
  // The sum of the values of the warp's threads.
  template <int Lanes>
  HD uint32_t sum_of_lanes(uint32_t value) const {
    static_assert(Lanes == 32);
    return __reduce_add_sync(0xffffffffu, value);
  }
};

HD Cta this_cta() {
  return Cta{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
             static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
}

// Nanoseconds. The driver may set this clock back.
HD uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Between two reads a poll does nothing: a thread of a GPU shares its core with no rank that it
// waits for.
struct Backoff {
  HD void pause(uint64_t /*waited_ns*/) {}
};

// The value, about which the compiler knows nothing: it keeps a branch that asks for it.
HD uint32_t unknown(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// a * b + c, rounded once.
HD float fused_multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}

// The reciprocal as NVFP4 kernels take it: at most one unit in the last place off; 0 where it would
// be denormal. The scales that experts' kernels divide by were made with this instruction.
HD float reciprocal_for_fp4(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

HD float hyperbolic_tangent(float value) {
  return tanhf(value);
}

// Conversions of the hardware. They round to nearest even. A number that is too large becomes the
// largest finite one; NaN becomes 0x7f (e4m3) or 7 (e2m1).
constexpr bool kHasFp8Conversions = true;

// Two values: the first in the low byte.
HD uint32_t e4m3_pair_of_floats(float first, float second) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

HD void floats_of_e4m3_pair(uint32_t pair, float& first, float& second) {
  asm("{\n\t.reg .b32 halves;\n\t.reg .b16 low, high;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, %2;\n\tmov.b32 {low, high}, halves;\n\t"
      "cvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
      : "=f"(first), "=f"(second)
      : "h"(static_cast<uint16_t>(pair)));
}

// On sm_120 st.async.release becomes the code of st.release, and before sm_100 there is none.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
constexpr bool kHasAsyncRelease = true;
#else
constexpr bool kHasAsyncRelease = false;
#endif

// The `a` and `f` forms of sm_100 and newer convert e2m1 too; sm_90a does it by arithmetic.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
constexpr bool kHasFp4Conversions = true;

// Eight values: the first in the lowest four bits.
HD uint32_t e2m1_of_8_floats(const float* values) {
  uint32_t codes;
  asm("{\n\t.reg .b8 pair<4>;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 pair0, %2, %1;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 pair1, %4, %3;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 pair2, %6, %5;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 pair3, %8, %7;\n\t"
      "mov.b32 %0, {pair0, pair1, pair2, pair3};\n\t}"
      : "=r"(codes)
      : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "f"(values[4]),
        "f"(values[5]), "f"(values[6]), "f"(values[7]));
  return codes;
}

HD void floats_of_8_e2m1(uint32_t codes, float* values) {
  uint32_t halves[4];
  asm("{\n\t.reg .b8 pair<4>;\n\tmov.b32 {pair0, pair1, pair2, pair3}, %4;\n\t"
      "cvt.rn.f16x2.e2m1x2 %0, pair0;\n\tcvt.rn.f16x2.e2m1x2 %1, pair1;\n\t"
      "cvt.rn.f16x2.e2m1x2 %2, pair2;\n\tcvt.rn.f16x2.e2m1x2 %3, pair3;\n\t}"
      : "=r"(halves[0]), "=r"(halves[1]), "=r"(halves[2]), "=r"(halves[3])
      : "r"(codes));
  MOE_NVLINK_UNROLL
  for (int i = 0; i < 4; ++i) {
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
        "cvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
        : "=f"(values[2 * i]), "=f"(values[2 * i + 1])
        : "r"(halves[i]));
  }
}
#else
constexpr bool kHasFp4Conversions = false;
HD uint32_t e2m1_of_8_floats(const float*) {
  return 0;
}
HD void floats_of_8_e2m1(uint32_t, float*) {}
#endif

// Programmatic dependent launch. After pdl_wait() all that the previous kernel of the stream wrote
// is visible. pdl_launch_dependents() lets the next kernel start the part before its own
// pdl_wait().
HD void pdl_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
HD void pdl_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace moe_nvlink

// The kernel `name`: body<Config>(args, cta, shared). Config is set by the translation unit.
#define MOE_NVLINK_KERNEL(name, Args, Shared, body)                                \
  extern "C" __global__ void name(const __grid_constant__ moe_nvlink::Args args) { \
    __shared__ moe_nvlink::Shared shared;                                          \
    moe_nvlink::body<Config>(args, moe_nvlink::this_cta(), shared);                \
  }
