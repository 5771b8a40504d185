// The barrier of a CTA on CPU threads, for builds whose CTAs have several threads (tests).
#pragma once

#include <sched.h>

#include <atomic>

namespace moe_nvlink::host {

// Not std::barrier: it waits through a table that the whole process shares. The atomics of that
// table order threads that the protocol does not order, also threads of different ranks. The thread
// sanitizer would then overlook an order that the protocol lacks.
class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads) {}

  void arrive_and_wait() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    while (phase_.load(std::memory_order_acquire) == phase) sched_yield();
  }

 private:
  const int num_threads_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> phase_{0};
};

}  // namespace moe_nvlink::host
