// The sender's side of small_dispatch: packed rows into shared memory, and from there as units to
// the targets.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/quantise.h"
#include "../../include/moe_nvlink/units.h"
#include "../await_combine.h"
#include "packed_rows.h"
#include "../put_quantised.h"
#include "routing.h"
#include "dispatch_shared.h"

namespace moe_nvlink {

// Puts `bytes` staged bytes of a packed row as its units from first_unit on to every target.
template <class Config>
HD void put_units(const DispatchArgs& args, const Cta& cta, const SmallRoute& route,
                  const char* staged, int first_unit, int bytes, uint32_t mark) {
  using Unit = RowUnit<Config>;
  const int top_k = top_k_of<Config>(args.geometry);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(staged);
  const int num_words = bytes / 4;
  for (int unit = cta.thread; unit < units_of<Unit>(bytes); unit += cta.num_threads) {
    const UnitPlace<Unit> place(unit);
    uint32_t data[Unit::kParts];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kUnitWords; ++i) {
      data[i] = place.first + i < num_words ? words[place.first + i] : 0;
    }
    if constexpr (Unit::kParts > kUnitWords) {
      data[kUnitWords] = place.shared < num_words ? words[place.shared] >> 16 * place.half : 0;
    }
    const Unit packed = Unit::pack(data, mark);
    const int64_t offset = static_cast<int64_t>(first_unit + unit) * kUnitBytes;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      const uint64_t target = route.targets[k];
      if (target != 0) put_unit(reinterpret_cast<char*>(target) + offset, packed);
    }
  }
}

// A part of a row, as one CTA takes it.
struct SentItem {
  int token;
  int part;
};

// The items of one sender: every num_senders-th, from its own number on. From arguments only.
struct SentShare {
  SentItem first;
  SentItem step;

  HD SentShare(const SmallRole& role, int parts)
      : first{role.sender / parts, role.sender % parts},
        step{role.num_senders / parts, role.num_senders % parts} {}

  HD SentItem after(const SentItem& item, int parts) const {
    const int part = item.part + step.part;
    const int carry = part >= parts ? 1 : 0;
    return SentItem{item.token + step.token + carry, part - carry * parts};
  }
};

// Sends this CTA's parts of the rows as they are. A thread's first load of a part is on its way
// while the route is found, so a part costs one wait for memory. One barrier stands between what is
// staged and its use. The next item stages in the other half, and comes back to this half only after
// its own barrier, which every thread that still reads this half must pass too.
template <class Config, class Shared>
HD void send_parts_of_tokens(const DispatchArgs& args, const Cta& cta, const SmallRole& role,
                             const SentShare& share, SmallRound& round, Shared& shared) {
  if (share.first.token >= args.geometry.num_tokens) return round.load_state(args, role);
  using Unit = RowUnit<Config>;
  const int parts = num_parts<Unit>(args);
  int turn = 0;
  bool is_first = true;
  for (SentItem item = share.first; item.token < args.geometry.num_tokens;
       item = share.after(item, parts)) {
    char* staged = shared.staged + turn * kPartBytes<Unit>;
    SmallRoute& route = shared.routes[turn];
    const int bytes = bytes_of_part<Unit>(args, item.part);
    const int first_byte = item.part * kPartBytes<Unit>;
    const int num_pieces = bytes / kPieceBytes;
    Piece piece = {};
    if (cta.thread < num_pieces) {
      piece =
          load_piece(args, piece_origin(args, first_byte + cta.thread * kPieceBytes), item.token);
    }
    RouteIds<Config> ids;
    ids.load(args, cta, item.token);
    if (is_first) round.load_state(args, role);
    // The groups that wait for the peers before the first item find no route then.
    const int groups = is_first ? num_counting_groups(args, cta) : num_groups(cta);
    if (group_of(cta) < groups) {
      find_route<Config>(args, cta, shared.owners, item.token, ids, item.part == 0, groups, route);
    }
    if (is_first) await_previous_round(args, cta, round, &shared.faulted);
    if (cta.thread < num_pieces) piece_in(staged, cta.thread) = piece;
    for (int i = cta.thread + cta.num_threads; i < num_pieces; i += cta.num_threads) {
      piece_in(staged, i) =
          load_piece(args, piece_origin(args, first_byte + i * kPieceBytes), item.token);
    }
    cta.sync();  // the part and its route are whole; the peers' staging is free (P12)
    if (shared.faulted == 0) {
      put_units<Config>(args, cta, route, staged, first_byte / Unit::kDataBytes, bytes,
                        mark_of(round.epoch()));
    }
    turn = 1 - turn;
    is_first = false;
  }
}

// Quantised rows. A CTA takes a whole row, because the lanes of a block, or all of them, share a
// scale.

