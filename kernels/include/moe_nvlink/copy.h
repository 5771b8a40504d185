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

// Global-space forms (LDG/STG rather than the generic LD/ST), volatile so that they stay behind the
// wait or the barrier they are written behind.
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

// Moves [first, last) of one row, a multiple of Bytes long, to each target that is not null.
template <int Bytes>
HD void put_range(const Cta& cta, const char* source, char* const* targets, int num_targets,
                  int first, int last) {
  for (int offset = first + cta.thread * Bytes; offset < last; offset += cta.num_threads * Bytes) {
    Vector<Bytes> vector;
    load_vector(vector, source + offset);
    MOE_NVLINK_UNROLL
    for (int i = 0; i < num_targets; ++i) {
      if (targets[i] != nullptr) store_vector(targets[i] + offset, vector);
    }
  }
}

// All threads of the CTA move one row of any size to each target that is not null. `vector_bytes`
// is what vector_bytes_for() said for source and targets.
HD void put_row(const Cta& cta, const char* source, char* const* targets, int num_targets,
                int row_bytes, int vector_bytes) {
  const int whole = row_bytes - row_bytes % vector_bytes;
  switch (vector_bytes) {
    case kVectorBytes:
      put_range<kVectorBytes>(cta, source, targets, num_targets, 0, whole);
      break;
    case 8:
      put_range<8>(cta, source, targets, num_targets, 0, whole);
      break;
    case 4:
      put_range<4>(cta, source, targets, num_targets, 0, whole);
      break;
    case 2:
      put_range<2>(cta, source, targets, num_targets, 0, whole);
      break;
    default:
      put_range<1>(cta, source, targets, num_targets, 0, whole);
  }
  // Only on the host is there a rest: a device width divides the row.
  put_range<1>(cta, source, targets, num_targets, whole, row_bytes);
}

}  // namespace moe_nvlink
