// Dispatch and combine of several ranks as threads of one program, for the sanitizers to look at.
// The build puts the amalgamated kernel text (moe_nvlink_plugin.jit.source) beside this file's
// include path as kernel_text.h, and sets MOE_NVLINK_CTA_THREADS.
//
// Between the ranks nothing orders anything but the protocol itself: no barrier, no join, no lock.
// When the last rank ends, and the others go on without it, a flag says so.
// Every rank checks what it received and what it combined by the rows' content alone. Exit status 1
// says that a value was wrong; a sanitizer has a status of its own.
#include "kernel_text.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace {

using moe_nvlink::kRegionAlignment;

constexpr int kRanks = 3;
constexpr int kBlocks = 3;
constexpr int kExperts = 7;
constexpr int kTopK = 4;
constexpr int kHidden = 36;  // fp32: 144 bytes, one wide vector and a rest
constexpr int kCapacity = 12;
constexpr int kRounds = 37;
// Then the last rank ends, and the others go on without it: so many rounds in which it is left out,
// and as many after they have met and cleared their memory. The last of the first ones is small. Its
// own last combine pulls (P14).
constexpr int kRoundsWithout = 8;
constexpr uint64_t kSurvivors = (1u << (kRanks - 1)) - 1;
constexpr int kExtraBytes = 132;  // of an extra payload's row, the most
constexpr int kSlots = kRanks * kCapacity;
constexpr int kGivenId = kExperts + 3;  // for experts that a rank does not have
constexpr int kMostHidden = 256;        // of dispatch's rows in rounds that quantise
constexpr int kMostScales = 12;         // bytes of a row's scales
constexpr int kLaidOutBytes = 128 * kMostScales;
constexpr int kBackHidden = 1280;      // of combine's rows in rounds that have a format
constexpr int kPayloadAlignment = 16;  // in a packed row
constexpr int kMostPackedBytes = 512;
// Of units of the kind of which a row takes more.
const size_t kStagingBytes = static_cast<size_t>(kSlots) * moe_nvlink::kUnitBytes *
                             moe_nvlink::units_of<moe_nvlink::TwoMarkUnit>(kMostPackedBytes);
const size_t kBackStagingBytes = static_cast<size_t>(kSlots) * moe_nvlink::kUnitBytes *
                                 moe_nvlink::units_of<moe_nvlink::TwoMarkUnit>(kHidden * 4);

std::atomic<int> mistakes{0};
std::atomic<int> gone_on{0};  // ranks that have done rounds without the last one

void expect(bool good, const char* what, int rank, int round) {
  if (!good && mistakes.fetch_add(1) < 5) {
    std::fprintf(stderr, "WRONG VALUE: %s on rank %d in round %d\n", what, rank, round);
  }
}

// Regions in the order they are asked for, each followed by bytes that nobody may touch.
class Layout {
 public:
  uint32_t add(size_t bytes) {
    const size_t offset = end_;
    end_ = align(offset + bytes) + kRegionAlignment;
    gaps_.push_back({offset + bytes, end_});
    return static_cast<uint32_t>(offset / kRegionAlignment);
  }
  size_t bytes() const { return end_; }
  void poison_gaps(char* base) const {
    for (const Gap& gap : gaps_) ASAN_POISON_MEMORY_REGION(base + gap.from, gap.to - gap.from);
  }

 private:
  struct Gap {
    size_t from;
    size_t to;
  };
  static size_t align(size_t size) {
    return (size + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  }
  size_t end_ = 0;
  std::vector<Gap> gaps_;
};

struct Regions {
  Layout layout;
  moe_nvlink::ControlRegions control{};
  uint32_t ids = 0;
  uint32_t weights = 0;
  uint32_t hidden = 0;
  uint32_t scales = 0;
  uint32_t laid_out = 0;
  uint32_t extra = 0;
  uint32_t combine = 0;
  uint32_t back_rows = 0;
  uint32_t back_scales = 0;
  uint32_t back_row_scales = 0;
  uint32_t staging = 0;
  uint32_t back_staging[2] = {0, 0};  // of rounds of even and of odd epochs

