// What the threads of a CTA of dispatch share.
#pragma once

#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/quantise.h"
#include "../include/moe_nvlink/routing.h"

namespace moe_nvlink {

// How the CTA's threads share one payload's row.
struct RowPlan {
  int32_t vector_bytes;
  int32_t num_lanes;     // threads that have a part of it
  int32_t first_thread;  // lane 0
};

struct DispatchShared {
  TokenRoute routes[2];  // of this token and of the next
  RowPlan plans[kMaxPayloads];
  uint32_t epoch;       // of this round
  uint32_t has_failed;  // this rank sends nothing: a verb or P12 has failed, or no mask
  int32_t finisher;     // number among the finishers; negative in the other CTAs
  // Rows put to each rank; in the last CTA. Before, if slots follow the order of the tokens, how many
  // of the tokens before the CTA's next one each rank gets.
  uint32_t sent[kMaxRanks];
  int32_t counts[kMaxRanks];  // rows received from each rank; in finishers
};

// The same with a quantiser.
struct QuantisingDispatchShared : DispatchShared {
  RowAmax amax[2];  // of this token's row and of the next
};

template <bool Quantises>
struct DispatchSharedOf {
  using Type = DispatchShared;
};
template <>
struct DispatchSharedOf<true> {
  using Type = QuantisingDispatchShared;
};
template <class Config>
using DispatchSharedFor = typename DispatchSharedOf<Config::kQuantiser != kQuantiserNone>::Type;

}  // namespace moe_nvlink
