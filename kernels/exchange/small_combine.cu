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
//               fp32 as combine.cu does, round once and store
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

namespace moe_nvlink {

// Units of a part: what the threads of a CTA take of a row at a time.
constexpr int kPartUnits = kPartBytes / kUnitDataBytes;
constexpr int kUnitWords = kUnitDataBytes / 4;
// Parts after its first one that a sender has on their way together.
constexpr int kPartsInFlight = 4;

struct SmallCombineShared {
  uint32_t counts[kMaxRanks];  // senders: rows received from each rank
  int32_t rows[2][kMaxTopK];   // receivers: first unit of the row in the staging, or kNoSlot: of
};  // this item, of the next

// Sizes of a row, and what the launch's roles are. From arguments only.
struct SmallPlan {
  int words;     // of 4 bytes
  int units;     // of a row
  int parts;     // of a row
  int sent;      // step of the senders: how many CTAs send
  int receiver;  // first CTA that receives
};

HD SmallPlan small_plan(const CombineArgs& args, const Cta& cta, int element) {
  const int row_bytes = args.geometry.hidden_size * element_bytes(element);
  const int units = units_of(row_bytes);
  const int senders = static_cast<int>(args.senders);
  const bool split = senders > 0 && senders < cta.num_blocks;
  return SmallPlan{row_bytes / 4, units, (units + kPartUnits - 1) / kPartUnits,
                   split ? senders : cta.num_blocks, split ? senders : 0};
}

// The staging of a rank for the rounds with this epoch's parity.
HD char* staging_of(const CombineArgs& args, int rank, uint32_t epoch) {
  return region_of(args, rank, epoch % 2 == 0 ? args.even_staging_region : args.odd_staging_region);
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

HD const char* sent_row(const CombineArgs& args, const SmallPlan& plan, const SentPart& sent) {
  const int slot = sent.source * args.geometry.max_tokens_per_rank + sent.place;
  return region_of(args, rank_in(args.geometry), args.region) +
         static_cast<int64_t>(slot) * plan.words * 4;
}

HD char* sent_staging(const CombineArgs& args, const SmallPlan& plan, const SentPart& sent,
                      uint32_t epoch) {
  const int slot = rank_in(args.geometry) * args.geometry.max_tokens_per_rank + sent.place;
  return staging_of(args, sent.source, epoch) +
         static_cast<int64_t>(slot) * plan.units * kUnitBytes;
}

// Sends `Count` parts; all their loads come first. loads[i]: whether the part's memory is loaded;
// sends[i]: whether there is such a row, which may become known after the loads have been issued.
template <int Count>
HD void send_parts(const CombineArgs& args, const Cta& cta, const SmallPlan& plan, uint32_t epoch,
                   const SentPart* sent, const bool* loads, const bool* sends) {
  for (int lane = cta.thread; lane < kPartUnits; lane += cta.num_threads) {
    uint32_t words[Count][kUnitWords];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Count; ++i) {
      const int unit = sent[i].part * kPartUnits + lane;
      if (!loads[i] || unit >= plan.units) continue;
      const uint32_t* row = reinterpret_cast<const uint32_t*>(sent_row(args, plan, sent[i]));
      MOE_NVLINK_UNROLL
      for (int word = 0; word < kUnitWords; ++word) {
        // After the end of the row the last word is repeated. Nobody reads it.
        const int place = unit * kUnitWords + word;
        words[i][word] = load_word(row + (place < plan.words ? place : plan.words - 1));
      }
    }
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Count; ++i) {
      const int unit = sent[i].part * kPartUnits + lane;
      if (!sends[i] || unit >= plan.units) continue;
      char* target = sent_staging(args, plan, sent[i], epoch) + unit * kUnitBytes;
      put_unit(target, pack_unit(words[i][0], words[i][1], words[i][2], mark_of(epoch)));
    }
  }
}

