// The receiver's side of combine: load a token's partial rows from the peers, add them in fp32 as a
// pairwise tree over the positions k, multiply the sum and add the caller's row, round once, store.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/combine_formats.h"
#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/number_formats.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/present_rows.h"
#include "../include/moe_nvlink/routing.h"
#include "../include/moe_nvlink/workspace.h"
#include "combine_shared.h"

namespace moe_nvlink {

// Whether a k takes no part in the sum. Always false on the GPU, which takes -0.0 for such a row.
HD bool is_skipped(const PartialRow& row) {
  return kSkipAbsentRows && row.row == nullptr;
}

// Adds the rows of k = 2j and 2j+1 to sums[j], then the upper levels of the tree. The result is in
// sums[0].
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

// Rounds `sums` to the activation's type, once, and stores them. wide: `target` lies on a vector's
// boundary.
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

// The part of the row that is added to the sums: -0.0, which changes no sum, if there is none. It
// is loaded as store_sums stores.
template <class Element, int Width>
struct AddedPart {
  using Word = typename Element::Storage;
  static constexpr int kBytes = static_cast<int>(sizeof(Word));
  static constexpr int kLoaded = Width * kBytes < kVectorBytes ? Width : kVectorBytes / kBytes;
  UnquantisedPart<Element, kLoaded> parts[Width / kLoaded];

  HD void set_absent() {
    MOE_NVLINK_UNROLL
    for (auto& part : parts) part.set_absent();
  }
  HD void load(const char* row, bool wide) {
    MOE_NVLINK_UNROLL
    for (int first = 0; first < Width; first += kLoaded) {
      const char* source = row + first * kBytes;
      Lanes<Element, kLoaded>& lanes = parts[first / kLoaded].lanes;
      if (wide) {
        load_vector(lanes, source);
      } else {
        auto* words = reinterpret_cast<Word*>(&lanes);
        MOE_NVLINK_UNROLL
        for (int i = 0; i < kLoaded; ++i) {
          words[i] = load_word(reinterpret_cast<const Word*>(source) + i);
        }
      }
    }
  }
  HD void add_to(float* sums) const {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width / kLoaded; ++i) parts[i].add_to(sums + i * kLoaded);
  }
};

// Adds the loaded parts up, and what follows every sum; stores the result.
template <class Config, class Element, class Part>
HD void store_sum_of(const Part* loaded, const PartialRow* rows, int top_k, const SumTarget& work,
                     const AddedPart<Element, Part::kWidth>& added, char* output, bool wide) {
  constexpr int Width = Part::kWidth;
  float sums[(Config::kTopKBound + 1) / 2][Width];
  add_tree(loaded, rows, top_k, sums);
  if (work.finish.is_needed()) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Width; ++i) sums[0][i] *= work.finish.scale;
    added.add_to(sums[0]);
  }
  store_sums<Element, Width>(output, sums[0], wide);
}

// Combines elements [first, last) of one token, a multiple of the part's width. This is thread
// `thread` of the `threads` that share them.
template <class Config, class Element, class Part, class Rows>
HD void combine_range(const Rows& source, int top_k, const SumTarget& work, bool wide, int first,
                      int last) {
  constexpr int kBytes = static_cast<int>(sizeof(typename Element::Storage));
  constexpr int Width = Part::kWidth;
  for (int base = first; base < last; base += work.threads * Width) {
    const int element = base + work.thread * Width;
    const int place = element < last ? element : first;
    // All loads come first, so the loads of top_k rows are in flight together and their latencies
    // overlap.
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
    // Not at `place`: where the row lies in the output's place, another thread may write there.
    // unknown: or the load would follow the branch below.
    char* output = work.output + element * kBytes;
    AddedPart<Element, Width> added;
    added.set_absent();
    if (work.finish.adds && unknown(element < last ? 1u : 0u) != 0) {
      added.load(work.finish.added_to(output), wide);
    }
    // This branch stands between the loads and the sums. Without it, ptxas would move the last
    // loads after the first sums, to save registers. They would then follow the wait for the first
    // loads: two trips to the peers instead of one.
    if (element >= last) return;
    store_sum_of<Config, Element>(loaded, rows, top_k, work, added, output, wide);
  }
}

