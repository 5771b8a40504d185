// Limits and codes that kernels and Python share. Python reads the constants and the codes from
// this file (moe_nvlink_plugin/jit/header.py). config.py and layout.py repeat some limits, because
// they check before anything is compiled; a test compares the two.
#pragma once

namespace moe_nvlink {

constexpr int kMaxRanks = 128;         // ranks of one exchange; an NVL72 domain has 72 GPUs
constexpr int kRankMaskWords = 2;      // words of 64 bits that have a bit for each rank
constexpr int kMeetingWords = 3;       // words of an entry of a meeting: mask, number
constexpr int kMaxTopK = 32;           // experts a token may be routed to
constexpr int kMaxPayloads = 10;       // expert ids, router weights and up to 8 rows of the caller
constexpr int kRegionAlignment = 256;  // bytes; regions of the workspace start on multiples of it
constexpr int kMaxHeadSplits = 8;      // CTAs that share one row of logits
constexpr int kMaxFinishers = 32;      // CTAs of dispatch that share the work at its end

// Small batches (units.h): the most tokens of a rank; the units of a row that one CTA takes at a time;
// and the most bytes of a packed row that a CTA quantises.
constexpr int kMaxSmallTokens = 64;
constexpr int kPartUnits = 256;
constexpr int kMaxStagedBytes = 16384;

// Bits of a cell that hold a count of rows, which is at most 2^24 (epoch_flags.h).
constexpr int kCountBits = 25;

// Order of the payloads in DispatchArgs.payloads.
constexpr int kTopkIdsPayload = 0;
constexpr int kTopkWeightsPayload = 1;
constexpr int kFirstCallerPayload = 2;

// The codes below are enums, so that a switch without a case for one of them does not compile
// (-Werror=switch of the host compiler); where they are stored or compared they are ints. Whatever
// else chooses by a code asserts the number of codes: a new code does not compile there either. A
// test compares the numbers with the enums.
constexpr int kNumElements = 3;
constexpr int kNumQuantisers = 7;
constexpr int kNumCombineFormats = 4;
constexpr int kNumReceivedIds = 4;
constexpr int kNumScalesLayouts = 3;

// Element types that combine reduces. Sums are always fp32.
enum ElementCode : int {
  kElementBf16 = 0,
  kElementFp16 = 1,
  kElementFp32 = 2,
};

// What dispatch does with the activations on their way: nothing, or one of the built-in recipes
// (quantisers.h). Rows that the caller has quantised travel as they are.
enum QuantiserCode : int {
  kQuantiserNone = 0,
  kQuantiserFp8Block = 1,
  kQuantiserFp8Token = 2,
  kQuantiserFp8Tensor = 3,
  kQuantiserMxfp8 = 4,
  kQuantiserNvfp4 = 5,
  kQuantiserFp8BlockPow2 = 6,
};

// In what format the experts' rows travel back in combine.
enum CombineCode : int {
  kCombineUnquantised = 0,
  kCombineFp8Block = 1,
  kCombineNvfp4 = 2,
  kCombineFp8Tensor = 3,
};

// What a received row has in the place of its token's expert ids. An absent id is an id whose expert
// is on another rank than the receiving one, or an id that is no expert. An empty slot has absent
// ids only. Unless all ids travel, the weight of an absent id is 0.
enum ReceivedIdsCode : int {
  kReceivedIdsGlobal = 0,     // all ids, as the router made them; no expert: -1
  kReceivedIdsGiven = 1,      // global ids; absent: DispatchArgs.absent_id
  kReceivedIdsElsewhere = 2,  // global ids; absent: the expert after the rank's last, or 0
  kReceivedIdsLocal = 3,      // ids from 0 on at each rank; absent: -1
};

// How the scales of received rows lie (lay_out_scales.h).
enum ScalesLayoutCode : int {
  kScalesLayoutLinear = 0,       // row by row, as they travel
  kScalesLayoutInterleaved = 1,  // scales of one byte, in tiles of 128 rows x 4 scales
  kScalesLayoutColumnMajor = 2,  // fp32 scales, the first of all slots, then the second, ...
};

// Phases that a fault word names.
constexpr int kPhaseDispatch = 1;
constexpr int kPhaseCombine = 2;
constexpr int kPhaseHeadGather = 3;
constexpr int kPhaseHeadArgmax = 4;

// Why a wait ended without what it waited for.
constexpr int kFaultTimeout = 1;   // the peer's cell did not reach the epoch in time
constexpr int kFaultBadCount = 2;  // the peer announced more rows than its slice has slots
constexpr int kFaultGeometry = 3;  // the peer's round has another geometry, or other rows
constexpr int kFaultAhead = 4;     // the peer's cell is of a later round
constexpr int kFaultLeftOut = 5;   // this rank's own mask of active ranks leaves this rank out
constexpr int kFaultRepeated = 6;  // this rank's dispatch before this one has had no combine

// The slot of an expert id without a row of its own: the expert's rank already has the token
// because of an earlier id, or the id is no expert.
constexpr int kNoSlot = -1;

// What a kernel is compiled for: its `Config`, which each translation unit derives from this one
// (moe_nvlink_plugin/jit/source.py). The host's Config changes nothing: a kernel takes every value
// from its arguments, and one shared object serves every geometry. A GPU's Config fixes the values
// that shape the code, so that loops over rows unroll into registers.
struct RuntimeConfig {
  static constexpr int kTopK = 0;
  static constexpr int kElement = -1;
  static constexpr int kTopKBound = kMaxTopK;
  // Compiled to be launched with programmatic dependent launch (dispatch.cu says what it allows).
  static constexpr bool kPdl = false;
  static constexpr int kQuantiser = -1;
  static constexpr int kCombine = -1;
  // Whether counts per expert travel with dispatch: 0, 1, or -1: the arguments say it.
  static constexpr int kExpertCounts = -1;
  // Whether slots follow the order of the tokens (ordered_slots.h): as kExpertCounts.
  static constexpr int kOrderedSlots = -1;
  // Bytes of data of the units that carry rows: 12, or 14, as on the host.
  static constexpr int kUnitDataBytes = 14;
  // Whether combine gets rows by the copies of tma.h: 0, as on the host, or 1.
  static constexpr int kTma = 0;
  // Whether cells are signalled by stores that do not hold their thread (memory_order.h).
  static constexpr bool kAsyncRelease = false;
};

}  // namespace moe_nvlink
