// Argmax of the shared LM head: for each row, the token id of the largest logit in the vocabulary
// of all ranks. round.h says how the head's three kernels work together.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "round.h"

namespace moe_nvlink {

// The most threads of a CTA, divided by the threads that exchange values without memory.
constexpr int kMostKeyParts = 32;

struct HeadArgmaxShared : HeadShared {
  int32_t splits[kMaxRanks];         // words each rank has put for a row; in the last CTA
  uint64_t parts[2][kMostKeyParts];  // the CTA's largest words, of this item and of the next
};

// The order of values as numbers. A word is {order, complement of the token id}: the larger word is
// the larger value, and of equal values the lower id. NaN is above all numbers, and -0 equals +0.
// The word zero is below every value of every id.
HD uint32_t order_of_value(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Selections only: with an early return or && the host compiler makes no vector code of it.
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

// The largest word among `Lanes` neighbouring threads. All threads that can exchange values call it
// together.
template <int Lanes = Cta::kExchangeThreads>
HD uint64_t largest_of_lanes(const Cta& cta, uint64_t word) {
  const uint32_t order = static_cast<uint32_t>(word >> 32);
  const uint32_t most = cta.max_of_lanes<Lanes>(order);
  const uint32_t complement = order == most ? static_cast<uint32_t>(word) : 0;
  return word_of(most, cta.max_of_lanes<Lanes>(complement));
}

// What the head does to a logit before it is compared.
struct HeadFunction {
  float soft_cap;
  float scale;

  HD float operator()(float logit) const {
    float value = logit;
    if (soft_cap != 0.0f) value = soft_cap * hyperbolic_tangent(value / soft_cap);
    return value * scale;
  }
};

// Columns [first, last) of this rank's logits. Unsigned, because a step may go beyond 2^31 - 1.
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

// Puts the largest of the CTA's words of an item to the row's rank. The first threads.
HD void put_word(const HeadArgs& args, const Cta& cta, int rank, int row, int split,
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
  uint64_t* words = reinterpret_cast<uint64_t*>(region_of(args, rank, args.pairs_region));
  const int64_t place = static_cast<int64_t>(geometry.tp_rank) * geometry.max_rows_per_rank + row;
  store_word(words + place * kMaxHeadSplits + split, word);
}

// Compares every num_blocks-th item: a row, or one of the parts that CTAs share. No barrier follows
// an item: a thread that is ahead writes the other parts, and it comes back to these parts only
// after the next item's barrier, which the threads that still read them must pass too.
template <class Element>
HD void put_words(const HeadArgs& args, const Cta& cta, int num_rows, HeadArgmaxShared& shared) {
  const HeadGeometry& geometry = args.geometry;
  const int splits = static_cast<int>(args.row_splits);
  const int width = shard_width(geometry, geometry.tp_rank);
  const uint32_t first_id = static_cast<uint32_t>(geometry.tp_rank * geometry.shard_size);
  const uint64_t row_bytes = static_cast<uint64_t>(width) * sizeof(typename Element::Storage);
  const bool wide = vector_bytes_for(args.logits, row_bytes) == kVectorBytes;
  const HeadFunction function{args.soft_cap, args.scale};
  RowWalk<int32_t> source;
  int turn = 0;
  for (int item = cta.block; item < num_rows * splits; item += cta.num_blocks) {
    const int number = item / splits;
    const int split = item - number * splits;
    source.go_to(number, shared.counts);
    const int row = number - source.before;
    const int slot = args.is_compact != 0 ? number : source.rank * geometry.row_bound + row;
    const char* logits =
        reinterpret_cast<const char*>(args.logits) + static_cast<uint64_t>(slot) * row_bytes;
    const Columns columns = columns_of_split(width, split, splits);
    const uint64_t word = largest_of_lanes(
        cta, largest_of_columns<Element>(cta, logits, columns, first_id, wide, function));
    if (cta.thread % Cta::kExchangeThreads == 0) {
      shared.parts[turn][cta.thread / Cta::kExchangeThreads] = word;
    }
    cta.sync();
    put_word(args, cta, source.rank, row, split, shared.parts[turn]);
    turn = 1 - turn;
  }
}

// Threads that share one row's words in take_ids. Groups of up to 8 ranks are common; then each
// thread waits for one load.
constexpr int kIdThreads = Cta::kExchangeThreads < 8 ? Cta::kExchangeThreads : 8;

// The largest word that the ranks lane, lane + kIdThreads, ... have put for this row.
HD uint64_t largest_of_peers(const HeadArgs& args, const HeadArgmaxShared& shared, int row,
                             int lane) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t* words =
      reinterpret_cast<const uint64_t*>(region_of(args, geometry.tp_rank, args.pairs_region));
  uint64_t most = 0;
  for_each_peer(args, lane, kIdThreads, [&](int peer) {
    const int64_t place = static_cast<int64_t>(peer) * geometry.max_rows_per_rank + row;
    MOE_NVLINK_ROLLED
    for (int split = 0; split < shared.splits[peer]; ++split) {
      const uint64_t word = load_word(words + place * kMaxHeadSplits + split);
      most = word > most ? word : most;
    }
  });
  return most;
}

// Stores the token ids of this rank's rows, from what all ranks have put. The last CTA. After a
// fault the ids are 0, which every vocabulary has: the host raises an error, but the next kernels
// run before it does.
HD void take_ids(const HeadArgs& args, const Cta& cta, const HeadArgmaxShared& shared) {
  int64_t* ids = reinterpret_cast<int64_t*>(args.output);
  const int lane = cta.thread % kIdThreads;
  const int num_rows = args.geometry.num_rows;
  MOE_NVLINK_ROLLED
  for (int first = 0; first < num_rows; first += cta.num_threads / kIdThreads) {
    // Threads after the last row exchange values too.
    const int row = first + cta.thread / kIdThreads;
    const bool counts = row < num_rows && shared.faulted == 0;
    const uint64_t part = counts ? largest_of_peers(args, shared, row, lane) : 0;
    const uint64_t word = largest_of_lanes<kIdThreads>(cta, part);
    if (lane == 0 && row < num_rows) {
      store_word(&ids[row], shared.faulted != 0 ? int64_t{0} : id_of_word(word));
    }
  }
}

// Adds the words that this rank has put to the totals. One thread.
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
  const int num_rows = sum_of_ranks(shared.counts, geometry.tp_size);
  // A rank without vocabulary rows, at the end of a short vocabulary, puts nothing.
  const int splits =
      shard_width(geometry, geometry.tp_rank) > 0 ? static_cast<int>(args.row_splits) : 0;
  static_assert(kNumElements == 3);
  if (shared.has_failed == 0 && splits > 0) {
    if (element == kElementBf16) put_words<Bf16>(args, cta, num_rows, shared);
    if (element == kElementFp16) put_words<Fp16>(args, cta, num_rows, shared);
    if (element == kElementFp32) put_words<Fp32>(args, cta, num_rows, shared);
  }
  // P9 needs no barrier of the CTA here: thread 0 has stored all of its words, and the other threads
  // have read their logits before the barrier of the CTA's last item.
  if (!arrive_last(cta, &local_control(args)->combine_arrivals, shared)) return;
  if (shared.has_failed != 0) {
    if (cta.thread == 0) shared.faulted = 1;
  } else {
    signal_round(args, cta, args.control.combine_cells, static_cast<uint32_t>(splits), shared);
    if (cta.thread == cta.num_threads - 1) count_words(args, shared, num_rows, splits);
    wait_for_counts(args, cta, args.control.combine_cells, kPhaseHeadArgmax, kMaxHeadSplits,
                    shared.splits, shared);
  }
  cta.sync();  // splits and faulted are written; what thread t acquired of rank t, all may read
  take_ids(args, cta, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_head_argmax, HeadArgs, HeadArgmaxShared, head_argmax_body)
