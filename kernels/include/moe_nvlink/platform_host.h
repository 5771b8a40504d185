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
#include "../../host/signals.h"
#include "../../host/sleep.h"

#define HD inline
#define MOE_NVLINK_DEVICE_ONLY(...)
#define MOE_NVLINK_HOST_ONLY(...) __VA_ARGS__
#define MOE_NVLINK_UNROLL
#define MOE_NVLINK_ROLLED _Pragma("GCC unroll 1")
// For a few instructions on registers: if g++ calls them instead, the registers travel through memory.
#define MOE_NVLINK_INLINE [[gnu::always_inline]]

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
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MOE_NVLINK_WIDE_REGISTERS 1
constexpr int kRegisterFloats = 16;
#else
#define MOE_NVLINK_WIDE_REGISTERS 0
constexpr int kRegisterFloats = 8;
#endif
typedef float FloatRegister __attribute__((vector_size(4 * kRegisterFloats)));
typedef uint32_t BitRegister __attribute__((vector_size(4 * kRegisterFloats)));

// kRegisterFloats bytes of memory, each in the low bits of an element.
inline BitRegister load_bytes(const char* source) {
#if MOE_NVLINK_WIDE_REGISTERS
  return reinterpret_cast<BitRegister>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#elif defined(__AVX2__)
  return reinterpret_cast<BitRegister>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
  BitRegister words;
  for (int i = 0; i < kRegisterFloats; ++i) words[i] = static_cast<unsigned char>(source[i]);
  return words;
#endif
}

// The bits of `a` where those of the mask are set, else those of `b`.
inline BitRegister merged(uint32_t mask, BitRegister a, BitRegister b) {
#if MOE_NVLINK_WIDE_REGISTERS
  constexpr int kByMask = 0xca;  // of three operands the first chooses
  const BitRegister masks = BitRegister{} + mask;
  return reinterpret_cast<BitRegister>(
      _mm512_ternarylogic_epi32(reinterpret_cast<__m512i>(masks), reinterpret_cast<__m512i>(a),
                                reinterpret_cast<__m512i>(b), kByMask));
#else
  return (a & mask) | (b & ~mask);
#endif
}

// The low byte of each element, for which g++ 12 takes the elements one by one.
inline void store_low_bytes(char* target, BitRegister bits) {
  typedef uint8_t Bytes __attribute__((vector_size(4 * kRegisterFloats)));
  Bytes places{};
  for (int i = 0; i < kRegisterFloats; ++i) places[i] = static_cast<uint8_t>(4 * i);
  const Bytes bytes = __builtin_shuffle(reinterpret_cast<Bytes>(bits), places);
  std::memcpy(target, &bytes, kRegisterFloats);
}

inline bool all_below(uint32_t limit, BitRegister bits) {
#if MOE_NVLINK_WIDE_REGISTERS
  return _mm512_cmplt_epu32_mask(reinterpret_cast<__m512i>(bits), _mm512_set1_epi32(limit)) ==
         0xffff;
#else
  uint32_t most = 0;
  for (int i = 0; i < kRegisterFloats; ++i) most = bits[i] > most ? bits[i] : most;
  return most < limit;
#endif
}