  Regions() {
    control.dispatch_cells = layout.add(kRanks * 8);
    control.combine_cells = layout.add(kRanks * 8);
    control.pulled_cells = layout.add(kRanks * 8);
    control.recv_counts = layout.add(kRanks * 4);
    control.rows_from = layout.add(kRanks * 4);
    control.send_counters = layout.add(kRanks * 4);
    control.local = layout.add(sizeof(moe_nvlink::LocalControl));
    control.counters = layout.add(sizeof(moe_nvlink::ExchangeCounters));
    control.wait_totals = layout.add(kRanks * 8);
    control.meeting = layout.add(kRanks * (3 * moe_nvlink::kMeetingWords + 1) * 8);
    ids = layout.add(kSlots * kTopK * 4);
    weights = layout.add(kSlots * kTopK * 4);
    hidden = layout.add(kSlots * kMostHidden);
    scales = layout.add(kSlots * kMostScales);
    laid_out = layout.add(kLaidOutBytes);
    extra = layout.add(kSlots * kExtraBytes);
    combine = layout.add(kSlots * kBackHidden * 4);
    back_rows = layout.add(kSlots * kBackHidden);
    back_scales = layout.add(kSlots * kBackHidden / 16);
    back_row_scales = layout.add(kSlots * 4);
    staging = layout.add(kStagingBytes);
    for (uint32_t& each : back_staging) each = layout.add(kBackStagingBytes);
  }
};

struct Random {
  uint32_t state;
  uint32_t below(uint32_t limit) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state % limit;
  }
};

// What one token's rows hold, so that a receiver can check them without asking the sender.
float hidden_value(int stamp, int element) {
  return static_cast<float>(stamp % 4096 + element);
}
float added_value(int stamp, int element) {
  return static_cast<float>(stamp % 512 - 3 * element);
}
unsigned char extra_value(int stamp, int byte) {
  return static_cast<unsigned char>(stamp + byte);
}
float partial_value(int target, float hidden) {
  return hidden * static_cast<float>(target + 1);
}

// What this build has of the formats; a test of the protocol alone is compiled without them.
constexpr bool kHasFormats = Config::kCombine < 0;
constexpr bool kHasQuantisers = Config::kQuantiser < 0;

// Rounds take turns with the formats of combine.
int format_of(int round) {
  return kHasFormats ? round % moe_nvlink::kNumCombineFormats : moe_nvlink::kCombineUnquantised;
}

// How dispatch quantises in a round: element counts that leave some threads without a block, and one
// that no vector divides.
struct Quantised {
  int quantiser;
  int hidden;
  int row_bytes;
  int scale_bytes;
  float global_scale;
};

const Quantised& quantised(int round) {
  static constexpr Quantised kAll[] = {
      {moe_nvlink::kQuantiserNone, kHidden, kHidden * 4, 0, 0.0f},
      {moe_nvlink::kQuantiserFp8Block, 256, 256, 8, 0.0f},
      {moe_nvlink::kQuantiserFp8Token, kHidden, kHidden, 4, 0.0f},
      {moe_nvlink::kQuantiserFp8Tensor, kHidden, kHidden, 0, 8.0f},
      {moe_nvlink::kQuantiserMxfp8, 256, 256, 8, 0.0f},
      {moe_nvlink::kQuantiserNvfp4, 192, 96, 12, 0.9f},
      {moe_nvlink::kQuantiserFp8BlockPow2, 256, 256, 8, 0.0f},
  };
  return kAll[kHasQuantisers ? round / 4 % moe_nvlink::kNumQuantisers : 0];
}

