// The software GPU: ranks with a stream each, CTAs, warps and threads of the kernels that
// translate.py made of PTX. Every CUDA thread is a function that returns where another may go on.
// One OS thread runs them all, in an order that a seed decides.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "clock.h"
#include "hooks.h"
#include "races.h"

namespace ptx {

constexpr int kWarpThreads = 32;
// Generic addresses: what lies there is shared memory. The host's addresses are lower.
constexpr uint64_t kSharedWindow = 1ULL << 60;

// A finding; it ends the run. `kind` is the name of the class that Python raises.
struct Fault : std::runtime_error {
  Fault(const char* kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  const char* kind;
};

enum class Status : uint8_t {
  kEnded,
  kBlocked,  // somebody else makes it ready again
  kPolls,    // before an ordered access: it may be waiting for another thread's word
  kPaused,   // it has run for long
};

struct Thread;
struct Cta;
struct Launch;
struct Machine;

// A kernel as a generated library describes it (build.py, class _Kernel).
struct Kernel {
  const char* name;
  Status (*run)(Thread&);
  Site* sites;
  const uint32_t* resume_lines;  // PTX line at which a thread goes on, by pc
  uint32_t num_sites;
  uint32_t register_bytes;
  uint32_t num_registers;
  uint32_t param_bytes;
  uint32_t shared_bytes;
};

// Memory that kernels may touch. `rank` owns it: it is remote for the others.
struct Allocation {
  int rank;
  uint64_t address;
  uint64_t bytes;
  std::string name;
  AllocationRaces races;
  AllocationClock clock;
};

// Lanes that meet in a warp operation.
struct Meeting {
  Site* site;
  uint32_t mask;
  uint32_t arrived;
  std::array<std::array<uint64_t, 3>, kWarpThreads> operands;
};

struct Warp {
  std::array<Thread*, kWarpThreads> lanes{};
  uint32_t present = 0;  // lanes that exist
  uint32_t live = 0;     // and have not ended
  std::vector<Meeting> meetings;
};

// bar.sync 0: every thread of the CTA that has not ended comes to it.
struct Barrier {
  std::vector<Thread*> arrived;
  std::vector<Site*> sites;
};

// A barrier in shared memory that counts arrivals and the bytes of copies (mbarrier).
struct CopyBarrier {
  uint32_t expected = 0;  // arrivals of a phase; 0: not initialised
  uint32_t missing = 0;   // arrivals of this phase
  int64_t bytes = 0;      // that this phase waits for
  uint32_t phase = 0;
  CopyBarrierRaces races;
  CopyBarrierClock clock;
};

// A copy to shared memory that has not landed.
struct Copy {
  Cta* cta;
  uint32_t target;
  uint32_t barrier;
  uint64_t source;
  uint32_t bytes;
  CopyRaces races;
};

// A word of st.async that nobody sees yet.
struct LateWord {
  const Launch* launch;
  uint64_t* address;
  uint64_t value;
};

struct Thread {
  uint32_t pc = 0;
  int rank = 0;
  uint32_t index = 0;  // in its CTA
  uint32_t lane = 0;
  uint32_t budget = 0;  // weak accesses and branches back until it pauses
  bool ended = false;
  bool polls = false;  // since its last store to global memory
  Machine* machine = nullptr;
  Launch* launch = nullptr;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  Site* waits_at = nullptr;  // the meeting that it has come to
  std::array<uint32_t, 3> tid{};
  unsigned char* registers = nullptr;
  uint64_t result = 0;  // of a warp operation
  bool result_predicate = false;
  uint64_t steps = 0;  // turns without an end
  ThreadRaces races;
  ThreadClock clock;
};

struct Cta {
  Launch* launch = nullptr;
  uint32_t number = 0;
  std::array<uint32_t, 3> id{};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int live = 0;
  bool lets_dependents_start = false;
  std::vector<unsigned char> shared;
  std::vector<uint8_t> shared_written;  // by byte
  std::vector<unsigned char> registers;
  Barrier barrier;
  std::map<uint32_t, CopyBarrier> copy_barriers;  // by their place in shared memory
  CtaRaces races;
  CtaClock clock;
};

struct Launch {
  Machine* machine = nullptr;
  int rank = 0;
  uint32_t number = 0;  // in the rank's stream
  const Kernel* kernel = nullptr;
  std::array<uint32_t, 3> grid{};
  std::array<uint32_t, 3> block{};
  std::vector<unsigned char> params;
  uint32_t shared_bytes = 0;
  uint32_t most_resident_ctas = 0;  // if the rank holds nothing else; 0: any number
  bool pdl = false;
  bool begun = false;
  Launch* before = nullptr;  // in the stream, unless that has ended
  uint32_t next_cta = 0;
  uint32_t ended_ctas = 0;
  uint32_t ctas_without_dependents = 0;  // that have neither ended nor let dependents start
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Thread*> grid_waiters;  // threads of this launch that wait for the one before
  std::vector<Allocation*> touched;   // by each site, last: most often what it touches next
  LaunchRaces races;
  LaunchClock clock;

