// Combine of small batches: the experts' rows go to the ranks of their tokens as units that carry
// their own flags (units.h), so no row waits for a fence, a cell or an acknowledgement.
//
//   senders     CTAs [0, senders): each takes parts of the rows that this rank has received, and
//               stores them as units into the staging of the tokens' ranks (P10). The first part of
//               a CTA depends on arguments only. So its row and the count that says whether there
//               is such a row are loaded together, and the units follow after one wait for memory.
//   P12         CTA `senders` signals every rank: what this rank has read and cleared may be
//               written again from the next dispatch on
//   receivers   the CTAs from there on: for each unit of a token's row, load the units of all k
//               together, look again at those that have not arrived, clear them, add them up in
//               fp32 as combine.cu does, with the caller's scale and row, round once and store
//
// Units of rounds of even and of odd epochs lie in two stagings. Combine n clears its units; its
// rank says so by the signal of combine n + 1, which every rank has acquired before dispatch n + 2
// ends, and the next units of the same parity are those of combine n + 2.
//
// Senders wait for nobody. Receivers start after them, because GPUs start CTAs in order (CUDA does
// not promise it). So a round ends if the GPU has room for one CTA at a time. If senders is 0, as on
// the host, every CTA has both roles, and all CTAs run at the same time.
//
// The bits of a sum are those of combine.cu: the same tree over k, in which a k without a row of its
// own stands as -0.0.
#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/combine_formats.h"
#include "../include/moe_nvlink/config.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/epoch_flags.h"
#include "../include/moe_nvlink/memory_order.h"
#include "../include/moe_nvlink/numeric.h"
#include "../include/moe_nvlink/peers.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/routing.h"
#include "../include/moe_nvlink/units.h"
#include "../include/moe_nvlink/workspace.h"
#include "add_rows.h"
#include "combine_shared.h"
#include "small_role.h"

namespace moe_nvlink {

constexpr int kUnitWords = kUnitDataBytes / 4;
// Parts after its first one that a sender has on their way together.
constexpr int kPartsInFlight = 4;

// What the first thread of a receiver has waited for units, for the totals. In shared memory, because
// the units take the registers.
struct LateUnits {
  uint64_t waited;   // nanoseconds, all together
  uint64_t counted;  // the part of them that the totals have
  uint32_t missing;  // has a bit for each k whose unit the last look that failed did not find
};

struct SmallCombineShared {
  uint32_t counts[kMaxRanks];  // senders: rows received from each rank
  const char* first_row;       // senders: address of the first part's row
  // Receivers: first unit of each partial row in the staging, or kNoSlot: of this item, of the next.
  int32_t rows[2][kMaxTopK];
  LateUnits late;
};

// Sizes of a row, and what the CTA does. From arguments only.
struct SmallPlan {
  int words;  // of 4 bytes
  int units;  // of a row
  int parts;  // of a row
  SmallRole role;
};

HD SmallPlan small_plan(const CombineArgs& args, const Cta& cta, int element) {
  const int row_bytes = args.geometry.hidden_size * element_bytes(element);
  const int units = units_of(row_bytes);
  return SmallPlan{row_bytes / 4, units, (units + kPartUnits - 1) / kPartUnits,
                   small_role(args.senders, cta)};
}

// The staging of a rank for the rounds with this epoch's parity. Not by a branch: the epoch is the
// last to be known, and what does not depend on it is computed while it is on its way.
HD char* staging_of(const CombineArgs& args, int rank, uint32_t epoch) {
  const uint32_t step = args.odd_staging_region - args.even_staging_region;
  return region_of(args, rank, args.even_staging_region + epoch % 2 * step);
}

// What a kernel before this one has left. Every thread reads it for itself: no barrier precedes the
// units.
struct Round {
  uint32_t epoch;
  bool has_failed;  // a verb of this rank, before
};

HD Round this_round(const CombineArgs& args) {
  const uint32_t epoch = load_word(&local_control(args)->epoch);
  return Round{epoch, has_failed(args)};
}

// ---- The sender's side.

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

// Loads a unit's data.
HD void load_data(const SmallPlan& plan, const char* row, int unit, uint32_t* data) {
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kUnitWords; ++i) {
    // After the end of the row the last word is repeated. Nobody reads it.
    const int word = unit * kUnitWords + i;
    const int place = word < plan.words ? word : plan.words - 1;
    data[i] = load_word(reinterpret_cast<const uint32_t*>(row) + place);
  }
}

