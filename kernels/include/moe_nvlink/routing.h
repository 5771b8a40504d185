// From a token's expert ids to (target_rank, slot), once per distinct rank.
#pragma once

#include "active_ranks.h"
#include "args.h"
#include "config.h"
#include "copy.h"
#include "memory_order.h"
#include "platform.h"
#include "workspace.h"

namespace moe_nvlink {

// The rank that owns an expert; kNoSlot if the id is no expert. Ranks own contiguous ranges. If
// ep_size does not divide num_experts, the first (num_experts % ep_size) ranks own one expert more.
HD int target_rank_of(int expert, const Geometry& geometry) {
  if (expert < 0 || expert >= geometry.num_experts) return kNoSlot;
  const int fewest = geometry.num_experts / geometry.ep_size;
  const int num_larger = geometry.num_experts % geometry.ep_size;
  const int first_of_smaller = num_larger * (fewest + 1);
  if (expert < first_of_smaller) return expert / (fewest + 1);
  return num_larger + (expert - first_of_smaller) / fewest;
}

// The rank that gets a token because of this id: kNoSlot also if the round leaves the owner out.
HD int active_target_of(const DispatchArgs& args, int expert) {
  const int target = target_rank_of(expert, args.geometry);
  return target != kNoSlot && is_active(args, target) ? target : kNoSlot;
}

// The first expert of a rank.
HD int first_expert_of(int rank, const Geometry& geometry) {
  const int fewest = geometry.num_experts / geometry.ep_size;
  const int num_larger = geometry.num_experts % geometry.ep_size;
  return rank * fewest + (rank < num_larger ? rank : num_larger);
}

// What stands for an absent id in the rows that a rank receives, and in its empty slots.
HD int absent_id_at(int rank, const DispatchArgs& args) {
  if (args.received_ids == kReceivedIdsGiven) return args.absent_id;
  if (args.received_ids != kReceivedIdsElsewhere) return -1;
  const int next = first_expert_of(rank + 1, args.geometry);
  return next < args.geometry.num_experts ? next : 0;
}

// Whether each row carries all ids and weights of its token.
HD bool all_ids_travel(const DispatchArgs& args) {
  return args.received_ids == kReceivedIdsGlobal;
}

// Whether the caller says that a token is padding. A byte a token, in device memory: a replayed
// launch reads what is there then.
HD bool is_padding(const DispatchArgs& args, int token) {
  return args.is_padding != 0 &&
         load_word(reinterpret_cast<const uint8_t*>(args.is_padding) + token) != 0;
}

// Where the rows of a CTA's token go. In shared memory on the GPU.
struct TokenRoute {
  int32_t ids[kMaxTopK];           // an id that is no expert has become -1
  int32_t target_ranks[kMaxTopK];  // owner of each id, or kNoSlot
  int32_t rows[kMaxTopK];          // row in the target's buffers, or kNoSlot
  int32_t first_ids[kMaxTopK];     // what the target's ids are counted from; where there is a row
  int32_t absent_ids[kMaxTopK];    // what the target has for absent ids; where there is a row
  uint64_t windows[kMaxTopK];      // address of the target's workspace; where there is a row
};

template <class Config>
HD int top_k_of(const Geometry& geometry) {
  static_assert(Config::kTopK <= kMaxTopK && Config::kTopKBound <= kMaxTopK);
  static_assert(Config::kTopK <= Config::kTopKBound);
  return Config::kTopK > 0 ? Config::kTopK : geometry.top_k;
}

// Whether counts per expert travel with this dispatch (expert_counts.h).
template <class Config>
HD bool has_expert_counts(const DispatchArgs& args) {
  return Config::kExpertCounts >= 0 ? Config::kExpertCounts != 0 : args.num_expert_counts != 0;
}

// Whether slots follow the order of the tokens (ordered_slots.h).
template <class Config>
HD bool has_ordered_slots(const DispatchArgs& args) {
  return Config::kOrderedSlots >= 0 ? Config::kOrderedSlots != 0 : args.ordered_slots != 0;
}

HD uint32_t* expert_counters(const DispatchArgs& args) {
  return reinterpret_cast<uint32_t*>(region_of(args, args.geometry.ep_rank, args.counters_region));
}

// Counts one choice of a token's router, unless the caller has counted. The id is an expert's.
template <class Config>
HD void count_choice(const DispatchArgs& args, int32_t id) {
  if (!has_expert_counts<Config>(args) || args.expert_counts != 0) return;
  // Relaxed: the CTA that reads the sum is ordered after it by P2, or by its own barrier.
  fetch_add_relaxed_gpu(&expert_counters(args)[id], 1);
}

// The first warp's part of route_token(). The warp has a thread for every k, so only its threads
// wait for one another. Before its first token it loads `exclusion`. before: if slots follow the
// order of the tokens, how many of the tokens before this one each rank gets.
template <class Config>
HD void route_in_warp(const DispatchArgs& args, const Cta& cta, int token, uint32_t* send_counters,
                      const uint32_t* before, Exclusion& exclusion, TokenRoute& route) {
  const Geometry& geometry = args.geometry;
  const int top_k = top_k_of<Config>(geometry);
  const int64_t first = static_cast<int64_t>(token) * top_k;
  const int32_t* topk_ids =
      reinterpret_cast<const int32_t*>(args.payloads[kTopkIdsPayload].source) + first;
  int32_t* send_slots = reinterpret_cast<int32_t*>(args.send_slots) + first;
  MOE_NVLINK_ROLLED
  for (int k = cta.thread; k < top_k; k += Cta::kWarpThreads) {
    const int32_t id = load_word(topk_ids + k);
    // After the load of the id and before its use, so that all of these loads are on their way
    // together. Not before the loop over the tokens: the compiler would ask `exclusion` there.
    if (token == cta.block) exclusion = load_exclusion(args);
    const bool padding = is_padding(args, token);
    const bool stays = exclusion.holds(args) || padding;
    const int target = stays ? kNoSlot : active_target_of(args, id);
    route.target_ranks[k] = target;
    route.ids[k] = target == kNoSlot ? -1 : id;
    if (target != kNoSlot) count_choice<Config>(args, id);
  }
  cta.sync_warp();  // the targets of all k
  MOE_NVLINK_ROLLED
  for (int k = cta.thread; k < top_k; k += Cta::kWarpThreads) {
    const int target = route.target_ranks[k];
    bool takes_slot = target != kNoSlot;
    MOE_NVLINK_ROLLED
    for (int earlier = 0; earlier < k; ++earlier) {
      takes_slot = takes_slot && route.target_ranks[earlier] != target;
    }
    int row = kNoSlot;
    int slot = kNoSlot;
    if (takes_slot) {
      // Relaxed: it only hands out numbers. The last CTA reads the total after P2.
      int place = static_cast<int>(fetch_add_relaxed_gpu(&send_counters[target], 1));
      if (has_ordered_slots<Config>(args)) place = static_cast<int>(before[target]);
      row = geometry.ep_rank * geometry.max_tokens_per_rank + place;
      slot = target * geometry.max_tokens_per_rank + place;
      route.windows[k] = window_of(args, target);
      if (!all_ids_travel(args)) {
        const bool is_local = args.received_ids == kReceivedIdsLocal;
        route.first_ids[k] = is_local ? first_expert_of(target, geometry) : 0;
        route.absent_ids[k] = absent_id_at(target, args);
      }
    }
    route.rows[k] = row;
    store_word(send_slots + k, slot);
  }
}

// Fills `route` and writes the token's row of send_slots. All threads of the CTA call it and may
// read `route` afterwards. A slot is a position in this rank's own slice at the target, so no other
// rank takes part in its choice. If this rank has failed, no row has a target.
template <class Config>
HD void route_token(const DispatchArgs& args, const Cta& cta, int token, uint32_t* send_counters,
                    const uint32_t* before, Exclusion& exclusion, TokenRoute& route) {
  if (cta.thread < Cta::kWarpThreads) {
    route_in_warp<Config>(args, cta, token, send_counters, before, exclusion, route);
  }
  cta.sync();  // the route is whole
}

}  // namespace moe_nvlink
