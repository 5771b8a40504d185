// Kernels of gpu_constants.py, each of which times one thing on one GPU. Every entry takes one Given.
// What is timed is `asm volatile`, so that it stays where it stands. Every wait ends after kPatience
// of globaltimer and leaves kGaveUp in `out`.
using uint8_t = unsigned char;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

struct Given {
  uint64_t* out;    // a sample each repeat, if an entry does not say otherwise
  uint8_t* memory;  // the first kFlags bytes are 0
  uint32_t n;       // how often a sample does what is timed
  uint32_t repeats;
  uint32_t mode;
  uint32_t warmup;
};

constexpr uint64_t kGaveUp = ~0ULL, kPatience = 2'000'000'000;
constexpr uint32_t kFlags = 4096, kNoiseAt = 4 << 20, kNoiseBytes = 64 << 10;

#define READ(name, instruction)                           \
  __device__ uint64_t name() {                            \
    uint64_t value;                                       \
    asm volatile(instruction : "=l"(value) : : "memory"); \
    return value;                                         \
  }
READ(cycles, "mov.u64 %0, %%clock64;")
READ(now, "mov.u64 %0, %%globaltimer;")

enum Load { kWeak, kRelaxedGpu, kRelaxedSys, kAcquireGpu, kAcquireSys, kVolatile };
template <int kLoad>
__device__ uint64_t load(uint64_t at) {
  uint64_t value;
#define LOAD(kind, how)                                                          \
  if constexpr (kLoad == kind) {                                                 \
    asm volatile("ld." how ".u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory"); \
  }
  LOAD(kWeak, "global")
  LOAD(kRelaxedGpu, "relaxed.gpu.global")
  LOAD(kRelaxedSys, "relaxed.sys.global")
  LOAD(kAcquireGpu, "acquire.gpu.global")
  LOAD(kAcquireSys, "acquire.sys.global")
  LOAD(kVolatile, "volatile.global")
  return value;
}

template <bool kSys>
__device__ void fence() {
  if constexpr (kSys) asm volatile("fence.acq_rel.sys;" ::: "memory");
  if constexpr (!kSys) asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// `memory` is a ring of words that each hold the next one's address. A branch on what was loaded
// keeps the clock from being read before the last load has returned.
template <int kLoad>
__device__ void chase(const Given& g) {
  uint64_t at = reinterpret_cast<uint64_t>(g.memory);
  for (uint32_t i = 0; i < g.warmup; ++i) at = load<kLoad>(at);
#pragma unroll 1
  for (uint32_t r = 0; r < g.repeats; ++r) {
    const uint64_t begun = cycles();
#pragma unroll 1
    for (uint32_t i = 0; i < g.n; i += 16) {
#pragma unroll
      for (int j = 0; j < 16; ++j) at = load<kLoad>(at);
      if (at == 0) return;
    }
    g.out[r] = cycles() - begun;
  }
}

__device__ void store16(uint8_t* at, uint32_t value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" : : "l"(at), "r"(value) : "memory");
}

// CTA 0 times a fence after `n` stores of 16 bytes by each of its threads. The others store until
// it has ended.
template <bool kSys>
__device__ void fences(const Given& g) {
  const uint64_t stop = reinterpret_cast<uint64_t>(g.memory), started = now();
  if (blockIdx.x != 0) {
    uint8_t* mine = g.memory + kNoiseAt + (blockIdx.x - 1) * kNoiseBytes + threadIdx.x * 16;
    for (uint32_t i = 0; load<kRelaxedGpu>(stop) == 0; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) store16(mine + j * 4096, i);
      if (now() - started > kPatience) return;
    }
    return;
  }
  uint8_t* mine = g.memory + kFlags + threadIdx.x * 16;
#pragma unroll 1
  for (uint32_t r = 0; r < g.repeats; ++r) {
#pragma unroll 1
    for (uint32_t i = 0; i < g.n; ++i) store16(mine + i * blockDim.x * 16, r);
    __syncthreads();
    const uint64_t begun = cycles();
    fence<kSys>();
    const uint64_t taken = cycles() - begun;
    if (threadIdx.x == 0) g.out[r] = taken;
    fence<kSys>();  // of out
    __syncthreads();
  }
  if (threadIdx.x == 0) asm volatile("st.relaxed.gpu.u64 [%0], %1;" : : "l"(stop), "l"(1ULL));
}

template <int kLoad>
__device__ bool await(uint64_t at, uint64_t wanted, uint64_t started) {
  // Two loops: with one, ptxas reads the timer at every poll.
  do {
#pragma unroll 1
    for (uint32_t polls = 0; polls < 1024; ++polls) {
      if (load<kLoad>(at) == wanted) return true;
    }
  } while (now() - started < kPatience);
  return false;
}

