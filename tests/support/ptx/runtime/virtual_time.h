// What happens in virtual time (clock.h). machine.cpp includes this file at its end.
#pragma once

#include "machine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

namespace ptx::clocks {

namespace {

constexpr uint64_t kLineBytes = 128;  // of L1 and of a packet on the link
constexpr uint64_t kSectorBytes = 32;
constexpr uint64_t kCached = 2048;  // sectors of an SM's L1: 64 KiB
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
  return *thread.cta->clock.sm;
}

// ---- steps

double end_of(const Step* step) {
  return step == nullptr ? 0 : step->end;
}

const Step* later(const Step* one, const Step* other) {
  return end_of(other) > end_of(one) ? other : one;
}

const Step* keep(Machine& machine, const Step& step) {
  return &machine.clock.steps.emplace_back(step);
}

const Step* step_after(const Step* before, const Thread& thread, const char* kind, double begin,
                       double end, const Site* site) {
  return keep(*thread.machine,
              {before, kind, begin, end, site, thread.rank, thread.cta->number, thread.index});
}

// What begins now.
const Step* step_until(double end, const Thread& thread, const char* kind, const Site* site) {
  return step_after(thread.clock.last, thread, kind, thread.clock.now, end, site);
}

const Step* now_of(const Thread& thread) {
  return step_until(thread.clock.now, thread, "instructions", nullptr);
}

void wait(Thread& thread, const Step* step) {
  if (end_of(step) <= thread.clock.now) return;
  thread.clock.now = step->end;
  thread.clock.last = step;
}

// The thread does nothing else for so long.
void spend(Thread& thread, double ns, const char* kind, const Site* site) {
  wait(thread, step_until(thread.clock.now + ns, thread, kind, site));
}

void fill_registers(Thread& thread, const Step* step) {
  ThreadClock& clock = thread.clock;
  if (clock.num_defined != 0) clock.all_ready = std::max(clock.all_ready, step->end);
  for (int i = 0; i < clock.num_defined; ++i) clock.ready[clock.defined[i]] = step;
}

// ---- the ways of an access

// The rank whose memory it touches, unless that is the thread's own.
RankClock* peer_of(const Thread& thread, const Access& access) {
  const int owner = access.where->rank;
  return owner < 0 || owner == thread.rank ? nullptr : &thread.machine->ranks[owner].clock;
}

double round_trip(const Thread& thread, const RankClock* peer) {
  return peer != nullptr ? costs_of(thread).remote_ns : costs_of(thread).l2_ns;
}

// An address in which every allocation begins with a line, as the driver's do.
uint64_t device_address(const Thread& thread, const Access& access) {
  AllocationClock& clock = access.where->clock;
  if (clock.begin == 0) {
    uint64_t& end = machine_clock(thread).lines_end;
    clock.begin = end + kLineBytes;
    end += (access.where->bytes / kLineBytes + 3) * kLineBytes;
  }
  return clock.begin + access.address - access.where->address;
}

struct Traffic {
  double request = 0;  // bytes of what asks for it
  double bytes = 0;
  bool takes_place = false;  // of a line in flight
};

uint64_t set_of(uint64_t sector) {
  return (sector * 0x9E3779B97F4A7C15ULL >> 40) % kCached;
}

// What an access adds to the traffic: its sectors that the warp's instruction has not yet touched,
// and a header for each new line. Nothing that was touched is forgotten before the CTA ends: lanes
// of one instruction run far apart, and a line that was forgotten between two lanes would cost
// twice.
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
  if ((found.sectors & sector) != 0) return {};
  found.sectors |= sector;
  if (is_same) return {0, rounded, false};
  return {costs.header_bytes, costs.header_bytes + rounded, true};
}