// The numbers whose e2m1 codes are the lowest four bits, whatever the other bits are.
#if defined(__AVX2__)
constexpr bool kHasShuffles = true;
inline FloatRegister shuffled_e2m1(BitRegister codes) {
  constexpr float kNumbers[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  FloatRegister numbers;
  std::memcpy(&numbers, kNumbers, sizeof(numbers));
  // By as many bits as number the elements of a register.
  const FloatRegister found = __builtin_shuffle(numbers, codes);
  if constexpr (kRegisterFloats == 16) return found;
  const BitRegister signs = codes << 28 & 0x80000000u;
  return reinterpret_cast<FloatRegister>(reinterpret_cast<BitRegister>(found) | signs);
}
#else
constexpr bool kHasShuffles = false;
inline FloatRegister shuffled_e2m1(BitRegister) {
  return FloatRegister{};
}
#endif

// The numbers / 256 of kRegisterFloats pairs of e4m3 codes: those at even places, those at odd ones.
// A code's bits at the place of fp16's exponent are that fp16 number, also if it is subnormal. Its
// conversion costs no more for that, while a product with a subnormal number of fp32 costs many
// processors a hundred cycles.
#if defined(__F16C__)
constexpr bool kHasHalfConversions = true;
inline void halves_of_e4m3(const char* codes, FloatRegister& even, FloatRegister& odd) {
  typedef int16_t Halves __attribute__((vector_size(2 * kRegisterFloats)));
  const auto to_floats = [](Halves upper_bytes) {
    const Halves numbers = (upper_bytes >> 1) & static_cast<int16_t>(0xbf80);
    // 0x7f, which is NaN, becomes one with the sign of the code.
    const Halves bits = numbers | (((numbers & 0x3f80) == 0x3f80) & 0x7f80);
#if MOE_NVLINK_WIDE_REGISTERS
    return reinterpret_cast<FloatRegister>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(bits)));
#else
    return reinterpret_cast<FloatRegister>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(bits)));
#endif
  };
  Halves pairs;
  std::memcpy(&pairs, codes, sizeof(pairs));
  even = to_floats(pairs << 8);
  odd = to_floats(pairs);
}
#else
constexpr bool kHasHalfConversions = false;
inline void halves_of_e4m3(const char*, FloatRegister&, FloatRegister&) {}
#endif

// Long rows are streamed: stored past the caches. To store a line as usual, a core first takes it
// from memory or from the core that read it last; ranks on cores that share no cache pay most for
// that. Where a launch has at most kStreamedBytes to store, the readers find them in a cache. The
// thread sanitizer does not see streamed stores, so its build has none.
constexpr uint64_t kStreamedBytes = 1 << 20;
#if defined(__AVX__) && !defined(__SANITIZE_THREAD__)
constexpr bool kStreams = true;
inline void stream_register(char* target, BitRegister bits) {
#if MOE_NVLINK_WIDE_REGISTERS
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), reinterpret_cast<__m512i>(bits));
#else
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), reinterpret_cast<__m256i>(bits));
#endif
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
// microsecond, and then yields the core. A thread that wait_for_peer() lets wait for a cell then sleeps
// until the cell changes (kernels/host/sleep.h), if yields do not help. Any other thread sleeps for an
// eighth of the time that it has waited: the peers lose almost nothing, and this rank wakes up late by
// at most an eighth of the wait. benchmarks/NOTES.md has what the times below were compared with.
struct Backoff {
  static constexpr int kSpins = 32;
  // Longer than a rank that waits as well keeps the core between two of its waits in a small batch.
  static constexpr uint64_t kSwitchNs = 200000;
  static constexpr uint64_t kYieldNs = 500000;
  static constexpr uint64_t kLongestSleepNs = 1000000;
  int turns = 0;
  uint64_t last_ns = 0;

  // Whether a thread that waits for a cell sleeps now. It does after a yield that another thread has
  // used to compute for long: who yields again goes to the end of that core's queue again, and waits
  // there for every thread that has work, while a sleeper keeps its place. Ranks that only wait hand
  // the core around sooner than that. Between them a yield costs less than a sleep and a wake, and a
  // rank that looks sees its peer sooner than a rank that is woken, most of all on a core that was idle.
  bool may_sleep(uint64_t waited_ns) {
    const uint64_t since = waited_ns - last_ns;
    last_ns = waited_ns;
    return turns > kSpins && (since > kSwitchNs || waited_ns > kYieldNs);
  }

  void pause(uint64_t waited_ns) {
    if (++turns <= kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("isb");  // takes about as long; `yield` takes no time on most processors
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
inline FloatRegister reciprocal_for_fp4(FloatRegister values) {
  return 1.0f / values;
}

constexpr bool kHasFp8Conversions = false;
constexpr bool kHasFp4Conversions = false;
constexpr bool kHasAsyncRelease = false;
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
