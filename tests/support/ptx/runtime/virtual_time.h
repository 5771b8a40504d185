// What happens in virtual time (clock.h). machine.cpp includes this file at its end.
#pragma once

#include "machine.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ptx::clocks {

namespace {

constexpr uint64_t kLineBytes = 128;  // of L1 and of a packet on the link
constexpr uint64_t kSectorBytes = 32;
constexpr size_t kCached = 2048;  // sectors of an SM's L1 that are remembered: 64 KiB
constexpr double kAheadNs = 250.0;
constexpr double kRounding = 1e-6;  // of a number of turns

MachineClock& machine_clock(const Thread& thread) {
  return thread.machine->clock;
}
const Costs& costs_of(const Thread& thread) {
  return thread.machine->clock.costs;
}
RankClock& rank_clock(const Thread& thread) {
  return thread.machine->ranks[thread.rank].clock;
}
Sm& sm_of(const Thread& thread) {
  return rank_clock(thread).sms[thread.cta->clock.sm];
}

Step step_of(const Thread& thread, StepKind kind, double begin, double end, const Site* site) {
  Step step;
  step.before = thread.clock.step;
  step.kind = kind;
  step.begin = begin;
  step.end = end;
  step.site = site;
  step.kernel = thread.launch->kernel->name;
  step.rank = thread.rank;
  step.launch = thread.launch->number;
  step.cta = thread.cta->number;
  step.thread = thread.index;
  return step;
}

uint32_t keep(MachineClock& clock, const Step& step) {
  if (!clock.keeps_steps) return 0;
  clock.steps.push_back(step);
  return static_cast<uint32_t>(clock.steps.size() - 1);
}

void take(Thread& thread, const Step& step) {
  thread.clock.now = step.end;
  thread.clock.step = keep(machine_clock(thread), step);
}

// The thread does nothing else for so long.
void spend(Thread& thread, double ns, StepKind kind, const Site* site) {
  const double now = thread.clock.now;
  take(thread, step_of(thread, kind, now, now + ns, site));
}

void wait(Thread& thread, const Moment& moment) {
  if (moment.at > thread.clock.now) take(thread, moment.step);
}

void raise(Moment& latest, const Moment& other) {
  if (other.at > latest.at) latest = other;
}

void set_late(Thread& thread, Step step) {
  ThreadClock& clock = thread.clock;
  if (clock.num_defined == 0) return;
  clock.late.push_back(Moment{step.end, step});
  clock.all_ready = std::max(clock.all_ready, step.end);
  for (int i = 0; i < clock.num_defined; ++i) {
    clock.late_registers[clock.defined[i]] = static_cast<uint32_t>(clock.late.size());
  }
}

// An address in which every allocation begins with a line, as the driver's do, and with another set
// of the caches.
uint64_t device_address(const Thread& thread, const Access& access) {
  AllocationClock& clock = access.where->clock;
  if (clock.begin == 0) {
    uint64_t& end = machine_clock(thread).lines_end;
    clock.begin = end + kLineBytes;
    end += (access.where->bytes / kLineBytes + 3) * kLineBytes;
  }
  return clock.begin + access.address - access.where->address;
}

// Rows of different ranks have the same offset: a set by the low bits would be the same for all.
template <size_t kSets>
size_t set_of(uint64_t key) {
  return (key * 0x9E3779B97F4A7C15ULL >> 40) % kSets;
}

// What an access adds to the traffic: its sectors that the warp's instruction has not yet touched,
// and a header for each new line. Nothing that was touched is forgotten before the CTA ends: lanes
// of one instruction run far apart, and a line that was forgotten between two lanes would cost
// twice.
struct Traffic {
  bool is_new_line = true;
  double bytes = 0;
};

Traffic traffic_of(Thread& thread, const Access& access) {
  const Costs& costs = costs_of(thread);
  const double rounded = std::max<double>(access.bytes, costs.granule_bytes);
  const uint64_t address = device_address(thread, access);
  const uint64_t site = access.site - thread.launch->kernel->sites;
  const uint64_t warp = thread.index / kWarpThreads;
  Touched& found = thread.cta->clock.touched[(address / kLineBytes << 21) | (site << 5) | warp];
  const uint32_t sector = 1U << (address % kLineBytes / kSectorBytes);
  const uint32_t lane = 1U << thread.lane;
  const bool is_same = found.sectors != 0 && (found.lanes & lane) == 0;
  if (!is_same) found = {};
  found.lanes |= lane;
  if ((found.sectors & sector) != 0) return {false, 0};
  found.sectors |= sector;
  return {!is_same, (is_same ? 0 : costs.header_bytes) + rounded};
}

// ---- the ways of an access; each returns when it is done

// When there is a place for one more line in flight.
double in_flight_from(Thread& thread) {
  const Sm& sm = sm_of(thread);
  return std::max(thread.clock.now, sm.lines[sm.next_line]);
}

void is_in_flight_until(Thread& thread, double end) {
  Sm& sm = sm_of(thread);
  sm.lines[sm.next_line] = end;
  sm.next_line = (sm.next_line + 1) % sm.lines.size();
}

double fetch_local(Thread& thread, const Traffic& traffic) {
  const Costs& costs = costs_of(thread);
  const double begin = traffic.is_new_line ? in_flight_from(thread) : thread.clock.now;
  const double end =
      sm_of(thread).intake.pass(begin + costs.l2_ns, traffic.bytes, costs.sm_bytes_per_ns);
  if (traffic.is_new_line) is_in_flight_until(thread, end);
  return end;
}

double fetch_remote(Thread& thread, int owner, const Traffic& traffic) {
  const Costs& costs = costs_of(thread);
  RankClock& mine = rank_clock(thread);
  RankClock& other = thread.machine->ranks[owner].clock;
  const double half = costs.remote_ns / 2;
  const double rate = costs.link_bytes_per_ns;
  const double begin = traffic.is_new_line ? in_flight_from(thread) : thread.clock.now;
  const double request = traffic.is_new_line ? costs.header_bytes : 0;
  const double asked = mine.egress.pass(begin, request, rate) + half;
  const double sent = other.egress.pass(asked, traffic.bytes, rate);
  const double arrived = mine.ingress.pass(sent, traffic.bytes, rate) + half;
  const double end = sm_of(thread).intake.pass(arrived, traffic.bytes, costs.sm_bytes_per_ns);
  if (traffic.is_new_line) is_in_flight_until(thread, end);
  return end;
}

// When a store is where others see it.
double fly(Thread& thread, bool is_remote, int owner, const Traffic& traffic) {
  const Costs& costs = costs_of(thread);
  const double now = thread.clock.now;
  const double left = sm_of(thread).port.pass(now, traffic.bytes, costs.sm_bytes_per_ns);
  if (!is_remote) return left + costs.l2_ns / 2;
  const double rate = costs.link_bytes_per_ns;
  const double sent = rank_clock(thread).egress.pass(left, traffic.bytes, rate);
  RankClock& other = thread.machine->ranks[owner].clock;
  return other.ingress.pass(sent + costs.remote_ns / 2, traffic.bytes, rate);
}

double way_back(const Costs& costs, bool is_remote) {
  return (is_remote ? costs.remote_ns : costs.l2_ns) / 2;
}

void is_stored(Thread& thread, const Step& step, bool is_remote) {
  const Moment moment{step.end, step};
  raise(thread.clock.stored, moment);
  if (!is_remote) raise(thread.clock.local_stored, moment);
}

void is_visible(Thread& thread, const Access& access, double at) {
  Word& word = machine_clock(thread).words[access.address];
  word.visible = {at, step_of(thread, StepKind::kFlight, thread.clock.now, at, access.site)};
  word.carried = thread.clock.stored;
}

void release(Thread& thread, Scope scope, const Site* site) {
  if (scope == Scope::kNone || scope == Scope::kCta) return;
  const Costs& costs = costs_of(thread);
  const bool all = scope == Scope::kSys || costs.gpu_fence_waits_remote != 0;
  wait(thread, all ? thread.clock.stored : thread.clock.local_stored);
  spend(thread, scope == Scope::kSys ? costs.fence_sys_ns : costs.fence_gpu_ns, StepKind::kFence,
        site);
}

void acquire(Thread& thread, Scope scope, const Site* site) {
  raise(thread.clock.stored, thread.clock.seen);
  if (scope == Scope::kNone || scope == Scope::kCta) return;
  ++sm_of(thread).l1_epoch;
  spend(thread, costs_of(thread).acquire_ns, StepKind::kAcquire, site);
}

bool is_remote(const Thread& thread, const Access& access) {
  return access.where != nullptr && access.where->rank >= 0 && access.where->rank != thread.rank;
}

void on_shared(Thread& thread, const Access& access) {
  if (!access.reads) return;
  const double now = thread.clock.now;
  set_late(thread,
           step_of(thread, StepKind::kShared, now, now + costs_of(thread).shared_ns, access.site));
}

// Registers for wide loads may be few.
void find_registers(Thread& thread, const Site* site) {
  ThreadClock& clock = thread.clock;
  if (clock.loads.empty()) return;
  const double free = clock.loads[clock.next_load];
  if (free > clock.now) spend(thread, free - clock.now, StepKind::kRegisters, site);
}

void load_weak(Thread& thread, const Access& access) {
  const bool is_wide = access.bytes == 16;
  if (is_wide) find_registers(thread, access.site);
  Sm& sm = sm_of(thread);
  const Costs& costs = costs_of(thread);
  const bool remote = is_remote(thread, access);
  const double now = thread.clock.now;
  const uint64_t sector = device_address(thread, access) / kSectorBytes;
  const uint64_t tag = sector ^ sm.l1_epoch << 44;
  Sm::Cached& cached = sm.l1[set_of<kCached>(sector)];
  double end = 0;
  if (cached.line == tag) {
    end = std::max(now + costs.l1_ns, cached.at);
  } else {
    const Traffic traffic = traffic_of(thread, access);
    end = remote ? fetch_remote(thread, access.where->rank, traffic) : fetch_local(thread, traffic);
    cached = {tag, end};
  }
  Step step =
      step_of(thread, remote ? StepKind::kRemoteLoad : StepKind::kLocalLoad, now, end, access.site);
  step.queued = std::max(0.0, end - now - (remote ? costs.remote_ns : costs.l2_ns));
  set_late(thread, step);
  if (is_wide && !thread.clock.loads.empty()) {
    thread.clock.loads[thread.clock.next_load] = end;
    thread.clock.next_load = (thread.clock.next_load + 1) % thread.clock.loads.size();
  }
}

// A load that may be waiting for another thread's word. If the word is on its way, the thread asks
// again and again, each time after the answer.
Step load_ordered(Thread& thread, const Access& access) {
  MachineClock& machine = machine_clock(thread);
  const bool remote = is_remote(thread, access);
  const double now = thread.clock.now;
  const Traffic traffic = traffic_of(thread, access);
  double end =
      remote ? fetch_remote(thread, access.where->rank, traffic) : fetch_local(thread, traffic);
  Step step =
      step_of(thread, remote ? StepKind::kRemoteLoad : StepKind::kLocalLoad, now, end, access.site);
  const auto found = machine.words.find(access.address);
  if (found == machine.words.end()) return step;
  const Word& word = found->second;
  raise(thread.clock.seen, word.carried);
  const double back = way_back(machine.costs, remote);
  if (word.visible.at > end - back) {
    const double turn = 2 * back + machine.costs.issue_ns;
    end += turn * std::ceil((word.visible.at - (end - back)) / turn - kRounding);
    step.kind = StepKind::kPoll;
    step.before = keep(machine, word.visible.step);
    step.begin = word.visible.at;
    step.end = end;
  }
  return step;
}

void note_mirrors(MachineClock& clock, const Access& access) {
  for (const Mirror& each : clock.mirrors) {
    const uint64_t distance = access.address - each.stored;  // wraps below
    const uint64_t peer = distance / each.stored_stride;
    const uint64_t offset = distance % each.stored_stride;
    if (peer >= each.count || offset + access.bytes > each.bytes) continue;
    const uint64_t to = each.also + peer * each.also_stride + offset;
    clock.mirrored.push_back({access.address, to, access.bytes});
  }
}

void store(Thread& thread, const Access& access) {
  const bool is_ordered = access.site->order != Order::kWeak;
  const bool remote = is_remote(thread, access);
  const Costs& costs = costs_of(thread);
  const int owner = remote ? access.where->rank : thread.rank;
  const double at = fly(thread, remote, owner, traffic_of(thread, access));
  const double now = thread.clock.now;
  const double back = way_back(costs, remote);
  Step step = step_of(thread, remote ? StepKind::kRemoteStore : StepKind::kLocalStore, now,
                      at + back, access.site);
  step.queued = std::max(0.0, at - now - back);
  if (is_ordered) is_visible(thread, access, at);
  is_stored(thread, step, remote);
  note_mirrors(machine_clock(thread), access);
}

// Leaves when a release would, while the thread goes on.
void store_async(Thread& thread, const Access& access) {
  const double now = thread.clock.now;
  const uint32_t step = thread.clock.step;
  release(thread, access.site->scope, access.site);
  store(thread, access);
  thread.clock.now = now;
  thread.clock.step = step;
}

// Before the next thread runs: what has been stored is in memory.
void mirror(MachineClock& clock) {
  for (const auto& [address, to, bytes] : clock.mirrored) {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(address), bytes);
    const auto found = clock.words.find(address);
    if (found == clock.words.end()) continue;
    clock.words[to] = found->second;  // nobody reads the other one
    clock.words.erase(address);
  }
  clock.mirrored.clear();
}

