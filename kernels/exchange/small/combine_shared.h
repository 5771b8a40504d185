// What the threads of a CTA of small_combine share, and what its two sides use.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/config.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/epoch_flags.h"
#include "../../include/moe_nvlink/number_formats.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/units.h"
#include "../../include/moe_nvlink/workspace.h"
#include "role.h"

namespace moe_nvlink {

// What the first thread of a receiver has waited for units, for the totals. In shared memory, because
// the units take the registers.
struct LateUnits {
  uint64_t waited;   // nanoseconds, all together
  uint64_t counted;  // the part of them that the totals have
  uint32_t missing;  // has a bit for each k whose unit the last look that failed did not find
};

struct SmallCombineShared {
  uint32_t counts[kMaxRanks];  // senders: rows received from each rank
  const char* first_row;       // senders: address of the first part's row
  // Receivers: first unit of each partial row in the staging, or kNoSlot: of this item, of the next.
  int32_t rows[2][kMaxTopK];
  LateUnits late;
};

// The units that carry rows of these elements: 14 bytes would cut one of 4 bytes.
template <class Config, class Element>
using SumUnit =
    typename UnitWith<sizeof(typename Element::Storage) == 2 ? Config::kUnitDataBytes
                                                             : TwoMarkUnit::kDataBytes>::Type;

// Sizes of a row, and what the CTA does. From arguments only.
struct SmallPlan {
  int words;  // of 4 bytes
  int units;  // of a row
  int parts;  // of a row
  SmallRole role;
};

template <class Unit>
HD SmallPlan small_plan(const CombineArgs& args, const Cta& cta, int element) {
  const int row_bytes = args.geometry.hidden_size * element_bytes(element);
  const int units = units_of<Unit>(row_bytes);
  return SmallPlan{row_bytes / 4, units, (units + kPartUnits - 1) / kPartUnits,
                   small_role(args.senders, cta)};
}

// The staging of a rank for the rounds with this epoch's parity. Not by a branch: the epoch is the
// last to be known, and what does not depend on it is computed while it is on its way.
HD char* staging_of(const CombineArgs& args, int rank, uint32_t epoch) {
  const uint32_t step = args.odd_staging_region - args.even_staging_region;
  return region_of(args, rank, args.even_staging_region + epoch % 2 * step);
}

// What a kernel before this one has left. Every thread reads it for itself: no barrier precedes the
// units.
struct Round {
  uint32_t epoch;
  bool has_failed;  // a verb of this rank, before
};

HD Round this_round(const CombineArgs& args) {
  const uint32_t epoch = load_word(&local_control(args)->epoch);
  return Round{epoch, has_failed(args)};
}

}  // namespace moe_nvlink
