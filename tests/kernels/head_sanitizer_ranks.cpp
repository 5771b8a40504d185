// The shared LM head of several ranks as threads of one program, for the sanitizers to look at, as
// sanitizer_ranks.cpp. kernel_text.h has the kernels with bugs that are asleep: the program's argument
// is the number of the one to wake, or 0.
//
// Between the ranks nothing orders anything but the protocol itself. Every rank checks the rows it
// gathered, the ids and the logits it got by their content alone.
#include "kernel_text.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace {

using moe_nvlink::kRegionAlignment;

constexpr int kRanks = 3;
constexpr int kBlocks = 3;
constexpr int kShard = 16;
constexpr int kHidden = 37;  // fp32: 148 bytes, one wide vector and a rest
constexpr int kCapacity = 6;
constexpr int kMostVocab = 40;
constexpr int kRounds = 60;
constexpr int kSlots = kRanks * kCapacity;

std::atomic<int> mistakes{0};

void expect(bool good, const char* what, int rank, int round) {
  if (!good && mistakes.fetch_add(1) < 5) {
    std::fprintf(stderr, "WRONG VALUE: %s on rank %d in round %d\n", what, rank, round);
  }
}

// Regions one behind the other, each followed by bytes that nobody may touch.
struct Regions {
  moe_nvlink::ControlRegions control{};
  uint32_t rows, pairs, logits;
  size_t bytes = 0;

  explicit Regions(char* window) : base(window) {
    control.dispatch_cells = add(kRanks * 8);
    control.combine_cells = add(kRanks * 8);
    control.recv_counts = add(kRanks * 4);
    control.local = add(sizeof(moe_nvlink::LocalControl));
    control.counters = add(sizeof(moe_nvlink::ExchangeCounters));
    rows = add(kSlots * kHidden * 4);
    pairs = add(kSlots * moe_nvlink::kMaxHeadSplits * 8);
    logits = add(kSlots * kShard * 4);
  }

  char* base;
  static constexpr size_t kStride = 32768;

  uint32_t add(size_t size) {
    const size_t offset = bytes;
    bytes = (offset + size + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment +
            kRegionAlignment;
    if (bytes > kStride) std::abort();
    for (int rank = 0; rank < kRanks; ++rank) {
      ASAN_POISON_MEMORY_REGION(base + rank * kStride + offset + size, bytes - offset - size);
    }
    return static_cast<uint32_t>(offset / kRegionAlignment);
  }
};

uint32_t mixed(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t state = ((a * 131 + b) * 131 + c) * 131 + d + 1;
  for (int i = 0; i < 3; ++i) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
  }
  return state;
}

// What every rank knows of a round. Every fourth round leaves the last rank without vocabulary.
int vocab_of(int round) {
  return round % 4 == 3 ? 20 : kMostVocab;
}
int bound_of(int round) {
  return 1 + round % kCapacity;
}
int count_of(int round, int rank) {
  return static_cast<int>(mixed(round, rank, 1, 0) % (bound_of(round) + 1));
}
float hidden_value(int round, int rank, int row, int element) {
  return static_cast<float>(mixed(round, rank, row, element) % 4096);
}
// With many equal ones, and a NaN now and then.
float logit_value(int round, int rank, int row, int token) {
  const uint32_t bits = mixed(round + 1000, rank, row, token);
  if (bits % 97 == 0) return __builtin_nanf("");
  return static_cast<float>(bits % 9) - 4.0f;
}
moe_nvlink::HeadFunction function_of(int round) {
  return {round % 5 == 2 ? 3.0f : 0.0f, round % 3 == 1 ? -0.5f : 1.0f};
}

struct Rank {
  int rank;
  const Regions& regions;
  moe_nvlink::host::Grid grid{kBlocks};

  template <class T>
  T* mine(uint32_t region) const {
    return reinterpret_cast<T*>(regions.base + rank * Regions::kStride +
                                static_cast<size_t>(region) * kRegionAlignment);
  }

  int first_token() const { return rank * kShard; }
  int width(int round) const {
    const int left = vocab_of(round) - first_token();
    return left < 0 ? 0 : left < kShard ? left : kShard;
  }