Step atomic(Thread& thread, const Access& access) {
  const Costs& costs = costs_of(thread);
  const bool remote = is_remote(thread, access);
  const int owner = remote ? access.where->rank : thread.rank;
  const double now = thread.clock.now;
  const Traffic traffic{true, costs.header_bytes + costs.granule_bytes};
  const double arrives = fly(thread, remote, owner, traffic);
  Word& word = machine_clock(thread).words[access.address];
  const double begin = std::max(arrives, word.busy);
  word.busy = begin + costs.atomic_gap_ns;
  raise(thread.clock.seen, word.carried);
  const Moment carried = word.carried;
  const double extra = costs.atomic_ns - costs.l2_ns;
  const double end = begin + extra + way_back(costs, remote);
  const Step step = step_of(thread, StepKind::kAtomic, now, end, access.site);
  is_visible(thread, access, begin + extra);
  raise(machine_clock(thread).words[access.address].carried, carried);
  is_stored(thread, step, remote);
  return step;
}

void begin_cta(Thread& thread) {
  Launch& launch = *thread.launch;
  CtaClock& cta = thread.cta->clock;
  RankClock& rank = rank_clock(thread);
  const Costs& costs = costs_of(thread);
  if (rank.sms.empty()) {
    rank.sms.resize(static_cast<size_t>(costs.num_sms));
    for (Sm& sm : rank.sms) {
      sm.lines.resize(static_cast<size_t>(costs.sm_lines_in_flight));
    }
  }
  const auto least =
      std::min_element(rank.sms.begin(), rank.sms.end(), [](const Sm& a, const Sm& b) {
        return a.ctas != b.ctas ? a.ctas < b.ctas : a.freed < b.freed;
      });
  cta.sm = static_cast<int>(least - rank.sms.begin());
  if (least->l1.empty()) least->l1.resize(kCached);
  if (least->ctas++ == 0) ++least->l1_epoch;
  const int places =
      std::max(1, static_cast<int>(costs.threads_per_sm) / static_cast<int>(launch.num_threads()));
  const bool had_to_wait = least->ctas >= places && thread.cta->number >= places * rank.sms.size();
  cta.begin = std::max(launch.clock.begin, had_to_wait ? least->freed : 0.0);
}

