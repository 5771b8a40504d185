// Rows as opaque bytes: load once, store to every destination.
#pragma once

#include "platform.h"

namespace moe_nvlink {

template <int Bytes>
struct alignas(Bytes < 16 ? Bytes : 16) Vector {
  unsigned char bytes[Bytes];
};

// Width in bytes that every row of a payload can be moved with: 16 or a smaller power of two that
// divides address and row size (device), or simply kVectorBytes (host).
HD int vector_bytes_for(uint64_t address, uint64_t row_bytes) {
  if (!kAlignedVectorsOnly) return kVectorBytes;
  const uint64_t bits = address | row_bytes | kVectorBytes;
  return static_cast<int>(bits & (~bits + 1));
}

// Global-space forms: LDG and STG, not the generic LD and ST. Volatile, so that they stay after the
// wait or the barrier that they are written after.
#define MOE_NVLINK_DEVICE_VECTOR(BYTES, TYPE, PTX, CONSTRAINT)         \
  HD void load_vector(Vector<BYTES>& vector, const char* source) {     \
    TYPE value;                                                        \
    asm volatile("ld.global." PTX " %0, [%1];"                         \
                 : "=" CONSTRAINT(value)                               \
                 : "l"(__cvta_generic_to_global(source))               \
                 : "memory");                                          \
    *reinterpret_cast<TYPE*>(&vector) = value;                         \
  }                                                                    \
  HD void store_vector(char* target, const Vector<BYTES>& vector) {    \
    asm volatile("st.global." PTX " [%0], %1;"                         \
                 :                                                     \
                 : "l"(__cvta_generic_to_global(target)),              \
                   CONSTRAINT(*reinterpret_cast<const TYPE*>(&vector)) \
                 : "memory");                                          \
  }

MOE_NVLINK_DEVICE_ONLY(
    HD void load_vector(Vector<16>& vector, const char* source) {
      uint32_t* words = reinterpret_cast<uint32_t*>(&vector);
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(__cvta_generic_to_global(source))
                   : "memory");
    }

    HD void store_vector(char* target, const Vector<16>& vector) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(&vector);
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(__cvta_generic_to_global(target)), "r"(words[0]), "r"(words[1]),
                     "r"(words[2]), "r"(words[3])
                   : "memory");
    }

    MOE_NVLINK_DEVICE_VECTOR(8, uint64_t, "u64", "l")
        MOE_NVLINK_DEVICE_VECTOR(4, uint32_t, "u32", "r")
            MOE_NVLINK_DEVICE_VECTOR(2, uint16_t, "u16", "h")

    // PTX has no 8-bit register class: a byte travels in a 32-bit one.
    HD void load_vector(Vector<1>& vector, const char* source) {
      uint32_t value;
      asm volatile("ld.global.u8 %0, [%1];"
                   : "=r"(value)
                   : "l"(__cvta_generic_to_global(source))
                   : "memory");
      vector.bytes[0] = static_cast<unsigned char>(value);
    }

    HD void store_vector(char* target, const Vector<1>& vector) {
      asm volatile("st.global.u8 [%0], %1;"
                   :
                   : "l"(__cvta_generic_to_global(target)),
                     "r"(static_cast<uint32_t>(vector.bytes[0]))
                   : "memory");
    })

MOE_NVLINK_HOST_ONLY(
    template <int Bytes> HD void load_vector(Vector<Bytes>& vector, const char* source) {
      std::memcpy(&vector, source, Bytes);
    }

    template <int Bytes>
    HD void store_vector(char* target, const Vector<Bytes>& vector) {
      std::memcpy(target, &vector, Bytes);
    })

// One word of global memory. A plain `*address` of a computed address would be a generic access on
// the GPU, which finds out at run time which memory it means.
template <class Word>
HD Word load_word(const Word* address) {
  Vector<sizeof(Word)> vector;
  load_vector(vector, reinterpret_cast<const char*>(address));
  return *reinterpret_cast<const Word*>(&vector);
}

template <class Word>
HD void store_word(Word* address, Word value) {
  store_vector(reinterpret_cast<char*>(address),
               *reinterpret_cast<const Vector<sizeof(Word)>*>(&value));
}

// Threads that have a part of a row to move: one per vector, or per byte of the rest where that is
// more (host only: a device width divides the row). Shifts, for the GPU has no division.
HD int lanes_for(int row_bytes, int vector_bytes) {
  int whole = row_bytes;
  MOE_NVLINK_ROLLED
  for (int width = vector_bytes; width > 1; width >>= 1) whole >>= 1;
  const int rest = row_bytes & (vector_bytes - 1);
  return whole > rest ? whole : rest;
}

// Whether `count` rows from this address on are streamed (platform_host.h): they are too many bytes
// for a cache, and each row lies on whole registers.
HD bool are_streamed(uint64_t address, uint64_t row_bytes, int count) {
  constexpr uint64_t kRegisterBytes = 4 * kRegisterFloats;
  return kStreams && kVectorBytes % kRegisterBytes == 0 &&
         static_cast<uint64_t>(count) * row_bytes > kStreamedBytes &&
         (address | row_bytes) % kRegisterBytes == 0;
}

