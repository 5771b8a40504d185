// Combine: get the experts' partial rows back from the ranks dispatch put them to, and add them up.
//
//   P3          CTA 0 signals every rank "my experts have written" (release); every CTA waits once
//               for all ranks (acquire), then works through its share of the items
//   a format    before P3: the CTAs that run take the experts' rows one after another and quantise
//               each to where the peers read it; the CTA that completes them (P5) signals, not CTA 0
//   per item    a token, or one of hidden_splits shares of its row: load the partial row of each k
//               from (target_rank, slot), add in fp32 as a pairwise tree over k, round once to the
//               activation's type, store once
//
// hidden_splits: with few tokens a peer's latency is all there is, and a row is better spread over
// so many CTAs that each thread has one vector of each k to load, all of them in flight at once.
//
// The tree is over the positions k: ((0+1)+(2+3))+((4+5)+(6+7)). A k without a row of its own (its
// rank already has the token, or the id is no expert) stands in it as -0.0, which changes no sum.
// So the result depends on routing and rows only, not on slots, CTAs or arrival.
// The partial rows carry the router weights already; combine adds them as they are. Quantised ones
// are made fp32 behind the pull and added by the same tree.
//
// No CTA waits for another CTA of its own grid to start, with one exception: without a format CTA 0
// signals. So one place on the GPU is enough for a round to end, whatever other kernels hold the rest,
// if the GPU starts CTA 0 first (GPUs do; CUDA does not promise it). With a format the rows are not
// dealt out by CTA number for this reason: a CTA that finds no place, because another stream's kernel
// holds it, would keep its rows, the signal would wait for them, and that kernel perhaps for the peers.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/combine_formats.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/numeric.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/present_rows.h"
#include "../include/moe_nvlink/routing.h"
#include "../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

struct CombineShared {
  uint32_t epoch;              // of this round
  uint32_t has_failed;         // an earlier verb of this rank has
  uint32_t faulted;            // this one has
  uint64_t rows[2][kMaxTopK];  // addresses of the partial rows, or 0: of this item, of the next
};

// Whether this build has the code for a format: one of them, or (host) all.
template <class Config, int Format>
constexpr bool kKnows = Config::kCombine < 0 || Config::kCombine == Format;

// Rows that travel quantised.
struct QuantisedCombineShared : CombineShared {
  uint64_t scales[2][kMaxTopK];      // addresses, as rows
  uint64_t row_scales[2][kMaxTopK];  // of formats that have them
  RowAmax amax;                      // of the row that is being quantised
  uint32_t counts[kMaxRanks];        // rows received from each rank
  uint32_t taken[2];                 // number of the row that is being quantised, of the next
  uint32_t completes;                // this CTA has quantised the last row that was missing
};

template <bool Quantised>
struct CombineSharedOf {
  using Type = CombineShared;
};
template <>
struct CombineSharedOf<true> {
  using Type = QuantisedCombineShared;
};
template <class Config>
using SharedOf = typename CombineSharedOf<Config::kCombine != kCombineUnquantised>::Type;

// True for a k that takes no part in the sum; never on the GPU, where its row is loaded as -0.0.
HD bool is_skipped(const PartialRow& row) {
  return kSkipAbsentRows && row.row == nullptr;
}

// sums[j] = rows of k = 2j and 2j+1, then the upper levels of the tree; the result is in sums[0].
template <class Part>
HD void add_tree(const Part* loaded, const PartialRow* rows, int top_k,
                 float (*sums)[Part::kWidth]) {
  constexpr int Width = Part::kWidth;
  const int num_pairs = (top_k + 1) / 2;
  MOE_NVLINK_UNROLL
  for (int pair = 0; pair < num_pairs; ++pair) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) sums[pair][i] = -0.0f;
  }
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    if (!is_skipped(rows[k])) loaded[k].add_to(sums[k / 2]);
  }
  MOE_NVLINK_UNROLL
  for (int step = 1; step < num_pairs; step *= 2) {
    MOE_NVLINK_UNROLL
    for (int left = 0; left + step < num_pairs; left += 2 * step) {
      MOE_NVLINK_UNROLL
      for (int i = 0; i < Width; ++i) sums[left][i] += sums[left + step][i];
    }
  }
}

