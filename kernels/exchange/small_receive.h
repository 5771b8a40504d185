// The receiver's side of small_dispatch: units into shared memory, and from there as rows into the
// receive buffers.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/routing.h"
#include "../include/moe_nvlink/units.h"
#include "../include/moe_nvlink/workspace.h"
#include "await_combine.h"
#include "lay_out_scales.h"
#include "packed_rows.h"
#include "see_unit.h"
#include "small_routing.h"
#include "small_shared.h"

namespace moe_nvlink {

// What a rank makes of the ids that have travelled. Its divisions come before pdl_wait().
struct ReceivedIds {
  ExpertRange own;  // experts of this rank
  uint32_t first;   // what ids are counted from here
  int32_t absent;   // what stands for absent ids
  bool all_travel;
  const ExpertOwners& owners;

  HD ReceivedIds(const DispatchArgs& args, const ExpertOwners& owners)
      : own(experts_of(args.geometry.ep_rank, owners)),
        first(args.received_ids == kReceivedIdsLocal ? own.first : 0),
        absent(absent_id_at(args.geometry.ep_rank, args)),
        all_travel(all_ids_travel(args)),
        owners(owners) {}

  // Whether a row keeps the id and its weight.
  HD bool keeps(const DispatchArgs& args, int32_t id) const {
    if (!all_travel) return own.has(id);
    const bool is_expert = id >= 0 && id < args.geometry.num_experts;
    if (args.active_ranks == 0) return is_expert;
    return active_owner_of(args, id, owners) != kNoSlot;
  }
};

// A part of a received row. Parts are numbered place by place of the slices; in a place, source by
// source, in an order that begins with another source at every place. So a source that sends many
// rows, where the others send few, does not fall to few CTAs.
struct ReceivedItem {
  int place;  // of the row in the slice of its source
  int index;  // of the source in this place's order
  int part;
  int source;  // (index + place) % ep_size
};

// The items of one receiver: every num_receivers-th, from its own number on. From arguments only.
struct ReceivedShare {
  int parts;
  int ep_size;
  ReceivedItem first;
  ReceivedItem step;

  HD ReceivedShare(const DispatchArgs& args, const SmallRole& role)
      : parts(num_parts(args)),
        ep_size(args.geometry.ep_size),
        // The last share is CTA F's, which publishes first. If there are fewer parts, it has none.
        first(item_at(role.publishes() ? role.num_receivers - 1 : role.receiver - 1)),
        step(item_at(role.num_receivers)) {}

  HD ReceivedItem item_at(int number) const {
    const int row = number / parts;
    const int place = row / ep_size;
    const int index = row - place * ep_size;
    return ReceivedItem{place, index, number - row * parts, (index + place) % ep_size};
  }