void change_active(Thread& thread, int by) {
  if (thread.lane != 0) return;
  Sm& sm = sm_of(thread);
  const Costs& costs = costs_of(thread);
  sm.active_warps += by;
  sm.issue_ns[0] = std::max(costs.issue_ns, costs.crowded_issue_ns * sm.active_warps);
  sm.issue_ns[1] = sm.issue_ns[0] * costs.slow_instructions;
}

// Who meets goes on together, when the last has come.
void join(Thread* const* threads, int count, double ns, StepKind kind, const Site* site) {
  const Thread* last = threads[0];
  Moment stored;
  Moment local_stored;
  Moment seen;
  for (int i = 0; i < count; ++i) {
    const ThreadClock& clock = threads[i]->clock;
    if (clock.now > last->clock.now) last = threads[i];
    raise(stored, clock.stored);
    raise(local_stored, clock.local_stored);
    raise(seen, clock.seen);
  }
  const double now = last->clock.now;
  const Step step = step_of(*last, kind, now, now + ns, site);
  const uint32_t number = keep(machine_clock(*last), step);
  const bool orders_memory = kind == StepKind::kBarrier || site->kind == Kind::kWarpBarrier;
  for (int i = 0; i < count; ++i) {
    ThreadClock& clock = threads[i]->clock;
    clock.now = step.end;
    clock.step = number;
    if (!orders_memory) continue;
    clock.stored = stored;
    clock.local_stored = local_stored;
    clock.seen = seen;
  }
}

