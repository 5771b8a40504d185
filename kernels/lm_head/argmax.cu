// Argmax of the shared LM head: for each row, the token id of the largest logit in the vocabulary of all
// ranks. round.h says how the head's three kernels work together.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/numeric.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "round.h"

namespace moe_nvlink {

// The most threads of a CTA, by the number that exchange values without memory.
constexpr int kMostKeyParts = 32;

struct HeadArgmaxShared : HeadShared {
  int32_t splits[kMaxRanks];         // words each rank has put for a row; in the last CTA
  uint64_t parts[2][kMostKeyParts];  // the CTA's largest words, of this item and of the next
};

// The larger word is the larger value, and of equal values the lower token id. NaN is above all
// numbers, -0 is +0. Zero is below every value of every id.
HD uint32_t order_of_value(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Selections alone: an early return or && would keep the host from making vector code of it.
  const uint32_t order = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  const uint32_t number = magnitude == 0 ? 0x80000000u : order;
  return magnitude > 0x7f800000u ? 0xffffffffu : number;
}
HD uint64_t word_of(uint32_t order, uint32_t complement) {
  return static_cast<uint64_t>(order) << 32 | complement;
}
HD int64_t id_of_word(uint64_t word) {
  return static_cast<int64_t>(~static_cast<uint32_t>(word));
}

// The largest word among `Lanes` threads side by side; all that can exchange values call it together.
template <int Lanes = Cta::kExchangeThreads>
HD uint64_t largest_of_lanes(const Cta& cta, uint64_t word) {
  const uint32_t order = static_cast<uint32_t>(word >> 32);
  const uint32_t most = cta.max_of_lanes<Lanes>(order);
  const uint32_t complement = order == most ? static_cast<uint32_t>(word) : 0;
  return word_of(most, cta.max_of_lanes<Lanes>(complement));
}

// What the head makes of a logit before it is compared.
struct HeadFunction {
  float soft_cap;
  float scale;

