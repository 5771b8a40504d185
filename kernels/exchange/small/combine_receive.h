// The receiver's side of small_combine: the units of a token's rows are looked at together, cleared,
// and added up.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/config.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/epoch_flags.h"
#include "../../include/moe_nvlink/number_formats.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/present_rows.h"
#include "../../include/moe_nvlink/routing.h"
#include "../../include/moe_nvlink/units.h"
#include "../../include/moe_nvlink/workspace.h"
#include "../add_rows.h"
#include "combine_shared.h"

namespace moe_nvlink {

// A unit of one partial row, which add_tree adds to its sums.
template <class Unit, class Element>
struct UnitPart {
  using Word = typename Element::Storage;
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(Word));
  static constexpr int kWidth = Unit::kDataBytes / static_cast<int>(sizeof(Word));
  static constexpr uint32_t kAbsentWord =
      kPerWord == 2 ? Element::kMinusZero | Element::kMinusZero << 16 : Element::kMinusZero;
  Unit unit;

  HD void set_absent() {
    uint32_t data[Unit::kParts];
    MOE_NVLINK_UNROLL
    for (uint32_t& part : data) part = kAbsentWord;
    unit = Unit::pack(data, 0);
  }
  HD void add_to(float* sums) const {
    uint32_t data[Unit::kParts];
    unit.unpack(data);
    add_words(data, sums);
  }
  HD static void add_words(const uint32_t* data, float* sums) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t word = data[i / kPerWord];
      sums[i] += Element::to_float(static_cast<Word>(i % kPerWord == 0 ? word : word >> 16));
    }
  }
};

// Loads what a unit's sums get of the row that is added to them: -0.0, which change no sum, after the
// row's end and if there is no row. words: of the row. aligned: as for store_unit_sums.
template <class Unit, class Element>
HD void load_added(const char* row, const UnitPlace<Unit>& place, int words, bool aligned,
                   uint32_t* data) {
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Unit::kParts; ++i) data[i] = UnitPart<Unit, Element>::kAbsentWord;
  if (row == nullptr) return;
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(row);
  const auto load_half = [&] {
    if constexpr (Unit::kParts > kUnitWords) {
      if (place.shared >= words) return;
      data[kUnitWords] = load_word(halves + 2 * place.shared + place.half);
    }
  };
  if (aligned) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kUnitWords; ++i) {
      const int word = place.first + i;
      if (word < words) data[i] = load_word(reinterpret_cast<const uint32_t*>(row) + word);
    }
    return load_half();
  }
  const uint16_t* first = halves + 2 * place.first;
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kUnitWords; ++i) {
    if (place.first + i >= words) continue;
    data[i] = load_word(first + 2 * i) | static_cast<uint32_t>(load_word(first + 2 * i + 1)) << 16;
  }
  load_half();
}

// Rounds the sums of a unit once and stores them in a row of `words` words of 4 bytes. aligned: the
// words lie on their boundaries.
template <class Unit, class Element>
HD void store_unit_sums(char* row, const UnitPlace<Unit>& place, const float* sums, int words,
                        bool aligned) {
  using Part = UnitPart<Unit, Element>;
  uint32_t* whole = reinterpret_cast<uint32_t*>(row);
  uint16_t* halves = reinterpret_cast<uint16_t*>(row);
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kUnitWords; ++i) {
    uint32_t value = Element::from_float(sums[i * Part::kPerWord]);
    if constexpr (Part::kPerWord == 2) {
      value |= static_cast<uint32_t>(Element::from_float(sums[2 * i + 1])) << 16;
    }
    const int word = place.first + i;
    if (word >= words) continue;
    if (aligned) {
      store_word(whole + word, value);
    } else {
      store_word(halves + 2 * word, static_cast<uint16_t>(value));
      store_word(halves + 2 * word + 1, static_cast<uint16_t>(value >> 16));
    }
  }
  if constexpr (Unit::kParts > kUnitWords) {
    if (place.shared >= words) return;
    store_word(halves + 2 * place.shared + place.half,
               static_cast<uint16_t>(Element::from_float(sums[Part::kWidth - 1])));
  }
}

// Finds the token's partial rows in the staging, one k per thread. A slot outside of the staging
// counts as no slot.
template <class Config>
HD void find_staged_rows(const CombineArgs& args, const Cta& cta, const SmallPlan& plan, int token,
                         int32_t* rows) {
  const Geometry& geometry = args.geometry;
  const int top_k = top_k_of<Config>(geometry);
  const int32_t* slots =
      reinterpret_cast<const int32_t*>(args.send_slots) + static_cast<int64_t>(token) * top_k;
  MOE_NVLINK_ROLLED
  for (int k = cta.thread; k < top_k; k += cta.num_threads) {
    const int slot = load_word(slots + k);
    const bool valid = slot >= 0 && slot < geometry.ep_size * geometry.max_tokens_per_rank;
    rows[k] = valid ? slot * plan.units : kNoSlot;
  }
}