// Rounds `sums` to the activation's type, once. `wide`: the target lies on a vector's boundary.
template <class Element, int Width>
HD void store_sums(char* target, const float* sums, bool wide) {
  using Word = typename Element::Storage;
  constexpr int kBytes = static_cast<int>(sizeof(Word));
  constexpr int kStored = Width * kBytes < kVectorBytes ? Width : kVectorBytes / kBytes;
  MOE_NVLINK_UNROLL
  for (int first = 0; first < Width; first += kStored) {
    Lanes<Element, kStored> result;
    auto* words = reinterpret_cast<Word*>(&result);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kStored; ++i) words[i] = Element::from_float(sums[first + i]);
    if (wide) {
      store_vector(target + first * kBytes, result);
    } else {
      MOE_NVLINK_UNROLL
      for (int i = 0; i < kStored; ++i) {
        store_word(reinterpret_cast<Word*>(target) + first + i, words[i]);
      }
    }
  }
}

// Elements [first, last) of one token, a multiple of the part's width; `threads` of them work side
// by side.
template <class Config, class Element, class Part, class Rows>
HD void combine_range(const Rows& source, int top_k, char* output, bool wide, int thread,
                      int threads, int first, int last) {
  constexpr int kBytes = static_cast<int>(sizeof(typename Element::Storage));
  constexpr int Width = Part::kWidth;
  for (int base = first; base < last; base += threads * Width) {
    const int element = base + thread * Width;
    const int place = element < last ? element : first;
    // All loads first: those of top_k rows are in flight together, which is what hides a peer's
    // latency.
    PartialRow buffer[Config::kTopKBound];
    const PartialRow* rows = source.rows_in(buffer);
    Part loaded[Config::kTopKBound];
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      source.take(k, top_k, buffer);
      if (is_skipped(rows[k])) continue;
      loaded[k].set_absent();
      if (rows[k].row != nullptr) loaded[k].load(rows[k], place);
    }
    // Behind the loads, so that a branch stands between them and the sums. In one block of code
    // ptxas moves the last loads behind the first sums, to save registers, and so behind the wait
    // for the first loads: two trips to the peers instead of one.
    if (element >= last) return;
    float sums[(Config::kTopKBound + 1) / 2][Width];
    add_tree(loaded, rows, top_k, sums);
    store_sums<Element, Width>(output + element * kBytes, sums[0], wide);
  }
}

// Address of a slot's row in a region of rank `target`.
HD uint64_t address_of_row(const CombineArgs& args, int target, uint32_t region, int row,
                           uint64_t row_bytes) {
  return reinterpret_cast<uint64_t>(region_of(args, target, region)) +
         static_cast<uint64_t>(row) * row_bytes;
}

// Where the token's partial rows lie, one k per thread. A slot outside the buffers counts as none.
template <class Config, int Format, class Shared>
HD void find_rows(const CombineArgs& args, const Cta& cta, int token, const RowSizes& sizes,
                  int turn, Shared& shared) {
  const Geometry& geometry = args.geometry;
  const int top_k = top_k_of<Config>(geometry);
  const int32_t* slots =
      reinterpret_cast<const int32_t*>(args.send_slots) + static_cast<int64_t>(token) * top_k;
  MOE_NVLINK_ROLLED
  for (int k = cta.thread; k < top_k; k += cta.num_threads) {
    const int slot = load_word(slots + k);
    const bool valid = slot >= 0 && slot < geometry.ep_size * geometry.max_tokens_per_rank;
    const int target = valid ? slot / geometry.max_tokens_per_rank : 0;
    const int row = slot - (target - geometry.ep_rank) * geometry.max_tokens_per_rank;
    const uint32_t region = Format == kCombineUnquantised ? args.region : args.rows_region;
    shared.rows[turn][k] = valid ? address_of_row(args, target, region, row, sizes.row) : 0;
    if constexpr (Format != kCombineUnquantised) {
      shared.scales[turn][k] = address_of_row(args, target, args.scales_region, row, sizes.scales);
      shared.row_scales[turn][k] =
          address_of_row(args, target, args.row_scales_region, row, sizes.row_scale);
    }
  }
}

