// Slots without atomics. The slot of a token at a rank is the number of tokens before it that have
// an expert there. A CTA counts them itself, from the ids of all tokens, which are few.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/config.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/expert_owners.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/routing.h"
#include "../../include/moe_nvlink/workspace.h"
#include "dispatch_shared.h"

namespace moe_nvlink {

// As active_target_of().
HD int active_owner_of(const DispatchArgs& args, int32_t id, const ExpertOwners& owners) {
  const int owner = owner_of(id, owners, args.geometry);
  return owner != kNoSlot && is_active(args, owner) ? owner : kNoSlot;
}

HD ExpertRange experts_of(int rank, const ExpertOwners& owners) {
  const bool is_larger = rank < owners.num_larger;
  return ExpertRange{
      static_cast<uint32_t>(rank * owners.fewest + (is_larger ? rank : owners.num_larger)),
      static_cast<uint32_t>(is_larger ? owners.fewest + 1 : owners.fewest)};
}

// The ids of one token.
template <class Config>
struct ChosenIds {
  int32_t ids[Config::kTopKBound];

  // wide: the rows of ids lie on boundaries of 16 bytes.
  HD void load(const DispatchArgs& args, int token, bool wide) {
    const int top_k = top_k_of<Config>(args.geometry);
    const int32_t* source =
        reinterpret_cast<const int32_t*>(args.payloads[kTopkIdsPayload].source) +
        static_cast<int64_t>(token) * top_k;
    if (wide) {
      MOE_NVLINK_UNROLL
      for (int k = 0; k + 4 <= top_k; k += 4) {
        Vector<16> four;
        load_vector(four, reinterpret_cast<const char*>(source + k));
        MOE_NVLINK_UNROLL
        for (int i = 0; i < 4; ++i) ids[k + i] = reinterpret_cast<const int32_t*>(&four)[i];
      }
    } else {
      MOE_NVLINK_UNROLL
      for (int k = 0; k < top_k; ++k) ids[k] = load_word(source + k);
    }
  }

  HD bool has(const ExpertRange& range, int top_k) const {
    bool any = false;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) any = any || range.has(ids[k]);
    return any;
  }

  // ids[k] of a k that is no constant, without an address.
  HD int32_t at(int wanted, int top_k) const {
    int32_t id = -1;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) id = k == wanted ? ids[k] : id;
    return id;
  }

  HD bool has_before(const ExpertRange& range, int end, int top_k) const {
    bool any = false;
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) any = any || (k < end && range.has(ids[k]));
    return any;
  }
};

template <class Config>
HD bool ids_are_wide(const DispatchArgs& args) {
  const int top_k = top_k_of<Config>(args.geometry);
  return kAlignedVectorsOnly && top_k % 4 == 0 &&
         args.payloads[kTopkIdsPayload].source % kVectorBytes == 0;
}

// The ids of the first tokens, shared by the lanes of a group, every group the same.
template <class Config>
struct CountedTokens {
  static constexpr int kTurns = kMaxSmallTokens / Cta::kExchangeThreads;
  ChosenIds<Config> tokens[kTurns];
  bool counts[kTurns];

  // Tokens [0, end). All loads are on their way together; a lane without a token loads those of
  // token 0.
  HD void load(const DispatchArgs& args, const Cta& cta, int end, bool wide) {
    MOE_NVLINK_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) counts[turn] = false;
    if (end == 0) return;
    MOE_NVLINK_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = lane_of(cta) + turn * Cta::kExchangeThreads;
      counts[turn] = token < end;
      if (!kAlignedVectorsOnly && token >= end) break;
      tokens[turn].load(args, token < end ? token : 0, wide);
    }
    if (args.is_padding == 0) return;
    MOE_NVLINK_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = lane_of(cta) + turn * Cta::kExchangeThreads;
      if (token < end) counts[turn] = !is_padding(args, token);
    }
  }

  // How many of them have an expert in the range. Collective over the group's lanes.
  HD uint32_t with(const Cta& cta, const ExpertRange& range, int top_k) const {
    uint32_t found = 0;
    MOE_NVLINK_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      if (counts[turn] && tokens[turn].has(range, top_k)) ++found;
    }
    return cta.sum_of_lanes<Cta::kExchangeThreads>(found);
  }
};

// What a routing group must know to find the route of a token.
template <class Config>
struct RouteIds {
  ChosenIds<Config> own;         // of the token
  CountedTokens<Config> before;  // of the tokens before it

  HD void load(const DispatchArgs& args, const Cta& cta, int token) {
    const bool wide = ids_are_wide<Config>(args);
    own.load(args, token, wide);
    before.load(args, cta, token, wide);
  }
};

// Fills `route`, and the token's row of send_slots if `writes_slots`. The first `groups` groups of the
// CTA call it, whose next barrier publishes the route. Padding has no targets.
template <class Config>
HD void find_route(const DispatchArgs& args, const Cta& cta, const ExpertOwners& owners, int token,
                   const RouteIds<Config>& ids, bool writes_slots, int groups, SmallRoute& route) {
  const Geometry& geometry = args.geometry;
  const int top_k = top_k_of<Config>(geometry);
  const bool stays = is_padding(args, token);
  int32_t* send_slots =
      reinterpret_cast<int32_t*>(args.send_slots) + static_cast<int64_t>(token) * top_k;
  MOE_NVLINK_ROLLED
  for (int k = group_of(cta); k < top_k; k += groups) {
    const int owner = active_owner_of(args, ids.own.at(k, top_k), owners);
    const int rank = owner == kNoSlot ? 0 : owner;
    const ExpertRange range = experts_of(rank, owners);
    const int place = static_cast<int>(ids.before.with(cta, range, top_k));
    const bool has_row = owner != kNoSlot && !stays && !ids.own.has_before(range, k, top_k);
    if (lane_of(cta) != 0) continue;
    route.targets[k] = has_row ? reinterpret_cast<uint64_t>(packed_row_at<RowUnit<Config>>(
                                     args, rank, geometry.ep_rank, place))
                               : 0;
    if (writes_slots) {
      store_word(send_slots + k, has_row ? rank * geometry.max_tokens_per_rank + place : kNoSlot);
    }
  }
}

}  // namespace moe_nvlink
