// A round of the shared LM head: a group of ranks holds the same head, and each multiplies the rows
// of all ranks with its part of the vocabulary, so that it reads only that part of the weights. A
// library computes the product, between gather and argmax. This file is what the head's three
// kernels share.
//
//   gather    all CTAs    put this rank's rows into its slice of every rank's rows
//             P7          each CTA arrives; the others end
//             P6          the last CTA: one cell {tag, rows, epoch} to each rank (release); waits
//                         for every rank's (acquire), leaves the counts, bumps the epoch
//   argmax    all CTAs    for each row of each rank, the largest logit of this rank's vocabulary,
//                         as one word {order of the value, complement of the token id}, put to the
//                         rank that the row belongs to
//             P9          each CTA arrives; the others end
//             P8          the last CTA: one cell {tag, splits, epoch} to each rank (release); waits
//                         for every rank's (acquire), takes the largest word of each own row
//   collect   all CTAs    if the caller wants all logits: get this rank's rows of every rank's
//                         logits
//
// Only the last CTA waits, so in one stream a grid need not fit on the GPU at once. The next kernel
// of the stream sees what the peers have put, because it starts after that CTA has ended.
//
// No rank overwrites what another still reads. A rank puts rows of round n+1 only after its
// argmax n. Argmax n has waited for every rank's cell of P8, which a rank sends after its product n
// and the kernels before it: so rows n have been read. The rank puts words n+1, and its product
// overwrites logits n, only after its gather n+1. Gather n+1 has waited for every rank's cell of
// P6, which a rank sends after its argmax n and its collect n: so words n and logits n have been
// read. The counts lie in recv_counts, because a peer, and with it its cell of P6, may be at gather
// n+1 while this rank is at collect n.
//
// Programmatic dependent launch is as in dispatch.cu, with nothing to do before the wait.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

struct HeadShared {
  uint32_t epoch;             // of this round
  uint32_t has_failed;        // an earlier kernel of this rank has failed
  uint32_t is_last;           // this CTA arrived last
  uint32_t faulted;           // this round has no result
  int32_t counts[kMaxRanks];  // rows of each rank
};

// What all ranks of a round must agree on, in 7 bits, as geometry_tag() of dispatch.
HD uint32_t head_tag(const HeadGeometry& geometry) {
  uint32_t mixed = static_cast<uint32_t>(geometry.vocab_size) * 0x85ebca6bu;
  mixed = (mixed ^ static_cast<uint32_t>(geometry.hidden_size)) * 0xc2b2ae35u;
  mixed = (mixed ^ mixed >> 15 ^ static_cast<uint32_t>(geometry.max_rows_per_rank)) * 0x27d4eb2fu;
  mixed ^= static_cast<uint32_t>(geometry.row_bound) * 0x077cb531u;
  return mixed >> kCountBits ^ static_cast<uint32_t>(geometry.element);
}

// Token ids in the vocabulary of `rank`.
HD int shard_width(const HeadGeometry& geometry, int rank) {
  const int64_t first = static_cast<int64_t>(rank) * geometry.shard_size;
  const int64_t left = static_cast<int64_t>(geometry.vocab_size) - first;
  if (left <= 0) return 0;
  return static_cast<int>(left < geometry.shard_size ? left : geometry.shard_size);
}

HD int32_t* head_counts(const HeadArgs& args) {
  return reinterpret_cast<int32_t*>(
      region_of(args, args.geometry.tp_rank, args.control.recv_counts));
}

// True in the CTA that arrives last. That CTA sees all that the others did, and leaves `arrivals`
// zero for the next launch that counts there. Thread 0 arrives for its CTA: if other threads have
// stored or read what others wait for, a barrier of the CTA comes before.
HD bool arrive_last(const Cta& cta, uint32_t* arrivals, HeadShared& shared) {
  if (cta.thread == 0) {
    // P7 (gather) and P9 (argmax): release what this CTA put and read, acquire what the CTAs before
    // it released. If it were relaxed, the cells of P6 and P8 would cover the last CTA's own words
    // only, and gather could bump the epoch before another CTA has read it.
    const uint32_t before = fetch_add_acq_rel_gpu(arrivals, 1);
    shared.is_last = before + 1 == static_cast<uint32_t>(cta.num_blocks) ? 1 : 0;
    if (shared.is_last != 0) store_word(arrivals, 0u);
  }
  cta.sync();
  return shared.is_last != 0;
}

// Stores this rank's cell to every rank. After arrive_last().
HD void signal_round(const HeadArgs& args, const Cta& cta, uint32_t cells, uint32_t count,
                     const HeadShared& shared) {
  signal_peers<RuntimeConfig>(args, cta, cells,
                              pack_cell(shared.epoch, count, head_tag(args.geometry)));
}

// Waits for every rank's cell and stores its count, at most `most`, in `counts`. If a rank does not
// come, or comes from another call, this rank leaves a fault word and takes 0 for the count.
HD void wait_for_counts(const HeadArgs& args, const Cta& cta, uint32_t cells, int phase,
                        uint32_t most, int32_t* counts, HeadShared& shared) {
  const Awaited awaited{cells, phase, shared.epoch, false};
  const ExpectedCell expected{head_tag(args.geometry), most};
  Patience patience(args.timeout_ns);
  for_each_peer(args, cta, [&](int peer) {
    uint64_t cell = 0;
    const int fault = wait_for_peer(args, awaited, peer, expected, patience, &cell);
    if (fault != 0) store_relaxed_cta(&shared.faulted, 1);
    counts[peer] = fault == 0 ? static_cast<int32_t>(cell_count(cell)) : 0;
  });
}

// Reads what argmax and collect need of the round that gather has begun. A barrier of the CTA
// follows.
HD void read_round(const HeadArgs& args, const Cta& cta, HeadShared& shared) {
  const bool failed = has_failed(args);
  if (cta.thread == cta.num_threads - 1) {
    shared.epoch = load_word(&local_control(args)->epoch);
    shared.has_failed = failed ? 1 : 0;
    shared.faulted = 0;
  }
  for_each_peer(args, cta,
                [&](int peer) { shared.counts[peer] = load_word(&head_counts(args)[peer]); });
}

}  // namespace moe_nvlink
