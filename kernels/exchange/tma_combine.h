// The receiver's side of combine for few SMs (Config::kTma): rows come by TMA (tma.h), so what an SM
// has in flight is bound by its shared memory, and not by its registers and its loads.
//
//   per CTA     a ring of stages, each with a part of a token's row of every k; the first warp starts
//               the copies of as many items as there are stages
//   per item    wait until its copies have landed (P15), add as add_rows.h does, then a CTA barrier,
//               after which the first warp starts the copies of the item that takes this stage next
//
// A part has one vector for each thread. The kernel counts the parts of a row, which may have another
// width than that for which the host has chosen the grid; CombineArgs.hidden_splits has no effect.
#pragma once

#include "../include/moe_nvlink/tma.h"
#include "add_rows.h"
#include "combine_items.h"
#include "combine_shared.h"

namespace moe_nvlink {

struct Stages {
  char* first;
  int count;
  int top_k;
  uint32_t part_bytes;
  int parts;  // of a row
  HD char* part(int stage, int k) const {
    return first + static_cast<uint32_t>(stage * top_k + k) * part_bytes;
  }
};

template <class Config>
HD Stages stages_of(const CombineArgs& args, const Cta& cta, uint64_t row_bytes) {
  const int top_k = top_k_of<Config>(args.geometry);
  const uint32_t part_bytes = static_cast<uint32_t>(cta.num_threads * kVectorBytes);
  const LaunchedShared launched = launched_shared();
  const int room = static_cast<int>(launched.bytes / (part_bytes * static_cast<uint32_t>(top_k)));
  const int parts =
      static_cast<int>((static_cast<uint32_t>(row_bytes) + part_bytes - 1) / part_bytes);
  return Stages{launched.first, room < kMostStages ? room : kMostStages, top_k, part_bytes, parts};
}

// Starts the copies of an item's parts, one k for each thread. The first warp: all its threads arrive.
template <class Config>
HD void start_item(const CombineArgs& args, const Cta& cta, Item item, const Stages& stages,
                   int stage, uint64_t row_bytes, TmaCombineShared& shared) {
  const int k = cta.thread;
  const int32_t* slots = reinterpret_cast<const int32_t*>(args.send_slots) +
                         static_cast<int64_t>(item.token) * stages.top_k;
  const int slot = k < stages.top_k ? load_word(slots + k) : kNoSlot;
  const PlaceOfRow place = place_of_row(args.geometry, slot);
  const uint32_t begin = static_cast<uint32_t>(item.split) * stages.part_bytes;
  const uint32_t rest = static_cast<uint32_t>(row_bytes) - begin;
  const uint32_t bytes = rest < stages.part_bytes ? rest : stages.part_bytes;
  const uint32_t present = cta.sum_of_lanes<Cta::kWarpThreads>(place.exists ? 1u << k : 0u);
  if (k == 0) shared.present[stage] = present;
  // P15, release half: which rows there are. The copies come after it, so no phase ends before they
  // have landed.
  expect_copies(&shared.landed[stage], place.exists ? bytes : 0);
  if (!place.exists) return;
  const uint64_t row = address_of_row(args, place.target, args.region, place.row, row_bytes);
  start_copy(stages.part(stage, k), reinterpret_cast<const char*>(row + begin), bytes,
             &shared.landed[stage]);
}

// Adds the parts that lie in a stage.
template <class Config, class Element>
HD void add_staged(const CombineArgs& args, const Cta& cta, const SumTarget& work, bool wide,
                   const Stages& stages, int stage, uint32_t present) {
  constexpr int kBytes = static_cast<int>(sizeof(typename Element::Storage));
  using Part = UnquantisedPart<Element, kVectorBytes / kBytes>;
  const int element = work.thread * Part::kWidth;
  if (element >= args.geometry.hidden_size) return;
  char* output = work.output + element * kBytes;
  AddedPart<Element, Part::kWidth> added;
  added.set_absent();
  if (work.finish.adds) added.load(work.finish.added_to(output), wide);
  Part loaded[Config::kTopKBound];
  MOE_NVLINK_UNROLL
  for (int k = 0; k < stages.top_k; ++k) {
    loaded[k].set_absent();
    if ((present >> k & 1) == 0) continue;
    load_shared(loaded[k].lanes, stages.part(stage, k) + cta.thread * kVectorBytes);
  }
  store_sum_of<Config, Element>(loaded, nullptr, stages.top_k, work, added, output, wide);
}

template <class Config, class Element>
HD void combine_staged(const CombineArgs& args, const Cta& cta, Item item, bool faulted, bool wide,
                       const Stages& stages, int stage, const TmaCombineShared& shared) {
  const SumTarget work = target_of<Element>(args, cta, item.token, item.split, stages.parts);
  const uint32_t present = faulted ? 0 : shared.present[stage];
  if (faulted || (present == 0 && !work.finish.adds)) {
    return store_no_sum<Element>(work, args.geometry.hidden_size, faulted);
  }
  add_staged<Config, Element>(args, cta, work, wide, stages, stage, present);
}

// A CTA's items, of which the copies run ahead by as many as there are stages.
struct ItemsAhead {
  Item item;
  int number;
  HD void next(Item step, int splits, int num_blocks) {
    item = advance(item, step, splits);
    number += num_blocks;
  }
};

template <class Config, class Element, class Shared>
HD void combine_items_by_tma(const CombineArgs& args, const Cta& cta, uint64_t row_bytes,
                             Shared& shared) {
  const bool wide = vector_bytes_for(args.output | args.add, row_bytes) == kVectorBytes;
  const Stages stages = stages_of<Config>(args, cta, row_bytes);
  const Share share = share_of(stages.parts, cta);
  const int num_items = args.geometry.num_tokens * stages.parts;
  if (cta.thread == 0) {
    for (int i = 0; i < stages.count; ++i) init_copies(&shared.landed[i], Cta::kWarpThreads);
    fence_copies_shared();
  }
  const bool has_faulted = combine_barrier(args, cta, shared);
  const bool copies = !has_faulted && cta.thread < Cta::kWarpThreads;
  // P3: the loads that have acquired the signals are of another proxy than the copies.
  if (copies) fence_copies_global();
  ItemsAhead ahead{share.first, cta.block};
  for (int stage = 0; copies && stage < stages.count && ahead.number < num_items; ++stage) {
    start_item<Config>(args, cta, ahead.item, stages, stage, row_bytes, shared);
    ahead.next(share.step, stages.parts, cta.num_blocks);
  }
  int stage = 0;
  uint32_t parity = 0;
  ItemsAhead here{share.first, cta.block};
  while (here.number < num_items) {
    // P15, acquire half. Not bounded: a copy lands or fails as a load of the same memory would.
    while (!has_faulted && !have_landed(&shared.landed[stage], parity)) {
    }
    combine_staged<Config, Element>(args, cta, here.item, has_faulted, wide, stages, stage, shared);
    cta.sync();  // all threads have read the stage
    if (copies && ahead.number < num_items) {
      fence_copies_shared();
      start_item<Config>(args, cta, ahead.item, stages, stage, row_bytes, shared);
      ahead.next(share.step, stages.parts, cta.num_blocks);
    }
    here.next(share.step, stages.parts, cta.num_blocks);
    stage = stage + 1 == stages.count ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
  tell_end(args, cta, shared.epoch);
}

}  // namespace moe_nvlink