// When it is there.
double fetch(Thread& thread, RankClock* peer, const Traffic& traffic) {
  Sm& sm = sm_of(thread);
  const double back = round_trip(thread, peer) / 2;
  double at = thread.clock.now;
  if (traffic.takes_place) at = std::max(at, sm.lines.free_at());
  if (peer == nullptr) {
    at += 2 * back;
  } else {
    RankClock& mine = rank_clock(thread);
    at = mine.egress.pass(at, traffic.request) + back;
    at = peer->egress.pass(at, traffic.bytes);
    at = mine.ingress.pass(at, traffic.bytes) + back;
  }
  at = sm.intake.pass(at, traffic.bytes);
  if (traffic.takes_place) sm.lines.take(at);
  return at;
}

// When a store is where others see it.
double fly(Thread& thread, RankClock* peer, const Traffic& traffic) {
  const double there = round_trip(thread, peer) / 2;
  const double left = sm_of(thread).port.pass(thread.clock.now, traffic.bytes);
  if (peer == nullptr) return left + there;
  const double sent = rank_clock(thread).egress.pass(left, traffic.bytes);
  return peer->ingress.pass(sent + there, traffic.bytes);
}

// ---- orders

void release(Thread& thread, Scope scope, const Site* site) {
  if (scope == Scope::kNone || scope == Scope::kCta) return;
  const Costs& costs = costs_of(thread);
  wait(thread, thread.clock.stored);
  spend(thread, scope == Scope::kSys ? costs.fence_sys_ns : costs.fence_gpu_ns, "fence", site);
}

void acquire(Thread& thread, Scope scope, const Site* site) {
  if (scope == Scope::kNone || scope == Scope::kCta) return;
  sm_of(thread).l1.clear();
  spend(thread, costs_of(thread).acquire_ns, "acquire", site);
}

void is_visible(Thread& thread, const Access& access, double at) {
  machine_clock(thread).words[access.address].visible =
      step_until(at, thread, "flight of a word", access.site);
}

// ---- accesses

const Step* loaded(const Thread& thread, const RankClock* peer, const Access& access, double at) {
  return step_until(at, thread, peer != nullptr ? "remote load" : "local load", access.site);
}

void load_weak(Thread& thread, const Access& access) {
  const bool is_wide = access.bytes == 16;
  if (is_wide) {
    const double free = thread.clock.loads.free_at();
    wait(thread, step_until(free, thread, "registers", access.site));
  }
  RankClock* peer = peer_of(thread, access);
  const uint64_t sector = device_address(thread, access) / kSectorBytes;
  auto& [cached, there] = sm_of(thread).l1[set_of(sector)];
  const bool is_new = std::exchange(cached, sector + 1) != sector + 1;
  if (is_new) there = fetch(thread, peer, traffic_of(thread, access));
  const double end = is_new ? there : std::max(thread.clock.now + costs_of(thread).l1_ns, there);
  fill_registers(thread, loaded(thread, peer, access, end));
  if (is_wide) thread.clock.loads.take(end);
}

// A load that may be waiting for another thread's word. If the word is on its way, the thread asks
// again and again, each time after the answer.
const Step* load_ordered(Thread& thread, const Access& access) {
  RankClock* peer = peer_of(thread, access);
  const double end = fetch(thread, peer, traffic_of(thread, access));
  const auto& words = machine_clock(thread).words;
  const auto found = words.find(access.address);
  const Step* visible = found == words.end() ? nullptr : found->second.visible;
  const double trip = round_trip(thread, peer);
  const double late = end_of(visible) - (end - trip / 2);
  if (late <= 0) return loaded(thread, peer, access, end);
  const double turn = trip + costs_of(thread).issue_ns;
  const double polled = end + turn * std::ceil(late / turn - kRounding);
  return step_after(visible, thread, "poll", visible->end, polled, access.site);
}

void store(Thread& thread, const Access& access) {
  RankClock* peer = peer_of(thread, access);
  const double at = fly(thread, peer, traffic_of(thread, access));
  const char* kind = peer != nullptr ? "remote store acknowledged" : "local store acknowledged";
  const double end = at + round_trip(thread, peer) / 2;
  thread.clock.stored = later(thread.clock.stored, step_until(end, thread, kind, access.site));
  if (access.site->order != Order::kWeak) is_visible(thread, access, at);
  MachineClock& machine = machine_clock(thread);
  const auto place = machine.mirrors.upper_bound(access.address);
  if (place == machine.mirrors.end() || access.address < place->second.stored) return;
  const uint64_t also = place->second.also + access.address - place->second.stored;
  machine.mirrored.push_back({access.address, also, access.bytes});
}

