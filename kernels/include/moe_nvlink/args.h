// The packed arguments of a launch: one struct per kernel, passed by value on the GPU and by pointer
// on the host. Python builds its ctypes mirror by reading this file, so a field is written once:
// one field per line, type and name, then who needs it and its unit.
// Peer memory has no pointer table: rank r's workspace is at window_base + r * rank_stride, and a
// region lies at the same offset in every rank's. Region offsets count units of kRegionAlignment.
#pragma once

#include "config.h"
#include "platform.h"

namespace moe_nvlink {

struct Geometry {
  int32_t ep_size;              // ranks
  int32_t ep_rank;              // this one
  int32_t num_experts;          // global
  int32_t top_k;                // ids per token
  int32_t hidden_size;          // elements of a combined row
  int32_t max_tokens_per_rank;  // capacity: slots of one source's slice
  int32_t element;              // kElement* of combine
  int32_t num_tokens;           // this call's tokens on this rank
  uint32_t formats;             // 7 bits that stand for the recipe and combine's format
};

// With a quantiser, payload kFirstCallerPayload has the activations as its source,
// [num_tokens, hidden_size] of geometry.element, and the quantised row as its row; the payload
// behind it, if the recipe has scales, is written by the quantiser and has no source.
struct Payload {
  uint64_t source;     // [num_tokens, row_bytes], this rank's own memory
  uint32_t region;     // [ep_size, max_tokens_per_rank, row_bytes] in every rank's workspace
  uint32_t row_bytes;  // bytes of one token's row; any number
};

struct ControlRegions {
  uint32_t dispatch_cells;  // [ep_size] u64 {tag, count, epoch}; entry s is written by rank s
  uint32_t combine_cells;   // [ep_size] u64 {0, 0, epoch}; entry s is written by rank s
  uint32_t recv_counts;     // [ep_size] i32 rows received from each rank; written by dispatch
  uint32_t send_counters;   // [ep_size] u32 rows put to each rank; zero between dispatches
  uint32_t local;           // LocalControl; this rank only
  uint32_t counters;        // ExchangeCounters; this rank only
};

// send_slots holds target_rank * max_tokens_per_rank + slot, or kNoSlot.
struct DispatchArgs {
  uint64_t window_base;            // address of rank 0's workspace
  uint64_t rank_stride;            // bytes from one rank's workspace to the next
  uint64_t send_slots;             // [num_tokens, top_k] i32, written
  uint64_t timeout_ns;             // how long the wait for the peers may take
  uint64_t global_scale;           // address of one f32 for quantisers that take one, or 0
  Geometry geometry;               // by value
  ControlRegions control;          // of this call's channel
  uint32_t num_payloads;           // used entries below
  uint32_t quantiser;              // kQuantiser*; not None: see Payload
  Payload payloads[kMaxPayloads];  // ids, weights, then the caller's rows
};

struct CombineArgs {
  uint64_t window_base;    // address of rank 0's workspace
  uint64_t rank_stride;    // bytes from one rank's workspace to the next
  uint64_t send_slots;     // [num_tokens, top_k] i32 as dispatch wrote it
  uint64_t timeout_ns;     // how long the wait for the peers may take
  uint64_t output;         // [num_tokens, hidden_size] elements, written
  Geometry geometry;       // by value
  ControlRegions control;  // of this call's channel
  uint32_t region;         // [ep_size, max_tokens_per_rank, hidden_size]: the experts' output
  uint32_t hidden_splits;  // CTAs that share one token's row
  uint32_t format;         // kCombine*; not Unquantised: what the peers read is in the next three
  uint32_t rows_region;    // [ep_size, max_tokens_per_rank, bytes of a quantised row]
  uint32_t scales_region;  // [ep_size, max_tokens_per_rank, bytes of a row's block scales]
  uint32_t row_scales_region;  // [ep_size, max_tokens_per_rank] f32; formats that have them
};

// Words of this rank that live from launch to launch, so that a replay needs no new values.
struct LocalControl {
  uint64_t fault;             // 0, or {code, phase, peer, epoch} (epoch_flags.h)
  uint64_t host_fault;        // address of a word the host reads without waiting, or 0; set once
  uint32_t epoch;             // of the last finished dispatch; combine uses it as it stands
  uint32_t arrivals;          // CTAs of the running dispatch that have put their tokens
  uint32_t rows_put;          // by the last dispatch, for combine's counters
  uint32_t remote_rows_put;   // the part of them that went to other ranks
  uint32_t combine_arrivals;  // CTAs of the running combine that have quantised their rows
};

// Totals since the workspace was made.
struct ExchangeCounters {
  uint64_t rounds;                   // dispatches
  uint64_t tokens;                   // dispatched from this rank
  uint64_t destinations;             // rows put: unique (token, rank) pairs
  uint64_t remote_destinations;      // of them to other ranks
  uint64_t bytes_dispatched;         // rows put, all payloads
  uint64_t bytes_dispatched_remote;  // of them to other ranks
  uint64_t bytes_combined;           // partial rows read
  uint64_t bytes_combined_remote;    // of them from other ranks
  uint64_t bytes_allgather;          // what an all-gather would have sent to the other ranks
  uint64_t bytes_reducescatter;      // what a reduce-scatter would have sent back
};

}  // namespace moe_nvlink
