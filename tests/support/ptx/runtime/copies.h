// Copies to shared memory (cp.async.bulk) and the barriers that count them (mbarrier). machine.cpp
// includes this file.
//
// A copy takes effect as a whole, at any time after its start. On the clock that is at once, and what
// is late is the end of its barrier's phase.
#pragma once

#include "machine.h"

namespace ptx {

namespace {

constexpr uint32_t kBarrierBytes = 8;
constexpr uint32_t kCopyUnit = 16;

CopyBarrier& barrier_at(Thread& thread, Site& site, uint64_t place) {
  const Access access{place, kBarrierBytes, Space::kShared, true, false, &site, nullptr};
  const auto found = thread.cta->copy_barriers.find(static_cast<uint32_t>(place));
  if (found == thread.cta->copy_barriers.end()) fail_unwritten(thread, access, 0);
  return found->second;
}

void end_phase_if_complete(CopyBarrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  if (kRaces) races::on_phase_end(barrier);
  if (kClock) clocks::on_phase_end(barrier);
  ++barrier.phase;
  barrier.missing = barrier.expected;
}

void land(Machine& machine, const Copy& copy) {
  Cta& cta = *copy.cta;
  std::memcpy(cta.shared.data() + copy.target, reinterpret_cast<const void*>(copy.source),
              copy.bytes);
  std::fill_n(cta.shared_written.data() + copy.target, copy.bytes, uint8_t{1});
  CopyBarrier& barrier = cta.copy_barriers.at(copy.barrier);
  barrier.bytes -= copy.bytes;
  if (kRaces) races::on_landed(barrier, copy);
  end_phase_if_complete(barrier);
  machine.progress();
}

// Lets one of the copies land.
void land_one(Machine& machine) {
  std::vector<Copy>& copies = machine.copies;
  const size_t chosen = machine.random() % copies.size();
  const Copy copy = copies[chosen];
  copies[chosen] = copies.back();
  copies.pop_back();
  land(machine, copy);
}

}  // namespace

void init_copies(Thread& thread, Site& site, uint64_t place, uint32_t arrivals) {
  const Access access{place, kBarrierBytes, Space::kShared, false, true, &site, nullptr};
  reach(thread, access, false);
  CopyBarrier& barrier = thread.cta->copy_barriers[static_cast<uint32_t>(place)];
  barrier = {};
  barrier.expected = barrier.missing = arrivals;
  if (kRaces) races::on_init_copies(thread, barrier);
}

void expect_copies(Thread& thread, Site& site, uint64_t place, uint32_t bytes) {
  CopyBarrier& barrier = barrier_at(thread, site, place);
  reach(thread, {place, kBarrierBytes, Space::kShared, true, true, &site, nullptr}, false);
  if (kClock) clocks::on_arrival(thread, barrier);
  barrier.bytes += bytes;
  --barrier.missing;
  end_phase_if_complete(barrier);
}

bool have_landed(Thread& thread, Site& site, uint64_t place, uint32_t parity) {
  CopyBarrier& barrier = barrier_at(thread, site, place);
  const bool ended = (barrier.phase & 1U) != (parity & 1U);
  // A phase that has not ended tells nothing.
  if (ended)
    reach(thread, {place, kBarrierBytes, Space::kShared, true, false, &site, nullptr}, false);
  if (kRaces && ended && site.order == Order::kAcquire)
    races::on_phase_seen(thread, barrier, parity & 1U);
  if (kClock) clocks::on_phase_asked(thread, barrier, parity & 1U, ended, site);
  return ended;
}

void start_copy(Thread& thread, Site& site, uint64_t target, uint64_t source, uint64_t barrier,
                uint32_t bytes) {
  Cta& cta = *thread.cta;
  Access from{source, bytes, Space::kGlobal, true, false, &site, thread.machine->find(source)};
  const Access to{target, bytes, Space::kShared, false, true, &site, nullptr};
  if ((target | source | bytes) % kCopyUnit != 0) fail_alignment(thread, from);
  if (from.where == nullptr || source - from.where->address + bytes > from.where->bytes) {
    fail_bounds(thread, from, 0);
  }
  if (target + bytes > cta.shared.size()) fail_bounds(thread, to, cta.shared.size());
  const auto found = cta.copy_barriers.find(static_cast<uint32_t>(barrier));
  if (found == cta.copy_barriers.end()) fail_unwritten(thread, to, 0);
  Copy copy{&cta, static_cast<uint32_t>(target), static_cast<uint32_t>(barrier), source, bytes, {}};
  if (kRaces) races::check_initialised(thread, site, found->second);
  if (kRaces) races::on_copy(thread, from, to, found->second, copy.races);
  if (kClock) clocks::on_copy(thread, from, found->second);
  if (kClock) return land(*thread.machine, copy);
  thread.machine->copies.push_back(copy);
}

void fence_copies(Thread& thread, Site& site, Space space) {
  if (kRaces && site.removed == 0) races::on_proxy_fence(thread, space);
}

}  // namespace ptx
