// Data races under the PTX memory model, found while the machine runs one thread after another.
//
// Every thread has a slot {rank, CTA, thread}, which it inherits from the thread of the rank's
// kernel before, and a clock, which advances when others may learn what the thread has done. A
// thread knows of every slot the last clock that comes before it in base causality order. Two
// accesses of a byte, one of them a write, race if neither knows the other and they are not morally
// strong: both strong, equally long, and each within the scope of the other. The first race ends
// the run.
//
// What makes one thread know another (PTX ISA, memory consistency model):
//   release and acquire   patterns of operations whose write the read observes, directly or through
//                         a chain of atomics. Each step must be morally strong, and both ends too:
//                         an acquire of scope .gpu learns nothing from a release of another GPU,
//                         whatever the release's scope. Fences are reported as not known.
//   barriers              those who meet; shuffles, votes and redux order no memory
//   the stream            a kernel starts after the kernels before it, with programmatic dependent
//                         launch from griddepcontrol.wait on; the host after its rank's kernels.
//                         Nothing of the stream orders one rank against another.
// An access that comes after one which has observed a strong write also comes after that write
// (causality order), although it learns nothing else from it.
//
// What this finds depends on the schedule. What it does not find in any: races with a write that a
// morally strong one has overwritten since, and races with more than two readers in no order (the
// first and the last stay). The threads that run before griddepcontrol.wait are compared with the
// two kernels before theirs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "hooks.h"

namespace ptx {

using Clock = uint32_t;
using Clocks = std::vector<Clock>;            // by slot; 0 beyond the end: nothing is known
using Known = std::shared_ptr<const Clocks>;  // many threads share one; it never changes

inline void join(Clocks& clocks, const Clocks& other) {
  if (clocks.size() < other.size()) clocks.resize(other.size());
  for (size_t slot = 0; slot < other.size(); ++slot) {
    clocks[slot] = std::max(clocks[slot], other[slot]);
  }
}

inline Known joined(const Known& left, const Known& right) {
  if (left == right || right->empty()) return left;
  if (left->empty()) return right;
  auto both = std::make_shared<Clocks>(*left);
  join(*both, *right);
  return both;
}

inline void learn_clock(Clocks& clocks, uint32_t slot, Clock clock) {
  if (clocks.size() <= slot) clocks.resize(slot + 1);
  clocks[slot] = std::max(clocks[slot], clock);
}

// Who accessed a byte, when, and by which instruction.
struct Epoch {
  static constexpr int kClockBits = 22;
  static constexpr int kSiteBits = 20;
  static constexpr uint32_t kMostSites = 1u << kSiteBits;
  static constexpr uint32_t kMostSlots = 1u << (64 - kClockBits - kSiteBits);
  static constexpr Clock kMostClock = (1u << kClockBits) - 1;

  uint64_t bits = 0;  // 0: nobody

  static Epoch of(uint32_t slot, Clock clock, uint32_t site) {
    return {uint64_t{slot} << (kClockBits + kSiteBits) | uint64_t{clock} << kSiteBits | site};
  }
  uint32_t slot() const { return static_cast<uint32_t>(bits >> (kClockBits + kSiteBits)); }
  Clock clock() const { return static_cast<Clock>(bits >> kSiteBits) & ((1u << kClockBits) - 1); }
  uint32_t site() const { return static_cast<uint32_t>(bits) & ((1u << kSiteBits) - 1); }
  explicit operator bool() const { return bits != 0; }
  bool operator==(const Epoch&) const = default;
};

// Where a thread runs. The host of a rank is launch -1.
struct Place {
  int rank = 0;
  int launch = -1;  // number in the rank's stream
  int cta = 0;
  bool operator==(const Place&) const = default;
};

struct Reach {
  Scope scope;
  Place place;
};

inline bool holds(const Reach& owner, const Place& other) {
  if (owner.scope == Scope::kSys) return true;
  if (owner.scope == Scope::kGpu) return owner.place.rank == other.rank;
  return owner.place == other;
}

inline bool hold_each_other(const Reach& left, const Reach& right) {
  return holds(left, right.place) && holds(right, left.place);
}

// A thread, or the host of a rank.
struct Actor {
  Place place;
  uint32_t slot = 0;
  Clock clock = 1;
  Known known;  // of the others; the own clock is `clock`

  bool knows(uint32_t other, Clock at) const {
    return other == slot || (other < known->size() && (*known)[other] >= at);
  }
  bool knows(Epoch epoch) const { return knows(epoch.slot(), epoch.clock()); }
};

// What an acquire learns if it observes the write that this release stands for.
struct Release {
  Reach reach;
  uint32_t slot;
  Clock clock;
  Known known;