// Warps of one time run in an order that favours no rank and no CTA.
uint32_t order_of(const Thread& thread) {
  const uint64_t warp = (static_cast<uint64_t>(thread.rank) << 40) ^
                        (static_cast<uint64_t>(thread.cta->number) << 8) ^
                        (thread.index / kWarpThreads);
  return static_cast<uint32_t>((warp + 1) * 0x9E3779B97F4A7C15ULL >> 32 & ~31U) | thread.lane;
}

bool is_later(const Thread* a, const Thread* b) {
  if (a->clock.now != b->clock.now) return a->clock.now > b->clock.now;
  if (a->clock.order != b->clock.order) return a->clock.order > b->clock.order;
  if (a->rank != b->rank) return a->rank > b->rank;
  return a->cta->number > b->cta->number;
}

}  // namespace

size_t Pipe::first_free(size_t bin) {
  if (bin >= used_.size()) {
    used_.resize(bin + 256, 0.0F);
    for (size_t i = next_.size(); i < used_.size(); ++i) next_.push_back(static_cast<uint32_t>(i));
  }
  size_t found = bin;
  while (next_[found] != found)
    found = next_[found] < next_.size() ? next_[found] : first_free(next_[found]);
  while (next_[bin] != found) {
    const size_t after = next_[bin];
    next_[bin] = static_cast<uint32_t>(found);
    bin = after;
  }
  return found;
}

