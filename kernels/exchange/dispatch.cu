// Dispatch: put every token's payload rows into the receive buffers of the ranks that own its
// experts, tell each rank how many rows it got, wait for every rank, mark the empty slots.
//
//   all CTAs    for each token: route, then load each payload row once and store it to each target
//               (put_rows.h); with a quantiser, quantise the activations on the way
//               (put_quantised.h)
//   P2          each CTA arrives; the last kMaxFinishers to arrive are finishers, the others end
//   P1          the very last CTA: one cell {tag, count, epoch} to each rank (release); it also
//               counts the round, clears the counters and bumps the epoch
//   P14         the same CTA: if the mask leaves out a rank that took part in the round before, it
//               waits until that rank has read this rank's rows (await_combine.h)
//   finishers   each waits for every rank's cell (acquire), then marks its share of the empty slots
//               as empty: absent ids, and weights of 0 unless all ids travel (config.h). If the
//               experts read scales in another layout, it copies its share of them
//               (lay_out_scales.h)
//   counts      if counts per expert travel: the last CTA sends them after its cells, the finishers
//               take them at their end (expert_counts.h)
//
// One barrier per verb is enough. A rank starts dispatch n+1 only after its combine n. Combine n
// has waited for every rank's combine signal n, and a rank sends that signal after its experts have
// read the receive buffers. So no rank overwrites rows that are still being read. A small combine
// does not wait for signals; after it, each CTA waits here (P12, await_combine.h). Regions never
// move with batch or dtype, so the same argument covers layers of different geometry on one
// workspace.
//
// There are several finishers, because at 64 ranks x 8192 tokens they have 16 MiB of ids to mark,
// and one SM stores perhaps 100 GB/s (an estimate). They are the last CTAs to arrive, because a
// finisher waits for the cells of all ranks, and its own rank sends its cell after all CTAs of this
// grid have arrived. While a finisher waits, the waiting finishers and the CTAs that have yet to
// arrive are at most kMaxFinishers together. So if the GPU holds kMaxFinishers CTAs of this grid at
// a time, or all of them, a CTA that has yet to arrive always finds a place. The launcher ensures
// that. Before its arrival no CTA waits for another.
//
// Programmatic dependent launch: this kernel may start while the kernel before it still runs. The
// code before the wait reads arguments and writes shared memory only. Until the wait ends, every
// word of global memory may still change, the epoch too: the kernel before may be the combine of
// this workspace, and if that kernel let its dependents start early, the dispatch before it may
// still run as well.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/routing.h"
#include "../include/moe_nvlink/workspace.h"
#include "await_combine.h"
#include "dispatch_shared.h"
#include "expert_counts.h"
#include "lay_out_scales.h"
#include "put_quantised.h"
#include "put_rows.h"
#include "round_totals.h"

