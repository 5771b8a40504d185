// Virtual time: when each thread would be where, by a table of costs (tests/support/ptx/costs.py).
//
// A discrete-event simulation. Every thread has a time of its own, and the scheduler runs the
// thread whose time is lowest. Loads and atomics take effect at once, but the registers that they
// fill are ready later: a thread waits where it needs one (a branch, an address, what it stores).
// Stores fly; a release waits until all that it covers is acknowledged. A word that an ordered
// store or an atomic writes is visible when it arrives. Meetings join times.
//
// Whatever may be waited for is a Step, which has the step before it: what took the time can be
// read backwards (tests/support/ptx/critical_path.py). All that comes out is modelled, never
// measured.
//
// What it simplifies: data of this rank are in its L2; lanes of a warp cost one instruction, and
// those that diverge run side by side; registers are never short; an SM's L1 is direct-mapped;
// ptxas moves no load across a branch or a store.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
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
  X(shared_ns) X(l1_ns) X(l2_ns) X(remote_ns) X(fence_gpu_ns) X(fence_sys_ns) X(acquire_ns) \
  X(atomic_ns) X(atomic_gap_ns) X(barrier_ns) X(warp_barrier_ns) X(shuffle_ns) X(launch_ns) \
  X(pdl_ns) X(link_bytes_per_ns) X(header_bytes) X(granule_bytes) X(sm_bytes_per_ns) \
  X(sm_lines_in_flight) X(thread_loads_in_flight)
// clang-format on

struct Costs {
#define PTX_COST(name) double name = 0;
  PTX_COSTS(PTX_COST)
#undef PTX_COST
};

// Something that ends at a time, and that a thread may wait for.
struct Step {
  const Step* before;  // it begins after that; null: with time
  const char* kind;
  double begin;
  double end;
  const Site* site;
  int32_t rank;
  uint32_t cta;
  uint32_t thread;
};

// Something that passes so many bytes a ns, in bins of time: who asks late for an early time still
// finds what was free then, because threads do not ask in the order of their times.
class Pipe {
 public:
  explicit Pipe(double bytes_per_ns = 0) : rate_(bytes_per_ns) {}
  // Returns when the last of `bytes` has passed; none passes before `from`.
  double pass(double from, double bytes);

 private:
  static constexpr double kBinNs = 32.0;
  struct Bin {
    float used = 0;     // bytes
    uint32_t full = 0;  // so many bins from here on are full
  };
  size_t first_free(size_t bin);
  double rate_;
  std::vector<Bin> bins_;
};

// A number of places; who comes gets the one that was taken first.
class Places {
 public:
  explicit Places(double count = 0) : ends_(static_cast<size_t>(count)) {}  // 0: any number
  double free_at() const { return ends_.empty() ? 0 : ends_[next_]; }
  void take(double until) {
    if (ends_.empty()) return;
    ends_[next_] = until;
    next_ = (next_ + 1) % ends_.size();
  }

 private:
  std::vector<double> ends_;
  size_t next_ = 0;
};

struct Sm {
  explicit Sm(const Costs& costs)
      : port(costs.sm_bytes_per_ns),
        intake(costs.sm_bytes_per_ns),
        lines(costs.sm_lines_in_flight) {}

  Pipe port;     // stores, to L2 and the links
  Pipe intake;   // loads, from there
  Places lines;  // in flight
  // Set -> the sector it holds, plus 1, and when that is there.
  std::unordered_map<uint64_t, std::pair<uint64_t, double>> l1;
  int ctas = 0;
  int active_warps = 0;
  double issue_ns[2] = {0, 0};  // an instruction of one of its warps; a division
  double freed = 0;             // when its last CTA ended
};

// Of a word that an ordered store or an atomic wrote.
struct Word {
  const Step* visible = nullptr;
  double busy = 0;  // with atomics, until
};

// Of a machine in which one rank stands for all: what it stores to a peer's memory, that peer
// stores to this rank's, at the same time.
struct Mirror {
  uint64_t stored;
  uint64_t also;
  uint64_t bytes;
};

}  // namespace clocks

struct ThreadClock {
  double now = 0;
  const clocks::Step* last = nullptr;      // that it has waited for
  const clocks::Step* stored = nullptr;    // every store of its is acknowledged, and those of the
                                           // threads that it has met
  std::vector<const clocks::Step*> ready;  // by register
  double all_ready = 0;                    // no register is ready later than that
  const uint16_t* defined = nullptr;       // by the instruction that runs
  int num_defined = 0;
  clocks::Places loads;              // wide ones in flight
  const double* issue_ns = nullptr;  // of its SM
  uint32_t order = 0;                // among threads of the same time
};

// Which sectors of a line a warp's instruction has touched, and which lanes have: a lane that comes
// again executes the instruction again.
struct Touched {
  uint32_t sectors = 0;
  uint32_t lanes = 0;
};

struct CtaClock {
  clocks::Sm* sm = nullptr;
  const clocks::Step* begin = nullptr;
  bool let_dependents_start = false;
  std::unordered_map<uint64_t, Touched> touched;  // by line, site and warp
};

struct LaunchClock {
  const clocks::Step* begin = nullptr;
  const clocks::Step* end = nullptr;
  const clocks::Step* dependents = nullptr;  // every CTA has let them start
};

struct AllocationClock {
  uint64_t begin = 0;  // of its lines, which do not depend on where the host has put it
};

// Of a barrier of copies: this phase's arrivals and copies are there; the ends of the last phase of
// each parity.
struct CopyBarrierClock {
  const clocks::Step* latest = nullptr;
  const clocks::Step* ended[2] = {nullptr, nullptr};
};

struct RankClock {
  explicit RankClock(const clocks::Costs& costs = {})
      : sms(static_cast<size_t>(costs.num_sms), clocks::Sm(costs)),
        egress(costs.link_bytes_per_ns),
        ingress(costs.link_bytes_per_ns) {}

  std::vector<clocks::Sm> sms;
  clocks::Pipe egress;
  clocks::Pipe ingress;
  const clocks::Step* end = nullptr;  // of the last launch that has ended
};

struct MachineClock {
  clocks::Costs costs;
  std::deque<clocks::Step> steps;
  std::vector<const clocks::Step*> ended;  // launches
  std::unordered_map<uint64_t, clocks::Word> words;
  std::map<uint64_t, clocks::Mirror> mirrors;  // by the end of `stored`
  std::vector<clocks::Mirror> mirrored;        // stores to such places since the last thread ran
  uint64_t lines_end = 0;                      // of the allocations that have been touched
  size_t heap_size = 0;                        // so many of the ready threads are a heap
  double horizon = 0;                          // who is later than that lets others run
};

namespace clocks {
// Registers by number. False: some registers are late, and on_late has to look.
inline bool on_instruction(ThreadClock& clock, Class kind, const uint16_t* defines,
                           int num_defines) {
  clock.now += clock.issue_ns[kind == Class::kSlow];
  clock.defined = defines;
  clock.num_defined = num_defines;
  return clock.now >= clock.all_ready;
}
void on_late(Thread& thread, Class kind, const uint16_t* uses, int num_uses);
void on_access(Thread& thread, const Access& access);
void on_fence(Thread& thread, const Site& site);
void on_meeting(Thread* const* threads, int count, const Site& site);
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
