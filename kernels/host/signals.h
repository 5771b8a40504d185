// How a wait of a CPU rank ends early if a signal handler of Python's raises, as Ctrl-C does.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace moe_nvlink::host {

// A call of Python's: runs the handlers of the signals that have come, and returns whether one of them
// has raised. nullptr: nobody asks.
inline std::atomic<int (*)()> serve_signals{nullptr};
// The same for threads that run no handlers: whether Python has given up this thread's launch.
inline std::atomic<int (*)()> is_given_up{nullptr};

// Whether a handler has raised during a launch. All threads of its grid see it: each waits for itself.
using GivenUp = std::atomic<bool>;
inline thread_local GivenUp* given_up = nullptr;  // of the launch that this thread takes part in
inline thread_local bool has_launched = false;    // this thread is its caller

// How often a thread that has launched asks. Threads of the grid only look whether it has given up.
constexpr uint64_t kSignalsNs = 50000000;

inline bool is_main_thread() {
  return syscall(SYS_gettid) == getpid();
}

// Asks Python. A handler may launch too, so whose launch this is stands before the call.
inline void serve() {
  GivenUp* const mine = given_up;
  if (mine == nullptr || !has_launched) return;
  const auto call =
      (is_main_thread() ? serve_signals : is_given_up).load(std::memory_order_relaxed);
  if (call != nullptr && call() != 0) mine->store(true, std::memory_order_relaxed);
}

// For a thread that has waited so long: whether the launch is given up. next_ns: when the thread asks
// again; a wait begins with 0.
inline bool gives_up(uint64_t waited_ns, uint64_t* next_ns) {
  if (*next_ns == 0) *next_ns = kSignalsNs;
  if (waited_ns >= *next_ns) {
    *next_ns = waited_ns + kSignalsNs;
    serve();
  }
  return given_up != nullptr && given_up->load(std::memory_order_relaxed);
}

}  // namespace moe_nvlink::host