// The first and the last CTA answer each other; `out`: both SMs, then round trips.
template <bool kRelease, int kPoll, bool kThenAcquire>
__device__ void ping_pong(const Given& g) {
  const bool asks = blockIdx.x == 0;
  if (!asks && blockIdx.x != gridDim.x - 1) return;
  const uint64_t base = reinterpret_cast<uint64_t>(g.memory), started = now();
  const uint64_t mine = base + (asks ? 0 : 1024), theirs = base + (asks ? 1024 : 0);
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  g.out[asks ? 0 : 1] = sm;
  const auto say = [&](uint64_t value) {
    if (kRelease) {
      asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(theirs), "l"(value) : "memory");
    } else {
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(theirs), "l"(value) : "memory");
    }
  };
#pragma unroll 1
  for (uint32_t r = 1; r <= g.repeats; ++r) {
    const uint64_t begun = cycles();
    if (asks) say(r);
    if (!await<kPoll>(mine, r, started)) {
      g.out[1 + r] = kGaveUp;
      return;
    }
    // Of a load whose value nobody takes ptxas leaves CCTL.IVALL alone.
    if (kThenAcquire && load<kAcquireSys>(mine) != r) return;
    if (!asks) say(r);
    const uint64_t taken = cycles() - begun;
    if (asks) g.out[1 + r] = taken;
    // What is timed next begins with nothing outstanding.
    if (asks) fence<true>();
  }
}

enum Atomic { kAtomGpu, kAtomSys, kRedFenceGpu, kRedFenceSys };
template <int kAtomic>
__device__ uint32_t atomic(uint8_t* at, uint32_t value) {
  uint32_t old = value;
  if constexpr (kAtomic == kAtomGpu) {
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(at), "r"(value)
                 : "memory");
  } else if constexpr (kAtomic == kAtomSys) {
    asm volatile("atom.add.relaxed.sys.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(at), "r"(value)
                 : "memory");
  } else if constexpr (kAtomic == kRedFenceGpu) {
    asm volatile("red.add.relaxed.gpu.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
    fence<false>();
  } else {
    asm volatile("red.add.relaxed.sys.global.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
    fence<true>();
  }
  return old;
}

// The word that atomics change. Where ptxas knows that all lanes name the same word, it adds up their
// values first, with shuffles; so it must not know. Needs a CTA of 256 threads at most.
__device__ uint8_t* word(const Given& g) {
  uint8_t* zeros = g.memory + kFlags / 2 + threadIdx.x * 8;
  return g.memory + load<kWeak>(reinterpret_cast<uint64_t>(zeros));
}

// One after the other: what is added depends on what the one before has returned.
template <int kAtomic>
__device__ void atomics(const Given& g) {
  uint8_t* const at = word(g);
  uint32_t value = 1;
#pragma unroll 1
  for (uint32_t r = 0; r < g.repeats; ++r) {
    const uint64_t begun = cycles();
#pragma unroll 1
    for (uint32_t i = 0; i < g.n; i += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) value = (atomic<kAtomic>(at, value) >> 30) | 1;
      if (value == 77) return;
    }
    g.out[r] = cycles() - begun;
  }
}

// A lane of every warp, on one word; `out`: begin and end of each warp by globaltimer.
template <int kAtomic>
__device__ void crowd(const Given& g) {
  if (threadIdx.x % 32 != 0) return;
  uint8_t* const at = word(g);
  uint32_t value = 1;
  const uint64_t begun = now();
#pragma unroll 1
  for (uint32_t i = 0; i < g.n; ++i) value = (atomic<kAtomic>(at, value) >> 30) | 1;
  if (value == 77) return;
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  g.out[2 * warp] = begun;
  g.out[2 * warp + 1] = now();
}

// Chains of one instruction; thread 0 says what they took.
#define OP(name, declared, step)                                   \
  extern "C" __global__ void name(Given g) {                       \
    uint32_t x = 3;                                                \
    uint64_t y = 3, z = 0;                                         \
    declared;                                                      \
    _Pragma("unroll 1") for (uint32_t r = 0; r < g.repeats; ++r) { \
      __syncthreads();                                             \
      const uint64_t begun = cycles();                             \
      _Pragma("unroll 1") for (uint32_t i = 0; i < g.n; i += 16) { \
        _Pragma("unroll") for (int j = 0; j < 16; ++j) {           \
          step;                                                    \
        }                                                          \
      }                                                            \
      const uint64_t taken = cycles() - begun;                     \
      if (threadIdx.x == 0) g.out[r] = taken;                      \
    }                                                              \
    if (x + y + z == 77) g.out[0] = z;                             \
  }
#define IN_SHARED                                             \
  __shared__ uint32_t self;                                   \
  x = static_cast<uint32_t>(__cvta_generic_to_shared(&self)); \
  self = x
