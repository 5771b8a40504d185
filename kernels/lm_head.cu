// The vocabulary product of draft tokens, shared by a group of ranks that hold the same LM head: each
// multiplies the rows of all ranks with its part of the vocabulary, so that it reads that part of
// the weights only. The product itself is a library's, between gather and argmax.
//
//   gather    all CTAs    put this rank's rows into its slice of every rank's rows
//             P7          each CTA arrives; the others end
//             P6          the last CTA: one cell {tag, rows, epoch} to each rank (release), waits for
//                         every rank's (acquire), leaves the counts, bumps the epoch
//   argmax    all CTAs    for each row of each rank, the largest logit of this rank's vocabulary, as
//                         one word {order of the value, complement of the token id}, put to the rank
//                         that the row belongs to
//             P9          each CTA arrives; the others end
//             P8          the last CTA: one cell {tag, splits, epoch} to each rank (release), waits
//                         for every rank's (acquire), takes the largest word of each own row
//   collect   all CTAs    where all logits are wanted: fetch this rank's rows of every rank's logits
//
// Only the last CTA waits, so in one stream nothing is asked of what is resident at once, and the
// kernel behind sees what the peers have put because it comes behind that CTA in the stream.
//
// Why nothing is overwritten that is still read: a rank puts rows of round n+1 only after its argmax n,
// which waited for every rank's cell of P8, which each sends after its product n and the kernels before
// it: so rows n are read. It puts words n+1, and its product overwrites logits n, only after its
// gather n+1, which waited for every rank's cell of P6, which each sends after its argmax n and its
// collect n: so words and logits n are read. Counts lie in recv_counts, because a peer may be at
// gather n+1, and its cell of P6 with it, while this rank is still at collect n.
//
// Programmatic dependent launch is as in dispatch.cu; in front of the wait there is nothing to do.
#include "include/moe_nvlink/args.h"
#include "include/moe_nvlink/copy.h"
#include "include/moe_nvlink/epoch_flags.h"
#include "include/moe_nvlink/memory_order.h"
#include "include/moe_nvlink/numeric.h"
#include "include/moe_nvlink/platform.h"
#include "include/moe_nvlink/workspace.h"

namespace moe_nvlink {

// The most threads of a CTA, by the number that exchange values without memory.
constexpr int kMostKeyParts = 32;

struct HeadShared {
  uint32_t epoch;             // of this round
  uint32_t has_failed;        // an earlier kernel of this rank has
  uint32_t is_last;           // this CTA arrived last
  uint32_t faulted;           // what this round asks for is not to be had
  int32_t counts[kMaxRanks];  // rows of each rank
};

struct HeadArgmaxShared : HeadShared {
  int32_t splits[kMaxRanks];         // words each rank has put for a row; in the last CTA
  uint64_t parts[2][kMostKeyParts];  // the CTA's largest words, of this item and of the next
};

// What all ranks of a round must agree on, in 7 bits, as geometry_tag() of dispatch.
HD uint32_t head_tag(const HeadGeometry& geometry) {
  uint32_t mixed = static_cast<uint32_t>(geometry.vocab_size) * 0x85ebca6bu;
  mixed = (mixed ^ static_cast<uint32_t>(geometry.hidden_size)) * 0xc2b2ae35u;
  mixed = (mixed ^ mixed >> 15 ^ static_cast<uint32_t>(geometry.max_rows_per_rank)) * 0x27d4eb2fu;
  mixed ^= static_cast<uint32_t>(geometry.row_bound) * 0x077cb531u;
  return mixed >> kCountBits ^ static_cast<uint32_t>(geometry.element);
}

// Token ids that `rank` answers for.
HD int shard_width(const HeadGeometry& geometry, int rank) {
  const int64_t first = static_cast<int64_t>(rank) * geometry.shard_size;
  const int64_t left = static_cast<int64_t>(geometry.vocab_size) - first;
  if (left <= 0) return 0;
  return static_cast<int>(left < geometry.shard_size ? left : geometry.shard_size);
}

HD int32_t* head_counts(const HeadArgs& args) {
  return reinterpret_cast<int32_t*>(
      region_of(args, args.geometry.tp_rank, args.control.recv_counts));
}

// True in the CTA that arrives last, which sees all that the others did. `arrivals` is zero again
// before the next launch that counts there.
HD bool arrive_last(const Cta& cta, uint32_t* arrivals, HeadShared& shared) {
  // P7 and P9, release half, per CTA: the barrier puts this CTA's stores before its thread 0's
  // arrival.
  cta.sync();
  if (cta.thread == 0) {
    // P7 (gather) and P9 (argmax): release what this CTA put and read, acquire what the CTAs before
    // it released. Relaxed instead, the cells of P6 and P8 would cover the last CTA's own words
    // only; and gather could bump the epoch before another CTA has read it.
    const uint32_t before = fetch_add_acq_rel_gpu(arrivals, 1);
    shared.is_last = before + 1 == static_cast<uint32_t>(cta.num_blocks) ? 1 : 0;
    if (shared.is_last != 0) store_word(arrivals, 0u);
  }
  cta.sync();
  return shared.is_last != 0;
}

// The cell of this rank to every rank. Behind arrive_last().
HD void signal_ranks(const HeadArgs& args, const Cta& cta, uint32_t cells, uint32_t epoch,
                     uint32_t count) {
  const HeadGeometry& geometry = args.geometry;
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.tp_size; peer += cta.num_threads) {
    // P6 (gather) and P8 (argmax), release: what was put before the cell. Without it a peer may see
    // the new epoch and old words.
    store_release_sys(cell_of(args, peer, cells, geometry.tp_rank),
                      pack_cell(epoch, count, head_tag(geometry)));
  }
}

