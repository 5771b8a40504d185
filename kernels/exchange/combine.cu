// Combine: get the experts' partial rows back from the ranks that dispatch put them to, and add
// them up.
//
//   P3          CTA 0 signals every rank "my experts have written" (release); every CTA waits once
//               for all ranks (acquire), then works through its share of the items
//   a format    before P3: the CTAs that run quantise the experts' rows (send_quantised.h); the CTA
//               that completes them (P5) signals instead of CTA 0
//   per item    a token, or one of hidden_splits shares of its row: load the partial row of each k
//               from (target_rank, slot), add in fp32 as a pairwise tree over k, multiply by the
//               caller's scale and add the caller's row, round once to the activation's type, store
//               once (add_rows.h)
//   P14         a rank that may leave: each CTA arrives; the last one says that the rows have been read
//
// hidden_splits: with few tokens the latency of the peers dominates. Then a row is spread over so
// many CTAs that each thread loads one vector of each k, with all loads in flight at once.
//
// The tree is over the positions k: ((0+1)+(2+3))+((4+5)+(6+7)). A k without a row of its own (its
// rank already has the token, or the id is no expert) stands in it as -0.0, which changes no sum.
// So the result depends on routing and rows only, not on slots, CTAs or arrival. The partial rows
// already contain the router weights; combine adds the rows as they are. It turns quantised rows
// into fp32 after it has loaded them, and adds them by the same tree.
//
// No CTA waits until another CTA of its own grid starts, except for CTA 0, which signals if there
// is no format. So a round ends if the GPU has room for one CTA at a time, whatever other kernels
// occupy, provided that the GPU starts CTA 0 first (GPUs do; CUDA does not promise it).
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/combine_formats.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "add_rows.h"
#include "combine_items.h"
#include "combine_shared.h"
#include "send_quantised.h"
#include "tma_combine.h"

namespace moe_nvlink {

template <class Config, class Element, int Format, class Shared>
HD void combine_items(const CombineArgs& args, const Cta& cta, const Share& share,
                      const RowSizes& sizes, Shared& shared) {
  const uint64_t output_bytes =
      static_cast<uint64_t>(args.geometry.hidden_size) * sizeof(typename Element::Storage);
  const bool wide = vector_bytes_for(args.output | args.add, output_bytes) == kVectorBytes;
  const int splits = static_cast<int>(args.hidden_splits);
  const int num_items = args.geometry.num_tokens * splits;
  Item here = share.first;
  // Finds the first item's rows while the peers' signals are on their way.
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
    // After the barrier all threads see the next item's addresses, and no thread reads those of
    // this item, which the next turn overwrites.
    cta.sync();
    here = next;
    turn = 1 - turn;
  }
  end_streams();  // before the launch's end, after which any thread may read the output
  tell_end(args, cta, shared.epoch);
}

template <class Config, class Element, int Format, class Shared>
HD void combine_in_format(const CombineArgs& args, const Cta& cta, const Share& share,
                          Shared& shared) {
  const RowSizes sizes =
      row_sizes<Format>(sizeof(typename Element::Storage), args.geometry.hidden_size);
  if constexpr (Format != kCombineUnquantised) {
    send_quantised<Config, Element, Format>(args, cta, sizes, shared);
  }
  if constexpr (kByTma<Config>) {
    combine_items_by_tma<Config, Element>(args, cta, sizes.row, shared);
  } else {
    combine_items<Config, Element, Format>(args, cta, share, sizes, shared);
  }
}

template <class Config, class Element, class Shared>
HD void combine_elements(const CombineArgs& args, const Cta& cta, const Share& share, int format,
                         Shared& shared) {
  static_assert(kNumCombineFormats == 4);
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
  if constexpr (kKnows<Config, kCombineFp8Tensor>) {
    if (format == kCombineFp8Tensor) {
      combine_in_format<Config, Element, kCombineFp8Tensor>(args, cta, share, shared);
    }
  }
  if constexpr (kKnows<Config, kCombineUnquantised>) {
    if (format == kCombineUnquantised) {
      combine_in_format<Config, Element, kCombineUnquantised>(args, cta, share, shared);
    }
  }
}

// Signals the peers of a combine without a format, whose rows the experts have written. CTA 0.
template <class Config>
HD void signal_unquantised(const CombineArgs& args, const Cta& cta, uint32_t epoch, int element) {
  signal_peers<Config>(args, cta, args.control.combine_cells, combine_cell(args, epoch));
  if (cta.thread != cta.num_threads - 1) return;
  leave_combined(args, epoch, true);
  const uint64_t bytes = static_cast<uint64_t>(element_bytes(element));
  count_rows(args, row_sizes<kCombineUnquantised>(bytes, args.geometry.hidden_size));
}

template <class Config>
HD void combine_body(const CombineArgs& args, const Cta& cta, SharedOf<Config>& shared) {
  if (cta.thread == 0) shared.faulted = 0;
  const int element = Config::kElement >= 0 ? Config::kElement : args.geometry.element;
  const int format = Config::kCombine >= 0 ? Config::kCombine : static_cast<int>(args.format);
  const Share share = share_of(static_cast<int>(args.hidden_splits), cta);
  // Slots, rows and the epoch come from kernels before this one. dispatch.cu explains both calls.
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  // The last thread leaves both words for the CTA. The threads of CTA 0 that signal load them too:
  // the peers wait for what follows. The rest would only keep L2 busy.
  const bool is_last_thread = cta.thread == cta.num_threads - 1;
  const bool signals = cta.block == 0 && cta.thread < num_ranks_in(args.geometry);
  uint32_t epoch = 0;
  bool failed = false;
  if (is_last_thread || signals) {
    epoch = load_word(&local_control(args)->epoch);
    failed = has_failed(args);
  }
  if (is_last_thread) {
    shared.epoch = epoch;
    shared.has_failed = failed ? 1 : 0;
  }
  if (format == kCombineUnquantised && cta.block == 0 && !failed) {
    signal_unquantised<Config>(args, cta, epoch, element);
  }
  static_assert(kNumElements == 3);
  if (element == kElementBf16) combine_elements<Config, Bf16>(args, cta, share, format, shared);
  if (element == kElementFp16) combine_elements<Config, Fp16>(args, cta, share, format, shared);
  if (element == kElementFp32) combine_elements<Config, Fp32>(args, cta, share, format, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_combine, CombineArgs, SharedOf<Config>, combine_body)
