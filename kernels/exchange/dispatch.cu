// Dispatch: put every token's payload rows into the receive buffers of the ranks that own its
// experts, tell each rank how many rows it got, wait for everybody, leave the empty slots marked.
//
//   all CTAs    for each token: route, then load each payload row once and store it to each target,
//               the activations as they are or quantised on the way
//   P2          each CTA arrives; the last kMaxFinishers to arrive are finishers, the others end
//   P1          the very last CTA: one cell {tag, count, epoch} to each rank (release); it also
//               counts the round, clears the counters and bumps the epoch
//   finishers   each waits for every rank's cell (acquire), then marks its share of the slots
//               nobody filled with expert id -1
//
// Why one barrier per verb is enough: a rank starts dispatch n+1 only after its combine n, which
// waited for every rank's combine signal n, which each rank sends after its experts have read the
// receive buffers; so nobody overwrites rows still being read. Regions never move with batch or
// dtype, so the same argument covers layers of different geometry on one workspace.
//
// Why several finishers: at 64 ranks x 8192 tokens there are 16 MiB of ids to mark, and one SM
// stores perhaps 100 GB/s (an estimate). Why the last ones: a finisher waits, for its own rank's cell too, which
// needs all CTAs of this grid to have arrived. Those still missing when the first finisher waits are
// fewer than kMaxFinishers, and so are the waiting CTAs: where the GPU holds kMaxFinishers CTAs at
// a time, or the whole grid, one place is always left for the missing ones to run in. The launcher
// sees to that. Before its arrival no CTA waits for anybody.
//
// Quantisation: a row is loaded, quantised in registers and stored with its scales. One scale for a
// whole row (fp8_token) needs the row's largest magnitude first: every thread looks at its part
// before the barrier that ends the token's routing, which publishes the CTA's parts too, and loads
// that part once more behind it, out of L1.
//
// Programmatic dependent launch: this kernel may start while the one before it still runs. What
// stands before the wait reads arguments and writes shared memory only; every word of global memory,
// the epoch too, may still change: the kernel before may be the combine of this workspace, and
// if it signalled its own dependents early, the dispatch before that one may be running as well.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/numeric.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/quantise.h"
#include "../include/moe_nvlink/routing.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

// Slots are marked in pieces of so many vectors per thread.
constexpr int kVectorsPerPiece = 4;

// How the CTA's threads share one payload's row.
struct RowPlan {
  int32_t vector_bytes;
  int32_t num_lanes;     // threads that have a part of it
  int32_t first_thread;  // lane 0
};

struct DispatchShared {
  TokenRoute routes[2];  // of this token and of the next
  RowPlan plans[kMaxPayloads];
  uint32_t epoch;             // of this round
  uint32_t has_failed;        // an earlier verb of this rank has
  int32_t finisher;           // number among the finishers; negative in the other CTAs
  uint32_t sent[kMaxRanks];   // rows put to each rank; in the last CTA
  int32_t counts[kMaxRanks];  // rows received from each rank; in finishers
};

// With a quantiser: what it keeps beside, from one token to the next.
struct QuantisingDispatchShared : DispatchShared {
  RowAmax amax[2];  // of this token's row and of the next
};

template <bool Quantises>
struct DispatchSharedOf {
  using Type = DispatchShared;
};
template <>
struct DispatchSharedOf<true> {
  using Type = QuantisingDispatchShared;
};
template <class Config>
using DispatchSharedFor = typename DispatchSharedOf<Config::kQuantiser != kQuantiserNone>::Type;

template <class Config>
HD int quantiser_of(const DispatchArgs& args) {
  return Config::kQuantiser >= 0 ? Config::kQuantiser : static_cast<int>(args.quantiser);
}

// Whether the quantiser writes this payload's rows.
template <class Config>
HD bool is_quantised(const DispatchArgs& args, int payload) {
  const int quantiser = quantiser_of<Config>(args);
  if (quantiser == kQuantiserNone) return false;
  return payload == kFirstCallerPayload ||
         (payload == kFirstCallerPayload + 1 && has_scales(quantiser));
}

HD RowPlan plan_row(const Payload& payload, bool is_ids) {
  // The ids come out of shared memory, one word at a time.
  const int bytes = is_ids ? 4 : vector_bytes_for(payload.source, payload.row_bytes);
  return RowPlan{bytes, lanes_for(static_cast<int>(payload.row_bytes), bytes), 0};
}

