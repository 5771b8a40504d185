// What threads, copies and hosts do, as the detector of races (races.h) is told it. machine.h
// includes this file.
#pragma once

namespace ptx::races {

// What a rank's next kernel knows when it starts.
inline Known known_at_start(RankRaces& rank, bool pdl) {
  const Known before = pdl ? std::make_shared<Clocks>() : rank.stream;
  if (!rank.host) return before;
  auto clocks = std::make_shared<Clocks>(*before);
  join(*clocks, *rank.host->known);
  learn_clock(*clocks, rank.host->slot, rank.host->clock++);
  return clocks;
}

inline void start_launch(Launch& launch) {
  MachineRaces& machine = launch.machine->races;
  RankRaces& rank = launch.machine->ranks[launch.rank].races;
  if (launch.pdl) rank.current = (rank.current + 1) % RankRaces::kBanks;
  Bank*& bank = rank.banks[rank.current];
  const uint32_t num_slots = launch.num_ctas() * (launch.num_threads() + CtaRaces::kCopySlots);
  if (bank == nullptr || bank->num_slots < num_slots) {
    bank = machine.new_bank(launch.rank, num_slots);
  }
  const auto number = static_cast<int>(launch.number);
  const auto slots_per_cta = static_cast<int>(launch.num_threads() + CtaRaces::kCopySlots);
  bank->uses.push_back({bank->next_clock, number, slots_per_cta, launch.kernel->name});
  launch.races.bank = bank;
  launch.races.first_site = machine.number_sites(launch.kernel->sites, launch.kernel->num_sites);
  launch.races.start = known_at_start(rank, launch.pdl);
  if (!machine.has_room() || bank->next_clock > Epoch::kMostClock / 2) {
    throw Fault("OutOfBounds", "too many threads, instructions or barriers to look for races");
  }
}

// The start of a kernel, and the end of griddepcontrol.wait, count as fences between proxies too.
inline void on_thread_start(Thread& thread) {
  auto& launch = *thread.launch;
  if (launch.races.bank == nullptr) start_launch(launch);
  const Bank& bank = *launch.races.bank;
  ThreadRaces& races = thread.races;
  races.place = {thread.rank, static_cast<int>(launch.number),
                 static_cast<int>(thread.cta->number)};
  CtaRaces& cta = thread.cta->races;
  const uint32_t first =
      bank.first_slot + thread.cta->number * (launch.num_threads() + CtaRaces::kCopySlots);
  cta.slot = first + launch.num_threads();
  cta.clock = bank.uses.back().start;
  races.slot = first + thread.index;
  races.clock = bank.uses.back().start;
  races.known = races.fenced[0] = races.fenced[1] = launch.races.start;
}

inline void on_thread_end(Thread& thread) {
  LaunchRaces& launch = thread.launch->races;
  const ThreadRaces& races = thread.races;
  if (races.known != launch.last_ended) join(launch.end, *races.known);
  launch.last_ended = races.known;
  learn_clock(launch.end, races.slot, races.clock);
  const Clock last = std::max(races.clock, thread.cta->races.clock);
  launch.bank->next_clock = std::max(launch.bank->next_clock, last + 1);
}

inline void on_launch_end(Launch& launch) {
  RankRaces& rank = launch.machine->ranks[launch.rank].races;
  rank.last_ended = std::make_shared<Clocks>(std::move(launch.races.end));
  rank.stream = joined(rank.stream, rank.last_ended);
}

inline void on_grid_wait(Thread& thread) {
  const RankRaces& rank = thread.machine->ranks[thread.rank].races;
  ThreadRaces& races = thread.races;
  races.known = joined(races.known, rank.last_ended);
  for (Known& fenced : races.fenced) fenced = joined(fenced, rank.last_ended);
}

inline std::string in_allocation(const Allocation& allocation) {
  return " of '" + allocation.name + "' of rank " + std::to_string(allocation.rank);
}

inline void on_access(Thread& thread, const Access& access) {
  const bool is_shared = access.space == Space::kShared;
  Allocation* where = access.where;
  Shadow& shadow = is_shared ? thread.cta->races.shadow : where->races.shadow;
  if (is_shared) {
    shadow.cover(0, thread.launch->shared_bytes);
  } else {
    shadow.cover(where->address, where->bytes);
  }
  MachineRaces& machine = thread.machine->races;
  ThreadRaces& races = thread.races;
  const auto site = static_cast<uint32_t>(access.site - thread.launch->kernel->sites);
  const Epoch me = machine.now(races, thread.launch->races.first_site + site, access.bytes);
  const Epoch last = shadow[access.address].write;
  if (const auto race =
          machine.touch(races, shadow, access.address, access.bytes, access.writes, me)) {
    const auto memory = is_shared ? " of the CTA's shared memory" : in_allocation(*where);
    fail(thread, access.site, "Race", machine.explain(*race, me, access.writes, memory));
  }
  if (access.site->order != Order::kWeak) machine.synchronise(races, shadow, access, me, last);
}

inline void on_fence(Thread& thread, const Site& site) {
  fail(thread, &site, "Race", "what a fence orders is not known here; no kernel of ours has one");
}

inline void on_barrier(Thread* const* threads, int count) {
  auto all = std::make_shared<Clocks>();
  const Clocks* last = nullptr;
  for (int i = 0; i < count; ++i) {
    const ThreadRaces& races = threads[i]->races;
    if (races.known.get() != last) join(*all, *races.known);
    last = races.known.get();
  }
  for (int i = 0; i < count; ++i) {
    learn_clock(*all, threads[i]->races.slot, threads[i]->races.clock++);
  }
  for (int i = 0; i < count; ++i) threads[i]->races.known = all;
}

inline void on_init_copies(Thread& thread, CopyBarrier& barrier) {
  CtaRaces& cta = thread.cta->races;
  if (cta.num_barriers == CtaRaces::kCopySlots) {
    throw Fault("OutOfBounds", "a CTA with more barriers of copies than the detector knows");
  }
  barrier.races.number = cta.num_barriers++;
  barrier.races.init_slot = thread.races.slot;
  barrier.races.init_clock = thread.races.clock;
}

// Copies see a barrier that its initialiser has fenced. What others did to it comes later.
inline void check_initialised(Thread& thread, const Site& site, const CopyBarrier& barrier) {
  for (const auto& [slot, clock] : thread.cta->races.fences) {
    if (slot == barrier.races.init_slot && clock >= barrier.races.init_clock) return;
  }
  fail(thread, &site, "Race", "race of a copy with its barrier's mbarrier.init: no fence between");
}

// A copy reads and writes as one more thread of the CTA, which comes after what the thread that
// starts it has fenced, and after copies that this thread knows to have landed.
inline void on_copy(Thread& thread, const Access& from, const Access& to,
                    const CopyBarrier& barrier, CopyRaces& copy) {
  CtaRaces& cta = thread.cta->races;
  copy = {cta.slot + barrier.races.number, ++cta.clock};
  const ThreadRaces& races = thread.races;
  const auto site = static_cast<uint32_t>(from.site - thread.launch->kernel->sites);
  MachineRaces& machine = thread.machine->races;
  machine.now(races, thread.launch->races.first_site + site, 1);
  const Epoch me = Epoch::of(copy.slot, copy.clock, thread.launch->races.first_site + site);
  for (const Access* access : {&from, &to}) {
    const bool is_shared = access->space == Space::kShared;
    auto known = std::make_shared<Clocks>(*races.fenced[is_shared]);
    for (uint32_t slot = cta.slot; slot < cta.slot + CtaRaces::kCopySlots; ++slot) {
      if (slot < races.known->size()) learn_clock(*known, slot, (*races.known)[slot]);
    }
    constexpr uint32_t kNobody = ~0U;  // a copy does not know the one before it by itself
    const Actor actor{races.place, kNobody, 0, known};
    Shadow& shadow = is_shared ? cta.shadow : access->where->races.shadow;
    if (is_shared) {
      shadow.cover(0, thread.launch->shared_bytes);
    } else {
      shadow.cover(access->where->address, access->where->bytes);
    }
    const auto race =
        machine.touch(actor, shadow, access->address, access->bytes, access->writes, me);
    if (!race) continue;
    const auto memory = is_shared ? " of the CTA's shared memory" : in_allocation(*access->where);
    fail(thread, access->site, "Race", machine.explain(*race, me, access->writes, memory));
  }
}

inline void on_landed(CopyBarrier& barrier, const Copy& copy) {
  learn_clock(barrier.races.landed, copy.races.slot, copy.races.clock);
}

inline void on_phase_end(CopyBarrier& barrier) {
  barrier.races.ended[barrier.phase & 1U] = std::make_shared<Clocks>(barrier.races.landed);
  barrier.races.landed.clear();
}

inline void on_phase_seen(Thread& thread, const CopyBarrier& barrier, uint32_t parity) {
  if (barrier.races.ended[parity]) {
    thread.races.known = joined(thread.races.known, barrier.races.ended[parity]);
  }
}

inline void on_proxy_fence(Thread& thread, Space space) {
  ThreadRaces& races = thread.races;
  auto known = std::make_shared<Clocks>(*races.known);
  const bool is_shared = space == Space::kShared;
  if (is_shared) thread.cta->races.fences.push_back({races.slot, races.clock});
  learn_clock(*known, races.slot, races.clock++);
  races.fenced[is_shared] = known;
}

// The host of `rank` reads or writes when all kernels of the rank's stream have ended.
inline void on_host(Machine& machine, int number, uint64_t address, uint64_t bytes, bool writes) {
  RankRaces& rank = machine.ranks[number].races;
  if (!rank.host) {
    Bank* bank = machine.races.new_bank(number, 1);
    bank->uses.push_back({0, -1, 1, "host"});
    rank.host = Actor{{number, -1, 0}, bank->first_slot, 1, std::make_shared<Clocks>()};
  }
  rank.host->known = joined(rank.host->known, rank.stream);
  auto* where = machine.find(address);
  if (where == nullptr || where->bytes - (address - where->address) < bytes) {
    throw Fault("OutOfBounds", "the host of rank " + std::to_string(number) + " accesses " +
                                   std::to_string(bytes) + " bytes that no allocation has");
  }
  where->races.shadow.cover(where->address, where->bytes);
  const Epoch me = machine.races.now(*rank.host, 0, 1);
  if (const auto race =
          machine.races.touch(*rank.host, where->races.shadow, address, bytes, writes, me)) {
    throw Fault("Race", machine.races.describe(me) + "\n  " +
                            machine.races.explain(*race, me, writes, in_allocation(*where)));
  }
}

}  // namespace ptx::races