// Clears what lies between a payload's row and the next piece. It travels too; nobody writes it later,
// and no rank reads it.
template <class Shared>
HD void clear_behind_row(const DispatchArgs& args, const Cta& cta, int payload, Shared& shared) {
  const int end = static_cast<int>(args.payloads[payload].row_bytes);
  const int next_piece = (end + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
  char* row = shared.staged + args.packed_offsets[payload];
  for (int offset = end + 4 * cta.thread; offset < next_piece; offset += 4 * cta.num_threads) {
    *reinterpret_cast<uint32_t*>(row + offset) = 0;
  }
}

// The same behind all rows that the quantiser writes.
template <class Config, class Shared>
HD void clear_padding(const DispatchArgs& args, const Cta& cta, Shared& shared) {
  clear_behind_row(args, cta, kFirstCallerPayload, shared);
  if (is_quantised<Config>(args, kFirstCallerPayload + 1)) {
    clear_behind_row(args, cta, kFirstCallerPayload + 1, shared);
  }
}

// The packed row of the CTA, in shared memory, as the target of a quantiser.
struct StagedTarget {
  char* row;
  char* scales;

  template <int Bytes>
  HD static void put(char* target, const Vector<Bytes>& vector) {
    MOE_NVLINK_DEVICE_ONLY(*reinterpret_cast<Vector<Bytes>*>(target) = vector;)
    MOE_NVLINK_HOST_ONLY(std::memcpy(target, &vector, Bytes);)  // any boundary, as quantise.h says
  }
  template <int Bytes>
  HD void store(int offset, const Vector<Bytes>& vector) const {
    put(row + offset, vector);
  }
  template <int Bytes>
  HD void store_scales(int offset, const Vector<Bytes>& vector) const {
    put(scales + offset, vector);
  }
};

// Whether a piece of the packed row is loaded as it is.
template <class Config>
HD bool is_loaded(const DispatchArgs& args, const PieceOrigin& origin) {
  return !is_quantised<Config>(args, origin.payload);
}

// Stages the row's part that the quantiser writes. Collective over the CTA. Formats with one scale
// for the row need two barriers of the CTA before: shared.amax is written, then read.
template <class Config, int Quantiser, class Element, class Shared>
HD void stage_quantised(const Quantising<Config, Quantiser, Element>& quantising, int token,
                        Shared& shared) {
  const DispatchArgs& args = quantising.args;
  const Cta& cta = quantising.cta;
  const char* row = quantising.row_of(token);
  const int hidden_size = args.geometry.hidden_size;
  uint32_t row_amax = 0;
  if constexpr (FormatOf<Quantiser>::Type::kHasRowScale) {
    leave_row_amax<Element>(cta, row, hidden_size, quantising.wide, shared.amax);
    cta.sync();  // the parts of the row's amax are whole
    row_amax = take_row_amax(cta, shared.amax);
  }
  const StagedTarget target{shared.staged + args.packed_offsets[kFirstCallerPayload],
                            shared.staged + args.packed_offsets[kFirstCallerPayload + 1]};
  quantise_row<Quantiser, Element>(cta, cta.thread, row, hidden_size, quantising.wide, row_amax,
                                   quantising.global_scale, target);
}

// Sends this CTA's rows. For with_quantiser(), a class, as QuantiseAndPutTokens is.
template <class Config, class Shared>
struct QuantiseAndSendTokens {
  const DispatchArgs& args;
  const Cta& cta;
  const SmallRole& role;
  const SmallRound& round;
  Shared& shared;

  template <class Kind>
  HD void operator()(const Kind& quantising) const {
    bool is_first = true;
    for (int token = role.sender; token < args.geometry.num_tokens; token += role.num_senders) {
      if (!is_first) cta.sync();  // the row before has been read
      stage(quantising, token);
      const int groups = is_first ? num_counting_groups(args, cta) : num_groups(cta);
      if (group_of(cta) < groups) {
        RouteIds<Config> ids;
        ids.load(args, cta, token);
        find_route<Config>(args, cta, shared.owners, token, ids, true, groups, shared.routes[0]);
      }
      if (is_first) await_previous_round(args, cta, round, &shared.faulted);
      cta.sync();  // the row and its route are whole; the peers' staging is free (P12)
      if (shared.faulted == 0) {
        put_units<Config>(args, cta, shared.routes[0], shared.staged, 0,
                          static_cast<int>(args.packed_bytes), mark_of(round.epoch()));
      }
      is_first = false;
    }
  }

  // The whole packed row. The loads of the first pieces are on their way while the quantiser works.
  template <class Kind>
  HD void stage(const Kind& quantising, int token) const {
    const int num_pieces = static_cast<int>(args.packed_bytes) / kPieceBytes;
    Piece piece = {};
    PieceOrigin origin = piece_origin(args, cta.thread * kPieceBytes);
    const bool loads = cta.thread < num_pieces && is_loaded<Config>(args, origin);
    if (loads) piece = load_piece(args, origin, token);
    stage_quantised(quantising, token, shared);
    if (loads) piece_in(shared.staged, cta.thread) = piece;
    for (int i = cta.thread + cta.num_threads; i < num_pieces; i += cta.num_threads) {
      origin = piece_origin(args, i * kPieceBytes);
      if (is_loaded<Config>(args, origin)) {
        piece_in(shared.staged, i) = load_piece(args, origin, token);
      }
    }
  }
};

// Sends this CTA's share of this rank's rows. Loads `round`.
template <class Config, class Shared>
HD void send_round(const DispatchArgs& args, const Cta& cta, const SmallRole& role,
                   const SentShare& share, SmallRound& round, Shared& shared) {
  if constexpr (Config::kQuantiser != kQuantiserNone) {
    if (quantiser_of<Config>(args) != kQuantiserNone) {
      float scale = 1.0f;
      if (args.global_scale != 0) {
        scale = load_word(reinterpret_cast<const float*>(args.global_scale));
      }
      round.load_state(args, role);
      clear_padding<Config>(args, cta, shared);
      with_quantiser<Config>(args, cta, scale,
                             QuantiseAndSendTokens<Config, Shared>{args, cta, role, round, shared});
      return;
    }
  }
  send_parts_of_tokens<Config>(args, cta, role, share, round, shared);
}

}  // namespace moe_nvlink