// Rows follow one another around the CTA: payload i begins at the thread behind the last one of
// payload i - 1. So a short row is moved while the long one is, by threads that have less of that to
// do, and a warp without a part of a row skips it. Nothing here comes from an earlier kernel.
// A row that is quantised begins at thread 0, for the lanes of a block exchange values; the others
// follow it.
template <class Config>
HD void plan_rows(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  const int num_payloads = static_cast<int>(args.num_payloads);
  MOE_NVLINK_ROLLED
  for (int i = cta.thread; i < num_payloads; i += cta.num_threads) {
    int before = 0;
    if (quantiser_of<Config>(args) != kQuantiserNone) {
      before = (args.geometry.hidden_size + kLaneElements - 1) / kLaneElements;
    }
    MOE_NVLINK_ROLLED
    for (int j = 0; j < i; ++j) {
      if (is_quantised<Config>(args, j)) continue;
      before += plan_row(args.payloads[j], j == kTopkIdsPayload).num_lanes;
    }
    RowPlan plan = plan_row(args.payloads[i], i == kTopkIdsPayload);
    plan.first_thread = before % cta.num_threads;
    if (is_quantised<Config>(args, i)) plan.num_lanes = 0;
    shared.plans[i] = plan;
  }
}

// Where the token's row of a payload goes: to each k that has a row of its own. On the GPU the others
// are null in between, so that a loop over all k can be unrolled; on the host they are left out.
template <class Config>
struct Targets {
  char* rows[Config::kTopKBound];
  int present;

  // A constant where the loops over it are unrolled: rows stay in registers.
  HD int count(const Geometry& geometry) const {
    return kSkipAbsentRows ? present : top_k_of<Config>(geometry);
  }

  HD Targets(const DispatchArgs& args, const TokenRoute& route, const Payload& payload)
      : present(0) {
    const uint64_t region = static_cast<uint64_t>(payload.region) * kRegionAlignment;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k_of<Config>(args.geometry); ++k) {
      const int row = route.rows[k];
      if (kSkipAbsentRows && row == kNoSlot) continue;
      const int place = kSkipAbsentRows ? present : k;
      rows[place] = row == kNoSlot
                        ? nullptr
                        : reinterpret_cast<char*>(route.windows[k] + region +
                                                  static_cast<uint64_t>(row) * payload.row_bytes);
      present = place + 1;
    }
  }
};

// The ids travel as routing left them (in shared memory, where put_row cannot load from), so that
// no receiver meets an id that is no expert.
template <class Config>
HD void put_ids(const DispatchArgs& args, const Cta& cta, int lane, const TokenRoute& route,
                const Targets<Config>& targets) {
  const int top_k = top_k_of<Config>(args.geometry);
  MOE_NVLINK_ROLLED
  for (int i = lane; i < top_k; i += cta.num_threads) {
    MOE_NVLINK_UNROLL
    for (int k = 0; k < targets.count(args.geometry); ++k) {
      if (targets.rows[k] != nullptr) {
        store_word(reinterpret_cast<int32_t*>(targets.rows[k]) + i, route.ids[i]);
      }
    }
  }
}

template <class Config>
HD bool has_target(const DispatchArgs& args, const TokenRoute& route) {
  bool any = false;
  for (int k = 0; k < top_k_of<Config>(args.geometry); ++k) any = any || route.rows[k] != kNoSlot;
  return any;
}

// The order of a token's targets is its router's, another one for every token and rank, and each
// vector goes to all of them before the next: no rank is everybody's first target, so the order is
// not turned by rank as well.
template <class Config>
HD void put_token(const DispatchArgs& args, const Cta& cta, const DispatchShared& shared,
                  const TokenRoute& route, int token) {
  // A token without a target, padding, is not even read.
  if (!has_target<Config>(args, route)) return;
  MOE_NVLINK_ROLLED
  for (int i = 0; i < static_cast<int>(args.num_payloads); ++i) {
    const RowPlan plan = shared.plans[i];
    const int turned = cta.thread - plan.first_thread;
    const int lane = turned < 0 ? turned + cta.num_threads : turned;
    if (lane >= plan.num_lanes) continue;
    const Payload& payload = args.payloads[i];
    const Targets<Config> targets(args, route, payload);
    if (i == kTopkIdsPayload) {
      put_ids<Config>(args, cta, lane, route, targets);
    } else {
      const char* row = reinterpret_cast<const char*>(payload.source) +
                        static_cast<uint64_t>(token) * payload.row_bytes;
      put_row(cta, lane, row, targets.rows, targets.count(args.geometry),
              static_cast<int>(payload.row_bytes), plan.vector_bytes);
    }
  }
}

