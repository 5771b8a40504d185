// The receiver's side of small_dispatch: units into shared memory, and from there as rows into the
// receive buffers.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/epoch_flags.h"
#include "../../include/moe_nvlink/peers.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/routing.h"
#include "../../include/moe_nvlink/units.h"
#include "../../include/moe_nvlink/workspace.h"
#include "../await_combine.h"
#include "../lay_out_scales.h"
#include "packed_rows.h"
#include "../see_unit.h"
#include "routing.h"
#include "dispatch_shared.h"

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

// A received row. Rows are numbered place by place of the slices; in a place, source by source, in an
// order that begins with another source at every place. So a source that sends many rows, where the
// others send few, does not fall to few CTAs.
struct ReceivedRow {
  int place;   // of the row in the slice of its source
  int index;   // of the source in this place's order
  int source;  // (index + place) % ep_size
};

// What one receiver takes: one part of every rows-th row, or, if parts outnumber the receivers, several
// parts of all rows. So what depends on the part is computed once. From arguments only.
struct ReceivedShare {
  int part;       // the first
  int part_step;  // to the next
  int parts;
  int ep_size;
  ReceivedRow first;
  ReceivedRow step;

  HD ReceivedShare(const DispatchArgs& args, const SmallRole& role, int parts)
      : parts(parts), ep_size(args.geometry.ep_size) {
    // The last share is CTA F's, which publishes first. If a share is left over, it is this one.
    const int number = role.publishes() ? role.num_receivers - 1 : role.receiver - 1;
    const int columns = role.num_receivers / parts;
    const int column = number / parts;
    part = columns > 0 ? number - column * parts : number;
    part_step = columns > 0 ? parts : role.num_receivers;
    first = row_at(columns > 0 ? column : 0);
    step = row_at(columns > 0 ? columns : 1);
    if (columns > 0 && column >= columns) part = parts;
  }

  HD ReceivedRow row_at(int row) const {
    const int place = row / ep_size;
    const int index = row - place * ep_size;
    return ReceivedRow{place, index, (index + place) % ep_size};
  }

