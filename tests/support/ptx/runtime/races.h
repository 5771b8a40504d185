// Races: nothing yet.
#pragma once

#include "hooks.h"

namespace ptx {

struct Thread;
struct Launch;
struct Machine;

struct ThreadRaces {};
struct CtaRaces {};
struct LaunchRaces {};
struct AllocationRaces {};
struct RankRaces {};
struct MachineRaces {};

namespace races {
inline void on_access(Thread&, const Access&) {}
inline void on_fence(Thread&, const Site&) {}
inline void on_barrier(Thread* const*, int) {}
inline void on_thread_start(Thread&) {}
inline void on_thread_end(Thread&) {}
inline void on_launch_end(Launch&) {}
inline void on_grid_wait(Thread&) {}
inline void on_host(Machine&, int, uint64_t, uint64_t, bool) {}
}  // namespace races

}  // namespace ptx