// Where a token's quantised row and its scales go: to each target of its route. Addresses are made
// where they are used, of words in shared memory: as pointers, two for each k, they would take the
// registers that the elements are in.
template <class Config>
struct RouteTargets {
  const TokenRoute& route;
  const Payload& rows;
  const Payload& scales;
  int top_k;

  template <int Bytes>
  HD void store_to(const Payload& payload, int offset, const Vector<Bytes>& vector) const {
    const uint64_t region = static_cast<uint64_t>(payload.region) * kRegionAlignment;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      const int row = route.rows[k];
      if (row == kNoSlot) continue;
      store_vector(reinterpret_cast<char*>(route.windows[k] + region +
                                           static_cast<uint64_t>(row) * payload.row_bytes) +
                       offset,
                   vector);
    }
  }
  template <int Bytes>
  HD void store(int offset, const Vector<Bytes>& vector) const {
    store_to(rows, offset, vector);
  }
  template <int Bytes>
  HD void store_scales(int offset, const Vector<Bytes>& vector) const {
    store_to(scales, offset, vector);
  }
};

// What one launch knows of the activations it quantises. Quantiser and element are the kernel's on
// the GPU; on the host the arguments choose among all.
template <class Config, int Quantiser, class Element>
struct Quantising {
  const DispatchArgs& args;
  const Cta& cta;
  bool wide;
  float global_scale;

  HD Quantising(const DispatchArgs& the_args, const Cta& the_cta, float scale)
      : args(the_args),
        cta(the_cta),
        wide(loads_are_wide<Element>(the_args.payloads[kFirstCallerPayload].source,
                                     the_args.geometry.hidden_size)),
        global_scale(scale) {}

  HD const char* row_of(int token) const {
    const uint64_t row_bytes =
        static_cast<uint64_t>(args.geometry.hidden_size) * sizeof(typename Element::Storage);
    return reinterpret_cast<const char*>(args.payloads[kFirstCallerPayload].source) +
           static_cast<uint64_t>(token) * row_bytes;
  }

  // Before the route is whole; a barrier of the CTA stands between this and put(). Reads no row that
  // goes nowhere.
  HD void prepare(int token, RowAmax& amax) const {
    if constexpr (Quantiser == kQuantiserFp8Token) {
      if (!has_expert(token)) return;
      leave_row_amax<Element>(cta, row_of(token), args.geometry.hidden_size, wide, amax);
    }
  }

  // Whether the token has an expert, without its route. Every thread finds out for itself.
  HD bool has_expert(int token) const {
    const int top_k = top_k_of<Config>(args.geometry);
    const int32_t* ids = reinterpret_cast<const int32_t*>(args.payloads[kTopkIdsPayload].source) +
                         static_cast<int64_t>(token) * top_k;
    bool any = false;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      const int32_t id = load_word(ids + k);
      any = any || (id >= 0 && id < args.geometry.num_experts);
    }
    return any;
  }

  HD void put(int token, const TokenRoute& route, const RowAmax& amax) const {
    if (!has_target<Config>(args, route)) return;
    uint32_t row_amax = 0;
    if constexpr (Quantiser == kQuantiserFp8Token) row_amax = take_row_amax(cta, amax);
    const RouteTargets<Config> targets{route, args.payloads[kFirstCallerPayload],
                                       args.payloads[kFirstCallerPayload + 1],
                                       top_k_of<Config>(args.geometry)};
    quantise_row<Quantiser, Element>(cta, cta.thread, row_of(token), args.geometry.hidden_size,
                                     wide, row_amax, global_scale, targets);
  }
};