  HD float operator()(float logit) const {
    float value = logit;
    if (soft_cap != 0.0f) value = soft_cap * hyperbolic_tangent(value / soft_cap);
    return value * scale;
  }
};

// Vocabulary rows [first, last) of this rank's. Unsigned, for a step behind 2^31 - 1 must be harmless.
struct Columns {
  uint32_t first;
  uint32_t last;
};

HD Columns columns_of_split(uint32_t width, uint32_t split, uint32_t splits) {
  // Whole vectors of the narrowest type, so that every part but the last has whole ones.
  constexpr uint32_t kUnit = kVectorBytes;
  const uint32_t units = (width + kUnit - 1) / kUnit;
  const uint32_t each = (units + splits - 1) / splits * kUnit;
  const uint32_t first = split * each < width ? split * each : width;
  return Columns{first, each < width - first ? first + each : width};
}

// This thread's largest word of a row's columns, `Width` at a time.
template <class Element, uint32_t Width>
HD uint64_t largest_of_thread(const Cta& cta, const char* row, Columns columns, uint32_t first_id,
                              const HeadFunction& function) {
  using Storage = typename Element::Storage;
  uint32_t best = 0;
  uint32_t best_complement = 0;
  const uint32_t step = static_cast<uint32_t>(cta.num_threads) * Width;
  for (uint32_t column = columns.first + static_cast<uint32_t>(cta.thread) * Width;
       column + Width <= columns.last; column += step) {
    Vector<static_cast<int>(Width * sizeof(Storage))> vector;
    load_vector(vector, row + static_cast<uint64_t>(column) * sizeof(Storage));
    const Storage* logits = reinterpret_cast<const Storage*>(&vector);
    uint32_t orders[Width];
    uint32_t most = 0;
    MOE_NVLINK_UNROLL
    for (uint32_t i = 0; i < Width; ++i) {
      orders[i] = order_of_value(function(Element::to_float(logits[i])));
      most = orders[i] > most ? orders[i] : most;
    }
    if (most <= best) continue;
    best = most;
    MOE_NVLINK_UNROLL
    for (int i = static_cast<int>(Width) - 1; i >= 0; --i) {
      if (orders[i] == most) best_complement = ~(first_id + column + static_cast<uint32_t>(i));
    }
  }
  return word_of(best, best_complement);
}

template <class Element>
HD uint64_t largest_of_columns(const Cta& cta, const char* row, Columns columns, uint32_t first_id,
                               bool wide, const HeadFunction& function) {
  constexpr uint32_t kWidth = kVectorBytes / sizeof(typename Element::Storage);
  if (!wide) return largest_of_thread<Element, 1>(cta, row, columns, first_id, function);
  const Columns whole{columns.first, columns.last - (columns.last - columns.first) % kWidth};
  const Columns rest{whole.last, columns.last};
  const uint64_t of_whole = largest_of_thread<Element, kWidth>(cta, row, whole, first_id, function);
  const uint64_t of_rest = largest_of_thread<Element, 1>(cta, row, rest, first_id, function);
  return of_whole > of_rest ? of_whole : of_rest;
}

// One row of one rank.
struct HeadRow {
  int source;  // the rank
  int index;   // among its rows
};

HD HeadRow find_head_row(const HeadGeometry& geometry, const int32_t* counts, int row) {
  HeadRow found{0, row};
  MOE_NVLINK_ROLLED
  for (; found.source < geometry.tp_size - 1; ++found.source) {
    if (found.index < counts[found.source]) break;
    found.index -= counts[found.source];
  }
  return found;
}

// Where the CTA's words of an item become one, which goes to the row's rank. The first threads.
HD void put_word(const HeadArgs& args, const Cta& cta, const HeadRow& row, int split,
                 const uint64_t* parts) {
  if (cta.thread >= Cta::kExchangeThreads) return;
  uint64_t word = 0;
  for (int i = cta.thread; i < cta.num_threads / Cta::kExchangeThreads;
       i += Cta::kExchangeThreads) {
    word = parts[i] > word ? parts[i] : word;
  }
  word = largest_of_lanes(cta, word);
  if (cta.thread != 0) return;
  const HeadGeometry& geometry = args.geometry;
  uint64_t* words = reinterpret_cast<uint64_t*>(region_of(args, row.source, args.pairs_region));
  const int64_t place =
      static_cast<int64_t>(geometry.tp_rank) * geometry.max_rows_per_rank + row.index;
  store_word(words + place * kMaxHeadSplits + split, word);
}

// Every num_blocks-th item: a row, or one of the parts it is split into. No barrier behind an item: a
// thread that is ahead writes the other parts; to come back to these it must pass the next item's
// barrier, and so must the threads that still read them.
template <class Element>
HD void put_words(const HeadArgs& args, const Cta& cta, int num_rows, HeadArgmaxShared& shared) {
  const HeadGeometry& geometry = args.geometry;
  const int splits = static_cast<int>(args.row_splits);
  const int width = shard_width(geometry, geometry.tp_rank);
  const uint32_t first_id = static_cast<uint32_t>(geometry.tp_rank * geometry.shard_size);
  const uint64_t row_bytes = static_cast<uint64_t>(width) * sizeof(typename Element::Storage);
  const bool wide = vector_bytes_for(args.logits, row_bytes) == kVectorBytes;
  const HeadFunction function{args.soft_cap, args.scale};
  int turn = 0;
  for (int item = cta.block; item < num_rows * splits; item += cta.num_blocks) {
    const int number = item / splits;
    const int split = item - number * splits;
    const HeadRow row = find_head_row(geometry, shared.counts, number);
    const int slot = args.is_compact != 0 ? number : row.source * geometry.row_bound + row.index;
    const char* logits =
        reinterpret_cast<const char*>(args.logits) + static_cast<uint64_t>(slot) * row_bytes;
    const Columns columns = columns_of_split(width, split, splits);
    const uint64_t word = largest_of_lanes(
        cta, largest_of_columns<Element>(cta, logits, columns, first_id, wide, function));
    if (cta.thread % Cta::kExchangeThreads == 0) {
      shared.parts[turn][cta.thread / Cta::kExchangeThreads] = word;
    }
    cta.sync();
    put_word(args, cta, row, split, shared.parts[turn]);
    turn = 1 - turn;
  }
}

// Threads that share one row's words in take_ids: as many as ranks often are, so that each waits for
// one load.
constexpr int kIdThreads = Cta::kExchangeThreads < 8 ? Cta::kExchangeThreads : 8;

// The largest word that the shards lane, lane + kIdThreads, ... have put for this row.
HD uint64_t largest_of_shards(const HeadArgs& args, const HeadArgmaxShared& shared, int row,
                              int lane) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t* words =
      reinterpret_cast<const uint64_t*>(region_of(args, geometry.tp_rank, args.pairs_region));
  uint64_t most = 0;
  MOE_NVLINK_ROLLED
  for (int shard = lane; shard < geometry.tp_size; shard += kIdThreads) {
    const int64_t place = static_cast<int64_t>(shard) * geometry.max_rows_per_rank + row;
    MOE_NVLINK_ROLLED
    for (int split = 0; split < shared.splits[shard]; ++split) {
      const uint64_t word = load_word(words + place * kMaxHeadSplits + split);
      most = word > most ? word : most;
    }
  }
  return most;
}