// Leaves when a release would, while the thread goes on.
void store_async(Thread& thread, const Access& access) {
  const double now = thread.clock.now;
  const Step* last = thread.clock.last;
  release(thread, access.site->scope, access.site);
  store(thread, access);
  thread.clock.now = now;
  thread.clock.last = last;
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

const Step* atomic(Thread& thread, const Access& access) {
  const Costs& costs = costs_of(thread);
  RankClock* peer = peer_of(thread, access);
  const double arrives = fly(thread, peer, {0, costs.header_bytes + costs.granule_bytes, false});
  double& busy = machine_clock(thread).words[access.address].busy;
  const double begin = std::max(arrives, busy);
  busy = begin + costs.atomic_gap_ns;
  const double done = begin + (costs.atomic_ns - costs.l2_ns);
  is_visible(thread, access, done);
  const double end = done + round_trip(thread, peer) / 2;
  const Step* step = step_until(end, thread, "atomic", access.site);
  thread.clock.stored = later(thread.clock.stored, step);
  return step;
}

// ---- CTAs and threads

void begin_cta(Thread& thread) {
  const Launch& launch = *thread.launch;
  CtaClock& cta = thread.cta->clock;
  std::vector<Sm>& sms = rank_clock(thread).sms;
  const auto least = std::min_element(sms.begin(), sms.end(), [](const Sm& a, const Sm& b) {
    return std::tie(a.ctas, a.freed) < std::tie(b.ctas, b.freed);
  });
  cta.sm = &*least;
  if (least->ctas++ == 0) least->l1.clear();
  const int threads_per_sm = static_cast<int>(costs_of(thread).threads_per_sm);
  const int places = std::max(1, threads_per_sm / static_cast<int>(launch.num_threads()));
  const bool had_to_wait = least->ctas >= places && thread.cta->number >= places * sms.size();
  const double begin = end_of(launch.clock.begin);
  const double end = std::max(begin, had_to_wait ? least->freed : 0.0);
  cta.begin = step_after(launch.clock.begin, thread, "launch", begin, end, nullptr);
}

void change_active(Thread& thread, int by) {
  if (thread.lane != 0) return;
  Sm& sm = sm_of(thread);
  const Costs& costs = costs_of(thread);
  sm.active_warps += by;
  sm.issue_ns[0] = std::max(costs.issue_ns, costs.crowded_issue_ns * sm.active_warps);
  sm.issue_ns[1] = sm.issue_ns[0] * costs.slow_instructions;
}

// Warps of one time run in an order that favours no rank and no CTA.
uint32_t order_of(const Thread& thread) {
  const uint64_t warp = (static_cast<uint64_t>(thread.rank) << 40) ^
                        (static_cast<uint64_t>(thread.cta->number) << 8) ^
                        (thread.index / kWarpThreads);
  return static_cast<uint32_t>((warp + 1) * 0x9E3779B97F4A7C15ULL >> 32 & ~31U) | thread.lane;
}

bool is_later(const Thread* a, const Thread* b) {
  return std::tie(a->clock.now, a->clock.order, a->rank, a->cta->number) >
         std::tie(b->clock.now, b->clock.order, b->rank, b->cta->number);
}

}  // namespace

size_t Pipe::first_free(size_t bin) {
  size_t found = bin;
  while (found < bins_.size() && bins_[found].full != 0) found += bins_[found].full;
  while (bin < found) {
    const size_t after = bin + bins_[bin].full;
    bins_[bin].full = static_cast<uint32_t>(found - bin);
    bin = after;
  }
  if (found >= bins_.size()) bins_.resize(found + 256);
  return found;
}

