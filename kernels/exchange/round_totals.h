// What a dispatch adds to the totals of its rank.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

// Totals that a dispatch adds to.
constexpr int kNumRoundTotals = 8;

HD void add_round_total(const DispatchArgs& args, int total, uint32_t rows, uint32_t remote) {
  const Geometry& geometry = args.geometry;
  ExchangeCounters* totals = exchange_counters(args);
  const uint64_t tokens = static_cast<uint64_t>(geometry.num_tokens);
  const uint64_t peers = static_cast<uint64_t>(geometry.ep_size - 1);
  uint64_t token_bytes = 0;
  MOE_NVLINK_ROLLED
  for (uint32_t i = 0; i < args.num_payloads; ++i) token_bytes += args.payloads[i].row_bytes;
  const uint64_t combined_bytes = static_cast<uint64_t>(geometry.hidden_size) *
                                  static_cast<uint64_t>(element_bytes(geometry.element));
  switch (total) {
    case 0:
      return add_to_total(&totals->rounds, 1);
    case 1:
      return add_to_total(&totals->tokens, tokens);
    case 2:
      return add_to_total(&totals->destinations, rows);
    case 3:
      return add_to_total(&totals->remote_destinations, remote);
    case 4:
      return add_to_total(&totals->bytes_dispatched, rows * token_bytes);
    case 5:
      return add_to_total(&totals->bytes_dispatched_remote, remote * token_bytes);
    case 6:
      return add_to_total(&totals->bytes_allgather, tokens * peers * token_bytes);
    default:
      return add_to_total(&totals->bytes_reducescatter, tokens * peers * combined_bytes);
  }
}

// Adds a round with so many rows put, `remote` of them to other ranks: every step-th total from
// `first` on.
HD void add_round(const DispatchArgs& args, int first, int step, uint32_t rows, uint32_t remote) {
  MOE_NVLINK_ROLLED
  for (int total = first; total < kNumRoundTotals; total += step) {
    add_round_total(args, total, rows, remote);
  }
}

}  // namespace moe_nvlink
