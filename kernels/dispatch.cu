// Dispatch: put every token's payload rows into the receive buffers of the ranks that own its
// experts, tell each rank how many rows it got, wait for everybody, leave the empty slots marked.
//
//   all CTAs    for each token: route, then load each payload row once and store it to each target
//   P2          each CTA arrives; the last one goes on alone
//   P1          last CTA: one cell {count, epoch} to each rank (release), wait for theirs (acquire)
//   last CTA    expert id -1 into the slots nobody filled, counts out, counters reset, epoch bumped
//
// Why one barrier per verb is enough: a rank starts dispatch n+1 only after its combine n, which
// waited for every rank's combine signal n, which each rank sends after its experts have read the
// receive buffers; so nobody overwrites rows still being read. Regions never move with batch or
// dtype, so the same argument covers layers of different geometry on one workspace.
#include "include/moe_nvlink/args.h"
#include "include/moe_nvlink/copy.h"
#include "include/moe_nvlink/epoch_flags.h"
#include "include/moe_nvlink/memory_order.h"
#include "include/moe_nvlink/platform.h"
#include "include/moe_nvlink/routing.h"
#include "include/moe_nvlink/workspace.h"

namespace moe_nvlink {

struct DispatchShared {
  TokenRoute route;
  int32_t is_last_cta;
  int32_t counts[kMaxRanks];  // rows received from each rank
};

// Where the token's row of a payload goes because of each k; null for a k without a row of its own.
template <class Config>
HD void find_targets(const DispatchArgs& args, const TokenRoute& route, const Payload& payload,
                     char** targets) {
  const Geometry& geometry = args.geometry;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k_of<Config>(geometry); ++k) {
    const int target = route.target_ranks[k];
    const int row = route.slots[k] - (target - geometry.ep_rank) * geometry.max_tokens_per_rank;
    targets[k] = route.slots[k] == kNoSlot ? nullptr
                                           : region_of(args, target, payload.region) +
                                                 static_cast<uint64_t>(row) * payload.row_bytes;
  }
}

// The ids travel as routing left them (in shared memory, where put_row cannot load from), so that
// no receiver meets an id that is no expert.
template <class Config>
HD void put_ids(const DispatchArgs& args, const Cta& cta, const TokenRoute& route) {
  const int top_k = top_k_of<Config>(args.geometry);
  char* targets[Config::kTopKBound];
  find_targets<Config>(args, route, args.payloads[kTopkIdsPayload], targets);
  for (int i = cta.thread; i < top_k; i += cta.num_threads) {
    Vector<4> id;
    *reinterpret_cast<int32_t*>(&id) = route.ids[i];
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      if (targets[k] != nullptr) store_vector(targets[k] + 4 * i, id);
    }
  }
}

template <class Config>
HD void put_token(const DispatchArgs& args, const Cta& cta, const TokenRoute& route, int token) {
  put_ids<Config>(args, cta, route);
  char* targets[Config::kTopKBound];
  for (int i = kTopkWeightsPayload; i < static_cast<int>(args.num_payloads); ++i) {
    const Payload& payload = args.payloads[i];
    const char* row = reinterpret_cast<const char*>(payload.source) +
                      static_cast<uint64_t>(token) * payload.row_bytes;
    find_targets<Config>(args, route, payload, targets);
    put_row(cta, row, targets, top_k_of<Config>(args.geometry), static_cast<int>(payload.row_bytes),
            vector_bytes_for(payload.source, payload.row_bytes));
  }
}

// True in the CTA that arrives last; it then sees all that the other CTAs did.
HD bool arrive(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  // P2 release half, per CTA: the barrier puts this CTA's stores before the arrival of its thread 0.
  cta.sync();
  if (cta.thread == 0) {
    // P2: release what this CTA stored, acquire what the CTAs before it released. Relaxed instead,
    // the cells of P1 would cover the last CTA's own rows only, and a peer could read stale rows
    // of every other CTA.
    const uint32_t before = fetch_add_acq_rel_gpu(&local_control(args)->arrivals, 1);
    shared.is_last_cta = before == static_cast<uint32_t>(cta.num_blocks - 1);
  }
  cta.sync();
  return shared.is_last_cta != 0;
}

// Tells every rank how many of this rank's rows lie in its buffer.
HD void publish_counts(const DispatchArgs& args, const Cta& cta, uint32_t epoch) {
  const Geometry& geometry = args.geometry;
  uint32_t* send_counters =
      reinterpret_cast<uint32_t*>(region_of(args, geometry.ep_rank, args.control.send_counters));
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    const uint32_t count = load_relaxed_gpu(&send_counters[peer]);
    // P1 release: rows before cell. Without it the peer may see the new epoch and the old rows.
    store_release_sys(cell_of(args, peer, args.control.dispatch_cells, geometry.ep_rank),
                      pack_cell(epoch, count));
  }
}