// Waits for every rank's cell; what it counts, at most `most`, goes to `counts`. A rank that does
// not come, or comes from another call, leaves a fault word and counts as zero.
HD void wait_for_ranks(const HeadArgs& args, const Cta& cta, uint32_t cells, int phase,
                       uint32_t most, int32_t* counts, HeadShared& shared) {
  const HeadGeometry& geometry = args.geometry;
  Patience patience(args.timeout_ns);
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.tp_size; peer += cta.num_threads) {
    uint64_t cell = 0;
    int fault =
        wait_for_epoch(cell_of(args, geometry.tp_rank, cells, peer), shared.epoch, patience, &cell);
    if (fault == 0 && cell_tag(cell) != head_tag(geometry)) fault = kFaultGeometry;
    if (fault == 0 && cell_count(cell) > most) fault = kFaultBadCount;
    if (fault != 0) {
      report_fault(args, cells, fault, phase, peer, shared.epoch, patience);
      store_relaxed_cta(&shared.faulted, 1);
    }
    counts[peer] = fault == 0 ? static_cast<int32_t>(cell_count(cell)) : 0;
  }
}

// ---- gather

// An item is one row for one rank. The first rank is another one for every rank and row, so that no
// rank is everybody's first target.
HD void put_head_rows(const HeadArgs& args, const Cta& cta) {
  const HeadGeometry& geometry = args.geometry;
  const int row_bytes = geometry.hidden_size * element_bytes(geometry.element);
  const uint64_t slice = static_cast<uint64_t>(geometry.tp_rank) *
                         static_cast<uint64_t>(geometry.row_bound) *
                         static_cast<uint64_t>(row_bytes);
  const int num_items = geometry.num_rows * geometry.tp_size;
  MOE_NVLINK_ROLLED
  for (int item = cta.block; item < num_items; item += cta.num_blocks) {
    const int row = item / geometry.tp_size;
    const int peer = (item + row + geometry.tp_rank) % geometry.tp_size;
    const uint64_t offset = static_cast<uint64_t>(row) * static_cast<uint64_t>(row_bytes);
    char* target = region_of(args, peer, args.rows_region) + slice + offset;
    // Looked at for each row: known before the loop, it makes NVRTC write the loop seven times.
    const char* source = reinterpret_cast<const char*>(args.hidden) + offset;
    put_row(cta, cta.thread, source, &target, 1, row_bytes,
            vector_bytes_for(reinterpret_cast<uint64_t>(source), static_cast<uint64_t>(row_bytes)));
  }
}

// One thread.
HD void count_gather(const HeadArgs& args) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t rows = static_cast<uint64_t>(geometry.num_rows);
  const uint64_t ranks = static_cast<uint64_t>(geometry.tp_size);
  const uint64_t row_bytes = static_cast<uint64_t>(geometry.hidden_size) *
                             static_cast<uint64_t>(element_bytes(geometry.element));
  ExchangeCounters* totals = exchange_counters(args);
  add_to_total(&totals->rounds, 1);
  add_to_total(&totals->tokens, rows);
  add_to_total(&totals->destinations, rows * ranks);
  add_to_total(&totals->remote_destinations, rows * (ranks - 1));
  add_to_total(&totals->bytes_dispatched, rows * ranks * row_bytes);
  add_to_total(&totals->bytes_dispatched_remote, rows * (ranks - 1) * row_bytes);
}

template <class Config>
HD void head_gather_body(const HeadArgs& args, const Cta& cta, HeadShared& shared) {
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  const HeadGeometry& geometry = args.geometry;
  LocalControl* local = local_control(args);
  const bool failed = has_failed(args);
  if (cta.thread == cta.num_threads - 1) {
    shared.epoch = load_word(&local->epoch) + 1;
    shared.has_failed = failed ? 1 : 0;
    shared.faulted = 0;
  }
  if (!failed) put_head_rows(args, cta);
  if (!arrive_last(cta, &local->arrivals, shared) || shared.has_failed != 0) return;
  signal_ranks(args, cta, args.control.dispatch_cells, shared.epoch,
               static_cast<uint32_t>(geometry.num_rows));
  // The last thread, which has no peer of its own to wait for where threads outnumber the ranks.
  if (cta.thread == cta.num_threads - 1) {
    store_word(&local->epoch, shared.epoch);
    count_gather(args);
  }
  wait_for_ranks(args, cta, args.control.dispatch_cells, kPhaseHeadGather,
                 static_cast<uint32_t>(geometry.row_bound), shared.counts, shared);
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.tp_size; peer += cta.num_threads) {
    store_word(&head_counts(args)[peer], shared.counts[peer]);
  }
}