// What a thread receives with.
struct Receiving {
  char* staging;
  uint32_t epoch;
  bool has_failed;  // this thread stores NaN from now on
  Patience patience;
  LateUnits* late;  // of the CTA; of the other threads nullptr
};

HD char* staged_unit(const Receiving& receiving, int row, int unit) {
  return receiving.staging + static_cast<int64_t>(row + unit) * kUnitBytes;
}

// Calls visit(k, unit's address) for each k that `wanted` has a bit for. The rows come out of shared
// memory a few at a time: with all of them in registers there would be no room for the units.
template <class Visit>
HD void for_each_unit(const Receiving& receiving, int top_k, const int32_t* rows, int unit,
                      uint32_t wanted, const Visit& visit) {
  constexpr int kTogether = 8;
  MOE_NVLINK_UNROLL
  for (int first = 0; first < top_k; first += kTogether) {
    int32_t taken[kTogether];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kTogether && first + i < top_k; ++i) taken[i] = rows[first + i];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kTogether && first + i < top_k; ++i) {
      if ((wanted >> (first + i) & 1u) != 0) {
        visit(first + i, staged_unit(receiving, taken[i], unit));
      }
    }
  }
}

// The rank that the first of these units comes from.
HD int peer_of(const CombineArgs& args, const SmallPlan& plan, const int32_t* rows,
               uint32_t units) {
  int k = 0;
  while ((units >> k & 1u) == 0) ++k;
  return rows[k] / (plan.units * args.geometry.max_tokens_per_rank);
}

// Names the rank whose unit is missing, the first of them.
HD void report_missing(const CombineArgs& args, const SmallPlan& plan, const int32_t* rows,
                       uint32_t missing, Receiving& receiving) {
  report_fault(args, args.control.combine_cells, kFaultTimeout, kPhaseCombine,
               peer_of(args, plan, rows, missing), receiving.epoch, receiving.patience);
}

// Adds what has been waited since the last call to the total of the rank whose unit came last. Called
// after the sums have been stored, so the load of the total delays no row.
HD void count_late(const CombineArgs& args, const SmallPlan& plan, const int32_t* rows,
                   LateUnits& late) {
  if (late.waited <= late.counted) return;
  const uint64_t waited = late.waited - late.counted;
  late.counted = late.waited;
  add_to_total(wait_totals(args) + peer_of(args, plan, rows, late.missing), waited);
}

// Waits for the units of every k that `missing` has a bit for. All looks of a turn are on their way
// together, and each turn looks only at what had not arrived. Returns which have not come in time.
template <class Unit, class Element>
HD uint32_t await_units(int top_k, const int32_t* rows, int unit, uint32_t missing,
                        Receiving& receiving, UnitPart<Unit, Element>* parts) {
  const uint32_t mark = mark_of(receiving.epoch);
  Backoff backoff;
  while (true) {
    for_each_unit(receiving, top_k, rows, unit, missing,
                  [&](int k, const char* place) { parts[k].unit = look_at_unit<Unit>(place); });
    // Never true. The branch stands between the looks and their use: without it, ptxas would move
    // the last looks behind the wait for the first ones, two trips to memory instead of one.
    if (unknown(missing) == 0) return 0;
    // P10: a word with the mark has the round's data. If only one word of a TwoMarkUnit were asked for
    // its mark, the other one's data might be zeros.
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      if (parts[k].unit.has_arrived(mark)) missing &= ~(1u << k);
    }
    if (missing == 0) return 0;
    const uint64_t waited = receiving.patience.waited_ns();
    if (receiving.late != nullptr) {
      receiving.late->waited = waited;
      receiving.late->missing = missing;
    }
    if (waited > receiving.patience.timeout_ns) return missing;
    backoff.pause(waited);
  }
}

// Adds up the units of every k that `present` has a bit for. False if some have not come in time.
template <class Config, class Element>
HD bool sum_units(const CombineArgs& args, const SmallPlan& plan, const int32_t* rows, int unit,
                  uint32_t present, Receiving& receiving, float* sum) {
  using Unit = SumUnit<Config, Element>;
  using Part = UnitPart<Unit, Element>;
  const int top_k = top_k_of<Config>(args.geometry);
  Part parts[Config::kTopKBound];
  PartialRow partial[Config::kTopKBound];  // add_tree asks whether one is null (host)
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    parts[k].set_absent();
    partial[k].row = (present >> k & 1u) != 0 ? receiving.staging : nullptr;
  }
  const uint32_t missing = await_units<Unit, Element>(top_k, rows, unit, present, receiving, parts);
  if (missing != 0) {
    report_missing(args, plan, rows, missing, receiving);
    return false;
  }
  for_each_unit(receiving, top_k, rows, unit, present,
                [](int /*k*/, char* place) { clear_unit<Unit>(place); });
  float sums[(Config::kTopKBound + 1) / 2][Part::kWidth];
  add_tree(parts, partial, top_k, sums);
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Part::kWidth; ++i) sum[i] = sums[0][i];
  return true;
}

