// Counts per expert of all ranks, which arrive with dispatch: each rank sends one block of words to
// every rank. The caller has counted them, or dispatch counts the choices that have a destination:
// no padding, no id that is no expert, no expert of a rank that the round leaves out. An id that a
// token has twice counts twice.
//
//   sending    the last CTA of dispatch, or CTA F of small_dispatch, after its cells
//   receiving  finishers of dispatch, or receivers of small_dispatch, after the rows: they store
//              what has arrived where the caller reads it, and zeros for a rank that is left out
//
// The block travels in units (units.h) through a staging of its own, in both kernels. So no cell and
// no row waits for it, and no order but P10 and P12 stands behind it: a rank clears the units of
// dispatch n before its signal of combine n, which every rank has acquired before it stores units of
// dispatch n + 1. What a rank that is left out stores late stays in its slice of the staging, which
// nobody reads.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/routing.h"
#include "../include/moe_nvlink/units.h"
#include "../include/moe_nvlink/workspace.h"
#include "see_unit.h"

namespace moe_nvlink {

constexpr int kCountsOfUnit = kUnitWords;

HD int num_count_units(const DispatchArgs& args) {
  return units_of<TwoMarkUnit>(static_cast<int>(args.num_expert_counts) * 4);
}

// The unit that `source` sends to `owner`.
HD char* count_unit_at(const DispatchArgs& args, int owner, int source, int unit) {
  const int64_t place = static_cast<int64_t>(source) * num_count_units(args) + unit;
  return region_of(args, owner, args.counts_staging_region) + place * kUnitBytes;
}

// One word of this rank's block. A counter is cleared for the next dispatch.
HD uint32_t take_count(const DispatchArgs& args, int index) {
  if (args.expert_counts != 0) {
    return load_word(reinterpret_cast<const uint32_t*>(args.expert_counts) + index);
  }
  uint32_t* counter = expert_counters(args) + index;
  const uint32_t count = load_relaxed_gpu(counter);
  store_relaxed_gpu(counter, 0);
  return count;
}

// Sends this rank's block to every rank. One CTA, after all choices have been counted.
HD void send_expert_counts(const DispatchArgs& args, const Cta& cta, uint32_t epoch) {
  const int num_counts = static_cast<int>(args.num_expert_counts);
  const int num_units = num_count_units(args);
  MOE_NVLINK_ROLLED
  for (int unit = cta.thread; unit < num_units; unit += cta.num_threads) {
    uint32_t counts[kCountsOfUnit];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kCountsOfUnit; ++i) {
      const int index = unit * kCountsOfUnit + i;
      counts[i] = index < num_counts ? take_count(args, index) : 0;
    }
    const TwoMarkUnit packed = TwoMarkUnit::pack(counts, mark_of(epoch));
    for_each_peer(args, 0, 1, [&](int peer) {
      if (!is_active(args, peer)) return;
      put_unit(count_unit_at(args, peer, args.geometry.ep_rank, unit), packed);
    });
  }
}

// Stores a share of the blocks of all ranks where the caller reads them: `share` of `num_shares`,
// one for each CTA that receives. A rank that has failed waits for nobody and stores zeros.
HD void receive_expert_counts(const DispatchArgs& args, const Cta& cta, int share, int num_shares,
                              uint32_t epoch, bool failed) {
  const int me = args.geometry.ep_rank;
  const int num_counts = static_cast<int>(args.num_expert_counts);
  const int num_units = num_count_units(args);
  const bool waits = !failed && !has_failed(args);
  uint32_t* received = reinterpret_cast<uint32_t*>(region_of(args, me, args.counts_region));
  Patience patience(args.timeout_ns);
  MOE_NVLINK_ROLLED
  for (int item = share * cta.num_threads + cta.thread; item < args.geometry.ep_size * num_units;
       item += num_shares * cta.num_threads) {
    const int source = item / num_units;
    const int first = item % num_units * kCountsOfUnit;
    uint32_t counts[kCountsOfUnit] = {0, 0, 0};
    if (waits && is_active(args, source)) {
      char* place = count_unit_at(args, me, source, item % num_units);
      TwoMarkUnit unit;
      if (see_unit(place, mark_of(epoch), patience, unit)) {
        clear_unit<TwoMarkUnit>(place);
        unit.unpack(counts);
      } else {
        report_fault(args, args.control.dispatch_cells, kFaultTimeout, kPhaseDispatch, source,
                     epoch, patience);
      }
    }
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kCountsOfUnit; ++i) {
      if (first + i < num_counts) store_word(received + source * num_counts + first + i, counts[i]);
    }
  }
}

}  // namespace moe_nvlink