  uint32_t num_ctas() const { return grid[0] * grid[1] * grid[2]; }
  uint32_t num_threads() const { return block[0] * block[1] * block[2]; }
  // The part of the rank's GPU that a CTA takes.
  double place() const { return most_resident_ctas == 0 ? 0 : 1.0 / most_resident_ctas; }
};

struct Rank {
  std::deque<std::unique_ptr<Launch>> stream;
  uint32_t num_launches = 0;
  double taken = 0;  // part of its GPU, by CTAs
  RankRaces races;
  RankClock clock;
};

struct Machine {
  Machine(int num_ranks, uint64_t seed, bool in_processes)
      : ranks(num_ranks), random(seed), in_processes(in_processes) {}

  std::vector<Rank> ranks;
  std::mt19937_64 random;
  // One machine a process, which has the memory in common with others: threads that poll give the
  // processor away, and the timer is the host's.
  bool in_processes;
  uint32_t most_resident_ctas = 0;  // of launches that come
  int late_rank = -1;               // its CTAs of this number run when nobody else goes on
  uint32_t late_cta = 0;
  std::map<uint64_t, std::unique_ptr<Allocation>> allocations;
  std::vector<Thread*> ready;
  std::vector<Thread*> late;  // would be ready, but are of the late CTA
  std::vector<Copy> copies;   // on their way
  std::vector<LateWord> late_words;
  uint64_t timer_ns = 1'000'000'000;
  MachineRaces races;
  MachineClock clock;

  // state of the scheduler
  uint64_t idle_turns = 0;
  uint64_t leap_ns = 0;
  uint64_t leapt_ns = 0;
  uint64_t idle_since_ns = 0;  // in processes
  uint64_t most_idle_ns = 0;   // in processes; 0: any number