OP(op_nothing, , asm volatile("" : "+r"(x)))
OP(op_mad, , asm volatile("mad.lo.u32 %0, %0, %0, %0;" : "+r"(x)))
OP(op_div32, , asm volatile("div.s32 %0, %1, %0;" : "+r"(x) : "r"(0x7fffffff)))
OP(op_div64, , asm volatile("div.u64 %0, %1, %0;" : "+l"(y) : "l"(~0ULL >> 1)))
OP(op_shared, IN_SHARED, asm volatile("ld.shared.u32 %0, [%0];" : "+r"(x)))
OP(op_shfl, x = threadIdx.x ^ g.mode,
   asm volatile("shfl.sync.idx.b32 %0, %0, %0, 31, -1;" : "+r"(x)))
OP(op_redux, , asm volatile("redux.sync.min.u32 %0, %0, -1;" : "+r"(x)))
OP(op_warp_barrier, , asm volatile("bar.warp.sync -1;" :: : "memory"))
OP(op_fence_gpu, , fence<false>())
OP(op_fence_sys, , fence<true>())
OP(op_barrier, , asm volatile("bar.sync 0;" :: : "memory"))
OP(op_clock, , z ^= cycles())
OP(op_globaltimer, , z ^= now())

#define ENTRY(name, body)                    \
  extern "C" __global__ void name(Given g) { \
    body(g);                                 \
  }
ENTRY(chase_weak, chase<kWeak>)
ENTRY(chase_relaxed_gpu, chase<kRelaxedGpu>)
ENTRY(chase_relaxed_sys, chase<kRelaxedSys>)
ENTRY(chase_acquire_gpu, chase<kAcquireGpu>)
ENTRY(chase_acquire_sys, chase<kAcquireSys>)
ENTRY(chase_volatile, chase<kVolatile>)
ENTRY(fence_gpu, fences<false>)
ENTRY(fence_sys, fences<true>)
#define PING(...) ping_pong<__VA_ARGS__>
ENTRY(ping_release_relaxed, PING(true, kRelaxedSys, false))
ENTRY(ping_release_acquire, PING(true, kAcquireSys, false))
ENTRY(ping_release_relaxed_acquire, PING(true, kRelaxedSys, true))
ENTRY(ping_relaxed_relaxed, PING(false, kRelaxedSys, false))
ENTRY(atom_gpu, atomics<kAtomGpu>)
ENTRY(atom_sys, atomics<kAtomSys>)
ENTRY(red_fence_gpu, atomics<kRedFenceGpu>)
ENTRY(red_fence_sys, atomics<kRedFenceSys>)
ENTRY(crowd_gpu, crowd<kAtomGpu>)
ENTRY(crowd_sys, crowd<kAtomSys>)

// `out`: how much globaltimer moved whenever it did; n: reads at most.
extern "C" __global__ void tick(Given g) {
  uint64_t last = now();
  for (uint32_t i = 0, found = 0; i < g.n && found < g.repeats; ++i) {
    const uint64_t next = now();
    if (next == last) continue;
    g.out[found++] = next - last;
    last = next;
  }
}

// `out`: cycles and nanoseconds of each repeat; n: nanoseconds at least.
extern "C" __global__ void speed(Given g) {
  for (uint32_t r = 0; r < g.repeats; ++r) {
    const uint64_t begun_ns = now(), begun = cycles();
    uint64_t ended_ns = begun_ns;
    while (ended_ns - begun_ns < g.n) ended_ns = now();
    g.out[2 * r] = cycles() - begun;
    g.out[2 * r + 1] = ended_ns - begun_ns;
  }
}

// `out`: of each CTA: when it began, when what it depends on had ended, when it ended. n: nanoseconds
// that it stays. mode 1: lets the next kernel start, and waits for the one before.
extern "C" __global__ void __launch_bounds__(256) stamp(Given g) {
  const uint64_t begun = now();
  if (g.mode != 0) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  const uint64_t free = now();
  while (now() - free < g.n) {
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  g.out[3 * blockIdx.x] = begun;
  g.out[3 * blockIdx.x + 1] = free;
  g.out[3 * blockIdx.x + 2] = now();
}

// `out`: cycles of the first and of the second pass through kStraight instructions of 16 bytes.
template <uint32_t kSalt>
__device__ void straight(const Given& g) {
  uint32_t x[4] = {g.n, g.repeats, g.warmup, 7};
#pragma unroll 1
  for (uint32_t r = 0; r < 2; ++r) {
    const uint64_t begun = cycles();
#pragma unroll
    for (uint32_t i = 0; i < kStraight; ++i) {
      asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x[i % 4]) : "r"(g.n), "r"(i * 8 + kSalt));
    }
    g.out[r] = cycles() - begun;
  }
  if ((x[0] ^ x[1] ^ x[2] ^ x[3]) == 77) g.out[0] = 0;
}
ENTRY(straight_a, straight<1>)
ENTRY(straight_b, straight<3>)
ENTRY(straight_c, straight<5>)