// ---- argmax

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

// What argmax and collect know of the round that gather has begun; behind a barrier of the CTA.
HD void read_round(const HeadArgs& args, const Cta& cta, HeadShared& shared) {
  const bool failed = has_failed(args);
  if (cta.thread == cta.num_threads - 1) {
    shared.epoch = load_word(&local_control(args)->epoch);
    shared.has_failed = failed ? 1 : 0;
    shared.faulted = 0;
  }
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < args.geometry.tp_size; peer += cta.num_threads) {
    shared.counts[peer] = load_word(&head_counts(args)[peer]);
  }
}

// Rows of the first `ranks` ranks.
HD int sum_of_counts(const HeadShared& shared, int ranks) {
  int sum = 0;
  MOE_NVLINK_ROLLED
  for (int rank = 0; rank < ranks; ++rank) sum += shared.counts[rank];
  return sum;
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

// ---- collect

// An item is the part of one row that one rank has computed.
HD void get_logits(const HeadArgs& args, const Cta& cta, const HeadShared& shared) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t size = static_cast<uint64_t>(element_bytes(geometry.element));
  const int before = args.is_compact != 0 ? sum_of_counts(shared, geometry.tp_rank)
                                          : geometry.tp_rank * geometry.row_bound;
  const int num_items = geometry.num_rows * geometry.tp_size;
  MOE_NVLINK_ROLLED
  for (int item = cta.block; item < num_items; item += cta.num_blocks) {
    const int row = item / geometry.tp_size;
    const int rank = (item + row + geometry.tp_rank) % geometry.tp_size;
    const uint64_t width = static_cast<uint64_t>(shard_width(geometry, rank));
    const char* source = region_of(args, rank, args.logits_region) +
                         static_cast<uint64_t>(before + row) * width * size;
    const uint64_t place = static_cast<uint64_t>(row) * static_cast<uint64_t>(geometry.vocab_size) +
                           static_cast<uint64_t>(rank) * static_cast<uint64_t>(geometry.shard_size);
    char* target = reinterpret_cast<char*>(args.output) + place * size;
    const uint64_t addresses =
        reinterpret_cast<uint64_t>(source) | reinterpret_cast<uint64_t>(target);
    const int bytes = static_cast<int>(width * size);
    put_row(cta, cta.thread, source, &target, 1, bytes,
            vector_bytes_for(addresses, static_cast<uint64_t>(bytes)));
  }
}

// All bits set: NaN in every element type.
HD void fill_with_nan(const HeadArgs& args, const Cta& cta) {
  const HeadGeometry& geometry = args.geometry;
  const uint64_t bytes = static_cast<uint64_t>(geometry.num_rows) *
                         static_cast<uint64_t>(geometry.vocab_size) *
                         static_cast<uint64_t>(element_bytes(geometry.element));
  uint16_t* halves = reinterpret_cast<uint16_t*>(args.output);
  const uint64_t step = static_cast<uint64_t>(cta.num_blocks) * cta.num_threads;
  MOE_NVLINK_ROLLED
  for (uint64_t i = static_cast<uint64_t>(cta.block) * cta.num_threads + cta.thread; i < bytes / 2;
       i += step) {
    store_word(&halves[i], static_cast<uint16_t>(0xffff));
  }
}

template <class Config>
HD void head_collect_body(const HeadArgs& args, const Cta& cta, HeadShared& shared) {
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  read_round(args, cta, shared);
  cta.sync();
  if (shared.has_failed != 0) {
    fill_with_nan(args, cta);
    return;
  }
  get_logits(args, cta, shared);
  if (cta.block != 0 || cta.thread != 0) return;
  const HeadGeometry& geometry = args.geometry;
  const uint64_t row_bytes = static_cast<uint64_t>(geometry.num_rows) *
                             static_cast<uint64_t>(element_bytes(geometry.element));
  const uint64_t vocabulary = static_cast<uint64_t>(geometry.vocab_size);
  const uint64_t own = static_cast<uint64_t>(shard_width(geometry, geometry.tp_rank));
  ExchangeCounters* totals = exchange_counters(args);
  add_to_total(&totals->bytes_combined, row_bytes * vocabulary);
  add_to_total(&totals->bytes_combined_remote, row_bytes * (vocabulary - own));
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_head_gather, HeadArgs, HeadShared, head_gather_body)
MOE_NVLINK_KERNEL(moe_nvlink_head_argmax, HeadArgs, HeadArgmaxShared, head_argmax_body)
MOE_NVLINK_KERNEL(moe_nvlink_head_collect, HeadArgs, HeadShared, head_collect_body)
