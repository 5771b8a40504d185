// Packed rows: the payload rows of a token one after another, each from a multiple of 16 bytes on.
// They lie in shared memory in parts, between the payloads' regions and the units that travel. Every
// row is whole words of 4 bytes: the host sends others by the kernels for large batches.
#pragma once

#include "../../include/moe_nvlink/args.h"
#include "../../include/moe_nvlink/copy.h"
#include "../../include/moe_nvlink/platform.h"
#include "../../include/moe_nvlink/workspace.h"

namespace moe_nvlink {

constexpr int kPieceBytes = 16;

// 16 bytes of a packed row. A class of words, so that they stay in registers.
struct alignas(kPieceBytes) Piece {
  uint32_t words[4];
};

HD Piece& piece_in(char* staged, int piece) {
  return reinterpret_cast<Piece*>(staged)[piece];
}
HD const Piece& piece_in(const char* staged, int piece) {
  return reinterpret_cast<const Piece*>(staged)[piece];
}

// What 16 bytes of a packed row belong to.
struct PieceOrigin {
  int payload;
  int offset;  // of the first byte in the payload's row
  int bytes;   // 4, 8, 12 or 16; fewer than 16 at the end of the row
};

HD PieceOrigin piece_origin(const DispatchArgs& args, int packed_offset) {
  int payload = 0;
  MOE_NVLINK_ROLLED
  for (; payload + 1 < static_cast<int>(args.num_payloads); ++payload) {
    if (static_cast<int>(args.packed_offsets[payload + 1]) > packed_offset) break;
  }
  const int offset = packed_offset - static_cast<int>(args.packed_offsets[payload]);
  const int left = static_cast<int>(args.payloads[payload].row_bytes) - offset;
  return PieceOrigin{payload, offset, left < kPieceBytes ? left : kPieceBytes};
}

// Whether the pieces of a payload's rows from `address` on are whole vectors.
HD bool is_wide(uint64_t address, const PieceOrigin& origin, uint32_t row_bytes) {
  if (!kAlignedVectorsOnly) return origin.bytes == kPieceBytes;
  return vector_bytes_for(address, row_bytes) == kPieceBytes;
}

// Loads a token's piece from its payload's source; zeros follow after the end of the row.
HD Piece load_piece(const DispatchArgs& args, const PieceOrigin& origin, int token) {
  const Payload& payload = args.payloads[origin.payload];
  const uint64_t source = payload.source + static_cast<uint64_t>(token) * payload.row_bytes +
                          static_cast<uint64_t>(origin.offset);
  Piece piece = {};
  if (is_wide(payload.source, origin, payload.row_bytes)) {
    load_vector(*reinterpret_cast<Vector<kPieceBytes>*>(&piece),
                reinterpret_cast<const char*>(source));
    return piece;
  }
  // The words in which the piece lies, one more if the source begins within a word. A word that has a
  // byte of the row is memory.
  const int skew = static_cast<int>(source % 4);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(source - source % 4);
  uint32_t loaded[5];
  MOE_NVLINK_UNROLL
  for (int i = 0; i < 5; ++i) loaded[i] = 4 * i < skew + origin.bytes ? load_word(words + i) : 0;
  MOE_NVLINK_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint64_t pair = static_cast<uint64_t>(loaded[i + 1]) << 32 | loaded[i];
    if (4 * i < origin.bytes) piece.words[i] = static_cast<uint32_t>(pair >> 8 * skew);
  }
  return piece;
}

// Where a piece of received rows goes. A region lies on a vector's boundary.
struct PieceTarget {
  PieceOrigin origin;
  bool wide;
  char* first;         // of slot 0
  uint32_t row_bytes;  // of the payload

  HD PieceTarget(const DispatchArgs& args, int packed_offset)
      : origin(piece_origin(args, packed_offset)) {
    const Payload& payload = args.payloads[origin.payload];
    row_bytes = static_cast<uint32_t>(payload.row_bytes);
    first = region_of(args, args.geometry.ep_rank, payload.region) + origin.offset;
    wide = is_wide(0, origin, payload.row_bytes);
  }

  HD void store(uint32_t slot, const Piece& piece) const {
    char* target = first + static_cast<uint64_t>(slot) * row_bytes;
    if (wide) return store_vector(target, *reinterpret_cast<const Vector<kPieceBytes>*>(&piece));
    MOE_NVLINK_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (4 * i < origin.bytes) {
        store_word(reinterpret_cast<uint32_t*>(target) + i, piece.words[i]);
      }
    }
  }
};

}  // namespace moe_nvlink
