// What a dispatch waits for beside its peers' cells: P12 before it stores to its peers, and P14 before
// it ends, for ranks that its mask leaves out. And what it does if there is no combine to wait for.
//
// A dispatch after a pull combine need not wait, because that combine has waited for every rank's
// signal. A small combine waits for nobody's signal, only for rows. So the dispatch after it waits
// for the signals: a peer signals combine n after its experts have read what dispatch n brought, and
// after it has cleared the units of dispatch n. A small dispatch waits after every combine.
//
// Receivers of a small combine see no cells, so ranks whose combines had rows of different type or
// width find that out here: each compares its own cell of that combine with those of the peers.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

// Whether the dispatch before this one has had no combine: a graph that holds dispatch alone has been
// replayed. Then the peers' experts may still read the rows that this dispatch would overwrite, and a
// small dispatch would take the cells of the dispatch before for its own. So nothing is put, and
// nothing announced. A combine that has failed counts as none.
HD bool lacks_combine(uint32_t dispatched, uint32_t combined) {
  return dispatched != combined;
}

// Says so. One CTA. The first fault stays: a graph may go on after a combine that has failed.
HD void report_repeated(const DispatchArgs& args, const Cta& cta, uint32_t epoch) {
  if (cta.thread != 0) return;
  const int me = args.geometry.ep_rank;
  leave_fault(args, pack_fault(kFaultRepeated, kPhaseDispatch, me, epoch));
}

// Waits until the cell has reached the epoch; a later one will do: a peer that this rank's signals
// have reached may be a round ahead. The first look acquires, because the cell has nearly always
// arrived; then there is no second look. `seen` is what the last look found.
HD int wait_until_reached(const uint64_t* cell, uint32_t epoch, Patience& patience, uint64_t& seen,
                          uint32_t most_ahead = kAnyAhead) {
  // P12 and P14, acquire half. If this load were relaxed, what this rank stores afterwards could come
  // before the peer's last reads and zeros of the round before.
  while (!has_reached(seen = load_acquire_sys(cell), epoch, most_ahead)) {
    if (!is_reached_in_time(cell, epoch, patience, most_ahead)) return kFaultTimeout;
  }
  return 0;
}

// Waits for the combine `epoch` of the peers first, first + step, ... If a peer does not come, or has
// combined rows of another type or width, this rank reports it and sets `faulted`, a word of shared
// memory. The CTA's next barrier hands over what the threads have acquired. is_counted: as Awaited.
HD void await_combine(const DispatchArgs& args, int first, int step, uint32_t epoch,
                      bool is_counted, uint32_t* faulted) {
  const uint32_t cells = args.control.combine_cells;
  const int me = args.geometry.ep_rank;
  Patience patience(args.timeout_ns);
  for_each_peer(args, first, step, [&](int peer) {
    if (!is_active(args, peer)) return;
    // Loaded together with the first look. A kernel before this one has written it.
    const uint64_t mine = load_word(cell_of(args, me, cells, me));
    uint64_t seen = 0;
    const WaitCount count(args, is_counted, peer, patience);
    int fault = wait_until_reached(cell_of(args, me, cells, peer), epoch, patience, seen);
    count.end(patience);
    // A peer that is a round ahead has another round's cell. It is not ahead of CTA F, whose cell of
    // this round it needs for that, nor of a bulk dispatch.
    const bool disagrees = cell_epoch(seen) == epoch && cell_tag(seen) != cell_tag(mine);
    if (fault == 0 && disagrees) fault = kFaultGeometry;
    if (fault == 0) return;
    report_fault(args, cells, fault, kPhaseCombine, peer, epoch, patience);
    store_relaxed_cta(faulted, 1);
  });
}

// P12 of a dispatch whose rows carry no flags: only after a small combine. The CTA's last warp does
// it, because the first warp finds the route. Its last thread has written has_failed, which becomes
// 1 if a peer does not come. The CTA's next barrier hands over what has been acquired.
HD void await_small_combine(const DispatchArgs& args, const Cta& cta, uint32_t* has_failed) {
  const int lane = cta.thread - (cta.num_threads - Cta::kWarpThreads);
  if (lane < 0) return;
  const LocalControl* local = local_control(args);
  const uint32_t has_pulled = load_word(&local->has_pulled);
  const uint32_t epoch = load_word(&local->combined_epoch);
  cta.sync_warp();  // has_failed is written
  const bool failed = *has_failed != 0;
  cta.sync_warp();  // and has been read by all
  if (failed || has_pulled != 0) return;
  await_combine(args, lane, Cta::kWarpThreads, epoch, cta.block == 0, has_failed);
}

// P14: waits for the ranks that the mask leaves out, but that took part in the round before, `epoch`.
// Such a rank may still read this rank's rows in that round's combine: its signal came before it read
// (P3), and its next dispatch, which would say the rest, never comes. The experts, whose kernels
// follow, overwrite the rows. After a small combine there is nothing to wait for, because that reads
// memory of its own rank only. All threads of one CTA, and a barrier before leave_mask(). The words
// are cleared after a death, so nobody waits for a rank that mask() has left out.
HD void await_leavers(const DispatchArgs& args, const Cta& cta, uint32_t epoch) {
  const LocalControl* local = local_control(args);
  if (args.active_ranks == 0 || load_word(&local->has_pulled) == 0) return;
  const bool was_masked = load_word(&local->masked_epoch) == epoch;
  Patience patience(args.timeout_ns);
  for_each_peer(args, cta, [&](int peer) {
    if (is_active(args, peer)) return;
    if (was_masked && !has_rank(local->active_ranks, peer)) return;
    // The only word that is read in a peer's memory: to store it everywhere would cost every combine.
    uint64_t seen = 0;
    // One round ahead: a rank that goes on, although the others leave it out, dispatches once more
    // before it fails, and its combine then tells that epoch. No combine goes further, and small ones
    // leave the word as it is, for however many rounds.
    const int fault =
        wait_until_reached(&control_of(args, peer)->read_epoch, epoch, patience, seen, 1);
    if (fault != 0) leave_fault(args, pack_fault(fault, kPhaseCombine, peer, epoch));
  });
}

}  // namespace moe_nvlink
