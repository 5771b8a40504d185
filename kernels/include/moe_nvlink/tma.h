// Copies by the tensor memory accelerator (TMA): one thread starts a copy of many bytes to shared
// memory, no register holds them, and a barrier in shared memory counts the bytes that have landed.
// Builds for GPUs alone have them (Config::kTma); the host only reads the text.
#pragma once

#include "copy.h"
#include "platform.h"

namespace moe_nvlink {

// A barrier in a CTA's shared memory (mbarrier). A phase ends when so many threads have arrived, and
// all bytes that they expect have landed.
using CopyBarrier = uint64_t;

MOE_NVLINK_DEVICE_ONLY(HD uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
})

// One thread, before fence_copies_shared() and then the CTA's barrier.
HD void init_copies([[maybe_unused]] CopyBarrier* barrier, [[maybe_unused]] uint32_t num_threads) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(barrier)),
                   "r"(num_threads) : "memory");)
}

// This thread arrives at a phase in which so many more bytes land. Releases what it has done to the
// threads that find the phase's end.
HD void expect_copies([[maybe_unused]] CopyBarrier* barrier, [[maybe_unused]] uint32_t bytes) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile(
          "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(barrier)),
          "r"(bytes) : "memory");)
}

// Starts a copy from global to shared memory. Both addresses and `bytes` are multiples of 16.
HD void start_copy([[maybe_unused]] char* target, [[maybe_unused]] const char* source,
                   [[maybe_unused]] uint32_t bytes, [[maybe_unused]] CopyBarrier* barrier) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                   "[%0], [%1], %2, [%3];" : : "r"(shared_address(target)),
                   "l"(__cvta_generic_to_global(source)), "r"(bytes),
                   "r"(shared_address(barrier)) : "memory");)
}

// Whether the phase of this parity has ended. If so, acquires what those that arrived have released,
// and the bytes that have landed.
HD bool have_landed([[maybe_unused]] CopyBarrier* barrier, [[maybe_unused]] uint32_t parity) {
  uint32_t ended = 1;
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("{\n\t.reg .pred ended;\n\t"
                   "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
                   "selp.u32 %0, 1, 0, ended;\n\t}" : "=r"(ended) : "r"(shared_address(barrier)),
                   "r"(parity) : "memory");)
  return ended != 0;
}

// A copy is of another proxy than loads and stores. Copies that this thread starts after the fence
// come after the accesses of such memory before it, its own and those that it has learnt of.
HD void fence_copies_shared() {
  MOE_NVLINK_DEVICE_ONLY(asm volatile("fence.proxy.async.shared::cta;" :: : "memory");)
}
HD void fence_copies_global() {
  MOE_NVLINK_DEVICE_ONLY(asm volatile("fence.proxy.async.global;" :: : "memory");)
}

// The shared memory that a launch has asked for.
struct LaunchedShared {
  char* first;
  uint32_t bytes;
};

HD LaunchedShared launched_shared() {
  LaunchedShared found{nullptr, 0};
  MOE_NVLINK_DEVICE_ONLY(extern __shared__ __align__(128) char launched[]; found.first = launched;
                         asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(found.bytes));)
  return found;
}

HD void load_shared([[maybe_unused]] Vector<16>& vector, [[maybe_unused]] const char* source) {
  MOE_NVLINK_DEVICE_ONLY(uint32_t* words = reinterpret_cast<uint32_t*>(&vector);
                         asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]),
                                      "=r"(words[1]), "=r"(words[2]),
                                      "=r"(words[3]) : "r"(shared_address(source)) : "memory");)
}

}  // namespace moe_nvlink
