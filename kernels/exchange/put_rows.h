// Dispatch of rows as they are: a CTA loads each payload row of a token once and stores it to each
// target.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/quantise.h"
#include "../include/moe_nvlink/routing.h"
#include "await_combine.h"
#include "dispatch_shared.h"
#include "ordered_slots.h"

namespace moe_nvlink {

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

// Whether a payload's row travels one word per expert of the token (put_choices()).
HD bool has_choices(const DispatchArgs& args, int payload) {
  return payload == kTopkIdsPayload || (payload == kTopkWeightsPayload && !all_ids_travel(args));
}

HD int whole_warps(int threads) {
  static_assert((Cta::kWarpThreads & (Cta::kWarpThreads - 1)) == 0);
  return (threads + Cta::kWarpThreads - 1) & -Cta::kWarpThreads;
}

HD RowPlan plan_row(const DispatchArgs& args, int index) {
  const Payload& payload = args.payloads[index];
  const int bytes =
      has_choices(args, index) ? 4 : vector_bytes_for(payload.source, payload.row_bytes);
  return RowPlan{bytes, lanes_for(static_cast<int>(payload.row_bytes), bytes), 0};
}

// Lays the rows of the payloads around the CTA: each row begins with the first warp after the row
// before. So each warp stores whole lines of 128 bytes of a long row, and a line is one packet on
// NVLink: if two warps stored parts of it, it would be two. Where the CTA has a thread for each
// vector, no warp has two rows. A quantised row begins at thread 0, because the lanes of a block
// exchange values; the other rows follow it. Reads arguments only, nothing of an earlier kernel.
// The last threads do it, because the first warp shall begin with the route.
template <class Config>
HD void plan_rows(const DispatchArgs& args, const Cta& cta, DispatchShared& shared) {
  const int num_payloads = static_cast<int>(args.num_payloads);
  MOE_NVLINK_ROLLED
  for (int i = cta.num_threads - 1 - cta.thread; i < num_payloads; i += cta.num_threads) {
    int before = 0;
    if (quantiser_of<Config>(args) != kQuantiserNone) {
      before = whole_warps((args.geometry.hidden_size + kLaneElements - 1) / kLaneElements);
    }
    MOE_NVLINK_ROLLED
    for (int j = 0; j < i; ++j) {
      if (is_quantised<Config>(args, j)) continue;
      before += whole_warps(plan_row(args, j).num_lanes);
    }
    RowPlan plan = plan_row(args, i);
    plan.first_thread = before % cta.num_threads;
    if (is_quantised<Config>(args, i)) plan.num_lanes = 0;
    shared.plans[i] = plan;
  }
}

// The targets of a token's row of one payload: one for each k that has a row of its own. On the GPU
// the list has null for every other k, so a loop over all k can be unrolled. On the host the list
// leaves them out.
template <class Config>
struct Targets {
  char* rows[Config::kTopKBound];
  int present;

  // On the GPU a constant, so loops over the targets are unrolled and rows stay in registers.
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

// What a target gets of one choice of the token's router: its id, or its weight as bits.
HD int32_t word_of_choice(const DispatchArgs& args, const TokenRoute& route, bool is_id,
                          int32_t word, int choice, int k) {
  if (all_ids_travel(args)) return word;
  const bool is_absent = route.target_ranks[choice] != route.target_ranks[k];
  if (!is_id) return is_absent ? 0 : word;
  return is_absent ? route.absent_ids[k] : word - route.first_ids[k];
}

// Puts the ids that routing left in shared memory, from where put_row cannot load, or the weights
// if they differ from target to target.
template <class Config>
HD void put_choices(const DispatchArgs& args, const Cta& cta, int lane, const TokenRoute& route,
                    const Payload& payload, bool is_id, int token) {
  const int top_k = top_k_of<Config>(args.geometry);
  const uint64_t region = static_cast<uint64_t>(payload.region) * kRegionAlignment;
  const int32_t* weights =
      reinterpret_cast<const int32_t*>(payload.source) + static_cast<int64_t>(token) * top_k;
  MOE_NVLINK_ROLLED
  for (int choice = lane; choice < top_k; choice += cta.num_threads) {
    const int32_t word = is_id ? route.ids[choice] : load_word(weights + choice);
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      const int row = route.rows[k];
      if (row == kNoSlot) continue;
      char* target = reinterpret_cast<char*>(route.windows[k] + region +
                                             static_cast<uint64_t>(row) * payload.row_bytes);
      store_word(reinterpret_cast<int32_t*>(target) + choice,
                 word_of_choice(args, route, is_id, word, choice, k));
    }
  }
}

template <class Config>
HD bool has_target(const DispatchArgs& args, const TokenRoute& route) {
  bool any = false;
  for (int k = 0; k < top_k_of<Config>(args.geometry); ++k) any = any || route.rows[k] != kNoSlot;
  return any;
}

// Puts the token's rows, without those that the quantiser writes. The router's order of a token's
// experts is the order of the targets. It differs from token to token and from rank to rank, so no
// rank is the first target of all.
template <class Config>
HD void put_token(const DispatchArgs& args, const Cta& cta, const DispatchShared& shared,
                  const TokenRoute& route, int token) {
  // No thread reads rows of a token without a target (padding).
  if (!has_target<Config>(args, route)) return;
  MOE_NVLINK_ROLLED
  for (int i = 0; i < static_cast<int>(args.num_payloads); ++i) {
    const RowPlan plan = shared.plans[i];
    const int turned = cta.thread - plan.first_thread;
    const int lane = turned < 0 ? turned + cta.num_threads : turned;
    if (lane >= plan.num_lanes) continue;
    const Payload& payload = args.payloads[i];
    if (has_choices(args, i)) {
      put_choices<Config>(args, cta, lane, route, payload, i == kTopkIdsPayload, token);
    } else {
      const Targets<Config> targets(args, route, payload);
      const char* row = reinterpret_cast<const char*>(payload.source) +
                        static_cast<uint64_t>(token) * payload.row_bytes;
      put_row(cta, lane, row, targets.rows, targets.count(args.geometry),
              static_cast<int>(payload.row_bytes), plan.vector_bytes,
              are_streamed(payload.region * kRegionAlignment, payload.row_bytes,
                           args.geometry.num_tokens));
    }
  }
}

// Routes and puts every num_blocks-th token. After a token no barrier is needed: a thread that is
// ahead writes the other route, and it comes back to this route only after the barrier in the next
// token's route_token(), which every thread that still reads this route must pass too.
template <class Config>
HD void put_tokens(const DispatchArgs& args, const Cta& cta, uint32_t* send_counters,
                   DispatchShared& shared) {
  Exclusion exclusion;
  TokensBefore<Config> tokens(args, cta, shared.sent);
  int turn = 0;
  for (int token = cta.block; token < args.geometry.num_tokens; token += cta.num_blocks) {
    tokens.count_to(token);
    TokenRoute& route = shared.routes[turn];
    if (token == cta.block) await_small_combine(args, cta, &shared.has_failed);
    route_token<Config>(args, cta, token, send_counters, tokens.before, exclusion, route);
    if (shared.has_failed == 0) put_token<Config>(args, cta, shared, route, token);
    turn = 1 - turn;
  }
}

}  // namespace moe_nvlink