// What find_rows left of this item: addresses that a thread keeps.
struct KeptRows {
  const PartialRow* rows;
  HD const PartialRow* rows_in(PartialRow* /*buffer*/) const { return rows; }
  HD void take(int /*k*/, int /*top_k*/, PartialRow* /*buffer*/) const {}
};

// The same of a row in three regions. So many addresses would take the registers of the sums, so they
// are read anew for each part, those of a few k at a time.
struct SharedRows {
  static constexpr int kTogether = 8;
  const uint64_t* rows;
  const uint64_t* scales;
  const uint64_t* row_scales;
  HD const PartialRow* rows_in(PartialRow* buffer) const { return buffer; }
  HD void take(int k, int top_k, PartialRow* buffer) const {
    if (k % kTogether != 0) return;
    MOE_NVLINK_UNROLL
    for (int i = k; i < k + kTogether && i < top_k; ++i) {
      buffer[i].row = reinterpret_cast<const char*>(rows[i]);
      buffer[i].scales = reinterpret_cast<const char*>(scales[i]);
      buffer[i].row_scale = reinterpret_cast<const char*>(row_scales[i]);
    }
  }
};

// One token, or the share of it that belongs to split `split` of args.hidden_splits.
template <class Config, class Element, int Format, class Part, class Shared>
HD void combine_item(const CombineArgs& args, const Cta& cta, int token, int split, bool faulted,
                     bool wide, const Shared& shared, int turn) {
  using Word = typename Element::Storage;
  constexpr int kBytes = static_cast<int>(sizeof(Word));
  const int hidden_size = args.geometry.hidden_size;
  const int top_k = top_k_of<Config>(args.geometry);
  char* output = reinterpret_cast<char*>(args.output) +
                 static_cast<uint64_t>(token) * static_cast<uint64_t>(hidden_size) * kBytes;
  const int thread = split * cta.num_threads + cta.thread;
  const int threads = static_cast<int>(args.hidden_splits) * cta.num_threads;
  const uint64_t* addresses = shared.rows[turn];
  PartialRow rows[Config::kTopKBound];
  bool any = false;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    rows[k].row = reinterpret_cast<const char*>(addresses[k]);
    any = any || addresses[k] != 0;
  }
  if (faulted || !any) {
    // No row: zero. After a fault: NaN, so that nobody takes the output for a result.
    const Word word = Element::from_float(faulted ? float_of_bits(0x7fc00000u) : 0.0f);
    auto* words = reinterpret_cast<Word*>(output);
    MOE_NVLINK_ROLLED
    for (int i = thread; i < hidden_size; i += threads) store_word(words + i, word);
    return;
  }
  if constexpr (kSkipAbsentRows) {
    if constexpr (Format != kCombineUnquantised) {
      for (int k = 0; k < top_k; ++k) {
        rows[k].scales = reinterpret_cast<const char*>(shared.scales[turn][k]);
        rows[k].row_scale = reinterpret_cast<const char*>(shared.row_scales[turn][k]);
      }
    }
    const int whole = hidden_size - hidden_size % kRegisterFloats;
    sum_present_rows<Element, typename TermOf<Element, Format>::Type>(rows, top_k, output, thread,
                                                                      threads, whole);
    // A quantised row is whole blocks.
    if constexpr (Format == kCombineUnquantised) {
      combine_range<Config, Element, typename Part::Rest>(KeptRows{rows}, top_k, output, wide,
                                                          thread, threads, whole, hidden_size);
    }
  } else {
    const auto source = [&] {
      if constexpr (Format == kCombineUnquantised) {
        return KeptRows{rows};
      } else {
        return SharedRows{addresses, shared.scales[turn], shared.row_scales[turn]};
      }
    }();
    const int whole = hidden_size - hidden_size % Part::kWidth;
    combine_range<Config, Element, Part>(source, top_k, output, wide, thread, threads, 0, whole);
    if constexpr (!kAlignedVectorsOnly) {
      combine_range<Config, Element, typename Part::Rest>(source, top_k, output, wide, thread,
                                                          threads, whole, hidden_size);
    }
  }
}