// function(Quantising<..>) for the launch's quantiser and element type.
template <class Config, int Quantiser, class Function>
HD void with_element(const DispatchArgs& args, const Cta& cta, float scale,
                     const Function& function) {
  constexpr int kElement = Config::kElement;
  const int element = kElement >= 0 ? kElement : args.geometry.element;
  if constexpr (kElement < 0 || kElement == kElementBf16) {
    if (element == kElementBf16) function(Quantising<Config, Quantiser, Bf16>(args, cta, scale));
  }
  if constexpr (kElement < 0 || kElement == kElementFp16) {
    if (element == kElementFp16) function(Quantising<Config, Quantiser, Fp16>(args, cta, scale));
  }
  if constexpr (kElement < 0 || kElement == kElementFp32) {
    if (element == kElementFp32) function(Quantising<Config, Quantiser, Fp32>(args, cta, scale));
  }
}

template <class Config, class Function>
HD void with_quantiser(const DispatchArgs& args, const Cta& cta, float scale,
                       const Function& function) {
  if constexpr (Config::kQuantiser >= 0) {
    with_element<Config, Config::kQuantiser>(args, cta, scale, function);
  } else {
    switch (static_cast<QuantiserCode>(args.quantiser)) {
      case kQuantiserNone:
        return;
      case kQuantiserFp8Block:
        return with_element<Config, kQuantiserFp8Block>(args, cta, scale, function);
      case kQuantiserFp8Token:
        return with_element<Config, kQuantiserFp8Token>(args, cta, scale, function);
      case kQuantiserFp8Tensor:
        return with_element<Config, kQuantiserFp8Tensor>(args, cta, scale, function);
      case kQuantiserMxfp8:
        return with_element<Config, kQuantiserMxfp8>(args, cta, scale, function);
      case kQuantiserNvfp4:
        return with_element<Config, kQuantiserNvfp4>(args, cta, scale, function);
    }
  }
}

// Every num_blocks-th token, as it is. No barrier behind a token: a thread that is ahead writes the
// other route; to come back to this one it must pass the barrier inside the next token's
// route_token, and so must every thread that still reads this one.
template <class Config>
HD void put_tokens(const DispatchArgs& args, const Cta& cta, bool failed, uint32_t* send_counters,
                   DispatchShared& shared) {
  int turn = 0;
  for (int token = cta.block; token < args.geometry.num_tokens; token += cta.num_blocks) {
    TokenRoute& route = shared.routes[turn];
    route_token<Config>(args, cta, token, failed, send_counters, route);
    put_token<Config>(args, cta, shared, route, token);
    turn = 1 - turn;
  }
}

// The same with the activations quantised. The parts of a row's amax stand under the same barrier as
// its route, and are two for the same reason.
template <class Config, class Kind>
HD void put_quantised_tokens(const DispatchArgs& args, const Cta& cta, bool failed,
                             uint32_t* send_counters, QuantisingDispatchShared& shared,
                             const Kind& quantising) {
  int turn = 0;
  for (int token = cta.block; token < args.geometry.num_tokens; token += cta.num_blocks) {
    TokenRoute& route = shared.routes[turn];
    if (cta.thread < Cta::kWarpThreads) {
      route_in_warp<Config>(args, cta, token, failed, send_counters, route);
    }
    quantising.prepare(token, shared.amax[turn]);
    cta.sync();  // the route and the parts of the row's amax are whole
    put_token<Config>(args, cta, shared, route, token);
    quantising.put(token, route, shared.amax[turn]);
    turn = 1 - turn;
  }
}

// For with_quantiser. A class, not a generic lambda: NVRTC 13.0 and 13.1 take a generic lambda for a
// function of the host, which device code may not call.
template <class Config>
struct QuantiseAndPutTokens {
  const DispatchArgs& args;
  const Cta& cta;
  bool failed;
  uint32_t* send_counters;
  QuantisingDispatchShared& shared;

  template <class Kind>
  HD void operator()(const Kind& quantising) const {
    put_quantised_tokens<Config>(args, cta, failed, send_counters, shared, quantising);
  }
};

template <class Config>
HD void quantise_and_put_tokens(const DispatchArgs& args, const Cta& cta, bool failed,
                                uint32_t* send_counters, QuantisingDispatchShared& shared) {
  float scale = 1.0f;
  if (args.global_scale != 0) scale = load_word(reinterpret_cast<const float*>(args.global_scale));
  with_quantiser<Config>(args, cta, scale,
                         QuantiseAndPutTokens<Config>{args, cta, failed, send_counters, shared});
}

