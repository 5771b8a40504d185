// The executor on CPU threads (kernels/host/grid.h). platform.h says how this file is used.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "../../host/barrier.h"
#include "../../host/sleep.h"

#define HD inline
#define MOE_NVLINK_DEVICE_ONLY(...)
#define MOE_NVLINK_HOST_ONLY(...) __VA_ARGS__
#define MOE_NVLINK_UNROLL
#define MOE_NVLINK_ROLLED _Pragma("GCC unroll 1")

// Threads of a host CTA: 1 in the product, 4 in the build that the thread sanitizer runs.
#ifndef MOE_NVLINK_CTA_THREADS
#define MOE_NVLINK_CTA_THREADS 1
#endif

namespace moe_nvlink {

// Long enough that the compiler keeps several vector registers busy. Rows are moved with memcpy, so
// nothing needs to be aligned.
constexpr int kVectorBytes = 128;
constexpr bool kAlignedVectorsOnly = false;
// The processor looks ahead by itself.
constexpr int kVectorsInFlight = 1;
// Combine spends its time on arithmetic here, so absent rows take no part in it.
constexpr bool kSkipAbsentRows = true;
// Whole blocks of every recipe, and enough of them to fill vector registers.
constexpr int kLaneElements = 128;
// Elements of a vector register, a type of its own: in loops over arrays GCC keeps sums in memory.
constexpr int kRegisterFloats = 8;
typedef float FloatRegister __attribute__((vector_size(4 * kRegisterFloats)));
typedef uint32_t BitRegister __attribute__((vector_size(4 * kRegisterFloats)));

// Long rows are streamed: stored past the caches. To store a line as usual, a core first takes it
// from memory or from the core that read it last; ranks on cores that share no cache pay most for
// that. Where a launch has at most kStreamedBytes to store, the readers find them in a cache. The
// thread sanitizer does not see streamed stores, so its build has none.
constexpr uint64_t kStreamedBytes = 1 << 20;
#if defined(__AVX__) && !defined(__SANITIZE_THREAD__)
constexpr bool kStreams = true;
inline void stream_register(char* target, BitRegister bits) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), reinterpret_cast<__m256i>(bits));
}
// A release does not order the streamed stores before it. So a thread that has streamed calls this
// before it releases anything.
inline void end_streams() {
  _mm_sfence();
}
#else
constexpr bool kStreams = false;
inline void stream_register(char*, BitRegister) {}
inline void end_streams() {}
#endif

struct Cta {
  int block;
  int num_blocks;
  int thread;
  host::Barrier* barrier;
  host::Barrier* warp_barrier;  // of this thread's warp
  static constexpr int num_threads = MOE_NVLINK_CTA_THREADS;
  void sync() const {
    if constexpr (num_threads > 1) barrier->arrive_and_wait();
  }
  // Two warps, so that threads outside the first one exist for the thread sanitizer.
  static constexpr int kWarpThreads = num_threads > 1 ? num_threads / 2 : 1;
  void sync_warp() const {
    if constexpr (kWarpThreads > 1) warp_barrier->arrive_and_wait();
  }
  // A thread has whole blocks and exchanges values with no other thread.
  static constexpr int kExchangeThreads = 1;
  template <int Lanes>
  uint32_t max_of_lanes(uint32_t value) const {
    static_assert(Lanes == 1);
    return value;
  }
  template <int Lanes>
  uint32_t sum_of_lanes(uint32_t sum) const {
    return sum;
  }
};

inline uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

// A host rank often shares its core with the ranks that it waits for. So it spins for about a
// microsecond, and then yields the core. A thread that waits for a cell then sleeps until the cell
// changes (kernels/host/sleep.h). A thread that waits for a unit sleeps for an eighth of the time
// that it has waited: the peers lose almost nothing, and this rank wakes up late by at most an eighth
// of the wait.
struct Backoff {
  static constexpr int kSpins = 32;
  // A yield that nobody else wants takes half a microsecond, a switch to another thread and back
  // eleven.
  static constexpr uint64_t kSwitchNs = 3000;
  static constexpr uint64_t kLookNs = 50000;
  static constexpr uint64_t kYieldNs = 500000;
  static constexpr uint64_t kLongestSleepNs = 1000000;
  int turns = 0;
  uint64_t last_ns = 0;

  // Whether a thread that waits for a cell sleeps now. It does after a yield that has let another
  // thread run: who yields again goes to the end of that core's queue again, and waits there for
  // every thread that has work, while a sleeper keeps its place. A thread that has its core for
  // itself goes on looking for a while, because to be woken takes longer than to see.
  bool may_sleep(uint64_t waited_ns) {
    const uint64_t since = waited_ns - last_ns;
    last_ns = waited_ns;
    return turns > kSpins && (since > kSwitchNs || waited_ns > kLookNs);
  }

  void pause(uint64_t waited_ns) {
    if (++turns <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    } else if (waited_ns < kYieldNs) {
      sched_yield();
    } else {
      const uint64_t eighth = waited_ns / 8;
      timespec time{0, static_cast<long>(eighth < kLongestSleepNs ? eighth : kLongestSleepNs)};
      nanosleep(&time, nullptr);
    }
  }
};

inline uint32_t unknown(uint32_t value) {
  return value;
}

inline float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

inline float hyperbolic_tangent(float value) {
  return std::tanh(value);
}

inline float reciprocal_for_fp4(float value) {
  return 1.0f / value;
}

constexpr bool kHasFp8Conversions = false;
constexpr bool kHasFp4Conversions = false;
inline uint32_t e4m3_pair_of_floats(float, float) {
  return 0;
}
inline void floats_of_e4m3_pair(uint32_t, float&, float&) {}
inline uint32_t e2m1_of_8_floats(const float*) {
  return 0;
}
inline void floats_of_8_e2m1(uint32_t, float*) {}

// A host launch is a call: the previous one has returned.
inline void pdl_wait() {}
inline void pdl_launch_dependents() {}

}  // namespace moe_nvlink

// The kernel `name` as a function: runs the grid on the threads of `grid` (kernels/host/grid.h,
// which the host's translation unit includes first) and returns when all its CTAs have finished.
#define MOE_NVLINK_KERNEL(name, Args, Shared, body)                                                \
  extern "C" void name(const moe_nvlink::Args* args, moe_nvlink::host::Grid* grid) {               \
    grid->run<moe_nvlink::Shared>([args](const moe_nvlink::Cta& cta, moe_nvlink::Shared& shared) { \
      moe_nvlink::body<Config>(*args, cta, shared);                                                \
    });                                                                                            \
  }
