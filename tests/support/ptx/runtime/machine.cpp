// The scheduler, the meetings of threads, and the C functions that Python and the stand-in driver
// call.
#include "machine.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <sstream>

namespace ptx {

namespace {

constexpr uint64_t kFirstLeapNs = 1'000;
// Longer than any wait of a kernel: who still polls after that polls for ever.
constexpr uint64_t kPatienceNs = 4'000'000'000'000;
constexpr uint64_t kMostSteps = 200'000'000;  // turns of one thread

std::string describe(const Site* site, uint32_t line) {
  std::ostringstream text;
  text << "PTX line " << (site != nullptr ? site->line : line);
  if (site != nullptr) {
    if (site->source_line != 0) text << " (source line " << site->source_line << ")";
    text << ": " << site->text;
  }
  return text.str();
}

// Where a thread that does not run will go on.
std::string position(const Thread& thread) {
  if (thread.waits_at != nullptr) return "waits at " + describe(thread.waits_at, 0);
  const Kernel& kernel = *thread.launch->kernel;
  const uint32_t line = kernel.resume_lines[thread.pc];
  for (uint32_t i = 0; i < kernel.num_sites; ++i) {
    if (kernel.sites[i].line == line) return "is at " + describe(&kernel.sites[i], 0);
  }
  return "is at " + describe(nullptr, line);
}

}  // namespace

std::string place_of(const Thread& thread, const Site* site) {
  std::ostringstream text;
  text << "rank " << thread.rank << " launch " << thread.launch->number << " ("
       << thread.launch->kernel->name << ") CTA " << thread.cta->number << " thread "
       << thread.index << ", " << describe(site, thread.launch->kernel->resume_lines[thread.pc]);
  return text.str();
}

void fail(const Thread& thread, const Site* site, const char* kind, const std::string& what) {
  throw Fault(kind, place_of(thread, site) + "\n  " + what);
}

// ---- accesses that are wrong

void fail_bounds(const Thread& thread, const Access& access, uint64_t limit) {
  std::ostringstream text;
  if (access.space == Space::kGlobal) {
    text << access.bytes << " bytes at 0x" << std::hex << access.address << std::dec
         << " lie in no allocation";
    auto after = thread.machine->allocations.upper_bound(access.address);
    if (after != thread.machine->allocations.begin()) {
      const Allocation& before = *std::prev(after)->second;
      text << "; " << access.address - before.address << " after the begin of '" << before.name
           << "' of rank " << before.rank << ", which has " << before.bytes;
    }
  } else {
    const char* names[] = {"global", "shared", "parameter"};
    text << access.bytes << " bytes at " << access.address << " of "
         << names[static_cast<int>(access.space)] << " memory, which has " << limit;
  }
  fail(thread, access.site, "OutOfBounds", text.str());
}

void fail_alignment(const Thread& thread, const Access& access) {
  std::ostringstream text;
  text << access.bytes << " bytes at 0x" << std::hex << access.address << ", which is no multiple";
  fail(thread, access.site, "Misaligned", text.str());
}

void fail_unwritten(const Thread& thread, const Access& access, uint32_t offset) {
  fail(thread, access.site, "Uninitialised",
       "shared memory at " + std::to_string(access.address + offset) +
           " has not been written by this CTA");
}

// ---- launches

namespace {

bool may_begin(const Launch& launch) {
  if (launch.before == nullptr) return true;
  return launch.pdl && launch.before->begun && launch.before->ctas_without_dependents == 0;
}

void begin_cta(Launch& launch) {
  Machine& machine = *launch.machine;
  const Kernel& kernel = *launch.kernel;
  auto cta = std::make_unique<Cta>();
  const uint32_t number = launch.next_cta++;
  cta->launch = &launch;
  cta->number = number;
  cta->id = {number % launch.grid[0], number / launch.grid[0] % launch.grid[1],
             number / launch.grid[0] / launch.grid[1]};
  const uint32_t count = launch.num_threads();
  cta->threads.resize(count);
  cta->warps.resize((count + kWarpThreads - 1) / kWarpThreads);
  cta->live = static_cast<int>(count);
  cta->shared.resize(launch.shared_bytes);
  cta->shared_written.resize(launch.shared_bytes);
  cta->registers.resize(static_cast<size_t>(count) * kernel.register_bytes);
  for (uint32_t i = 0; i < count; ++i) {
    Thread& thread = cta->threads[i];
    thread.machine = &machine;
    thread.rank = launch.rank;
    thread.launch = &launch;
    thread.cta = cta.get();
    thread.index = i;
    thread.lane = i % kWarpThreads;
    thread.warp = &cta->warps[i / kWarpThreads];
    thread.warp->lanes[thread.lane] = &thread;
    thread.warp->present |= 1U << thread.lane;
    thread.warp->live |= 1U << thread.lane;
    thread.tid = {i % launch.block[0], i / launch.block[0] % launch.block[1],
                  i / launch.block[0] / launch.block[1]};
    thread.registers = cta->registers.data() + static_cast<size_t>(i) * kernel.register_bytes;
    thread.budget = 1 + machine.random() % 4096;
    if (kRaces) races::on_thread_start(thread);
    if (kClock) clocks::on_thread_start(thread);
    machine.wake(&thread);
  }
  machine.ranks[launch.rank].taken += launch.place();
  launch.ctas.push_back(std::move(cta));
}

constexpr double kRounding = 1e-6;  // of sums of places

// Begins what may begin: launches in the stream's order, CTAs as the rank has room.
void begin_all(Machine& machine, Rank& rank) {
  for (auto& launch : rank.stream) {
    if (!launch->begun) {
      if (!may_begin(*launch)) return;
      launch->begun = true;
      if (kClock) clocks::on_launch_start(*launch);
    }
    while (launch->next_cta < launch->num_ctas()) {
      if (rank.taken + launch->place() > 1 + kRounding) return;
      begin_cta(*launch);
    }
  }
}

void let_come(Machine& machine, size_t number) {
  const LateWord word = machine.late_words[number];
  machine.late_words[number] = machine.late_words.back();
  machine.late_words.pop_back();
  __atomic_store_n(word.address, word.value, __ATOMIC_RELEASE);
  machine.progress();
}

void end_launch(Machine& machine, Rank& rank) {
  for (size_t i = machine.late_words.size(); i-- > 0;) {
    if (machine.late_words[i].launch == rank.stream.front().get()) let_come(machine, i);
  }
  if (kRaces) races::on_launch_end(*rank.stream.front());
  if (kClock) clocks::on_launch_end(*rank.stream.front());
  const std::unique_ptr<Launch> ended = std::move(rank.stream.front());
  rank.stream.pop_front();
  if (rank.stream.empty()) return;
  Launch& next = *rank.stream.front();
  next.before = nullptr;
  for (Thread* thread : next.grid_waiters) {
    thread->waits_at = nullptr;
    machine.wake(thread);
  }
  next.grid_waiters.clear();
}

void check_barrier(Cta& cta);

void end_thread(Thread& thread) {
  Cta& cta = *thread.cta;
  Launch& launch = *thread.launch;
  Machine& machine = *thread.machine;
  thread.ended = true;
  machine.progress();
  if (kRaces) races::on_thread_end(thread);
  if (kClock) clocks::on_thread_end(thread);
  thread.warp->live &= ~(1U << thread.lane);
  for (const Meeting& meeting : thread.warp->meetings) {
    if ((meeting.mask >> thread.lane & 1U) != 0) {
      fail(thread, meeting.site, "Divergence", "a lane of its mask ended; the others wait for it");
    }
  }
  --cta.live;
  if (!cta.barrier.arrived.empty()) check_barrier(cta);
  if (cta.live != 0) return;
  for (const Copy& copy : machine.copies) {
    if (copy.cta != &cta) continue;
    fail(thread, nullptr, "OutOfBounds",
         "the CTA has ended, and a copy to its shared memory has not landed");
  }
  if (!cta.lets_dependents_start) --launch.ctas_without_dependents;
  ++launch.ended_ctas;
  Rank& rank = machine.ranks[launch.rank];
  rank.taken -= launch.place();
  cta.registers = {};
  cta.shared = {};
  cta.shared_written = {};
  while (!rank.stream.empty() &&
         rank.stream.front()->ended_ctas == rank.stream.front()->num_ctas()) {
    end_launch(machine, rank);
  }
  begin_all(machine, rank);
}

}  // namespace

bool wait_for_grid(Thread& thread, Site& site) {
  if (thread.launch->before == nullptr) return true;
  thread.waits_at = &site;
  thread.launch->grid_waiters.push_back(&thread);
  return false;
}

void let_dependents_start(Thread& thread) {
  if (kClock) clocks::on_grid_launch(thread);
  if (thread.cta->lets_dependents_start) return;
  thread.cta->lets_dependents_start = true;
  if (--thread.launch->ctas_without_dependents == 0) {
    begin_all(*thread.machine, thread.machine->ranks[thread.rank]);
  }
}

namespace {

uint64_t host_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

uint64_t timer_ns(const Thread& thread) {
  if (thread.machine->in_processes) return host_ns();
  return thread.machine->timer_ns + (kClock ? clocks::timer_ns(thread) : 0);
}

// ---- meetings

namespace {

void check_barrier(Cta& cta) {
  Barrier& barrier = cta.barrier;
  if (static_cast<int>(barrier.arrived.size()) < cta.live) return;
  std::vector<const Site*> of_warp(cta.warps.size());
  for (size_t i = 0; i < barrier.arrived.size(); ++i) {
    const Site*& site = of_warp[barrier.arrived[i]->index / kWarpThreads];
    if (site != nullptr && site != barrier.sites[i]) {
      fail(*barrier.arrived[i], barrier.sites[i], "Divergence",
           "a lane of the same warp came to another barrier: " + describe(site, 0));
    }
    site = barrier.sites[i];
  }
  std::vector<Thread*> all;
  all.swap(barrier.arrived);
  barrier.sites.clear();
  if (kRaces) races::on_barrier(all.data(), static_cast<int>(all.size()));
  if (kClock) clocks::on_meeting(all.data(), static_cast<int>(all.size()), *all[0]->waits_at);
  for (Thread* thread : all) {
    thread->waits_at = nullptr;
    cta.launch->machine->wake(thread);
  }
}

// The lane whose value a shuffle takes.
int source_of(const Meeting& meeting, WarpOp op, int lane, bool* in_range) {
  const int b = static_cast<int>(meeting.operands[lane][1] & 31U);
  const auto c = static_cast<uint32_t>(meeting.operands[lane][2]);
  const int clamp = static_cast<int>(c & 31U);
  const int segment = static_cast<int>(c >> 8 & 31U);
  const int last = (lane & segment) | (clamp & ~segment);
  const int source = op == WarpOp::kShuffleBfly ? lane ^ b : (lane & segment) | (b & ~segment);
  *in_range = source <= last;
  return *in_range ? source : lane;
}

uint64_t reduced(const Meeting& meeting, WarpOp op) {
  if (op == WarpOp::kElect) return std::countr_zero(meeting.arrived);
  uint32_t result = op == WarpOp::kMin ? ~0U : 0;
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    if ((meeting.arrived >> lane & 1U) == 0) continue;
    const auto value = static_cast<uint32_t>(meeting.operands[lane][0]);
    switch (op) {
      case WarpOp::kMin:
        result = std::min(result, value);
        break;
      case WarpOp::kMax:
        result = std::max(result, value);
        break;
      case WarpOp::kAdd:
        result += value;
        break;
      default:
        result |= static_cast<uint32_t>(value != 0) << lane;
    }
  }
  return result;
}

// The lanes that came with the same value as this one.
uint32_t lanes_alike(const Meeting& meeting, int lane) {
  uint32_t alike = 0;
  for (int other = 0; other < kWarpThreads; ++other) {
    if ((meeting.arrived >> other & 1U) == 0) continue;
    const bool same = meeting.operands[other][0] == meeting.operands[lane][0];
    alike |= static_cast<uint32_t>(same) << other;
  }
  return alike;
}

void finish(Warp& warp, const Meeting& meeting, WarpOp op, Thread& last) {
  std::array<Thread*, kWarpThreads> all{};
  int count = 0;
  const bool is_shuffle = op == WarpOp::kShuffleBfly || op == WarpOp::kShuffleIdx;
  const uint64_t common = is_shuffle || op == WarpOp::kBarrier ? 0 : reduced(meeting, op);
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    if ((meeting.arrived >> lane & 1U) == 0) continue;
    Thread& thread = *warp.lanes[lane];
    all[count++] = &thread;
    thread.result = common;
    thread.result_predicate = common == thread.lane;  // of elect
    if (op == WarpOp::kMatchAny) {
      thread.result = lanes_alike(meeting, lane);
    } else if (is_shuffle) {
      bool in_range = false;
      const int source = source_of(meeting, op, lane, &in_range);
      if ((meeting.arrived >> source & 1U) == 0) {
        fail(thread, meeting.site, "Divergence",
             "it takes the value of lane " + std::to_string(source) + ", which is not in its mask");
      }
      thread.result = static_cast<uint32_t>(meeting.operands[source][0]);
      thread.result_predicate = in_range;
    }
    thread.waits_at = nullptr;
    if (&thread != &last) last.machine->wake(&thread);
  }
  if (kRaces && op == WarpOp::kBarrier) races::on_barrier(all.data(), count);
  if (kClock) clocks::on_meeting(all.data(), count, *meeting.site);
}

}  // namespace

