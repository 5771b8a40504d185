// What a CTA of combine does around its items: it waits for the ranks, takes its share of the items, and
// says when it has read all rows.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "combine_shared.h"

namespace moe_nvlink {

// Waits until every rank's experts have written: once per CTA, before its first item. Returns
// whether a verb of this rank has failed.
template <class Shared>
HD bool combine_barrier(const CombineArgs& args, const Cta& cta, Shared& shared) {
  cta.sync();  // faulted is cleared before a thread may set it; epoch and has_failed are written
  if (shared.has_failed != 0) return true;
  const Awaited awaited{args.control.combine_cells, kPhaseCombine, shared.epoch, cta.block == 0};
  const ExpectedCell agreed{combine_tag(args), 0};
  Patience patience(args.timeout_ns);
  for_each_peer(args, cta, [&](int peer) {
    if (!is_active(args, peer)) return;
    uint64_t cell = 0;
    const int fault = wait_for_peer(args, awaited, peer, agreed, patience, &cell);
    if (fault != 0) store_relaxed_cta(&shared.faulted, 1);
  });
  // P4: thread t has acquired rank t's rows. The barrier hands them to the CTA's other threads,
  // which have polled other ranks. Without it they may read rows from before the signal.
  cta.sync();
  return shared.faulted != 0;
}

// Item number token * hidden_splits + split.
struct Item {
  int token;
  int split;
};

// Returns item + step. With it, the loop over the items needs no division.
HD Item advance(Item item, Item step, int splits) {
  const int split = item.split + step.split;
  const int carry = split >= splits ? 1 : 0;
  return Item{item.token + step.token + carry, split - carry * splits};
}

// The items of one CTA: every num_blocks-th, from the CTA's own number on. They depend on arguments
// only, so a CTA computes them before pdl_wait().
struct Share {
  Item first;
  Item step;
};

HD Share share_of(int splits, const Cta& cta) {
  return Share{{cta.block / splits, cta.block % splits},
               {cta.num_blocks / splits, cta.num_blocks % splits}};
}

// P14, release half. A CTA comes here after a barrier that stands behind the loads of all its threads.
HD void tell_end(const CombineArgs& args, const Cta& cta, uint32_t epoch) {
  if (args.tells_end == 0 || cta.thread != 0) return;
  LocalControl* local = local_control(args);
  const uint32_t last = static_cast<uint32_t>(cta.num_blocks) - 1;
  // Release what this CTA has read, acquire what the CTAs before it have read. If it were relaxed, the
  // word below would cover the last CTA only.
  if (last != 0 && fetch_add_acq_rel_gpu(&local->arrivals, 1) != last) return;
  store_word(&local->arrivals, 0u);
  // A rank that this round's next one does not leave out says the same by its next dispatch. Without
  // this word nobody would know when a rank that leaves has read the rows, and the others' experts
  // would write the next round's rows over them.
  store_release_sys(&local->read_epoch, epoch);
}

}  // namespace moe_nvlink