template <bool Streams, int Bytes>
HD void store_or_stream(char* target, const Vector<Bytes>& vector) {
  if constexpr (Streams) {  // on the host only
    constexpr int kRegisterBytes = 4 * kRegisterFloats;
    for (int i = 0; i + kRegisterBytes <= Bytes; i += kRegisterBytes) {
      MOE_NVLINK_HOST_ONLY(BitRegister part; std::memcpy(&part, vector.bytes + i, kRegisterBytes);
                           stream_register(target + i, part);)
    }
  } else {
    store_vector(target, vector);
  }
}

// A part of a row, streamed if the row is and the part fills registers. streamed: of are_streamed().
template <int Bytes>
HD void store_part(char* target, const Vector<Bytes>& vector, bool streamed) {
  constexpr bool kCanStream = kStreams && Bytes % (4 * kRegisterFloats) == 0;
  if (kCanStream && streamed) return store_or_stream<kCanStream>(target, vector);
  store_vector(target, vector);
}

// Moves bytes [first, last) of one row, a multiple of Bytes, to each target that is not null. This
// thread moves the vectors lane, lane + num_threads, ...
template <int Bytes, int InFlight, bool Streams = false>
HD void put_range(const Cta& cta, int lane, const char* source, char* const* targets,
                  int num_targets, int first, int last) {
  const int step = cta.num_threads * Bytes;
  for (int offset = first + lane * Bytes; offset < last; offset += InFlight * step) {
    // All loads before the first store. After the end of the row the first load is repeated,
    // because a branch would make the loads wait for one another.
    Vector<Bytes> vectors[InFlight];
    MOE_NVLINK_UNROLL
    for (int i = 0; i < InFlight; ++i) {
      const int place = offset + i * step;
      load_vector(vectors[i], source + (place < last ? place : offset));
    }
    MOE_NVLINK_UNROLL
    for (int i = 0; i < InFlight; ++i) {
      const int place = offset + i * step;
      if (place >= last) break;
      MOE_NVLINK_UNROLL
      for (int target = 0; target < num_targets; ++target) {
        if (targets[target] != nullptr) {
          store_or_stream<Streams>(targets[target] + place, vectors[i]);
        }
      }
    }
  }
}

// Moves one row of any size to each target that is not null. All threads of the CTA; `lane` numbers
// them from 0 to num_threads - 1 in any order. vector_bytes: of vector_bytes_for(). streamed: of
// are_streamed() for the targets.
HD void put_row(const Cta& cta, int lane, const char* source, char* const* targets, int num_targets,
                int row_bytes, int vector_bytes, bool streamed = false) {
  const int whole = row_bytes & ~(vector_bytes - 1);
  switch (vector_bytes) {
    case kVectorBytes:
      if (kStreams && streamed) {
        put_range<kVectorBytes, 1, kStreams>(cta, lane, source, targets, num_targets, 0, whole);
      } else if (whole > cta.num_threads * kVectorBytes) {
        put_range<kVectorBytes, kVectorsInFlight>(cta, lane, source, targets, num_targets, 0,
                                                  whole);
      } else {
        put_range<kVectorBytes, 1>(cta, lane, source, targets, num_targets, 0, whole);
      }
      break;
    case 8:
      put_range<8, 1>(cta, lane, source, targets, num_targets, 0, whole);
      break;
    case 4:
      put_range<4, 1>(cta, lane, source, targets, num_targets, 0, whole);
      break;
    case 2:
      put_range<2, 1>(cta, lane, source, targets, num_targets, 0, whole);
      break;
    default:
      put_range<1, 1>(cta, lane, source, targets, num_targets, 0, whole);
  }
  if constexpr (!kAlignedVectorsOnly) {  // a device width divides the row
    put_range<1, 1>(cta, lane, source, targets, num_targets, whole, row_bytes);
  }
}

// Writes `value` into words [first, last). All threads of the CTA. words[0] lies on a vector's
// boundary.
HD void fill_range(const Cta& cta, int32_t* words, int64_t first, int64_t last, int32_t value) {
  constexpr int64_t kWide = kVectorBytes / 4;
  const int64_t first_vector = (first + kWide - 1) / kWide;
  const int64_t last_vector = last / kWide;
  Vector<kVectorBytes> values;
  MOE_NVLINK_UNROLL
  for (int i = 0; i < kWide; ++i) reinterpret_cast<int32_t*>(&values)[i] = value;
  for (int64_t i = first_vector + cta.thread; i < last_vector; i += cta.num_threads) {
    store_vector(reinterpret_cast<char*>(words + i * kWide), values);
  }
  // The words before the first whole vector and after the last one; all words of a short range.
  const int64_t head_end = first_vector * kWide < last ? first_vector * kWide : last;
  const int64_t tail_start = last_vector * kWide > head_end ? last_vector * kWide : head_end;
  MOE_NVLINK_ROLLED
  for (int64_t i = first + cta.thread; i < head_end; i += cta.num_threads)
    store_word(words + i, value);
  MOE_NVLINK_ROLLED
  for (int64_t i = tail_start + cta.thread; i < last; i += cta.num_threads) {
    store_word(words + i, value);
  }
}

}  // namespace moe_nvlink
