// Virtual time: when each thread would be where, by a table of costs (tests/support/ptx/costs.py).
//
// A discrete-event simulation. Every thread has a time of its own, and the scheduler runs the
// thread whose time is lowest. Loads and atomics take effect at once, but the registers that they
// fill are ready later: a thread waits where it needs one (a branch, an address, what it stores).
// Stores fly; a release waits until all that it covers is acknowledged. A word that an ordered
// store or an atomic writes is visible when it arrives. Meetings join times.
//
// Each wait leaves a Step with the step before it, so what took the time can be read backwards
// (tests/support/ptx/critical_path.py). All that comes out is modelled, never measured.
//
// What it simplifies: data of this rank are in its L2; lanes of a warp cost one instruction, and
// those that diverge run side by side; registers are never short; ptxas moves no load across a
// branch or a store.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "hooks.h"

namespace ptx {

struct Thread;
struct Launch;
struct Machine;
struct CopyBarrier;

// What an instruction costs by; `kMemory`, `kMeeting` and `kFence` are told again by their hooks.
enum class Class : uint8_t { kAlu, kSlow, kMemory, kMeeting, kFence, kBranch };

namespace clocks {

// The names of the table's rows; what each means stands there. Times in ns, sizes in bytes.
// clang-format off
#define PTX_COSTS(X) \
  X(num_sms) X(threads_per_sm) X(issue_ns) X(crowded_issue_ns) X(slow_instructions) \
  X(shared_ns) X(l1_ns) X(l2_ns) X(remote_ns) X(fence_gpu_ns) X(fence_sys_ns) \
  X(gpu_fence_waits_remote) X(acquire_ns) X(atomic_ns) X(atomic_gap_ns) X(barrier_ns) \
  X(warp_barrier_ns) X(shuffle_ns) X(launch_ns) X(pdl_ns) X(link_bytes_per_ns) \
  X(header_bytes) X(granule_bytes) X(sm_bytes_per_ns) X(sm_lines_in_flight) \
  X(thread_loads_in_flight)
// clang-format on

struct Costs {
#define PTX_COST(name) double name = 0;
  PTX_COSTS(PTX_COST)
#undef PTX_COST
};

enum class StepKind : uint32_t {
  kStart,     // launch, or a CTA that waits for its place
  kGridWait,  // the launch before
  kShared,    // shared memory
  kLocalLoad,
  kRemoteLoad,
  kAtomic,
  kLocalStore,  // its acknowledgement is waited for
  kRemoteStore,
  kFlight,  // of an ordered store or atomic, until others see it
  kPoll,    // a load that was too early
  kFence,
  kAcquire,
  kBarrier,
  kWarp,
  kRegisters,  // for wide loads
};

// One wait on the way to `end`. `queued` ns of it were spent behind others on a link or a port.
struct Step {
  uint32_t before = 0;  // number of the step that it begins after; 0: none
  StepKind kind = StepKind::kStart;
  double begin = 0;
  double end = 0;
  double queued = 0;
  const Site* site = nullptr;
  const char* kernel = nullptr;
  int32_t rank = 0;
  uint32_t launch = 0;
  uint32_t cta = 0;
  uint32_t thread = 0;
};

// A time that may be waited for, and the step that it would be.
struct Moment {
  double at = 0;
  Step step{};
};

// Something that passes so many bytes a ns, in bins of time: who asks late for an early time still
// finds what was free then, because threads do not ask in the order of their times.
class Pipe {
 public:
  // Returns when the last of `bytes` has passed; none passes before `from`.
  double pass(double from, double bytes, double bytes_per_ns);