// What experts read takes turns too: ids and weights, and the layout of the scales.
int received_ids(int round) {
  return round % moe_nvlink::kNumReceivedIds;
}
int scales_layout(int round) {
  if (round % 2 == 0 || quantised(round).scale_bytes == 0) return moe_nvlink::kScalesLayoutLinear;
  const int quantiser = quantised(round).quantiser;
  const bool bytes =
      quantiser == moe_nvlink::kQuantiserMxfp8 || quantiser == moe_nvlink::kQuantiserNvfp4;
  return bytes ? moe_nvlink::kScalesLayoutInterleaved : moe_nvlink::kScalesLayoutColumnMajor;
}
// Rounds of both kinds follow each other in every order. A format's rows travel back by combine.cu.
bool is_small(int round) {
  return (round / 2 + round / 5) % 2 == 0;
}
// Small batches have whole words.
int extra_bytes(int round) {
  return is_small(round) ? kExtraBytes : kExtraBytes - 1;
}
bool combines_small(int round) {
  return is_small(round) && format_of(round) == moe_nvlink::kCombineUnquantised;
}
// Combine adds nothing, then rows where it stores its own, then rows of their own memory.
bool adds(int round) {
  return round % 3 != 0;
}
bool adds_in_place(int round) {
  return round % 3 == 1;
}
float scale_of(int round) {
  return round / 4 % 2 == 0 ? 1.0f : -2.0f;
}
bool has_mask(int round) {
  return round % 5 < 2;
}

// Reads rows whose bits are held to torch's elsewhere.
void look_at(const char* bytes, size_t size) {
  volatile char seen = 0;
  for (size_t i = 0; i < size; ++i) seen = bytes[i];
  (void)seen;
}

int back_hidden(int round) {
  return format_of(round) == moe_nvlink::kCombineUnquantised ? kHidden : kBackHidden;
}