// Tells every rank that this one's experts have written, and with a format that their rows are
// quantised. One CTA.
HD void signal_peers(const CombineArgs& args, const Cta& cta, uint32_t epoch) {
  const Geometry& geometry = args.geometry;
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    // P3 release: the experts' rows (kernels before this one, ordered by pdl_wait) before the
    // signal. Without it a peer may read rows the experts had not written yet. It also puts the
    // experts' reads of the receive buffers before the peer's next dispatch. With a format the rows
    // are those of all CTAs, by P5.
    store_release_sys(cell_of(args, peer, args.control.combine_cells, geometry.ep_rank),
                      pack_cell(epoch, 0, 0));
  }
}

// Every CTA comes back from here knowing that every rank's experts have written. Once per CTA,
// however many tokens it goes on to combine.
HD bool combine_barrier(const CombineArgs& args, const Cta& cta, CombineShared& shared) {
  const Geometry& geometry = args.geometry;
  cta.sync();  // faulted is cleared before a thread may set it; epoch and has_failed are there
  if (shared.has_failed != 0) return true;
  const uint32_t epoch = shared.epoch;
  Patience patience(args.timeout_ns);
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    uint64_t cell = 0;
    const int fault = wait_for_epoch(
        cell_of(args, geometry.ep_rank, args.control.combine_cells, peer), epoch, patience, &cell);
    if (fault != 0) {
      report_fault(args, args.control.combine_cells, fault, kPhaseCombine, peer, epoch, patience);
      store_relaxed_cta(&shared.faulted, 1);
    }
  }
  // P4: thread t acquired rank t's rows; the barrier hands them to the CTA's other threads, which
  // polled other ranks. Without it they may read rows from before the signal.
  cta.sync();
  return shared.faulted != 0;
}

// Adds what this rank is about to read to the totals. One thread of the launch.
HD void count_rows(const CombineArgs& args, const RowSizes& sizes) {
  ExchangeCounters* totals = exchange_counters(args);
  const LocalControl* local = local_control(args);
  const uint64_t row_bytes = sizes.row + sizes.scales + sizes.row_scale;
  add_to_total(&totals->bytes_combined, load_word(&local->rows_put) * row_bytes);
  add_to_total(&totals->bytes_combined_remote, load_word(&local->remote_rows_put) * row_bytes);
}

// ---- The sender's side of a format.

