// How a thread of a CPU rank sleeps until a cell changes, and how who changes it wakes the thread.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdint>

namespace moe_nvlink::host {

// The sleep is a hint beside the protocol and no part of it. A thread that has slept looks at the cell
// again, as after every pause, and acquires it as if it had not slept. A sleep is bounded, so even if
// a wake got lost, the thread would only be late. The thread sanitizer's build does not sleep, because
// the order of these words would hide an order that the protocol lacks.
//
// No wake gets lost. Sleeper: S1 add 1 to sleepers; S2 the kernel compares the cell with what the
// sleeper has seen, under a lock of the cell's address, and queues the thread. Signaller: W1 store
// the cell; W2 load sleepers; if that is not 0, W3 take the lock and wake who is queued. S1, the
// kernel's barrier before S2, and the fence between W1 and W2 leave two cases. Either W2 sees S1: then
// W3 comes before S2 takes the lock, and S2 finds the new cell, or after it, and finds the thread. Or
// W2 does not see S1: then S2 sees W1 and does not sleep.
#if defined(__SANITIZE_THREAD__)
constexpr bool kSleeps = false;
#else
constexpr bool kSleeps = true;
#endif
constexpr long kLongestCellSleepNs = 10000000;

// cell: a word that another thread or process will change in its low half, the epoch. seen: what
// the last look found. sleepers: a word of this rank, which all signallers of the cell look at.
// Returns false if the system lets no thread sleep so (a filter of system calls, for one).
inline bool sleep_until_changed(const uint64_t* cell, uint64_t seen, uint64_t* sleepers) {
  static_assert(std::endian::native == std::endian::little, "the epoch is the cell's first half");
  const timespec longest{0, kLongestCellSleepNs};
  std::atomic_ref<uint64_t> count(*sleepers);
  count.fetch_add(1, std::memory_order_seq_cst);
  // Not FUTEX_PRIVATE_FLAG: ranks are processes that share the memory.
  const long result =
      syscall(SYS_futex, cell, FUTEX_WAIT, static_cast<uint32_t>(seen), &longest, nullptr, 0);
  const bool may_sleep = result == 0 || errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT;
  count.fetch_sub(1, std::memory_order_relaxed);
  return may_sleep;
}

// After the cell has been stored. Where nobody sleeps it costs a fence and a load of a line that
// nobody writes meanwhile.
inline void wake_sleepers(const uint64_t* cell, uint64_t* sleepers) {
  if constexpr (!kSleeps) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (std::atomic_ref<uint64_t>(*sleepers).load(std::memory_order_relaxed) == 0) return;
  constexpr int kEveryone = 0x7fffffff;
  syscall(SYS_futex, cell, FUTEX_WAKE, kEveryone, nullptr, nullptr, 0);
}

// For threads of one process: sleeps until the word is not `seen`, or the time is over, or for no
// reason. std::atomic has no such wait with a limit.
inline void sleep_while_equal(const std::atomic<int>* word, int seen, uint64_t longest_ns) {
  const timespec longest{0, static_cast<long>(longest_ns)};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, &longest, nullptr, 0);
}
inline void wake_one(const std::atomic<int>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace moe_nvlink::host
