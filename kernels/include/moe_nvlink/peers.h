// What a kernel does for each rank of its exchange: it signals, waits and sums. A peer is any rank
// of the exchange, this rank included: a rank signals itself and waits for itself as for the
// others.
#pragma once

#include "active_ranks.h"
#include "config.h"
#include "epoch_flags.h"
#include "memory_order.h"
#include "platform.h"
#include "workspace.h"

namespace moe_nvlink {

// Calls visit(peer) for the peers first, first + step, ... A round may leave ranks out
// (active_ranks.h): a loop that signals or waits asks is_active(), and a loop that counts stores 0
// for such a rank. Sums and the marking of empty slots go through all ranks: such a rank adds no
// rows, and all slots of its slice are marked as empty.
template <class Args, class Visit>
HD void for_each_peer(const Args& args, int first, int step, const Visit& visit) {
  const int num_ranks = num_ranks_in(args.geometry);
  MOE_NVLINK_ROLLED
  for (int peer = first; peer < num_ranks; peer += step) visit(peer);
}

// The same, shared by the CTA's threads. A thread has the same peers in each such loop. So between
// two loops it needs no barrier for what it has stored about its own peers.
template <class Args, class Visit>
HD void for_each_peer(const Args& args, const Cta& cta, const Visit& visit) {
  for_each_peer(args, cta.thread, cta.num_threads, visit);
}

// Calls visit(row, peer) for each of num_rows rows and each peer. The CTAs share these pairs. The
// first peer of a row depends on the row and on this rank, so no peer is the first one of every
// rank.
template <class Args, class Visit>
HD void for_each_row_and_peer(const Args& args, const Cta& cta, int num_rows, const Visit& visit) {
  const int num_items = num_rows * num_ranks_in(args.geometry);
  MOE_NVLINK_ROLLED
  for (int item = cta.block; item < num_items; item += cta.num_blocks) {
    const int row = item / num_ranks_in(args.geometry);
    visit(row, (item + row + rank_in(args.geometry)) % num_ranks_in(args.geometry));
  }
}

// Stores the peer's copy of this rank's cell in `cells`.
template <class Config, class Args>
HD void signal_peer(const Args& args, uint32_t cells, int peer, uint64_t cell) {
  // P1, P3, P6, P8, P11, P12, release: what this rank has put, written and read comes before the cell. That
  // holds for the kernels before this one too, which pdl_wait orders: P3 covers the experts' rows,
  // and the experts' reads of the receive buffers before the peer's next dispatch.
  // Without it the peer may see the new epoch and old rows, words or logits.
  uint64_t* address = cell_of(args, peer, cells, rank_in(args.geometry));
  if constexpr (Config::kAsyncRelease) {
    store_async_release_sys(address, cell);
  } else {
    store_release_sys(address, cell);
  }
  MOE_NVLINK_HOST_ONLY(host::wake_sleepers(address, sleepers_of(args, peer));)
}

// Stores one cell to every peer that takes part. One CTA.
template <class Config, class Args>
HD void signal_peers(const Args& args, const Cta& cta, uint32_t cells, uint64_t cell) {
  for_each_peer(args, cta, [&](int peer) {
    if (is_active(args, peer)) signal_peer<Config>(args, cells, peer, cell);
  });
}

// What a kernel waits for: the peers' cells of one region, at one epoch.
struct Awaited {
  uint32_t cells;
  int phase;  // kPhase*, which a fault word names
  uint32_t epoch;
  bool is_counted;  // this CTA adds its waits to the totals
};

// What a cell must hold in addition to the epoch.
struct ExpectedCell {
  uint32_t tag;
  uint32_t most;  // the largest count
  HD int fault_of(uint64_t cell) const {
    if (cell_tag(cell) != tag) return kFaultGeometry;
    return cell_count(cell) > most ? kFaultBadCount : 0;
  }
};

// Waits for the peer's cell. On 0, all that the peer did before it signalled is visible to this
// thread, and `cell` holds the cell. Otherwise the fault, which has been reported.
template <class Args, class Expected>
HD int wait_for_peer(const Args& args, const Awaited& awaited, int peer, const Expected& expected,
                     Patience& patience, uint64_t* cell) {
  const WaitCount count(args, awaited.is_counted, peer, patience);
  // The cells of a region are signalled by signal_peer(), which wakes.
  MOE_NVLINK_HOST_ONLY(if (host::kSleeps) patience.sleepers =
                           sleepers_of(args, rank_in(args.geometry));)
  int fault = wait_for_epoch(cell_of(args, rank_in(args.geometry), awaited.cells, peer),
                             awaited.epoch, patience, cell);
  count.end(patience);
  if (fault == 0) fault = expected.fault_of(*cell);
  if (fault != 0) {
    report_fault(args, awaited.cells, fault, awaited.phase, peer, awaited.epoch, patience);
  }
  return fault;
}

// The sum of the values of the first `num_ranks` ranks. A rank that a round leaves out has the
// value 0.
template <class Value>
HD Value sum_of_ranks(const Value* values, int num_ranks) {
  Value sum = 0;
  MOE_NVLINK_ROLLED
  for (int rank = 0; rank < num_ranks; ++rank) sum += values[rank];
  return sum;
}

// Finds the rank that a row came from. Rows have numbers in the order of the ranks: the rows of
// rank 0, then those of rank 1, ... A walk goes forward only.
template <class Count>
struct RowWalk {
  int rank = 0;
  Count before = 0;  // rows of the ranks before `rank`

  // counts: rows of each rank. row: less than their sum, and not less than in the call before.
  HD void go_to(Count row, const Count* counts) {
    while (row - before >= counts[rank]) before += counts[rank++];
  }
};

}  // namespace moe_nvlink