HD void put_data(const CombineArgs& args, const SmallPlan& plan, const SentPart& sent, int unit,
                 const uint32_t* data, uint32_t epoch) {
  const int slot = rank_in(args.geometry) * args.geometry.max_tokens_per_rank + sent.place;
  char* target = staging_of(args, sent.source, epoch) +
                 (static_cast<int64_t>(slot) * plan.units + unit) * kUnitBytes;
  put_unit(target, pack_unit(data[0], data[1], data[2], mark_of(epoch)));
}

// Sends this CTA's first part, and returns what the kernels before have left. Which part it is
// depends on arguments only. So the load of its data does not wait for the count that says whether
// there is such a row: the places of absent rows are memory too.
HD Round send_first_part(const CombineArgs& args, const Cta& cta, const SmallPlan& plan,
                         const SentPart& sent, const char* row) {
  const int first_unit = sent.part * kPartUnits;
  const int end = first_unit + kPartUnits < plan.units ? first_unit + kPartUnits : plan.units;
  int unit = first_unit + cta.thread;
  uint32_t data[kUnitWords];
  load_data(plan, row, unit < end ? unit : first_unit, data);
  const uint32_t count = load_word(&rows_from(args)[sent.source]);
  const Round round = this_round(args);
  if (round.has_failed || static_cast<uint32_t>(sent.place) >= count) return round;
  if (unit < end) put_data(args, plan, sent, unit, data, round.epoch);
  // Fewer threads than units: on the host.
  MOE_NVLINK_ROLLED
  for (unit += cta.num_threads; unit < end; unit += cta.num_threads) {
    load_data(plan, row, unit, data);
    put_data(args, plan, sent, unit, data, round.epoch);
  }
  return round;
}

// Sends this CTA's parts `item`, `item` + senders, ..., kPartsInFlight of them: all loads come
// before the first store.
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
    uint32_t data[kPartsInFlight][kUnitWords];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kPartsInFlight; ++i) {
      const int unit = sent[i].part * kPartUnits + lane;
      if (!present[i] || unit >= plan.units) continue;
      load_data(plan, sent_row(args, plan, sent[i]), unit, data[i]);
    }
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kPartsInFlight; ++i) {
      const int unit = sent[i].part * kPartUnits + lane;
      if (present[i] && unit < plan.units) put_data(args, plan, sent[i], unit, data[i], epoch);
    }
  }
}

// Sends this CTA's share of the received rows, of which `first` is the first part.
HD void send_rows(const CombineArgs& args, const Cta& cta, const SmallPlan& plan,
                  const SentPart& first, const char* first_row, SmallCombineShared& shared) {
  const int num_ranks = num_ranks_in(args.geometry);
  const int items_of_place = num_ranks * plan.parts;
  const int most_items = items_of_place * args.geometry.max_tokens_per_rank;
  if (cta.block >= most_items) return;
  const Round round = send_first_part(args, cta, plan, first, first_row);
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
    send_parts(args, cta, plan, item, num_items, round.epoch, shared.counts);
  }
}

// ---- P12.

// Ends this rank's part of the round. One CTA.
HD void publish_combined(const CombineArgs& args, const Cta& cta, uint32_t epoch, int element) {
  // P12, release: the experts of this rank have read its receive buffers, and the kernels before
  // this one have cleared what they have read of its stagings. If it were relaxed, a peer's next
  // units could come before these zeros, which would then take their place.
  signal_peers(args, cta, args.control.combine_cells, combine_cell(args, epoch));
  // The last thread: if threads outnumber the ranks, it has no peer to signal.
  if (cta.thread != cta.num_threads - 1) return;
  leave_combined(args, epoch, false);
  const uint64_t bytes = static_cast<uint64_t>(element_bytes(element));
  count_rows(args, row_sizes<kCombineUnquantised>(bytes, args.geometry.hidden_size));
}

