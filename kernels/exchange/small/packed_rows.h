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

// Width of the accesses to the pieces of a payload's rows from `address` on.
HD int piece_width(uint64_t address, const PieceOrigin& origin, uint32_t row_bytes) {
  if (!kAlignedVectorsOnly) return origin.bytes == kPieceBytes ? kPieceBytes : 1;
  return vector_bytes_for(address, row_bytes);
}

// Loads a token's piece from its payload's source; zeros follow after the end of the row.
HD Piece load_piece(const DispatchArgs& args, const PieceOrigin& origin, int token) {
  const Payload& payload = args.payloads[origin.payload];
  const char* source = reinterpret_cast<const char*>(payload.source) +
                       static_cast<uint64_t>(token) * payload.row_bytes + origin.offset;
  const int width = piece_width(payload.source, origin, payload.row_bytes);
  Piece piece;
  if (width == kPieceBytes) {
    load_vector(*reinterpret_cast<Vector<kPieceBytes>*>(&piece), source);
  } else if (width >= 4) {
    MOE_NVLINK_UNROLL
    for (int i = 0; i < 4; ++i) {
      piece.words[i] =
          4 * i < origin.bytes ? load_word(reinterpret_cast<const uint32_t*>(source) + i) : 0;
    }
  } else {  // the source begins within a word; unrolled, or ptxas takes more registers for all rows
    MOE_NVLINK_UNROLL
    for (int i = 0; i < 4; ++i) {
      piece.words[i] = 0;
      MOE_NVLINK_UNROLL
      for (int byte = 0; byte < 4; ++byte) {
        if (4 * i + byte >= origin.bytes) continue;
        const uint8_t value = load_word(reinterpret_cast<const uint8_t*>(source) + 4 * i + byte);
        piece.words[i] |= static_cast<uint32_t>(value) << 8 * byte;
      }
    }
  }
  return piece;
}

// Where a piece of received rows goes.
struct PieceTarget {
  PieceOrigin origin;
  bool wide;           // whole vectors; else words
  char* first;         // of slot 0
  uint32_t row_bytes;  // of the payload

  HD PieceTarget(const DispatchArgs& args, int packed_offset)
      : origin(piece_origin(args, packed_offset)) {
    const Payload& payload = args.payloads[origin.payload];
    row_bytes = static_cast<uint32_t>(payload.row_bytes);
    first = region_of(args, args.geometry.ep_rank, payload.region) + origin.offset;
    // A region lies on a vector's boundary.
    wide = piece_width(0, origin, payload.row_bytes) == kPieceBytes;
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