double Pipe::pass(double from, double bytes, double bytes_per_ns) {
  const double whole = kBinNs * bytes_per_ns;
  double left = bytes;
  double end = from + bytes / bytes_per_ns;
  auto bin = static_cast<size_t>(from / kBinNs);
  while (left > 0) {
    bin = first_free(bin);
    const double taken = std::min(left, whole - used_[bin]);
    used_[bin] += static_cast<float>(taken);
    left -= taken;
    end = std::max(end, bin * kBinNs + used_[bin] / bytes_per_ns);
    if (used_[bin] >= whole - 0.5) {
      first_free(bin + 1);  // so that it exists
      next_[bin] = static_cast<uint32_t>(bin + 1);
    }
  }
  return end;
}

void on_late(Thread& thread, Class kind, const uint16_t* uses, int num_uses) {
  ThreadClock& clock = thread.clock;
  if (clock.now >= clock.all_ready) {
    clock.late.clear();
    std::fill(clock.late_registers.begin(), clock.late_registers.end(), 0);
    return;
  }
  uint32_t latest = 0;
  for (int i = 0; i < num_uses; ++i) {
    const uint32_t number = clock.late_registers[uses[i]];
    if (number != 0 && (latest == 0 || clock.late[number - 1].at > clock.late[latest - 1].at)) {
      latest = number;
    }
  }
  const bool only_computes = kind == Class::kAlu || kind == Class::kSlow;
  if (latest != 0 && !only_computes) wait(thread, clock.late[latest - 1]);
  for (int i = 0; i < clock.num_defined; ++i) {
    clock.late_registers[clock.defined[i]] = only_computes ? latest : 0;
  }
}

void on_access(Thread& thread, const Access& access) {
  if (access.space != Space::kGlobal) return on_shared(thread, access);
  const Site* site = access.site;
  const Order order = site->order;
  const bool releases = order == Order::kRelease || order == Order::kAcqRel || order == Order::kSc;
  const bool acquires = order == Order::kAcquire || order == Order::kAcqRel || order == Order::kSc;
  if (access.reads && !access.writes && order == Order::kWeak) return load_weak(thread, access);
  if (site->kind == Kind::kAsyncStore) return store_async(thread, access);
  if (access.writes && releases) release(thread, site->scope, site);
  if (!access.reads) return store(thread, access);
  const Step step = access.writes ? atomic(thread, access) : load_ordered(thread, access);
  if (acquires) {
    wait(thread, {step.end, step});
    acquire(thread, site->scope, site);
  } else {
    set_late(thread, step);
  }
}