// Where the partial row of a slot lies: at which rank, and the row's number in its region. A slot
// outside of the buffers counts as no slot.
struct PlaceOfRow {
  bool exists;
  int target;
  int row;
};

HD PlaceOfRow place_of_row(const Geometry& geometry, int slot) {
  const bool exists = slot >= 0 && slot < geometry.ep_size * geometry.max_tokens_per_rank;
  const int target = exists ? slot / geometry.max_tokens_per_rank : 0;
  return {exists, target, slot - (target - geometry.ep_rank) * geometry.max_tokens_per_rank};
}

// Finds the addresses of the token's partial rows, one k per thread.
template <class Config, int Format, class Shared>
HD void find_rows(const CombineArgs& args, const Cta& cta, int token, const RowSizes& sizes,
                  int turn, Shared& shared) {
  const Geometry& geometry = args.geometry;
  const int top_k = top_k_of<Config>(geometry);
  const int32_t* slots =
      reinterpret_cast<const int32_t*>(args.send_slots) + static_cast<int64_t>(token) * top_k;
  MOE_NVLINK_ROLLED
  for (int k = cta.thread; k < top_k; k += cta.num_threads) {
    const PlaceOfRow place = place_of_row(geometry, load_word(slots + k));
    const int target = place.target;
    const int row = place.row;
    const uint32_t region = Format == kCombineUnquantised ? args.region : args.rows_region;
    shared.rows[turn][k] = place.exists ? address_of_row(args, target, region, row, sizes.row) : 0;
    if constexpr (kHasScales<Format>) {
      shared.scales[turn][k] = address_of_row(args, target, args.scales_region, row, sizes.scales);
      shared.row_scales[turn][k] =
          address_of_row(args, target, args.row_scales_region, row, sizes.row_scale);
    }
  }
}

// The addresses that find_rows left, in registers of the thread.
struct KeptRows {
  const PartialRow* rows;
  HD const PartialRow* rows_in(PartialRow* /*buffer*/) const { return rows; }
  HD void take(int /*k*/, int /*top_k*/, PartialRow* /*buffer*/) const {}
};

// The same for rows with scales, which lie in three regions. So many addresses would take the registers that the
// sums need. Therefore the thread reads them again for each part of a row, a few k at a time.
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

// Adds the rows up without the absent rows (host).
template <class Config, class Element, int Format, class Part, class Shared>
HD void combine_present_rows(const SumTarget& work, int hidden_size, int top_k, bool wide,
                             PartialRow* rows, const Shared& shared, int turn) {
  if constexpr (kHasScales<Format>) {
    for (int k = 0; k < top_k; ++k) {
      rows[k].scales = reinterpret_cast<const char*>(shared.scales[turn][k]);
      rows[k].row_scale = reinterpret_cast<const char*>(shared.row_scales[turn][k]);
    }
  }
  using Term = typename TermOf<Element, Format>::Type;
  const int whole = hidden_size - hidden_size % Term::kElements;
  sum_present_rows<Term>(rows, top_k, work, whole);
  // A quantised row is whole blocks, of 16 elements an odd number perhaps.
  if constexpr (Format == kCombineUnquantised || Term::kElements > 16) {
    combine_range<Config, Element, typename Part::Rest>(KeptRows{rows}, top_k, work, wide, whole,
                                                        hidden_size);
  }
}

// Adds the rows of all k up, the absent rows as -0.0.
template <class Config, class Element, class Part, class Rows>
HD void combine_all_rows(const SumTarget& work, int hidden_size, int top_k, bool wide,
                         const Rows& source) {
  const int whole = hidden_size - hidden_size % Part::kWidth;
  combine_range<Config, Element, Part>(source, top_k, work, wide, 0, whole);
  if constexpr (!kAlignedVectorsOnly) {
    combine_range<Config, Element, typename Part::Rest>(source, top_k, work, wide, whole,
                                                        hidden_size);
  }
}