 private:
  static constexpr double kBinNs = 32.0;
  size_t first_free(size_t bin);
  std::vector<float> used_;     // bytes, by bin
  std::vector<uint32_t> next_;  // of a full bin: one that may be free
};

struct Sm {
  Pipe port;                  // stores, to L2 and the links
  Pipe intake;                // loads, from there
  std::vector<double> lines;  // when each of those in flight is there, a ring
  size_t next_line = 0;
  struct Cached {
    uint64_t line = 0;
    double at = 0;
  };
  std::vector<Cached> l1;
  uint64_t l1_epoch = 1;
  int ctas = 0;
  int active_warps = 0;
  double issue_ns[2] = {0, 0};  // an instruction of one of its warps; a division
  double freed = 0;             // when its last CTA ended
};

// Of a word that an ordered store or an atomic wrote.
struct Word {
  Moment visible;
  Moment carried;   // everything that its writer's releases cover is acknowledged
  double busy = 0;  // with atomics, until
};

// Of a machine in which one rank stands for all: what it stores to a peer's memory, that peer
// stores to this rank's, at the same time. Places of `count` peers, each of `bytes` bytes.
struct Mirror {
  uint64_t stored;
  uint64_t stored_stride;
  uint64_t also;
  uint64_t also_stride;
  uint64_t bytes;
  uint64_t count;
};

// A store to such a place, and where it goes too.
struct Mirrored {
  uint64_t address;
  uint64_t to;
  uint32_t bytes;
};

}  // namespace clocks

struct ThreadClock {
  double now = 0;
  uint32_t step = 0;                 // the last wait
  const double* issue_ns = nullptr;  // of its SM
  uint32_t order = 0;                // among threads of the same time
  clocks::Moment local_stored;  // every store to this GPU is acknowledged, those of others that
  clocks::Moment stored;        // it has synchronised with included; and every store at all
  clocks::Moment seen;          // what relaxed loads have found: a fence makes it ours
  std::vector<clocks::Moment> late;      // what registers wait for
  std::vector<uint32_t> late_registers;  // register -> 1 + place in late; 0: it is ready
  double all_ready = 0;                  // no register is ready later than that
  const uint16_t* defined = nullptr;     // by the instruction that runs
  int num_defined = 0;
  std::vector<double> loads;  // when wide ones in flight are there, a ring; empty: any number
  size_t next_load = 0;
};

// Which sectors of a line a warp's instruction has touched, and which lanes have: a lane that comes
// again executes the instruction again.
struct Touched {
  uint32_t sectors = 0;
  uint32_t lanes = 0;
};

struct CtaClock {
  int sm = -1;
  double begin = 0;
  uint32_t step = 0;
  bool let_dependents_start = false;
  std::unordered_map<uint64_t, Touched> touched;  // by line, site and warp
};

struct LaunchClock {
  double begin = 0;
  uint32_t begin_step = 0;
  double end = 0;
  uint32_t end_step = 0;
  double dependents = 0;  // when every CTA has let them start
  uint32_t dependents_step = 0;
};

struct AllocationClock {
  uint64_t begin = 0;  // of its lines, which do not depend on where the host has put it
};

// Of a barrier of copies: when this phase's arrivals and copies are there, and when the last phase of
// each parity ended.
struct CopyBarrierClock {
  clocks::Moment latest;
  clocks::Moment ended[2];
};

// A launch that has ended, for Python.
struct EndedLaunch {
  int32_t rank;
  uint32_t number;
  double begin;
  double end;
  uint32_t step;
};

struct RankClock {
  std::vector<clocks::Sm> sms;
  clocks::Pipe egress;
  clocks::Pipe ingress;
  double end = 0;  // of the last launch that has ended
  uint32_t end_step = 0;
};

struct MachineClock {
  clocks::Costs costs;
  std::unordered_map<uint64_t, clocks::Word> words;
  std::vector<clocks::Step> steps{1};
  std::vector<EndedLaunch> ended;
  uint64_t lines_end = 0;  // of the allocations that have been touched
  size_t heap_size = 0;    // so many of the ready threads are a heap
  double horizon = 0;      // who is later than that lets others run
  bool keeps_steps = true;
  std::vector<clocks::Mirror> mirrors;
  std::vector<clocks::Mirrored> mirrored;  // since the last thread ran
};

namespace clocks {
// Registers by number. False: some registers are late, and on_late has to look.
inline bool on_instruction(ThreadClock& clock, Class kind, const uint16_t* defines,
                           int num_defines) {
  clock.now += clock.issue_ns[kind == Class::kSlow];
  clock.defined = defines;
  clock.num_defined = num_defines;
  return clock.late.empty();
}
void on_late(Thread& thread, Class kind, const uint16_t* uses, int num_uses);
void on_access(Thread& thread, const Access& access);
void on_fence(Thread& thread, const Site& site);
void on_barrier(Thread* const* threads, int count);
void on_warp(Thread* const* threads, int count, const Site& site);
void on_thread_start(Thread& thread);
void on_thread_end(Thread& thread);
void on_launch_start(Launch& launch);
void on_launch_end(Launch& launch);
void on_grid_launch(Thread& thread);
void on_grid_wait(Thread& thread);
uint64_t timer_ns(const Thread& thread);
bool is_ahead(const Thread& thread);
Thread* pick(Machine& machine, std::vector<Thread*>& ready);
void on_copy(Thread& thread, const Access& from, CopyBarrier& barrier);
void on_arrival(Thread& thread, CopyBarrier& barrier);
void on_phase_end(CopyBarrier& barrier);
void on_phase_asked(Thread& thread, CopyBarrier& barrier, uint32_t parity, bool ended,
                    const Site& site);
}  // namespace clocks

}  // namespace ptx