// The token ids of this rank's rows, from what all ranks have put. The last CTA. After a fault they
// are 0, an id that every vocabulary has: the host raises, but on a GPU what is behind runs first.
HD void take_ids(const HeadArgs& args, const Cta& cta, const HeadArgmaxShared& shared) {
  int64_t* ids = reinterpret_cast<int64_t*>(args.output);
  const int lane = cta.thread % kIdThreads;
  const int num_rows = args.geometry.num_rows;
  MOE_NVLINK_ROLLED
  for (int first = 0; first < num_rows; first += cta.num_threads / kIdThreads) {
    // Threads behind the last row exchange values all the same.
    const int row = first + cta.thread / kIdThreads;
    const bool counts = row < num_rows && shared.faulted == 0;
    const uint64_t part = counts ? largest_of_shards(args, shared, row, lane) : 0;
    const uint64_t word = largest_of_lanes<kIdThreads>(cta, part);
    if (lane == 0 && row < num_rows) {
      store_word(&ids[row], shared.faulted != 0 ? int64_t{0} : id_of_word(word));
    }
  }
}

// One thread.
HD void count_words(const HeadArgs& args, const HeadShared& shared, int num_rows, int splits) {
  const int others = num_rows - shared.counts[args.geometry.tp_rank];
  ExchangeCounters* totals = exchange_counters(args);
  add_to_total(&totals->bytes_combined, static_cast<uint64_t>(num_rows) * splits * 8);
  add_to_total(&totals->bytes_combined_remote, static_cast<uint64_t>(others) * splits * 8);
}

template <class Config>
HD void head_argmax_body(const HeadArgs& args, const Cta& cta, HeadArgmaxShared& shared) {
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  const HeadGeometry& geometry = args.geometry;
  const int element = Config::kElement >= 0 ? Config::kElement : geometry.element;
  read_round(args, cta, shared);
  cta.sync();
  const int num_rows = sum_of_counts(shared, geometry.tp_size);
  // A rank without vocabulary rows, at the end of a short vocabulary, puts nothing.
  const int splits =
      shard_width(geometry, geometry.tp_rank) > 0 ? static_cast<int>(args.row_splits) : 0;
  if (shared.has_failed == 0 && splits > 0) {
    if (element == kElementBf16) put_words<Bf16>(args, cta, num_rows, shared);
    if (element == kElementFp16) put_words<Fp16>(args, cta, num_rows, shared);
    if (element == kElementFp32) put_words<Fp32>(args, cta, num_rows, shared);
  }
  if (!arrive_last(cta, &local_control(args)->combine_arrivals, shared)) return;
  if (shared.has_failed != 0) {
    if (cta.thread == 0) shared.faulted = 1;
  } else {
    signal_ranks(args, cta, args.control.combine_cells, shared.epoch,
                 static_cast<uint32_t>(splits));
    if (cta.thread == cta.num_threads - 1) count_words(args, shared, num_rows, splits);
    wait_for_ranks(args, cta, args.control.combine_cells, kPhaseHeadArgmax, kMaxHeadSplits,
                   shared.splits, shared);
  }
  cta.sync();  // splits and faulted are there; what thread t acquired of rank t, all may read
  take_ids(args, cta, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_head_argmax, HeadArgs, HeadArgmaxShared, head_argmax_body)
