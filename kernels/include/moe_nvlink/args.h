// The packed arguments of a launch: one struct per kernel (the head's three kernels share
// HeadArgs), passed by value on the GPU and by pointer on the host. Python builds its ctypes mirror
// from this file, so a field is written once: one field per line, type and name, then who needs it
// and its unit. Peer memory has no pointer table: rank r's workspace is at window_base + r *
// rank_stride, and a region lies at the same offset in every rank's workspace. Region offsets count
// units of kRegionAlignment.
#pragma once

#include "config.h"
#include "platform.h"

namespace moe_nvlink {

struct Geometry {
  int32_t ep_size;              // ranks
  int32_t ep_rank;              // this rank
  int32_t num_experts;          // global
  int32_t top_k;                // ids per token
  int32_t hidden_size;          // elements of a combined row
  int32_t max_tokens_per_rank;  // bound of this call: slots of one source's slice
  int32_t element;              // kElement* of combine
  int32_t num_tokens;           // this call's tokens on this rank
  uint32_t formats;  // 7 bits: recipe, combine's format and layer; above: what dispatch writes
};

// With a quantiser, the source of payload kFirstCallerPayload is the activations, [num_tokens,
// hidden_size] of geometry.element, and its row is the quantised row. If the recipe has scales, the
// quantiser writes the next payload, which has no source.
struct Payload {
  uint64_t source;     // [num_tokens, row_bytes], this rank's own memory
  uint32_t region;     // [ep_size, max_tokens_per_rank, row_bytes] in every rank's workspace
  uint32_t row_bytes;  // bytes of one token's row; any number
};

struct ControlRegions {
  uint32_t dispatch_cells;  // [ep_size] u64 {tag, count, epoch}; entry s is written by rank s
  uint32_t combine_cells;   // [ep_size] u64 {tag, 0, epoch}; entry s is written by rank s
  uint32_t pulled_cells;    // [ep_size] u64, by rank s: it has read in the combine before the epoch
  uint32_t recv_counts;     // [ep_size] i32 rows received from each rank; written by dispatch
  uint32_t rows_from;       // [ep_size] u32 the same for combine: callers cannot write to these
  uint32_t send_counters;   // [ep_size] u32 rows put to each rank; zero between dispatches
  uint32_t local;           // LocalControl; this rank only
  uint32_t counters;        // ExchangeCounters; this rank only
  uint32_t wait_totals;     // [ep_size] u64 nanoseconds waited for each rank; this rank only
  uint32_t meeting;  // [2, ep_size, kMeetingWords] u64, entry s by rank s; what meet has taken
};

// send_slots holds target_rank * max_tokens_per_rank + slot, or kNoSlot.
struct DispatchArgs {
  uint64_t window_base;      // address of rank 0's workspace
  uint64_t rank_stride;      // bytes from one rank's workspace to the next
  uint64_t send_slots;       // [num_tokens, top_k] i32, written
  uint64_t timeout_ns;       // how long the wait for the peers may take
  uint64_t global_scale;     // address of one f32 for quantisers that take one, or 0
  uint64_t is_padding;       // [num_tokens] bytes; not 0: the token is not sent; or no address
  uint64_t active_ranks;     // u64 words, bit r % 64 of word r / 64: rank r takes part; 0: all do
  uint64_t expert_counts;    // [num_expert_counts] u32 of the caller; 0: dispatch counts, if any
  Geometry geometry;         // by value
  ControlRegions control;    // of this call's channel
  uint32_t num_payloads;     // used entries below
  uint32_t quantiser;        // kQuantiser*; not None: see Payload
  uint32_t received_ids;     // kReceivedIds*
  int32_t absent_id;         // with kReceivedIdsGiven
  uint32_t scales_layout;    // kScalesLayout*; not Linear: of the payload after the rows
  uint32_t laid_out_region;  // its scales in that layout, in this rank's workspace
  uint32_t staging_region;   // small batches: [ep_size, max_tokens_per_rank, units] of packed rows
  uint32_t packed_offsets[kMaxPayloads];  // small batches: where each payload's row begins in it
  uint32_t packed_bytes;           // small batches: bytes of a packed row, a multiple of 16; or 0
  uint32_t senders;                // small batches: CTAs that send; 0: all CTAs do all
  uint32_t num_expert_counts;      // words that each rank sends to every rank; 0: none
  uint32_t counts_region;          // [ep_size, num_expert_counts] u32: what each rank has sent
  uint32_t counts_staging_region;  // [ep_size, units]: the same on its way; slice s: by rank s
  uint32_t counters_region;        // [num_experts] u32, this rank's; zero between dispatches
  uint32_t ordered_slots;          // 1: slots follow the order of the tokens
  Payload payloads[kMaxPayloads];  // ids, weights, then the caller's rows
};

struct CombineArgs {
  uint64_t window_base;    // address of rank 0's workspace
  uint64_t rank_stride;    // bytes from one rank's workspace to the next
  uint64_t send_slots;     // [num_tokens, top_k] i32 as dispatch wrote it
  uint64_t timeout_ns;     // how long the wait for the peers may take
  uint64_t output;         // [num_tokens, hidden_size] elements, written
  uint64_t add;            // [num_tokens, hidden_size] elements, added to scale * sum; 0: none
  Geometry geometry;       // by value
  ControlRegions control;  // of this call's channel
  uint32_t region;         // [ep_size, max_tokens_per_rank, hidden_size]: the experts' output
  uint32_t hidden_splits;  // CTAs that share one token's row
  uint32_t format;         // kCombine*; not Unquantised: what the peers read is in the next three
  uint32_t rows_region;    // [ep_size, max_tokens_per_rank, bytes of a quantised row]
  uint32_t scales_region;  // [ep_size, max_tokens_per_rank, bytes of a row's block scales]
  uint32_t row_scales_region;    // [ep_size, max_tokens_per_rank] f32; formats that have them
  uint32_t even_staging_region;  // small batches: [ep_size, max_tokens_per_rank, units of a row]
  uint32_t odd_staging_region;   // the same for rounds of an odd epoch
  uint32_t senders;              // small batches: CTAs that send; 0: all CTAs do all
  float scale;                   // the sums are multiplied by it; finite
  float rows_factor;             // kCombineFp8Tensor: a code is an element times this
  uint32_t is_masked;            // 1: the dispatch had a mask, which it left in LocalControl
  uint32_t tells_end;            // 1: this rank may leave: say when it has read the rows (P14)
};

// A barrier of the ranks that go on after another one has died (meet.cu).
struct MeetArgs {
  uint64_t window_base;                   // address of rank 0's workspace
  uint64_t rank_stride;                   // bytes from one rank's workspace to the next
  uint64_t timeout_ns;                    // how long the wait for the peers may take
  uint64_t active_ranks[kRankMaskWords];  // the ranks that meet
  uint64_t number;                        // of the meeting, from 1 on
  Geometry geometry;                      // ranks only
  ControlRegions control;                 // of channel 0
};

// The vocabulary product that the ranks of a group share (kernels/lm_head). Rank r has the
// vocabulary rows from r * shard_size on: shard_size of them, or what is left of vocab_size.
struct HeadGeometry {
  int32_t tp_size;            // ranks
  int32_t tp_rank;            // this rank
  int32_t vocab_size;         // token ids
  int32_t hidden_size;        // elements of a row
  int32_t shard_size;         // vocabulary rows of a rank
  int32_t max_rows_per_rank;  // capacity: rows of one rank
  int32_t element;            // kElement* of rows and logits
  int32_t row_bound;          // slots of a rank's slice in this call; the same on all ranks
  int32_t num_rows;           // this call's rows on this rank
};

// One struct for the three kernels of a call. Of the control regions they use both kinds of cells,
// recv_counts, local and counters.
struct HeadArgs {
  uint64_t window_base;    // address of rank 0's workspace
  uint64_t rank_stride;    // bytes from one rank's workspace to the next
  uint64_t timeout_ns;     // how long a wait for the peers may take
  uint64_t hidden;         // gather: [num_rows, hidden_size] elements
  uint64_t logits;         // argmax: [rows, vocabulary rows of this rank] elements
  uint64_t output;         // argmax: [num_rows] i64; collect: [num_rows, vocab_size] elements
  HeadGeometry geometry;   // by value
  ControlRegions control;  // of the group
  uint32_t rows_region;    // [tp_size, row_bound, hidden_size]; slice s: rows of rank s
  uint32_t pairs_region;   // [tp_size, max_rows_per_rank, kMaxHeadSplits] u64; slice s: by rank s
  uint32_t logits_region;  // collect: [rows, vocabulary rows of the rank] in every rank's workspace
  uint32_t is_compact;     // 1: logits have the filled rows only; 0: slots, tp_size * row_bound
  uint32_t row_splits;     // argmax: parts of a row that CTAs share; 1..kMaxHeadSplits
  float soft_cap;          // logits become cap * tanh(logit / cap); 0: they do not
  float scale;             // and are then multiplied by this
};

constexpr int kWordsToLine = 6;  // before LocalControl.sleepers

// Words of this rank that live from launch to launch, so that a replay needs no new values.
struct LocalControl {
  uint64_t fault;             // 0, or {code, phase, peer, epoch} (epoch_flags.h)
  uint64_t host_fault;        // address of a word the host reads without waiting, or 0; set once
  uint32_t epoch;             // of the last dispatch, or gather; the kernels after it read it
  uint32_t arrivals;          // CTAs that have put their rows (dispatch, gather), or read (combine)
  uint32_t rows_put;          // by the last dispatch, for combine's counters
  uint32_t remote_rows_put;   // the part of them that went to other ranks
  uint32_t combine_arrivals;  // rows that the running combine has quantised; CTAs that ended argmax
  uint32_t rows_taken;        // by CTAs of the running combine with a format; zero between combines
  uint32_t combined_epoch;    // of the last combine; the dispatch after it reads it
  uint32_t has_pulled;        // 1: the peers' experts' rows were read in the last combine
  uint64_t active_ranks[kRankMaskWords];  // mask of the last dispatch that had one, for combine
  uint64_t masked_epoch;                  // of that dispatch
  uint64_t read_epoch;  // of the last combine whose rows this rank has read; peers look at it
  uint64_t unused[kWordsToLine];
  uint64_t sleepers;  // CPU ranks: threads of this rank that sleep until a cell of theirs changes
};

// Totals since the workspace was made.
struct ExchangeCounters {
  uint64_t rounds;                   // dispatches, or gathers
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