  HD ReceivedItem after(const ReceivedItem& item) const {
    int part = item.part + step.part;
    int index = item.index + step.index;
    // As (index + place) grows, its remainder grows by as much: step.source, and one for each carry.
    int source = item.source + step.source;
    int place = item.place + step.place;
    if (part >= parts) {
      part -= parts;
      ++index;
      ++source;
    }
    if (index >= ep_size) {
      index -= ep_size;
      ++place;
      ++source;  // the index has lost ep_size, which is no change of the remainder
    }
    while (source >= ep_size) source -= ep_size;
    return ReceivedItem{place, index, part, source};
  }
};

// Waits for the cells of all ranks and leaves their counts. If a rank does not come, or comes with
// another layer's geometry, this rank leaves a fault word and takes 0 for the number of its rows. A
// count is a part of the cell, so it needs no acquire.
template <class Shared>
HD void see_counts(const DispatchArgs& args, const Cta& cta, const SmallRole& role, uint32_t epoch,
                   bool has_failed, Shared& shared) {
  const Geometry& geometry = args.geometry;
  const uint32_t cells = args.control.dispatch_cells;
  int32_t* recv_counts =
      reinterpret_cast<int32_t*>(region_of(args, geometry.ep_rank, args.control.recv_counts));
  const ExpectedCell expected{round_tag(args), static_cast<uint32_t>(geometry.max_tokens_per_rank)};
  Patience patience(args.timeout_ns);
  for_each_peer(args, cta, [&](int peer) {
    int32_t count = 0;
    if (!has_failed && is_active(args, peer)) {
      uint64_t cell = 0;
      int fault = kFaultTimeout;
      const WaitCount count_of_waits(args, role.publishes(), peer, patience);
      if (is_reached_in_time(cell_of(args, geometry.ep_rank, cells, peer), epoch, patience, cell)) {
        fault = cell_epoch(cell) == epoch ? expected.fault_of(cell) : kFaultAhead;
      }
      count_of_waits.end(patience);
      if (fault == 0) {
        count = static_cast<int32_t>(cell_count(cell));
      } else {
        report_fault(args, cells, fault, kPhaseDispatch, peer, epoch, patience);
      }
    }
    shared.counts[peer] = count;
    if (role.publishes()) {
      store_word(&recv_counts[peer], count);
      store_word(&rows_from(args)[peer], static_cast<uint32_t>(count));
    }
  });
}

// P11, acquire half: the peers have read this rank's rows in the pull combine before; the experts,
// whose kernel follows, overwrite them. CTA F, at its end: the cells come after a fence, which other
// rows and counts do not wait for. If a wait for a count or a unit was in vain, it does not wait again.
HD void await_pulled(const DispatchArgs& args, const Cta& cta, uint32_t epoch) {
  if (has_failed(args)) return;
  const uint32_t cells = args.control.pulled_cells;
  Patience patience(args.timeout_ns);
  for_each_peer(args, cta, [&](int peer) {
    if (!is_active(args, peer)) return;
    const WaitCount count(args, true, peer, patience);
    uint64_t seen = 0;
    // Not ahead at all: a peer needs this rank's combine before it goes on, and a dispatch after a
    // small combine leaves the cell as it is, for however many rounds.
    const int fault = wait_for_epoch(cell_of(args, args.geometry.ep_rank, cells, peer), epoch,
                                     patience, &seen, 0);
    count.end(patience);
    if (fault != 0) report_fault(args, cells, fault, kPhaseDispatch, peer, epoch, patience);
  });
}

// The largest count. Every thread of the CTA; each group of lanes computes it for itself.
template <class Shared>
HD int most_rows(const DispatchArgs& args, const Cta& cta, const Shared& shared) {
  uint32_t most = 0;
  MOE_NVLINK_ROLLED
  for (int rank = lane_of(cta); rank < args.geometry.ep_size; rank += Cta::kExchangeThreads) {
    const uint32_t count = static_cast<uint32_t>(shared.counts[rank]);
    most = count > most ? count : most;
  }
  return static_cast<int>(cta.max_of_lanes<Cta::kExchangeThreads>(most));
}

// Brings a part's units into shared memory and clears them.
HD void take_units(const DispatchArgs& args, const Cta& cta, const ReceivedItem& item,
                   uint32_t epoch, Patience& patience, char* staged) {
  const int bytes = bytes_of_part(args, item.part);
  uint32_t* words = reinterpret_cast<uint32_t*>(staged);
  char* units = packed_row_at(args, args.geometry.ep_rank, item.source, item.place) +
                static_cast<int64_t>(item.part) * kPartUnits * kUnitBytes;
  for (int i = cta.thread; i < units_of(bytes); i += cta.num_threads) {
    uint32_t data[3] = {0, 0, 0};
    Unit unit;
    if (see_unit(units + i * kUnitBytes, mark_of(epoch), patience, unit)) {
      clear_unit(units + i * kUnitBytes);
      unit.unpack(data);
    } else {
      report_fault(args, args.control.dispatch_cells, kFaultTimeout, kPhaseDispatch, item.source,
                   epoch, patience);
    }
    MOE_NVLINK_UNROLL
    for (int word = 0; word < 3; ++word) {
      if (3 * i + word < bytes / 4) words[3 * i + word] = data[word];
    }
  }
}

// Stores a row's ids and weights as the experts read them. Threads from the CTA's end on, which have
// no vector of the part.
HD void store_choices(const DispatchArgs& args, const Cta& cta, const ReceivedIds& received,
                      int64_t slot, const char* staged) {
  const Payload& ids = args.payloads[kTopkIdsPayload];
  const Payload& weights = args.payloads[kTopkWeightsPayload];
  const int rank = args.geometry.ep_rank;
  const int64_t first = slot * args.geometry.top_k;
  int32_t* id_row = reinterpret_cast<int32_t*>(region_of(args, rank, ids.region)) + first;
  int32_t* weight_row = reinterpret_cast<int32_t*>(region_of(args, rank, weights.region)) + first;
  const int32_t* words = reinterpret_cast<const int32_t*>(staged);
  const int first_weight = static_cast<int>(args.packed_offsets[kTopkWeightsPayload] / 4);
  for (int k = cta.num_threads - 1 - cta.thread; k < args.geometry.top_k; k += cta.num_threads) {
    const int32_t id = words[k];
    const int32_t weight = words[first_weight + k];
    const bool keeps = received.keeps(args, id);
    store_word(id_row + k, keeps ? static_cast<int32_t>(static_cast<uint32_t>(id) - received.first)
                                 : received.absent);
    store_word(weight_row + k, keeps || received.all_travel ? weight : 0);
  }
}

// Stores a piece of a row's scales to the layout that the experts read.
HD void lay_out_piece(const DispatchArgs& args, const PieceOrigin& origin, int64_t slot,
                      const Piece& piece) {
  const Geometry& geometry = args.geometry;
  const int row_bytes = static_cast<int>(args.payloads[origin.payload].row_bytes);
  const uint32_t num_words = static_cast<uint32_t>(row_bytes + 3) / 4;
  const uint32_t num_slots =
      static_cast<uint32_t>(geometry.ep_size) * static_cast<uint32_t>(geometry.max_tokens_per_rank);
  const ScalesPlace place(args.scales_layout == kScalesLayoutInterleaved,
                          static_cast<uint32_t>(slot), num_slots, num_words);
  uint32_t* target =
      reinterpret_cast<uint32_t*>(region_of(args, geometry.ep_rank, args.laid_out_region)) +
      place.first + origin.offset / 4 * place.step;
  MOE_NVLINK_UNROLL
  for (int i = 0; i < 4; ++i) {
    // Zeros fill up the last word, as they follow the row's end in the packed row.
    if (4 * i < origin.bytes) store_word(target + i * place.step, piece.words[i]);
  }
}

HD void store_part(const DispatchArgs& args, const Cta& cta, const ReceivedIds& received,
                   const ReceivedItem& item, const char* staged) {
  const int64_t slot =
      static_cast<int64_t>(item.source) * args.geometry.max_tokens_per_rank + item.place;
  const int num_pieces = bytes_of_part(args, item.part) / kPieceBytes;
  for (int i = cta.thread; i < num_pieces; i += cta.num_threads) {
    const PieceOrigin origin = piece_origin(args, item.part * kPartBytes + i * kPieceBytes);
    if (origin.payload < kFirstCallerPayload) continue;
    const Piece piece = piece_in(staged, i);
    store_piece(args, origin, slot, piece);
    if (origin.payload == kFirstCallerPayload + 1 && args.scales_layout != kScalesLayoutLinear) {
      lay_out_piece(args, origin, slot, piece);
    }
  }
  if (item.part == 0) store_choices(args, cta, received, slot, staged);
}

// Receives this CTA's parts. As in send_parts_of_tokens(), a barrier for each part and two halves.
template <class Shared>
HD void receive_parts(const DispatchArgs& args, const Cta& cta, const ReceivedShare& share,
                      const ReceivedIds& received, uint32_t epoch, Shared& shared) {
  const int most = most_rows(args, cta, shared);
  Patience patience(args.timeout_ns);
  int turn = 0;
  for (ReceivedItem item = share.first; item.place < most; item = share.after(item)) {
    if (item.place >= shared.counts[item.source]) continue;
    char* staged = shared.staged + turn * kPartBytes;
    take_units(args, cta, item, epoch, patience, staged);
    cta.sync();  // the part is whole
    store_part(args, cta, received, item, staged);
    turn = 1 - turn;
  }
}

// Marks this receiver's share of the empty slots, as mark_empty_slots() of dispatch does. Each group
// of lanes takes the slices of every step-th rank, and shares them with the groups of its column.
template <class Shared>
HD void mark_small_slices(const DispatchArgs& args, const Cta& cta, const SmallRole& role,
                          const ReceivedIds& received, const Shared& shared) {
  const Geometry& geometry = args.geometry;
  const int total = role.num_receivers * num_groups(cta);
  const int columns = total > geometry.ep_size ? total / geometry.ep_size : 1;
  const int mine = role.receiver * num_groups(cta) + group_of(cta);
  const int column = mine % columns;
  int32_t* ids = reinterpret_cast<int32_t*>(
      region_of(args, geometry.ep_rank, args.payloads[kTopkIdsPayload].region));
  int32_t* weights = reinterpret_cast<int32_t*>(
      region_of(args, geometry.ep_rank, args.payloads[kTopkWeightsPayload].region));
  const int slice_words = geometry.max_tokens_per_rank * geometry.top_k;
  MOE_NVLINK_ROLLED
  for (int source = mine / columns; source < geometry.ep_size; source += total / columns) {
    const int64_t slice = static_cast<int64_t>(source) * slice_words;
    const int filled = shared.counts[source] * geometry.top_k;
    MOE_NVLINK_ROLLED
    for (int word = filled + column * Cta::kExchangeThreads + lane_of(cta); word < slice_words;
         word += columns * Cta::kExchangeThreads) {
      store_word(ids + slice + word, received.absent);
      if (!received.all_travel) store_word(weights + slice + word, 0);
    }
  }
}

}  // namespace moe_nvlink