HD int num_finishers(const Cta& cta) {
  return cta.num_blocks < kMaxFinishers ? cta.num_blocks : kMaxFinishers;
}

// This CTA's number among the finishers, negative when it is none. The last one sees all that the
// other CTAs did.
HD int arrive(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  // P2 release half, per CTA: the barrier puts this CTA's stores before the arrival of its thread 0.
  cta.sync();
  if (cta.thread == 0) {
    // P2: release what this CTA stored and read, acquire what the CTAs before it released. Relaxed
    // instead, the cells of P1 would cover the last CTA's own rows only, and a peer could read stale
    // rows of every other CTA; and the last CTA could bump the epoch before this one has read it.
    const uint32_t before = fetch_add_acq_rel_gpu(&local_control(args)->arrivals, 1);
    shared.finisher = static_cast<int>(before) - (cta.num_blocks - num_finishers(cta));
  }
  cta.sync();
  return shared.finisher;
}

// Tells every rank how many of this rank's rows lie in its buffer. The last CTA to arrive.
HD void publish_counts(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  uint32_t* send_counters =
      reinterpret_cast<uint32_t*>(region_of(args, geometry.ep_rank, args.control.send_counters));
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    const uint32_t count = load_relaxed_gpu(&send_counters[peer]);
    // P1 release: rows before cell. Without it the peer may see the new epoch and the old rows.
    store_release_sys(cell_of(args, peer, args.control.dispatch_cells, geometry.ep_rank),
                      pack_cell(shared.epoch, count, geometry_tag(geometry)));
    shared.sent[peer] = count;
    store_relaxed_gpu(&send_counters[peer], 0);
  }
}

// Adds this round to the totals. One thread, while the peers' cells are on their way.
HD void count_round(const DispatchArgs& args, const DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  uint32_t rows = 0;
  for (int peer = 0; peer < geometry.ep_size; ++peer) rows += shared.sent[peer];
  const uint32_t remote = rows - shared.sent[geometry.ep_rank];
  uint64_t token_bytes = 0;
  MOE_NVLINK_ROLLED
  for (uint32_t i = 0; i < args.num_payloads; ++i) token_bytes += args.payloads[i].row_bytes;
  const uint64_t tokens = static_cast<uint64_t>(geometry.num_tokens);
  const uint64_t peers = static_cast<uint64_t>(geometry.ep_size - 1);
  LocalControl* local = local_control(args);
  store_word(&local->rows_put, rows);
  store_word(&local->remote_rows_put, remote);
  ExchangeCounters* totals = exchange_counters(args);
  add_to_total(&totals->rounds, 1);
  add_to_total(&totals->tokens, tokens);
  add_to_total(&totals->destinations, rows);
  add_to_total(&totals->remote_destinations, remote);
  add_to_total(&totals->bytes_dispatched, rows * token_bytes);
  add_to_total(&totals->bytes_dispatched_remote, remote * token_bytes);
  add_to_total(&totals->bytes_allgather, tokens * peers * token_bytes);
  const uint64_t combined_bytes = static_cast<uint64_t>(geometry.hidden_size) *
                                  static_cast<uint64_t>(element_bytes(geometry.element));
  add_to_total(&totals->bytes_reducescatter, tokens * peers * combined_bytes);
}

// What one CTA does for this rank once all rows are on their way: the last to arrive, which is the
// only one that may write what the others have read until then.
HD void publish_round(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  LocalControl* local = local_control(args);
  if (shared.has_failed != 0) {
    if (cta.thread == 0) store_word(&local->arrivals, 0u);
    return;
  }
  publish_counts(args, cta, shared);
  cta.sync();  // sent is whole
  // The last thread, which has no peer of its own to wait for where threads outnumber the ranks.
  if (cta.thread != cta.num_threads - 1) return;
  store_word(&local->arrivals, 0u);
  store_word(&local->epoch, shared.epoch);
  count_round(args, shared);
}

// What is wrong with a cell of this round, or 0.
HD int fault_of_cell(const Geometry& geometry, uint64_t cell) {
  if (cell_tag(cell) != geometry_tag(geometry)) return kFaultGeometry;
  const uint32_t most = static_cast<uint32_t>(geometry.max_tokens_per_rank);
  return cell_count(cell) > most ? kFaultBadCount : 0;
}