// Quantises one slot's row from where the experts wrote it to where the peers read it.
template <class Element, int Format>
HD void quantise_slot(const CombineArgs& args, const Cta& cta, int slot, const RowSizes& sizes,
                      RowAmax& amax) {
  const Geometry& geometry = args.geometry;
  const int me = geometry.ep_rank;
  const int hidden_size = geometry.hidden_size;
  const uint64_t row_bytes = static_cast<uint64_t>(hidden_size) * sizeof(typename Element::Storage);
  const char* row =
      reinterpret_cast<const char*>(address_of_row(args, me, args.region, slot, row_bytes));
  const OneTarget target{
      reinterpret_cast<char*>(address_of_row(args, me, args.rows_region, slot, sizes.row)),
      reinterpret_cast<char*>(address_of_row(args, me, args.scales_region, slot, sizes.scales))};
  if constexpr (Format == kCombineFp8Block) {
    quantise_whole_row<Fp8Block, Element>(cta, row, hidden_size, 1.0f, target);
  } else {
    leave_row_amax<Element>(cta, row, hidden_size, true, amax);
    cta.sync();  // the row's amax
    const float scale = nvfp4_row_scale(take_row_amax(cta, amax));
    quantise_whole_row<Nvfp4OfRow, Element>(cta, row, hidden_size, scale, target);
    if (cta.thread == 0) {
      store_word(reinterpret_cast<float*>(
                     address_of_row(args, me, args.row_scales_region, slot, sizes.row_scale)),
                 scale);
    }
  }
}

// Takes the next row that nobody has taken: its number in the order of the slots. Of the numbers from
// num_rows on each CTA gets one, and then asks no more. Thread 0.
HD uint32_t take_row(const CombineArgs& args) {
  // Relaxed: it only hands out numbers. The rows themselves are of kernels before this one.
  return fetch_add_relaxed_gpu(&local_control(args)->rows_taken, 1);
}

// The CTA with the last of those numbers: nobody else takes one before the next combine does.
HD void end_taking(const CombineArgs& args, const Cta& cta, uint32_t number, uint32_t num_rows) {
  const uint32_t last = num_rows + static_cast<uint32_t>(cta.num_blocks) - 1;
  if (number == last) store_relaxed_gpu(&local_control(args)->rows_taken, 0);
}

// Quantises rows until all are taken; returns how many this CTA has. Every thread of the CTA.
template <class Element, int Format>
HD uint32_t quantise_received(const CombineArgs& args, const Cta& cta, uint32_t num_rows,
                              const RowSizes& sizes, QuantisedCombineShared& shared) {
  uint32_t quantised = 0;
  int turn = 0;
  int source = 0;
  uint32_t before = 0;  // rows of the ranks before `source`
  for (uint32_t row = shared.taken[0]; row < num_rows; row = shared.taken[turn]) {
    // The next row's number is fetched while this row is quantised.
    if (cta.thread == 0) {
      shared.taken[1 - turn] = take_row(args);
      end_taking(args, cta, shared.taken[1 - turn], num_rows);
    }
    while (row - before >= shared.counts[source]) before += shared.counts[source++];
    const int slot = source * args.geometry.max_tokens_per_rank + static_cast<int>(row - before);
    quantise_slot<Element, Format>(args, cta, slot, sizes, shared.amax);
    ++quantised;
    turn = 1 - turn;
    // P5 release half, per CTA: the barrier puts this row's stores before the arrival of thread 0. It
    // also publishes the next row's number, and ends the use of this row's amax.
    cta.sync();
  }
  return quantised;
}

// True in the CTA that completes the rows, which sees all that the others have quantised.
HD bool completes_rows(const CombineArgs& args, const Cta& cta, uint32_t quantised,
                       uint32_t num_rows, QuantisedCombineShared& shared) {
  if (quantised == 0) {
    // A CTA without rows has nothing to release and does not arrive. Where there are no rows at all,
    // the CTA that was first to ask for one signals.
    return num_rows == 0 && shared.taken[0] == 0;
  }
  if (cta.thread == 0) {
    // P5: release the rows this CTA has quantised, acquire those of the CTAs before it. Relaxed
    // instead, the signals of P3 would cover the last CTA's rows only, and a peer could add stale
    // rows of every other CTA.
    const uint32_t before =
        fetch_add_acq_rel_gpu(&local_control(args)->combine_arrivals, quantised);
    shared.completes = before + quantised == num_rows ? 1 : 0;
  }
  cta.sync();
  return shared.completes != 0;
}