// Sends this CTA's share of the received rows.
HD void send_rows(const CombineArgs& args, const Cta& cta, const SmallPlan& plan,
                  const SentPart& first, uint32_t epoch, bool failed, SmallCombineShared& shared) {
  const int num_ranks = num_ranks_in(args.geometry);
  const int row_parts = num_ranks * plan.parts;
  const int most_items = row_parts * args.geometry.max_tokens_per_rank;
  if (cta.block >= most_items) return;
  const bool loads = true;
  const bool sends = static_cast<uint32_t>(first.place) < load_word(&rows_from(args)[first.source]);
  const bool sends_now = sends && !failed;
  send_parts<1>(args, cta, plan, epoch, &first, &loads, &sends_now);
  if (cta.block + plan.sent >= most_items) return;
  for_each_peer(args, cta, [&](int peer) {
    shared.counts[peer] = failed ? 0 : load_word(&rows_from(args)[peer]);
  });
  cta.sync();  // counts of all ranks
  uint32_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    most = shared.counts[rank] > most ? shared.counts[rank] : most;
  }
  const int num_items = static_cast<int>(most) * row_parts;
  MOE_NVLINK_ROLLED
  for (int item = cta.block + plan.sent; item < num_items; item += kPartsInFlight * plan.sent) {
    SentPart sent[kPartsInFlight];
    bool present[kPartsInFlight];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kPartsInFlight; ++i) {
      const int here = item + i * plan.sent;
      sent[i] = sent_part(args, plan, here);
      present[i] =
          here < num_items && static_cast<uint32_t>(sent[i].place) < shared.counts[sent[i].source];
    }
    send_parts<kPartsInFlight>(args, cta, plan, epoch, sent, present, present);
  }
}

// ---- P12.

// Ends this rank's part of the round. One CTA.
HD void publish_combined(const CombineArgs& args, const Cta& cta, uint32_t epoch, int element) {
  // P12, release: the experts of this rank have read its receive buffers, and the kernels before
  // this one have cleared what they have read of its stagings. If it were relaxed, a peer's next
  // units could come before these zeros, which would then take their place.
  signal_peers(args, cta, args.control.combine_cells, pack_cell(epoch, 0, 0));
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
  Unit unit;

  HD void set_absent() {
    uint32_t word = Element::kMinusZero;
    if constexpr (kPerWord == 2) word |= word << 16;
    unit = pack_unit(word, word, word, 0);
  }
  HD void add_to(float* sums) const {
    uint32_t data[kUnitWords];
    unit.unpack(data);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t word = data[i / kPerWord];
      sums[i] += Element::to_float(static_cast<Word>(i % kPerWord == 0 ? word : word >> 16));
    }
  }
};

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

// What a receiving thread needs besides the arguments.
struct Receiving {
  const char* staging;
  uint32_t epoch;
  bool faulted;  // this thread stores NaN from now on
  Patience patience;
};

HD char* staged_unit(const Receiving& receiving, int row, int unit) {
  return const_cast<char*>(receiving.staging) + static_cast<int64_t>(row + unit) * kUnitBytes;
}

// Names the rank whose unit is missing, the first of them.
HD void report_missing(const CombineArgs& args, const SmallPlan& plan, const int32_t* rows,
                       uint32_t missing, Receiving& receiving) {
  int k = 0;
  while ((missing >> k & 1u) == 0) ++k;
  const int peer = rows[k] / (plan.units * args.geometry.max_tokens_per_rank);
  report_fault(args, args.control.combine_cells, kFaultTimeout, kPhaseCombine, peer,
               receiving.epoch, receiving.patience);
}

// Waits for the units of every k that `present` has a bit for. All looks of a turn are on their way
// together, and each turn looks only at what had not arrived. False if the time is over.
template <class Config, class Element>
HD bool await_units(const CombineArgs& args, const int32_t* rows, int unit, uint32_t present,
                    Receiving& receiving, UnitPart<Element>* parts, uint32_t& missing) {
  const int top_k = top_k_of<Config>(args.geometry);
  const uint32_t mark = mark_of(receiving.epoch);
  Backoff backoff;
  missing = present;
  while (true) {
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      if ((missing >> k & 1u) != 0) {
        parts[k].unit = look_at_unit(staged_unit(receiving, rows[k], unit));
      }
    }
    // P10: a word with the mark has the round's data, and the look is relaxed. If only one of the
    // two words were asked for its mark, the other one's data might be zeros.
    MOE_NVLINK_UNROLL
    for (int k = 0; k < top_k; ++k) {
      if (parts[k].unit.has_arrived(mark)) missing &= ~(1u << k);
    }
    if (missing == 0) return true;
    const uint64_t waited = receiving.patience.waited_ns();
    if (waited > receiving.patience.timeout_ns) return false;
    backoff.pause(waited);
  }
}