bool meet_at_barrier(Thread& thread, Site& site) {
  if (site.removed != 0) return true;
  Barrier& barrier = thread.cta->barrier;
  barrier.arrived.push_back(&thread);
  barrier.sites.push_back(&site);
  thread.waits_at = &site;
  check_barrier(*thread.cta);
  return false;
}

bool meet_in_warp(Thread& thread, Site& site, WarpOp op, uint32_t mask, uint64_t a, uint64_t b,
                  uint64_t c) {
  if (site.removed != 0) return true;
  Warp& warp = *thread.warp;
  mask &= warp.present;
  if ((mask >> thread.lane & 1U) == 0) {
    fail(thread, &site, "Divergence", "its mask does not have its own lane");
  }
  if ((mask & ~warp.live) != 0) {
    fail(thread, &site, "Divergence", "a lane of its mask has ended");
  }
  auto found = std::find_if(warp.meetings.begin(), warp.meetings.end(),
                            [&](const Meeting& each) { return (each.mask & mask) != 0; });
  if (found == warp.meetings.end()) {
    warp.meetings.push_back(Meeting{&site, mask, 0, {}});
    found = std::prev(warp.meetings.end());
  } else if (found->site != &site || found->mask != mask) {
    fail(thread, &site, "Divergence",
         "lanes of its mask wait elsewhere: " + describe(found->site, 0));
  }
  found->arrived |= 1U << thread.lane;
  found->operands[thread.lane] = {a, b, c};
  if (found->arrived != mask) {
    thread.waits_at = &site;
    return false;
  }
  const Meeting complete = *found;
  warp.meetings.erase(found);
  finish(warp, complete, op, thread);
  return true;
}

}  // namespace ptx

