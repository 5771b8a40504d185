// Where things are: addresses of regions in this rank's and in the peers' workspaces.
#pragma once

#include "args.h"
#include "copy.h"
#include "platform.h"

namespace moe_nvlink {

HD int rank_in(const Geometry& geometry) {
  return geometry.ep_rank;
}
HD int rank_in(const HeadGeometry& geometry) {
  return geometry.tp_rank;
}

HD int num_ranks_in(const Geometry& geometry) {
  return geometry.ep_size;
}
HD int num_ranks_in(const HeadGeometry& geometry) {
  return geometry.tp_size;
}

// Address of `rank`'s workspace. Args is the argument struct of any kernel.
template <class Args>
HD uint64_t window_of(const Args& args, int rank) {
  return args.window_base + static_cast<uint64_t>(rank) * args.rank_stride;
}

// The region's first byte in `rank`'s workspace.
template <class Args>
HD char* region_of(const Args& args, int rank, uint32_t region) {
  return reinterpret_cast<char*>(window_of(args, rank) +
                                 static_cast<uint64_t>(region) * kRegionAlignment);
}

template <class Args>
HD LocalControl* control_of(const Args& args, int rank) {
  return reinterpret_cast<LocalControl*>(region_of(args, rank, args.control.local));
}

template <class Args>
HD LocalControl* local_control(const Args& args) {
  return control_of(args, rank_in(args.geometry));
}

// Where CPU ranks look for threads of `rank` that sleep. In a cache line of its own, so signallers
// find it in their caches as long as nobody sleeps.
template <class Args>
HD uint64_t* sleepers_of(const Args& args, int rank) {
  MOE_NVLINK_HOST_ONLY(static_assert(offsetof(LocalControl, sleepers) % 64 == 0);)
  return &control_of(args, rank)->sleepers;
}

template <class Args>
HD ExchangeCounters* exchange_counters(const Args& args) {
  return reinterpret_cast<ExchangeCounters*>(
      region_of(args, rank_in(args.geometry), args.control.counters));
}

// Nanoseconds that this rank's verbs have waited for each rank since the workspace was made.
template <class Args>
HD uint64_t* wait_totals(const Args& args) {
  return reinterpret_cast<uint64_t*>(
      region_of(args, rank_in(args.geometry), args.control.wait_totals));
}

// Rows that this rank has received from each rank in the last dispatch.
template <class Args>
HD uint32_t* rows_from(const Args& args) {
  return reinterpret_cast<uint32_t*>(
      region_of(args, rank_in(args.geometry), args.control.rows_from));
}

// Adds to a counter. One thread of a launch.
HD void add_to_total(uint64_t* total, uint64_t value) {
  store_word(total, load_word(total) + value);
}

// The cell that `source` writes in `owner`'s workspace.
template <class Args>
HD uint64_t* cell_of(const Args& args, int owner, uint32_t cells_region, int source) {
  return reinterpret_cast<uint64_t*>(region_of(args, owner, cells_region)) + source;
}

}  // namespace moe_nvlink
