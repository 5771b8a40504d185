// Every ordered access of the project, named by operation, order and scope. "sys" reaches the other
// ranks (other GPUs, other processes), "gpu" the CTAs of this rank, "cta" the threads of one CTA.
// Release and acquire are properties of the operation itself, never of a fence beside a relaxed
// access: that form is the easiest to reason about in the PTX model, and the only one that the
// thread sanitizer understands. On the device each access is one PTX instruction with a memory
// clobber, so the compiler moves nothing across it. On the host each is the std::atomic_ref
// operation of the same order, but for the long word, which says its own.
#pragma once

#include "platform.h"

namespace moe_nvlink {

// Loads without order, for polling: an acquire in the loop would empty L1 in every iteration. Also
// for units (P10).
HD uint64_t load_relaxed_sys(const uint64_t* address) {
  MOE_NVLINK_DEVICE_ONLY(uint64_t value; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(
      value) : "l"(__cvta_generic_to_global(address)) : "memory");
                         return value;)
  MOE_NVLINK_HOST_ONLY(return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(address))
                           .load(std::memory_order_relaxed);)
}

// After this load, what the writer did before its release of this word is visible.
HD uint64_t load_acquire_sys(const uint64_t* address) {
  MOE_NVLINK_DEVICE_ONLY(uint64_t value; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(
      value) : "l"(__cvta_generic_to_global(address)) : "memory");
                         return value;)
  MOE_NVLINK_HOST_ONLY(return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(address))
                           .load(std::memory_order_acquire);)
}

// A thread that acquires this word sees what was done before this store.
HD void store_release_sys(uint64_t* address, uint64_t value) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(__cvta_generic_to_global(address)),
                   "l"(value) : "memory");)
  MOE_NVLINK_HOST_ONLY(std::atomic_ref<uint64_t>(*address).store(value, std::memory_order_release);)
}

// The same, but the thread goes on before what it has done has arrived: what comes after may overtake
// the word, as it may overtake that of any release. GPUs other than sm_100 and sm_103 have no such
// store, nor has the host: they take the one above.
HD void store_async_release_sys(uint64_t* address, uint64_t value) {
  if constexpr (kHasAsyncRelease) {
    MOE_NVLINK_DEVICE_ONLY(asm volatile("st.async.release.sys.global.b64 [%0], %1;" : : "l"(
                                            __cvta_generic_to_global(address)),
                                        "l"(value) : "memory");)
  } else {
    store_release_sys(address, value);
  }
}

// Stores a whole word without order: a fault word for the host, or a cell that a peer polls for its
// count.
HD void store_relaxed_sys(uint64_t* address, uint64_t value) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(__cvta_generic_to_global(address)),
                   "l"(value) : "memory");)
  MOE_NVLINK_HOST_ONLY(std::atomic_ref<uint64_t>(*address).store(value, std::memory_order_relaxed);)
}

// Two words side by side, of 16 aligned bytes. Each word arrives as a whole; the two may arrive in
// any order.
HD void store_words_relaxed_sys(uint64_t* address, uint64_t first, uint64_t second) {
  MOE_NVLINK_DEVICE_ONLY(asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" : : "l"(
                                          __cvta_generic_to_global(address)),
                                      "l"(first), "l"(second) : "memory");)
  MOE_NVLINK_HOST_ONLY(store_relaxed_sys(address, first); store_relaxed_sys(address + 1, second);)
}

HD void load_words_relaxed_sys(const uint64_t* address, uint64_t& first, uint64_t& second) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first),
                   "=l"(second) : "l"(__cvta_generic_to_global(address)) : "memory");)
  MOE_NVLINK_HOST_ONLY(first = load_relaxed_sys(address); second = load_relaxed_sys(address + 1);)
}