#include "copies.h"

namespace ptx {

// ---- the scheduler

namespace {

std::string deadlock(const Machine& machine) {
  std::ostringstream text;
  text << "no thread goes on, and time does not help:";
  for (const Rank& rank : machine.ranks) {
    for (const auto& launch : rank.stream) {
      for (const auto& cta : launch->ctas) {
        std::map<std::string, std::vector<uint32_t>> groups;
        for (const Thread& thread : cta->threads) {
          if (!thread.ended) groups[position(thread)].push_back(thread.index);
        }
        for (const auto& [where, threads] : groups) {
          text << "\n  rank " << launch->rank << " launch " << launch->number << " ("
               << launch->kernel->name << ") CTA " << cta->number << ": thread " << threads.front();
          if (threads.size() > 1) text << " and " << threads.size() - 1 << " more";
          text << " " << where;
        }
      }
      if (launch->next_cta < launch->num_ctas()) {
        text << "\n  rank " << launch->rank << " launch " << launch->number << " ("
             << launch->kernel->name << "): " << launch->num_ctas() - launch->next_cta
             << " CTAs have not begun";
      }
    }
  }
  return text.str();
}

// So many turns have only polled that every ready thread has most likely had one, and nothing has
// changed: only time can end the wait.
void let_time_pass(Machine& machine) {
  machine.idle_turns = 0;
  machine.leap_ns = std::max(kFirstLeapNs, 2 * machine.leap_ns);
  machine.leapt_ns += machine.leap_ns;
  if (machine.leapt_ns > kPatienceNs) throw Fault("Deadlock", deadlock(machine));
  machine.timer_ns += machine.leap_ns;
}

// The same where another process may be who changes something.
void give_way(Machine& machine) {
  const uint64_t now = host_ns();
  if (machine.idle_since_ns == 0) machine.idle_since_ns = now;
  if (machine.most_idle_ns != 0 && now - machine.idle_since_ns > machine.most_idle_ns) {
    throw Fault("Deadlock", deadlock(machine));
  }
  sched_yield();
}

Thread* pick_at_random(Machine& machine) {
  std::vector<Thread*>& ready = machine.ready;
  const size_t chosen = machine.random() % ready.size();
  Thread* thread = ready[chosen];
  ready[chosen] = ready.back();
  ready.pop_back();
  return thread;
}

void take_turn(Machine& machine) {
  Thread& thread = kClock ? *clocks::pick(machine, machine.ready) : *pick_at_random(machine);
  const Status status = thread.launch->kernel->run(thread);
  if (status == Status::kEnded) {
    end_thread(thread);
  } else if (status != Status::kBlocked) {
    machine.ready.push_back(&thread);
    if (++thread.steps > kMostSteps) throw Fault("Deadlock", deadlock(machine));
    thread.polls |= status == Status::kPolls;
    if (status == Status::kPolls && ++machine.idle_turns > 16 * machine.ready.size() + 64) {
      if (machine.in_processes) {
        give_way(machine);
      } else if (!machine.wake_late()) {
        let_time_pass(machine);
      }
    }
  }
}

void run(Machine& machine) {
  for (Rank& rank : machine.ranks) begin_all(machine, rank);
  while (!machine.ready.empty() || !machine.copies.empty() || machine.wake_late()) {
    // A copy or a word for about as many turns as there are threads.
    const size_t turns = machine.ready.size() + 1;
    if (!machine.late_words.empty()) {
      const size_t number = machine.random() % turns;
      if (number < machine.late_words.size()) {
        let_come(machine, number);
        continue;
      }
    }
    if (!machine.copies.empty() && machine.random() % turns < machine.copies.size()) {
      land_one(machine);
    } else if (!machine.ready.empty()) {
      take_turn(machine);
    }
  }
  for (const Rank& rank : machine.ranks) {
    if (!rank.stream.empty()) throw Fault("Deadlock", deadlock(machine));
  }
}

}  // namespace

}  // namespace ptx