// Receives and adds one part of a token's row.
template <class Config, class Element>
HD void combine_part(const CombineArgs& args, const Cta& cta, const SmallPlan& plan, int token,
                     int part, const int32_t* shared_rows, Receiving& receiving) {
  using Part = UnitPart<Element>;
  const int top_k = top_k_of<Config>(args.geometry);
  char* output =
      reinterpret_cast<char*>(args.output) + static_cast<int64_t>(token) * plan.words * 4;
  const bool aligned = args.output % 4 == 0;
  int32_t rows[Config::kTopKBound];
  PartialRow partial[Config::kTopKBound];  // add_tree asks whether they are null (host)
  uint32_t present = 0;
  MOE_NVLINK_UNROLL
  for (int k = 0; k < top_k; ++k) {
    rows[k] = shared_rows[k];
    partial[k].row = rows[k] >= 0 ? receiving.staging : nullptr;
    present |= rows[k] >= 0 ? 1u << k : 0u;
  }
  const int end = (part + 1) * kPartUnits < plan.units ? (part + 1) * kPartUnits : plan.units;
  for (int unit = part * kPartUnits + cta.thread; unit < end; unit += cta.num_threads) {
    const int words = plan.words - unit * kUnitWords;
    char* target = output + unit * kUnitDataBytes;
    Part parts[Config::kTopKBound];
    float sums[(Config::kTopKBound + 1) / 2][Part::kWidth];
    if (present != 0 && !receiving.faulted) {
      MOE_NVLINK_UNROLL
      for (int k = 0; k < top_k; ++k) parts[k].set_absent();
      uint32_t missing = 0;
      if (await_units<Config>(args, rows, unit, present, receiving, parts, missing)) {
        MOE_NVLINK_UNROLL
        for (int k = 0; k < top_k; ++k) {
          if (rows[k] >= 0) clear_unit(staged_unit(receiving, rows[k], unit));
        }
        add_tree(parts, partial, top_k, sums);
        store_unit_sums<Element>(target, sums[0], words, aligned);
        continue;
      }
      report_missing(args, plan, shared_rows, missing, receiving);
      receiving.faulted = true;
    }
    // Without rows the output is zero. After a fault it is NaN, so nobody takes it for a result.
    MOE_NVLINK_UNROLL
    for (int i = 0; i < Part::kWidth; ++i) {
      sums[0][i] = receiving.faulted ? float_of_bits(0x7fc00000u) : 0.0f;
    }
    store_unit_sums<Element>(target, sums[0], words, aligned);
  }
}

// Combines this CTA's share of the tokens' parts. The last share is the signalling CTA's: it comes
// late, and if there are fewer parts than receivers, it has none.
template <class Config, class Element>
HD void receive_rows(const CombineArgs& args, const Cta& cta, const SmallPlan& plan,
                     Receiving receiving, SmallCombineShared& shared) {
  const int receivers = cta.num_blocks - plan.receiver;
  const int share = cta.block == plan.receiver ? receivers - 1 : cta.block - plan.receiver - 1;
  const int num_items = args.geometry.num_tokens * plan.parts;
  if (share >= num_items) return;
  int token = share / plan.parts;
  find_staged_rows<Config>(args, cta, plan, token, shared.rows[0]);
  cta.sync();  // rows of the first item
  int turn = 0;
  MOE_NVLINK_ROLLED
  for (int item = share; item < num_items; item += receivers) {
    const int next = (item + receivers) / plan.parts;
    if (next < args.geometry.num_tokens) {
      find_staged_rows<Config>(args, cta, plan, next, shared.rows[1 - turn]);
    }
    combine_part<Config, Element>(args, cta, plan, token, item - token * plan.parts,
                                  shared.rows[turn], receiving);
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
  const bool receives = cta.block >= plan.receiver;
  const bool sends = !receives || plan.receiver == 0;
  const SentPart first = sent_part(args, plan, cta.block);
  // Slots, rows and the epoch come from kernels before this one. dispatch.cu explains both calls.
  if constexpr (Config::kPdl) pdl_wait();
  if constexpr (Config::kPdl) pdl_launch_dependents();
  // Every thread for itself, and two loads in flight together: no barrier precedes the units.
  const uint32_t epoch = load_word(&local_control(args)->epoch);
  const bool failed = has_failed(args);
  if (sends) send_rows(args, cta, plan, first, epoch, failed, shared);
  if (!receives) return;
  if (cta.block == plan.receiver && !failed) publish_combined(args, cta, epoch, element);
  const char* staging = staging_of(args, rank_in(args.geometry), epoch);
  const Receiving receiving{staging, epoch, failed, Patience(args.timeout_ns)};
  static_assert(kNumElements == 3);
  if (element == kElementBf16) receive_rows<Config, Bf16>(args, cta, plan, receiving, shared);
  if (element == kElementFp16) receive_rows<Config, Fp16>(args, cta, plan, receiving, shared);
  if (element == kElementFp32) receive_rows<Config, Fp32>(args, cta, plan, receiving, shared);
}

}  // namespace moe_nvlink

MOE_NVLINK_KERNEL(moe_nvlink_small_combine, CombineArgs, SmallCombineShared, small_combine_body)
