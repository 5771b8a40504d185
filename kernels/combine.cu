// Combine: get the experts' partial rows back from the ranks dispatch put them to, and add them up.
//
//   P3          CTA 0 signals every rank "my experts have written" (release); every CTA waits once
//               for all ranks (acquire), then works through its share of the items
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
// The partial rows carry the router weights already; combine adds them as they are.
#include "include/moe_nvlink/args.h"
#include "include/moe_nvlink/copy.h"
#include "include/moe_nvlink/epoch_flags.h"
#include "include/moe_nvlink/memory_order.h"
#include "include/moe_nvlink/numeric.h"
#include "include/moe_nvlink/platform.h"
#include "include/moe_nvlink/routing.h"
#include "include/moe_nvlink/workspace.h"

namespace moe_nvlink {

struct CombineShared {
  uint32_t epoch;              // of this round
  uint32_t has_failed;         // an earlier verb of this rank has
  uint32_t faulted;            // this one has
  uint64_t rows[2][kMaxTopK];  // addresses of the partial rows, or 0: of this item, of the next
};

// Width elements of one row, as loaded.
template <class Element, int Width>
using Lanes = Vector<Width* static_cast<int>(sizeof(typename Element::Storage))>;

template <class Element, int Width>
HD void fill_minus_zero(Lanes<Element, Width>& lanes) {
  auto* words = reinterpret_cast<typename Element::Storage*>(&lanes);
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Width; ++i) {
    words[i] = static_cast<typename Element::Storage>(Element::kMinusZero);
  }
}

// True for a k that takes no part in the sum; never on the GPU, where its row is loaded as -0.0.
HD bool is_skipped(const char* row) {
  return kSkipAbsentRows && row == nullptr;
}

// sums[j] = rows of k = 2j and 2j+1, then the upper levels of the tree; the result is in sums[0].
template <class Element, int Width>
HD void add_tree(const Lanes<Element, Width>* loaded, const char* const* rows, int top_k,
                 float (*sums)[Width]) {
  const int num_pairs = (top_k + 1) / 2;
  MOE_NVLINK_UNROLL
  for (int pair = 0; pair < num_pairs; ++pair) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) sums[pair][i] = -0.0f;
  }
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    if (is_skipped(rows[k])) continue;
    const auto* words = reinterpret_cast<const typename Element::Storage*>(&loaded[k]);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) sums[k / 2][i] += Element::to_float(words[i]);
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

// Elements [first, last) of one token, a multiple of Width; `threads` of them work side by side.
template <class Config, class Element, int Width>
HD void combine_range(const char* const* rows, int top_k, char* output, int thread, int threads,
                      int first, int last) {
  constexpr int kBytes = static_cast<int>(sizeof(typename Element::Storage));
  for (int base = first; base < last; base += threads * Width) {
    const int element = base + thread * Width;
    const int place = element < last ? element : first;
    // All loads first: top_k of them are in flight together, which is what hides a peer's latency.
    Lanes<Element, Width> loaded[Config::kTopKBound];
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      if (is_skipped(rows[k])) continue;
      fill_minus_zero<Element, Width>(loaded[k]);
      if (rows[k] != nullptr) load_vector(loaded[k], rows[k] + place * kBytes);
    }
    // Behind the loads, so that a branch stands between them and the sums. In one block of code
    // ptxas moves the last loads behind the first sums, to save registers, and so behind the wait
    // for the first loads: two trips to the peers instead of one.
    if (element >= last) return;
    float sums[(Config::kTopKBound + 1) / 2][Width];
    add_tree<Element, Width>(loaded, rows, top_k, sums);
    Lanes<Element, Width> result;
    auto* words = reinterpret_cast<typename Element::Storage*>(&result);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) words[i] = Element::from_float(sums[0][i]);
    store_vector(output + element * kBytes, result);
  }
}

// Where the token's partial rows lie, one k per thread. A slot outside the buffers counts as none.
template <class Config>
HD void find_rows(const CombineArgs& args, const Cta& cta, int token, uint64_t row_bytes,
                  uint64_t* rows) {
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
    rows[k] = valid ? reinterpret_cast<uint64_t>(region_of(args, target, args.region)) +
                          static_cast<uint64_t>(row) * row_bytes
                    : 0;
  }
}