  bool is_of(const Actor& actor) const { return slot == actor.slot && reach.place == actor.place; }
};

inline void learn(Actor& actor, const Release& release) {
  if (actor.knows(release.slot, release.clock)) return;  // and with it all that it knew
  auto both = std::make_shared<Clocks>(*actor.known);
  join(*both, *release.known);
  learn_clock(*both, release.slot, release.clock);
  actor.known = std::move(both);
}

// Of a thread's releases with one scope the latest stays: it covers the others.
inline void put(std::vector<Release>& releases, const Release& release) {
  for (Release& old : releases) {
    if (old.slot == release.slot && old.reach.scope == release.reach.scope) {
      if (old.clock < release.clock) old = release;
      return;
    }
  }
  releases.push_back(release);
}

// A word that strong writes have gone to.
struct Location {
  Epoch last;                    // the strong write that the following describes
  std::vector<Release> chain;    // what its observer may acquire
  std::vector<Release> own;      // releases of this word: a later strong write of the same thread
                                 // completes their pattern as well
  std::vector<Epoch> observers;  // strong reads of `last`
};

// Accesses of one byte.
struct Cell {
  Epoch write;
  Epoch reads[2];
  bool operator==(const Cell&) const = default;
};

// Accesses of an allocation or of a CTA's shared memory.
class Shadow {
 public:
  void cover(uint64_t first, uint64_t bytes) {
    if (cells_) return;
    first_ = first;
    // Pages that nobody accesses stay without memory.
    cells_.reset(static_cast<Cell*>(std::calloc(bytes, sizeof(Cell))));
  }
  uint64_t offset(uint64_t address) const { return address - first_; }
  Cell& operator[](uint64_t address) { return cells_[offset(address)]; }
  std::unordered_map<uint64_t, Location> locations;

 private:
  struct Free {
    void operator()(Cell* cells) const { std::free(cells); }
  };
  uint64_t first_ = 0;
  std::unique_ptr<Cell[], Free> cells_;
};

// Slots that the kernels of a rank use one after another, or the host's.
struct Bank {
  struct Use {
    Clock start;
    int launch;
    int slots_per_cta;  // its threads, and those for copies
    const char* kernel;
  };
  int rank;
  uint32_t first_slot;
  uint32_t num_slots;
  Clock next_clock = 1;
  std::vector<Use> uses;  // by start
};

struct AllocationRaces {
  Shadow shadow;
};

// What copies do has slots and a clock of the CTA's own, behind those of its threads: a slot for each
// barrier, because who knows of one barrier's copies knows nothing of another's.
struct CtaRaces {
  static constexpr uint32_t kCopySlots = 16;
  Shadow shadow;
  uint32_t slot = 0;  // of the first barrier
  uint32_t num_barriers = 0;
  Clock clock = 0;
  std::vector<std::pair<uint32_t, Clock>> fences;  // of its threads, for copies to shared memory
};

struct CopyRaces {
  uint32_t slot = 0;
  Clock clock = 0;
};

struct CopyBarrierRaces {
  Clocks landed;        // of this phase
  Known ended[2];       // of the last phase of each parity
  uint32_t number = 0;  // in its CTA
  uint32_t init_slot = 0;
  Clock init_clock = 0;
};

struct LaunchRaces {
  Bank* bank = nullptr;  // null until the first thread starts
  uint32_t first_site = 0;
  Known start;
  Clocks end;        // of the threads that have ended
  Known last_ended;  // what the last of them knew, which neighbours often know too
};

struct RankRaces {
  static constexpr int kBanks = 3;  // kernels that may run at the same time, and one more
  Bank* banks[kBanks] = {};
  int current = 0;
  Known stream = std::make_shared<Clocks>();      // all kernels that have ended
  Known last_ended = std::make_shared<Clocks>();  // the last of them
  std::optional<Actor> host;
};

struct ThreadRaces : Actor {
  struct Pending {
    const Location* where;
    Release release;
  };
  Known fenced[2];               // what its copies come after: in global memory, in shared memory
  std::vector<Pending> pending;  // what its strong reads have observed and no acquire has taken
};

struct Race {
  Epoch earlier;
  bool earlier_writes;
  uint64_t offset;  // in its memory
};

class MachineRaces {
 public:
  Bank* new_bank(int rank, uint32_t num_slots) {
    banks_.push_back({rank, num_slots_, num_slots, 1, {}});
    num_slots_ += num_slots;
    return &banks_.back();
  }
  bool has_room() const {
    return num_slots_ <= Epoch::kMostSlots && sites_.size() <= Epoch::kMostSites;
  }

