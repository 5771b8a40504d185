// The scales of the received rows, copied into the layout that the experts' kernels read.
//
// Scales travel row by row, because a scattered scale would be a packet of its own on NVLink: in
// nvfp4 the scales of a row would take four times the packets of the row. The finishers of dispatch
// move them when all rows have arrived, inside this GPU, where the experts would otherwise need a
// launch for it.
#pragma once

#include "../include/moe_nvlink/args.h"
#include "../include/moe_nvlink/copy.h"
#include "../include/moe_nvlink/platform.h"
#include "../include/moe_nvlink/workspace.h"
#include "dispatch_shared.h"

namespace moe_nvlink {

// Rows of one piece of the work. Threads that are neighbours take neighbouring rows, so their
// stores fall into the same lines: in both layouts, the same scale of 32 rows is 128 or 512 bytes.
constexpr int kLaidOutRows = 32;

// One word of a row's scales: four scales of one byte, or one fp32. Zeros fill up the last word.
HD uint32_t scales_word(const char* row, int word, int row_bytes) {
  const int first = word * 4;
  if (row_bytes % 4 == 0) return load_word(reinterpret_cast<const uint32_t*>(row + first));
  const int present = row_bytes - first < 4 ? row_bytes - first : 4;
  uint32_t bits = 0;
  MOE_NVLINK_ROLLED
  for (int i = 0; i < present; ++i) {
    const uint8_t scale = load_word(reinterpret_cast<const uint8_t*>(row + first + i));
    bits |= static_cast<uint32_t>(scale) << 8 * i;
  }
  return bits;
}

// Where the layout has words of a slot's scales: the first of them, and how far apart they are.
// Interleaved: tiles of 128 rows x 4 scales, one tile of 128 words after the other along a row; in a
// tile, 4 neighbouring words are those of rows r, r + 32, r + 64 and r + 96.
struct ScalesPlace {
  int64_t first;
  int64_t step;
  HD ScalesPlace(bool is_interleaved, uint32_t slot, uint32_t num_slots, uint32_t num_words)
      : first(is_interleaved ? static_cast<int64_t>(slot / 128) * num_words * 128 + slot % 32 * 4 +
                                   slot % 128 / 32
                             : slot),
        step(is_interleaved ? 128 : num_slots) {}
};

// Moves four words of a slot's scales, from `word` on.
HD void lay_out_words(const DispatchArgs& args, uint32_t slot, int word) {
  const Payload& payload = args.payloads[kFirstCallerPayload + 1];
  const int row_bytes = static_cast<int>(payload.row_bytes);
  const int num_words = (row_bytes + 3) / 4;
  const int rank = args.geometry.ep_rank;
  const char* row = region_of(args, rank, payload.region) + static_cast<int64_t>(slot) * row_bytes;
  const uint32_t num_slots = static_cast<uint32_t>(args.geometry.ep_size) *
                             static_cast<uint32_t>(args.geometry.max_tokens_per_rank);
  const ScalesPlace place(args.scales_layout == kScalesLayoutInterleaved, slot, num_slots,
                          static_cast<uint32_t>(num_words));
  uint32_t* target = reinterpret_cast<uint32_t*>(region_of(args, rank, args.laid_out_region)) +
                     place.first + word * place.step;
  if (row_bytes % 16 == 0) {
    Vector<16> loaded;
    load_vector(loaded, row + word * 4);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < 4; ++i) {
      store_word(target + i * place.step, reinterpret_cast<const uint32_t*>(&loaded)[i]);
    }
  } else {
    const int end = word + 4 < num_words ? word + 4 : num_words;
    MOE_NVLINK_ROLLED
    for (int one = word; one < end; ++one, target += place.step) {
      store_word(target, scales_word(row, one, row_bytes));
    }
  }
}

// This finisher's share. shared.counts says which rows have arrived: the caller's barrier after the
// wait makes them visible to all threads of the CTA (P1). Scales of empty slots stay as they are.
HD void lay_out_scales(const DispatchArgs& args, const Cta& cta, int num_finishers,
                       const DispatchShared& shared) {
  const Geometry& geometry = args.geometry;
  const int num_words =
      (static_cast<int>(args.payloads[kFirstCallerPayload + 1].row_bytes) + 3) / 4;
  const int lanes = cta.num_threads < kLaidOutRows ? cta.num_threads : kLaidOutRows;
  const int num_pieces =
      geometry.ep_size * ((geometry.max_tokens_per_rank + kLaidOutRows - 1) / kLaidOutRows);
  MOE_NVLINK_ROLLED
  for (int piece = shared.finisher; piece < num_pieces; piece += num_finishers) {
    const int source = piece % geometry.ep_size;
    const int first = piece / geometry.ep_size * kLaidOutRows;
    const int count = shared.counts[source];
    const int end = first + kLaidOutRows < count ? first + kLaidOutRows : count;
    const int slice = source * geometry.max_tokens_per_rank;
    MOE_NVLINK_ROLLED
    for (int word = cta.thread / lanes * 4; word < num_words; word += cta.num_threads / lanes * 4) {
      MOE_NVLINK_ROLLED
      for (int row = first + cta.thread % lanes; row < end; row += lanes) {
        lay_out_words(args, static_cast<uint32_t>(slice + row), word);
      }
    }
  }
}

}  // namespace moe_nvlink