  moe_nvlink::HeadArgs arguments(int round) const {
    moe_nvlink::HeadArgs args{};
    args.window_base = reinterpret_cast<uint64_t>(regions.base);
    args.rank_stride = Regions::kStride;
    args.timeout_ns = 20ull * 1000000000ull;
    args.geometry = {kRanks,
                     rank,
                     vocab_of(round),
                     kHidden,
                     kShard,
                     kCapacity,
                     moe_nvlink::kElementFp32,
                     bound_of(round),
                     count_of(round, rank)};
    args.control = regions.control;
    args.rows_region = regions.rows;
    args.pairs_region = regions.pairs;
    args.logits_region = regions.logits;
    args.is_compact = static_cast<uint32_t>(round / 2 % 2);
    args.row_splits = 1 + static_cast<uint32_t>(rank + round) % moe_nvlink::kMaxHeadSplits;
    args.soft_cap = function_of(round).soft_cap;
    args.scale = function_of(round).scale;
    args.logits = reinterpret_cast<uint64_t>(mine<float>(regions.logits));
    return args;
  }

  // Checks the gathered rows; writes their logits, and in slots that nobody filled what would win.
  void multiply(int round, bool compact) const {
    const int32_t* counts = mine<int32_t>(regions.control.recv_counts);
    const float* rows = mine<float>(regions.rows);
    float* logits = mine<float>(regions.logits);
    for (int source = 0; source < kRanks; ++source) {
      expect(counts[source] == count_of(round, source), "count", rank, round);
      for (int row = 0; row < bound_of(round); ++row) {
        const bool filled = row < count_of(round, source);
        if (!filled && compact) continue;
        const int slot = source * bound_of(round) + row;
        for (int i = 0; filled && i < kHidden; ++i) {
          expect(rows[slot * kHidden + i] == hidden_value(round, source, row, i), "row", rank,
                 round);
        }
        for (int i = 0; i < width(round); ++i) {
          *logits++ = filled ? logit_value(round, source, row, first_token() + i) : 1e30f;
        }
      }
    }
  }

  int expected_id(int round, int row) const {
    int best = 0;
    float most = 0;
    for (int token = 0; token < vocab_of(round); ++token) {
      const float value = function_of(round)(logit_value(round, rank, row, token));
      const bool larger = (value != value && most == most) || value > most;
      if (token == 0 || larger) {
        best = token;
        most = value;
      }
    }
    return best;
  }

  void main() {
    for (int round = 0; round < kRounds; ++round) {
      const int count = count_of(round, rank);
      std::vector<float> hidden(count * kHidden);
      for (int i = 0; i < count * kHidden; ++i) {
        hidden[i] = hidden_value(round, rank, i / kHidden, i % kHidden);
      }
      auto args = arguments(round);
      args.hidden = reinterpret_cast<uint64_t>(hidden.data());
      moe_nvlink_head_gather(&args, &grid);
      multiply(round, args.is_compact != 0);
      std::vector<int64_t> ids(count);
      args.output = reinterpret_cast<uint64_t>(ids.data());
      moe_nvlink_head_argmax(&args, &grid);
      for (int row = 0; row < count; ++row) {
        expect(ids[row] == expected_id(round, row), "id", rank, round);
      }
      if ((rank + round) % 3 != 0) collect(round, args);
    }
    const auto* local = mine<moe_nvlink::LocalControl>(regions.control.local);
    expect(local->fault == 0, "fault word", rank, kRounds);
    expect(local->epoch == kRounds, "epoch", rank, kRounds);
    expect(local->arrivals == 0 && local->combine_arrivals == 0, "arrivals", rank, kRounds);
  }

  void collect(int round, moe_nvlink::HeadArgs& args) {
    const int vocab = vocab_of(round);
    std::vector<float> logits(count_of(round, rank) * vocab);
    args.output = reinterpret_cast<uint64_t>(logits.data());
    moe_nvlink_head_collect(&args, &grid);
    for (size_t i = 0; i < logits.size(); ++i) {
      const int token = static_cast<int>(i) % vocab;
      const float value = logit_value(round, rank, static_cast<int>(i) / vocab, token);
      expect(logits[i] == value || (logits[i] != logits[i] && value != value), "logit", rank,
             round);
    }
  }
};

}  // namespace

int main(int, char** arguments) {
  moe_nvlink::seeded_bug = std::atoi(arguments[1]);
  char* window =
      static_cast<char*>(std::aligned_alloc(kRegionAlignment, Regions::kStride * kRanks));
  std::memset(window, 0, Regions::kStride * kRanks);
  const Regions regions(window);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] { Rank{rank, regions}.main(); });
  }
  for (std::thread& thread : threads) thread.join();
  std::free(window);
  if (mistakes == 0) std::puts("all rounds verified");
  return mistakes == 0 ? 0 : 1;
}