// One token, or the share of it that belongs to split `split` of args.hidden_splits.
template <class Config, class Element, int Width>
HD void combine_item(const CombineArgs& args, const Cta& cta, int token, int split, bool faulted,
                     const uint64_t* addresses) {
  using Word = typename Element::Storage;
  constexpr int kBytes = static_cast<int>(sizeof(Word));
  const int hidden_size = args.geometry.hidden_size;
  const int top_k = top_k_of<Config>(args.geometry);
  char* output = reinterpret_cast<char*>(args.output) +
                 static_cast<uint64_t>(token) * static_cast<uint64_t>(hidden_size) * kBytes;
  const int thread = split * cta.num_threads + cta.thread;
  const int threads = static_cast<int>(args.hidden_splits) * cta.num_threads;
  const char* rows[Config::kTopKBound];
  bool any = false;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    rows[k] = reinterpret_cast<const char*>(addresses[k]);
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
  const int whole = hidden_size - hidden_size % Width;
  combine_range<Config, Element, Width>(rows, top_k, output, thread, threads, 0, whole);
  if constexpr (!kAlignedVectorsOnly) {
    combine_range<Config, Element, 1>(rows, top_k, output, thread, threads, whole, hidden_size);
  }
}

// Tells every rank that this one's experts have written. One CTA.
HD void signal_peers(const CombineArgs& args, const Cta& cta, uint32_t epoch) {
  const Geometry& geometry = args.geometry;
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    // P3 release: the experts' rows (kernels before this one, ordered by pdl_wait) before the
    // signal. Without it a peer may read rows the experts had not written yet. It also puts the
    // experts' reads of the receive buffers before the peer's next dispatch.
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
  const uint64_t start = now_ns();
  MOE_NVLINK_ROLLED
  for (int peer = cta.thread; peer < geometry.ep_size; peer += cta.num_threads) {
    uint64_t cell = 0;
    const int fault =
        wait_for_epoch(cell_of(args, geometry.ep_rank, args.control.combine_cells, peer), epoch,
                       start, args.timeout_ns, &cell);
    if (fault != 0) {
      report_fault(args, args.control.combine_cells, fault, kPhaseCombine, peer, epoch, start);
      store_relaxed_cta(&shared.faulted, 1);
    }
  }
  // P4: thread t acquired rank t's rows; the barrier hands them to the CTA's other threads, which
  // polled other ranks. Without it they may read rows from before the signal.
  cta.sync();
  return shared.faulted != 0;
}

// Adds what this rank is about to read to the totals. One thread of the launch.
HD void count_rows(const CombineArgs& args, int element) {
  ExchangeCounters* totals = exchange_counters(args);
  const LocalControl* local = local_control(args);
  const uint64_t row_bytes = static_cast<uint64_t>(args.geometry.hidden_size) *
                             static_cast<uint64_t>(element_bytes(element));
  add_to_total(&totals->bytes_combined, load_word(&local->rows_put) * row_bytes);
  add_to_total(&totals->bytes_combined_remote, load_word(&local->remote_rows_put) * row_bytes);
}

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

template <class Config, class Element>
HD void combine_items(const CombineArgs& args, const Cta& cta, const Share& share,
                      CombineShared& shared) {
  constexpr int kBytes = static_cast<int>(sizeof(typename Element::Storage));
  const uint64_t row_bytes = static_cast<uint64_t>(args.geometry.hidden_size) * kBytes;
  const int vector_bytes = vector_bytes_for(args.output, row_bytes);
  const int splits = static_cast<int>(args.hidden_splits);
  const int num_items = args.geometry.num_tokens * splits;
  Item here = share.first;
  // The first item's rows while the peers' signals are on their way.
  if (cta.block < num_items) find_rows<Config>(args, cta, here.token, row_bytes, shared.rows[0]);
  const bool faulted = combine_barrier(args, cta, shared);
  int turn = 0;
  for (int item = cta.block; item < num_items; item += cta.num_blocks) {
    const Item next = advance(here, share.step, splits);
    if (next.token < args.geometry.num_tokens) {
      find_rows<Config>(args, cta, next.token, row_bytes, shared.rows[1 - turn]);
    }
    if (vector_bytes == kVectorBytes) {
      combine_item<Config, Element, kVectorBytes / kBytes>(args, cta, here.token, here.split,
                                                           faulted, shared.rows[turn]);
    } else {
      combine_item<Config, Element, 1>(args, cta, here.token, here.split, faulted,
                                       shared.rows[turn]);
    }
    // The next item's rows are written, and nobody reads this one's any more: the next turn
    // overwrites them.
    cta.sync();
    here = next;
    turn = 1 - turn;
  }
}

template <class Config>
HD void combine_body(const CombineArgs& args, const Cta& cta, CombineShared& shared) {
  if (cta.thread == 0) shared.faulted = 0;
  const int element = Config::kElement >= 0 ? Config::kElement : args.geometry.element;
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
  if (cta.block == 0 && !failed) {
    signal_peers(args, cta, epoch);
    if (cta.thread == cta.num_threads - 1) count_rows(args, element);
  }
  if (element == kElementBf16) {
    combine_items<Config, Bf16>(args, cta, share, shared);
  } else if (element == kElementFp16) {
    combine_items<Config, Fp16>(args, cta, share, shared);
  } else {
    combine_items<Config, Fp32>(args, cta, share, shared);
  }
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_combine, CombineArgs, CombineShared, combine_body)
