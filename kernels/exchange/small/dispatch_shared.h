// What the threads of a CTA of small_dispatch share, and what its two sides use.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/config.h"
#include "../../include/moe_nvlink/expert_owners.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/quantise.h"
#include "../../include/moe_nvlink/routing.h"
#include "../../include/moe_nvlink/units.h"
#include "../await_combine.h"
#include "role.h"

namespace moe_nvlink {

// The experts of one rank.
struct ExpertRange {
  uint32_t first;
  uint32_t size;

  HD bool has(int32_t id) const { return static_cast<uint32_t>(id) - first < size; }
};

// Where a token's units go: for each k the address of its packed row in the staging of the rank, or
// 0 if the k has no row of its own.
struct SmallRoute {
  uint64_t targets[kMaxTopK];
};

// The units that carry the rows.
template <class Config>
using RowUnit = typename UnitWith<Config::kUnitDataBytes>::Type;

// A warp takes a part's units in chunks of its own: as many as a warp of a GPU has lanes, whose bytes
// are whole pieces. So no warp waits for another one.
constexpr int kChunkUnits = 32;
template <class Unit>
constexpr int kChunkBytes = kChunkUnits * Unit::kDataBytes;
template <class Unit>
constexpr int kPartBytes = kPartUnits * Unit::kDataBytes;
static_assert(kPartUnits % kChunkUnits == 0);
static_assert(kChunkBytes<TwoMarkUnit> % 16 == 0 && kChunkBytes<OneMarkUnit> % 16 == 0);
// The first chunk has all ids and weights.
static_assert(2 * kMaxTopK * 4 <= kChunkBytes<TwoMarkUnit>);

// Two parts of rows: of this item and of the next.
constexpr int kStagedParts = 2;

template <int StagedBytes>
struct SmallDispatchShared {
  alignas(16) char staged[StagedBytes];
  SmallRoute routes[2];       // of this item and of the next
  ExpertOwners owners;        // of the launch
  RowAmax amax;               // of the row that is being quantised
  uint32_t sent[kMaxRanks];   // rows for each rank; in the CTA that publishes
  int32_t counts[kMaxRanks];  // rows received from each rank
  uint32_t faulted;           // this verb or an earlier one has failed
};

template <class Config>
using SmallDispatchSharedFor = SmallDispatchShared<Config::kQuantiser == kQuantiserNone
                                                       ? kStagedParts * kPartBytes<RowUnit<Config>>
                                                       : kMaxStagedBytes>;
static_assert(kStagedParts * kPartBytes<OneMarkUnit> <= kMaxStagedBytes);

// The CTA's warps, or what exchanges values on this platform.
HD int num_groups(const Cta& cta) {
  return cta.num_threads / Cta::kExchangeThreads;
}
HD int group_of(const Cta& cta) {
  return cta.thread / Cta::kExchangeThreads;
}
HD int lane_of(const Cta& cta) {
  return cta.thread % Cta::kExchangeThreads;
}

// Threads at the end of the CTA wait for the peers: they have no piece of a part, or few of them have.
// CTA F counts with the groups before them.
HD int num_counting_groups(const DispatchArgs& args, const Cta& cta) {
  const int waiting = (args.geometry.ep_size + Cta::kExchangeThreads - 1) / Cta::kExchangeThreads;
  const int rest = num_groups(cta) - waiting;
  return rest > 1 ? rest : 1;
}

// Parts of a packed row, and the bytes of one.
template <class Unit>
HD int num_parts(const DispatchArgs& args) {
  return (static_cast<int>(args.packed_bytes) + kPartBytes<Unit> - 1) / kPartBytes<Unit>;
}
template <class Unit>
HD int bytes_of_part(const DispatchArgs& args, int part) {
  const int left = static_cast<int>(args.packed_bytes) - part * kPartBytes<Unit>;
  return left < kPartBytes<Unit> ? left : kPartBytes<Unit>;
}

// The packed row that `source` sends to `place` in its slice of `owner`'s staging.
template <class Unit>
HD char* packed_row_at(const DispatchArgs& args, int owner, int source, int place) {
  const int64_t row = static_cast<int64_t>(source) * args.geometry.max_tokens_per_rank + place;
  const int64_t row_bytes =
      static_cast<int64_t>(units_of<Unit>(static_cast<int>(args.packed_bytes))) * kUnitBytes;
  return region_of(args, owner, args.staging_region) + row * row_bytes;
}

// State of this launch that the kernels before it have left. A CTA that sends loads it behind its
// first row and ids, so that all of them are on their way together: ptxas moves words that are the
// same in all threads to uniform registers, and waits for them directly after their loads.
struct SmallRound {
  uint32_t combined = 0;    // epoch of the combine before this dispatch
  uint32_t dispatched = 0;  // CTA F: epoch of the dispatch before
  uint32_t has_pulled = 0;  // CTA F: the combine before has read peers' rows
  bool is_of_cta_f = false;

  HD void load_state(const DispatchArgs& args, const SmallRole& role) {
    const LocalControl* local = local_control(args);
    combined = load_word(&local->combined_epoch);
    is_of_cta_f = role.publishes();
    if (!is_of_cta_f) return;
    dispatched = load_word(&local->epoch);
    has_pulled = load_word(&local->has_pulled);
  }

  HD uint32_t epoch() const { return combined + 1; }
  // The dispatch before has had no combine. Only CTA F knows.
  HD bool is_repeated() const { return is_of_cta_f && lacks_combine(dispatched, combined); }
};

// P12 by the threads from the CTA's end on. They alone look whether this rank may send: if every warp
// of every CTA loaded the fault word, which takes a strong load, the loads would queue up at that word.
// Then a barrier, and `faulted` says whether this verb or an earlier one has failed.
HD void await_previous_round(const DispatchArgs& args, const Cta& cta, const SmallRound& round,
                             uint32_t* faulted) {
  const int first = cta.num_threads - 1 - cta.thread;
  if (first < args.geometry.ep_size) {
    const bool has_failed = load_exclusion(args).holds(args) || round.is_repeated();
    if (has_failed) {
      store_relaxed_cta(faulted, 1);
    } else {
      const bool is_counted = small_role(args.senders, cta).publishes();
      await_combine(args, first, cta.num_threads, round.combined, is_counted, faulted);
    }
  }
}

}  // namespace moe_nvlink