  void progress() {
    idle_turns = 0;
    leap_ns = 0;
    leapt_ns = 0;
    idle_since_ns = 0;
  }
  void wake(Thread* thread) {
    const bool is_late = thread->rank == late_rank && thread->cta->number == late_cta;
    (is_late ? late : ready).push_back(thread);
    progress();
  }
  // Lets the late CTAs' threads run; false if there are none.
  bool wake_late() {
    if (late.empty()) return false;
    ready.insert(ready.end(), late.begin(), late.end());
    late.clear();
    progress();
    return true;
  }
  Allocation* find(uint64_t address) const {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return nullptr;
    Allocation* found = std::prev(after)->second.get();
    return address - found->address < found->bytes ? found : nullptr;
  }
};

// "rank 1 launch 2 (moe_nvlink_combine) CTA 3 thread 17, PTX line 812 (source line 90): bar.sync 0"
std::string place_of(const Thread& thread, const Site* site);
[[noreturn]] void fail(const Thread& thread, const Site* site, const char* kind,
                       const std::string& what);

}  // namespace ptx

#include "detector.h"

namespace ptx {

// ---- what generated code calls

// False: the thread has to wait; its result is there when it goes on.
bool meet_at_barrier(Thread& thread, Site& site);
enum class WarpOp : uint8_t {
  kBarrier,
  kShuffleBfly,
  kShuffleIdx,
  kMin,
  kMax,
  kAdd,
  kBallot,
  kMatchAny,
  kElect,
};
bool meet_in_warp(Thread& thread, Site& site, WarpOp op, uint32_t mask, uint64_t a, uint64_t b = 0,
                  uint64_t c = 0);
void init_copies(Thread& thread, Site& site, uint64_t place, uint32_t arrivals);
void expect_copies(Thread& thread, Site& site, uint64_t place, uint32_t bytes);
bool have_landed(Thread& thread, Site& site, uint64_t place, uint32_t parity);
void start_copy(Thread& thread, Site& site, uint64_t target, uint64_t source, uint64_t barrier,
                uint32_t bytes);
void fence_copies(Thread& thread, Site& site, Space space);
bool wait_for_grid(Thread& thread, Site& site);
void let_dependents_start(Thread& thread);
uint64_t timer_ns(const Thread& thread);

void fail_bounds(const Thread& thread, const Access& access, uint64_t limit);
void fail_alignment(const Thread& thread, const Access& access);
void fail_unwritten(const Thread& thread, const Access& access, uint32_t offset);

inline bool tired(Thread& thread) {
  if (kClock) return clocks::is_ahead(thread);
  if (--thread.budget != 0) return false;
  thread.budget = 1 + thread.machine->random() % 4096;
  return true;
}

// Where an access lies, after every check; `address` is generic only if `generic`.
inline unsigned char* locate(Thread& thread, Access& access, bool generic) {
  if (generic && (access.address & kSharedWindow) != 0) {
    access.address &= ~kSharedWindow;
    access.space = Space::kShared;
  }
  if (access.address % access.bytes != 0) fail_alignment(thread, access);
  uint64_t limit = 0;
  unsigned char* base = nullptr;
  switch (access.space) {
    case Space::kGlobal: {
      Allocation*& found = thread.launch->touched[access.site - thread.launch->kernel->sites];
      if (found == nullptr || access.address - found->address >= found->bytes) {
        found = thread.machine->find(access.address);
      }
      if (found == nullptr || access.address - found->address + access.bytes > found->bytes) {
        fail_bounds(thread, access, 0);
      }
      access.where = found;
      return reinterpret_cast<unsigned char*>(access.address);
    }
    case Space::kShared:
      limit = thread.cta->shared.size();
      base = thread.cta->shared.data();
      break;
    case Space::kParam:
      limit = thread.launch->params.size();
      base = thread.launch->params.data();
      break;
  }
  if (access.address + access.bytes > limit || access.address > limit) {
    fail_bounds(thread, access, limit);
  }
  if (access.space == Space::kShared) {
    uint8_t* written = thread.cta->shared_written.data() + access.address;
    for (uint32_t i = 0; i < access.bytes; ++i) {
      if (access.reads && written[i] == 0) fail_unwritten(thread, access, i);
      if (access.writes) written[i] = 1;
    }
  }
  return base + access.address;
}

// A thread may note in shared memory how long it has polled. For that nobody waits.
inline void note_write(Thread& thread, Space space) {
  if (space == Space::kGlobal) thread.polls = false;
  if (!thread.polls) thread.machine->progress();
}

inline unsigned char* reach(Thread& thread, Access access, bool generic) {
  unsigned char* memory = locate(thread, access, generic);
  if (access.space == Space::kGlobal || access.space == Space::kShared) {
    if (kRaces) races::on_access(thread, access);
    if (kClock) clocks::on_access(thread, access);
    if (access.writes) note_write(thread, access.space);
  }
  return memory;
}

// A vector is aligned as a whole.
inline void check_vector(Thread& thread, Site& site, uint64_t address, uint32_t bytes) {
  if (address % bytes == 0) return;
  fail_alignment(thread, Access{address, bytes, Space::kGlobal, false, false, &site, nullptr});
}

// Weak vectors take effect element by element, as PTX says of all vectors, and nobody comes between.
template <class Element, int kCount>
inline void load(Thread& thread, Site& site, Space space, bool generic, uint64_t address,
                 Element* values) {
  const Access access{address, sizeof(Element) * kCount, space, true, false, &site, nullptr};
  const auto* from = reinterpret_cast<const Element*>(reach(thread, access, generic));
  const int order = site.order == Order::kWeak ? __ATOMIC_RELAXED : __ATOMIC_ACQUIRE;
  for (int i = 0; i < kCount; ++i) values[i] = __atomic_load_n(from + i, order);
}

// Element `number` of a strong vector, which is an access of its own.
template <class Element, int kCount>
inline void load_part(Thread& thread, Site& site, Space space, bool generic, uint64_t address,
                      int number, Element* values) {
  check_vector(thread, site, address, sizeof(Element) * kCount);
  load<Element, 1>(thread, site, space, generic, address + number * sizeof(Element),
                   values + number);
}

template <class Element, int kCount>
inline void store(Thread& thread, Site& site, Space space, bool generic, uint64_t address,
                  const Element* values) {
  const Access access{address, sizeof(Element) * kCount, space, false, true, &site, nullptr};
  auto* to = reinterpret_cast<Element*>(reach(thread, access, generic));
  const int order = site.order == Order::kWeak ? __ATOMIC_RELAXED : __ATOMIC_RELEASE;
  for (int i = 0; i < kCount; ++i) __atomic_store_n(to + i, values[i], order);
}

template <class Element, int kCount>
inline void store_part(Thread& thread, Site& site, Space space, bool generic, uint64_t address,
                       int number, const Element* values) {
  check_vector(thread, site, address, sizeof(Element) * kCount);
  store<Element, 1>(thread, site, space, generic, address + number * sizeof(Element),
                    values + number);
}

// The word comes at any time before the end of its kernel. Where races are looked for it comes at once,
// because a thread that has not seen it has not learnt from it; the clock has times of its own.
inline void store_async(Thread& thread, Site& site, Space space, bool generic, uint64_t address,
                        const uint64_t* value) {
  if constexpr (kRaces || kClock) {
    return store<uint64_t, 1>(thread, site, space, generic, address, value);
  }
  const Access access{address, sizeof(uint64_t), space, false, true, &site, nullptr};
  auto* to = reinterpret_cast<uint64_t*>(reach(thread, access, generic));
  thread.machine->late_words.push_back({thread.launch, to, *value});
}

// Returns what the word was.
template <class Element>
inline Element fetch_add(Thread& thread, Site& site, Space space, bool generic, uint64_t address,
                         Element value) {
  const Access access{address, sizeof(Element), space, true, true, &site, nullptr};
  auto* word = reinterpret_cast<Element*>(reach(thread, access, generic));
  return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
}

inline void fence(Thread& thread, Site& site) {
  if (site.removed != 0) return;
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (kRaces) races::on_fence(thread, site);
  if (kClock) clocks::on_fence(thread, site);
}

}  // namespace ptx