double Pipe::pass(double from, double bytes) {
  const double whole = kBinNs * rate_;
  double left = bytes;
  double end = from + bytes / rate_;
  auto bin = static_cast<size_t>(from / kBinNs);
  while (left > 0) {
    bin = first_free(bin);
    float& used = bins_[bin].used;
    const double taken = std::min(left, whole - used);
    used += static_cast<float>(taken);
    left -= taken;
    end = std::max(end, bin * kBinNs + used / rate_);
    if (used >= whole - 0.5) bins_[bin].full = 1;
  }
  return end;
}

void on_late(Thread& thread, Class kind, const uint16_t* uses, int num_uses) {
  ThreadClock& clock = thread.clock;
  const Step* latest = nullptr;
  for (int i = 0; i < num_uses; ++i) latest = later(latest, clock.ready[uses[i]]);
  const bool only_computes = kind == Class::kAlu || kind == Class::kSlow;
  if (!only_computes) wait(thread, latest);
  for (int i = 0; i < clock.num_defined; ++i) {
    clock.ready[clock.defined[i]] = only_computes ? latest : nullptr;
  }
}

void on_access(Thread& thread, const Access& access) {
  const Site* site = access.site;
  if (access.space != Space::kGlobal) {
    const double end = thread.clock.now + costs_of(thread).shared_ns;
    if (access.reads) fill_registers(thread, step_until(end, thread, "shared load", site));
    return;
  }
  const Order order = site->order;
  const bool releases = order == Order::kRelease || order == Order::kAcqRel || order == Order::kSc;
  const bool acquires = order == Order::kAcquire || order == Order::kAcqRel || order == Order::kSc;
  if (access.reads && !access.writes && order == Order::kWeak) return load_weak(thread, access);
  if (site->kind == Kind::kAsyncStore) return store_async(thread, access);
  if (access.writes && releases) release(thread, site->scope, site);
  if (!access.reads) return store(thread, access);
  const Step* step = access.writes ? atomic(thread, access) : load_ordered(thread, access);
  if (!acquires) return fill_registers(thread, step);
  wait(thread, step);
  acquire(thread, site->scope, site);
}

// The bytes come as packets of a line. How many an SM may have in flight is not known: any number.
void on_copy(Thread& thread, const Access& from, CopyBarrier& barrier) {
  const double headers = (from.bytes + kLineBytes - 1) / kLineBytes * costs_of(thread).header_bytes;
  RankClock* peer = peer_of(thread, from);
  const double end = fetch(thread, peer, {headers, from.bytes + headers, false});
  barrier.clock.latest = later(barrier.clock.latest, loaded(thread, peer, from, end));
}

void on_arrival(Thread& thread, CopyBarrier& barrier) {
  barrier.clock.latest = later(barrier.clock.latest, now_of(thread));
}

void on_phase_end(CopyBarrier& barrier) {
  barrier.clock.ended[barrier.phase & 1U] = barrier.clock.latest;
  barrier.clock.latest = nullptr;
}

void on_phase_asked(Thread& thread, CopyBarrier& barrier, uint32_t parity, bool ended,
                    const Site& site) {
  if (ended) wait(thread, barrier.clock.ended[parity]);
  spend(thread, costs_of(thread).shared_ns, "shared load", &site);
}

void on_fence(Thread& thread, const Site& site) {
  if (site.order != Order::kAcquire) release(thread, site.scope, &site);
  if (site.order != Order::kRelease) acquire(thread, site.scope, &site);
}

// Who meets goes on together, when the last has come.
void on_meeting(Thread* const* threads, int count, const Site& site) {
  const Costs& costs = costs_of(*threads[0]);
  const bool is_barrier = site.kind == Kind::kBarrier;
  const bool orders_memory = is_barrier || site.kind == Kind::kWarpBarrier;
  const double of_warp = orders_memory ? costs.warp_barrier_ns : costs.shuffle_ns;
  const Thread* last = *std::max_element(
      threads, threads + count,
      [](const Thread* a, const Thread* b) { return a->clock.now < b->clock.now; });
  const double end = last->clock.now + (is_barrier ? costs.barrier_ns : of_warp);
  const Step* met = step_until(end, *last, is_barrier ? "barrier" : "warp meeting", &site);
  const Step* stored = nullptr;
  for (int i = 0; i < count; ++i) stored = later(stored, threads[i]->clock.stored);
  for (int i = 0; i < count; ++i) {
    threads[i]->clock.now = end;
    threads[i]->clock.last = met;
    if (orders_memory) threads[i]->clock.stored = stored;
  }
}