// ---- The receiver's side.

// A unit of one partial row, which add_tree adds to its sums.
template <class Element>
struct UnitPart {
  using Word = typename Element::Storage;
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(Word));
  static constexpr int kWidth = kUnitWords * kPerWord;
  static constexpr uint32_t kAbsentWord =
      kPerWord == 2 ? Element::kMinusZero | Element::kMinusZero << 16 : Element::kMinusZero;
  Unit unit;

  HD void set_absent() { unit = pack_unit(kAbsentWord, kAbsentWord, kAbsentWord, 0); }
  HD void add_to(float* sums) const {
    uint32_t data[kUnitWords];
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

// Loads `words` words of the row that is added to a unit's sums: -0.0, which change no sum, after the
// row's end and if there is no row. aligned: as for store_unit_sums.
template <class Element>
HD void load_added(const char* row, int words, bool aligned, uint32_t* data) {
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kUnitWords; ++i) data[i] = UnitPart<Element>::kAbsentWord;
  if (row == nullptr) return;
  if (aligned) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kUnitWords; ++i) {
      if (i < words) data[i] = load_word(reinterpret_cast<const uint32_t*>(row) + i);
    }
    return;
  }
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(row);
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kUnitWords; ++i) {
    if (i >= words) continue;
    data[i] = load_word(halves + 2 * i) | static_cast<uint32_t>(load_word(halves + 2 * i + 1))
                                              << 16;
  }
}

