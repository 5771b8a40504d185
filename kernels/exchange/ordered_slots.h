// Slots in the order of the tokens, for who wants received rows to lie alike in every run. The slot
// of a token at a rank is then the number of tokens before it that have an expert there, as in small
// batches, and not the turn in which its CTA came.
//
// A CTA counts for itself: before each of its tokens it adds the tokens since its last one to a
// number for each rank in shared memory. So it reads the ids of all tokens before its last one.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/expert_owners.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/routing.h"

namespace moe_nvlink {

// The ranks that own an expert of a token, a bit for each; no rank of a token that is padding.
struct OwnersOfToken {
  uint64_t low = 0;   // ranks from 0 on; no array, so that the words stay in registers
  uint64_t high = 0;  // ranks from 64 on

  HD void add(int rank) {
    const uint64_t bit = uint64_t{1} << (rank % 64);
    low |= rank < 64 ? bit : 0;
    high |= rank < 64 ? 0 : bit;
  }
  HD uint32_t has(int rank) const {
    return static_cast<uint32_t>((rank < 64 ? low : high) >> (rank % 64) & 1);
  }
};
static_assert(kMaxRanks == 128);

template <class Config>
HD OwnersOfToken owners_of_token(const DispatchArgs& args, const ExpertOwners& owners, int token) {
  OwnersOfToken found = {};
  if (is_padding(args, token)) return found;
  const int top_k = top_k_of<Config>(args.geometry);
  const int32_t* ids = reinterpret_cast<const int32_t*>(args.payloads[kTopkIdsPayload].source) +
                       static_cast<int64_t>(token) * top_k;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    const int rank = owner_of(load_word(ids + k), owners, args.geometry);
    if (rank != kNoSlot) found.add(rank);
  }
  return found;
}

// Adds to before[rank], for every rank, the tokens of [from, to) that have an expert there. All
// threads of the CTA; a barrier must stand before and after.
template <class Config>
HD void count_tokens_before(const DispatchArgs& args, const Cta& cta, int from, int to,
                            uint32_t* before) {
  static_assert(kMaxRanks % 2 == 0);
  const ExpertOwners owners = expert_owners(args.geometry);
  MOE_NVLINK_ROLLED
  for (int first = from; first < to; first += cta.num_threads) {
    const int token = first + cta.thread;
    OwnersOfToken found = {};
    if (token < to) found = owners_of_token<Config>(args, owners, token);
    MOE_NVLINK_ROLLED
    for (int rank = 0; rank < args.geometry.ep_size; rank += 2) {
      // Two ranks in one sum, which is at most the threads of a warp.
      const uint32_t pair = found.has(rank) | found.has(rank + 1) << 16;
      const uint32_t sums = cta.sum_of_lanes<Cta::kExchangeThreads>(pair);
      if (cta.thread % Cta::kExchangeThreads != 0 || sums == 0) continue;
      add_relaxed_cta(&before[rank], sums & 0xffffu);
      add_relaxed_cta(&before[rank + 1], sums >> 16);
    }
  }
}

// The counts of a CTA's tokens, kept from one of them to the next.
template <class Config>
struct TokensBefore {
  const DispatchArgs& args;
  const Cta& cta;
  uint32_t* before;  // [kMaxRanks], in shared memory
  int counted = 0;   // tokens

  HD TokensBefore(const DispatchArgs& the_args, const Cta& the_cta, uint32_t* counts)
      : args(the_args), cta(the_cta), before(counts) {
    if (!has_ordered_slots<Config>(args)) return;
    for (int rank = cta.thread; rank < kMaxRanks; rank += cta.num_threads) before[rank] = 0;
    cta.sync();  // the counts are zero
  }

  // Counts up to the token that is routed next. The barrier at the end of the route before stands
  // between its reads of the counts and what is added here.
  HD void count_to(int token) {
    if (!has_ordered_slots<Config>(args)) return;
    count_tokens_before<Config>(args, cta, counted, token, before);
    counted = token;
    cta.sync();  // the counts are whole
  }
};

}  // namespace moe_nvlink
