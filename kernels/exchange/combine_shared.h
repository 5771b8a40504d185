// What the threads of a CTA of combine share, and what both of its sides use: the sender
// (send_quantised.h) and the receiver (add_rows.h).
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/combine_formats.h"
#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/quantise.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

struct CombineShared {
  uint32_t epoch;              // of this round
  uint32_t has_failed;         // an earlier verb of this rank has failed
  uint32_t faulted;            // this verb has failed
  uint64_t rows[2][kMaxTopK];  // addresses of the partial rows, or 0: of this item, of the next
};

// Whether this build has the code for a format. A build for a GPU has one format, the host's has
// all.
template <class Config, int Format>
constexpr bool kKnows = Config::kCombine < 0 || Config::kCombine == Format;

// The same if rows travel quantised.
struct QuantisedCombineShared : CombineShared {
  uint64_t scales[2][kMaxTopK];      // addresses, as rows
  uint64_t row_scales[2][kMaxTopK];  // of formats that have them
  RowAmax amax;                      // of the row that is being quantised
  uint32_t counts[kMaxRanks];        // rows received from each rank
  uint32_t taken[2];                 // number of the row that is being quantised, of the next
  uint32_t completes;                // this CTA has quantised the last row that was missing
};

// Items whose rows may be on their way to a CTA at the same time (tma_combine.h).
constexpr int kMostStages = 16;

// The same if rows come by TMA.
static_assert(kMaxTopK <= 32);
struct TmaCombineShared {
  uint32_t epoch;
  uint32_t has_failed;
  uint32_t faulted;
  uint32_t present[kMostStages];  // bit k: the item has a row of this k
  uint64_t landed[kMostStages];   // barriers of the items' copies
};

// Whether this build gets rows by TMA. Rows with a format do not come so.
template <class Config>
constexpr bool kByTma = Config::kTma != 0 && Config::kCombine == kCombineUnquantised;

template <bool Quantised, bool Tma>
struct CombineSharedOf {
  using Type = CombineShared;
};
template <>
struct CombineSharedOf<true, false> {
  using Type = QuantisedCombineShared;
};
template <>
struct CombineSharedOf<false, true> {
  using Type = TmaCombineShared;
};
template <class Config>
using SharedOf =
    typename CombineSharedOf<Config::kCombine != kCombineUnquantised, kByTma<Config>>::Type;

// Address of a row in a region of rank `target`.
HD uint64_t address_of_row(const CombineArgs& args, int target, uint32_t region, int row,
                           uint64_t row_bytes) {
  return reinterpret_cast<uint64_t>(region_of(args, target, region)) +
         static_cast<uint64_t>(row) * row_bytes;
}

// What all ranks of a combine must agree on, in 7 bits: of 128 pairs of widths one shares a tag. Two
// types, or two formats, of one width never share one.
HD uint32_t combine_tag(const CombineArgs& args) {
  const uint32_t width = static_cast<uint32_t>(args.geometry.hidden_size) * 0x9e3779b1u;
  return width >> kCountBits ^ static_cast<uint32_t>(args.geometry.element) ^ args.format << 2;
}
static_assert(kNumElements <= 4 && kNumCombineFormats <= 1 << (kTagBits - 2));

// This rank's cell of a combine.
HD uint64_t combine_cell(const CombineArgs& args, uint32_t epoch) {
  return pack_cell(epoch, 0, combine_tag(args));
}

// Adds the rows that this rank is about to read to the totals. One thread of the launch.
HD void count_rows(const CombineArgs& args, const RowSizes& sizes) {
  ExchangeCounters* totals = exchange_counters(args);
  const LocalControl* local = local_control(args);
  const uint64_t row_bytes = sizes.row + sizes.scales + sizes.row_scale;
  add_to_total(&totals->bytes_combined, load_word(&local->rows_put) * row_bytes);
  add_to_total(&totals->bytes_combined_remote, load_word(&local->remote_rows_put) * row_bytes);
}

// Leaves what the next dispatch must know of this combine. One thread of the launch; no CTA of the
// launch reads these words. pulled: the rows were read in the memory of the ranks that made them,
// so the next round's experts overwrite rows that this rank has read.
HD void leave_combined(const CombineArgs& args, uint32_t epoch, bool pulled) {
  LocalControl* local = local_control(args);
  store_word(&local->combined_epoch, epoch);
  store_word(&local->has_pulled, pulled ? 1u : 0u);
}

}  // namespace moe_nvlink