// Units of a token beside which a thread has registers for a row that is added, too.
constexpr int kMostUnitsAndAdded = 24;

// Receives and adds one part of a token's row.
template <class Config, class Element>
HD void combine_part(const CombineArgs& args, const Cta& cta, const SmallPlan& plan, int token,
                     int part, const int32_t* rows, Receiving& receiving) {
  using Unit = SumUnit<Config, Element>;
  using Part = UnitPart<Unit, Element>;
  const uint64_t offset = static_cast<uint64_t>(token) * static_cast<uint64_t>(plan.words) * 4;
  char* output = reinterpret_cast<char*>(args.output + offset);
  const bool aligned = (args.output | args.add) % 4 == 0;
  const int top_k = top_k_of<Config>(args.geometry);
  uint32_t present = 0;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) present |= rows[k] >= 0 ? 1u << k : 0u;
  const Finish finish = finish_of(args);
  const int end = (part + 1) * kPartUnits < plan.units ? (part + 1) * kPartUnits : plan.units;
  for (int unit = part * kPartUnits + cta.thread; unit < end; unit += cta.num_threads) {
    // On its way before the units: it is here when they are. With many units no register is left.
    constexpr bool kEarly = Config::kTopKBound <= kMostUnitsAndAdded;
    uint32_t added[Unit::kParts];
    const auto load = [&] {
      load_added<Unit, Element>(finish.added_to(output), UnitPlace<Unit>(unit), plan.words, aligned,
                                added);
    };
    if constexpr (kEarly) load();
    // Without any row the output is zero. After a fault it is NaN, so nobody takes it for a result.
    float sum[Part::kWidth];
    MOE_NVLINK_UNROLL
    for (float& value : sum) value = finish.adds ? -0.0f : 0.0f;
    if (present != 0 && !receiving.has_failed) {
      receiving.has_failed =
          !sum_units<Config, Element>(args, plan, rows, unit, present, receiving, sum);
    }
    // A token without any row is neither scaled nor added to: its zero stays +0.0.
    if (finish.is_needed() && (present != 0 || finish.adds)) {
      if constexpr (!kEarly) load();
      MOE_NVLINK_UNROLL
      for (float& value : sum) value *= finish.scale;
      Part::add_words(added, sum);
    }
    MOE_NVLINK_UNROLL
    for (float& value : sum) value = receiving.has_failed ? float_of_bits(0x7fc00000u) : value;
    store_unit_sums<Unit, Element>(output, UnitPlace<Unit>(unit), sum, plan.words, aligned);
  }
}

// Combines this CTA's share of the tokens' parts. Its first item's rows are found; a barrier stands
// between that and their use.
template <class Config, class Element>
HD void receive_rows(const CombineArgs& args, const Cta& cta, const SmallPlan& plan, int share,
                     const Round& round, SmallCombineShared& shared) {
  const int num_items = args.geometry.num_tokens * plan.parts;
  Receiving receiving{staging_of(args, rank_in(args.geometry), round.epoch), round.epoch,
                      round.has_failed, Patience(args.timeout_ns),
                      cta.thread == 0 ? &shared.late : nullptr};
  if (cta.thread == 0) shared.late.waited = shared.late.counted = 0;
  int token = share / plan.parts;
  int turn = 0;
  cta.sync();  // rows of the first item
  MOE_NVLINK_ROLLED
  for (int item = share; item < num_items; item += plan.role.num_receivers) {
    const int next = (item + plan.role.num_receivers) / plan.parts;
    if (next < args.geometry.num_tokens) {
      find_staged_rows<Config>(args, cta, plan, next, shared.rows[1 - turn]);
    }
    combine_part<Config, Element>(args, cta, plan, token, item - token * plan.parts,
                                  shared.rows[turn], receiving);
    if (cta.thread == 0 && share == 0) count_late(args, plan, shared.rows[turn], shared.late);
    // After the barrier all threads see the next item's rows, and no thread reads those of this
    // item, which the next turn overwrites.
    cta.sync();
    token = next;
    turn = 1 - turn;
  }
}

}  // namespace moe_nvlink
