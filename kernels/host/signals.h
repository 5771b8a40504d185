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

// Whether a handler has raised during a launch. All threads of its grid see it: each waits for itself.
using GivenUp = std::atomic<bool>;
inline thread_local GivenUp* given_up = nullptr;  // of the launch that this thread runs

// A handler of Python's runs between two instructions of the interpreter, in the process's main thread.
// So that thread, if it has launched, asks so often; the others only look whether it has given up.
constexpr uint64_t kSignalsNs = 50000000;

inline bool is_main_thread() {
  return syscall(SYS_gettid) == getpid();
}

// Runs handlers, if this thread is the one.
inline void serve() {
  const auto call = serve_signals.load(std::memory_order_relaxed);
  if (given_up == nullptr || call == nullptr || !is_main_thread()) return;
  if (call() != 0) given_up->store(true, std::memory_order_relaxed);
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
