// The vocabulary product of draft tokens, shared by a group of ranks that hold the same LM head: each
// multiplies the rows of all ranks with its part of the vocabulary, so that it reads that part of
// the weights only. The product itself is a library's, between gather and argmax.
//
//   gather    all CTAs    put this rank's rows into its slice of every rank's rows
//             P7          each CTA arrives; the others end
//             P6          the last CTA: one cell {tag, rows, epoch} to each rank (release), waits for
//                         every rank's (acquire), leaves the counts, bumps the epoch
//   argmax    all CTAs    for each row of each rank, the largest logit of this rank's vocabulary, as
//                         one word {order of the value, complement of the token id}, put to the rank
//                         that the row belongs to
//             P9          each CTA arrives; the others end
//             P8          the last CTA: one cell {tag, splits, epoch} to each rank (release), waits
//                         for every rank's (acquire), takes the largest word of each own row
//   collect   all CTAs    where all logits are wanted: fetch this rank's rows of every rank's logits
//
// Only the last CTA waits, so in one stream nothing is asked of what is resident at once, and the
// kernel behind sees what the peers have put because it comes behind that CTA in the stream.
//
// Why nothing is overwritten that is still read: a rank puts rows of round n+1 only after its argmax n,
// which waited for every rank's cell of P8, which each sends after its product n and the kernels before
// it: so rows n are read. It puts words n+1, and its product overwrites logits n, only after its
// gather n+1, which waited for every rank's cell of P6, which each sends after its argmax n and its
// collect n: so words and logits n are read. Counts lie in recv_counts, because a peer may be at
// gather n+1, and its cell of P6 with it, while this rank is still at collect n.
//
// Programmatic dependent launch is as in dispatch.cu; in front of the wait there is nothing to do.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

struct HeadShared {
  uint32_t epoch;             // of this round
  uint32_t has_failed;        // an earlier kernel of this rank has
  uint32_t is_last;           // this CTA arrived last
  uint32_t faulted;           // what this round asks for is not to be had
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

// Token ids that `rank` answers for.
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

// True in the CTA that arrives last, which sees all that the others did. `arrivals` is zero again
// before the next launch that counts there.
HD bool arrive_last(const Cta& cta, uint32_t* arrivals, HeadShared& shared) {
  // P7 and P9, release half, per CTA: the barrier puts this CTA's stores before its thread 0's
  // arrival.
  cta.sync();
  if (cta.thread == 0) {
    // P7 (gather) and P9 (argmax): release what this CTA put and read, acquire what the CTAs before
    // it released. Relaxed instead, the cells of P6 and P8 would cover the last CTA's own words
    // only; and gather could bump the epoch before another CTA has read it.
    const uint32_t before = fetch_add_acq_rel_gpu(arrivals, 1);
    shared.is_last = before + 1 == static_cast<uint32_t>(cta.num_blocks) ? 1 : 0;
    if (shared.is_last != 0) store_word(arrivals, 0u);
  }
  cta.sync();
  return shared.is_last != 0;
}

// The cell of this rank to every rank. Behind arrive_last().
HD void signal_ranks(const HeadArgs& args, const Cta& cta, uint32_t cells, uint32_t epoch,
                     uint32_t count) {
  const HeadGeometry& geometry = args.geometry;
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.tp_size; peer += cta.num_threads) {
    // P6 (gather) and P8 (argmax), release: what was put before the cell. Without it a peer may see
    // the new epoch and old words.
    store_release_sys(cell_of(args, peer, cells, geometry.tp_rank),
                      pack_cell(epoch, count, head_tag(geometry)));
  }
}

// Waits for every rank's cell; what it counts, at most `most`, goes to `counts`. A rank that does
// not come, or comes from another call, leaves a fault word and counts as zero.
HD void wait_for_ranks(const HeadArgs& args, const Cta& cta, uint32_t cells, int phase,
                       uint32_t most, int32_t* counts, HeadShared& shared) {
  const HeadGeometry& geometry = args.geometry;
  Patience patience(args.timeout_ns);
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.tp_size; peer += cta.num_threads) {
    uint64_t cell = 0;
    int fault =
        wait_for_epoch(cell_of(args, geometry.tp_rank, cells, peer), shared.epoch, patience, &cell);
    if (fault == 0 && cell_tag(cell) != head_tag(geometry)) fault = kFaultGeometry;
    if (fault == 0 && cell_count(cell) > most) fault = kFaultBadCount;
    if (fault != 0) {
      report_fault(args, cells, fault, phase, peer, shared.epoch, patience);
      store_relaxed_cta(&shared.faulted, 1);
    }
    counts[peer] = fault == 0 ? static_cast<int32_t>(cell_count(cell)) : 0;
  }
}

// What argmax and collect know of the round that gather has begun; behind a barrier of the CTA.
HD void read_round(const HeadArgs& args, const Cta& cta, HeadShared& shared) {
  const bool failed = has_failed(args);
  if (cta.thread == cta.num_threads - 1) {
    shared.epoch = load_word(&local_control(args)->epoch);
    shared.has_failed = failed ? 1 : 0;
    shared.faulted = 0;
  }
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < args.geometry.tp_size; peer += cta.num_threads) {
    shared.counts[peer] = load_word(&head_counts(args)[peer]);
  }
}

// Rows of the first `ranks` ranks.
HD int sum_of_counts(const HeadShared& shared, int ranks) {
  int sum = 0;
  MOE_NVLINK_ROLLED
  for (int rank = 0; rank < ranks; ++rank) sum += shared.counts[rank];
  return sum;
}

}  // namespace moe_nvlink