void on_thread_start(Thread& thread) {
  CtaClock& cta = thread.cta->clock;
  ThreadClock& clock = thread.clock;
  if (cta.sm == nullptr) begin_cta(thread);
  clock.last = cta.begin;
  clock.now = cta.begin->end;
  clock.issue_ns = cta.sm->issue_ns;
  clock.order = order_of(thread);
  clock.loads = Places(costs_of(thread).thread_loads_in_flight);
  clock.ready.resize(thread.launch->kernel->num_registers);
  change_active(thread, 1);
}

void on_thread_end(Thread& thread) {
  LaunchClock& launch = thread.launch->clock;
  change_active(thread, -1);
  if (!thread.cta->lets_dependents_start) on_grid_launch(thread);
  wait(thread, thread.clock.stored);
  launch.end = later(launch.end, now_of(thread));
  if (thread.cta->live == 1) {
    Sm& sm = sm_of(thread);
    --sm.ctas;
    sm.freed = std::max(sm.freed, thread.clock.now);
    thread.cta->clock.touched = {};
  }
  thread.clock.ready = {};
}

void on_launch_start(Launch& launch) {
  const RankClock& rank = launch.machine->ranks[launch.rank].clock;
  const Step* before = launch.before != nullptr ? launch.before->clock.dependents : rank.end;
  const double begin = end_of(before);
  const double end = begin + launch.machine->clock.costs.launch_ns;
  launch.clock.begin =
      keep(*launch.machine, {before, "launch", begin, end, nullptr, launch.rank, 0, 0});
}

void on_launch_end(Launch& launch) {
  launch.machine->ranks[launch.rank].clock.end = launch.clock.end;
  launch.machine->clock.ended.push_back(launch.clock.end);
}

void on_grid_launch(Thread& thread) {
  LaunchClock& launch = thread.launch->clock;
  CtaClock& cta = thread.cta->clock;
  if (cta.let_dependents_start && thread.cta->lets_dependents_start) return;
  cta.let_dependents_start = true;
  launch.dependents = later(launch.dependents, now_of(thread));
}

void on_grid_wait(Thread& thread) {
  if (!thread.launch->pdl) return;
  const Step* before = rank_clock(thread).end;
  const double begin = end_of(before);
  const double end = begin + costs_of(thread).pdl_ns;
  wait(thread, step_after(before, thread, "kernel before", begin, end, thread.waits_at));
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

// Time begins at 0 for all ranks; streams are empty.
void ptx_clock_begin(ptx_machine* machine, const double* costs, const ptx::clocks::Mirror* mirrors,
                     uint64_t num_mirrors) {
  ptx::Machine& made = machine->machine;
  const uint64_t lines_end = made.clock.lines_end;  // allocations stay where they are
  made.clock = {};
  made.clock.lines_end = lines_end;
  std::memcpy(&made.clock.costs, costs, sizeof(ptx::clocks::Costs));
  for (const auto* each = mirrors; each != mirrors + num_mirrors; ++each) {
    made.clock.mirrors[each->stored + each->bytes] = *each;
  }
  for (ptx::Rank& rank : made.ranks) rank.clock = ptx::RankClock(made.clock.costs);
}

// The end of a launch, in the order of their ends; null: there are no more.
const ptx::clocks::Step* ptx_clock_end(ptx_machine* machine, uint64_t number) {
  const auto& ended = machine->machine.clock.ended;
  return number < ended.size() ? ended[number] : nullptr;
}

}  // extern "C"