// The CTAs that run quantise what this rank has received; whichever completes it tells the peers.
// After a failed verb nobody does.
template <class Element, int Format>
HD void send_quantised(const CombineArgs& args, const Cta& cta, const RowSizes& sizes,
                       QuantisedCombineShared& shared) {
  const Geometry& geometry = args.geometry;
  if (cta.thread == 0) shared.taken[0] = take_row(args);
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    // Not from the peer's cell: a CTA that starts after this rank's signal may find the next round
    // there. Not from recv_counts: the caller has those as a tensor, and may have written to it.
    shared.counts[peer] = load_word(&rows_from(args)[peer]);
  }
  cta.sync();  // counts, the first number, epoch and has_failed are there, one for all threads
  if (shared.has_failed != 0) return;
  uint32_t num_rows = 0;
  MOE_NVLINK_ROLLED
  for (int peer = 0; peer < geometry.ep_size; ++peer) num_rows += shared.counts[peer];
  if (cta.thread == 0) end_taking(args, cta, shared.taken[0], num_rows);
  const uint32_t quantised = quantise_received<Element, Format>(args, cta, num_rows, sizes, shared);
  if (!completes_rows(args, cta, quantised, num_rows, shared)) return;
  signal_peers(args, cta, shared.epoch);
  // The last thread, which has no peer of its own to signal where threads outnumber the ranks.
  if (cta.thread != cta.num_threads - 1) return;
  store_word(&local_control(args)->combine_arrivals, 0u);
  count_rows(args, sizes);
}

// ---- The receiver's side.

// Item number token * hidden_splits + split.
struct Item {
  int token;
  int split;
};

// item + step, without a division in the loop over the items.
HD Item advance(Item item, Item step, int splits) {
  const int split = item.split + step.split;
  const int carry = split >= splits ? 1 : 0;
  return Item{item.token + step.token + carry, split - carry * splits};
}

// Every num_blocks-th item, from the CTA's own number on. Arguments only, so before the pdl_wait.
struct Share {
  Item first;
  Item step;
};

HD Share share_of(const CombineArgs& args, const Cta& cta) {
  const int splits = static_cast<int>(args.hidden_splits);
  return Share{{cta.block / splits, cta.block % splits},
               {cta.num_blocks / splits, cta.num_blocks % splits}};
}

// Elements of a part of a quantised row: 16 bytes of output of a 2-byte type on the GPU, so that as
// many threads as without a format have one part each; on the host several vector registers.
constexpr int kQuantisedWidth = kVectorBytes / 2;

// The parts that a row of this format and alignment is worked through in.
template <class Config, class Element, int Format, class Shared>
HD void combine_item_in_parts(const CombineArgs& args, const Cta& cta, int token, int split,
                              bool faulted, bool wide, const Shared& shared, int turn) {
  if constexpr (Format == kCombineFp8Block) {
    combine_item<Config, Element, Format, Fp8BlockPart<kQuantisedWidth>>(
        args, cta, token, split, faulted, wide, shared, turn);
  } else if constexpr (Format == kCombineNvfp4) {
    combine_item<Config, Element, Format, Nvfp4Part<kQuantisedWidth>>(args, cta, token, split,
                                                                      faulted, wide, shared, turn);
  } else if (wide) {
    constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(typename Element::Storage));
    combine_item<Config, Element, Format, UnquantisedPart<Element, kWidth>>(
        args, cta, token, split, faulted, true, shared, turn);
  } else {
    combine_item<Config, Element, Format, UnquantisedPart<Element, 1>>(args, cta, token, split,
                                                                       faulted, true, shared, turn);
  }
}