namespace moe_nvlink {

// Vectors that each thread stores when a CTA marks one piece of the slots.
constexpr int kVectorsPerPiece = 4;

// What a CTA that has failed adds to the arrivals beside its one. Grids are smaller.
constexpr uint32_t kFailedArrival = 1u << 16;

HD int num_finishers(const Cta& cta) {
  return cta.num_blocks < kMaxFinishers ? cta.num_blocks : kMaxFinishers;
}

// Returns this CTA's number among the finishers; it is negative if the CTA is no finisher. The last
// finisher sees all that the other CTAs did.
HD int arrive(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  // P2, release half, per CTA: the barrier orders this CTA's stores before the arrival of thread 0.
  cta.sync();
  if (cta.thread == 0) {
    // P2: release what this CTA stored and read, acquire what the CTAs before it released. If it
    // were relaxed, the cells of P1 would cover the last CTA's own rows only: a peer could read
    // stale rows of every other CTA, and the last CTA could bump the epoch before this CTA has read
    // it.
    const uint32_t mine = shared.has_failed != 0 ? kFailedArrival + 1 : 1;
    const uint32_t before = fetch_add_acq_rel_gpu(&local_control(args)->arrivals, mine);
    // A CTA that has waited in vain for the combine before (P12) has put no rows, but has counted
    // them. Then no cell may announce them.
    if (before >= kFailedArrival) shared.has_failed = 1;
    shared.finisher =
        static_cast<int>(before % kFailedArrival) - (cta.num_blocks - num_finishers(cta));
  }
  cta.sync();
  return shared.finisher;
}

// Tells every rank how many of this rank's rows lie in its buffers. The last CTA to arrive.
template <class Config>
HD void publish_counts(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  uint32_t* send_counters =
      reinterpret_cast<uint32_t*>(region_of(args, geometry.ep_rank, args.control.send_counters));
  const uint32_t tag = round_tag(args);
  for_each_peer(args, cta, [&](int peer) {
    const uint32_t count = load_relaxed_gpu(&send_counters[peer]);
    if (is_active(args, peer)) {
      signal_peer<Config>(args, args.control.dispatch_cells, peer,
                          pack_cell(shared.epoch, count, tag));
    }
    shared.sent[peer] = count;
    store_relaxed_gpu(&send_counters[peer], 0);
  });
}

// Adds this round to the totals. One thread, while the peers' cells are on their way.
HD void count_round(const DispatchArgs& args, const DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  // Not sum_of_ranks(), whose loop is rolled: the CTA waits for this thread, and an unrolled loop
  // has several loads in flight.
  uint32_t rows = 0;
  for (int rank = 0; rank < geometry.ep_size; ++rank) rows += shared.sent[rank];
  const uint32_t remote = rows - shared.sent[geometry.ep_rank];
  LocalControl* local = local_control(args);
  store_word(&local->rows_put, rows);
  store_word(&local->remote_rows_put, remote);
  add_round(args, 0, 1, rows, remote);
}

// Ends this rank's part of the round after all its rows have been stored. Only the last CTA to
// arrive calls it: until then the other CTAs read what it writes.
template <class Config>
HD void publish_round(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  LocalControl* local = local_control(args);
  if (shared.has_failed != 0) {
    if (cta.thread == 0) store_word(&local->arrivals, 0u);
    report_left_out(args, cta, shared.epoch);
    // Both words are as every CTA has read them: what has failed writes no epoch.
    const uint32_t dispatched = load_word(&local->epoch);
    if (lacks_combine(dispatched, load_word(&local->combined_epoch))) {
      report_repeated(args, cta, dispatched);
    }
    return;
  }
  publish_counts<Config>(args, cta, shared);
  await_leavers(args, cta, shared.epoch - 1);
  cta.sync();  // sent is whole; the mask of the round before has been read
  // The last thread: if threads outnumber the ranks, it has no peer to wait for.
  if (cta.thread != cta.num_threads - 1) return;
  store_word(&local->arrivals, 0u);
  store_word(&local->epoch, shared.epoch);
  leave_mask(args, shared.epoch);
  count_round(args, shared);
}

// Waits for every rank's cell. If a rank does not come, or comes with another layer's geometry,
// this rank leaves a fault word and takes 0 for the number of its rows. If this rank has failed
// before, it takes 0 for every rank and waits for none. Patience begins here, so no earlier delay,
// such as a kernel that this one waited for, counts against the peers.
HD void collect_counts(const DispatchArgs& args, const Cta& cta, bool is_last,
                       DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  int32_t* recv_counts =
      reinterpret_cast<int32_t*>(region_of(args, geometry.ep_rank, args.control.recv_counts));
  const Awaited awaited{args.control.dispatch_cells, kPhaseDispatch, shared.epoch, is_last};
  const ExpectedCell expected{round_tag(args), static_cast<uint32_t>(geometry.max_tokens_per_rank)};
  Patience patience(args.timeout_ns);
  for_each_peer(args, cta, [&](int peer) {
    int32_t count = 0;
    if (shared.has_failed == 0 && is_active(args, peer)) {
      uint64_t cell = 0;
      const int fault = wait_for_peer(args, awaited, peer, expected, patience, &cell);
      if (fault == 0) count = static_cast<int32_t>(cell_count(cell));
    }
    shared.counts[peer] = count;
    if (is_last) {
      store_word(&recv_counts[peer], count);
      store_word(&rows_from(args)[peer], static_cast<uint32_t>(count));
    }
  });
}

// Writes absent ids, and weights of 0 unless all ids travel, into this finisher's share of the
// slots after each source's rows. It writes to all such slots, because a compiler may store an
// expression of the ids in their place (Inductor does): a slot that was empty in the previous round
// may now hold the id of an expert. It goes through the slices of all ranks. If a round leaves a
// rank out, the rank's count is 0, so its whole slice is marked.
HD void mark_empty_slots(const DispatchArgs& args, const Cta& cta, const DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  int32_t* ids = reinterpret_cast<int32_t*>(
      region_of(args, geometry.ep_rank, args.payloads[kTopkIdsPayload].region));
  int32_t* weights = reinterpret_cast<int32_t*>(
      region_of(args, geometry.ep_rank, args.payloads[kTopkWeightsPayload].region));
  const int32_t absent = absent_id_at(geometry.ep_rank, args);
  const int slice_words = geometry.max_tokens_per_rank * geometry.top_k;
  const int piece_words = kVectorsPerPiece * (kVectorBytes / 4) * cta.num_threads;
  const int num_pieces = geometry.ep_size * ((slice_words + piece_words - 1) / piece_words);
  MOE_NVLINK_ROLLED
  for (int piece = shared.finisher; piece < num_pieces; piece += num_finishers(cta)) {
    const int source = piece % geometry.ep_size;
    const int filled = shared.counts[source] * geometry.top_k;
    const int start = piece / geometry.ep_size * piece_words;
    const int end = start + piece_words < slice_words ? start + piece_words : slice_words;
    const int64_t slice = static_cast<int64_t>(source) * slice_words;
    if (filled >= end) continue;
    const int64_t first = slice + (start < filled ? filled : start);
    fill_range(cta, ids, first, slice + end, absent);
    if (!all_ids_travel(args)) fill_range(cta, weights, first, slice + end, 0);
  }
}

template <class Config>
HD void dispatch_body(const DispatchArgs& args, const Cta& cta, DispatchSharedFor<Config>& shared) {
  plan_rows<Config>(args, cta, shared);
  uint32_t* send_counters = reinterpret_cast<uint32_t*>(
      region_of(args, args.geometry.ep_rank, args.control.send_counters));
  // Tokens, ids and the words that the previous dispatch left come from kernels before this one.
  if constexpr (Config::kPdl) pdl_wait();
  // Legal here: before its own wait, the next kernel touches no memory of ours, and its wait covers
  // all of this kernel. Between kernels of this project, the signal would be legal even before our
  // wait. But a third-party kernel after this one may rely on the kernel before this one to be
  // finished when it starts, which holds only if we signal after our wait. The next kernel's CTAs
  // take no place from this kernel's CTAs: they start after all CTAs of this kernel have come to
  // this line, so each of these has its place, also those that wait below.
  if constexpr (Config::kPdl) pdl_launch_dependents();
  const bool is_last_thread = cta.thread == cta.num_threads - 1;
  // Read here and not at the end, when the last CTA has already written it (P2 orders the two). The
  // last thread reads it, because the first warp shall begin with the route.
  if (is_last_thread) {
    const Exclusion exclusion = load_exclusion(args);
    const uint32_t dispatched = load_word(&local_control(args)->epoch);
    const uint32_t combined = load_word(&local_control(args)->combined_epoch);
    shared.epoch = dispatched + 1;
    const bool has_failed = exclusion.holds(args) || lacks_combine(dispatched, combined);
    shared.has_failed = has_failed ? 1 : 0;
  }
  put_all_tokens<Config>(args, cta, send_counters, shared);
  end_streams();  // before the release half of P2
  // The other CTAs have waited before their first row; the last CTA's cells come after its arrival.
  if (cta.block >= args.geometry.num_tokens) {
    await_small_combine(args, cta, &shared.has_failed);
  }
  const int finisher = arrive(args, cta, shared);
  if (finisher < 0) return;
  const bool is_last = finisher == num_finishers(cta) - 1;
  if (is_last) publish_round<Config>(args, cta, shared);
  const bool has_counts = has_expert_counts<Config>(args);
  if (has_counts && is_last && shared.has_failed == 0) send_expert_counts(args, cta, shared.epoch);
  collect_counts(args, cta, is_last, shared);
  cta.sync();  // counts of all peers in shared memory
  mark_empty_slots(args, cta, shared);
  if (args.scales_layout != kScalesLayoutLinear) {
    lay_out_scales(args, cta, num_finishers(cta), shared);
  }
  if (has_counts) {
    receive_expert_counts(args, cta, finisher, num_finishers(cta), shared.epoch,
                          shared.has_failed != 0);
  }
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_dispatch, DispatchArgs, DispatchSharedFor<Config>, dispatch_body)