// One word of 16 aligned bytes, of which `second` is the upper half. P10 says what is known of its
// arriving as a whole. The host has no such word: there `second` is stored last, and loaded first, and
// who finds it finds `first` too.
HD void store_long_word_relaxed_sys(uint64_t* address, uint64_t first, uint64_t second) {
  MOE_NVLINK_DEVICE_ONLY(asm volatile("{\n\t.reg .b128 word;\n\tmov.b128 word, {%1, %2};\n\t"
                                      "st.relaxed.sys.global.b128 [%0], word;\n\t}" : : "l"(
                                          __cvta_generic_to_global(address)),
                                      "l"(first), "l"(second) : "memory");)
  MOE_NVLINK_HOST_ONLY(store_relaxed_sys(address, first); store_release_sys(address + 1, second);)
}

HD void load_long_word_relaxed_sys(const uint64_t* address, uint64_t& first, uint64_t& second) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("{\n\t.reg .b128 word;\n\tld.relaxed.sys.global.b128 word, [%2];\n\t"
                   "mov.b128 {%0, %1}, word;\n\t}" : "=l"(first),
                   "=l"(second) : "l"(__cvta_generic_to_global(address)) : "memory");)
  MOE_NVLINK_HOST_ONLY(second = load_acquire_sys(address + 1); first = load_relaxed_sys(address);)
}

// Adds without order, to hand out numbers.
HD uint32_t fetch_add_relaxed_gpu(uint32_t* address, uint32_t value) {
  MOE_NVLINK_DEVICE_ONLY(uint32_t before;
                         asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(
                                          before) : "l"(__cvta_generic_to_global(address)),
                                      "r"(value) : "memory");
                         return before;)
  MOE_NVLINK_HOST_ONLY(
      return std::atomic_ref<uint32_t>(*address).fetch_add(value, std::memory_order_relaxed);)
}

// Adds; releases what this CTA did, and acquires what the CTAs did that added before it.
HD uint32_t fetch_add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  MOE_NVLINK_DEVICE_ONLY(uint32_t before;
                         asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(
                                          before) : "l"(__cvta_generic_to_global(address)),
                                      "r"(value) : "memory");
                         return before;)
  MOE_NVLINK_HOST_ONLY(
      return std::atomic_ref<uint32_t>(*address).fetch_add(value, std::memory_order_acq_rel);)
}

// Reads a counter that other CTAs of this rank add to; the caller is ordered by another word.
HD uint32_t load_relaxed_gpu(const uint32_t* address) {
  MOE_NVLINK_DEVICE_ONLY(uint32_t value; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(
      value) : "l"(__cvta_generic_to_global(address)) : "memory");
                         return value;)
  MOE_NVLINK_HOST_ONLY(return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(address))
                           .load(std::memory_order_relaxed);)
}

HD void store_relaxed_gpu(uint32_t* address, uint32_t value) {
  MOE_NVLINK_DEVICE_ONLY(
      asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(__cvta_generic_to_global(address)),
                   "r"(value) : "memory");)
  MOE_NVLINK_HOST_ONLY(std::atomic_ref<uint32_t>(*address).store(value, std::memory_order_relaxed);)
}

// A word in the CTA's shared memory that several threads may write; readers wait for the barrier.
HD void store_relaxed_cta(uint32_t* address, uint32_t value) {
  MOE_NVLINK_DEVICE_ONLY(asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" : : "r"(
                                          static_cast<uint32_t>(__cvta_generic_to_shared(address))),
                                      "r"(value) : "memory");)
  MOE_NVLINK_HOST_ONLY(std::atomic_ref<uint32_t>(*address).store(value, std::memory_order_relaxed);)
}

// Adds to such a word.
HD void add_relaxed_cta(uint32_t* address, uint32_t value) {
  MOE_NVLINK_DEVICE_ONLY(asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" : : "r"(
                                          static_cast<uint32_t>(__cvta_generic_to_shared(address))),
                                      "r"(value) : "memory");)
  MOE_NVLINK_HOST_ONLY(
      std::atomic_ref<uint32_t>(*address).fetch_add(value, std::memory_order_relaxed);)
}

}  // namespace moe_nvlink