// Where a thread stores its part of a token's sum, as one of those that share the token.
template <class Element>
HD SumTarget target_of(const CombineArgs& args, const Cta& cta, int token, int split, int splits) {
  const uint64_t row_bytes =
      static_cast<uint64_t>(args.geometry.hidden_size) * sizeof(typename Element::Storage);
  const uint64_t place = static_cast<uint64_t>(token) * row_bytes;
  return SumTarget{reinterpret_cast<char*>(args.output + place),
                   split * cta.num_threads + cta.thread, splits * cta.num_threads,
                   are_streamed(args.output, row_bytes, args.geometry.num_tokens), finish_of(args)};
}

// Without any row the output is zero. After a fault it is NaN, so nobody takes it for a result.
template <class Element>
HD void store_no_sum(const SumTarget& work, int hidden_size, bool faulted) {
  using Word = typename Element::Storage;
  const Word word = Element::from_float(faulted ? float_of_bits(0x7fc00000u) : 0.0f);
  auto* words = reinterpret_cast<Word*>(work.output);
  MOE_NVLINK_ROLLED
  for (int i = work.thread; i < hidden_size; i += work.threads) store_word(words + i, word);
}

// Combines one item: share `split` of args.hidden_splits of one token's row.
template <class Config, class Element, int Format, class Part, class Shared>
HD void combine_item(const CombineArgs& args, const Cta& cta, int token, int split, bool faulted,
                     bool wide, const Shared& shared, int turn) {
  const int hidden_size = args.geometry.hidden_size;
  const int top_k = top_k_of<Config>(args.geometry);
  const uint64_t* addresses = shared.rows[turn];
  PartialRow rows[Config::kTopKBound];
  bool any = false;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    rows[k].row = reinterpret_cast<const char*>(addresses[k]);
    any = any || addresses[k] != 0;
  }
  const SumTarget work =
      target_of<Element>(args, cta, token, split, static_cast<int>(args.hidden_splits));
  if (faulted || (!any && !work.finish.adds)) {
    return store_no_sum<Element>(work, hidden_size, faulted);
  }
  if constexpr (kSkipAbsentRows) {
    combine_present_rows<Config, Element, Format, Part>(work, hidden_size, top_k, wide, rows,
                                                        shared, turn);
  } else if constexpr (!kHasScales<Format>) {
    combine_all_rows<Config, Element, Part>(work, hidden_size, top_k, wide, KeptRows{rows});
  } else {
    combine_all_rows<Config, Element, Part>(
        work, hidden_size, top_k, wide,
        SharedRows{addresses, shared.scales[turn], shared.row_scales[turn]});
  }
}

// Elements of a part of a quantised row. On the GPU a part makes 16 bytes of output in a 2-byte
// type, so a row has as many parts as without a format. On the host a part fills several vector
// registers.
constexpr int kQuantisedWidth = kVectorBytes / 2;

// Combines one item in the parts that suit the format and the output's alignment.
template <class Config, class Element, int Format, class Shared>
HD void combine_item_in_parts(const CombineArgs& args, const Cta& cta, int token, int split,
                              bool faulted, bool wide, const Shared& shared, int turn) {
  static_assert(kNumCombineFormats == 4);
  if constexpr (Format == kCombineFp8Block) {
    combine_item<Config, Element, Format, Fp8BlockPart<kQuantisedWidth>>(
        args, cta, token, split, faulted, wide, shared, turn);
  } else if constexpr (Format == kCombineNvfp4) {
    combine_item<Config, Element, Format, Nvfp4Part<kQuantisedWidth>>(args, cta, token, split,
                                                                      faulted, wide, shared, turn);
  } else if constexpr (Format == kCombineFp8Tensor) {
    combine_item<Config, Element, Format, Fp8TensorPart<kQuantisedWidth>>(
        args, cta, token, split, faulted, wide, shared, turn);
  } else if (wide) {
    constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(typename Element::Storage));
    combine_item<Config, Element, Format, UnquantisedPart<Element, kWidth>>(
        args, cta, token, split, faulted, true, shared, turn);
  } else {
    combine_item<Config, Element, Format, UnquantisedPart<Element, 1>>(args, cta, token, split,
                                                                       faulted, true, shared, turn);
  }
}

}  // namespace moe_nvlink
