// Dispatch of small batches: rows go to the peers as units that carry their own flags (units.h), so
// no row waits for a fence, an arrival or an acknowledgement.
//
//   senders     CTAs [0, senders): each takes parts of this rank's packed rows. It loads a part
//               while it counts the token's slots (routing.h), then stores it as units into
//               the staging of the token's targets (P10, dispatch_send.h)
//   CTA F       the first receiver: counts the rows for each rank and stores one cell {tag, count,
//               epoch} to each; it also counts the round and bumps the epoch
//   P11         after a combine that has read peers' rows, CTA F tells each rank so in a second cell,
//               and waits for those of the peers at its end
//   receivers   the CTAs from `senders` on: each waits for every rank's cell, then takes parts of
//               received rows from the staging, clears their units, and stores them where the
//               experts read (dispatch_receive.h). Ids travel as the router made them, and are
//               translated here. Receivers also mark the empty slots
//   counts      if counts per expert travel: CTA F sends them after its cells, the receivers take
//               them at their end (expert_counts.h)
//   P14         after its cells CTA F waits for ranks that the mask leaves out, if they took part in
//               the round before (await_combine.h)
//   P12         before a CTA stores to its peers, it waits until every rank has signalled the
//               combine before this dispatch (await_combine.h)
//
// Why the order holds, for the staging: rank t clears units in dispatch n. Its signal of combine n
// comes after that (release). Rank s acquires the signal at the start of dispatch n + 1, and its
// units of dispatch n + 1 come after it (P12). The receive buffers are written by their own rank.
//
// The epoch is that of the last combine plus one. This kernel cannot read LocalControl.epoch, which
// one of its CTAs writes while others may have yet to start. Only that CTA, CTA F, reads it: if a
// graph that holds dispatch alone is replayed, the epoch is the same again, so receivers may take the
// cells of the dispatch before for those of this one, and lose rows. Then CTA F announces nothing and
// leaves a fault.
//
// Slots are numbers of tokens, so the order of the rows in a slice is the order of the tokens.
//
// Senders and CTA F wait for signals of rounds that have ended on this rank, so they wait for no CTA
// of this grid. Receivers wait for cells and units, also for those of this rank's own senders and
// CTA F, which start before them, because GPUs start CTAs in order (CUDA does not promise it). So a
// round ends if the GPU has room for one CTA at a time. If senders is 0, as on the host, every CTA
// has both roles, and all CTAs run at the same time.
#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/config.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/epoch_flags.h"
#include "../../include/moe_nvlink/memory_order.h"
#include "../../include/moe_nvlink/peers.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/workspace.h"
#include "../await_combine.h"
#include "../expert_counts.h"
#include "../round_totals.h"
#include "dispatch_receive.h"
#include "routing.h"
#include "dispatch_send.h"
#include "dispatch_shared.h"