// ---- C functions. Those that can fail return the kind of the fault, or null.

struct ptx_machine {
  ptx::Machine machine;
  std::string kind;
  std::string message;
};

// Returns the kind of the fault, or null. After a fault all streams are empty.
template <class Body>
static const char* guarded(ptx_machine* machine, Body body) {
  try {
    body();
    return nullptr;
  } catch (const ptx::Fault& fault) {
    machine->kind = fault.kind;
    machine->message = fault.what();
  }
  machine->machine.ready.clear();
  machine->machine.copies.clear();
  machine->machine.late_words.clear();
  machine->machine.late.clear();
  for (ptx::Rank& rank : machine->machine.ranks) {
    rank.stream.clear();
    rank.taken = 0;
  }
  return machine->kind.c_str();
}

extern "C" {

ptx_machine* ptx_create(int num_ranks, uint64_t seed, int in_processes) {
  return new ptx_machine{ptx::Machine(num_ranks, seed, in_processes != 0), "", ""};
}

void ptx_destroy(ptx_machine* machine) {
  delete machine;
}

// How many CTAs a rank holds of each launch from now on, if it holds nothing else.
void ptx_limit_ctas(ptx_machine* machine, uint32_t most) {
  machine->machine.most_resident_ctas = most;
}

// Of this rank, every launch's CTA of this number runs when all other threads wait or poll.
void ptx_make_late(ptx_machine* machine, int rank, uint32_t cta) {
  machine->machine.late_rank = rank;
  machine->machine.late_cta = cta;
}

// In processes: how long its threads may poll without a store of theirs.
void ptx_limit_wait(ptx_machine* machine, uint64_t ns) {
  machine->machine.most_idle_ns = ns;
}

void ptx_allocate(ptx_machine* machine, int rank, uint64_t address, uint64_t bytes,
                  const char* name) {
  auto made = std::make_unique<ptx::Allocation>();
  made->rank = rank;
  made->address = address;
  made->bytes = bytes;
  made->name = name;
  machine->machine.allocations[address] = std::move(made);
}

void ptx_release(ptx_machine* machine, uint64_t address) {
  machine->machine.allocations.erase(address);
}

void ptx_launch(ptx_machine* machine, int rank, const ptx::Kernel* kernel, const uint32_t* grid,
                const uint32_t* block, const void* params, uint64_t param_bytes,
                uint32_t dynamic_shared_bytes, int pdl) {
  ptx::Rank& owner = machine->machine.ranks[rank];
  auto launch = std::make_unique<ptx::Launch>();
  launch->machine = &machine->machine;
  launch->rank = rank;
  launch->number = owner.num_launches++;
  launch->kernel = kernel;
  launch->touched.resize(kernel->num_sites);
  std::copy(grid, grid + 3, launch->grid.begin());
  std::copy(block, block + 3, launch->block.begin());
  const auto* bytes = static_cast<const unsigned char*>(params);
  launch->params.assign(bytes, bytes + param_bytes);
  launch->shared_bytes = kernel->shared_bytes + dynamic_shared_bytes;
  launch->most_resident_ctas = machine->machine.most_resident_ctas;
  launch->pdl = pdl != 0;
  launch->ctas_without_dependents = launch->num_ctas();
  if (!owner.stream.empty()) launch->before = owner.stream.back().get();
  owner.stream.push_back(std::move(launch));
}

// Until every stream is empty.
const char* ptx_run(ptx_machine* machine) {
  return guarded(machine, [&] { ptx::run(machine->machine); });
}

const char* ptx_message(const ptx_machine* machine) {
  return machine->message.c_str();
}

const char* ptx_host(ptx_machine* machine, int rank, uint64_t address, uint64_t bytes, int writes) {
  return guarded(machine, [&] {
    if (ptx::kRaces) ptx::races::on_host(machine->machine, rank, address, bytes, writes != 0);
  });
}

}  // extern "C"

#include "virtual_time.h"
