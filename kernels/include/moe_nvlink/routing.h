// From a token's expert ids to (target_rank, slot), once per distinct rank.
#pragma once

#include "args.h"
#include "memory_order.h"
#include "platform.h"

namespace moe_nvlink {

// Rank that owns an expert, or kNoSlot where the id is no expert. Ranks own contiguous ranges; when
// ep_size does not divide num_experts the first (num_experts % ep_size) ranks own one more.
HD int target_rank_of(int expert, const Geometry& geometry) {
  if (expert < 0 || expert >= geometry.num_experts) return kNoSlot;
  const int fewest = geometry.num_experts / geometry.ep_size;
  const int num_larger = geometry.num_experts % geometry.ep_size;
  const int first_of_smaller = num_larger * (fewest + 1);
  if (expert < first_of_smaller) return expert / (fewest + 1);
  return num_larger + (expert - first_of_smaller) / fewest;
}

// Routing of the token a CTA works on; in shared memory on the GPU.
struct TokenRoute {
  int32_t ids[kMaxTopK];           // as they travel: what is no expert has become -1
  int32_t target_ranks[kMaxTopK];  // owner of each id, or kNoSlot
  int32_t slots[kMaxTopK];         // row in the targets' buffers [ep_size * capacity], or kNoSlot
};

template <class Config>
HD int top_k_of(const Geometry& geometry) {
  return Config::kTopK > 0 ? Config::kTopK : geometry.top_k;
}

// Fills `route` and writes the token's row of send_slots. Collective over the CTA; `route` may be
// read by all threads afterwards. A slot is a position in my own slice at the target, so no other
// rank takes part in choosing it.
template <class Config>
HD void route_token(const Cta& cta, const Geometry& geometry, const int32_t* topk_ids,
                    int32_t* send_slots, uint32_t* send_counters, TokenRoute& route) {
  const int top_k = top_k_of<Config>(geometry);
  for (int k = cta.thread; k < top_k; k += cta.num_threads) {
    const int target = target_rank_of(topk_ids[k], geometry);
    route.target_ranks[k] = target;
    route.ids[k] = target == kNoSlot ? -1 : topk_ids[k];
  }
  cta.sync();
  for (int k = cta.thread; k < top_k; k += cta.num_threads) {
    const int target = route.target_ranks[k];
    bool takes_slot = target != kNoSlot;
    for (int earlier = 0; earlier < k; ++earlier) {
      takes_slot = takes_slot && route.target_ranks[earlier] != target;
    }
    int slot = kNoSlot;
    if (takes_slot) {
      // Relaxed: it only hands out numbers. The last CTA reads the total after P2.
      const uint32_t row = fetch_add_relaxed_gpu(&send_counters[target], 1);
      slot = target * geometry.max_tokens_per_rank + static_cast<int>(row);
    }
    route.slots[k] = slot;
    send_slots[k] = slot;
  }
  cta.sync();
}

}  // namespace moe_nvlink