// The bytes come as packets of a line. How many an SM may have in flight is not known: any number.
void on_copy(Thread& thread, const Access& from, CopyBarrier& barrier) {
  const Costs& costs = costs_of(thread);
  const bool remote = is_remote(thread, from);
  const double now = thread.clock.now;
  const double headers = (from.bytes + kLineBytes - 1) / kLineBytes * costs.header_bytes;
  const double bytes = from.bytes + headers;
  double end = now + costs.l2_ns;
  if (remote) {
    RankClock& mine = rank_clock(thread);
    RankClock& other = thread.machine->ranks[from.where->rank].clock;
    const double rate = costs.link_bytes_per_ns;
    const double asked = mine.egress.pass(now, headers, rate) + costs.remote_ns / 2;
    const double sent = other.egress.pass(asked, bytes, rate);
    end = mine.ingress.pass(sent, bytes, rate) + costs.remote_ns / 2;
  }
  end = sm_of(thread).intake.pass(end, bytes, costs.sm_bytes_per_ns);
  Step step =
      step_of(thread, remote ? StepKind::kRemoteLoad : StepKind::kLocalLoad, now, end, from.site);
  step.queued = std::max(0.0, end - now - (remote ? costs.remote_ns : costs.l2_ns));
  raise(barrier.clock.latest, {end, step});
}

void on_arrival(Thread& thread, CopyBarrier& barrier) {
  const double now = thread.clock.now;
  raise(barrier.clock.latest, {now, step_of(thread, StepKind::kShared, now, now, nullptr)});
}

void on_phase_end(CopyBarrier& barrier) {
  barrier.clock.ended[barrier.phase & 1U] = barrier.clock.latest;
  barrier.clock.latest = {};
}

void on_phase_asked(Thread& thread, CopyBarrier& barrier, uint32_t parity, bool ended,
                    const Site& site) {
  if (ended) wait(thread, barrier.clock.ended[parity]);
  spend(thread, costs_of(thread).shared_ns, StepKind::kShared, &site);
}

void on_fence(Thread& thread, const Site& site) {
  if (site.order != Order::kAcquire) release(thread, site.scope, &site);
  if (site.order != Order::kRelease) acquire(thread, site.scope, &site);
}

void on_barrier(Thread* const* threads, int count) {
  join(threads, count, costs_of(*threads[0]).barrier_ns, StepKind::kBarrier, threads[0]->waits_at);
}

void on_warp(Thread* const* threads, int count, const Site& site) {
  const Costs& costs = costs_of(*threads[0]);
  const double ns = site.kind == Kind::kWarpBarrier ? costs.warp_barrier_ns : costs.shuffle_ns;
  join(threads, count, ns, StepKind::kWarp, &site);
}

void on_thread_start(Thread& thread) {
  CtaClock& cta = thread.cta->clock;
  const LaunchClock& launch = thread.launch->clock;
  if (cta.sm < 0) {
    begin_cta(thread);
    Step step = step_of(thread, StepKind::kStart, launch.begin, cta.begin, nullptr);
    step.before = launch.begin_step;
    cta.step = keep(machine_clock(thread), step);
  }
  thread.clock.now = cta.begin;
  thread.clock.step = cta.step;
  thread.clock.issue_ns = sm_of(thread).issue_ns;
  thread.clock.order = order_of(thread);
  thread.clock.loads.resize(static_cast<size_t>(costs_of(thread).thread_loads_in_flight));
  thread.clock.late_registers.resize(thread.launch->kernel->num_registers + 1);
  change_active(thread, 1);
}

void on_thread_end(Thread& thread) {
  LaunchClock& launch = thread.launch->clock;
  change_active(thread, -1);
  if (!thread.cta->lets_dependents_start) on_grid_launch(thread);
  wait(thread, thread.clock.stored);
  if (thread.clock.now > launch.end) {
    launch.end = thread.clock.now;
    launch.end_step = thread.clock.step;
  }
  if (thread.cta->live == 1) {
    Sm& sm = sm_of(thread);
    --sm.ctas;
    sm.freed = std::max(sm.freed, thread.clock.now);
    thread.cta->clock.touched = {};
  }
  thread.clock.late = {};
  thread.clock.late_registers = {};
}