// Waits for every rank's cell. A rank that does not come, or comes with another layer's geometry,
// leaves a fault word and counts as zero rows; so do all of them for a rank that has failed before,
// without a wait. Patience begins here: what came before, a kernel waited for included, is not the
// peers'.
HD void collect_counts(const DispatchArgs& args, const Cta& cta, bool is_last,
                       DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  const uint32_t epoch = shared.epoch;
  int32_t* recv_counts =
      reinterpret_cast<int32_t*>(region_of(args, geometry.ep_rank, args.control.recv_counts));
  Patience patience(args.timeout_ns);
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    int32_t count = 0;
    if (shared.has_failed == 0) {
      uint64_t cell = 0;
      int fault = wait_for_epoch(cell_of(args, geometry.ep_rank, args.control.dispatch_cells, peer),
                                 epoch, patience, &cell);
      if (fault == 0) fault = fault_of_cell(geometry, cell);
      if (fault != 0) {
        report_fault(args, args.control.dispatch_cells, fault, kPhaseDispatch, peer, epoch,
                     patience);
      }
      if (fault == 0) count = static_cast<int32_t>(cell_count(cell));
    }
    shared.counts[peer] = count;
    if (is_last) {
      store_word(&recv_counts[peer], count);
      store_word(&rows_from(args)[peer], static_cast<uint32_t>(count));
    }
  }
}

// Writes expert id -1 into this finisher's share of the slots behind each source's rows. Writing
// only the difference to the previous round would do, if nobody wrote to the ids in between; but a
// compiler may put an expression of the ids where they lay (Inductor does), and a stale id would
// then be an expert.
HD void mark_empty_slots(const DispatchArgs& args, const Cta& cta, const DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  int32_t* ids = reinterpret_cast<int32_t*>(
      region_of(args, geometry.ep_rank, args.payloads[kTopkIdsPayload].region));
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
    if (filled < end)
      fill_minus_one(cta, ids, slice + (start < filled ? filled : start), slice + end);
  }
}

template <class Config>
HD void dispatch_body(const DispatchArgs& args, const Cta& cta, DispatchSharedFor<Config>& shared) {
  plan_rows<Config>(args, cta, shared);
  uint32_t* send_counters = reinterpret_cast<uint32_t*>(
      region_of(args, args.geometry.ep_rank, args.control.send_counters));
  // Tokens, ids and the words the previous dispatch left all come from kernels before this one.
  if constexpr (Config::kPdl) pdl_wait();
  // Legal here: what the next kernel does before its own wait touches no memory of ours, and its
  // wait is for the whole of this one. Legal even before our wait, as far as this project's kernels
  // go; but a kernel of somebody else's behind this one may count on its predecessor's predecessor
  // to be finished when it starts, and that holds only for a signal behind the wait. The next
  // kernel's CTAs take no place from this one's: it starts when all CTAs of this one have run to
  // here, so none is left to be placed, and those that spin below already have their places.
  if constexpr (Config::kPdl) pdl_launch_dependents();
  const bool failed = has_failed(args);
  // Read here and not at the end, where the last CTA has already written it (P2 orders the two). By
  // the last thread: the first warp has the route to begin with and need not wait for this.
  if (cta.thread == cta.num_threads - 1) {
    shared.epoch = load_word(&local_control(args)->epoch) + 1;
    shared.has_failed = failed ? 1 : 0;
  }
  if constexpr (Config::kQuantiser == kQuantiserNone) {
    put_tokens<Config>(args, cta, failed, send_counters, shared);
  } else {
    if (quantiser_of<Config>(args) == kQuantiserNone) {
      put_tokens<Config>(args, cta, failed, send_counters, shared);
    } else {
      quantise_and_put_tokens<Config>(args, cta, failed, send_counters, shared);
    }
  }
  const int finisher = arrive(args, cta, shared);
  if (finisher < 0) return;
  const bool is_last = finisher == num_finishers(cta) - 1;
  if (is_last) publish_round(args, cta, shared);
  collect_counts(args, cta, is_last, shared);
  cta.sync();  // counts of all peers in shared memory
  mark_empty_slots(args, cta, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_dispatch, DispatchArgs, DispatchSharedFor<Config>, dispatch_body)
