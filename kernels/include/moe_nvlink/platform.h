// The one place that knows CUDA from the host. It defines the same names twice, once per executor;
// everything else in kernels/ is plain text for both and, where an instruction must be spelled
// differently, uses MOE_NVLINK_DEVICE_ONLY(...) / MOE_NVLINK_HOST_ONLY(...).
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)  // ------------------------------------ GPU

#define HD __device__ __forceinline__
#define MOE_NVLINK_DEVICE_ONLY(...) __VA_ARGS__
#define MOE_NVLINK_HOST_ONLY(...)
#define MOE_NVLINK_UNROLL _Pragma("unroll")
// For loops with few turns, outside the rows: code that is not there need not be fetched, and a
// launch with one token a CTA fetches all of its code cold.
#define MOE_NVLINK_ROLLED _Pragma("unroll 1")

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
// Loads a thread has in flight while it copies a long row. More would cost dispatch the 64 registers
// with which 1024 threads, one per vector of a common row, can be launched.
constexpr int kVectorsInFlight = 2;
// Combine adds -0.0 for an absent row: a branch would keep its loads from flying together.
constexpr bool kSkipAbsentRows = false;

// One cooperative thread array: who I am in it, and its barrier.
struct Cta {
  int block;
  int num_blocks;
  int thread;
  int num_threads;
  // Every access of this CTA's threads before it happens before every access after it.
  HD void sync() const { __syncthreads(); }
  // The same among the threads of a warp, of which the first kWarpThreads of a CTA are one.
  static constexpr int kWarpThreads = 32;
  HD void sync_warp() const { __syncwarp(); }
};

HD Cta this_cta() {
  return Cta{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
             static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
}

// Nanoseconds of a clock that only goes forward.
HD uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// What a poll does between two looks: nothing, a GPU thread shares its core with nobody it waits for.
struct Backoff {
  HD void pause(uint64_t /*waited_ns*/) {}
};

// Programmatic dependent launch. After wait() everything the previous kernel of the stream wrote is
// visible; launch_dependents() lets the next kernel start the part before its own wait().
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

#else  // ---------------------------------------------------------------------------------- host

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "../../host/barrier.h"

#define HD inline
#define MOE_NVLINK_DEVICE_ONLY(...)
#define MOE_NVLINK_HOST_ONLY(...) __VA_ARGS__
#define MOE_NVLINK_UNROLL
#define MOE_NVLINK_ROLLED

// Threads of a host CTA: 1 in the product, 4 in the build that the thread sanitizer runs.
#ifndef MOE_NVLINK_CTA_THREADS
#define MOE_NVLINK_CTA_THREADS 1
#endif

namespace moe_nvlink {

// A run long enough that the compiler keeps several vector registers busy. Rows are moved with
// memcpy, so nothing needs to be aligned.
constexpr int kVectorBytes = 128;
constexpr bool kAlignedVectorsOnly = false;
// The processor looks ahead by itself.
constexpr int kVectorsInFlight = 1;
// The arithmetic is what combine's time goes into here, so absent rows take no part in it.
constexpr bool kSkipAbsentRows = true;

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
};

inline uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

// A host rank often shares its core with the very ranks it waits for. So it spins for about a
// microsecond, then gives the core away with sched_yield, and in a long wait (a peer computes)
// sleeps for an eighth of the time waited so far: that costs the peers next to nothing, and this
// rank comes late by an eighth at the worst.
struct Backoff {
  static constexpr int kSpins = 32;
  static constexpr uint64_t kYieldNs = 500000;
  static constexpr uint64_t kLongestSleepNs = 1000000;
  int turns = 0;

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

// A host launch is a call: the previous one has returned.
inline void pdl_wait() {}
inline void pdl_launch_dependents() {}

}  // namespace moe_nvlink

// The kernel `name` as a function: runs the grid on the threads of `grid` (kernels/host/grid.h, which
// the host's translation unit includes first) and returns when all its CTAs have finished.
#define MOE_NVLINK_KERNEL(name, Args, Shared, body)                                                \
  extern "C" void name(const moe_nvlink::Args* args, moe_nvlink::host::Grid* grid) {               \
    grid->run<moe_nvlink::Shared>([args](const moe_nvlink::Cta& cta, moe_nvlink::Shared& shared) { \
      moe_nvlink::body<Config>(*args, cta, shared);                                                \
    });                                                                                            \
  }

#endif