void on_launch_start(Launch& launch) {
  const Costs& costs = launch.machine->clock.costs;
  RankClock& rank = launch.machine->ranks[launch.rank].clock;
  const bool overlaps = launch.before != nullptr;
  const LaunchClock* before = overlaps ? &launch.before->clock : nullptr;
  const double from = overlaps ? before->dependents : rank.end;
  Step step;
  step.before = overlaps ? before->dependents_step : rank.end_step;
  step.kind = StepKind::kStart;
  step.begin = from;
  step.end = from + costs.launch_ns;
  step.kernel = launch.kernel->name;
  step.rank = launch.rank;
  step.launch = launch.number;
  launch.clock.begin = step.end;
  launch.clock.begin_step = keep(launch.machine->clock, step);
}

void on_launch_end(Launch& launch) {
  RankClock& rank = launch.machine->ranks[launch.rank].clock;
  const LaunchClock& clock = launch.clock;
  rank.end = clock.end;
  rank.end_step = clock.end_step;
  launch.machine->clock.ended.push_back(
      {launch.rank, launch.number, clock.begin, clock.end, clock.end_step});
}

void on_grid_launch(Thread& thread) {
  LaunchClock& launch = thread.launch->clock;
  CtaClock& cta = thread.cta->clock;
  if (cta.let_dependents_start && thread.cta->lets_dependents_start) return;
  cta.let_dependents_start = true;
  if (thread.clock.now > launch.dependents) {
    launch.dependents = thread.clock.now;
    launch.dependents_step = thread.clock.step;
  }
}

void on_grid_wait(Thread& thread) {
  const RankClock& rank = rank_clock(thread);
  const double end = rank.end + costs_of(thread).pdl_ns;
  if (!thread.launch->pdl || end <= thread.clock.now) return;
  Step step = step_of(thread, StepKind::kGridWait, rank.end, end, thread.waits_at);
  step.before = rank.end_step;
  take(thread, step);
}

uint64_t timer_ns(const Thread& thread) {
  return static_cast<uint64_t>(thread.clock.now);
}

bool is_ahead(const Thread& thread) {
  return thread.clock.now > machine_clock(thread).horizon;
}

Thread* pick(Machine& machine, std::vector<Thread*>& ready) {
  MachineClock& clock = machine.clock;
  mirror(clock);
  clock.heap_size = std::min(clock.heap_size, ready.size());
  while (clock.heap_size < ready.size()) {
    ++clock.heap_size;
    std::push_heap(ready.begin(), ready.begin() + static_cast<ptrdiff_t>(clock.heap_size),
                   is_later);
  }
  std::pop_heap(ready.begin(), ready.end(), is_later);
  Thread* thread = ready.back();
  ready.pop_back();
  clock.heap_size = ready.size();
  clock.horizon = (ready.empty() ? thread->clock.now : ready.front()->clock.now) + kAheadNs;
  return thread;
}

}  // namespace ptx::clocks

// ---- C functions that critical_path.py calls

extern "C" {

const char* ptx_clock_costs() {
#define PTX_COST(name) #name " "
  return PTX_COSTS(PTX_COST);
#undef PTX_COST
}

void ptx_clock_set(ptx_machine* machine, const double* costs) {
  std::memcpy(&machine->machine.clock.costs, costs, sizeof(ptx::clocks::Costs));
}

void ptx_clock_keep_steps(ptx_machine* machine, int keeps) {
  machine->machine.clock.keeps_steps = keeps != 0;
}

void ptx_clock_mirror(ptx_machine* machine, const ptx::clocks::Mirror* mirror) {
  machine->machine.clock.mirrors.push_back(*mirror);
}

// Time begins again, at 0 for all ranks; streams are empty.
void ptx_clock_restart(ptx_machine* machine) {
  ptx::MachineClock& clock = machine->machine.clock;
  for (ptx::Rank& rank : machine->machine.ranks) rank.clock = {};
  clock.words.clear();
  clock.steps.resize(1);
  clock.ended.clear();
}

const ptx::clocks::Step* ptx_clock_steps(ptx_machine* machine, uint64_t* count) {
  *count = machine->machine.clock.steps.size();
  return machine->machine.clock.steps.data();
}

const ptx::EndedLaunch* ptx_clock_launches(ptx_machine* machine, uint64_t* count) {
  *count = machine->machine.clock.ended.size();
  return machine->machine.clock.ended.data();
}

}  // extern "C"