  // Number of the first site of a kernel; the others follow.
  uint32_t number_sites(const Site* sites, uint32_t count) {
    const auto [found, is_new] = first_sites_.try_emplace(sites, sites_.size());
    for (uint32_t i = 0; is_new && i < count; ++i) sites_.push_back({sites + i, 0});
    return found->second;
  }

  // The epoch of an access that begins now.
  Epoch now(const Actor& actor, uint32_t site, uint32_t bytes) {
    sites_[site].bytes = bytes;
    return Epoch::of(actor.slot, actor.clock, site);
  }

  // Notes an access of `who`, unless it races with an earlier one, which is returned.
  std::optional<Race> touch(const Actor& who, Shadow& shadow, uint64_t address, uint64_t bytes,
                            bool writes, Epoch me) const {
    Cell before, after;
    for (uint64_t place = address; place < address + bytes; ++place) {
      Cell& cell = shadow[place];
      if (place > address && cell == before) {  // as its neighbour
        cell = after;
        continue;
      }
      before = cell;
      if (in_race(who, cell.write, me) && !knows_observer(who, shadow, place, cell.write)) {
        return Race{cell.write, true, shadow.offset(place)};
      }
      if (writes) {
        for (Epoch& read : cell.reads) {
          if (in_race(who, read, me)) return Race{read, false, shadow.offset(place)};
          if (who.knows(read)) read = {};
        }
        cell.write = me;
      } else {
        note_read(who, cell, me);
      }
      after = cell;
    }
    return std::nullopt;
  }

  // What a strong access learns and releases. `last`: the write of its first byte before it.
  void synchronise(ThreadRaces& thread, Shadow& shadow, const Access& access, Epoch me,
                   Epoch last) const {
    const Site& site = *access.site;
    auto found = shadow.locations.find(access.address);
    if (found == shadow.locations.end()) {
      if (!access.writes) return;
      found = shadow.locations.try_emplace(access.address).first;
    }
    Location& location = found->second;
    const Reach reach{site.scope, thread.place};
    const bool acquires = site.order == Order::kAcquire || site.order == Order::kAcqRel;
    const bool releases = site.order == Order::kRelease || site.order == Order::kAcqRel;
    const bool observes =
        access.reads && last && location.last == last && morally_strong(last, me, thread.place);
    if (observes) {
      for (const Release& release : location.chain) observe(thread, location, release);
      if (!access.writes) note_observer(thread, location, me);
    }
    if (acquires) acquire(thread, reach, location);
    if (!access.writes) return;
    if (!observes) location.chain.clear();
    if (releases) {
      const Release mine{reach, thread.slot, thread.clock++, thread.known};
      put(location.chain, mine);
      put(location.own, mine);
    } else {
      for (const Release& own : location.own) {
        if (own.is_of(thread)) put(location.chain, own);
      }
    }
    location.last = me;
    location.observers.clear();
  }

  // Where an access was made.
  Place place_of(Epoch epoch) const {
    const auto [bank, use] = find(epoch);
    return {bank->rank, use->launch, static_cast<int>(index_of(epoch, *bank) / use->slots_per_cta)};
  }

  std::string describe(Epoch epoch) const {
    const auto [bank, use] = find(epoch);
    const std::string rank = "rank " + std::to_string(bank->rank);
    if (use->launch < 0) return "the host of " + rank;
    const Site& site = *sites_[epoch.site()].site;
    std::ostringstream text;
    const int thread = static_cast<int>(index_of(epoch, *bank) % use->slots_per_cta);
    text << rank << " launch " << use->launch << " (" << use->kernel << ") CTA "
         << place_of(epoch).cta;
    if (thread < use->slots_per_cta - static_cast<int>(CtaRaces::kCopySlots))
      text << " thread " << thread;
    else
      text << " a copy";
    text << ", PTX line " << site.line;
    if (site.source_line != 0) text << " (source line " << site.source_line << ")";
    text << ": " << site.text;
    return text.str();
  }

  // "a relaxed read races with an earlier write ..."
  std::string explain(const Race& race, Epoch me, bool writes, const std::string& memory) const {
    std::ostringstream text;
    text << "race at byte " << race.offset << memory << ": " << order_name(me)
         << (writes ? " write" : " read") << " after " << order_name(race.earlier)
         << (race.earlier_writes ? " write" : " read") << "; ";
    if (!is_strong(race.earlier) || !is_strong(me)) {
      text << "nothing orders them";
    } else if (sites_[race.earlier.site()].bytes != sites_[me.site()].bytes) {
      text << "both are strong, but overlap in part";
    } else {
      text << "both are strong, but their scopes do not hold each other";
    }
    text << "\n  before: " << describe(race.earlier);
    return text.str();
  }