namespace moe_nvlink {

// Counts this rank's rows for every rank: a rank for each group of lanes at a time.
template <class Config, class Shared>
HD void count_sent_rows(const DispatchArgs& args, const Cta& cta, Shared& shared) {
  const int top_k = top_k_of<Config>(args.geometry);
  CountedTokens<Config> tokens;
  tokens.load(args, cta, args.geometry.num_tokens, ids_are_wide<Config>(args));
  MOE_NVLINK_ROLLED
  for (int rank = group_of(cta); rank < args.geometry.ep_size;
       rank += num_counting_groups(args, cta)) {
    const uint32_t count = tokens.with(cta, experts_of(rank, shared.owners), top_k);
    if (lane_of(cta) == 0) shared.sent[rank] = is_active(args, rank) ? count : 0;
  }
}

// P11, release half: tells every rank that this rank has read its rows in the combine before. Without
// it the rank's experts may overwrite them first. A cell of its own, because a release waits until
// this rank's stores have arrived, and receivers look at no unit before they know the count. Not by
// the threads that store the counts, for whose arrival it would wait too.
template <class Config>
HD void tell_pulled(const DispatchArgs& args, const Cta& cta, uint32_t epoch) {
  const int first = (cta.thread + cta.num_threads / 2) % cta.num_threads;
  for_each_peer(args, first, cta.num_threads, [&](int peer) {
    if (!is_active(args, peer)) return;
    signal_peer<Config>(args, args.control.pulled_cells, peer, pack_cell(epoch, 0, 0));
  });
}

// This rank's part of the round beside its rows. CTA F.
template <class Config, class Shared>
HD void publish_small_round(const DispatchArgs& args, const Cta& cta, const SmallRound& round,
                            Shared& shared) {
  const Geometry& geometry = args.geometry;
  if (group_of(cta) < num_counting_groups(args, cta)) count_sent_rows<Config>(args, cta, shared);
  await_previous_round(args, cta, round, &shared.faulted);
  cta.sync();  // sent is whole; the peers' cells are free
  const bool has_failed = shared.faulted != 0;
  const uint32_t tag = round_tag(args);
  for_each_peer(args, cta, [&](int peer) {
    if (has_failed) return;
    if (!is_active(args, peer)) return;
    // A count is a part of its cell, so it needs no release.
    store_relaxed_sys(cell_of(args, peer, args.control.dispatch_cells, geometry.ep_rank),
                      pack_cell(round.epoch(), shared.sent[peer], tag));
  });
  if (round.has_pulled != 0 && !has_failed) tell_pulled<Config>(args, cta, round.epoch());
  if (has_failed) report_left_out(args, cta, round.epoch());
  if (round.is_repeated()) report_repeated(args, cta, round.epoch());
  if (round.has_pulled != 0 && args.active_ranks != 0 && !has_failed) {
    await_leavers(args, cta, round.epoch() - 1);
    cta.sync();  // the mask of the round before has been read
  }
  // The last group: if groups outnumber the ranks' groups, it has announced nothing.
  if (group_of(cta) != num_groups(cta) - 1) return;
  uint32_t rows = 0;
  MOE_NVLINK_ROLLED
  for (int rank = lane_of(cta); rank < geometry.ep_size; rank += Cta::kExchangeThreads) {
    rows += shared.sent[rank];
  }
  rows = cta.sum_of_lanes<Cta::kExchangeThreads>(rows);
  if (has_failed) return;
  const uint32_t remote = rows - shared.sent[geometry.ep_rank];
  if (lane_of(cta) == 0) {
    LocalControl* local = local_control(args);
    store_word(&local->epoch, round.epoch());
    leave_mask(args, round.epoch());
    store_word(&local->rows_put, rows);
    store_word(&local->remote_rows_put, remote);
  }
  add_round(args, lane_of(cta), Cta::kExchangeThreads, rows, remote);
}

// Counts this rank's choices, unless the caller has, and sends the counts. CTA F, after its cells.
template <class Config, class Shared>
HD void publish_expert_counts(const DispatchArgs& args, const Cta& cta, uint32_t epoch,
                              const Shared& shared) {
  const int top_k = top_k_of<Config>(args.geometry);
  const int32_t* ids = reinterpret_cast<const int32_t*>(args.payloads[kTopkIdsPayload].source);
  MOE_NVLINK_ROLLED
  for (int i = cta.thread; i < args.geometry.num_tokens * top_k; i += cta.num_threads) {
    if (is_padding(args, i / top_k)) continue;
    const int32_t id = load_word(ids + i);
    if (active_owner_of(args, id, shared.owners) != kNoSlot) count_choice<Config>(args, id);
  }
  cta.sync();  // all choices are counted
  send_expert_counts(args, cta, epoch);
}

// Receives this rank's rows. CTA F has waited for the combine before; the other receivers wait for
// it here, so that a rank that is missing since then is named, and not the ranks that wait for it.
template <class Unit, class Shared>
HD void receive_round(const DispatchArgs& args, const Cta& cta, const SmallRole& role,
                      const ReceivedShare& share, const ReceivedIds& received,
                      const SmallRound& round, Shared& shared) {
  if (!role.publishes()) {
    await_previous_round(args, cta, round, &shared.faulted);
    cta.sync();
  }
  see_counts(args, cta, role, round.epoch(), shared.faulted != 0, shared);
  cta.sync();  // the counts of all ranks; what was staged to be sent has been read
  receive_parts<Unit>(args, cta, share, received, round.epoch(), shared);
  mark_small_slices(args, cta, role, received, shared);
  if (role.publishes() && round.has_pulled != 0 && shared.faulted == 0) {
    await_pulled(args, cta, round.epoch());
  }
}

template <class Config>
HD void small_dispatch_body(const DispatchArgs& args, const Cta& cta,
                            SmallDispatchSharedFor<Config>& shared) {
  const SmallRole role = small_role(args.senders, cta);
  if (cta.thread == 0) {
    shared.faulted = 0;
    shared.owners = expert_owners(args.geometry);
  }
  const SentShare sent(role, num_parts<RowUnit<Config>>(args));
  cta.sync();  // the owners; faulted is cleared before a thread may set it
  const ReceivedShare share(args, role, num_parts<RowUnit<Config>>(args));
  const ReceivedIds received(args, shared.owners);
  // ../dispatch.cu explains both calls.
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  SmallRound round;
  if (role.sends()) {
    send_round<Config>(args, cta, role, sent, round, shared);
  } else {
    round.load_state(args, role);
  }
  if (role.publishes()) publish_small_round<Config>(args, cta, round, shared);
  const bool has_counts = has_expert_counts<Config>(args);
  if (has_counts && role.publishes() && shared.faulted == 0) {
    publish_expert_counts<Config>(args, cta, round.epoch(), shared);
  }
  if (role.receives()) {
    receive_round<RowUnit<Config>>(args, cta, role, share, received, round, shared);
  }
  if (has_counts && role.receives()) {
    receive_expert_counts(args, cta, role.receiver, role.num_receivers, round.epoch(),
                          shared.faulted != 0);
  }
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_small_dispatch, DispatchArgs, SmallDispatchSharedFor<Config>,
                  small_dispatch_body)