// An element of a partial row that travels quantised, of which nothing is lost: blocks and rows have
// an amax that makes their scale 1, or 448 in nvfp4's first block, and e4m3 and e2m1 have the rest.
float quantised_value(int format, int stamp, int target, int element) {
  static constexpr float kSmall[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const float small = kSmall[(stamp + target + element) % 8];
  if (format == moe_nvlink::kCombineFp8Block) return element % 128 == 0 ? 448.0f : small;
  if (format == moe_nvlink::kCombineFp8Tensor) return small;
  if (element < 16) return element == 0 ? 2688.0f : 0.0f;
  return element % 16 == 0 ? 6.0f : -small;
}

// What rank `target` makes of a token, however it travels.
float partial_value_of(int round, int stamp, int target, int element) {
  if (format_of(round) == moe_nvlink::kCombineUnquantised) {
    return partial_value(target, hidden_value(stamp, element));
  }
  return quantised_value(format_of(round), stamp, target, element);
}

int owner_of(int expert) {
  if (expert < 0) return -1;
  for (int rank = 0, first = 0; rank < kRanks; ++rank) {
    first += kExperts / kRanks + (rank < kExperts % kRanks ? 1 : 0);
    if (expert < first) return rank;
  }
  return -1;
}

// The rank that gets a token because of this expert; negative: none.
int target_of(int expert, int round) {
  const int owner = owner_of(expert);
  return round >= kRounds && owner == kRanks - 1 ? -1 : owner;
}

int first_expert(int rank) {
  int first = 0;
  while (owner_of(first) < rank) ++first;
  return first;
}

// What stands for an expert that a rank does not have.
int absent_id(int rank, int round) {
  if (received_ids(round) == moe_nvlink::kReceivedIdsGiven) return kGivenId;
  if (received_ids(round) != moe_nvlink::kReceivedIdsElsewhere) return -1;
  return rank + 1 < kRanks ? first_expert(rank + 1) : 0;
}

struct Rank {
  int rank;
  const Regions& regions;
  char* window;
  moe_nvlink::host::Grid grid{kBlocks};
  // Of this round; sized exactly, so that the address sanitizer sees one step too far.
  int hidden_size = 0;
  int extra_size = 0;
  std::vector<int32_t> ids{}, slots{};
  std::vector<float> weights{}, hidden{}, output{}, added{};
  std::vector<unsigned char> extra{}, padding{};

  char* mine(uint32_t region) const {
    return window + rank * regions.layout.bytes() + static_cast<size_t>(region) * kRegionAlignment;
  }

  void make_tokens(Random& random, int round, int count) {
    ids.assign(count * kTopK, 0);
    slots.assign(count * kTopK, 0);
    weights.assign(count * kTopK, 0.0f);
    hidden_size = quantised(round).hidden;
    hidden.assign(count * hidden_size, 0.0f);
    output.assign(count * back_hidden(round), 0.0f);
    added.assign(adds(round) ? output.size() : 0, 0.0f);
    extra_size = extra_bytes(round);
    extra.assign(count * extra_size, 0);
    padding.assign(count, 0);
    for (int token = 0; token < count; ++token) {
      const int stamp = round * 64 + rank * 16 + token;
      const bool padded = random.below(4) == 0;
      padding[token] = has_mask(round) && random.below(4) == 0;
      for (int k = 0; k < kTopK; ++k) {
        const int id = static_cast<int>(random.below(kExperts + 2)) - 1;
        ids[token * kTopK + k] = padded ? -1 : id;
        weights[token * kTopK + k] = static_cast<float>(stamp);
      }
      for (int i = 0; i < hidden_size; ++i) {
        hidden[token * hidden_size + i] = hidden_value(stamp, i);
      }
      for (int i = 0; i < extra_size; ++i) extra[token * extra_size + i] = extra_value(stamp, i);
      const int width = adds(round) ? back_hidden(round) : 0;
      for (int i = 0; i < width; ++i) added[token * width + i] = added_value(stamp, i);
    }
    if (adds_in_place(round)) output.swap(added);
  }

  bool is_padded(int token) const {
    if (padding[token] != 0) return true;
    for (int k = 0; k < kTopK; ++k) {
      if (owner_of(ids[token * kTopK + k]) >= 0) return false;
    }
    return true;
  }

  // Rows of tokens that go nowhere may not even be read.
  void forbid_padded_rows(int count) {
    for (int token = 0; token < count; ++token) {
      if (!is_padded(token)) continue;
      ASAN_POISON_MEMORY_REGION(&weights[token * kTopK], kTopK * 4);
      ASAN_POISON_MEMORY_REGION(&hidden[token * hidden_size], hidden_size * 4);
      ASAN_POISON_MEMORY_REGION(&extra[token * extra_size], extra_size);
    }
  }

  void allow_all_rows() {
    ASAN_UNPOISON_MEMORY_REGION(weights.data(), weights.size() * 4);
    ASAN_UNPOISON_MEMORY_REGION(hidden.data(), hidden.size() * 4);
    ASAN_UNPOISON_MEMORY_REGION(extra.data(), extra.size());
  }

  template <class Args>
  Args common(int count) const {
    auto args = common_of_all<Args>(count);
    args.send_slots = reinterpret_cast<uint64_t>(slots.data());
    return args;
  }

  template <class Args>
  Args common_of_all(int count) const {
    Args args{};
    args.window_base = reinterpret_cast<uint64_t>(window);
    args.rank_stride = regions.layout.bytes();
    args.timeout_ns = 100ull * 1000000000ull;
    args.geometry = {kRanks, rank, kExperts, kTopK, kHidden, kCapacity, moe_nvlink::kElementFp32,
                     count,  0};
    args.control = regions.control;
    return args;
  }

  void dispatch(int round, int count) {
    const Quantised& how = quantised(round);
    auto args = common<moe_nvlink::DispatchArgs>(count);
    args.geometry.hidden_size = hidden_size;
    args.quantiser = static_cast<uint32_t>(how.quantiser);
    if (how.global_scale != 0) args.global_scale = reinterpret_cast<uint64_t>(&how.global_scale);
    args.payloads[0] = {reinterpret_cast<uint64_t>(ids.data()), regions.ids, kTopK * 4};
    args.payloads[1] = {reinterpret_cast<uint64_t>(weights.data()), regions.weights, kTopK * 4};
    args.payloads[2] = {reinterpret_cast<uint64_t>(hidden.data()), regions.hidden,
                        static_cast<uint32_t>(how.row_bytes)};
    args.received_ids = static_cast<uint32_t>(received_ids(round));
    args.absent_id = kGivenId;
    args.scales_layout = static_cast<uint32_t>(scales_layout(round));
    args.laid_out_region = regions.laid_out;
    if (has_mask(round)) args.is_padding = reinterpret_cast<uint64_t>(padding.data());
    if (round >= kRounds) args.active_ranks = reinterpret_cast<uint64_t>(&kSurvivors);
    args.num_payloads = 3;
    if (how.scale_bytes != 0) {
      args.payloads[args.num_payloads++] = {0, regions.scales,
                                            static_cast<uint32_t>(how.scale_bytes)};
    }
    args.payloads[args.num_payloads++] = {reinterpret_cast<uint64_t>(extra.data()), regions.extra,
                                          static_cast<uint32_t>(extra_size)};
    for (uint32_t i = 0; i < args.num_payloads; ++i) {
      args.packed_offsets[i] = args.packed_bytes;
      args.packed_bytes += (args.payloads[i].row_bytes + kPayloadAlignment - 1) /
                           kPayloadAlignment * kPayloadAlignment;
    }
    args.staging_region = regions.staging;
    if (is_small(round)) {
      expect(args.packed_bytes <= kMostPackedBytes, "packed row", rank, round);
      // It loads a row while it looks for the row's targets.
      moe_nvlink_small_dispatch(&args, &grid);
      return;
    }
    forbid_padded_rows(count);
    moe_nvlink_dispatch(&args, &grid);
    allow_all_rows();
  }

  // Checks the received rows, writes the partial rows.
  void run_experts(int round) {
    const auto* counts = reinterpret_cast<const int32_t*>(mine(regions.control.recv_counts));
    auto* partial_rows = reinterpret_cast<float*>(mine(regions.combine));
    look_at(mine(regions.laid_out), kLaidOutBytes);
    for (int slot = 0; slot < kSlots; ++slot) {
      const auto* slot_ids = reinterpret_cast<const int32_t*>(mine(regions.ids)) + slot * kTopK;
      const bool filled = slot % kCapacity < counts[slot / kCapacity];
      bool has_expert = false;
      for (int k = 0; k < kTopK; ++k) {
        has_expert = has_expert || is_local(slot_ids[k], round);
        expect(filled || slot_ids[k] == absent_id(rank, round), "id of an empty slot", rank, round);
      }
      expect(filled == has_expert, "a row without a local expert", rank, round);
      check_weights(slot, filled, round);
      if (filled) check_row(slot, round);
      // Written in empty slots too, over and over: nobody may read those.
      const int width = back_hidden(round);
      const int stamp = filled ? stamp_of(slot) : 0;
      for (int i = 0; i < width; ++i) {
        partial_rows[slot * width + i] = filled ? partial_value_of(round, stamp, rank, i) : -1e30f;
      }
    }
  }

  bool is_local(int id, int round) const {
    if (received_ids(round) == moe_nvlink::kReceivedIdsLocal) return id >= 0;
    return owner_of(id) == rank;
  }

  const float* weights_of(int slot) const {
    return reinterpret_cast<const float*>(mine(regions.weights)) + slot * kTopK;
  }

  // All weights of a token are its stamp; those of experts that this rank does not have may be 0.
  int stamp_of(int slot) const {
    return static_cast<int>(*std::max_element(weights_of(slot), weights_of(slot) + kTopK));
  }

  void check_weights(int slot, bool filled, int round) const {
    if (received_ids(round) == moe_nvlink::kReceivedIdsGlobal) return;
    const auto* slot_ids = reinterpret_cast<const int32_t*>(mine(regions.ids)) + slot * kTopK;
    for (int k = 0; k < kTopK; ++k) {
      const bool local = filled && is_local(slot_ids[k], round);
      const float expected = local ? static_cast<float>(stamp_of(slot)) : 0.0f;
      expect(weights_of(slot)[k] == expected, "weight", rank, round);
      expect(local || slot_ids[k] == absent_id(rank, round), "absent id", rank, round);
    }
  }

  void check_row(int slot, int round) const {
    const auto* bytes =
        reinterpret_cast<const unsigned char*>(mine(regions.extra)) + slot * extra_bytes(round);
    const int stamp = stamp_of(slot);
    expect(stamp / 64 == round && stamp / 16 % 4 == slot / kCapacity, "origin", rank, round);
    const Quantised& how = quantised(round);
    const char* row = mine(regions.hidden) + slot * how.row_bytes;
    look_at(row, how.row_bytes);
    look_at(mine(regions.scales) + slot * how.scale_bytes, how.scale_bytes);
    for (int i = 0; i < kHidden && how.quantiser == moe_nvlink::kQuantiserNone; ++i) {
      const float found = reinterpret_cast<const float*>(row)[i];
      expect(found == hidden_value(stamp, i), "hidden state", rank, round);
    }
    for (int i = 0; i < extra_bytes(round); ++i) {
      expect(bytes[i] == extra_value(stamp, i), "extra payload", rank, round);
    }
  }

  void combine(int round, int count) {
    auto args = common<moe_nvlink::CombineArgs>(count);
    args.output = reinterpret_cast<uint64_t>(output.data());
    const std::vector<float>& rows = adds_in_place(round) ? output : added;
    if (adds(round)) args.add = reinterpret_cast<uint64_t>(rows.data());
    args.scale = scale_of(round);
    args.rows_factor = 1.0f;
    args.is_masked = round >= kRounds ? 1 : 0;
    args.tells_end = 1;
    args.region = regions.combine;
    args.hidden_splits = 1 + static_cast<uint32_t>(round) / 3 % 3;
    args.format = static_cast<uint32_t>(format_of(round));
    args.rows_region = regions.back_rows;
    args.scales_region = regions.back_scales;
    args.row_scales_region = regions.back_row_scales;
    args.geometry.hidden_size = back_hidden(round);
    args.even_staging_region = regions.back_staging[0];
    args.odd_staging_region = regions.back_staging[1];
    if (combines_small(round)) {
      moe_nvlink_small_combine(&args, &grid);
    } else {
      moe_nvlink_combine(&args, &grid);
    }
  }

  // Small whole numbers: their sums are exact in any order.
  void check_output(int count, int round) const {
    for (int token = 0; token < count; ++token) {
      bool goes_to[kRanks] = {};
      for (int k = 0; k < kTopK; ++k) {
        const int expert = ids[token * kTopK + k];
        const bool goes = target_of(expert, round) >= 0 && padding[token] == 0;
        if (goes) goes_to[owner_of(expert)] = true;
      }
      const int width = back_hidden(round);
      const int stamp = round * 64 + rank * 16 + token;
      for (int i = 0; i < width; ++i) {
        float sum = 0;
        for (int target = 0; target < kRanks; ++target) {
          if (goes_to[target]) sum += partial_value_of(round, stamp, target, i);
        }
        sum *= scale_of(round);
        if (adds(round)) sum += added_value(stamp, i);
        expect(output[token * width + i] == sum, "combined row", rank, round);
      }
    }
  }

  void meet(uint64_t number) {
    auto args = common_of_all<moe_nvlink::MeetArgs>(0);
    args.active_ranks[0] = kSurvivors;
    args.number = number;
    moe_nvlink_meet(&args, &grid);
    const auto* outcomes = reinterpret_cast<const uint64_t*>(mine(regions.control.meeting)) +
                           2 * kRanks * moe_nvlink::kMeetingWords;
    for (int peer = 0; peer < kRanks; ++peer) {
      const auto* taken = outcomes + peer * (moe_nvlink::kMeetingWords + 1);
      expect(*taken == 0, "a meeting's outcome", rank, static_cast<int>(number));
    }
  }

  void clear(uint32_t region, size_t bytes) { std::memset(mine(region), 0, bytes); }

  // As the product's host (moe_nvlink_plugin/exchange/survivors.py).
  void begin_anew() {
    meet(1);
    clear(regions.control.dispatch_cells, kRanks * 8);
    clear(regions.control.combine_cells, kRanks * 8);
    clear(regions.control.pulled_cells, kRanks * 8);
    clear(regions.control.recv_counts, kRanks * 4);
    clear(regions.control.rows_from, kRanks * 4);
    clear(regions.control.send_counters, kRanks * 4);
    clear(regions.control.local, sizeof(moe_nvlink::LocalControl));
    clear(regions.staging, kStagingBytes);
    for (const uint32_t each : regions.back_staging) clear(each, kBackStagingBytes);
    meet(2);
  }

  void rounds(Random& random, int first, int end) {
    for (int round = first; round < end; ++round) {
      const int drawn = static_cast<int>(random.below(kCapacity + 1));
      const int count = round == kRounds - 1 ? kCapacity : drawn;  // much to read for who leaves
      make_tokens(random, round, count);
      dispatch(round, count);
      run_experts(round);
      combine(round, count);
      check_output(count, round);
    }
    check_end(end == kRounds + 2 * kRoundsWithout ? kRoundsWithout : end);
  }

  void main() {
    Random random{static_cast<uint32_t>(rank) * 2654435761u + 17u};
    rounds(random, 0, kRounds);
    if (rank == kRanks - 1) {
      // It tells the others nothing (P14). Of threads that have ended the sanitizer reports no race.
      while (gone_on.load(std::memory_order_relaxed) < kRanks - 1) std::this_thread::yield();
      return;
    }
    rounds(random, kRounds, kRounds + kRoundsWithout);
    gone_on.fetch_add(1, std::memory_order_relaxed);
    begin_anew();
    rounds(random, kRounds + kRoundsWithout, kRounds + 2 * kRoundsWithout);
  }

  void check_end(int epoch) const {
    const auto* local =
        reinterpret_cast<const moe_nvlink::LocalControl*>(mine(regions.control.local));
    expect(local->fault == 0, "fault word", rank, epoch);
    expect(local->epoch == static_cast<uint32_t>(epoch), "epoch", rank, epoch);
    expect(local->combine_arrivals == 0, "arrivals of combine", rank, epoch);
    expect(local->rows_taken == 0, "rows taken in combine", rank, epoch);
  }
};

}  // namespace

int main(int count, char** arguments) {
#ifdef MOE_NVLINK_HAS_SEEDED_BUGS
  if (count == 2) moe_nvlink::seeded_bug = std::atoi(arguments[1]);
#else
  (void)count, (void)arguments;
#endif
  const Regions regions;
  const size_t stride = regions.layout.bytes();
  char* window = static_cast<char*>(std::aligned_alloc(kRegionAlignment, stride * kRanks));
  std::memset(window, 0, stride * kRanks);
  for (int rank = 0; rank < kRanks; ++rank) regions.layout.poison_gaps(window + rank * stride);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { Rank{rank, regions, window}.main(); });
  }
  for (std::thread& thread : threads) thread.join();
  std::free(window);
  if (mistakes == 0) std::puts("all rounds verified");
  return mistakes == 0 ? 0 : 1;
}