 private:
  struct SiteUse {
    const Site* site;  // null: the host
    uint32_t bytes;
  };

  bool is_strong(Epoch epoch) const {
    const Site* site = sites_[epoch.site()].site;
    return site != nullptr && site->order != Order::kWeak;
  }

  Scope scope_of(Epoch epoch) const { return sites_[epoch.site()].site->scope; }

  const char* order_name(Epoch epoch) const {
    static const char* const names[] = {"weak", "relaxed", "acquire", "release", "acq_rel", "sc"};
    const Site* site = sites_[epoch.site()].site;
    return names[site == nullptr ? 0 : static_cast<int>(site->order)];
  }

  bool in_race(const Actor& who, Epoch earlier, Epoch me) const {
    return earlier && !who.knows(earlier) && !morally_strong(earlier, me, who.place);
  }

  // Both accesses are aligned to their sizes: if these are equal, they overlap completely.
  bool morally_strong(Epoch earlier, Epoch me, const Place& place) const {
    if (!is_strong(earlier) || !is_strong(me)) return false;
    const SiteUse& first = sites_[earlier.site()];
    const SiteUse& second = sites_[me.site()];
    return first.bytes == second.bytes &&
           hold_each_other({first.site->scope, place_of(earlier)}, {second.site->scope, place});
  }

  bool knows_observer(const Actor& who, const Shadow& shadow, uint64_t address,
                      Epoch earlier) const {
    if (!is_strong(earlier)) return false;
    const uint64_t start = address & ~uint64_t{sites_[earlier.site()].bytes - 1};
    const auto found = shadow.locations.find(start);
    if (found == shadow.locations.end() || found->second.last != earlier) return false;
    const auto& observers = found->second.observers;
    return std::any_of(observers.begin(), observers.end(),
                       [&](Epoch observer) { return who.knows(observer); });
  }

  void note_read(const Actor& who, Cell& cell, Epoch me) const {
    for (Epoch& read : cell.reads) {
      if (!read || (who.knows(read) && races_with_all_of(me, read))) {
        read = me;
        return;
      }
    }
    cell.reads[1] = me;
  }

  // A weak read races with more than a strong one, and one of a narrow scope with more than others.
  bool races_with_all_of(Epoch read, Epoch earlier) const {
    if (!is_strong(read)) return true;
    return is_strong(earlier) && scope_of(read) <= scope_of(earlier);
  }

  static void note_observer(const Actor& who, Location& location, Epoch me) {
    for (Epoch observer : location.observers) {
      if (observer.slot() == who.slot) return;  // the first comes before more
    }
    location.observers.push_back(me);
  }

  static void observe(ThreadRaces& thread, const Location& location, const Release& release) {
    if (thread.knows(release.slot, release.clock)) return;
    for (const auto& old : thread.pending) {
      if (old.where == &location && old.release.slot == release.slot &&
          old.release.clock == release.clock) {
        return;
      }
    }
    thread.pending.push_back({&location, release});
  }

  static void acquire(ThreadRaces& thread, const Reach& reach, const Location& location) {
    std::erase_if(thread.pending, [&](const auto& pending) {
      if (pending.where != &location || !hold_each_other(pending.release.reach, reach))
        return false;
      learn(thread, pending.release);
      return true;
    });
  }

  static uint32_t index_of(Epoch epoch, const Bank& bank) { return epoch.slot() - bank.first_slot; }

  std::pair<const Bank*, const Bank::Use*> find(Epoch epoch) const {
    const auto bank = std::prev(
        std::upper_bound(banks_.begin(), banks_.end(), epoch.slot(),
                         [](uint32_t slot, const Bank& other) { return slot < other.first_slot; }));
    const auto use = std::prev(
        std::upper_bound(bank->uses.begin(), bank->uses.end(), epoch.clock(),
                         [](Clock clock, const Bank::Use& other) { return clock < other.start; }));
    return {&*bank, &*use};
  }

  std::deque<Bank> banks_;  // by first slot
  uint32_t num_slots_ = 0;
  std::vector<SiteUse> sites_{{nullptr, 1}};
  std::unordered_map<const Site*, uint32_t> first_sites_;  // by the first one's address
};

}  // namespace ptx