// Waits for every rank's cell. A rank that does not come leaves a fault word and counts as zero rows.
HD void collect_counts(const DispatchArgs& args, const Cta& cta, uint32_t epoch,
                       DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  int32_t* recv_counts =
      reinterpret_cast<int32_t*>(region_of(args, geometry.ep_rank, args.control.recv_counts));
  const uint64_t start = now_ns();
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    uint64_t cell = 0;
    int32_t count = 0;
    if (!wait_for_epoch(cell_of(args, geometry.ep_rank, args.control.dispatch_cells, peer), epoch,
                        start, args.timeout_ns, &cell)) {
      report_fault(args, kFaultTimeout, kPhaseDispatch, peer, epoch);
    } else if (cell_count(cell) > static_cast<uint32_t>(geometry.max_tokens_per_rank)) {
      report_fault(args, kFaultBadCount, kPhaseDispatch, peer, epoch);
    } else {
      count = static_cast<int32_t>(cell_count(cell));
    }
    shared.counts[peer] = count;
    recv_counts[peer] = count;
  }
}

// Writes expert id -1 into all slots behind each source's rows. Writing only the difference to the
// previous round would do, if nobody wrote to the ids in between; but a compiler may put an
// expression of the ids where they lay (Inductor does), and a stale id would then be an expert.
HD void mark_empty_slots(const DispatchArgs& args, const Cta& cta, const DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  const int64_t slice_words = static_cast<int64_t>(geometry.max_tokens_per_rank) * geometry.top_k;
  int32_t* ids = reinterpret_cast<int32_t*>(
      region_of(args, geometry.ep_rank, args.payloads[kTopkIdsPayload].region));
  for (int source = 0; source < geometry.ep_size; ++source) {
    int32_t* slice = ids + source * slice_words;
    const int64_t filled = static_cast<int64_t>(shared.counts[source]) * geometry.top_k;
    for (int64_t word = filled + cta.thread; word < slice_words; word += cta.num_threads) {
      slice[word] = -1;
    }
  }
}

// Adds this round to the totals, clears the send counters for the next one. One thread.
HD void count_round(const DispatchArgs& args) {
  const Geometry& geometry = args.geometry;
  LocalControl* local = local_control(args);
  ExchangeCounters* totals = exchange_counters(args);
  uint32_t* send_counters =
      reinterpret_cast<uint32_t*>(region_of(args, geometry.ep_rank, args.control.send_counters));
  uint32_t rows = 0;
  for (int peer = 0; peer < geometry.ep_size; ++peer) {
    rows += load_relaxed_gpu(&send_counters[peer]);
  }
  const uint32_t remote = rows - load_relaxed_gpu(&send_counters[geometry.ep_rank]);
  for (int peer = 0; peer < geometry.ep_size; ++peer) store_relaxed_gpu(&send_counters[peer], 0);
  uint64_t token_bytes = 0;
  for (uint32_t i = 0; i < args.num_payloads; ++i) token_bytes += args.payloads[i].row_bytes;
  const uint64_t tokens = static_cast<uint64_t>(geometry.num_tokens);
  const uint64_t peers = static_cast<uint64_t>(geometry.ep_size - 1);
  local->rows_put = rows;
  local->remote_rows_put = remote;
  totals->rounds += 1;
  totals->tokens += tokens;
  totals->destinations += rows;
  totals->remote_destinations += remote;
  totals->bytes_dispatched += rows * token_bytes;
  totals->bytes_dispatched_remote += remote * token_bytes;
  totals->bytes_allgather += tokens * peers * token_bytes;
  totals->bytes_reducescatter += tokens * peers * args.combine_row_bytes;
}

// What the last CTA does once all rows of this rank are on their way.
HD void finish_dispatch(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  LocalControl* local = local_control(args);
  const uint32_t epoch = local->epoch + 1;
  publish_counts(args, cta, epoch);
  collect_counts(args, cta, epoch, shared);
  cta.sync();  // counts of all peers in shared memory; every thread has read epoch
  mark_empty_slots(args, cta, shared);
  if (cta.thread == 0) {
    count_round(args);
    local->arrivals = 0;
    local->epoch = epoch;
  }
}

template <class Config>
HD void dispatch_body(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  const int top_k = top_k_of<Config>(args.geometry);
  const int32_t* topk_ids = reinterpret_cast<const int32_t*>(args.payloads[kTopkIdsPayload].source);
  int32_t* send_slots = reinterpret_cast<int32_t*>(args.send_slots);
  uint32_t* send_counters = reinterpret_cast<uint32_t*>(
      region_of(args, args.geometry.ep_rank, args.control.send_counters));
  // Tokens, ids and the words the previous dispatch left all come from kernels before this one.
  if constexpr (Config::kPdl) pdl_wait();
  // The next kernel waits for the whole of this one before it reads anything, so it may be set up now.
  if constexpr (Config::kPdl) pdl_launch_dependents();
  for (int token = cta.block; token < args.geometry.num_tokens; token += cta.num_blocks) {
    route_token<Config>(cta, args.geometry, topk_ids + static_cast<int64_t>(token) * top_k,
                        send_slots + static_cast<int64_t>(token) * top_k, send_counters,
                        shared.route);
    put_token<Config>(args, cta, shared.route, token);
    cta.sync();  // the route is read until here; the next token overwrites it
  }
  if (arrive(args, cta, shared)) finish_dispatch(args, cta, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_dispatch, DispatchArgs, DispatchShared, dispatch_body)