template <class Config, class Element, int Format, class Shared>
HD void combine_items(const CombineArgs& args, const Cta& cta, const Share& share,
                      const RowSizes& sizes, Shared& shared) {
  const uint64_t output_bytes =
      static_cast<uint64_t>(args.geometry.hidden_size) * sizeof(typename Element::Storage);
  const bool wide = vector_bytes_for(args.output, output_bytes) == kVectorBytes;
  const int splits = static_cast<int>(args.hidden_splits);
  const int num_items = args.geometry.num_tokens * splits;
  Item here = share.first;
  // The first item's rows while the peers' signals are on their way.
  if (cta.block < num_items) {
    find_rows<Config, Format>(args, cta, here.token, sizes, 0, shared);
  }
  const bool faulted = combine_barrier(args, cta, shared);
  int turn = 0;
  for (int item = cta.block; item < num_items; item += cta.num_blocks) {
    const Item next = advance(here, share.step, splits);
    if (next.token < args.geometry.num_tokens) {
      find_rows<Config, Format>(args, cta, next.token, sizes, 1 - turn, shared);
    }
    combine_item_in_parts<Config, Element, Format>(args, cta, here.token, here.split, faulted, wide,
                                                   shared, turn);
    // The next item's rows are written, and nobody reads this one's any more: the next turn
    // overwrites them.
    cta.sync();
    here = next;
    turn = 1 - turn;
  }
}

template <class Config, class Element, int Format, class Shared>
HD void combine_in_format(const CombineArgs& args, const Cta& cta, const Share& share,
                          Shared& shared) {
  const RowSizes sizes =
      row_sizes(Format, sizeof(typename Element::Storage), args.geometry.hidden_size);
  if constexpr (Format != kCombineUnquantised) {
    send_quantised<Element, Format>(args, cta, sizes, shared);
  }
  combine_items<Config, Element, Format>(args, cta, share, sizes, shared);
}

template <class Config, class Element, class Shared>
HD void combine_elements(const CombineArgs& args, const Cta& cta, const Share& share, int format,
                         Shared& shared) {
  if constexpr (kKnows<Config, kCombineFp8Block>) {
    if (format == kCombineFp8Block) {
      combine_in_format<Config, Element, kCombineFp8Block>(args, cta, share, shared);
    }
  }
  if constexpr (kKnows<Config, kCombineNvfp4>) {
    if (format == kCombineNvfp4) {
      combine_in_format<Config, Element, kCombineNvfp4>(args, cta, share, shared);
    }
  }
  if constexpr (kKnows<Config, kCombineUnquantised>) {
    if (format == kCombineUnquantised) {
      combine_in_format<Config, Element, kCombineUnquantised>(args, cta, share, shared);
    }
  }
}

template <class Config>
HD void combine_body(const CombineArgs& args, const Cta& cta, SharedOf<Config>& shared) {
  if (cta.thread == 0) shared.faulted = 0;
  const int element = Config::kElement >= 0 ? Config::kElement : args.geometry.element;
  const int format = Config::kCombine >= 0 ? Config::kCombine : static_cast<int>(args.format);
  const Share share = share_of(args, cta);
  // Slots, rows and the epoch come from kernels before this one; see dispatch.cu for both calls.
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  // Two loads in flight together: the peers wait for what comes after them.
  const uint32_t epoch = load_word(&local_control(args)->epoch);
  const bool failed = has_failed(args);
  if (cta.thread == cta.num_threads - 1) {
    shared.epoch = epoch;
    shared.has_failed = failed ? 1 : 0;
  }
  if (format == kCombineUnquantised && cta.block == 0 && !failed) {
    signal_peers(args, cta, epoch);
    if (cta.thread == cta.num_threads - 1) {
      const uint64_t bytes = static_cast<uint64_t>(element_bytes(element));
      count_rows(args, row_sizes(kCombineUnquantised, bytes, args.geometry.hidden_size));
    }
  }
  if (element == kElementBf16) {
    combine_elements<Config, Bf16>(args, cta, share, format, shared);
  } else if (element == kElementFp16) {
    combine_elements<Config, Fp16>(args, cta, share, format, shared);
  } else {
    combine_elements<Config, Fp32>(args, cta, share, format, shared);
  }
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_combine, CombineArgs, SharedOf<Config>, combine_body)