// Rounds the sums once and stores `words` words of 4 bytes of them. aligned: the words lie on their
// boundaries.
template <class Element>
HD void store_unit_sums(char* target, const float* sums, int words, bool aligned) {
  using Part = UnitPart<Element>;
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kUnitWords; ++i) {
    uint32_t word = Element::from_float(sums[i * Part::kPerWord]);
    if constexpr (Part::kPerWord == 2) {
      word |= static_cast<uint32_t>(Element::from_float(sums[2 * i + 1])) << 16;
    }
    if (i >= words) break;
    if (aligned) {
      store_word(reinterpret_cast<uint32_t*>(target) + i, word);
    } else {
      store_word(reinterpret_cast<uint16_t*>(target) + 2 * i, static_cast<uint16_t>(word));
      store_word(reinterpret_cast<uint16_t*>(target) + 2 * i + 1,
                 static_cast<uint16_t>(word >> 16));
    }
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
template <class Element>
HD uint32_t await_units(int top_k, const int32_t* rows, int unit, uint32_t missing,
                        Receiving& receiving, UnitPart<Element>* parts) {
  const uint32_t mark = mark_of(receiving.epoch);
  Backoff backoff;
  while (true) {
    for_each_unit(receiving, top_k, rows, unit, missing,
                  [&](int k, const char* place) { parts[k].unit = look_at_unit(place); });
    // Never true. The branch stands between the looks and their use: without it, ptxas would move
    // the last looks behind the wait for the first ones, two trips to memory instead of one.
    if (unknown(missing) == 0) return 0;
    // P10: a word with the mark has the round's data. If only one of the two words were asked for
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
  using Part = UnitPart<Element>;
  const int top_k = top_k_of<Config>(args.geometry);
  Part parts[Config::kTopKBound];
  PartialRow partial[Config::kTopKBound];  // add_tree asks whether one is null (host)
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    parts[k].set_absent();
    partial[k].row = (present >> k & 1u) != 0 ? receiving.staging : nullptr;
  }
  const uint32_t missing = await_units<Element>(top_k, rows, unit, present, receiving, parts);
  if (missing != 0) {
    report_missing(args, plan, rows, missing, receiving);
    return false;
  }
  for_each_unit(receiving, top_k, rows, unit, present,
                [](int /*k*/, char* place) { clear_unit(place); });
  float sums[(Config::kTopKBound + 1) / 2][Part::kWidth];
  add_tree(parts, partial, top_k, sums);
  MOE_NVLINK_UNROLL
  for (int i = 0; i < Part::kWidth; ++i) sum[i] = sums[0][i];
  return true;
}

// Receives and adds one part of a token's row.
template <class Config, class Element>
HD void combine_part(const CombineArgs& args, const Cta& cta, const SmallPlan& plan, int token,
                     int part, const int32_t* rows, Receiving& receiving) {
  const uint64_t place = static_cast<uint64_t>(token) * static_cast<uint64_t>(plan.words) * 4;
  char* output = reinterpret_cast<char*>(args.output + place);
  const bool aligned = (args.output | args.add) % 4 == 0;
  const int top_k = top_k_of<Config>(args.geometry);
  uint32_t present = 0;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) present |= rows[k] >= 0 ? 1u << k : 0u;
  const Finish finish = finish_of(args);
  const int end = (part + 1) * kPartUnits < plan.units ? (part + 1) * kPartUnits : plan.units;
  for (int unit = part * kPartUnits + cta.thread; unit < end; unit += cta.num_threads) {
    const int offset = unit * kUnitDataBytes;
    const int words = plan.words - unit * kUnitWords;
    // On its way before the units: it is here when they are.
    uint32_t added[kUnitWords];
    load_added<Element>(finish.added_to(output + offset), words, aligned, added);
    // Without any row the output is zero. After a fault it is NaN, so nobody takes it for a result.
    float sum[UnitPart<Element>::kWidth];
    MOE_NVLINK_UNROLL
    for (float& value : sum) value = finish.adds ? -0.0f : 0.0f;
    if (present != 0 && !receiving.has_failed) {
      receiving.has_failed =
          !sum_units<Config, Element>(args, plan, rows, unit, present, receiving, sum);
    }
    // A token without any row is neither scaled nor added to: its zero stays +0.0.
    if (finish.is_needed() && (present != 0 || finish.adds)) {
      MOE_NVLINK_UNROLL
      for (float& value : sum) value *= finish.scale;
      UnitPart<Element>::add_words(added, sum);
    }
    MOE_NVLINK_UNROLL
    for (float& value : sum) value = receiving.has_failed ? float_of_bits(0x7fc00000u) : value;
    store_unit_sums<Element>(output + offset, sum, words, aligned);
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

template <class Config>
HD void small_combine_body(const CombineArgs& args, const Cta& cta, SmallCombineShared& shared) {
  const int element = Config::kElement >= 0 ? Config::kElement : args.geometry.element;
  const SmallPlan plan = small_plan(args, cta, element);
  const SmallRole& role = plan.role;
  // The last share is the publishing CTA's: its wait for the fence delays it, and if there are fewer
  // items than receivers, it has none.
  const int share = (role.publishes() ? role.num_receivers : role.receiver) - 1;
  const SentPart first = sent_part(args, plan, cta.block);
  const char* first_row = sent_row(args, plan, first);
  // A store needs the address, so it is computed before the wait: ptxas moves arithmetic behind it.
  if (cta.thread == 0) shared.first_row = first_row;
  // Slots, rows and the epoch come from kernels before this one. dispatch.cu explains both calls.
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  if (role.sends()) send_rows(args, cta, plan, first, first_row, shared);
  if (!role.receives()) return;
  const Round round = this_round(args);
  if (share / plan.parts < args.geometry.num_tokens) {
    find_staged_rows<Config>(args, cta, plan, share / plan.parts, shared.rows[0]);
  }
  if (role.publishes() && !round.has_failed) publish_combined(args, cta, round.epoch, element);
  static_assert(kNumElements == 3);
  if (element == kElementBf16) receive_rows<Config, Bf16>(args, cta, plan, share, round, shared);
  if (element == kElementFp16) receive_rows<Config, Fp16>(args, cta, plan, share, round, shared);
  if (element == kElementFp32) receive_rows<Config, Fp32>(args, cta, plan, share, round, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_small_combine, CombineArgs, SmallCombineShared, small_combine_body)
