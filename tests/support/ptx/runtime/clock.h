// Virtual time: nothing yet.
#pragma once

#include <vector>

#include "hooks.h"

namespace ptx {

struct Thread;
struct Launch;
struct Machine;

// What an instruction costs by; `kMemory`, `kMeeting` and `kFence` are told again by their hooks.
enum class Class : uint8_t { kAlu, kSlow, kMemory, kMeeting, kFence, kBranch };

struct ThreadClock {};
struct CtaClock {};
struct LaunchClock {};
struct AllocationClock {};
struct RankClock {};
struct MachineClock {};

namespace clocks {
// Registers by number; those defined are ready when the instruction has ended.
inline void on_instruction(Thread&, Class, const uint16_t*, int, const uint16_t*, int) {}
inline void on_access(Thread&, const Access&) {}
inline void on_fence(Thread&, const Site&) {}
inline void on_barrier(Thread* const*, int) {}
inline void on_warp(Thread* const*, int, const Site&) {}
inline void on_thread_start(Thread&) {}
inline void on_thread_end(Thread&) {}
inline void on_launch_start(Launch&) {}
inline void on_launch_end(Launch&) {}
inline void on_grid_launch(Thread&) {}
inline void on_grid_wait(Thread&) {}
inline uint64_t timer_ns(const Thread&, uint64_t machine_ns) { return machine_ns; }
// Takes the next thread out of `ready`.
Thread* pick(Machine& machine, std::vector<Thread*>& ready);
}  // namespace clocks

}  // namespace ptx