  HD ReceivedRow after(const ReceivedRow& row) const {
    int index = row.index + step.index;
    // As (index + place) grows, its remainder grows by as much: step.source, and one for a carry.
    int source = row.source + step.source;
    int place = row.place + step.place;
    if (index >= ep_size) {
      index -= ep_size;
      ++place;
      ++source;  // the index has lost ep_size, which is no change of the remainder
    }
    while (source >= ep_size) source -= ep_size;
    return ReceivedRow{place, index, source};
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

HD int warp_of(const Cta& cta) {
  return cta.thread / Cta::kWarpThreads;
}
HD int lane_of_warp(const Cta& cta) {
  return cta.thread % Cta::kWarpThreads;
}

// What a warp takes of each of its rows.
template <class Unit>
struct ReceivedChunk {
  int first_byte;  // in the packed row
  int bytes;
  char* units;          // of row 0 of slice 0
  uint32_t row_stride;  // from a slot's units to the next slot's

  HD ReceivedChunk(const DispatchArgs& args, int part, int chunk)
      : first_byte(part * kPartBytes<Unit> + chunk * kChunkBytes<Unit>),
        units(packed_row_at<Unit>(args, args.geometry.ep_rank, 0, 0) +
              static_cast<int64_t>(first_byte / Unit::kDataBytes) * kUnitBytes),
        row_stride(static_cast<uint32_t>(units_of<Unit>(static_cast<int>(args.packed_bytes))) *
                   kUnitBytes) {
    const int left = bytes_of_part<Unit>(args, part) - chunk * kChunkBytes<Unit>;
    bytes = left < kChunkBytes<Unit> ? left : kChunkBytes<Unit>;
  }
};

// Stores half of a word of shared memory, whose other half another thread may store.
HD void put_half(uint32_t* word, int half, uint16_t value) {
  uint16_t* target = reinterpret_cast<uint16_t*>(word) + half;
  MOE_NVLINK_DEVICE_ONLY(*target = value;)
  MOE_NVLINK_HOST_ONLY(std::memcpy(target, &value, sizeof(value));)  // it is read as another type
}

// Brings a row's chunk into shared memory and clears its units.
template <class Unit>
HD void take_units(const DispatchArgs& args, const Cta& cta, const ReceivedChunk<Unit>& chunk,
                   uint32_t slot, int source, uint32_t epoch, Patience& patience, char* staged) {
  uint32_t* words = reinterpret_cast<uint32_t*>(staged);
  const int num_words = chunk.bytes / 4;
  const int num_units = units_of<Unit>(chunk.bytes);
  char* units = chunk.units + static_cast<uint64_t>(slot) * chunk.row_stride;
  MOE_NVLINK_ROLLED
  for (int i = lane_of_warp(cta); i < num_units; i += Cta::kWarpThreads) {
    uint32_t data[Unit::kParts] = {};
    Unit unit;
    if (see_unit(units + i * kUnitBytes, mark_of(epoch), patience, unit)) {
      clear_unit<Unit>(units + i * kUnitBytes);
      unit.unpack(data);
    } else {
      report_fault(args, args.control.dispatch_cells, kFaultTimeout, kPhaseDispatch, source, epoch,
                   patience);
    }
    const UnitPlace<Unit> place(i);
    MOE_NVLINK_UNROLL
    for (int word = 0; word < kUnitWords; ++word) {
      if (place.first + word < num_words) words[place.first + word] = data[word];
    }
    if constexpr (Unit::kParts > kUnitWords) {
      if (place.shared < num_words) {
        put_half(words + place.shared, place.half, static_cast<uint16_t>(data[kUnitWords]));
      }
    }
  }
}

// Stores a row's ids and weights as the experts read them. The lanes from the warp's end on, which
// have no piece of the chunk.
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
  for (int k = Cta::kWarpThreads - 1 - lane_of_warp(cta); k < args.geometry.top_k;
       k += Cta::kWarpThreads) {
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
  const uint32_t num_words = static_cast<uint32_t>(row_bytes) / 4;
  const uint32_t num_slots =
      static_cast<uint32_t>(geometry.ep_size) * static_cast<uint32_t>(geometry.max_tokens_per_rank);
  const ScalesPlace place(args.scales_layout == kScalesLayoutInterleaved,
                          static_cast<uint32_t>(slot), num_slots, num_words);
  uint32_t* target =
      reinterpret_cast<uint32_t*>(region_of(args, geometry.ep_rank, args.laid_out_region)) +
      place.first + origin.offset / 4 * place.step;
  MOE_NVLINK_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (4 * i < origin.bytes) store_word(target + i * place.step, piece.words[i]);
  }
}

// Stores a row's chunk. `lanes_own`: where the lane's first piece goes.
template <class Unit>
HD void store_chunk(const DispatchArgs& args, const Cta& cta, const ReceivedIds& received,
                    const ReceivedChunk<Unit>& chunk, const PieceTarget& lanes_own, uint32_t slot,
                    const char* staged) {
  const int first = lane_of_warp(cta);
  MOE_NVLINK_ROLLED
  for (int i = first; i < chunk.bytes / kPieceBytes; i += Cta::kWarpThreads) {
    const PieceTarget target =
        i == first ? lanes_own : PieceTarget(args, chunk.first_byte + i * kPieceBytes);
    if (target.origin.payload < kFirstCallerPayload) continue;
    const Piece piece = piece_in(staged, i);
    target.store(slot, piece);
    if (target.origin.payload == kFirstCallerPayload + 1 &&
        args.scales_layout != kScalesLayoutLinear) {
      lay_out_piece(args, target.origin, slot, piece);
    }
  }
  if (chunk.first_byte == 0) store_choices(args, cta, received, slot, staged);
}

// Receives a chunk of all rows of this CTA's share. A barrier of the warp stands between what its lanes
// stage and its use. The next row is staged in the other half, and the one after it in this half again,
// after a barrier that every lane that still reads this half must pass too.
template <class Unit, class Shared>
HD void receive_chunk(const DispatchArgs& args, const Cta& cta, const ReceivedShare& share,
                      const ReceivedIds& received, const ReceivedChunk<Unit>& chunk, int most,
                      uint32_t epoch, Patience& patience, char* staged, const Shared& shared) {
  const PieceTarget lanes_own(args, chunk.first_byte + lane_of_warp(cta) * kPieceBytes);
  int turn = 0;
  MOE_NVLINK_ROLLED
  for (ReceivedRow row = share.first; row.place < most; row = share.after(row)) {
    if (row.place >= shared.counts[row.source]) continue;
    const uint32_t slot =
        static_cast<uint32_t>(row.source * args.geometry.max_tokens_per_rank + row.place);
    char* half = staged + turn * kPartBytes<Unit>;
    take_units(args, cta, chunk, slot, row.source, epoch, patience, half);
    cta.sync_warp();  // the chunk is whole
    store_chunk(args, cta, received, chunk, lanes_own, slot, half);
    turn = 1 - turn;
  }
}

// Receives this CTA's share.
template <class Unit, class Shared>
HD void receive_parts(const DispatchArgs& args, const Cta& cta, const ReceivedShare& share,
                      const ReceivedIds& received, uint32_t epoch, Shared& shared) {
  const int most = most_rows(args, cta, shared);
  Patience patience(args.timeout_ns);
  MOE_NVLINK_ROLLED
  for (int part = share.part; part < share.parts; part += share.part_step) {
    const int bytes = bytes_of_part<Unit>(args, part);
    MOE_NVLINK_ROLLED
    for (int chunk = warp_of(cta); chunk * kChunkBytes<Unit> < bytes;
         chunk += cta.num_threads / Cta::kWarpThreads) {
      receive_chunk(args, cta, share, received, ReceivedChunk<Unit>(args, part, chunk), most, epoch,
                    patience, shared.staged + chunk * kChunkBytes<Unit>, shared);
      cta.sync_warp();  // the last row has been read
    }
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
