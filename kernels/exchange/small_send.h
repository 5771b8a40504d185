// The sender's side of small_dispatch: packed rows into shared memory, and from there as units to
// the targets.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/quantise.h"
#include "../include/moe_nvlink/units.h"
#include "await_combine.h"
#include "packed_rows.h"
#include "put_quantised.h"
#include "small_routing.h"
#include "small_shared.h"

namespace moe_nvlink {

// Puts `bytes` staged bytes of a packed row as its units from first_unit on to every target.
template <class Config>
HD void put_units(const DispatchArgs& args, const Cta& cta, const SmallRoute& route,
                  const char* staged, int first_unit, int bytes, uint32_t mark) {
  const int top_k = top_k_of<Config>(args.geometry);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(staged);
  const int num_words = bytes / 4;
  for (int unit = cta.thread; unit < units_of(bytes); unit += cta.num_threads) {
    uint32_t data[3];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < 3; ++i) data[i] = 3 * unit + i < num_words ? words[3 * unit + i] : 0;
    const Unit packed = pack_unit(data[0], data[1], data[2], mark);
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
HD void send_parts_of_tokens(const DispatchArgs& args, const Cta& cta, const SentShare& share,
                             const SmallRound& round, Shared& shared) {
  const int parts = num_parts(args);
  int turn = 0;
  bool is_first = true;
  for (SentItem item = share.first; item.token < args.geometry.num_tokens;
       item = share.after(item, parts)) {
    char* staged = shared.staged + turn * kPartBytes;
    SmallRoute& route = shared.routes[turn];
    const int bytes = bytes_of_part(args, item.part);
    const int first_byte = item.part * kPartBytes;
    const int num_pieces = bytes / kPieceBytes;
    Piece piece = {};
    if (cta.thread < num_pieces) {
      piece =
          load_piece(args, piece_origin(args, first_byte + cta.thread * kPieceBytes), item.token);
    }
    if (group_of(cta) < num_routing_groups(args, cta)) {
      find_route<Config>(args, cta, shared.owners, item.token, round.has_failed, item.part == 0,
                         route);
    }
    if (is_first) await_previous_round(args, cta, round, &shared.faulted);
    if (cta.thread < num_pieces) piece_in(staged, cta.thread) = piece;
    for (int i = cta.thread + cta.num_threads; i < num_pieces; i += cta.num_threads) {
      piece_in(staged, i) =
          load_piece(args, piece_origin(args, first_byte + i * kPieceBytes), item.token);
    }
    cta.sync();  // the part and its route are whole; the peers' staging is free (P12)
    if (shared.faulted == 0) {
      put_units<Config>(args, cta, route, staged, item.part * kUnitsOfPart, bytes,
                        mark_of(round.epoch()));
    }
    turn = 1 - turn;
    is_first = false;
  }
}

}  // namespace moe_nvlink
