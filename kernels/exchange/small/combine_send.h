// The sender's side of small_combine: the experts' rows as units into the staging of the tokens'
// ranks.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/peers.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/units.h"
#include "../../include/moe_nvlink/workspace.h"
#include "combine_shared.h"

namespace moe_nvlink {

// Parts after its first one that a sender has on their way together.
constexpr int kPartsInFlight = 4;

struct SentPart {
  int source;  // rank of the token
  int place;   // of the row in the slice of that rank
  int part;
};

// Items go through the first places of all ranks, then the second ones, ... A place's ranks begin
// with another rank at each place and on each sender: a rank with many rows is not left to few
// CTAs, and no rank is the first one of all senders.
HD SentPart sent_part(const CombineArgs& args, const SmallPlan& plan, int item) {
  const int num_ranks = num_ranks_in(args.geometry);
  const int row = item / plan.parts;
  const int place = row / num_ranks;
  return SentPart{(row + place + rank_in(args.geometry)) % num_ranks, place,
                  item - row * plan.parts};
}

// The row in this rank's combine region.
HD const char* sent_row(const CombineArgs& args, const SmallPlan& plan, const SentPart& sent) {
  const int slot = sent.source * args.geometry.max_tokens_per_rank + sent.place;
  return region_of(args, rank_in(args.geometry), args.region) +
         static_cast<int64_t>(slot) * plan.words * 4;
}

// A word of a row. After the end of the row the last one is repeated; nobody reads it.
HD uint32_t load_row_word(const SmallPlan& plan, const char* row, int word) {
  const int place = word < plan.words ? word : plan.words - 1;
  return load_word(reinterpret_cast<const uint32_t*>(row) + place);
}

// Loads a unit's data.
template <class Unit>
HD void load_data(const SmallPlan& plan, const char* row, int unit, uint32_t* data) {
  const UnitPlace<Unit> place(unit);
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kUnitWords; ++i) data[i] = load_row_word(plan, row, place.first + i);
  if constexpr (Unit::kParts > kUnitWords) {
    data[kUnitWords] = load_row_word(plan, row, place.shared) >> 16 * place.half;
  }
}

template <class Unit>
HD void put_data(const CombineArgs& args, const SmallPlan& plan, const SentPart& sent, int unit,
                 const uint32_t* data, uint32_t epoch) {
  const int slot = rank_in(args.geometry) * args.geometry.max_tokens_per_rank + sent.place;
  char* target = staging_of(args, sent.source, epoch) +
                 (static_cast<int64_t>(slot) * plan.units + unit) * kUnitBytes;
  put_unit(target, Unit::pack(data, mark_of(epoch)));
}

// Sends this CTA's first part, and returns what the kernels before have left. Which part it is
// depends on arguments only. So the load of its data does not wait for the count that says whether
// there is such a row: the places of absent rows are memory too.
template <class Unit>
HD Round send_first_part(const CombineArgs& args, const Cta& cta, const SmallPlan& plan,
                         const SentPart& sent, const char* row) {
  const int first_unit = sent.part * kPartUnits;
  const int end = first_unit + kPartUnits < plan.units ? first_unit + kPartUnits : plan.units;
  int unit = first_unit + cta.thread;
  uint32_t data[Unit::kParts];
  load_data<Unit>(plan, row, unit < end ? unit : first_unit, data);
  const uint32_t count = load_word(&rows_from(args)[sent.source]);
  const Round round = this_round(args);
  if (round.has_failed || static_cast<uint32_t>(sent.place) >= count) return round;
  if (unit < end) put_data<Unit>(args, plan, sent, unit, data, round.epoch);
  // Fewer threads than units: on the host, or if Choices.small_threads is 128.
  MOE_NVLINK_ROLLED
  for (unit += cta.num_threads; unit < end; unit += cta.num_threads) {
    load_data<Unit>(plan, row, unit, data);
    put_data<Unit>(args, plan, sent, unit, data, round.epoch);
  }
  return round;
}

// Sends this CTA's parts `item`, `item` + senders, ..., kPartsInFlight of them: all loads come
// before the first store.
template <class Unit>
HD void send_parts(const CombineArgs& args, const Cta& cta, const SmallPlan& plan, int item,
                   int num_items, uint32_t epoch, const uint32_t* counts) {
  SentPart sent[kPartsInFlight];
  bool present[kPartsInFlight];
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kPartsInFlight; ++i) {
    const int here = item + i * plan.role.num_senders;
    sent[i] = sent_part(args, plan, here);
    present[i] = here < num_items && static_cast<uint32_t>(sent[i].place) < counts[sent[i].source];
  }
  for (int lane = cta.thread; lane < kPartUnits; lane += cta.num_threads) {
    uint32_t data[kPartsInFlight][Unit::kParts];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kPartsInFlight; ++i) {
      const int unit = sent[i].part * kPartUnits + lane;
      if (!present[i] || unit >= plan.units) continue;
      load_data<Unit>(plan, sent_row(args, plan, sent[i]), unit, data[i]);
    }
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kPartsInFlight; ++i) {
      const int unit = sent[i].part * kPartUnits + lane;
      if (present[i] && unit < plan.units)
        put_data<Unit>(args, plan, sent[i], unit, data[i], epoch);
    }
  }
}

// Sends this CTA's share of the received rows, of which `first` is the first part.
template <class Unit>
HD void send_rows(const CombineArgs& args, const Cta& cta, const SmallPlan& plan,
                  const SentPart& first, const char* first_row, SmallCombineShared& shared) {
  const int num_ranks = num_ranks_in(args.geometry);
  const int items_of_place = num_ranks * plan.parts;
  const int most_items = items_of_place * args.geometry.max_tokens_per_rank;
  if (cta.block >= most_items) return;
  const Round round = send_first_part<Unit>(args, cta, plan, first, first_row);
  if (cta.block + plan.role.num_senders >= most_items) return;
  for_each_peer(args, cta, [&](int peer) {
    const uint32_t count = load_word(&rows_from(args)[peer]);
    shared.counts[peer] = round.has_failed ? 0 : count;
  });
  cta.sync();  // counts of all ranks
  uint32_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    most = shared.counts[rank] > most ? shared.counts[rank] : most;
  }
  const int num_items = static_cast<int>(most) * items_of_place;
  MOE_NVLINK_ROLLED
  for (int item = cta.block + plan.role.num_senders; item < num_items;
       item += kPartsInFlight * plan.role.num_senders) {
    send_parts<Unit>(args, cta, plan, item, num_items, round.epoch, shared.counts);
  }
}

}  // namespace moe_nvlink
